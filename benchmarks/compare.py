"""Speed of flash_ext's variants beside their peers, forward and backward.

    python benchmarks/compare.py                                 # the standard grid, everything
    python benchmarks/compare.py --variants fa2 --peers flash    # under a minute on an H200
    python benchmarks/compare.py --d 96 192                      # the grid at other head dims
    python benchmarks/compare.py --dtype bf16 fp16
    python benchmarks/compare.py --set gqa decode prefill   # grouped heads, few queries, one prompt
    python benchmarks/compare.py --set models                    # shapes of real models (models.py)
    python benchmarks/compare.py --set fp8                       # FP8 forward, beside bf16
    python benchmarks/compare.py --sustained                     # back to back, at the power limit
    python benchmarks/compare.py --s 4096 --heads 32 --kv-heads 4 --sq 128
    python benchmarks/compare.py --filter 'd=128,causal,fwd,S>=2048' --rounds 20
    python benchmarks/compare.py --host                          # only the CPU's time per call
    python benchmarks/compare.py --device cpu                    # a smoke test

The standard grid is bf16, 16,384 tokens, hidden size 2048, head dims 64, 128 and 256, S from 512
to 16,384, causal and full: 72 cells. There are 2048 // d heads, also where d does not divide 2048:
21 at d 96, 10 at d 192. A cell's FLOPs are 4 B H S S D, halved when causal, times 2.5 for
backward. No provider is timed before its results agree with float32 standard attention. Beside each
cell stand the SM clock and the power that nvidia-smi saw meanwhile.

--set fp8 is the forward in FP8, quantization not timed: fa3 with output in bfloat16 and cuDNN
through nvidia-cudnn-frontend (imported as ``cudnn``, where it can be) with output in FP8, beside
fa3 and its peers in bfloat16 on the inputs before quantization. Providers of FP8 are held against
float32 standard attention of what the FP8 numbers stand for.

With --sustained each call runs back to back for a second or more, as in training, where the GPU
comes to its power limit; clock, power and energy per call are those of that time. With --graph too
the calls are those of a CUDA graph, for kernels that are shorter than a launch. Such cells stand
beside the others. The best peer of a model's shape is the fastest that was measured and took it.

The last lines say whether each variant reaches its goal on the standard grid: fa2 over SDPA flash,
fa3 over the best peer, the faster of cuDNN and flash-attn 4 in each cell. Where flash-attn 4 cannot
run, its time is cuDNN's over the ratio in results/<device>/recorded_peers.json; such results are
marked "recorded".

Results go to benchmarks/results/<device>/compare.json, those of --set fp8, which goes alone, to
compare_fp8.json; those of each shape as soon as they are there. A run with the same device,
versions and source digest adds its cells to that file or replaces them, each cell as a whole,
because a ratio is meaningful only within one process; any other run starts a new file. After
--minutes no shape begins: what is left out keeps what the file has of it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from types import FunctionType

import common
import host
import models
import torch
from common import Finding, Json, say
from fp8_providers import FP8, FP8_PROVIDERS, Fp8Workload
from providers import (
    BEST,
    BEST_LABEL,
    PEERS,
    VARIANTS,
    Provider,
    Refused,
    Workload,
    best_peer,
    collect,
    command_line,
    relative_error,
    running,
    variant,
    versions,
)
from timing import HOST_METHOD, METHOD, Around, Timer

TOKENS, HIDDEN = 16384, 2048
CPU_TOKENS, CPU_HIDDEN = 512, 128  # a smoke test
HEAD_DIMS = (64, 128, 256)
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
GRAPH_CALLS = 20
PREFILL = ((8, 1024), (4, 4096), (2, 8192))  # heads, S: one causal sequence, d 64 and 128
FP8_DIMS = {64: 64, 96: 96, 128: 128, 192: 128, 256: 256}  # of q and k, and of v
FP8_SEQLENS = (2048, 4096, 8192, 16384)
SETS = ("standard", "gqa", "mqa", "decode", "chunks", "latency", "prefill", "models", "fp8")
SUSTAINED_SECONDS = 1.2
HOST_SHAPE = (1, 128, 4, 64)
HOST_PEERS = ("flash", "cudnn", "flash_attn_4")
HOST_ROWS = {
    "forward": "providers",
    "forward and backward": "with_backward",
    "forward, compiled": "compiled",
    "forward and backward, compiled": "compiled_with_backward",
}


@dataclass(frozen=True)
class Goal:
    """How many times as fast as a peer a variant must be on the standard grid."""

    ours: str
    peer: str
    direction: str
    least: float  # in every cell
    mean: float  # geometric


GOALS = (
    Goal("fa2", "flash", "forward", 1.0, 1.15),
    Goal("fa2", "flash", "backward", 1.0, 1.10),
    Goal("fa3", BEST, "forward", 0.98, 1.08),
    Goal("fa3", BEST, "backward", 0.98, 1.10),
)
GRID = len(HEAD_DIMS) * 2 * len(SEQLENS)  # cells of a direction


@dataclass(frozen=True)
class Fp8Goal:
    """How many times as fast as another provider fa3 in FP8 must be at a head dim."""

    d: int
    over: str
    mean: float | None = None  # geometric, over S and masks
    least: float | None = None  # in every cell
    why: str = ""  # it is not reached


SOFTMAX = (
    "a consumer's softmax takes half of its iteration, with some three exponentials in flight; and "
    "energy a FLOP is more than cuDNN's; other pipelines were tried (docs/notes/016-fp8.md)"
)
FEW_MATMULS = (
    "supposed: exponentials are as many as with 16 bits; other pipelines were slower "
    "(docs/notes/016-fp8.md)"
)
LIKE_D128 = (
    "supposed: as at d 128; the pipeline of the 16-bit kernel was not faster "
    "(docs/notes/016-fp8.md)"
)
FP8_GOALS = (
    Fp8Goal(128, "cudnn_fp8", mean=1.08, least=1.0, why=SOFTMAX),
    Fp8Goal(64, "cudnn_fp8", mean=1.15, why=FEW_MATMULS),
    Fp8Goal(64, "fa3", least=1.0, why=FEW_MATMULS),
    Fp8Goal(256, "cudnn_fp8", mean=1.08, why=LIKE_D128),
)


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
        pairs = queries * (self.seqlen - (queries / 2 if self.causal else 0))
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


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, PEERS)
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
    add("--sustained", type=float, nargs="?", const=SUSTAINED_SECONDS, default=0.0,
        metavar="SECONDS", help="each call back to back for so long"
        f" ({SUSTAINED_SECONDS} s if not said)")  # fmt: skip
    add(
        "--graph",
        action="store_true",
        help=f"with --sustained: {GRAPH_CALLS} calls at a time in a CUDA graph; only forward",
    )
    add("--host", action="store_true", help="only the CPU's time per call, at a tiny shape")
    add("--min-time", type=float, default=0.1, help="seconds of calls per provider and cell")
    add("--rounds", type=int, help="calls per provider and cell, in place of --min-time")
    add("--minutes", type=float, default=math.inf, help="begin no shape later")
    add("--skip-slow", type=float, nargs="?", const=100.0, metavar="MS",
        help="leave out what takes longer per call than this (100 ms if not said)")  # fmt: skip
    add("--brief", action="store_true", help="print speeds and mean ratios only")
    add("--seed", type=int, default=0)
    add("--out", help="result file, default benchmarks/results/<device>/compare[_fp8].json")
    args = parser.parse_args()
    if args.graph and not (args.sustained and args.device.startswith("cuda")):
        parser.error("--graph is for --sustained on a GPU")
    return args


def grid(args: argparse.Namespace) -> Iterator[Cell]:
    """The cells of a run; the two directions of a shape follow each other."""
    cpu = args.device == "cpu"
    tokens, hidden = (CPU_TOKENS, CPU_HIDDEN) if cpu else (TOKENS, HIDDEN)
    masks = [m for m, only in ((True, args.full), (False, args.causal)) if not only] or [
        True,
        False,
    ]
    head_dims = args.d or ((64,) if cpu else HEAD_DIMS)
    seqlens = args.s or ((128, 256) if cpu else SEQLENS)
    sets = args.set or ["standard"]
    dtypes = args.dtype or ["fp32" if cpu else "bf16"]
    for dtype in dtypes:
        shapes = []
        for d, causal, seqlen in itertools.product(head_dims, masks, seqlens):
            batch = args.batch or max(1, tokens // seqlen)
            heads = args.heads or max(1, hidden // d)
            size = Cell(dtype, d, causal, seqlen, batch, heads, seqlen_q=args.sq)
            shapes.append(replace(size, kv_heads=args.kv_heads) if args.kv_heads else size)
        shapes = shapes if "standard" in sets else []
        if "gqa" in sets:
            shapes += [Cell(dtype, 128, True, s, b, 16, kv_heads=2) for b, s in GQA]
        if "mqa" in sets:
            shapes += [Cell(dtype, 128, True, s, 1, 8, kv_heads=hk) for s in MQA for hk in (1, 8)]
        inference = []
        for name, few_queries in (("decode", DECODE), ("chunks", CHUNKS), ("latency", LATENCY)):
            if name in sets:
                inference += [
                    Cell(dtype, 128, False, s, b, h, seqlen_q=sq, kv_heads=hk)
                    for b, h, hk, s, sq in few_queries
                ]
        if "prefill" in sets:
            inference += [
                Cell(dtype, d, True, s, 1, h, kv_heads=h) for d in (64, 128) for h, s in PREFILL
            ]
        if "models" in sets:
            found = [model_cell(shape, dtype, cpu) for shape in models.SHAPES]
            inference += [c for c, shape in zip(found, models.SHAPES, strict=True)
                          if not shape.backward]  # fmt: skip
            shapes += [c for c in found if c not in inference]
        if "fp8" in sets and dtype == dtypes[0]:  # it has a type of its own
            inference += [
                Cell(FP8, d, causal, s, max(1, tokens // s), max(1, hidden // d),
                     d_v=d_v if (d_v := FP8_DIMS.get(d, d)) != d else 0)
                for d in args.d or ((64,) if cpu else FP8_DIMS)
                for causal in masks
                for s in args.s or ((128, 256) if cpu else FP8_SEQLENS)
            ]  # fmt: skip
        for shape in shapes + inference:
            forward_only = shape in inference or shape.seqlen_q == 1 or args.graph
            directions = ["forward"] if forward_only else ["forward", "backward"]
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


def compiled_provider(provider: Provider) -> Provider:
    """The provider under torch.compile, which identifies a function by its code object.

    Two providers with the same code would run the same graph, so each has its own copy.
    """
    attend = provider.attend
    assert isinstance(attend, FunctionType)
    code = attend.__code__.replace(co_name=f"attend_{provider.name}")
    copy = FunctionType(
        code, attend.__globals__, code.co_name, attend.__defaults__, attend.__closure__
    )
    return replace(provider, attend=torch.compile(copy, fullgraph=True))


class Bench:
    """Measures cells on one device."""

    def __init__(self, args: argparse.Namespace, providers: list[Provider]) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.timer = Timer(self.device)
        self.providers = providers

    def shape(self, cells: list[Cell]) -> Iterator[tuple[Cell, Json]]:
        """Measure the directions of one shape on the same inputs."""
        cell = cells[0]
        work = cell.workload(self.device)
        exact = work.exact(cell.causal, gradients=any(c.direction == "backward" for c in cells))
        for cell in cells:
            yield (
                cell,
                self.cell(cell, work, exact[:1] if cell.direction == "forward" else exact[1:]),
            )

    def cell(self, cell: Cell, work: Workload, exact: list[torch.Tensor]) -> Json:
        """The results of every provider in one cell: numbers, or why there are none."""
        calls: dict[str, Callable[[], object]] = {}
        estimates: dict[str, tuple[float, float]] = {}
        results: Json = {}
        for provider in work.asked(self.providers):
            try:
                prepare = work.forward if cell.direction == "forward" else work.backward
                call = prepare(provider, cell.causal)
                whole, block = self.check(call(), provider, work.wanted(provider, exact))
                if not (whole <= provider.limits[0] and block <= provider.limits[1]):
                    reason = f"WRONG RESULT: relative error {whole:.2g}, worst block {block:.2g}"
                    say(f"!!! {provider.label}, {cell}: {reason} !!!")
                    results[provider.name] = {"skipped": reason, "wrong": True}
                    continue
                device_seconds, host_seconds = self.timer.estimate(call)
                slow = self.args.skip_slow
                if slow and device_seconds * 1e3 > slow:
                    reason = f"{device_seconds * 1e3:.0f} ms a call, over --skip-slow {slow:g}"
                    results[provider.name] = {"skipped": reason}
                    continue
                extra = common.peak_extra_memory(call, self.device)
            except Refused as refusal:
                results[provider.name] = {"skipped": str(refusal), "refused": True}
                continue
            except Exception as error:  # a peer's failure must not end the run
                results[provider.name] = {"skipped": common.first_line(error)}
                call = None  # a graph that did not fit must not stay
                self.release()
                continue
            calls[provider.name], estimates[provider.name] = call, (device_seconds, host_seconds)
            results[provider.name] = {"extra_bytes": extra, "error": float(f"{whole:.4g}")}
        try:
            self.add_times(cell, calls, estimates, results)
        except Exception as error:  # most often: out of memory
            for name in calls:
                if "ms" not in results[name]:
                    results[name] = {"skipped": common.first_line(error)}
        return results

    def add_times(
        self,
        cell: Cell,
        calls: dict[str, Callable[[], object]],
        estimates: dict[str, tuple[float, float]],
        results: Json,
    ) -> None:
        """Add every call's times to its results."""
        if not calls:
            return
        if not cell.sustained:
            timed = self.timer.compare(calls, estimates, self.args.min_time, self.args.rounds)
            for name, samples in timed.items():
                summary = samples.summary()
                summary["tflops"] = round(cell.flops() / summary["ms"] * 1e-9, 4)
                if cell.seqlen_q:
                    summary["tbps"] = round(cell.kv_bytes() / summary["ms"] * 1e-9, 4)
                results[name] = summary | results[name]
            return
        at_once = GRAPH_CALLS if cell.graph else 1
        steady: dict[str, Callable[[], object]] = {}
        for name, call in calls.items():
            try:
                steady[name] = self.timer.in_graph(call, at_once) if cell.graph else call
            except Exception as error:  # a call that no graph can hold
                results[name] = {"skipped": common.first_line(error)}
        seconds = self.args.sustained
        for name, times in self.timer.sustained(steady, estimates, seconds, at_once).items():
            if "skipped" in times:
                results[name] = times
                continue
            tflops = round(cell.flops() / times["ms"] * 1e-9, 4)
            results[name] = times | {"tflops": tflops} | results[name]

    def host(self) -> Json:
        """The CPU's time for one call of every provider, by HOST_ROWS."""
        ways = host.providers(self.device, HOST_SHAPE[1])
        eager, eager_step = self.host_calls([*ways, *self.providers])
        compiled, compiled_step = self.host_calls([compiled_provider(p) for p in self.providers])
        return {
            "method": HOST_METHOD,
            "shape": HOST_SHAPE,
            "labels": {p.name: p.label for p in ways},
            "providers": eager,
            "with_backward": eager_step,
            "compiled": compiled,
            "compiled_with_backward": compiled_step,
        }

    def host_calls(self, providers: list[Provider]) -> tuple[Json, Json]:
        """The CPU's time for one call of each: forward, and forward with backward."""
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        work = Workload(HOST_SHAPE, dtype, self.device)
        forward: dict[str, tuple[Callable[[], object], Around]] = {}
        step: dict[str, tuple[Callable[[], object], Around]] = {}
        skipped: Json = {}
        for provider in providers:
            name, around = provider.name, provider.around
            calls = work.bare(provider, causal=True), work.step(provider, causal=True)
            try:
                with around():
                    calls[1]()
                    with torch.no_grad():
                        calls[0]()
            except Exception as error:
                skipped[name] = {"skipped": common.first_line(error)}
                continue
            forward[name], step[name] = ((call, around) for call in calls)
        return (
            skipped | self.timer.host(forward, gradients=False),
            skipped | self.timer.host(step, gradients=True),
        )

    def release(self) -> None:
        """Give unused cached memory back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def check(
        self, got: object, provider: Provider, exact: list[torch.Tensor]
    ) -> tuple[float, float]:
        """The largest relative errors, whole and block-wise, over a call's results."""
        if isinstance(got, tuple):  # gradients come in the provider's layout, out in ours
            tensors = [provider.view(x) for x in got]
        else:
            assert isinstance(got, torch.Tensor)
            tensors = [got]
        errors = [
            relative_error(x[:, -want.shape[1] :], want)
            for x, want in zip(tensors, exact, strict=True)
        ]
        return max(e[0] for e in errors), max(e[1] for e in errors)


