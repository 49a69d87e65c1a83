"""What a release needs beside the checks of `make release`, which runs this; nothing is uploaded.

    source   a section of CHANGELOG.md for the version, no such tag yet
    GPU      tests and sanitizers ran on a GPU with this very source (its digest), without a failure
    compat   each torch and Python is tested with this wheel, and so is a GPU; each nvcc builds its
             source; all are green

It prints the commands that remain, or exits with the complaints.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from artifacts import ROOT, content_checksum, sdist_path, version, wheel_path
from manylinux import LOADERS

sys.path.insert(0, str(ROOT / "benchmarks"))
import common  # noqa: E402

RESULTS = ROOT / "benchmarks/results"


def source_complaints() -> Iterator[str]:
    tag = ["git", "tag", "--list", f"v{version()}"]
    if subprocess.check_output(tag, cwd=ROOT):
        yield f"the tag v{version()} exists already: raise __version__ in flash_ext/__init__.py"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(version())}\b", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no section of {version()}"
    if re.search(r"^## \[?Unreleased", changelog, re.MULTILINE | re.IGNORECASE):
        yield "CHANGELOG.md has unreleased changes: move them to the section of the version"


def gpu_complaints(results: Path, digest: str) -> Iterator[str]:
    """The missing reports from a GPU."""
    for name, command in (("tests", "gpu-test"), ("sanitizer", "sanitize")):
        found = [json.loads(path.read_text()) for path in results.glob(f"*/{name}.json")]
        found = [run for run in found if run.get("digest") == digest]
        if not found:
            yield f"no {name} of source {digest}: run make {command} on a GPU"
        for run in found:
            counts = run.get("counts", {"passed": 1, "failed": 0, "error": 0})
            ended = [run.get("exit_status", 0), counts["failed"], counts["error"]]
            ended += [tool["exit_status"] for tool in run.get("tools", {}).values()]
            if any(ended) or not counts["passed"]:
                yield f"{name} failed on {run['device']}"


def compat_complaints(found: dict[str, Any], wanted: str, names: list[str]) -> Iterator[str]:
    """The missing rows of compat.json for the wheel whose package has this checksum."""
    if found.get("wheel") != wanted:
        yield "benchmarks/results/compat.json is of another wheel: run make compat"
        return
    for name in names:
        row = found["rows"].get(name)
        if row is None:
            how = "nox -s gpu, on a GPU" if name == "gpu" else "make compat"
            yield f"{name} is not tested: run {how}"
        elif not row["green"]:
            yield f"{name} is not green: {row.get('failed') or row}"


def compat_names() -> list[str]:
    """The rows that compat.json must have."""
    import tomllib

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rows = pyproject["tool"]["flash_ext"]["compat"]
    torch = [f"{torch}, {python}" for torch, python in rows["torch"]]
    return [*torch, *(f"nvcc {x}" for x in rows["nvcc"]), "gpu"]


def main() -> None:
    digest = common.source_digest()
    results = common.read_json(RESULTS / "compat.json") or {}
    missing = [
        *source_complaints(),
        *gpu_complaints(RESULTS, digest),
        *compat_complaints(results, content_checksum(wheel_path("x86_64")), compat_names()),
    ]
    if missing:
        sys.exit("\n".join(["not released:", *missing]))
    files = *map(wheel_path, LOADERS), sdist_path()
    print("ready. Type:")
    print(f"    git tag -a v{version()} -m 'flash_ext {version()}' && git push --tags")
    print(f"    python -m twine upload {' '.join(f'dist/{x.name}' for x in files)}")
    print("    upload dist/hub to the kernel repository")


if __name__ == "__main__":
    main()
