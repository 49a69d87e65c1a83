"""Fits the cost constants of FA3's forward to the GPU that is there, and prints them as a diff.

    python benchmarks/tune.py                       # a few minutes
    python benchmarks/tune.py --only forward --d 64 --out tune.diff && git apply tune.diff
    python benchmarks/tune.py --only splits         # of few queries: tune_decode.py

A plan chooses among the tiles of a row of csrc/plan/tuning.h by `forward_time` (csrc/plan/cost.h):
percent x waves x rows x (keys + overhead). Percent and overhead of a tile are relative to the tile
`usual`, whose constants are the defaults. This script times every tile of a row at a fixed grid of
calls, fits both constants to the ratios of the times, and prints for each call which tile was the
fastest, which one today's constants choose and which one the new constants choose, with the time
that a wrong choice costs.

Tiles are forced by FLASH_EXT_FORCE_TILE, splits by FLASH_EXT_FORCE_SPLITS, which plans read if
FLASH_EXT_TUNE was set when the kernels were first called.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import common
import torch
import tune_decode
from timing import Timer

TUNING, COST = Path("csrc/plan/tuning.h"), Path("csrc/plan/cost.h")
SWITCH, HOOK = "FLASH_EXT_TUNE", "FLASH_EXT_FORCE_TILE"
TILES = ("few_queries", "usual", "long_keys")  # the first of Fa3ForwardTile, in its order
USUAL = "usual"
MOST_OVERHEAD = 512
TOKENS, HIDDEN = 16384, 2048
LENGTHS = (256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192, 16384)
FEW_KEYS, WINDOWS = (128, 256, 512, 1024), (127, 512, 1024)


class Cost(NamedTuple):
    """Of a tile relative to `usual`, as Fa3Cost in csrc/plan/tuning.h."""

    percent: int = 100
    overhead: int = 64

    def __str__(self) -> str:
        return (
            f"{{{self.percent}}}" if self.overhead == 64 else f"{{{self.percent}, {self.overhead}}}"
        )


@dataclass(frozen=True)
class Tile:
    """The size of a tile."""

    rows: int
    block_kv: int


@dataclass(frozen=True)
class Row:
    """A row of a table: its tiles and their costs, where all Q tiles see the same keys, and not."""

    dims: tuple[int, int]
    fp8: bool
    tiles: dict[str, Tile]
    alike: dict[str, Cost]
    differ: dict[str, Cost]

    def costs(self, call: Call) -> dict[str, Cost]:
        return self.alike if call.alike else self.differ


@dataclass(frozen=True)
class Call:
    """A forward of the grid."""

    batch: int
    heads: int
    queries: int
    keys: int
    causal: bool = False
    window: int = -1  # keys that a causal query sees before its own; -1: all

    @property
    def alike(self) -> bool:
        return not self.causal

    def __str__(self) -> str:
        mask = f"window {self.window}" if self.window >= 0 else "causal" if self.causal else "full"
        return f"{self.batch} x {self.queries} x {self.keys}, {self.heads} heads, {mask}"


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


# --- The model, as in csrc/plan/cost.h ---


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
        return "few_queries"
    costs = row.costs(call)
    # Of equal times usual, then long_keys.
    order = [name for name in (USUAL, "long_keys", "few_queries") if name in row.tiles]
    return min(order, key=lambda name: forward_time(call, row.tiles[name], costs[name], sms))


Times = dict[Call, dict[str, float]]  # seconds of every tile, by its name


def fit(row: Row, name: str, times: Times, sms: int) -> Cost:
    """The percent and overhead of a tile with the least squares of the logarithms of the ratios.

    For an overhead the best percent is a mean, so that only the overhead is searched.
    """
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
    """The row with the costs that fit the times. FP8 has one percent for all calls."""
    alike, differ = dict(row.alike), dict(row.differ)
    for name in row.tiles.keys() - {USUAL}:
        for costs, same in ((alike, True), (differ, False)):
            some = {c: t for c, t in times.items() if row.fp8 or c.alike == same}
            costs[name] = fit(row, name, some, sms)
    return Row(row.dims, row.fp8, row.tiles, alike, differ)


def report(row: Row, new: Row, times: Times, sms: int) -> Iterator[str]:
    """A line for each call, and what the choices cost in all, in percent of the fastest tile."""
    losses: dict[str, list[float]] = {"today's": [], "new": []}
    yield f"\nhead dims {row.dims[0]}, {row.dims[1]}{' in FP8' if row.fp8 else ''}"
    for call, t in times.items():
        fastest = min(t, key=t.__getitem__)
        words = []
        for which, known in (("today's", row), ("new", new)):
            chosen = choice(known, call, sms)
            losses[which].append(100 * (t[chosen] / t[fastest] - 1))
            words.append(f"{which} {chosen} +{losses[which][-1]:.1f} %")
        speeds = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in t.items())
        yield f"  {call}: {speeds} µs; fastest {fastest}; {'; '.join(words)}"
    for which, found in losses.items():
        mean = statistics.fmean(found)
        yield f"  {which} constants lose {mean:.2f} % on average, at most {max(found):.1f} %"


# --- csrc/plan ---


def braces(text: str, begin: int) -> str:
    """The text from a brace to the one that closes it."""
    depth = 0
    for end in range(text.index("{", begin), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[text.index("{", begin) : end + 1]
    raise ValueError("a brace is not closed")


def rows_of(table: str, tuning: str) -> Iterator[tuple[tuple[int, int], str]]:
    """The head dims and the text of each row of a table."""
    body = braces(tuning, tuning.index(f" {table}[] = "))
    for found in re.finditer(r"\{\.head_dims = \{(\d+), (\d+)\}", body):
        yield (int(found[1]), int(found[2])), braces(body, found.start())


def read_cost(text: str, field: str) -> Cost:
    """`.alike = {112, 72}`; the default if there is none."""
    found = re.search(rf"\.{field} = \{{([\d, ]+)\}}", text)
    return Cost(*map(int, found[1].split(","))) if found else Cost()


def read_tiles(text: str, names: dict[str, str]) -> dict[str, Tile]:
    """The tiles of a row that differ in size from `usual`; by name, from their fields."""
    tiles = {}
    for name, field in names.items():
        if found := re.search(rf"\.{field} =\s*(?=\{{)", text):
            tile = braces(text, found.end())
            consumers = re.search(r"\.consumers = (\d+)", tile)
            block_kv = re.search(r"\.block_kv = (\d+)", tile)
            assert block_kv is not None, f"a tile without a block_kv: {tile}"
            tiles[name] = Tile(64 * int(consumers[1] if consumers else 2), int(block_kv[1]))
    return tiles


def read(tuning: str, cost: str) -> Iterator[Row]:
    """The rows that have something to choose, of both tables of FA3's forward."""
    for dims, text in rows_of("kFa3Forward", tuning):
        tiles = read_tiles(text, {name: name for name in TILES})
        costs = {n: text.partition(f".{n}_costs =")[2].partition("}}")[0] + "}" for n in tiles}
        by_mask = [{n: read_cost(costs[n], x) for n in tiles} for x in ("alike", "differ")]
        if len(tiles) > 1:
            yield Row(dims, False, tiles, *by_mask)
    of_fp8 = read_cost(braces(cost, cost.index("kCosts{")), "alike")
    for dims, text in rows_of("kFa3ForwardFp8", tuning):
        tiles = read_tiles(text, {"few_queries": "splits", USUAL: USUAL})
        if len({tile.rows for tile in tiles.values()}) > 1:
            costs = {"few_queries": of_fp8, USUAL: Cost()}
            yield Row(dims, True, tiles, costs, costs)