def geometric_mean(values: list[float]) -> float:
    """The geometric mean; NaN if there is nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def ratios(cells: list[Json], ours: str, peer: str) -> list[float]:
    """How many times faster ``ours`` is than ``peer``: ratios of medians, cell by cell."""
    pairs = [(c["providers"].get(ours, {}), c["providers"].get(peer, {})) for c in cells]
    return [b["ms"] / a["ms"] for a, b in pairs if "ms" in a and "ms" in b]


def ratio_range(cell: Json, ours: str, peer: str) -> tuple[float, float]:
    """Where the quartiles of both put a cell's ratio."""
    a, b = cell["providers"][ours], cell["providers"][peer]
    return b.get("q1_ms", b["ms"]) / a.get("q3_ms", a["ms"]), b.get("q3_ms", b["ms"]) / a.get(
        "q1_ms", a["ms"]
    )


def ratio_spread(cells: list[Json], ours: str, peer: str) -> float:
    """The largest distance of a cell's range from its ratio, relative to it; NaN without cells."""
    return max(
        (
            abs(edge / ratio - 1)
            for c in cells
            for ratio in ratios([c], ours, peer)
            for edge in ratio_range(c, ours, peer)
        ),
        default=math.nan,
    )


def pairs_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """The pairs that are compared: each two of our own variants once, the later over the
    earlier."""
    names = list(names)
    ours = [n for n in VARIANTS if n in names]
    return [(a, b) for a in ours for b in names if b not in ours or ours.index(b) < ours.index(a)]


