"""Is speed smooth in the shape? fa3 (or another variant) at a shape and at its neighbors.

    python benchmarks/neighbors.py                # on the GPU
    python benchmarks/neighbors.py --device cpu   # a smoke test

Neighbors of a shape have one row more or less, one tile of 128 rows more or less, half a tile more,
or one head more (of K and V, with its query heads). A kernel that is tuned to a table is fast at
the shapes of the table and slow beside them. 'ratio' is FLOPs per second over those of the shape.

Results go to benchmarks/results/<device>/neighbors.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import common
import providers
import torch
from cells import Cell
from common import Finding, Json
from timing import METHOD, Timer

LEAST = 0.9
TILE = 128
GPU_SHAPES = (
    Cell("bf16", 64, True, 4096, 4, 32),
    Cell("bf16", 64, False, 1024, 16, 16),
    Cell("bf16", 80, False, 1024, 16, 16),
    Cell("bf16", 96, True, 4096, 4, 16),
    Cell("bf16", 128, True, 8192, 2, 32, kv_heads=8),
    Cell("bf16", 128, False, 4096, 4, 16),
    Cell("bf16", 128, True, 2048, 8, 8, kv_heads=1),
    Cell("bf16", 256, True, 8192, 2, 8),
    Cell("bf16", 192, True, 4096, 4, 16, d_v=128),
)
CPU_SHAPES = (Cell("fp32", 32, True, 256, 1, 2),)


def neighbors(cell: Cell) -> Iterator[Cell]:
    """The shape itself comes first."""
    yield cell
    for more in (1, -1, TILE, -TILE, TILE // 2):
        yield replace(cell, seqlen=cell.seqlen + more)
    group = cell.heads // (cell.kv_heads or cell.heads)
    kv_heads = (cell.kv_heads or cell.heads) + 1
    yield replace(cell, heads=kv_heads * group, kv_heads=kv_heads if cell.kv_heads else 0)


def measure(shape: Cell, direction: str, variant: str, timer: Timer, min_time: float) -> Json:
    """The shape and its neighbors, in turns."""
    provider, calls, cells = providers.variant(variant), {}, {}
    for cell in (replace(x, direction=direction) for x in neighbors(shape)):
        work = cell.workload(timer.device)
        prepare = work.forward if direction == "forward" else work.backward
        name = f"S {cell.seqlen}, H {cell.heads}"
        calls[name], cells[name] = prepare(provider, cell.causal), cell
    estimates = {name: timer.estimate(call) for name, call in calls.items()}
    speeds = {
        name: cells[name].flops() / samples.summary()["ms"] * 1e-9
        for name, samples in timer.compare(calls, estimates, min_time).items()
    }
    own = next(iter(speeds.values()))
    return {
        "d": shape.d,
        "d_v": shape.d_v or shape.d,
        "causal": shape.causal,
        "batch": shape.batch,
        "kv_heads": shape.kv_heads or shape.heads,
        "direction": direction,
        "tflops": {name: round(x, 3) for name, x in speeds.items()},
        "ratios": {name: round(x / own, 4) for name, x in speeds.items()},
    }


def findings(rows: list[Json]) -> Iterator[Finding]:
    """Whether all neighbors have the speed of their shapes."""
    least = min((min(row["ratios"].values()) for row in rows), default=None)
    goal = f"neighbors of a shape: FLOPs per second at least {LEAST:g} of its own"
    if least is None:
        yield Finding(goal, "", None)
    else:
        slow = sum(x < LEAST for row in rows for x in row["ratios"].values())
        yield Finding(goal, f"{least:.2f} at least, {slow} below", slow == 0)


def main() -> int:
    """Run; the exit status is 0 whatever was found."""
    parser = common.parser(__doc__)
    common.add_device(parser)
    parser.add_argument("--variant", help="default: the newest that runs; on a CPU fa2")
    parser.add_argument("--min-time", type=float, default=0.03, help="seconds for each call")
    parser.add_argument("--out", help="result file, default .../<device>/neighbors.json")
    args = parser.parse_args()
    started = time.monotonic()
    device = torch.device(args.device)
    torch.manual_seed(0)
    cpu = device.type == "cpu"
    variant = args.variant or ("fa2" if cpu else providers.running(device)[-1])
    result = common.describe_setup(device) | {"method": METHOD, "variant": variant, "least": LEAST}
    path = common.result_path(device, "neighbors.json", args.out)
    timer = Timer(device)
    jobs = [(shape, way) for shape in (CPU_SHAPES if cpu else GPU_SHAPES)
            for way in ("forward", "backward")]  # fmt: skip
    rows: list[Json] = []
    for shape, way in common.progress(jobs, len(jobs), "shapes"):
        try:
            rows.append(measure(shape, way, variant, timer, args.min_time))
        except providers.Refused as refused:
            common.say(f"{variant}, {way}, d {shape.d}: {refused}")
    result |= {"rows": rows, "seconds": round(time.monotonic() - started, 1)}
    common.write_json(path, result)
    for row in rows:
        mask = "causal" if row["causal"] else "full"
        print(f"d {row['d']}/{row['d_v']}, {mask}, B {row['batch']}, {row['direction']}")
        for name, speed in row["tflops"].items():
            print(f"  {name:<16}{speed:>10.1f} TFLOP/s{row['ratios'][name]:>8.2f}")
    for finding in findings(rows):
        print(finding)
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
