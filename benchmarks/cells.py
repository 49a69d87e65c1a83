"""The cells of compare.py's tables: shapes, and the sets that they come in."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

import models
import torch
from common import Json
from fp8_providers import FP8, Fp8Workload
from providers import Workload

TOKENS, HIDDEN = 16384, 2048
CPU_TOKENS, CPU_HIDDEN = 512, 128  # a smoke test
HEAD_DIMS = (64, 128, 256)
CPU_HEAD_DIMS, CPU_SEQLENS = (64,), (128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GQA = ((8, 2048), (1, 16384))  # batch, S: 16 query heads of 128 on 2 key heads, causal
MQA = (4096, 8192, 16384, 32768)  # S: one causal sequence, 8 query heads of 128 on 1 or 8 key heads
DECODE = (  # batch, query heads, key heads, keys, queries; d 128
    (1, 32, 8, 131072, 1), (16, 32, 8, 8192, 1), (64, 32, 8, 4096, 1), (128, 32, 32, 2048, 1),
    (1, 32, 8, 131072, 4), (16, 32, 8, 8192, 4), (64, 64, 8, 4096, 8),  # speculative decoding
)  # fmt: skip
CHUNKS = (  # the same: parts of a prompt against a cache, or many queries a group
    (1, 32, 8, 8192, 64), (1, 32, 8, 16384, 512), (4, 32, 8, 8192, 256), (4, 16, 1, 4096, 5),
    (1, 8, 1, 65536, 16), (2, 16, 16, 8192, 64),
)  # fmt: skip
LATENCY = ((1, 32, 8, 1024, 1), (1, 32, 8, 65536, 1))  # the same: one sequence; for --graph
FEW_QUERIES = {"decode": DECODE, "chunks": CHUNKS, "latency": LATENCY}
PREFILL = ((8, 1024), (4, 4096), (2, 8192))  # heads, S: one causal sequence, d 64 and 128
FP8_DIMS = {64: 64, 96: 96, 128: 128, 192: 128, 256: 256}  # of q and k, and of v
FP8_SEQLENS = (2048, 4096, 8192, 16384)
SETS = ("standard", "gqa", "mqa", "decode", "chunks", "latency", "prefill", "models", "fp8")


@dataclass(frozen=True)
class Cell:
    """One column of a table: what every provider is asked to compute."""

    dtype: str
    d: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    direction: str = "forward"
    seqlen_q: int = 0  # 0: seqlen, which is that of the keys
    kv_heads: int = 0  # 0: heads
    d_v: int = 0  # 0: d
    window: int = 0  # keys that a query sees, 0: all
    model: str = ""  # whose shape it is
    sustained: bool = False  # measured back to back
    graph: bool = False  # in a CUDA graph

    def flops(self) -> float:
        """Floating-point operations of the two (forward) or five (backward) matmuls.

        Of the five, dP and dV have the head dim of V, the others that of Q and K.
        """
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
        """Bytes of K and V, which is what decoding has to read."""
        size = DTYPES[self.dtype].itemsize * (self.d + (self.d_v or self.d))
        return self.batch * self.seqlen * (self.kv_heads or self.heads) * size

    def workload(self, device: torch.device) -> Workload:
        """Fresh inputs."""
        shape = (self.batch, self.seqlen, self.heads, self.d)
        if self.dtype == FP8:
            return Fp8Workload(shape, device, d_v=self.d_v)
        return Workload(
            shape,
            DTYPES[self.dtype],
            device,
            self.seqlen_q,
            self.kv_heads,
            d_v=self.d_v,
            window=self.window,
        )

    def matches(self, terms: str) -> bool:
        """Whether the cell meets every term of a filter such as 'd=128,causal,fwd,S>=2048'."""
        for term in filter(None, (t.strip() for t in terms.split(","))):
            number = re.fullmatch(r"(d|S|B|H)(=|>=|<=)(\d+)", term)
            if number:
                have = {"d": self.d, "S": self.seqlen, "B": self.batch, "H": self.heads}[number[1]]
                want = int(number[3])
                fits = {"=": have == want, ">=": have >= want, "<=": have <= want}[number[2]]
            elif term in ("causal", "full"):
                fits = self.causal == (term == "causal")
            elif term in ("fwd", "bwd"):
                fits = self.direction.startswith({"fwd": "forward", "bwd": "backward"}[term])
            else:
                raise SystemExit(f"--filter: cannot read {term!r}; terms look like d=128, S>=2048,"
                                 " causal, full, fwd, bwd")  # fmt: skip
            if not fits:
                return False
        return True


def few_queries(
    dtype: str, sizes: Iterable[tuple[int, int, int, int, int]]
) -> Iterator[tuple[Cell, bool]]:
    """Forward only, of (batch, query heads, key heads, keys, queries)."""
    for batch, heads, kv_heads, seqlen, queries in sizes:
        shape = Cell(dtype, 128, False, seqlen, batch, heads)
        yield replace(shape, seqlen_q=queries, kv_heads=kv_heads), False


def shapes_of(name: str, dtype: str, args: argparse.Namespace) -> Iterator[tuple[Cell, bool]]:
    """The shapes of a set, and whether the backward of each is measured too."""
    cpu = args.device == "cpu"
    tokens, hidden = (CPU_TOKENS, CPU_HIDDEN) if cpu else (TOKENS, HIDDEN)
    masks = [True, False] if args.causal == args.full else [args.causal]
    if name == "standard":
        head_dims = args.d or (CPU_HEAD_DIMS if cpu else HEAD_DIMS)
        seqlens = args.s or (CPU_SEQLENS if cpu else SEQLENS)
        for d, causal, seqlen in itertools.product(head_dims, masks, seqlens):
            batch = args.batch or max(1, tokens // seqlen)
            heads = args.heads or max(1, hidden // d)
            sizes = {"seqlen_q": args.sq, "kv_heads": args.kv_heads}
            yield Cell(dtype, d, causal, seqlen, batch, heads, **sizes), args.sq != 1
    elif name == "gqa":
        for batch, seqlen in GQA:
            yield Cell(dtype, 128, True, seqlen, batch, 16, kv_heads=2), True
    elif name == "mqa":
        for seqlen, kv_heads in itertools.product(MQA, (1, 8)):
            yield Cell(dtype, 128, True, seqlen, 1, 8, kv_heads=kv_heads), True
    elif name in FEW_QUERIES:
        yield from few_queries(dtype, FEW_QUERIES[name])
    elif name == "prefill":
        for d, (heads, seqlen) in itertools.product((64, 128), PREFILL):
            yield Cell(dtype, d, True, seqlen, 1, heads, kv_heads=heads), False
    elif name == "models":
        for shape in models.SHAPES:
            yield model_cell(shape, dtype, cpu), shape.backward
    elif name == "fp8":
        head_dims = args.d or (CPU_HEAD_DIMS if cpu else FP8_DIMS)
        seqlens = args.s or (CPU_SEQLENS if cpu else FP8_SEQLENS)
        for d, causal, seqlen in itertools.product(head_dims, masks, seqlens):
            batch, heads, d_v = max(1, tokens // seqlen), max(1, hidden // d), FP8_DIMS.get(d, d)
            yield Cell(FP8, d, causal, seqlen, batch, heads, d_v=0 if d_v == d else d_v), False
    else:
        raise ValueError(f"no set {name!r}")


def add_grid(parser: argparse.ArgumentParser) -> None:
    """Add the options that `grid` reads; those of sustained calls are compare.py's."""
    parser.set_defaults(sustained=0.0, graph=False)
    add = parser.add_argument
    add("--dtype", nargs="*", choices=list(DTYPES), help="default: bf16, on a CPU fp32")
    add("--set", nargs="*", choices=SETS, help="default: standard")
    add("--d", nargs="*", type=int, help=f"head dims, default {HEAD_DIMS}")
    add("--s", nargs="*", type=int, help=f"sequence lengths, default {SEQLENS}")
    add("--batch", type=int, help=f"default: {TOKENS} tokens over S")
    add("--heads", type=int, help=f"default: {HIDDEN} over the head dim")
    add("--kv-heads", type=int, default=0, help="key heads, default: as many as query heads")
    add("--sq", type=int, default=0, help="queries, default: as many as keys")
    add("--causal", action="store_true", help="only causal")
    add("--full", action="store_true", help="only without a mask")
    add("--fwd", action="store_true", help="only forward")
    add("--bwd", action="store_true", help="only backward")
    add("--filter", action="append", help="cells to run, as in 'd=128,causal,fwd,S>=2048';"
        " several filters add up")  # fmt: skip


