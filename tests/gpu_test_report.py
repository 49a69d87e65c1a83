"""Test reports: what ran, on which device, and to which source it belongs.

Device, versions and digest come from benchmarks/common.py, the same as in every result file.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

import common  # noqa: E402
import results  # noqa: E402

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
# What must be equal for a test report to be of this machine and source.
SAME_SETUP = ("device", "torch", "cuda", "cudnn", "driver", "digest")


def result_path(device: torch.device, name: str) -> Path:
    """benchmarks/results/<device>/<name>; creates the folder."""
    path = common.RESULTS / results.slug(device) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def same_setup(a: common.Json, b: common.Json) -> bool:
    """Whether two reports come from the same device, versions and sources."""
    return all(a.get(key) == b.get(key) for key in SAME_SETUP)


def write(name: str, content: common.Json, to: Path | None = None) -> Path:
    """Write benchmarks/results/<gpu>/<name>, or `to`, with the machine's description; returns the
    path."""
    device = torch.device("cuda")
    path = to or result_path(device, name)
    common.write_json(path, common.describe_setup(device) | content)
    return path


def skip_reasons(reports: Iterable[pytest.TestReport]) -> dict[str, int]:
    """Why tests were skipped, and how many for each reason."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in reports
        if isinstance(report.longrepr, tuple)
    )
    return dict(sorted(reasons.items()))


def several_gpus(reports: Iterable[pytest.TestReport]) -> dict[str, int]:
    """The tests of several GPUs, and of how many: see the fixture `need_gpus`."""
    return {r.nodeid: dict(r.user_properties)["gpus"] for r in reports
            if "gpus" in dict(r.user_properties)}  # fmt: skip


def finished(stats: Mapping[str, list[pytest.TestReport]]) -> set[str]:
    """The tests of which pytest has counted an outcome."""
    return {report.nodeid for outcome in OUTCOMES for report in stats.get(outcome, [])}


def summary(stats: Mapping[str, list[pytest.TestReport]]) -> common.Json:
    """What a run of pytest counted, why tests were skipped, which failed, and which passed on
    several GPUs."""
    return {
        "counts": {outcome: len(stats.get(outcome, [])) for outcome in OUTCOMES},
        "skips": skip_reasons(stats.get("skipped", [])),
        "several_gpus": several_gpus(stats.get("passed", [])),
        "failures": [
            report.nodeid for name in ("failed", "error") for report in stats.get(name, [])
        ],
    }


def with_other_tools(tools: common.Json, before: common.Json, now: common.Json) -> common.Json:
    """The tools of this run, and others of the last report if it had the same setup and calls."""
    kept = same_setup(before, now) and before.get("cases") == now["cases"]
    return dict(sorted(((before["tools"] if kept else {}) | tools).items()))


def write_sanitizer(lines: list[str], cases: int) -> Path:
    """sanitizer.json, from lines "tool exit_status seconds" of tests/sanitize.sh."""
    tools = {}
    for line in lines:
        tool, status, seconds = line.split()
        tools[tool] = {"exit_status": int(status), "seconds": int(seconds)}
    device = torch.device("cuda")
    before = common.read_json(result_path(device, "sanitizer.json")) or {}
    now = common.describe_setup(device) | {"cases": cases}
    content = {"cases": cases, "tools": with_other_tools(tools, before, now)}
    return write("sanitizer.json", content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write sanitizer.json.")
    parser.add_argument("--cases", type=int, required=True, help="calls that each tool watched")
    parser.add_argument("summary", type=Path, help='a file of lines "tool exit_status seconds"')
    arguments = parser.parse_args()
    print(write_sanitizer(arguments.summary.read_text().splitlines(), arguments.cases))
