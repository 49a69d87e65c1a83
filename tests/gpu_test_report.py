"""Test reports: what ran, on which device, and to which source it belongs.

Device, versions and digest come from benchmarks/common.py, the same as in every result file.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

import common  # noqa: E402


def write(name: str, content: common.Json) -> Path:
    """Write benchmarks/results/<gpu>/<name> with the machine's description; returns the path."""
    device = torch.device("cuda")
    path = common.result_path(device, name)
    common.write_json(path, common.describe_setup(device) | content)
    return path


def why_not_complete(config: pytest.Config) -> str | None:
    """None if this run selected exactly the gpu tests, otherwise what narrowed it."""
    option = config.option
    if hasattr(config, "workerinput"):
        return "a worker of pytest-xdist runs a part"
    if option.markexpr != "gpu":
        return "only runs with -m gpu write it"
    if option.keyword or option.deselect or option.ignore or getattr(option, "lf", False):
        return "-k, --lf, --deselect or --ignore left tests out"
    chosen = {(config.invocation_params.dir / arg).resolve() for arg in config.args}
    if not chosen & {HERE, HERE.parent}:
        return f"only part of the tests was named: {' '.join(config.args)}"
    return None


def skip_reasons(reports: Iterable[pytest.TestReport]) -> dict[str, int]:
    """Why tests were skipped, and how many for each reason."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in reports
        if isinstance(report.longrepr, tuple)
    )
    return dict(sorted(reasons.items()))


def write_tests(
    counts: dict[str, int], skips: dict[str, int], exit_status: int, seconds: float
) -> Path:
    """tests.json, for a run of the whole gpu suite."""
    content = {
        "selection": "-m gpu",
        "counts": counts,
        "skips": skips,
        "exit_status": exit_status,
        "seconds": round(seconds, 1),
    }
    return write("tests.json", content)


def write_sanitizer(lines: list[str], cases: int) -> Path:
    """sanitizer.json, from lines "tool exit_status seconds" of tests/sanitize.sh."""
    tools = {}
    for line in lines:
        tool, status, seconds = line.split()
        tools[tool] = {"exit_status": int(status), "seconds": int(seconds)}
    return write("sanitizer.json", {"cases": cases, "tools": tools})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write sanitizer.json.")
    parser.add_argument("--cases", type=int, required=True, help="calls that each tool watched")
    parser.add_argument("summary", type=Path, help='a file of lines "tool exit_status seconds"')
    arguments = parser.parse_args()
    print(write_sanitizer(arguments.summary.read_text().splitlines(), arguments.cases))