def written(rows: Iterable[Row], tuning: str, cost: str) -> tuple[str, str]:
    """tuning.h and cost.h with the costs of these rows."""
    for row in rows:
        if row.fp8:
            old = "kCosts" + braces(cost, cost.index("kCosts{"))
            one = row.alike["few_queries"]
            cost = cost.replace(old, f"kCosts{{.alike = {one}, .differ = {one}}}")
            continue
        old = new = dict(rows_of("kFa3Forward", tuning))[row.dims]
        for name in row.tiles.keys() - {USUAL}:
            costs = f".{name}_costs = {{.alike = {row.alike[name]}, .differ = {row.differ[name]}}}"
            new, count = re.subn(rf"\.{name}_costs = \{{.*?\}}\}}", costs, new)
            if count == 0:
                new = f"{new[:-1]},\n     {costs}}}"
        tuning = tuning.replace(old, new)
    return tuning, cost


def diff(root: Path, texts: dict[Path, str]) -> str:
    """What `git apply` takes."""
    lines: list[str] = []
    for path, text in texts.items():
        both = ((root / path).read_text(), text)
        before, after = (x.splitlines(keepends=True) for x in both)
        lines += difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
    return "".join(lines)


# --- Measuring ---


def forced(tile: str, call: Callable[[], object]) -> Callable[[], object]:
    """The call with a tile."""

    def run() -> object:
        os.environ[HOOK] = str(TILES.index(tile))
        return call()

    return run


