# `make demo` and `make test` work from a fresh clone: they set up what they need, all of it in
# .venv, and nothing in another environment. .venv sees the packages of PYTHON (default: the active
# Python): torch is installed only if PYTHON has none that is 2.11 or newer. make PY=/path/to/python
# takes that Python and its tools as they are, and installs nothing: for machines without an index.

PYTHON ?= $(shell command -v python3 || command -v python)
folder_of = $(shell dirname "$$(command -v "$(1)")")
ifeq ($(origin PY),command line)
SCRIPTS := $(call folder_of,$(PY))
else
PY := $(CURDIR)/.venv/bin/python
SCRIPTS := $(CURDIR)/.venv/bin:$(call folder_of,$(PYTHON))
READY := .venv/ready
endif
override PY := "$(PY)"# there may be spaces in the path
CPP_FILES = $$(find csrc tests -name '*.cpp' -o -name '*.cu*' -o -name '*.h')

# A kernel that spills registers fails the build. A user's own build warns of it.
export FLASH_EXT_STRICT ?= 1
export PATH := $(SCRIPTS):$(PATH)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' Makefile)  # all but files

help:
	@sed -nE 's/^## /make /p; s/^([a-z-]+:).*  ## /make \1 /p' Makefile

# Without an index pip installs no torch, and tells whether a new enough one is there.
.venv/ready: pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "flash_ext needs Python 3.10 or newer; use: make PYTHON=/path/to/python"; exit 1; }
	@echo "making .venv with the tools, and with torch unless $(PYTHON) has it (some minutes)"
	"$(PYTHON)" -m venv .venv
	cd .venv/lib/python*/site-packages && "$(PYTHON)" -c \
	    'import sys; print(*[x for x in sys.path if x.endswith("-packages")], sep="\n")' > shared.pth
	$(PY) -m pip install -q "pip>=25.1"
	$(PY) -m pip install -q --no-index "torch>=2.11" 2> /dev/null || $(PY) -m pip install --group torch
	$(PY) -m pip install -q --group dev
	@touch $@

demo: $(READY)  ## train a small GPT through flash_ext and through standard attention
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(MAKE) FLASH_EXT_STRICT=0 build; fi
	$(PY) examples/train_gpt.py $(ARGS)
test: lint build  ## build, lint and run tests that need no GPU (ARGS=--all-cases: all of them)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(or $(TEST_JOBS),2) -m "not gpu" --quick $(ARGS)

lint: $(READY)  ## formatting, lint, types, words and the layers of csrc/
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	clang-format --dry-run -Werror $(CPP_FILES)
	$(PY) docs/lint_words.py
	$(PY) -m pytest -q --noconftest tests/test_layers.py

format: $(READY)  ## format everything
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	clang-format -i $(CPP_FILES)

build: $(READY)  ## compile the CUDA kernels in place (flash_ext/_C.abi3.so)
	$(PY) setup.py -q build_ext --inplace
gpu-test: build  ## run the GPU tests; writes benchmarks/results/<gpu>/tests.json
	$(PY) tests/gpu_suite.py $(ARGS)
soak: build  ## random problems on the GPU, four minutes of them (SOAK=80: a variant's seconds)
	$(PY) -m pytest tests/test_soak.py --soak $(or $(SOAK),80) -m gpu -s -o faulthandler_timeout=0 $(ARGS)
sanitize: build  ## run the kernels under compute-sanitizer
	PYTHON=$(PY) bash tests/sanitize.sh $(ARGS)

## bench BENCH=compare: one of benchmarks/ (ARGS=--help: how), or memory, train, options, ...
bench: build  ## measure what the documents show (ARGS=--record: into benchmarks/results)
	$(if $(BENCH),$(PY) benchmarks/$(BENCH).py,PYTHON=$(PY) bash benchmarks/everything.sh) $(ARGS)

report: $(READY)  ## put the measured tables and figures into README.md and docs/
	cd benchmarks && $(PY) -m report $(ARGS)
