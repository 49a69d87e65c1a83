"""The runner of the GPU tests and its reports: completeness, and what it is evidence for.

Would catch a report written by a run that left tests out, a part that crashes unseen, and results
of a second run that stand for another source.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_suite
import gpu_test_report
import pytest
import torch
from forked import run_python

common = gpu_test_report.common
ROOT = Path(__file__).resolve().parent.parent


class Reports:
    """A plugin of pytest that keeps what it reports."""

    def __init__(self) -> None:
        self.skipped: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.skipped += [report] * report.skipped


def test_report_says_why_tests_were_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('i', (1, 2))\n"
        "def test_memory(i): pytest.skip('needs 100 GiB')\n"
        "@pytest.mark.skip(reason='needs two GPUs')\n"
        "def test_two(): pass\n"
        "def test_one(): pass\n"
    )
    reports = Reports()
    quiet = ("-p", "no:cacheprovider", "-p", "no:terminal", f"--rootdir={tmp_path}")
    assert pytest.main([*quiet, str(tmp_path)], plugins=[reports]) == 0
    reasons = gpu_test_report.skip_reasons(reports.skipped)
    assert reasons == {"needs 100 GiB": 2, "needs two GPUs": 1}


# As `pytest ARGUMENTS --share taken --report I.json`, in so many processes at a time; what
# conftest.py imports is imported once.
RUN_PROCESSES = """
import os, sys, pytest
import gpu_suite, gpu_test_report, grids
jobs, *arguments = sys.argv[1:]
for i in range(int(jobs)):
    if os.fork() == 0:
        report = ["--share", "taken", "--report", f"{i}.json"]
        os._exit(pytest.main([*arguments, *report]))
for i in range(int(jobs)):
    os.wait()
