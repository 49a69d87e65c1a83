"""What a wheel and a release need that no tool checks; nothing is uploaded.

    python release.py aarch64   # by `make check-wheel`, after auditwheel and the other tools
    python release.py           # by `make release`

A wheel is of this source, without slow kernels, and at most 12 MB large. For a release tests and
sanitizers ran on a GPU with this very source (its digest). `nox -s complete` tests the wheel.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import digest  # noqa: E402

DIST, RESULTS = ROOT / "dist", ROOT / "benchmarks/results"
MAX_BYTES = 12_000_000


def wheel_path(machine: str = platform.machine()) -> Path:
    found = sorted(DIST.glob(f"flash_ext-*-manylinux_2_28_{machine}.whl"))
    return found[-1] if found else sys.exit(f"there is no wheel for {machine}: run make wheel")


def record_of(wheel: Path) -> dict:
    """What setup.py recorded of the library in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return json.loads(archive.read("flash_ext/_C.json"))


def unpack(wheel: Path, folder: Path) -> None:
    shutil.rmtree(folder / "flash_ext", ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [x for x in archive.namelist() if x.startswith("flash_ext/")])


def identity(wheel: Path) -> dict[str, str]:
    """The head of compat.json, if this wheel was tested: its library and its source."""
    return {"wheel": record_of(wheel)["sha256"], "digest": record_of(wheel)["digest"]}


def wheel_complaints(wheel: Path, source: str) -> Iterator[str]:
    record = record_of(wheel)
    if wheel.stat().st_size > MAX_BYTES:
        yield f"the wheel has {wheel.stat().st_size:,} bytes, more than {MAX_BYTES:,}"
    if record["digest"] != source:
        yield f"the library is of source {record['digest']}, not {source}"
    yield from (f"a slow kernel: {x}" for x in record["slow_kernels"])


def gpu_complaints(source: str, results: Path = RESULTS) -> Iterator[str]:
    for name, command in (("tests", "gpu-test"), ("sanitizer", "sanitize")):
        every = [json.loads(path.read_text()) for path in results.glob(f"*/{name}.json")]
        if not (found := [run for run in every if run.get("digest") == source]):
            yield f"no {name} of source {source}: run make {command} on a GPU"
        for run in found:
            counts = run.get("counts", {"passed": 1, "failed": 0, "error": 0})
            ended = [run.get("exit_status", 0), counts["failed"], counts["error"]]
            ended += [tool["exit_status"] for tool in run.get("tools", {}).values()]
            if any(ended) or not counts["passed"]:
                yield f"{name} failed on {run['device']}"


def main(machine: str = "") -> None:
    source = digest.source_digest()
    found = wheel_complaints(wheel_path(machine), source) if machine else gpu_complaints(source)
    if text := "\n".join(f"WRONG: {x}" for x in found):
        sys.exit(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
