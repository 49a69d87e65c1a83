"""The cells of compare.py: shapes, and the sets that they come in (shapes.toml)."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from common import SHAPES, Json
from fp8_providers import FP8, KV8, PROVIDERS, QuantizedWorkload
from providers import BEST, BEST_OF, VARIANTS, Workload

GRID = SHAPES["grid"]
HEAD_DIMS, SEQLENS = tuple(GRID["d"]), tuple(GRID["seqlen"])
FP8_DIMS = {int(d): d_v for d, d_v in GRID["fp8_d"].items()}
SETS = ("standard", "fp8", *SHAPES["sets"])
SOURCES = {s["model"]: s["source"] for s in SHAPES["sets"]["models"]["shapes"]}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Cell:
    """What every provider is asked to compute."""

    dtype: str
    d: int
    causal: bool
    seqlen: int  # of the keys
    batch: int
    heads: int
    direction: str = "forward"
    seqlen_q: int = 0  # 0: seqlen
    kv_heads: int = 0  # 0: heads
    d_v: int = 0  # 0: d
    window: int = 0  # keys that a query sees, 0: all
    model: str = ""  # whose shape it is
    sustained: bool = False  # measured back to back

    def flops(self) -> float:
        """Floating-point operations of the two (forward) or five (backward) matmuls.

        Of the five, dP and dV have the head dim of V, the others that of Q and K."""
        queries, width, width_v = self.seqlen_q or self.seqlen, self.d, self.d_v or self.d
        pairs: float = queries * self.seqlen
        if self.causal:  # aligned bottom-right: the queries before the first key see none
            seeing = min(queries, self.seqlen)
            pairs = seeing * (self.seqlen - seeing / 2)
        if self.window and self.causal:  # the first window of queries sees less, as a triangle
            whole = max(self.seqlen - self.window, 0)
            seen = min(queries, whole)
            rest = queries - seen
            pairs = seen * self.window + rest * (min(self.window, self.seqlen) - rest / 2)
        columns = width + width_v if self.direction == "forward" else 3 * width + 2 * width_v
        return 2.0 * self.batch * self.heads * pairs * columns

    def kv_bytes(self) -> int:
        """Bytes of K and V, which is what decoding has to read; of those in 8 bits as in bf16."""
        size = DTYPES["bf16" if self.dtype == KV8 else self.dtype].itemsize
        rows = self.batch * self.seqlen * (self.kv_heads or self.heads)
        return rows * (self.d + (self.d_v or self.d)) * size

    def workload(self, device: torch.device) -> Workload:
        shape = (self.batch, self.seqlen, self.heads, self.d)
        sizes = {"seqlen_q": self.seqlen_q, "kv_heads": self.kv_heads, "d_v": self.d_v}
        if self.dtype in PROVIDERS:
            return QuantizedWorkload(self.dtype, shape, device, **sizes)
        return Workload(shape, DTYPES[self.dtype], device, **sizes, window=self.window)

    def to_json(self) -> Json:
        """For a result: without what is 0, empty or false, apart from `causal`."""
        return {n: x for n, x in asdict(self).items() if x or n == "causal"}


def on_grid_of(dtype: str, args: argparse.Namespace) -> Iterator[Cell]:
    """The standard grid, or what the options make of it."""
    cpu, fp8 = args.device == "cpu", dtype == FP8
    sizes = GRID | (GRID["cpu"] if cpu else {})
    masks = [True, False] if args.causal == args.full else [args.causal]
    head_dims, seqlens = sizes["d"], sizes["seqlen"]
    if fp8 and not cpu:
        head_dims, seqlens = list(FP8_DIMS), sizes["fp8_seqlen"]
    for d, causal, seqlen in itertools.product(args.d or head_dims, masks, args.s or seqlens):
        batch = args.batch or max(1, sizes["tokens"] // seqlen)
        heads = args.heads or max(1, sizes["hidden"] // d)
        d_v = FP8_DIMS.get(d, d) if fp8 else d
        yield Cell(dtype, d, causal, seqlen, batch, heads, seqlen_q=args.sq,
                   kv_heads=args.kv_heads, d_v=0 if d_v == d else d_v)  # fmt: skip


def shapes_of(name: str, dtype: str, args: argparse.Namespace) -> Iterator[tuple[Cell, bool]]:
    """The shapes of a set, and whether the backward of each is measured too."""
    if name in ("standard", "fp8"):
        for cell in on_grid_of(FP8 if name == "fp8" else dtype, args):
            yield cell, name == "standard" and args.sq != 1
        return
    chosen = SHAPES["sets"][name]
    for shape in chosen["shapes"]:
        fields = {"causal": True, "batch": 1} | chosen.get("all", {}) | shape
        backward = fields.pop("backward", True)
        fields.pop("source", None)
        yield Cell(fields.pop("dtype", dtype), **fields), backward


def add_grid(parser: argparse.ArgumentParser) -> None:
    """Add the options that `grid` reads; those of sustained calls are compare.py's."""
    parser.set_defaults(sustained=0.0)
    add = parser.add_argument
    add("--dtype", nargs="*", choices=list(DTYPES), help="default: bf16, on a CPU fp32")
    add("--set", nargs="*", choices=SETS, help="default: standard")
    add("--d", nargs="*", type=int, help=f"head dims, default {HEAD_DIMS}")
    add("--s", nargs="*", type=int, help=f"sequence lengths, default {SEQLENS}")
    add("--batch", type=int, help=f"default: {GRID['tokens']} tokens over S")
    add("--heads", type=int, help=f"default: {GRID['hidden']} over the head dim")
    add("--kv-heads", type=int, default=0, help="key heads, default: as many as query heads")
    add("--sq", type=int, default=0, help="queries, default: as many as keys")
    add("--causal", action="store_true", help="only causal")
    add("--full", action="store_true", help="only without a mask")
    add("--fwd", action="store_true", help="only forward")
    add("--bwd", action="store_true", help="only backward")


