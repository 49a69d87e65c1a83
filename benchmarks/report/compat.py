"""The tables of releases of torch and Python that one wheel was tested with, and of nvcc."""

from __future__ import annotations

import common
from common import Json

from .tables import UNKNOWN, table


def tests_cell(row: Json) -> str:
    """How the tests of a row ended."""
    tests = row.get("tests")
    if tests is None or "counts" not in tests:
        return row.get("unavailable") or row.get("failed") or UNKNOWN
    counts = tests["counts"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{counts['passed']:,} passed{failed}"


def yes_or_no(value: bool) -> str:
    """A cell of the table."""
    return "yes" if value else "no"


def nvcc_table(found: Json) -> str:
    """Builds of the wheel's source with other releases of nvcc."""
    rows = []
    for name, row in found["rows"].items():
        if not name.startswith("nvcc "):
            continue
        built = "kernels" in row
        slow = row.get("slow_kernels", [])
        rows.append([
            row.get("nvcc", name.removeprefix("nvcc ")), yes_or_no(built),
            str(row["kernels"]) if built else row.get("unavailable") or row.get("failed"),
            (str(len(slow)) if slow else "none") if built else "", row["date"][:10],
        ])  # fmt: skip
    if not rows:
        return f"Builds of this source with other releases of nvcc: {UNKNOWN}."
    head = [
        "nvcc",
        "builds",
        "kernels",
        "of these with spills, local memory or serialized wgmma",
        "run",
    ]
    return table(head, sorted(rows), words=2)


def compat_section() -> str:
    """Installation, import and tests of one wheel; the GPU tests and other nvccs below."""
    found = common.read_json(common.RESULTS / "compat.json")
    if not found:
        return f"One wheel under several releases of torch: {UNKNOWN}."
    rows = []
    for name, row in found["rows"].items():
        if name == "gpu" or name.startswith("nvcc "):
            continue
        torch, python = name.split(", ")
        probes = [row.get(x, False) for x in ("ops", "attention", "explain", "checksum")]
        rows.append([
            row.get("torch", torch), row.get("python", python),
            f"{row['install_s']} s" if "install_s" in row else "no",
            yes_or_no(all(probes) and row.get("library") == "loaded"),
            tests_cell(row), row["date"][:10],
        ])  # fmt: skip
    head = ["torch", "Python", "pip install", "import, ops, attention, explain", "CPU tests", "run"]
    lines = [f"Wheel of source `{found['digest']}`, package `{found['wheel'][:16]}…` (SHA-256)."]
    lines += [table(head, sorted(rows), words=2)]
    gpu = found["rows"].get("gpu")
    where = f"{gpu['device']}, torch {gpu['torch']}, Python {gpu['python']}" if gpu else ""
    lines += [f"GPU tests of this wheel: {f'{tests_cell(gpu)} ({where})' if gpu else UNKNOWN}."]
    lines += [nvcc_table(found)]
    return "\n\n".join(lines)