def place(cell: Json) -> str:
    """Where a cell is in the tables of one direction."""
    return f"d {cell['d']} {'causal' if cell['causal'] else 'full'} S {cell['seqlen']}"


def is_plain(cell: Json) -> bool:
    """Whether a cell has as many queries as keys, as many key heads as query heads, no window, no
    model, is not of FP8, and was measured in bursts."""
    others = ("seqlen_q", "kv_heads", "d_v", "window", "model", "sustained", "graph")
    return cell["dtype"] != FP8 and not any(cell.get(name) for name in others)


def on_grid(cell: Json, tokens: int = TOKENS, hidden: int = HIDDEN) -> bool:
    """Whether a cell's batch and heads are the standard grid's; head dim and type may be others."""
    batch, heads = max(1, tokens // cell["seqlen"]), max(1, hidden // cell["d"])
    return (cell["batch"], cell["heads"]) == (batch, heads) and is_plain(cell)


def summarise(cells: list[Json], names: Iterable[str]) -> list[Json]:
    """Ratios of each pair, by type, direction and head dim; d None is the standard grid's three."""
    rows = []
    dtypes = sorted({c["dtype"] for c in cells})
    kinds = itertools.product(dtypes, ("forward", "backward"), pairs_of(names))
    for dtype, direction, (ours, peer) in kinds:
        same = [c for c in cells if (c["dtype"], c["direction"]) == (dtype, direction)]
        for d in [*sorted({c["d"] for c in same}), None]:
            found = [c for c in same if c["d"] == d or (d is None and c["d"] in HEAD_DIMS)]
            values = [(r[0], c) for c in found if (r := ratios([c], ours, peer))]
            if not values:
                continue
            least, where = min(values, key=lambda v: v[0])
            rows.append({
                "ours": ours, "peer": peer, "dtype": dtype, "direction": direction, "d": d,
                "cells": len(values),
                "geometric_mean": round(geometric_mean([v for v, _ in values]), 4),
                "min": round(least, 4),
                "min_at": place(where),
                "below_1": sum(v < 1 for v, _ in values),
                "spread": round(ratio_spread([c for _, c in values], ours, peer), 4),
            })  # fmt: skip
    return rows


def standard_cells(cells: list[Json], direction: str) -> list[Json]:
    """Those of the standard grid, in bf16, that were measured."""
    return [
        c
        for c in cells
        if (c["dtype"], c["direction"]) == ("bf16", direction)
        and (c["d"] in HEAD_DIMS and c["seqlen"] in SEQLENS and on_grid(c))
    ]


def verdict(goal: Goal, cells: list[Json]) -> str:
    """Whether a goal is reached on the whole standard grid, in one line."""
    found = [(r[0], c) for c in standard_cells(cells, goal.direction)
             if (r := ratios([c], goal.ours, goal.peer))]  # fmt: skip
    name = f"{goal.ours} / {goal.peer}, bf16 {goal.direction}"
    if not found:
        return f"{name}: not measured"
    values = [v for v, _ in found]
    mean, (least, where) = geometric_mean(values), min(found, key=lambda f: f[0])
    short = sum(v < goal.least for v in values)
    reached = short == 0 and mean >= goal.mean
    end = "reached" if reached else "NOT REACHED"
    recorded = sum("recorded" in c["providers"][goal.peer] for _, c in found)
    return (
        f"{name}: geometric mean {mean:.3f}x"
        f" (goal {goal.mean:.2f}x), smallest {least:.3f}x ({place(where)}),"
        f" {short} of {len(found)} cells below {goal.least:g}x"
        + (f", {recorded} against a recorded ratio" if recorded else "")
        + f"; {end if len(found) == GRID else 'not the whole grid'}"
    )


def print_tables(cells: list[Json], labels: dict[str, str], brief: bool) -> None:
    """One table per direction, head dim and mask; then geometric means over all of them."""
    pairs = pairs_of(labels)

    def group(cell: Json) -> tuple[bool, bool, int, bool, str]:
        decode = bool(cell.get("seqlen_q"))
        return decode, cell["direction"] != "forward", cell["d"], cell["causal"], cell["dtype"]

    def line(label: str, values: list[str]) -> None:
        print(f"  {label:<28}" + "".join(f"{v:>9}" for v in values))

    for (few, backward, d, causal, dtype), found in itertools.groupby(
        sorted(cells, key=group), group
    ):
        columns = sorted(found, key=lambda c: (c["seqlen"], c["batch"], c["heads"]))
        title = f"{'backward' if backward else 'forward'}, d {d}, {'causal' if causal else 'full'}"
        speed = "tbps" if few else "tflops"
        print(f"\n{title}, {dtype}: {'TB/s of K and V' if few else 'TFLOP/s'}")
        if few:
            line("queries", [str(c["seqlen_q"]) for c in columns])
        line("S", [str(c["seqlen"]) for c in columns])
        line("B x H", [f"{c['batch']}x{c['heads']}" + f"/{c['kv_heads']}" * bool(c.get("kv_heads"))
                       for c in columns])  # fmt: skip
        for name, label in labels.items():
            row = [c["providers"].get(name, {}) for c in columns]
            marks = ["WRONG" if r.get("wrong") else "-" for r in row]
            values = [
                f"{r[speed]:.3g}" + "*" * ("launch_bound" in r) + "r" * ("recorded" in r)
                if "ms" in r
                else mark
                for r, mark in zip(row, marks, strict=True)
            ]
            if any(v != "-" for v in values):
                line(label, values)
        for a, b in () if brief else pairs:
            each = [ratios([c], a, b) for c in columns]
            if any(each):
                line(
                    f"{a} / {labels[b]}",
                    [f"{e[0]:.2f}x" if e else "-" for e in each]
                    + [f"| {geometric_mean([e[0] for e in each if e]):.2f}x"],
                )
    print("\ngeometric mean of the ratio, and the smallest")
    for row in summarise(cells, labels):
        d = "standard grid" if row["d"] is None else f"d {row['d']}"
        print(
            f"  {row['dtype']} {row['direction']:<9}{row['ours']} / {labels[row['peer']]:<20}"
            f"{d:<14}{row['geometric_mean']:6.2f}x {row['min']:6.2f}x ({row['min_at']})"
            f"  in {row['cells']} cells, quartiles within {row['spread']:.1%}"
        )
    reasons = {
        (labels[name], result["skipped"]): f"d {c['d']} S {c['seqlen']} {c['direction']}"
        for c in cells
        for name, result in c["providers"].items()
        if "skipped" in result and name in labels
    }
    for (label, reason), where in reasons.items():
        print(f"  not measured: {label}: {reason} (last at {where})")
    if any("recorded" in r for c in cells for r in c["providers"].values()):
        print("  r cuDNN's speed times a recorded ratio: flash-attn 4 was not measured")
    if any(r.get("launch_bound") for c in cells for r in c["providers"].values()):
        print("  * the CPU could not keep ahead of the GPU: the time holds launch overhead too")


def with_best(cells: list[Json], recorded: Json | None) -> list[Json]:
    """The cells with the best peer among their providers; ``recorded`` is recorded_peers.json."""
    names = ("direction", "d", "causal", "seqlen")
    found = {tuple(r[n] for n in names): r["ratio"] for r in (recorded or {"ratios": ()})["ratios"]}

    def one(cell: Json) -> Json:
        same = tuple(cell[n] for n in names)
        ratio = found.get(same) if cell["dtype"] == "bf16" and on_grid(cell) else None
        best = best_peer(cell["providers"], ratio)
        return cell | {"providers": cell["providers"] | ({BEST: best} if best else {})}

    return [one(cell) for cell in cells]


def best_of_peers(cell: Json) -> Json | None:
    """The result of the fastest peer that took a cell, with its name as "of"."""
    found = [r | {"of": name} for name, r in cell["providers"].items()
             if name not in VARIANTS and name != BEST and "ms" in r]  # fmt: skip
    return min(found, key=lambda r: r["ms"]) if found else None


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


def fp8_findings(cells: list[Json]) -> Iterator[Finding]:
    """The goals for FP8. Of a part of the set there is no verdict."""
    ours = FP8_PROVIDERS[0]
    names = {p.name: p.label for p in FP8_PROVIDERS} | {"fa3": "fa3 in bf16"}
    for goal in FP8_GOALS:
        found = [c for c in fp8_cells(cells) if c["d"] == goal.d]
        values = ratios(found, ours.name, goal.over)
        whole = len(values) == 2 * len(FP8_SEQLENS)
        text = f"fa3 in FP8 over {names[goal.over]}, d {goal.d}"
        for words, least, reduce in (
            ("geometric mean: at least", goal.mean, geometric_mean),
            ("every cell: at least", goal.least, min),
        ):
            if least is None:
                continue
            goal_text = f"{text}, {words} {least:g}×"
            if values:
                got = reduce(values)
                of = f"of {len(values)} cells, {min(values):.2f}× – {max(values):.2f}×"
                reached = got >= least if whole else None
                yield Finding(goal_text, f"{got:.2f}×, {of}", reached, goal.why)
                continue
            results = [c["providers"].get(n, {}) for c in found for n in (ours.name, goal.over)]
            reasons = [r for r in results if "skipped" in r]
            refused = next((r["skipped"] for r in reasons if r.get("refused")), None)
            if refused:
                yield Finding(goal_text, "refused", False, refused)
            else:
                yield Finding(goal_text, reasons[0]["skipped"] if reasons else "", None)


def print_fp8(cells: list[Json], labels: dict[str, str]) -> None:
    """TFLOP/s by head dim and mask, and how many times as fast fa3 in FP8 is as each."""
    ours = FP8_PROVIDERS[0].name
    for (d, d_v, causal), group in itertools.groupby(
        sorted(cells, key=lambda c: (c["d"], c["d_v"], c["causal"], c["seqlen"])),
        lambda c: (c["d"], c["d_v"], c["causal"]),
    ):
        columns = list(group)
        dims = f"{d}/{d_v}" if d_v else f"{d}"
        print(f"\nFP8 forward, d {dims}, {'causal' if causal else 'full'}: TFLOP/s")
        print(f"  {'S':<24}" + "".join(f"{c['seqlen']:>9}" for c in columns))
        for name in columns[0]["providers"]:
            row = [c["providers"][name] for c in columns]
            if not any("ms" in r for r in row):
                print(f"  {labels[name]:<24}  {row[0]['skipped']:.90}")
                continue
            speeds = "".join(f"{r['tflops']:>9.1f}" if "ms" in r else f"{'-':>9}" for r in row)
            values = ratios(columns, ours, name)
            end = f"  fa3 in FP8 is {geometric_mean(values):.2f}x" if values else ""
            print(f"  {labels[name]:<24}{speeds}{end if name != ours else ''}")


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


def print_shapes(cells: list[Json], labels: dict[str, str]) -> None:
    """A line per cell and provider: speed, and the ratio to the fastest peer that took it."""
    for direction in ("forward", "backward"):
        values: list[float] = []
        for cell in (c for c in cells if c["direction"] == direction):
            print(f"\n{direction}, {cell['model'] or 'sustained'}: {shape_name(cell)}")
            best = best_of_peers(cell)
            for name, result in cell["providers"].items():
                if "ms" not in result:
                    print(f"  {labels[name]:<28}{result['skipped'][:60]}")
                    continue
                text = (
                    f"  {labels[name]:<28}{result['ms']:10.4f} ms {result['tflops']:8.1f} TFLOP/s"
                )
                if name in VARIANTS and best:
                    text += f"  {best['ms'] / result['ms']:.2f}x {labels[best['of']]}"
                if "power_w" in result:
                    text += f"  {result['sm_mhz']:.0f} MHz {result['power_w']:.0f} W"
                print(text)
            ours = [r["ms"] for n, r in cell["providers"].items() if n in VARIANTS and "ms" in r]
            if ours and best:
                values.append(best["ms"] / min(ours))
        if values:
            print(
                f"\n{direction}: fastest variant over fastest peer, geometric mean"
                f" {geometric_mean(values):.3f}x, smallest {min(values):.2f}x,"
                f" {sum(v < 0.98 for v in values)} of {len(values)} below 0.98x"
            )


def print_host(times: Json, labels: dict[str, str]) -> None:
    """One line per provider, with its time over those of SDPA's choice and its flash backend."""
    labels = labels | times["labels"]
    bases = (host.SDPA, "flash")
    for what, results in HOST_ROWS.items():
        print(f"host time per call, {what}, (B, S, H, D) = {tuple(times['shape'])}")
        for name, r in times[results].items():
            value = f" not measured: {r.get('skipped')}"
            if "us" in r:
                value = f"{r['us']:8.1f} us ({r['q1_us']:.1f} - {r['q3_us']:.1f})"
                for base in bases:
                    if "us" in times[results].get(base, {}):
                        ratio = r["us"] / times[results][base]["us"]
                        value += f"  {ratio:.3f} x {labels.get(base, base)}"
            print(f"  {labels.get(name, name):<26}{value}")


def key(cell: Json) -> tuple[object, ...]:
    """What identifies a cell of a result file."""
    return tuple(cell.get(f.name, f.default) for f in fields(Cell))


def main() -> int:
    """Run; the exit status is 1 if a variant of flash_ext was wrong or failed somewhere."""
    args = parse()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    warnings.filterwarnings("ignore")  # SDPA explains there what it then raises
    cells = [] if args.host else list(grid(args))
    if not cells and not args.host:
        raise SystemExit("no cell left: see --filter, --causal, --full, --fwd, --bwd")
    only_fp8 = bool(cells) and all(c.dtype == FP8 for c in cells)
    if not only_fp8 and any(c.dtype == FP8 for c in cells):
        raise SystemExit("--set fp8 goes alone: its results have a file of their own")
    args.variants = args.variants or running(torch.device(args.device))
    peers = [p for p in args.peers if p in HOST_PEERS] if args.host else args.peers
    providers, missing = collect(args.variants, peers)
    providers[:0] = FP8_PROVIDERS if only_fp8 else ()
    if args.host:
        providers.insert(0, variant("auto"))
    bench = Bench(args, providers)
    name = "compare_fp8.json" if only_fp8 else "compare.json"
    path = common.result_path(bench.device, name, args.out)
    result = common.describe_setup(bench.device) | {
        "method": METHOD,
        "extra_bytes": common.EXTRA_MEMORY,
        "not_importable": missing,
        "labels": {p.name: p.label for p in providers},
    }
    old = common.read_json(path)
    if not old or not common.same_setup(old, result):
        old = {"cells": [], "labels": {}}
    kept = {key(c): c for c in old["cells"]}
    result["labels"] = old["labels"] | result["labels"]
    result["versions"] = old.get("versions", {}) | versions(providers)
    recorded = common.read_json(common.result_path(bench.device, "recorded_peers.json"))

    measured: list[Json] = []
    log = common.ClockLog(bench.device)
    shapes: dict[Cell, list[Cell]] = {}
    for cell in cells:
        shapes.setdefault(Cell(**(asdict(cell) | {"direction": "forward"})), []).append(cell)

    def store() -> list[Json]:
        everything = sorted((kept | {key(c): c for c in measured}).values(), key=key)
        size = (TOKENS, HIDDEN) if bench.device.type == "cuda" else (CPU_TOKENS, CPU_HIDDEN)
        standard = [c for c in everything if on_grid(c, *size)]
        result["summary"] = summarise(with_best(standard, recorded), [*result["labels"], BEST])
        result["seconds"] = round(time.monotonic() - started, 1)
        common.write_json(path, result | {"cells": everything})
        return everything

    def run() -> Iterator[tuple[Cell, Json]]:
        for begun, same_shape in enumerate(shapes.values()):
            if time.monotonic() - started > 60 * args.minutes:
                say(f"left out, no time: {len(shapes) - begun} of {len(shapes)} shapes")
                return
            yield from bench.shape(same_shape)
            store()
            bench.release()  # one shape's graphs must not crowd out the next

    if "host" in old:
        result["host"] = old["host"]
    try:
        for cell, results in common.progress(run(), len(cells), "cells"):
            state = {"gpu": clocks} if (clocks := log.since_last()) else {}
            measured.append(asdict(cell) | {"date": common.now()} | state | {"providers": results})
        if args.host:
            result["host"] = bench.host()
    finally:  # also what an interrupted run has measured
        log.close()
        if bench.device.type == "cuda":
            result["nvidia_smi_at_end"] = common.nvidia_smi(bench.device)
        everything = store()
    print(f"{result['device']}, torch {result['torch']}, source {result['digest']}")
    labels = {p.name: p.label for p in providers} | {BEST: BEST_LABEL}
    in_fp8 = [c for c in measured if c["dtype"] == FP8]
    usual = [c for c in measured if not c["model"] and not c["sustained"] and c not in in_fp8]
    if usual:
        print_tables(with_best(usual, recorded), labels, args.brief)
    if others := [c for c in measured if c not in usual and c not in in_fp8]:
        print_shapes(others, labels)
    print_fp8(in_fp8, labels)
    if args.host:
        print_host(result["host"], result["labels"])
    for name, reason in missing.items():
        print(f"  not importable: {name}: {reason}")
    print(f"\nwritten: {path}, after {result['seconds']:.0f} s")
    for goal in GOALS if len(in_fp8) < len(measured) else ():
        print(verdict(goal, with_best(everything, recorded)))
    for finding in fp8_findings(everything) if in_fp8 else ():
        print(finding)
    bad = [c for c in measured for p in providers
           if p.ours and (r := c["providers"].get(p.name, {})).get("skipped")
           and not r.get("refused") and "--skip-slow" not in r["skipped"]]  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