docs: $(READY)  ## the documents and the API, from docstrings, as a site in build/site
	$(PY) -m mkdocs build --strict

DIST ?= dist
sdist: $(READY)  ## only the sdist, with the same bytes on every machine (DIST=dist: where to)
	rm -rf *.egg-info build/sdist $(DIST)/*.tar.gz
	$(PY) setup.py -q sdist -d build/sdist
	cd build/sdist && tar -xzf *.tar.gz && tar -I 'gzip -n' -cf $$(ls *.tar.gz) --sort=name \
	    --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX */
	mkdir -p $(DIST) && mv build/sdist/*.tar.gz $(DIST)

## wheel MACHINE=aarch64: the wheel for another machine, by a cross compiler (docs/install.md)
HERE := $(shell uname -m)
MACHINE ?= $(HERE)
PLATFORM = manylinux_2_28_$(MACHINE)
ifneq ($(MACHINE),$(HERE))
# The CUDA runtime for that machine is from pip, or, with PY, from the toolkit's target.
CROSS = _PYTHON_HOST_PLATFORM=linux-$(MACHINE) CC=$(MACHINE)-linux-gnu-g++ \
    CXX="$(MACHINE)-linux-gnu-g++ -Lbuild/$(MACHINE)/nvidia/cu13/lib"
wheel: $(READY:.venv/ready=build/$(MACHINE))
build/$(MACHINE): $(READY)
	$(PY) -m pip install -q --no-deps --only-binary=:all: --platform manylinux2014_$(MACHINE) \
	    --upgrade --target $@ --group cross
endif
# The same bytes every time: the times in zip files begin in 1980.
wheel: export SOURCE_DATE_EPOCH = 315532800
wheel: $(READY) sdist  ## the wheel and the sdist, checked
	rm -f dist/*$(PLATFORM).whl
	FLASH_EXT_PORTABLE=1 $(CROSS) $(PY) -m build --no-isolation --wheel -C=--build-option=--plat-name=$(PLATFORM)
	$(MAKE) check-wheel

# auditwheel adds the platform that it finds to the name: its --plat knows only this machine's. It
# would also add a library that the platform lacks to the wheel, and check_wheel_contents finds that.
check-wheel: $(READY)  ## only the checks of it
	rm -rf build/audited
	$(PY) -m auditwheel repair --plat auto -w build/audited \
	    --exclude libtorch.so --exclude libtorch_cpu.so dist/*$(PLATFORM).whl
	! ls build/audited | grep -E '_2_(29|[3-9][0-9])_'
	$(PY) -m check_wheel_contents build/audited
	$(PY) -m twine check --strict dist/*.tar.gz dist/*$(PLATFORM).whl
	$(PY) distribution/release.py $(MACHINE)

hub: $(READY)  ## dist/hub, for Hugging Face's kernels, from the wheel
	$(PY) distribution/make_hub.py $(ARGS)
compat: $(READY)  ## the wheel under each torch and Python, its source under each nvcc, by nox
	$(PY) -m nox $(ARGS)
	cd benchmarks && $(PY) -m report

release: lint check-wheel hub  ## the checklist of a release: refuses if something is missing
	$(MAKE) check-wheel MACHINE=aarch64
	@test -z "$$(git status --porcelain)" || { git status --short; echo "not committed"; exit 1; }
	! grep -i '^## .*unreleased' CHANGELOG.md
	cd benchmarks && $(PY) -m report --check
	$(MAKE) sdist DIST=build/again && cmp build/again/*.tar.gz dist/*.tar.gz
	$(PY) distribution/release.py
	$(PY) -m nox -s complete
	cd dist && sha256sum *.whl *.tar.gz > SHA256SUMS
	@echo "ready. Tag the commit, push the tag, and upload dist/*.whl, dist/*.tar.gz and dist/hub."

clean:  ## remove what was built
	rm -rf build dist *.egg-info flash_ext/_C.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
