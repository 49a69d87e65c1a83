"""Bytes that attention moves, counted by the GPU, beside what the papers predict.

    python benchmarks/io.py                 # needs ncu (Nsight Compute) and its counters
    python benchmarks/io.py --s 1024 4096

Two boundaries are counted. Between HBM and L2 ('hbm'), and between L2 and the SMs ('sm'). The
papers' model has two levels, on-chip memory of M bytes and everything else; M is an SM's shared
memory, so 'sm' is what it predicts: N d + N^2 for standard attention, N^2 d^2 / M for
FlashAttention. What HBM sees of it is less where L2 still holds what is read again.

'model' counts the same by the algorithms' own loops (``MODELS``): how often each tensor passes with
the tile sizes of plan/tuning.h. 'theta' is N^2 d^2 / M (or N d + N^2) in bytes, with M the shared
memory of one CTA as the GPU reports it; a bound of this form holds if sm / theta stays level.

Each call starts with an L2 full of other data and is followed by a pass that drives its own results
out of L2, whose own writes are taken off again: so 'hbm' holds all that the call reads and writes,
with the caches as they are in use. Times are taken without the profiler, as in compare.py. Standard
attention is left out if the GPU has no room for its N x N matrices.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import common
import results
import torch
from cells import Cell
from common import Json
from providers import PEERS, VARIANTS, Provider, Workload, refusal, running
from timing import FLUSH_BYTES, Timer
from torch import Tensor

import flash_ext

SEQLENS = (512, 1024, 2048, 4096, 8192)
HEADS = 128  # as many as an H200 has SMs, nearly: fa1 has one CTA for each
FEW_HEADS = 8  # whose O and statistics stay in L2
ELEMENT, FLOAT = 2, 4  # bytes
SOFTCAP = "fa3, 128 rows"  # with an option, at head dim 64, fa3 has smaller Q tiles
MARK = "spin_kernel"  # torch.cuda._sleep: ends a call's kernels in the profile

HBM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
SM = ("l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum")
SHARED = "launch__shared_mem_per_block"
METRICS = (*HBM, *SM, SHARED)


@dataclass(frozen=True)
class Case:
    """One call whose traffic is counted: bf16, batch 1, no mask."""

    method: str  # "standard", a variant, or SOFTCAP
    direction: str
    seqlen: int
    d: int
    heads: int


def cases(seqlens: Iterable[int], methods: Iterable[str]) -> Iterator[Case]:
    """Over S; over d; with few heads; and with another tile size."""
    longest = sorted(seqlens)[-2:][0]
    methods = list(methods)
    for direction, method in itertools.product(("forward", "backward"), methods):
        for seqlen in seqlens:
            yield Case(method, direction, seqlen, 64, HEADS)
        yield Case(method, direction, longest, 64, FEW_HEADS)
        for d in (128, 256) if direction == "forward" else (128,):
            yield Case(method, direction, longest, d, HEADS)
    if "fa3" in methods:
        yield Case(SOFTCAP, "forward", longest, 64, HEADS)


def runs(case: Case, memory: int) -> bool:
    """Whether a GPU of so many bytes has room for standard attention's N x N matrices; of a
    variant, whether it takes the call."""
    if case.method == "standard":
        matrices = {"forward": 4, "backward": 6}[case.direction]
        return matrices * ELEMENT * case.heads * case.seqlen**2 < memory
    q = torch.empty(1, 1, case.heads, case.d, dtype=torch.bfloat16, device="cuda")
    return refusal(case.method.partition(",")[0], q, q, q, case.direction == "backward") is None


# ------------------------------------------------------------------------------------ predictions
# Rows of a Q tile (fa2, fa3 forward) or keys of a KV tile (else), by head dim, as plan/tuning.h has
# them on Hopper GPUs. With less shared memory FA1's forward has fewer keys.
TILES = {
    ("fa1", "forward"): {64: 256, 128: 256, 256: 128},
    ("fa2", "forward"): {64: 128, 128: 128, 256: 128},
    ("fa3", "forward"): {64: 256, 128: 128, 256: 128},
    ("fa1", "backward"): {64: 128, 128: 128},
    ("fa2", "backward"): {64: 128, 128: 128},
    ("fa3", "backward"): {64: 128, 128: 128},
}
FEW_KEYS = {64: 64, 128: 128, 256: 64}
LONG_KEYS, LONG_TILE = 8192, 192  # fa3 forward, head dim 64, HEADS: from so many keys on
SOFTCAP_TILE = 128


def has_hopper_tiles() -> bool:
    """Whether this GPU, or that of a prediction without one, has a Hopper GPU's shared memory."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)


def tile(case: Case) -> int:
    """The tile size that sets how often tensors pass."""
    if case.method == SOFTCAP:
        return SOFTCAP_TILE
    if (case.method, case.direction) == ("fa1", "forward") and not has_hopper_tiles():
        return FEW_KEYS[case.d]
    if (case.method, case.direction, case.d) == ("fa3", "forward", 64) and case.seqlen >= LONG_KEYS:
        return LONG_TILE
    return TILES[case.method, case.direction][case.d]


