"""What compare.py prints: tables of cells, from the results of a run."""

from __future__ import annotations

import itertools

from cells import HEAD_DIMS, shape_name
from common import Json
from fp8_providers import FP8_PROVIDERS
from providers import VARIANTS
from ratios import best_of_peers, geometric_mean, pairs_of, ratios, summarise
from report.tables import number


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
                number(r[speed]) + "*" * ("launch_bound" in r) + "r" * ("recorded" in r)
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
        dims = HEAD_DIMS if row["d"] is None else (row["d"],)
        d = f"d {', '.join(map(str, dims))}"
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
