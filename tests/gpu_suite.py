"""The GPU tests in several processes that share the GPUs. Run by `make gpu-test`.

    python tests/gpu_suite.py                  # all of them; benchmarks/results/<gpu>/tests.json
    python tests/gpu_suite.py --to FILE        # the same, to another file
    python tests/gpu_suite.py --jobs 16        # in 16 processes
    python tests/gpu_suite.py -k varlen -x     # some of them, with options of pytest; no file
    python tests/gpu_suite.py --failed         # those that failed, where a test was wrong
    python tests/gpu_suite.py --failed --to FILE         # those that failed in that file

Most of a test's time is Python's and the launches', on one core. So several processes share the
tests: each takes some (`taken`) whenever it has none, and reports what it ran. Tests that a process
had taken when it crashed count as errors, by name.

--failed is for a report of this very source, when only tests have changed since: the results of the
tests that failed there are replaced, and "again" in the file says how many they are. It refuses
where it is not known which tests did not run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

TESTS = Path(__file__).resolve().parent
MAX_JOBS = 6  # of a GPU
GIB_PER_JOB = 12  # of GPU memory
NO_TESTS = 5  # an exit status of pytest


def groups_of(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """Tests by node id but for the variant: variants are held against the same reference, which is
    computed once."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(re.sub(r"fa[123]", "", item.nodeid), []).append(item)
    return list(groups.values())


def taken(shared: Path, count: int, at_a_time: int = 8) -> Iterator[range]:
    """Some numbers at a time, below `count`, that no other process takes from the same file."""
    while True:
        with shared.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            first = int(file.read() or 0)
            file.truncate(0)
            file.write(str(first + at_a_time))
        if first >= count:
            return
        yield range(first, min(first + at_a_time, count))


def why_no_gpu() -> str | None:
    """None where the GPU tests can run, otherwise the reason they cannot."""
    import torch

    import flash_ext

    library = Path(flash_ext.__file__).resolve().parent / "_C.abi3.so"
    if not torch.cuda.is_available():
        return "no CUDA device, or a torch built without CUDA"
    if not library.exists():
        return f"the CUDA kernels were not built: there is no {library.name} beside flash_ext"
    return None


def default_jobs() -> int:
    """As many processes as the CPU's cores and the GPUs' memory have room for."""
    import torch

    gpus = torch.cuda.device_count()
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else 0
    cores = os.cpu_count() or 1
    return max(1, min(cores // 2, gpus * min(MAX_JOBS, memory // (GIB_PER_JOB << 30))))


def visible_devices(job: int) -> dict[str, str]:
    """An environment in which this process begins with another GPU than the one before."""
    import torch

    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if gpus == [""]:
        gpus = [str(i) for i in range(torch.cuda.device_count())]
    if not gpus:
        return dict(os.environ)
    first = job % len(gpus)
    return os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first:] + gpus[:first])}


