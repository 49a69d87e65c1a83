"""The checklist of a release. Run by `make release`; it builds and uploads nothing.

It refuses, with exit status 1, while anything is missing:

    source   nothing uncommitted, a section of CHANGELOG.md for the version, no such tag yet
    lint     make lint passes
    GPU      tests and sanitizers ran on a GPU with this very source (its digest), without a failure
    docs     tables and figures are those of the results
    wheel    of this source, and passes what `make wheel` checks; the sdist is that of this commit
    hub      dist/hub holds the wheel's library, and every file has its checksum
    compat   each torch and Python is tested with this wheel, and so is a GPU; each nvcc builds its
             source; all are green

Then it writes dist/SHA256SUMS and prints what is left to type.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compat
import make_hub
import make_wheel
from make_wheel import DIST, ROOT, sdist_path, version, wheel_path

RESULTS = ROOT / "benchmarks/results"


def output(*command: str) -> tuple[int, str]:
    """The exit status of a command in this repository, and what it printed."""
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout.strip()


def source_complaints() -> Iterator[str]:
    status, changed = output("git", "status", "--porcelain")
    if status:
        yield "this is no git checkout"
    elif changed:
        yield f"not committed: {', '.join(x[3:] for x in changed.splitlines())}"
    if output("git", "tag", "--list", f"v{version()}")[1]:
        yield f"the tag v{version()} exists already: raise __version__ in flash_ext/__init__.py"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(version())}\b", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no section of {version()}"
    if re.search(r"^## \[?Unreleased", changelog, re.MULTILINE | re.IGNORECASE):
        yield "CHANGELOG.md has unreleased changes: move them to the section of the version"


def lint_complaints() -> Iterator[str]:
    status, text = output("make", "-s", "lint")
    if status:
        yield f"make lint fails: {text.splitlines()[-1]}"


def gpu_complaints(results: Path, digest: str) -> Iterator[str]:
    """What is missing of the evidence from a GPU."""
    ran: dict[str, list[Any]] = {"tests": [], "sanitizer": []}
    for name, found in ran.items():
        for path in results.glob(f"*/{name}.json"):
            content = json.loads(path.read_text())
            if content.get("digest") == digest:
                found.append(content)
    if not ran["tests"]:
        yield f"no GPU tests of source {digest}: run make gpu-test on a GPU"
    for tests in ran["tests"]:
        counts = tests["counts"]
        if tests["exit_status"] or counts["failed"] or counts["error"] or not counts["passed"]:
            yield f"GPU tests failed on {tests['device']}: {counts}"
    if not ran["sanitizer"]:
        yield f"no sanitizer run of source {digest}: run make sanitize on a GPU"
    for run in ran["sanitizer"]:
        for tool, result in run["tools"].items():
            if result["exit_status"]:
                yield f"{tool} complains on {run['device']}"


def document_complaints() -> Iterator[str]:
    done = subprocess.run(
        [sys.executable, "-m", "report", "--check"],
        cwd=ROOT / "benchmarks", capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        yield from done.stdout.strip().splitlines() or [done.stderr.strip().splitlines()[-1]]


def wheel_complaints(digest: str) -> Iterator[str]:
    for path in (wheel_path(), sdist_path()):
        if not path.is_file():
            yield f"there is no {path.name}: run make wheel"
            return
    yield from make_wheel.complaints(wheel_path())
    found = make_wheel.run_tool("twine", "check", "--strict", str(wheel_path()), str(sdist_path()))
    if found:
        yield found
    with zipfile.ZipFile(wheel_path()) as archive:
        record = json.loads(archive.read(make_wheel.RECORD))
        names = [n for n in archive.namelist() if n.startswith("flash_ext/") and n.endswith(".py")]
        files = [n for n in names if not (ROOT / n).is_file()
                 or archive.read(n) != (ROOT / n).read_bytes()]  # fmt: skip
    if record.get("digest") != digest:
        yield f"the wheel's library is of source {record.get('digest')}, not {digest}: make wheel"
    if record.get("platform") != make_wheel.PLATFORM:
        yield f"the wheel's library was linked for {record.get('platform')}: make wheel"
    if files:
        yield f"the wheel has another {', '.join(files)}: make wheel"
    with tempfile.TemporaryDirectory() as folder:
        make_wheel.make_sdist(Path(folder))
        if Path(folder, sdist_path().name).read_bytes() != sdist_path().read_bytes():
            yield "the sdist is not that of this commit: make wheel"


def hub_complaints() -> Iterator[str]:
    yield from make_hub.complaints(make_hub.HUB)
    libraries = list(make_hub.HUB.glob("build/torch-stable-abi*/" + make_wheel.BINARY))
    if not libraries or not wheel_path().is_file():
        yield "dist/hub has no library: run make hub"
        return
    with zipfile.ZipFile(wheel_path()) as archive:
        if archive.read(make_wheel.BINARY) != libraries[0].read_bytes():
            yield "dist/hub has another library than the wheel: run make hub"


def compat_complaints(found: dict[str, Any], wanted: str) -> Iterator[str]:
    """What is missing in compat.json for the wheel whose package has this checksum."""
    if found.get("wheel") != wanted:
        yield "benchmarks/results/compat.json is of another wheel: run make compat"
        return
    for name in (*compat.NAMES, "gpu"):
        row = found["rows"].get(name)
        how = "distribution/compat.py --gpu, on a GPU" if name == "gpu" else "make compat"
        if row is None:
            yield f"{name} is not tested: run {how}"
        elif not row["green"]:
            yield f"{name} is not green: {row.get('unavailable') or row.get('failed') or row}"


def main() -> int:
    digest = compat.common.source_digest()
    checksum = ""
    if wheel_path().is_file():
        checksum = make_wheel.content_checksum(wheel_path())
    results = compat.common.read_json(compat.RESULTS) or {}
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "source": source_complaints,
        "lint": lint_complaints,
        "GPU": lambda: gpu_complaints(RESULTS, digest),
        "docs": document_complaints,
        "wheel": lambda: wheel_complaints(digest),
        "hub": hub_complaints,
        "compat": lambda: compat_complaints(results, checksum),
    }
    print(f"flash_ext {version()}, source {digest}")
    ready = True
    for name, check in checks.items():
        found = list(check())
        ready &= not found
        print(f"{name}: {'MISSING' if found else 'ok'}")
        for line in found:
            print(f"    {line}")
    if not ready:
        print("not released: see above")
        return 1
    sums = [f"{hashlib.sha256(x.read_bytes()).hexdigest()}  {x.name}"
            for x in (wheel_path(), sdist_path())]  # fmt: skip
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print("ready. What is left:")
    print(f"    git tag -a v{version()} -m 'flash_ext {version()}' && git push --tags")
    print(f"    python -m twine upload dist/{wheel_path().name} dist/{sdist_path().name}")
    print("    upload dist/hub to the kernel repository")
    return 0


if __name__ == "__main__":
    sys.exit(main())
