"""The checklist of a release refuses where something is missing.

Would catch a release without GPU tests of its source, with a wheel that no test has seen, or with a
torch that is left out or not green.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "distribution"))
import release  # noqa: E402

sys.path.insert(0, str(ROOT / "benchmarks"))
from report import support as table  # noqa: E402

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
        (TESTS | {"digest": "2"}, SANITIZER, "no tests of source 1"),
        (None, SANITIZER, "no tests of source 1"),
        (TESTS | {"exit_status": 1}, SANITIZER, "tests failed on X"),
        (TESTS | {"counts": COUNTS | {"failed": 1}}, SANITIZER, "tests failed on X"),
        (TESTS | {"counts": COUNTS | {"passed": 0}}, SANITIZER, "tests failed on X"),
        (TESTS, None, "no sanitizer of source 1"),
        (TESTS, SANITIZER | {"tools": {"memcheck": {"exit_status": 9}}}, "sanitizer failed on X"),
    ],
)
def test_evidence_from_a_gpu(
    tests: dict | None, sanitizer: dict | None, says: str | None, tmp_path: Path
) -> None:
    (tmp_path / "gpu").mkdir()
    for name, content in (("tests", tests), ("sanitizer", sanitizer)):
        if content is not None:
            (tmp_path / "gpu" / f"{name}.json").write_text(json.dumps(content))
    found = list(release.gpu_complaints("1", tmp_path))
    assert found == [] if says is None else says in found[0]


def row(**changes: object) -> dict[str, Any]:
    """A row of compat.json that is green."""
    works = dict.fromkeys(("ops", "attention", "explain", "checksum"), True)
    tests = {"exit_status": 0, "counts": COUNTS, "failed": []}
    facts = {"install_s": 1.5, "library": "loaded", "cuda_initialized": False, "tests": tests}
    return works | facts | {"date": "2026-01-02", "green": True} | changes


def test_a_wheel_of_another_source_is_refused(tmp_path: Path) -> None:
    def complaints(digest: str, slow: list[str]) -> list[str]:
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
            record = {"digest": digest, "slow_kernels": slow}
            archive.writestr("flash_ext/_C.json", json.dumps(record))
        return list(release.wheel_complaints(tmp_path / "x.whl", "1"))

    assert complaints("1", []) == []
    assert complaints("2", ["k"]) == ["the library is of source 2, not 1", "a slow kernel: k"]


BUILT = {"nvcc": "13.5.37", "kernels": 9, "slow_kernels": [], "date": "2026-01-02"}


@pytest.fixture
def noxfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("nox")
    monkeypatch.syspath_prepend(str(ROOT))
    import noxfile

    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flash_ext/_C.json", '{"digest": "d", "sha256": "s"}')
    monkeypatch.setattr(noxfile, "wheel_path", lambda: wheel)
    monkeypatch.setattr(noxfile, "RESULTS", tmp_path / "compat.json")
    return noxfile


def test_a_row_is_green_only_if_no_command_failed(noxfile: Any) -> None:
    """And rows of another wheel are dropped."""
    another = {"wheel": "s", "digest": "of another source", "rows": {"gpu": row()}}
    noxfile.RESULTS.write_text(json.dumps(another))
    with noxfile.row("nvcc 13.2") as facts:
        facts["kernels"] = 9
    with pytest.raises(RuntimeError), noxfile.row("nvcc newest") as facts:
        facts["kernels"] = 8
        raise RuntimeError
    rows = json.loads(noxfile.RESULTS.read_text())["rows"]
    assert list(rows) == ["nvcc 13.2", "nvcc newest"]
    assert [x["green"] for x in rows.values()] == [True, False]
    assert [x["kernels"] for x in rows.values()] == [9, 8]


def test_every_row_must_be_green(noxfile: Any) -> None:
    def missing() -> list[str]:
        session = Session()
        noxfile.complete.func(session)
        return session.said.partition(": ")[2].split("; ") if session.said else []

    class Session:
        said = ""

        def error(self, said: str) -> None:
            self.said = said

    names = missing()
    assert len(names) > 6 and names[-2:] == ["nvcc newest", "gpu"]
    wheel, rows = {"wheel": "s", "digest": "d"}, {name: row() for name in names}
    noxfile.RESULTS.write_text(json.dumps(wheel | {"rows": rows}))
    assert missing() == []
    for changed in ({"wheel": "another"}, {"digest": "another"}):
        noxfile.RESULTS.write_text(json.dumps(wheel | changed | {"rows": rows}))
        assert missing() == names
    rows[names[1]] = row(green=False, failed="see the output of nox")
    del rows["gpu"], rows[names[0]], rows["nvcc newest"]
    noxfile.RESULTS.write_text(json.dumps(wheel | {"rows": rows}))
    assert missing() == [*names[:2], "nvcc newest", "gpu"]


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