def grid(args: argparse.Namespace) -> Iterator[Cell]:
    """The cells of a run; the two directions of a shape follow each other."""
    dtypes = args.dtype or ["fp32" if args.device == "cpu" else "bf16"]
    for dtype, name in itertools.product(dtypes, args.set or ["standard"]):
        if name == "fp8" and dtype != dtypes[0]:  # it has a type of its own
            continue
        for shape, trained in shapes_of(name, dtype, args):
            directions = ["forward", "backward"] if trained and not args.graph else ["forward"]
            if args.fwd != args.bwd:
                wanted = "forward" if args.fwd else "backward"
                directions = [d for d in directions if d == wanted]
            for direction in directions:
                cell = replace(
                    shape, direction=direction, sustained=args.sustained > 0, graph=args.graph
                )
                if not args.filter or any(cell.matches(f) for f in args.filter):
                    yield cell


def model_cell(shape: models.ModelShape, dtype: str, cpu: bool) -> Cell:
    """A model's shape as a cell; on a CPU a small one with its head dims and mask."""
    group = shape.heads // shape.kv_heads
    heads, seqlen, batch, queries = shape.heads, shape.seqlen, shape.batch, shape.seqlen_q
    if cpu:
        heads, seqlen, batch = group, min(seqlen, 64), 1
        queries = min(queries, 16)
    return Cell(
        dtype,
        shape.d,
        shape.causal,
        seqlen,
        batch,
        heads,
        seqlen_q=queries,
        kv_heads=heads // group if group > 1 else 0,
        d_v=0 if shape.d_v == shape.d else shape.d_v,
        window=min(shape.window, seqlen),
        model=shape.name,
    )