def run(
    jobs: int,
    options: list[str],
    folder: Path,
    tests: Sequence[str] = (str(TESTS),),
) -> dict[str, Any]:
    """Run the tests in so many processes; logs go to the folder. Returns counts, reasons of skips,
    failures, and which passed on several GPUs."""
    started = time.monotonic()
    reports = [folder / f"{i}.json" for i in range(jobs)]
    logs = [folder / f"{i}.log" for i in range(jobs)]

    def run_one(i: int) -> int:
        command = [
            sys.executable, "-m", "pytest", *tests, "-m", "gpu", "--share", str(folder / "taken"),
            "--report", str(reports[i]), *options,
        ]  # fmt: skip
        with logs[i].open("w") as file:
            where: Any = {"cwd": TESTS.parent, "env": visible_devices(i)}
            return subprocess.run(
                command, **where, stdout=file, stderr=subprocess.STDOUT
            ).returncode

    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run_one, i) for i in range(jobs)]
        while not all(one.done() for one in running):
            time.sleep(1)
            percents = [re.findall(r"\[ *(\d+)%\]", x.read_text()) for x in logs if x.exists()]
            done = sum(int(found[-1]) for found in percents if found)
            if sys.stdout.isatty():
                print(f"\r{done:3} % of the GPU tests, {jobs} processes", end="", flush=True)
    print()

    counts: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    several_gpus: dict[str, int] = {}
    failures: list[str] = []
    collected, ran, statuses = 0, 0, []
    for one, report, log in zip(running, reports, logs, strict=True):
        none = one.result() == NO_TESTS and options  # which may leave none
        statuses.append(0 if none else one.result())
        unfinished: list[str] = []
        if report.exists():
            found = json.loads(report.read_text())
            unfinished = found["unfinished"]
            collected = max(collected, found["collected"])
            counts.update(found["counts"])
            counts["error"] += len(unfinished)
            ran += sum(found["counts"].values()) + len(unfinished)
            skips.update(found["skips"])
            several_gpus |= found["several_gpus"]
            failures += found["failures"] + unfinished
        if one.result() not in (0, 1, 2, NO_TESTS) and not unfinished:
            counts["error"] += 1
            failures.append(f"a process ended with status {one.result()}")
        if statuses[-1]:
            print(log.read_text()[-8000:])
    if ran < collected:
        counts["error"] += 1
        failures.append(f"{collected - ran} tests did not run")
        statuses.append(1)
    return {
        "selection": "-m gpu",
        "counts": dict(counts),
        "skips": dict(sorted(skips.items())),
        "several_gpus": dict(sorted(several_gpus.items())),
        "failures": failures,
        "exit_status": max(map(abs, statuses)),
        "processes": jobs,
        "seconds": round(time.monotonic() - started, 1),
    }


def replaced(before: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """The results with those of the tests that failed, which ran again."""
    counts = Counter(before["counts"])
    counts["failed"] = counts["error"] = 0
    counts.update(again["counts"])
    number = before.get("again", 0) + len(before["failures"])
    ran_again = {key: again[key] for key in ("failures", "exit_status")}
    several_gpus = before.get("several_gpus", {}) | again["several_gpus"]
    return before | ran_again | {
        "counts": dict(counts), "several_gpus": several_gpus, "again": number
    }  # fmt: skip


def not_tests(failures: list[str]) -> list[str]:
    """Those that are no node ids: what `run` says of a process that has crashed."""
    return [x for x in failures if not (TESTS.parent / x.partition("::")[0]).is_file()]


def run_failed(folder: Path, report: Path | None = None) -> dict[str, Any]:
    """Run the tests that failed in a report, by default tests.json, again; the results of all."""
    import gpu_test_report
    import torch
    from gpu_test_report import common

    device = torch.device("cuda")
    report = report or gpu_test_report.result_path(device, "tests.json")
    before = common.read_json(report)
    if before is None or not gpu_test_report.same_setup(before, common.describe_setup(device)):
        sys.exit(f"nothing was run: {report} is of another source or machine, or does not exist")
    if not before["failures"]:
        sys.exit("nothing was run: no test failed")
    if unknown := not_tests(before["failures"]):
        sys.exit(f"nothing was run: {unknown[0]!r} names no test; run all of them again")
    again = run(1, [], folder, before["failures"])
    if again["exit_status"] not in (0, 1) or not_tests(again["failures"]):  # some did not run
        sys.exit(f"nothing is written: pytest ended with status {again['exit_status']}")
    return replaced(before, again)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, help="processes; default: by cores and GPU memory")
    parser.add_argument("--to", type=Path, help="the file, in place of tests.json")
    parser.add_argument("--failed", action="store_true", help="those that failed, once more")
    args, options = parser.parse_known_args()
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    if (reason := why_no_gpu()) and not options:
        sys.exit(f"nothing was run: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        if args.failed:
            result = run_failed(Path(folder), args.to)
        else:
            jobs = args.jobs or default_jobs()
            result = run(jobs, options, Path(folder))
    print(json.dumps(result, indent=1))
    if options:
        print("these were not all of the tests: nothing is written")
    else:
        import gpu_test_report

        print("written:", gpu_test_report.write("tests.json", result, args.to))
    return int(bool(result["exit_status"]))


if __name__ == "__main__":
    sys.exit(main())
