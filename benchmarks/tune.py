"""Fits the cost constants of FA3's forward to the GPU that is there, and prints them.

    python benchmarks/tune.py                       # a few minutes
    python benchmarks/tune.py --d 64

A plan chooses among the tiles of a row of csrc/plan/tuning.h by `forward_time` (csrc/plan/cost.h):
percent x waves x rows x (keys + overhead), relative to the tile `usual`. This script times every
tile of a row at a fixed grid of calls, fits both constants to the ratios of the times, and prints
each call's fastest tile, those of today's and of the new constants, and what a wrong choice costs.

Today's constants stand in shapes.toml (`tune`); a test compares them with csrc. Tiles are forced by
FLASH_EXT_FORCE_TILE, which plans read if FLASH_EXT_TUNE was set when the kernels were first called.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from common import SHAPES
from timing import Timer
from torch import Tensor

import flash_ext

HOOKS = SWITCH, TILE_HOOK = "FLASH_EXT_TUNE", "FLASH_EXT_FORCE_TILE"
TILES = ("small_q", "usual", "long_keys")  # as Fa3ForwardTile has them
USUAL = "usual"
MOST_OVERHEAD = 512
TOKENS, HIDDEN = 16384, 2048
LENGTHS = (256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192, 16384)
FEW_KEYS, WINDOWS = (128, 256, 512, 1024), (127, 512, 1024)
Times = dict[Any, dict[Any, float]]  # microseconds of each call with each choice


# --- Tiles: the model, as in csrc/plan/cost.h ---
class Cost(NamedTuple):
    """Of a tile relative to `usual`, as Fa3Cost in csrc/plan/tuning.h."""

    percent: int = 100
    overhead: int = 64

    def __str__(self) -> str:
        overhead = f", {self.overhead}" if self.overhead != 64 else ""
        return f"{{{self.percent}{overhead}}}"


class Tile(NamedTuple):
    rows: int
    block_kv: int


@dataclass(frozen=True)
class Row:
    """A row of a table: its tiles and their costs, where all Q tiles see the same keys, and not."""

    d: int
    fp8: bool
    tiles: dict[str, Tile]
    alike: dict[str, Cost]
    differ: dict[str, Cost]

    def costs(self, call: Call) -> dict[str, Cost]:
        return self.alike if call.alike else self.differ


KINDS = {"tiles": Tile, "alike": Cost, "differ": Cost}
ROWS = tuple(
    Row(row["d"], row.get("fp8", False),
        *({n: kind(*x) for n, x in row[field].items()} for field, kind in KINDS.items()))
    for row in SHAPES["tune"]
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    batch: int
    heads: int
    queries: int
    keys: int
    causal: bool = False
    window: int = -1  # keys that a causal query sees before its own; -1: all

    @property
    def alike(self) -> bool:
        return not self.causal


def grid(head_dim: int) -> Iterator[Call]:
    """Short and long sequences, with and without a mask, few keys, and windows."""
    heads = HIDDEN // head_dim
    for length, causal in itertools.product(LENGTHS, (False, True)):
        for batch in {max(1, TOKENS // length), max(1, 3 * TOKENS // (2 * length))}:
            yield Call(batch, heads, length, length, causal)
    for keys in FEW_KEYS:
        yield Call(TOKENS // 2048, heads, 2048, keys)
    for window in WINDOWS:
        yield Call(TOKENS // 4096, heads, 4096, 4096, True, window)


def forward_time(call: Call, tile: Tile, cost: Cost, sms: int) -> float:
    """`forward_time` of csrc/plan/cost.h; its unit cancels in ratios."""
    if call.alike:
        keys = -(-call.keys // tile.block_kv) * tile.block_kv
    else:
        seen = call.keys if call.window < 0 else call.window + 1 + tile.rows
        keys = min(call.keys, seen) + tile.block_kv // 2
    filled = call.batch * call.heads * -(-call.queries // tile.rows) / sms
    waves = math.ceil(filled) if call.alike else filled
    return cost.percent * waves * tile.rows * (keys + cost.overhead)


def choice(row: Row, call: Call, sms: int) -> str:
    """The tile that a plan takes: `fa3_forward_tile` of csrc/plan/cost.h."""
    if call.batch * call.heads * -(-call.queries // 128) <= sms:
        return "small_q"
    costs = row.costs(call)
    # Of equal times usual, then long_keys.
    order = [name for name in (USUAL, "long_keys", "small_q") if name in row.tiles]
    return min(order, key=lambda name: forward_time(call, row.tiles[name], costs[name], sms))


def fit(row: Row, name: str, times: Times, sms: int) -> Cost:
    """The percent and overhead of a tile with the least squares of the logarithms of the ratios.

    For an overhead the best percent is a mean, so that only the overhead is searched."""
    tile, usual = row.tiles[name], row.tiles[USUAL]

    def residuals(overhead: int) -> list[float]:
        return [
            math.log(t[name] / t[USUAL])
            - math.log(forward_time(call, tile, Cost(1, overhead), sms))
            + math.log(forward_time(call, usual, Cost(), sms))
            for call, t in times.items()
        ]

    overhead = min(range(MOST_OVERHEAD + 1), key=lambda x: statistics.pvariance(residuals(x)))
    return Cost(round(math.exp(statistics.fmean(residuals(overhead)))), overhead)


def fitted(row: Row, times: Times, sms: int) -> Row:
    """The row with the costs that fit the times."""
    alike, differ = dict(row.alike), dict(row.differ)
    for name in row.tiles.keys() - {USUAL}:
        for costs, same in ((alike, True), (differ, False)):
            some = {c: t for c, t in times.items() if row.fp8 or c.alike == same}
            costs[name] = fit(row, name, some, sms)
    return replace(row, alike=alike, differ=differ)


def forward_inputs(row: Row, call: Call, device: torch.device) -> tuple[list[Tensor], Any]:
    dtype, lengths = torch.float8_e4m3fn if row.fp8 else torch.bfloat16, (call.queries, call.keys)
    shapes = [(call.batch, n, call.heads, row.d) for n in (*lengths, call.keys)]
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    return tensors, {"window": (call.window, 0 if call.causal else -1)}


# --- Measuring ---
def measure(
    calls: Iterable[Any], inputs: Callable[[Any], tuple[list[Tensor], Any]],
    choices: Callable[[Any], Mapping[Any, int]], hook: str, timer: Timer, min_time: float
) -> Times:  # fmt: skip
    """The times of each call with every choice, forced by the number it has in `hook`, in turns."""
    times: Times = {}
    asked = list(calls)
    for call in common.progress(asked, len(asked), hook):
        tensors, options = inputs(call)

        def forced(number: int, tensors: Any = tensors, options: Any = options) -> object:
            os.environ[hook] = str(number)
            return flash_ext.attention(*tensors, variant="fa3", **options)

        runs = {name: functools.partial(forced, x) for name, x in choices(call).items()}
        times[call] = {name: x["ms"] * 1e3 for name, x in timer.timed(runs, min_time).items()}
    os.environ.pop(hook, None)
    return times


def report(
    title: str, times: Times, today: Callable[[Any], Any], new: Callable[[Any], Any]
) -> Iterator[str]:
    """A line for each call, and what the choices cost in all, in percent of the fastest."""
    losses: dict[str, list[float]] = {"today's": [], "new": []}
    yield f"\n{title}"
    for call, us in times.items():
        fastest = min(us, key=us.__getitem__)
        words = []
        for (which, found), chooses in zip(losses.items(), (today, new), strict=True):
            chosen = chooses(call)
            found.append(100 * (us[chosen] / us[fastest] - 1))
            words.append(f"{which} {chosen} +{found[-1]:.1f} %")
        yield f"  {call}: fastest {fastest}, {us[fastest]:.1f} µs; {'; '.join(words)}"
    for which, found in losses.items():
        mean = statistics.fmean(found)
        yield f"  {which} constants lose {mean:.2f} % on average, at most {max(found):.1f} %"


def tune_forward(timer: Timer, head_dims: list[int], min_time: float, sms: int) -> None:
    for row in ROWS:
        if head_dims and row.d not in head_dims:
            continue
        numbers = {name: TILES.index(name) for name in row.tiles}
        times = measure(grid(row.d), lambda c, r=row: forward_inputs(r, c, timer.device),
                        lambda _, n=numbers: n, TILE_HOOK, timer, min_time)  # fmt: skip
        new = fitted(row, times, sms)
        title = f"head dim {row.d}{' in FP8' if row.fp8 else ''}"
        print("\n".join(report(title, times, lambda c, r=row: choice(r, c, sms),
                               lambda c, r=new: choice(r, c, sms))))  # fmt: skip
        for name in row.tiles.keys() - {USUAL}:
            print(f"  .{name}_costs = {{.alike = {new.alike[name]}, .differ = {new.differ[name]}}}")


def main() -> int:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--d", nargs="*", type=int, help="head dims of forward, default: all with several tiles")
    add("--min-time", type=float, default=0.05, help="seconds of calls for each tile and call")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("tune.py needs a Hopper GPU: the tiles are fa3's")
    os.environ[SWITCH] = "1"
    kernels = Path(flash_ext.__file__).with_name("_C.abi3.so").read_bytes()
    if missing := [name for name in HOOKS if name.encode() not in kernels]:
        raise SystemExit(f"these kernels would choose themselves, without {missing}: make build")
    device = torch.device("cuda", torch.cuda.current_device())
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    torch.manual_seed(0)
    timer = Timer(device)
    tune_forward(timer, args.d or [], args.min_time, sms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