def key(cell: Json) -> tuple[object, ...]:
    """What identifies a cell of a result file."""
    return tuple(cell.get(f.name, f.default) for f in fields(Cell))


def place(cell: Json) -> str:
    """Where a cell is in the tables of one direction."""
    return f"d {cell['d']} {'causal' if cell['causal'] else 'full'} S {cell['seqlen']}"


def shape_name(cell: Json) -> str:
    """What a cell of a model, or of a sustained run, computes."""
    lengths = "x".join(str(x) for x in (cell.get("seqlen_q"), cell["seqlen"]) if x)
    heads = "/".join(str(x) for x in (cell["heads"], cell.get("kv_heads")) if x)
    dims = "/".join(str(x) for x in (cell["d"], cell.get("d_v")) if x)
    mask = "causal" if cell["causal"] else "full"
    if cell.get("window"):
        mask += f" window {cell['window']}"
    graph = ", in a CUDA graph" if cell.get("graph") else ""
    return f"{cell['batch']} x {lengths}, {heads} heads of {dims}, {mask}{graph}"


def is_plain(cell: Json) -> bool:
    """Whether a cell has as many queries as keys, as many key heads as query heads, no window, no
    model, is not of FP8, and was measured in bursts."""
    others = ("seqlen_q", "kv_heads", "d_v", "window", "model", "sustained", "graph")
    return cell["dtype"] != FP8 and not any(cell.get(name) for name in others)


def on_grid(cell: Json, tokens: int = TOKENS, hidden: int = HIDDEN) -> bool:
    """Whether a cell's batch and heads are the standard grid's; head dim and type may be others."""
    batch, heads = max(1, tokens // cell["seqlen"]), max(1, hidden // cell["d"])
    return (cell["batch"], cell["heads"]) == (batch, heads) and is_plain(cell)


def standard_cells(cells: list[Json], direction: str) -> list[Json]:
    """Those of the standard grid, in bf16, that were measured."""
    return [
        c
        for c in cells
        if (c["dtype"], c["direction"]) == ("bf16", direction)
        and (c["d"] in HEAD_DIMS and c["seqlen"] in SEQLENS and on_grid(c))
    ]


def fp8_cells(cells: list[Json]) -> list[Json]:
    """Those of --set fp8, at its sizes, by head dim, mask and length."""
    found = [
        c
        for c in cells
        if c["dtype"] == FP8
        and c["seqlen"] in FP8_SEQLENS
        and not c.get("sustained")
        and (c["batch"], c["heads"]) == (max(1, TOKENS // c["seqlen"]), max(1, HIDDEN // c["d"]))
    ]
    return sorted(found, key=lambda c: (c["d"], c["causal"], c["seqlen"]))