def standard_forward(n: int, d: int, _: int) -> int:
    """Q K^T writes S; softmax reads S, writes P; P V reads P (FlashAttention, algorithm 0)."""
    return ELEMENT * (4 * n * d + 4 * n * n)


def standard_backward(n: int, d: int, _: int) -> int:
    """P for dV; dP out; P and dP in, dS out; dS for dQ and for dK (algorithm 3)."""
    return ELEMENT * (8 * n * d + 7 * n * n)


def fa1_forward(n: int, d: int, passes: int) -> int:
    """Each KV tile reads Q, and reads and writes O, m and l in float32 (algorithm 2); the first
    has nothing to read, the last writes O in the inputs' type."""
    state = FLOAT * (n * d + 2 * n)
    return ELEMENT * (2 * n * d + passes * n * d + n * d) + 2 * (passes - 1) * state


def fa2_forward(n: int, d: int, passes: int) -> int:
    """Each Q tile reads K and V (FlashAttention-2, algorithm 1)."""
    return ELEMENT * (2 * n * d + passes * 2 * n * d) + FLOAT * n


def fa1_backward(n: int, d: int, passes: int) -> int:
    """Each KV tile reads Q, dO and the statistics, and reads and writes dQ in float32 (algorithm
    4); O is read once."""
    return (
        ELEMENT * (6 * n * d + passes * 2 * n * d)
        + 2 * (passes - 1) * FLOAT * n * d
        + passes * 2 * FLOAT * n
    )


def fa2_backward(n: int, d: int, passes: int) -> int:
    """Each KV tile reads Q, dO and the statistics, and adds to dQ in float32 (FlashAttention-2,
    algorithm 2); before it zeros and delta of O and dO, behind it dQ's conversion."""
    around = ELEMENT * 3 * n * d + FLOAT * (2 * n * d + 2 * n)
    return around + ELEMENT * (4 * n * d + passes * 2 * n * d) + passes * FLOAT * (n * d + 2 * n)


MODELS: dict[tuple[str, str], Callable[[int, int, int], int]] = {
    ("standard", "forward"): standard_forward,
    ("standard", "backward"): standard_backward,
    ("fa1", "forward"): fa1_forward,
    ("fa2", "forward"): fa2_forward,
    ("fa3", "forward"): fa2_forward,
    (SOFTCAP, "forward"): fa2_forward,
    ("fa1", "backward"): fa1_backward,
    ("fa2", "backward"): fa2_backward,
    ("fa3", "backward"): fa2_backward,
}


