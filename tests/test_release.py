"""The checklist of a release refuses where something is missing.

Would catch a release without GPU tests of its source, with a wheel that no test has seen, or with a
torch that is left out or not green.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "distribution"))
import compat  # noqa: E402
import release  # noqa: E402

sys.path.insert(0, str(ROOT / "benchmarks"))
from report import compat as table  # noqa: E402

COUNTS = {"passed": 9, "failed": 0, "error": 0}
TESTS: dict[str, Any] = {"digest": "1", "exit_status": 0, "counts": COUNTS, "device": "X"}
SANITIZER: dict[str, Any] = {
    "digest": "1",
    "device": "X",
    "tools": {"memcheck": {"exit_status": 0}},
}


@pytest.mark.parametrize(
    ("tests", "sanitizer", "says"),
    [
        (TESTS, SANITIZER, None),
        (TESTS | {"digest": "2"}, SANITIZER, "no GPU tests of source 1"),
        (None, SANITIZER, "no GPU tests of source 1"),
        (TESTS | {"exit_status": 1}, SANITIZER, "GPU tests failed on X"),
        (TESTS | {"counts": COUNTS | {"failed": 1}}, SANITIZER, "GPU tests failed on X"),
        (TESTS | {"counts": COUNTS | {"passed": 0}}, SANITIZER, "GPU tests failed on X"),
        (TESTS, None, "no sanitizer run of source 1"),
        (TESTS, SANITIZER | {"tools": {"memcheck": {"exit_status": 9}}}, "memcheck complains"),
    ],
)
def test_evidence_from_a_gpu(
    tests: dict | None, sanitizer: dict | None, says: str | None, tmp_path: Path
) -> None:
    (tmp_path / "gpu").mkdir()
    for name, content in (("tests", tests), ("sanitizer", sanitizer)):
        if content is not None:
            (tmp_path / "gpu" / f"{name}.json").write_text(json.dumps(content))
    found = list(release.gpu_complaints(tmp_path, "1"))
    assert found == [] if says is None else says in found[0]


def row(**changes: object) -> dict[str, Any]:
    """A row of compat.json that is green."""
    works = dict.fromkeys(("ops", "attention", "explain", "checksum"), True)
    tests = {"exit_status": 0, "counts": COUNTS, "failed": []}
    facts = {"install_s": 1.5, "library": "loaded", "cuda_initialized": False, "tests": tests}
    return works | facts | {"date": "2026-01-02", "green": True} | changes


def test_every_torch_must_be_tested() -> None:
    names = [f"{torch}, {python}" for torch, python in compat.ROWS]
    names += ["nvcc 13.2", "nvcc newest"]
    rows = {name: row() for name in (*names, "gpu")}
    found: dict[str, Any] = {"wheel": "abc", "rows": rows}
    assert list(release.compat_complaints(found, "abc")) == []
    assert "of another wheel" in next(release.compat_complaints(found, "abd"))
    assert "of another wheel" in next(release.compat_complaints({}, "abc"))
    rows[names[1]] = row(green=False, unavailable="no Python 3.10 here")
    del rows["gpu"], rows[names[0]], rows["nvcc newest"]
    missing = list(release.compat_complaints(found, "abc"))
    assert [x.partition(" is ")[0] for x in missing] == [*names[:2], "nvcc newest", "gpu"]


@pytest.mark.parametrize(
    "change",
    [
        {"ops": False},
        {"attention": False},
        {"library": "not built"},
        {"install_s": 20.5},
        {"cuda_initialized": True},
        {"tests": {"exit_status": 0, "counts": COUNTS | {"passed": 0}, "failed": []}},
        {"tests": {"exit_status": 1, "counts": COUNTS, "failed": ["a"]}},
        {"tests": {"exit_status": 2, "failed": ["no test ran"]}},
    ],
    ids=str,
)
def test_a_row_is_green_only_if_all_of_it_works(change: dict) -> None:
    assert compat.is_green(row())
    assert not compat.is_green(row(**change))
    assert not compat.is_green({"unavailable": "no Python 3.10 here"})


BUILT = {"nvcc": "13.5.37", "kernels": 9, "slow_kernels": [], "seconds": 3, "date": "2026-01-02"}


@pytest.mark.parametrize(
    ("change", "green"),
    [
        ({}, True),
        ({"slow_kernels": ["fa3_forward_128: a: 48 bytes of stack"]}, False),
        ({"slow_kernels": None}, False),
        ({"kernels": 0}, False),
    ],
    ids=str,
)
def test_an_nvcc_is_green_if_it_builds_no_slow_kernel(change: dict, green: bool) -> None:
    assert compat.is_green(BUILT | change) == green
    assert not compat.is_green({"nvcc": "13.5.37", "failed": "the build fails"})


def test_rows_are_chosen_by_name() -> None:
    chosen = [name for name in compat.NAMES if compat.is_named(name, ["2.13.0", "nvcc"])]
    assert chosen == ["2.13.0, 3.12", "nvcc 13.2", "nvcc newest"]
    assert [name for name in compat.NAMES if compat.is_named(name, ["nvcc 13.2"])] == ["nvcc 13.2"]
    assert not any(compat.is_named(name, ["2.1", "13.2"]) for name in compat.NAMES)


def test_a_row_of_nvcc_counts_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a build as setup.py leaves it; the toolkit and the build are made up."""
    home = tmp_path / "toolkit"
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin/nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.5, V13.5.37\n")
    nvcc.chmod(0o755)
    source = tmp_path / "source"
    objects, package = source / "build/temp.x/csrc", source / "build/lib.x/flash_ext"
    for folder in (objects, package):
        folder.mkdir(parents=True)
    for name in ("a", "b"):
        (objects / f"{name}.o.ptxas.json").write_text('{"kernels": [{"registers": 8}, {}]}')
    (package / "_C.json").write_text('{"slow_kernels": ["a: k: 8 bytes of stack"]}')
    ran: list[dict] = []
    monkeypatch.setattr(compat, "install_nvcc", lambda *_: home)
    monkeypatch.setattr(compat, "unpacked_sdist", lambda _: source)
    monkeypatch.setattr(compat, "run", lambda *_, **options: ran.append(options["env"]) or 0)
    monkeypatch.setenv("FLASH_EXT_STRICT", "1")
    args = argparse.Namespace(environments=tmp_path, remove=False)
    found = compat.make_row("nvcc newest", args)
    (environment,) = ran
    assert environment["CUDA_HOME"] == str(home) and environment["FLASH_EXT_STRICT"] == "0"
    assert found.pop("seconds") < 60
    assert found == {"nvcc": "13.5.37", "kernels": 2, "slow_kernels": ["a: k: 8 bytes of stack"]}


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "2.11.0, 3.11": row(torch="2.11.0+cu130", python="3.11.7"),
        "2.12.1, 3.10": {"unavailable": "no Python 3.10 here", "date": "2026-01-02"},
        "gpu": row(device="H", torch="2.11", python="3.12"),
        "nvcc newest": BUILT,
        "nvcc 13.2": {"nvcc": "13.2.78", "failed": "the build fails", "date": "2026-01-02"},
        "nvcc 12.9": BUILT | {"nvcc": "12.9.86", "slow_kernels": ["a", "b"]},
    }
    found = {"wheel": "a" * 64, "digest": "d", "rows": rows}
    monkeypatch.setattr(table.common, "read_json", lambda path: found)
    text = table.compat_section()
    assert "| 2.11.0+cu130 | 3.11.7 | 1.5 s | yes | 9 passed | 2026-01-02 |" in text
    assert "| 2.12.1 | 3.10 | no | no | no Python 3.10 here | 2026-01-02 |" in text
    assert "| 13.5.37 | yes | 9 | none | 2026-01-02 |" in text
    assert "| 13.2.78 | no | the build fails |  | 2026-01-02 |" in text
    assert "| 12.9.86 | yes | 9 | 2 | 2026-01-02 |" in text
    assert "GPU tests of this wheel: 9 passed (H, torch 2.11, Python 3.12)." in text