def measure(row: Row, timer: Timer, min_time: float) -> Times:
    """The times of all tiles of a row at the calls of the grid, in turns."""
    import flash_ext

    times: Times = {}
    calls = list(grid(row.dims[0]))
    what = f"d {row.dims[0]}{' FP8' if row.fp8 else ''}"
    for call in common.progress(calls, len(calls), what):
        dtype = torch.float8_e4m3fn if row.fp8 else torch.bfloat16

        def tensor(
            length: int, dim: int, call: Call = call, dtype: torch.dtype = dtype
        ) -> torch.Tensor:
            return torch.randn(call.batch, length, call.heads, dim, device=timer.device).to(dtype)

        q, k = tensor(call.queries, row.dims[0]), tensor(call.keys, row.dims[0])
        v = tensor(call.keys, row.dims[1])
        window = (call.window, 0 if call.causal else -1)

        def attend(q=q, k=k, v=v, window=window) -> object:  # type: ignore[no-untyped-def]
            return flash_ext.attention(q, k, v, window=window, variant="fa3")

        runs = {tile: forced(tile, attend) for tile in row.tiles}
        estimates = {tile: timer.estimate(run) for tile, run in runs.items()}
        samples = timer.compare(runs, estimates, min_time)
        times[call] = {tile: statistics.median(x.seconds) for tile, x in samples.items()}
    os.environ.pop(HOOK, None)
    return times


def refuse_without_hook() -> None:
    """End if the kernels would run their own choice whatever is asked for."""
    from flash_ext.ops import binary

    library = Path(binary.__file__).parents[1] / "_C.abi3.so"
    content = library.read_bytes() if library.is_file() else b""
    for name in (SWITCH, HOOK, tune_decode.HOOK):
        if name.encode() not in content:
            raise SystemExit(f"these kernels do not read {name}: make build")


def tune_forward(
    device: torch.device, head_dims: list[int], min_time: float, texts: tuple[str, str]
) -> tuple[str, str]:
    """tuning.h and cost.h with the costs of the tiles that fit this GPU."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    timer, found = Timer(device), []
    for row in read(*texts):
        if not head_dims or row.dims[0] in head_dims:
            times = measure(row, timer, min_time)
            found.append(fitted(row, times, sms))
            print("\n".join(report(row, found[-1], times, sms)))
    return written(found, *texts)


def tune_splits(device: torch.device, min_time: float, texts: tuple[str, str]) -> tuple[str, str]:
    """tuning.h and cost.h with the constants of the splits of few queries that fit this GPU."""
    gpu, today = tune_decode.gpu_of(device), tune_decode.read("".join(texts))
    times = tune_decode.measure(Timer(device), min_time)
    new = tune_decode.fitted(times, gpu, today)
    print("\n".join(tune_decode.report(times, today, new, gpu)))
    tuning, cost = (tune_decode.written(new, text) for text in texts)
    return tuning, cost


def main() -> int:
    """Measure, print the choices, and print or write the diff."""
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--only", choices=("forward", "splits"), help="default: both")
    add("--d", nargs="*", type=int, help="head dims of forward, default: all with several tiles")
    add("--min-time", type=float, default=0.05, help="seconds of calls for each tile and call")
    add("--out", type=Path, help="a file for the diff; default: print it")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise SystemExit("tune.py needs a Hopper GPU: the tiles are fa3's")
    os.environ[SWITCH] = "1"
    refuse_without_hook()
    device = torch.device("cuda", torch.cuda.current_device())
    tuning, cost = ((common.ROOT / path).read_text() for path in (TUNING, COST))
    torch.manual_seed(0)
    if args.only != "splits":
        tuning, cost = tune_forward(device, args.d or [], args.min_time, (tuning, cost))
    if args.only != "forward":
        tuning, cost = tune_splits(device, args.min_time, (tuning, cost))
    text = diff(common.ROOT, {TUNING: tuning, COST: cost})
    if args.out:
        args.out.write_text(text)
    print(f"written: {args.out}" if args.out else text or "the constants stay as they are")
    return 0


if __name__ == "__main__":
    sys.exit(main())
