"""The tables of docs/support.md: features of variants; releases of torch, Python and nvcc."""

from __future__ import annotations

from collections.abc import Iterator

import common
import torch
from common import Json
from support import BOTH, FEATURES, directions_of, probe

import flash_ext

from .tables import UNKNOWN, Entry, device_of, gpu_folders, load, pivot, provenance, table


def support_section() -> str:
    """Features x variants x devices; a "no" has its reason below."""
    # Others answer alike, unless they were asked earlier.
    folders = gpu_folders("support")
    dates = {p: max(x["setup"]["date"] for x in load("support", p)) for p in folders}
    gpus = sorted(folders, key=dates.__getitem__)[-1:]
    asked = {device_of(p): {r["feature"]: r["answers"] for r in load("support", p)} for p in gpus}
    sources: dict[str, Json] = (asked or {"CUDA": {}}) | {"CPU": probe(torch.device("cpu"))}
    notes: dict[str, int] = {}

    def answer(answers: Json, directions: list[str]) -> str:
        reason = next((r for d in directions if (r := answers.get(d)) is not None), None)
        return "yes" if reason is None else f"no ({notes.setdefault(reason, len(notes) + 1)})"

    def entries() -> Iterator[Entry]:
        for name in FEATURES:
            for device, found in sources.items():
                cpu = device == "CPU"
                for variant in flash_ext.CPU_VARIANTS if cpu else flash_ext.VARIANTS:
                    for ways in (list(directions_of(name)),) if cpu else ([d] for d in BOTH):
                        column = f"{variant}, CPU" if cpu else f"{variant} {ways[0]}, {device}"
                        answers = found.get(name, {}).get(variant)
                        text = UNKNOWN if answers is None else answer(answers, ways)
                        asked = set(ways) <= set(directions_of(name))
                        yield (name,), column, text if asked else ""

    lines = [pivot([""], entries())]
    sizes = ", ".join(str(d) if d == v else f"{d}/{v}" for d, v in flash_ext.KERNEL_DIMS)
    lines += [f"Head dims with kernels: {sizes}; others are padded inside to the next."]
    lines += [f"({number}) {reason.rstrip('.')}." for reason, number in notes.items()]
    lines += [f"{device_of(p)}: {provenance(load('support', p), 'support')}." for p in gpus]
    return "\n\n".join(lines)


# --------------------------------------------------------------------------------- releases
def tests_cell(row: Json) -> str:
    tests = row.get("tests")
    if tests is None or "counts" not in tests:
        return row.get("unavailable") or row.get("failed") or UNKNOWN
    counts = tests["counts"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['passed']:,} passed{failed}"


def nvcc_table(rows: dict[str, Json]) -> str:
    """Builds of the wheel's source with other releases of nvcc."""
    lines = [
        [row.get("nvcc", name.removeprefix("nvcc ")), "yes" if "kernels" in row else "no",
         str(row.get("kernels") or row.get("unavailable") or row.get("failed")),
         str(len(row.get("slow_kernels", ())) or "none") if "kernels" in row else "",
         row["date"][:10]]
        for name, row in sorted(rows.items()) if name.startswith("nvcc ")
    ]  # fmt: skip
    slow = "of these with spills, local memory or serialized wgmma"
    head = ["nvcc", "builds", "kernels", slow, "run"]
    missing = f"Builds of this source with other releases of nvcc: {UNKNOWN}."
    return table(head, lines, words=2) if lines else missing


def compat_section() -> str:
    """Installation, import and tests of one wheel; the GPU tests and other nvccs below."""
    found = common.read_json(common.RESULTS / "compat.json")
    if not found:
        return f"One wheel under several releases of torch: {UNKNOWN}."
    rows = []
    for name, row in found["rows"].items():
        if ", " not in name:  # gpu, and those of nvcc
            continue
        torch, python = name.split(", ")
        probes = [row.get(x, False) for x in ("ops", "attention", "explain", "checksum")]
        rows.append([
            row.get("torch", torch), row.get("python", python),
            f"{row['install_s']} s" if "install_s" in row else "no",
            "yes" if all(probes) and row.get("library") == "loaded" else "no",
            tests_cell(row), row["date"][:10],
        ])  # fmt: skip
    head = ["torch", "Python", "pip install", "import, ops, attention, explain", "CPU tests", "run"]
    lines = [f"Wheel of source `{found['digest']}`."]
    lines += [table(head, sorted(rows), words=2)]
    gpu = found["rows"].get("gpu")
    where = f"{gpu['device']}, torch {gpu['torch']}, Python {gpu['python']}" if gpu else ""
    lines += [f"GPU tests of this wheel: {f'{tests_cell(gpu)} ({where})' if gpu else UNKNOWN}."]
    lines += [nvcc_table(found["rows"])]
    return "\n\n".join(lines)