"""


def run_shared(jobs: int, folder: Path) -> list[common.Json]:
    """Run the tests of a folder in so many processes; their reports."""
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    command = ["-c", RUN_PROCESSES, str(jobs), "-q", "-p", "no:cacheprovider", "-s"]
    command += [f"--rootdir={folder}", str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    run_python(*command, env=environment, cwd=folder)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(jobs)]


def test_a_process_that_loses_its_gpu_takes_no_more_tests(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import torch\n"
        "def test_one():\n"
        "    def fail(): raise RuntimeError('an illegal memory access')\n"
        "    torch.cuda.is_initialized = lambda: True\n"
        "    torch.cuda.mem_get_info = lambda: (1 << 40, 1 << 40)\n"
        "    torch.cuda.synchronize = fail\n"
        "    assert False\n"
        "def test_two(): pass\n"
    )
    [report] = run_shared(1, tmp_path)
    assert report["counts"]["failed"] == 1 and report["counts"]["passed"] == 0
    assert report["collected"] == 2
    assert report["unfinished"] == ["test_some.py::test_two"]


def test_a_crash_loses_only_the_tests_that_a_process_had_taken(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('i', range(20))\n"
        "def test_it(i): os._exit(9) if i == 10 else None\n"
    )
    [report] = run_shared(1, tmp_path)
    assert report["counts"]["passed"] == 7, "of the first 8: the last one was about to run"
    assert report["unfinished"] == [f"test_some.py::test_it[{i}]" for i in range(7, 16)]


def test_a_report_under_xdist(tmp_path: Path) -> None:
    """As noxfile.py asks for it: the process that writes it has collected nothing."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_some.py").write_text("def test_one(): pass\ndef test_two(): assert False\n")
    command = ["-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "--report", "x.json"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT}"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, *command, f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "KeyError" not in done.stderr, done.stderr
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["counts"]["passed"] == 1 and report["failures"] == ["test_some.py::test_two"]
    assert report["collected"] == 2 and report["unfinished"] == []


def test_processes_share_the_gpu_tests(tmp_path: Path) -> None:
    """Every test runs once, and the variants of a test in one process."""
    (tmp_path / "test_some.py").write_text(
        "import os, pathlib, pytest, time\n"
        "@pytest.mark.parametrize('name', ('fa1', 'fa2', 'fa3'))\n"
        "@pytest.mark.parametrize('i', range(60))\n"
        "def test_it(i, name):\n"
        "    time.sleep(0.005)\n"
        "    with pathlib.Path(f'{os.getpid()}.ran').open('a') as file: print(i, file=file)\n"
        "    assert i != 7 or name != 'fa3'\n"
        "@pytest.mark.parametrize('gpus', (0, 99))\n"
        "def test_gpus(gpus, need_gpus): need_gpus(gpus)\n"
    )
    parts = run_shared(3, tmp_path)
    passed = [part["counts"]["passed"] for part in parts]
    assert sum(passed) == 180 and min(passed) > 0
    assert {part["collected"] for part in parts} == {182}
    ran = [path.read_text().split() for path in tmp_path.glob("*.ran")]
    assert sorted(int(x) for some in ran for x in some) == sorted([*range(60)] * 3)
    assert all(some.count(x) == 3 for some in ran for x in some), "variants stay together"
    assert [x for p in parts for x in p["several_gpus"].items()] == [
        ("test_some.py::test_gpus[0]", 0)
    ], "named with their number where there are as many"
    assert [x for p in parts for x in p["skips"]] == ["needs 99 GPUs"]
    assert sorted(p["counts"]["failed"] for p in parts) == [0, 0, 1]
    assert [x for p in parts for x in p["failures"]] == ["test_some.py::test_it[7-fa3]"]


def test_processes_begin_with_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each still sees all of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    seen = [gpu_suite.visible_devices(job)["CUDA_VISIBLE_DEVICES"] for job in range(3)]
    assert seen == ["3,5", "5,3", "3,5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpu_suite.visible_devices(1)["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_failed_tests_run_again() -> None:
    before = {
        "counts": {"passed": 7, "failed": 2, "error": 1, "skipped": 4},
        "failures": ["a", "b", "c"], "exit_status": 1, "digest": "x", "processes": 8,
    }  # fmt: skip
    again = {
        "counts": {"passed": 2, "failed": 1}, "failures": ["b"], "exit_status": 1, "processes": 1,
        "skips": {}, "several_gpus": {"a": 4},
    }  # fmt: skip
    found = gpu_suite.replaced(before | {"several_gpus": {"d": 2}}, again)
    counts = {"passed": 9, "failed": 1, "error": 0, "skipped": 4}
    several = {"a": 4, "d": 2}
    new = {"counts": counts, "failures": ["b"], "again": 3, "several_gpus": several}
    assert found == before | new


@pytest.mark.parametrize(
    ("before", "again", "status", "message"),
    (
        (["a process ended with status -6"], [], 1, "nothing was run: 'a process ended"),
        (["tests/test_rule.py::test_gone"], [], 4, "nothing is written: .* status 4"),
        (["tests/test_rule.py"], ["a process ended with status 1"], 1, "nothing is written"),
    ),
)
def test_what_did_not_run_again_replaces_nothing(
    before: list[str], again: list[str], status: int, message: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    result = {"failures": again, "counts": {}, "exit_status": status}
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "GPU")
    monkeypatch.setattr(common, "describe_setup", lambda device: {})
    monkeypatch.setattr(gpu_suite, "run", lambda *_: result)
    path = gpu_test_report.result_path(torch.device("cuda"), "tests.json")
    common.write_json(path, {"failures": before, "counts": {}})
    with pytest.raises(SystemExit, match=message):
        gpu_suite.run_failed(tmp_path)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A made-up device, whose results go to a folder of this test."""
    setup = dict.fromkeys(gpu_test_report.SAME_SETUP, "x") | {
        "device": "NVIDIA H200",
        "date": "2026",
    }
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(common, "describe_setup", lambda device: setup)
    monkeypatch.setattr(gpu_suite, "why_no_gpu", lambda: None)
    return setup


def test_a_report_in_another_file_says_as_much(
    machine: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --to too: versions, digest and date; so --failed knows whether it belongs here."""
    path, test = tmp_path / "there.json", "tests/test_rule.py::test_it"
    first = {"counts": {"passed": 1, "failed": 1}, "failures": [test], "exit_status": 1}
    again = {"counts": {"passed": 1}, "failures": [], "exit_status": 0, "several_gpus": {}}
    monkeypatch.setattr(gpu_suite, "run", lambda *x, **_: again if x[3:] == ([test],) else first)
    arguments = ["gpu_suite", "--jobs", "20", "--to", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu_suite.main() == 1
    assert json.loads(path.read_text()) == machine | first
    assert not (tmp_path / "nvidia-h200/tests.json").exists()
    monkeypatch.setattr(sys, "argv", [*arguments, "--failed"])
    assert gpu_suite.main() == 0
    counts = {"passed": 2, "failed": 0, "error": 0}
    assert json.loads(path.read_text()) == machine | again | {"counts": counts, "again": 1}
    machine["digest"] = "of a later source"
    with pytest.raises(SystemExit, match="there.json is of another source"):
        gpu_suite.main()


def test_without_a_gpu_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite of which every test skips is no evidence."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_suite, "run", lambda *_: pytest.fail("the tests were run"))
    monkeypatch.setattr(sys, "argv", ["gpu_suite"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu_suite.main()


@pytest.mark.parametrize("unfinished", ([], ["a", "b"]))
@pytest.mark.parametrize("crashed", (None, "1.json"))
def test_a_process_that_crashes_counts(
    crashed: str | None, unfinished: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are added up. A crash is an error, or as many as tests had begun, and so are tests
    that did not run."""

    def one(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        report = Path(command[command.index("--report") + 1])
        assert command[command.index("--share") + 1] == str(tmp_path / "taken")
        status = -11 if report.name == crashed else 0
        names = unfinished if status else []
        if not status or names:
            found = {"counts": {"passed": 2 - len(names)}, "unfinished": names, "collected": 6}
            found |= {"skips": {"why": 1}, "failures": [], "several_gpus": {report.name: 2}}
            report.write_text(json.dumps(found))
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(gpu_suite.subprocess, "run", one)
    result = gpu_suite.run(3, [], tmp_path)
    if crashed is None:
        assert result["counts"] == {"passed": 6, "error": 0} and result["skips"] == {"why": 3}
        assert result["exit_status"] == 0 and result["failures"] == []
        return
    assert result["counts"] == {"passed": 4, "error": 2}
    assert result["exit_status"] == 11
    if unfinished:
        assert result["failures"] == unfinished
        return
    assert result["failures"] == ["a process ended with status -11", "2 tests did not run"]
    assert result["several_gpus"] == {"0.json": 2, "2.json": 2}


def test_make_tells_the_sanitizers_which_python() -> None:
    """The one of .venv, which PYTHON only makes."""
    command = ["make", "-n", "sanitize", "PYTHON=false", "ARGS=memcheck"]
    # As typed by a user, also if make runs this test.
    env = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    python = ROOT / ".venv/bin/python"
    assert f'PYTHON="{python}" bash tests/sanitize.sh memcheck\n' in found.stdout


def test_report_files(machine: dict[str, str], tmp_path: Path) -> None:
    path = gpu_test_report.write("tests.json", {"counts": {"passed": 3}})
    assert path == tmp_path / "nvidia-h200" / "tests.json"
    assert json.loads(path.read_text()) == machine | {"counts": {"passed": 3}}
    path = gpu_test_report.write_sanitizer(["memcheck 0 12", "racecheck 99 30"], 24)
    assert path.name == "sanitizer.json"
    tools = json.loads(path.read_text())["tools"]
    assert tools["racecheck"] == {"exit_status": 99, "seconds": 30}


def test_tools_that_ran_apart_are_one_report_of_one_source() -> None:
    now = {key: key for key in gpu_test_report.SAME_SETUP} | {"cases": 9}
    clean, late = {"exit_status": 0, "seconds": 7}, {"exit_status": 124, "seconds": 400}
    before = now | {"tools": {"racecheck": late, "memcheck": clean}}
    both = gpu_test_report.with_other_tools({"racecheck": clean}, before, now)
    assert both == {"memcheck": clean, "racecheck": clean}
    for changed in ({"digest": "another"}, {"cases": 8}, {"device": "another"}):
        alone = gpu_test_report.with_other_tools({"racecheck": clean}, before | changed, now)
        assert alone == {"racecheck": clean}
    assert gpu_test_report.with_other_tools({"racecheck": late}, {}, now) == {"racecheck": late}
