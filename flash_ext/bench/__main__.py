"""Time attention on your shape: flash_ext's variants beside PyTorch's backends and flash-attn.

    python -m flash_ext.bench --shape 2 4096 32 128 --kv-heads 8 --causal
    python -m flash_ext.bench --causal --seqlens 512 1k 2k 4k 8k 16k --plot speed.png
    python -m flash_ext.bench --shape 1 1 32 128 --keys 32k --kv-heads 8 --forward  # decoding
    python -m flash_ext.bench --causal --option softcap=50 --option window=1023,0
    python -m flash_ext.bench --shape 1 8k 16 256 --fp8 --json speed.json

For each implementation: the median time of a call, TFLOP/s, the speed as a multiple of the best
peer's (the fastest implementation that is not flash_ext's), and the relative error against standard
attention in float32. An implementation that cannot run the call says why. flash-attn 2, 3 and 4 are
timed if they are installed. Nothing is written unless --plot or --json asks for it.

FLOPs are 4 B H Sq Sk D forward, halved under a causal mask, and 2.5 times as many backward. The
error is of the last key head of the last sequence, with all its query heads.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..__main__ import usable_device
from ..functional import AttentionOptions, unknown_option
from ..ops.checks import require_pair
from ..ops.options import ABOUT, TENSOR_OPTIONS
from ..timing import METHOD, cpu_name, progress
from .measure import Bench
from .output import plot, table
from .problem import TENSORS, Shape, for_cpu

DTYPES = ("bfloat16", "float16", "float32")

NUMBER_OPTIONS = set(AttentionOptions.__annotations__) - TENSOR_OPTIONS - {
    *("causal", "variant", "out_dtype", "mask")
}  # fmt: skip
"""The names that --option takes with a value."""
_SWITCHES = ("deterministic", "batch_invariant")


def length(text: str) -> int:
    """A size of at least 1: 4096 or 4k."""
    number, thousands = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"a size is a number such as 4096 or 4k, got {text!r}")
    return int(number) * thousands


def option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, or the NAME of an option that is a tensor; its value is then None."""
    name, has_value, value = text.partition("=")
    if name in TENSORS:
        if has_value:
            raise argparse.ArgumentTypeError(f"{name} is a random tensor: it has no value")
        return name, None
    if name not in NUMBER_OPTIONS:
        hint = str(unknown_option(name)).partition("; ")[2] or "see --help"
        raise argparse.ArgumentTypeError(f"{name!r} is no option for this; {hint}")
    try:
        found = ast.literal_eval(value)
        if name == "window":
            return name, require_pair(name, found)
        if type(found) is not bool if name in _SWITCHES else type(found) not in (int, float):
            raise ValueError
        if ABOUT[name].allows(found):
            return name, found
    except (SyntaxError, TypeError, ValueError):
        pass
    wanted = {"window": "two numbers such as 1023,0"} | dict.fromkeys(_SWITCHES, "True or False")
    meant = wanted.get(name) or ABOUT[name].wanted or "a number"
    raise argparse.ArgumentTypeError(f"{name} must be {meant}, got {value!r}")


def new_file(text: str) -> str:
    """A file in a folder that exists."""
    if not Path(text).parent.is_dir() or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file in a folder that exists")
    return text


def positive(text: str) -> float:
    """A number of seconds above 0."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"it must be above 0, got {text}")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m flash_ext.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--shape", nargs=4, type=length, default=(2, 4096, 16, 128), metavar=("B", "S", "H", "D"),
        help="batch, sequence length, heads, head dim; default: 2 4096 16 128")  # fmt: skip
    add("--seqlens", nargs="+", type=length, metavar="S", help="sequence lengths in place of S")
    add("--keys", type=length, help="number of keys; default: as many as queries")
    add("--kv-heads", type=length, metavar="H", help="heads of k and v; default: as many as q's")
    add("--head-dim-v", type=length, metavar="D", help="head dim of v; default: q's and k's")
    add("--causal", action="store_true", help="hide the keys after each query")
    add("--option", action="append", type=option, default=[], metavar="NAME[=VALUE]",
        help="an option of flash_ext.attention; may be repeated. With a value: "
        f"{', '.join(sorted(NUMBER_OPTIONS))}. Without, for a random tensor: "
        f"{', '.join(TENSORS)}")  # fmt: skip
    add("--fp8", action="store_true", help="also flash_ext in 8 bits")
    add("--forward", action="store_true", help="only forward")
    add("--backward", action="store_true", help="only backward")
    add("--dtype", default=DTYPES[0], choices=DTYPES, help=f"default: {DTYPES[0]}")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", type=usable_device, default=default, help=f"default here: {default}")
    add("--full-size", action="store_true", help="on a CPU too; without it the shape is made small")
    add("--min-time", type=positive, default=0.1, metavar="SECONDS",
        help="of calls for each row; default: 0.1")  # fmt: skip
    add("--rounds", type=length, help="calls for each row, in place of --min-time")
    add("--seed", type=int, default=0, help="of the random inputs; default: 0")
    add("--plot", type=new_file, metavar="FILE", help="draw TFLOP/s over sequence lengths")
    add("--json", type=new_file, metavar="FILE", help="write all numbers")
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with `shapes`, `options` and `directions`."""
    command_line = parser()
    args = command_line.parse_args(arguments)
    batch, seqlen, heads, dim = args.shape
    kv_heads = args.kv_heads or heads
    if heads % kv_heads:
        command_line.error(f"--kv-heads must divide the number of heads, {heads}, got {kv_heads}")
    if args.plot and len(set(args.seqlens or ())) < 2:
        command_line.error("--plot needs --seqlens with two lengths or more")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        command_line.error("--plot needs matplotlib: pip install matplotlib")
    if args.fp8 and args.dtype == "float32":
        command_line.error("--fp8 quantizes bfloat16 or float16, not float32")
    args.options = dict(args.option)
    both = args.forward == args.backward
    args.directions = [x for x in ("forward", "backward") if both or getattr(args, x)]
    dim_v = args.head_dim_v or dim
    asked = [
        Shape(batch, n, args.keys or n, heads, kv_heads, dim, dim_v, args.causal)
        for n in args.seqlens or [seqlen]
    ]
    small = args.device == "cpu" and not args.full_size
    args.shapes = for_cpu(asked) if small else list(dict.fromkeys(asked))
    args.made_small = not set(args.shapes) <= set(asked)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status: 1 if nothing of flash_ext ran."""
    args = parse(arguments)
    warnings.filterwarnings("ignore")  # SDPA warns of what it then raises
    bench = Bench(args)
    cuda = bench.device.type == "cuda"
    name = torch.cuda.get_device_name(bench.device) if cuda else cpu_name()
    print(f"{name}, torch {torch.__version__}, flash_ext {__version__}")
    if not cuda:
        print("This is a CPU: flash_ext's kernels for it are for reading and testing, and slow.")
    if args.made_small:
        print("The shapes are smaller than asked for; --full-size runs them as they are.")
    sys.stdout.flush()
    try:
        for _ in progress(bench.run(), bench.steps(), "flash_ext.bench"):
            pass
    finally:  # also what an interrupted run has measured
        for cell in bench.cells:
            print(f"\n{table(cell)}")
    result = {"device": name, "torch": torch.__version__, "flash_ext": __version__,
              "method": METHOD, "cells": bench.cells}  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(args.plot, bench.cells, name)
    ran = ("us" in row for cell in bench.cells for name, row in cell["rows"].items()
           if name.startswith("flash_ext"))  # fmt: skip
    return 0 if any(ran) else 1


if __name__ == "__main__":
    raise SystemExit(main())
