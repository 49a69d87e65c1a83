"""What flash_ext can do here, and which variant runs for given shapes.

    python -m flash_ext                                        # versions, devices, an example
    python -m flash_ext --q 2 4096 32 128 --k 2 4096 8 128 --causal
    python -m flash_ext --q 1 1 32 128 --k 1 9000 8 128 --softcap 50 --sink
    python -m flash_ext --dtype float8_e4m3fn --q 1 8192 32 128 --out-dtype float16
    python -m flash_ext --options                              # all options

Shapes are (batch, seqlen, heads, head_dim); `flash_ext.explain` says the same of your own tensors.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import __version__, ops
from .explanation import Explanation, explain
from .ops import torch_private
from .ops.options import ABOUT, FIELDS, FP8, TENSOR_OPTIONS, table

_SHAPE = ("B", "S", "H", "D")
_SCALARS = tuple(n for n in FIELDS if n not in {*TENSOR_OPTIONS, "window_left", "window_right"})
_DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "int8")


def usable_device(text: str) -> str:
    """The type of --device for argparse: the name of a device that this torch can use."""
    try:
        torch.empty(0, device=text)
    except (AssertionError, RuntimeError) as error:  # the former of a torch without CUDA
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here: {reason}") from None
    return text


def _size(text: str) -> int:
    size = int(text)
    if size < 0:
        raise argparse.ArgumentTypeError(f"a size must be at least 0, got {size}")
    return size


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"torch has no dtype {text!r}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash_ext",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    shape: dict[str, Any] = {"type": _size, "nargs": 4, "metavar": _SHAPE}
    add("--q", default=(2, 1024, 16, 64), **shape, help="queries; default: 2 1024 16 64")
    add("--k", **shape, help="keys; default: as q")
    add("--v", **shape, help="values; default: as k")
    add("--dtype", default="bfloat16", choices=_DTYPES, help="with int8 v is float8_e4m3fn")
    add("--device", type=usable_device, help="default: cuda if there is a GPU, else cpu")
    window: dict[str, Any] = {"type": int, "nargs": 2, "metavar": ("LEFT", "RIGHT")}
    add("--window", default=(-1, -1), **window, help="keys that a query sees before and after it;"
        " -1: all")  # fmt: skip
    for name in _SCALARS:
        x, about = FIELDS[name], ABOUT[name].meaning.replace("%", "%%")
        taken: dict[str, Any] = {"action": "store_true"}
        if name == "out_dtype":
            taken = {"type": _dtype, "metavar": "DTYPE"}
        elif x.default is not False:
            taken = {"default": x.default, "type": str if x.type == "str" else float}
        add(f"--{name.replace('_', '-')}", help=about, **taken)
    add("--alibi", action="store_true", help="with alibi_slopes")
    add("--bias", action="store_true", help="with a bias of (1, H, Sq, Sk)")
    add("--sink", action="store_true", help="with a sink")
    add("--options", action="store_true", help="print the table of all options, in Markdown")
    return parser


def _facts() -> Iterator[tuple[str, str]]:
    """Names and values of this installation."""
    yield "flash_ext", __version__
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield "torch", f"{torch.__version__}, {cuda}"
    if torch_private.missing:
        yield "slower without", ", ".join(torch_private.missing)
    yield "Python", platform.python_version()
    build = ops.cuda_build()
    yield "CUDA kernels", f"for {build.targets or 'no GPU'}" if build else "none"
    if build:
        checked = {True: "as built", False: "NOT as built", None: "not recorded"}
        yield "built from", f"source {build.digest or 'not recorded'}"
        compiled_with = [("CUDA", build.cuda), ("torch", build.torch), ("for", build.platform)]
        if any(x for _, x in compiled_with):
            yield "built with", ", ".join(f"{name} {x}" for name, x in compiled_with if x)
        yield "checksum", checked[ops.checksum_agrees()]
        for kernel in build.slow_kernels or ():
            yield "slow kernel", kernel
    if torch.cuda.device_count() == 0:
        yield "GPU", "none here"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        yield f"cuda:{index}", f"{name}, compute capability {major}.{minor}"


def _explained(args: argparse.Namespace) -> Explanation:
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    shape_k = args.k or args.q
    q, k = (tensor(*shape, dtype=dtype) for shape in (args.q, shape_k))
    v = tensor(*(args.v or shape_k), dtype=FP8 if dtype == torch.int8 else dtype)
    _, rows, heads, _ = q.shape
    return explain(
        q,
        k,
        v,
        window=tuple(args.window),
        alibi_slopes=tensor(heads) if args.alibi else None,
        bias=tensor(1, heads, rows, k.shape[1], dtype=dtype) if args.bias else None,
        sink=tensor(heads) if args.sink else None,
        **{name: getattr(args, name) for name in _SCALARS},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. Returns the exit status: 1 where no variant runs."""
    args = _parser().parse_args(arguments)
    if args.options:
        print(table())
        return 0
    facts = list(_facts())
    width = max(len(name) for name, _ in facts) + 2
    for name, value in facts:
        print(f"{name + ':':<{width}}{value}")
    call = [f"{name} {tuple(x)}" for name in "qkv" if (x := getattr(args, name))]
    given = {name: getattr(args, name) for name in (*_SCALARS, "window", "alibi", "bias", "sink")}
    default = vars(_parser().parse_args([]))
    call += [args.dtype, *(f"{n}={x}" for n, x in given.items() if x != default[n])]
    print(f"\n{', '.join(call)}:")
    explanation = _explained(args)
    print(explanation)
    return 0 if explanation.variant else 1


if __name__ == "__main__":
    raise SystemExit(main())