def grid(args: argparse.Namespace) -> Iterator[Cell]:
    """The cells of a run; the two directions of a shape follow each other."""
    dtypes = args.dtype or ["fp32" if args.device == "cpu" else "bf16"]
    wanted = [args.fwd or not args.bwd, args.bwd or not args.fwd]
    for dtype, name in itertools.product(dtypes, args.set or ["standard"]):
        if name in ("fp8", "decode8") and dtype != dtypes[0]:  # it has a type of its own
            continue
        for shape, trained in shapes_of(name, dtype, args):
            asked = zip(("forward", "backward"), wanted, (True, trained), strict=True)
            for direction in (name for name, *both in asked if all(both)):
                yield replace(shape, direction=direction, sustained=args.sustained > 0)


# ------------------------------------------------------------------- cells as results have them
def place(cell: Json) -> str:
    """Where a cell is in the tables of one direction."""
    return f"d {cell['d']} {'causal' if cell['causal'] else 'full'} S {cell['seqlen']}"


def shape_name(cell: Json) -> str:
    """What a cell computes."""
    lengths = "x".join(str(x) for x in (cell.get("seqlen_q"), cell["seqlen"]) if x)
    heads = "/".join(str(x) for x in (cell["heads"], cell.get("kv_heads")) if x)
    dims = "/".join(str(x) for x in (cell["d"], cell.get("d_v")) if x)
    mask = "causal" if cell["causal"] else "full"
    if cell.get("window"):
        mask += f" window {cell['window']}"
    return f"{cell['batch']} x {lengths}, {heads} heads of {dims}, {mask}"


def is_plain(cell: Json) -> bool:
    """Whether a cell has as many queries as keys, as many key heads as query heads, no window, no
    model, is not of FP8, and was measured in bursts."""
    others = ("seqlen_q", "kv_heads", "d_v", "window", "model", "near", "sustained")
    return cell["dtype"] != FP8 and not any(cell.get(name) for name in others)


def has_grid_size(cell: Json) -> bool:
    """Whether a cell's batch and heads are those of the standard grid."""
    size = max(1, GRID["tokens"] // cell["seqlen"]), max(1, GRID["hidden"] // cell["d"])
    return (cell["batch"], cell["heads"]) == size


def on_grid(cell: Json) -> bool:
    """Whether a cell's batch and heads are the standard grid's; head dim and type may be others."""
    return has_grid_size(cell) and is_plain(cell)


def standard_cells(cells: list[Json], direction: str) -> list[Json]:
    """Those of the standard grid, in bf16, that were measured."""
    found = (c for c in cells if (c["dtype"], c["direction"]) == ("bf16", direction))
    return [c for c in found if c["d"] in HEAD_DIMS and c["seqlen"] in SEQLENS and on_grid(c)]


def fp8_cells(cells: list[Json]) -> list[Json]:
    """Those of --set fp8, at its sizes, by head dim, mask and length."""
    found = [c for c in cells if c["dtype"] == FP8 and c["seqlen"] in GRID["fp8_seqlen"]
             and not c.get("sustained") and has_grid_size(c)]  # fmt: skip
    return sorted(found, key=lambda c: (c["d"], c["causal"], c["seqlen"]))


# ------------------------------------------------------------------------------------------ ratios
def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def ratios(cells: Iterable[Json], ours: str, peer: str) -> list[float]:
    """How many times faster ``ours`` is than ``peer``: ratios of medians, cell by cell."""
    pairs = [(c["providers"].get(ours, {}), c["providers"].get(peer, {})) for c in cells]
    return [b["ms"] / a["ms"] for a, b in pairs if "ms" in a and "ms" in b]


def fastest(cell: Json, names: Iterable[str]) -> Json | None:
    """The result of the fastest of these that ran a cell, with its name as "of"."""
    found = [x | {"of": n} for n in names if "ms" in (x := cell["providers"].get(n, {}))]
    return min(found, key=lambda r: r["ms"]) if found else None


def with_best(cell: Json) -> Json:
    """The cell with the best peer among its providers: the faster of cuDNN and flash-attn 4, where
    both were measured. One alone is not the best of two."""
    both = all("ms" in cell["providers"].get(n, {}) for n in BEST_OF)
    best = {BEST: fastest(cell, BEST_OF)} if both else {}
    return cell | {"providers": cell["providers"] | best}


def ours_and_best(cell: Json) -> tuple[Json, Json | None] | None:
    """Our fastest variant in a cell and the fastest peer that ran it."""
    ours = fastest(cell, VARIANTS)
    peers = [n for n in cell["providers"] if n not in VARIANTS and n != BEST]
    return (ours, fastest(cell, peers)) if ours else None
