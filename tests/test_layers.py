"""The layers of csrc/: who may include whom, where torch and where `asm` may appear.

And of flash_ext/: which package may import which, and only one module has private names of torch,
which any release may rename.

`make lint` runs only this file; it needs neither torch nor the binary.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "flash_ext"
TORCH_PRIVATE = "torch_private.py"
LAYERS = {
    "ptx": set(),
    "tile": {"ptx"},
    "problem": {"ptx", "tile"},
    "schedule": {"ptx", "tile", "problem"},
    "plan": {"tile", "problem", "schedule"},
    "kernels/common": {"ptx", "tile", "problem", "schedule", "plan"},
    "instantiate": {
        "kernels/common",
        "kernels/fa1",
        "kernels/fa2",
        "kernels/fa3",
        "kernels/fp8",
        "kernels/short",
    },
    "api": {"tile", "problem", "schedule", "plan"},
}
"""The folders of csrc/, and from which others each may include."""
for folder in ("fa1", "fa2", "fa3", "fp8", "short"):
    LAYERS[f"kernels/{folder}"] = {*LAYERS["kernels/common"], "kernels/common"}
STABLE_HEADERS = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")


def code_of(file: Path) -> str:
    """The text without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", file.read_text(), flags=re.DOTALL)


def violations(csrc: Path) -> Iterator[str]:
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in {".h", ".cuh", ".cu", ".cpp"}:
            continue
        file = path.relative_to(csrc)
        layer = str(file.parent)
        if layer not in LAYERS:
            yield f"{file}: there is no layer {layer}/"
            continue
        code = code_of(path)
        if re.search(r"\b(asm|__asm__)\b", code) and layer != "ptx":
            yield f"{file}: asm belongs in ptx/"
        if re.search(r"\bwindow_(left|right)\b", code) and layer not in {"problem", "api"}:
            yield f"{file}: only problem/ knows what kind of mask there is"
        for name in re.findall(r"#include\s+<([^>]+)>", code):
            if not re.match(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h", name):
                continue
            if layer != "api":
                yield f"{file}: only api/ includes torch, not <{name}>"
            elif not name.startswith(STABLE_HEADERS):
                yield f"{file}: <{name}> is not a header of the stable ABI"
        for name in re.findall(r'#include\s+"([^"]+)"', code):
            included = str(Path(name).parent)
            if not (csrc / name).is_file():
                yield f'{file}: "{name}" is not in csrc/'
            elif included != layer and included not in LAYERS[layer]:
                yield f"{file}: {layer}/ does not include {included}/"


def test_csrc_keeps_its_layers() -> None:
    assert list(violations(CSRC)) == []


@pytest.mark.parametrize(
    ("file", "code", "complaint"),
    [
        ("tile/gemm.cuh", 'asm volatile("bar.sync 0;");', "asm belongs in ptx/"),
        ("plan/cost.h", "bool x = params.window_right < 1;", "what kind of mask there is"),
        ("plan/tuning.h", "#include <torch/headeronly/macros/Macros.h>", "includes torch"),
        ("api/check.h", "#include <ATen/ATen.h>", "not a header of the stable ABI"),
        ("ptx/mma.cuh", '#include "tile/swizzle.cuh"', "ptx/ does not include tile/"),
        ("plan/tuning.h", '#include "kernels/fa1/forward.cuh"', "plan/ does not include kernels/"),
        ("kernels/fa2/forward.cuh", '#include "kernels/fa1/forward.cuh"', "does not include"),
        ("api/attention.cpp", '#include "kernels/fa1/forward.cuh"', "does not include"),
        ("kernels/fa2/forward.cuh", '#include "tile/gone.cuh"', "is not in csrc/"),
        ("tuning.h", "", "there is no layer ./"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, file: str, code: str, complaint: str) -> None:
    for name in ("tile/swizzle.cuh", "kernels/fa1/forward.cuh", file):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / file).write_text(f"// asm in a comment is fine\n{code}\n")
    (found,) = violations(tmp_path)
    assert file in found and complaint in found


def types_in(file: Path) -> set[tuple[str, ...]]:
    """The types that a header defines outside of others, each with its namespaces."""
    code = code_of(file)
    namespaces = re.findall(r"^namespace (\S+) \{", code, re.MULTILINE)
    defined = r"^(?:struct|class|enum|union)(?: class| alignas\(\w+\))? (\w+)(?: : [^;{]+)? \{"
    return {(*namespaces, name) for name in re.findall(defined, code, re.MULTILINE)}


def test_a_name_is_of_one_type() -> None:
    """Two types of one name are one to the linker, whichever files include which."""
    headers = [x for x in CSRC.rglob("*") if x.suffix in {".h", ".cuh"}]
    count = Counter(name for header in headers for name in types_in(header))
    assert ("flash_ext", "WorkTile") in count
    assert [name for name, files in count.items() if files > 1] == []


def test_the_walk_to_a_launch_is_the_one_that_the_page_shows() -> None:
    """At most twelve files, each with the functions that the table names."""
    page = (ROOT / "docs/design/paths.md").read_text()
    rows = re.findall(r"^\| \d+ \| `([^`]+)` \| (.+?) \| .+ \|$", page, re.MULTILINE)
    assert 0 < len(rows) <= 12
    for file, functions in rows:
        code = code_of(ROOT / file)
        names = [x for x in re.findall(r"`(\w+)`", functions) if not re.search(rf"\b{x}\b", code)]
        assert names == [], file


@pytest.mark.parametrize("page", ("paths.md", "how-to-add.md"))
def test_names_on_pages_for_readers_exist(page: str) -> None:
    """What a page names in code style, in csrc, flash_ext or tests/native. No paths."""
    text = (ROOT / "docs/design" / page).read_text()
    names = set(re.findall(r"`(?:\w+::)*(\w+)`", text))
    files = [x for top in ("csrc", "flash_ext", "tests/native") for x in (ROOT / top).rglob("*.*")]
    words = {
        word
        for x in files
        if x.suffix in {".h", ".cuh", ".cpp", ".cu", ".py"}
        for word in re.findall(r"\w+", x.read_text())
    }
    assert names - words == set()


PYTHON_LAYERS = (
    ("ops", "dropout", "timing"),
    ("cpu", "functional", "cache", "cache_call", "mask", "mask_parts", "masked"),
    (
        "reference",
        "explanation",
        "flash_attn",
        "flash_attn_interface",
        "flex",
        "triangle",
        "fp8",
        "integrations",
    ),
    ("__init__", "__main__", "bench"),
)


def python_layer(module: str) -> int:
    """The layer of a module, given relative to flash_ext; none imports from a higher layer."""
    top = module.partition(".")[0]
    return next(number for number, names in enumerate(PYTHON_LAYERS) if top in names)


def python_violations(file: Path, code: str) -> Iterator[str]:
    """The imports of a file, given relative to flash_ext/, from higher layers; in functions too."""
    here = python_layer(file.with_suffix("").parts[0])
    for node in ast.walk(ast.parse(code)):
        for module in imported(node, file.parts[:-1]):
            if module != "__version__" and python_layer(module) > here:
                yield f"{file}: imports {module}, which is of a higher layer"


def imported(node: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """The modules of flash_ext that a statement or a call of import_module in a package imports."""
    names, prefix = [], "flash_ext."
    if isinstance(node, ast.Import):
        names = [x.name for x in node.names]
    elif isinstance(node, ast.ImportFrom):
        folder = ("flash_ext", *package)[: len(package) + 2 - node.level] if node.level else ()
        base = ".".join(filter(None, (*folder, node.module)))
        names = [f"{prefix}{x.name}" for x in node.names] if base == "flash_ext" else [base]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        names = [x.value for x in node.args if isinstance(x, ast.Constant)]
    yield from (name.removeprefix(prefix) for name in names if name.startswith(prefix))


def test_the_package_keeps_its_layers() -> None:
    files = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert [x for file, code in files.items() for x in python_violations(file, code)] == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("ops/call.py", "from ..cpu import tiled"),
        ("cpu/tiled.py", "from .. import reference"),
        ("functional.py", "from .explanation import explain"),
        ("dropout.py", "from . import cpu"),
        ("ops/autograd.py", "def f():\n    from ..integrations import dtensor"),
        ("ops/autograd.py", "def f():\n    import flash_ext.integrations.dtensor"),
        ("ops/autograd.py", "def f():\n    from flash_ext.integrations import dtensor"),
        ("ops/autograd.py", "def f():\n    from flash_ext import integrations"),
        ("ops/autograd.py", "import_module('flash_ext.integrations.dtensor')"),
    ],
)
def test_a_breach_in_python_is_found(file: str, code: str) -> None:
    assert len(list(python_violations(Path(file), code))) == 1


def test_the_reference_has_nothing_of_what_it_judges() -> None:
    """A wrong number that both had would be green in every test."""
    tree = ast.walk(ast.parse((PACKAGE / "reference.py").read_text()))
    own = {x.module for x in tree if isinstance(x, ast.ImportFrom) and x.level > 0}
    assert own == {"dropout", "ops.checks", "ops.options"}


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_(?!_).*|__.*(?<!__)", name) is not None


def private_names(code: str) -> Iterator[str]:
    """The private names of other packages in a module's code, torch's above all.

    `self._x` and `cls._x` are the module's own. The methods of a named tuple are public.
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names if any(map(is_private, x.name.split("."))))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "__future__":
            names = (f"{node.module}.{x.name}" for x in node.names)
            yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            of_its_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not of_its_own and node.attr not in ("_asdict", "_fields", "_make", "_replace"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"torch(\.\w+)*\._[\w.]*", node.value):
                yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield ast.unparse(node)


OF_TRANSFORMERS = {"transformers.py": "_supports_sdpa", "_transformers_paged.py": "_lazy_imports"}
"""A class attribute that transformers asks models to have, and its function that imports
flash-attn, looked up with defaults."""


def test_private_names_of_torch_are_in_one_module() -> None:
    found = {path.name: list(private_names(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert found.pop(TORCH_PRIVATE)
    for name, known in OF_TRANSFORMERS.items():
        found[name] = [x for x in found[name] if known not in x]
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch._C",
        "from torch._C import DispatchKey",
        "from torch.autograd.function import _SingleLevelFunction",
        "torch._C._any_requires_grad(q)",
        "forward_ad._current_level >= 0",
        "op._op",
        "getattr(op, '_schema', None)",
        "import_module('torch._C')",
    ],
)
def test_a_private_name_is_found(code: str) -> None:
    assert list(private_names(code))


def test_other_names_are_not() -> None:
    code = "from .vmap import _rule; self._mesh; x._asdict(); q.__class__; from torch import nn"
    assert list(private_names(code)) == []


FACTORIES = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
"""Functions of torch that make tensors on the default device if the call names none."""


def placed_by_default(code: str) -> Iterator[str]:
    """The calls of factories that leave the device to `torch.set_default_device`."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or any(x.arg == "device" for x in node.keywords):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        if owner == "torch" and name in FACTORIES and not any(x.arg is None for x in node.keywords):
            yield ast.unparse(node)


def test_every_factory_names_its_device() -> None:
    """The caller's default device is for the caller's tensors."""
    found = {path.name: list(placed_by_default(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {}
    code = "torch.zeros(3); torch.ones(2, device=d); x.new_zeros(1); torch.empty(2, **like)"
    assert list(placed_by_default(code)) == ["torch.zeros(3)"]


def test_instantiations_have_types_in_full() -> None:
    """By an alias of a function's type nvcc 13.2 ends in an internal error."""
    for file in CSRC.glob("instantiate/*.cu"):
        for found in re.findall(r"^template (?!struct).*?;", file.read_text(), re.M | re.S):
            assert found.startswith("template cudaError_t ") and "cudaStream_t)" in found, file