def model(case: Case) -> int:
    """Bytes between L2 and the SMs by the algorithm's loops."""
    passes = 0 if case.method == "standard" else -(-case.seqlen // tile(case))
    return case.heads * MODELS[case.method, case.direction](case.seqlen, case.d, passes)


def theta(case: Case, shared_bytes: int) -> float:
    """N d + N^2 elements, or N^2 d^2 / M with M in elements, in bytes over all heads."""
    n, d = case.seqlen, case.d
    if case.method == "standard":
        return ELEMENT * case.heads * (n * d + n * n)
    return ELEMENT * case.heads * n * n * d * d / (shared_bytes / ELEMENT)


# --------------------------------------------------------------------------------------- counting
def provider(method: str) -> Provider:
    """Who computes a case."""
    if method == SOFTCAP:

        def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            return flash_ext.attention(q, k, v, causal=causal, softcap=2000.0, variant="fa3")

        return Provider(SOFTCAP, attend)
    return (VARIANTS | PEERS)[method]()


def prepared(case: Case) -> Callable[[], object]:
    """The call to be counted."""
    work = Workload((1, case.seqlen, case.heads, case.d), torch.bfloat16, torch.device("cuda"))
    prepare = work.forward if case.direction == "forward" else work.backward
    return prepare(provider(case.method), False)


def child(asked: list[Case]) -> None:
    """What ncu looks at: each case's kernels, the pass that empties L2, and the mark."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    profiler = torch.cuda.cudart()
    for case in asked:
        call = prepared(case)
        call()  # libraries choose their kernels, the allocator gets its memory
        flush.fill_(1)
        torch.cuda.synchronize()
        profiler.cudaProfilerStart()
        call()
        flush.fill_(1)
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        profiler.cudaProfilerStop()
        del call
        torch.cuda.empty_cache()


def kernels(text: str) -> list[Json]:
    """ncu's CSV, one entry per kernel in the order of launches: name and metrics."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError("ncu: " + " ".join(lines[-3:]))
    found: dict[str, Json] = {}
    for row in csv.DictReader(lines[start:]):
        kernel = found.setdefault(row["ID"], {"name": row["Kernel Name"]})
        value = row["Metric Value"].replace(",", "")
        kernel[row["Metric Name"]] = float(value) if value not in ("", "n/a") else 0.0
    return list(found.values())


def by_case(found: list[Json]) -> Iterator[Json]:
    """Sums of each case's kernels, between the marks; the pass before a mark empties L2."""
    group: list[Json] = []
    for kernel in found:
        if MARK not in kernel["name"]:
            group.append(kernel)
            continue
        own, flush = group[:-1], group[-1]
        # The flush leaves as many of its own bytes in L2 as there were before: what it writes to
        # HBM beyond its size is the call's.
        late = flush[HBM[1]] - FLUSH_BYTES
        yield {
            "hbm_read": round(sum(k[HBM[0]] for k in own)),
            "hbm_written": round(sum(k[HBM[1]] for k in own) + late),
            "sm": round(sum(k[m] for k in own for m in SM)),
            "sm_read": round(sum(k[SM[0]] for k in own)),
            "shared_bytes": round(max(k[SHARED] for k in own)),
            "kernels": len(own),
        }
        group = []


def count(asked: list[Case]) -> list[Json]:
    """The counters of every case, from one run of this script under ncu."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("ncu (Nsight Compute) is not on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "cases.json"
        listing.write_text(json.dumps([asdict(c) for c in asked]))
        command = [
            ncu, "--csv", "--print-units", "base", "--profile-from-start", "off",
            "--clock-control", "none", "--cache-control", "none",
            # Every pass of counters is a separate run, with caches as they would be.
            "--replay-mode", "application", "--metrics", ",".join(METRICS),
            sys.executable, __file__, "--child", str(listing),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError("ncu: " + " ".join((done.stdout + done.stderr).splitlines()[-5:]))
    found = list(by_case(kernels(done.stdout)))
    if len(found) != len(asked):
        raise RuntimeError(f"ncu: {len(found)} cases in the profile, {len(asked)} were run")
    return found


# ----------------------------------------------------------------------------------------- timing
def timed(asked: list[Case], device: torch.device) -> list[Json]:
    """Milliseconds and TFLOP/s of each case, without a profiler; those of a shape in turns."""
    timer = Timer(device)
    results: dict[Case, Json] = {}
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in asked:
        groups.setdefault((case.direction, case.seqlen, case.d, case.heads), []).append(case)
    for group in groups.values():
        for case, times in timer.timed({case: prepared(case) for case in group}, 0.02).items():
            ms = times["ms"]
            flops = Cell("bf16", case.d, False, case.seqlen, 1, case.heads, case.direction).flops()
            results[case] = {"ms": ms, "tflops": round(flops / ms * 1e-9, 2)}
        torch.cuda.empty_cache()
    return [results[case] for case in asked]


def ceilings(device: torch.device) -> dict[str, float]:
    """What this GPU reaches: bf16 matmul in TFLOP/s, and a copy's bytes in TB/s."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.empty(1 << 30, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    times = Timer(device).timed(
        {"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}, 0.05
    )
    return {
        "matmul_tflops": round(2 * 8192**3 / times["matmul"]["ms"] * 1e-9, 1),
        "copy_tbps": round(2 * source.numel() / times["copy"]["ms"] * 1e-9, 3),
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--s", nargs="*", type=int, default=list(SEQLENS), help="sequence lengths")
    add("--child", help=argparse.SUPPRESS)
    results.add_output(parser)
    parser.set_defaults(device="cuda")
    return parser.parse_args()


def main() -> int:
    """Run; the exit status is 1 if the counters could not be read: then nothing is written."""
    args = parse()
    if args.child:
        child([Case(**c) for c in json.loads(Path(args.child).read_text())])
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("io.py counts a GPU's bytes, and there is none here")
    recorder = common.begin("io", args)
    device = recorder.device
    properties = torch.cuda.get_device_properties(device)
    wanted = cases(args.s, ["standard", *running(device)])
    asked = [case for case in wanted if runs(case, properties.total_memory)]
    limits = {"l2_bytes": properties.L2_cache_size} | ceilings(device)
    times = timed(asked, device)
    try:
        counted = count(asked)
    except RuntimeError as error:
        print(f"NOT COUNTED: {error}")
        return 1
    recorder.add({"limits": True}, limits)
    for case, time, counts in zip(asked, times, counted, strict=True):
        found = {"model": model(case), "theta": round(theta(case, counts["shared_bytes"]))}
        line = recorder.add(asdict(case), time | counts | found)["result"]
        hbm = f"{line['hbm_read'] / 1e6:.1f} + {line['hbm_written'] / 1e6:.1f} MB"
        by_loops, bound = (line["sm"] / line[name] for name in ("model", "theta"))
        print(f"  HBM {hbm}, sm / model {by_loops:.2f}, sm / theta {bound:.2f}")
    recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
