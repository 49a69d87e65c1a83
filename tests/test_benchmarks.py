"""What the benchmarks and the evidence files claim about themselves: digest, FLOPs, completeness.

Would catch a digest that no longer names the source it stands beside, a FLOP formula that flatters,
and evidence written by a run that left tests out.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import evidence
import pytest
import torch

common = evidence.common
ROOT = Path(__file__).resolve().parent.parent

SHELL_DIGEST = r"""
find csrc flash_ext -type f \( -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp' \
    -o -name '*.py' \) | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-16
"""


def shell_digest(root: Path) -> str:
    return subprocess.run(
        ["sh", "-c", SHELL_DIGEST], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_digest_is_the_shells() -> None:
    assert common.source_digest(ROOT) == shell_digest(ROOT)


def test_digest_follows_content_and_names(tmp_path: Path) -> None:
    """Names that sort differently by bytes and by letters, nested folders, and files left out."""
    for name in ("csrc/a.cu", "csrc/B.cuh", "csrc/a-b/x.h", "csrc/ab.cpp", "flash_ext/_c.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    digest = common.source_digest(tmp_path)
    assert digest == shell_digest(tmp_path) and len(digest) == 16
    (tmp_path / "csrc/notes.md").write_text("not a source")
    assert common.source_digest(tmp_path) == digest
    (tmp_path / "csrc/a.cu").write_text("changed")
    assert common.source_digest(tmp_path) != digest


def test_flops() -> None:
    """4 B H Sq Sk D, halved when causal, times 2.5 backward."""
    compare = pytest.importorskip("compare")
    shape = {"dtype": "bfloat16", "d": 64, "seqlen": 1024, "batch": 2, "heads": 4}
    full = 4 * 2 * 4 * 1024 * 1024 * 64
    for causal, direction, factor in (
        (False, "forward", 1.0),
        (True, "forward", 0.5),
        (False, "backward", 2.5),
        (True, "backward", 1.25),
    ):
        cell = compare.Cell(**shape, causal=causal, direction=direction)
        assert cell.flops() == full * factor


class FakeConfig:
    """As much of pytest's config as the check of completeness reads."""

    def __init__(self, args: list[str], **options: object) -> None:
        self.args = args
        values = {"markexpr": "gpu", "keyword": "", "deselect": None, "ignore": None, "lf": False}
        self.option = type("Options", (), values | options)
        self.invocation_params = type("Params", (), {"dir": ROOT})


def test_only_complete_runs_are_evidence() -> None:
    assert evidence.why_not_complete(FakeConfig(["tests"])) is None
    assert evidence.why_not_complete(FakeConfig([str(ROOT / "tests")])) is None
    for narrowed in (
        FakeConfig(["tests/test_ops.py"]),
        FakeConfig(["tests/test_ops.py::test_opcheck"]),
        FakeConfig(["tests"], markexpr=""),
        FakeConfig(["tests"], markexpr="not gpu"),
        FakeConfig(["tests"], keyword="fa2"),
        FakeConfig(["tests"], deselect=["tests/test_ops.py"]),
        FakeConfig(["tests"], lf=True),
    ):
        assert evidence.why_not_complete(narrowed)


def test_evidence_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path and content of both files, on a made-up device."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    setup = {"device": "NVIDIA H200", "digest": "0123456789abcdef"}
    monkeypatch.setattr(common, "describe_setup", lambda device: setup)

    path = evidence.write_tests({"passed": 3, "failed": 0}, 0, 1.26)
    assert path == tmp_path / "nvidia-h200" / "tests.json"
    content = json.loads(path.read_text())
    assert content == setup | {
        "selection": "-m gpu",
        "counts": {"passed": 3, "failed": 0},
        "exit_status": 0,
        "seconds": 1.3,
    }
    path = evidence.write_sanitizer(["memcheck 0 12", "racecheck 99 30"], 24)
    assert path.name == "sanitizer.json"
    tools = json.loads(path.read_text())["tools"]
    assert tools["racecheck"] == {"exit_status": 99, "seconds": 30}
