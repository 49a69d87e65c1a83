"""Markers, devices and the test report.

A test that takes the argument `device` runs once per device: "cpu", and "cuda" under the marker
`gpu`, which skips, saying why, where there is no GPU or no compiled library.

On a CPU, whose kernels have few paths, such a test has only some of its cases, in which each value
of each argument occurs: grids.some_of. --all-cases and the marker `all_cases` keep all of them.
With --quick, as in `make test`, every test has only some of its cases, and a test with the marker
`share` only that share of them.

A test with the argument `variant` is left out where that variant does not run the test's problem:
`attention_testing.unsupported_reason` knows. The problem is the argument `problem`, or has for its
fields the arguments of their names, what is in the argument `options`, and what the marker
`options` names.
Where a variant runs nothing on this GPU its tests skip, saying why.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))  # the helper modules, whatever pytest's import mode

import attention_testing  # noqa: E402
import gpu_suite  # noqa: E402
import gpu_test_report  # noqa: E402
import grids  # noqa: E402
from attention_testing import VARIANTS, Problem  # noqa: E402

# The fields of a problem that decide which variants run it.
DECISIVE = ("head_dim", "head_dim_v", "layout", "dropout_p", "bias")
LITTLE_GPU_MEMORY = 16 << 30  # bytes
COLLECTED = pytest.StashKey[int]()
BEGUN = pytest.StashKey[list[str]]()
CLAIM = Path(tempfile.gettempdir()) / "flash_ext_gpu_memory.lock"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        type=Path,
        metavar="FILE",
        help="share the tests with other processes that are given this file (gpu_suite.py)",
    )
    parser.addoption(
        "--report",
        type=Path,
        metavar="FILE",
        help="write counts, the reasons of skips and what failed, as JSON",
    )
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="on a CPU, too, all cases of the tests that run on each device",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="some of each test's cases, with the marker share only so many; not with --all-cases",
    )
    parser.addoption(
        "--soak",
        type=float,
        nargs="?",
        const=30.0,
        metavar="SECONDS",
        help="run the soak tests, of random problems: 30 seconds for each variant, or so many",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device and the compiled library")
    config.addinivalue_line("markers", "soak: runs only with --soak")
    config.addinivalue_line("markers", "all_cases: has all of its cases on a CPU, too")
    config.addinivalue_line("markers", "share(x): of its cases so many with --quick; 0: none")
    config.addinivalue_line("markers", "options(**fields): of the problems that the test runs")
    # The CPU's tensors are small, and with xdist every core has its own process.
    torch.set_num_threads(1)
    if config.option.markexpr == "not gpu":  # then most of the time would go to the others
        grids.DEVICES.remove("cuda")
        # The compiler's own processes would each import torch, for a file or two.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        if "torch._inductor.config" in sys.modules:
            torch._inductor.config.compile_threads = 1
    gc.disable()  # until all tests are there: nothing of them is garbage


def pytest_pycollect_makeitem(name: str, obj: object) -> list[pytest.Item] | None:
    """No cases of the tests for a GPU, of which there are thousands, if none is asked for."""
    if "cuda" in grids.DEVICES or not name.startswith("test"):
        return None
    return [] if any(mark.name == "gpu" for mark in getattr(obj, "pytestmark", ())) else None


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[COLLECTED] = len(session.items)
    session.config.stash[BEGUN] = []
    gc.freeze()  # what every later collection would look at, for a third of a second
    gc.enable()


def write_report(config: pytest.Config) -> None:
    """With --report."""
    if not config.option.report:
        return
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    report = gpu_test_report.summary(stats)
    finished = gpu_test_report.finished(stats)
    # Under xdist other processes collect.
    report["collected"] = config.stash.get(COLLECTED, len(finished))
    report["unfinished"] = [name for name in config.stash.get(BEGUN, []) if name not in finished]
    config.option.report.write_text(json.dumps(report))


def own_tests(session: pytest.Session) -> Iterator[pytest.Item]:
    """The tests that no other process takes. The report knows them before they run."""
    groups = gpu_suite.groups_of(session.items)
    begun = session.config.stash[BEGUN]
    for some in gpu_suite.taken(session.config.option.share, len(groups)):
        items = [item for i in some for item in groups[i]]
        begun += [item.nodeid for item in items]
        write_report(session.config)
        yield from items


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """With --share: the tests that no other process takes."""
    option = session.config.option
    if option.share is None or option.collectonly or session.testsfailed:
        return None
    items = own_tests(session)
    item, failed = next(items, None), 0
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            raise session.Interrupted(session.shouldfail or session.shouldstop)
        if session.testsfailed > failed and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:  # all that this process takes would fail
                raise session.Interrupted(str(error)) from error
        item, failed = following, session.testsfailed
    return True


@pytest.fixture(scope="module", autouse=True)
def forget_the_last_file() -> Iterator[None]:
    """No later collection looks at what a file leaves: imports, and what it has cached. Some files
    (and benchmarks, which collect before they time) spent most of their time on it."""
    yield
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = [marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")]
    parametrized = any("device" in (x.split(",") if isinstance(x, str) else x) for x in given)
    if "device" in metafunc.fixturenames and not parametrized:
        marks = {"cuda": pytest.mark.gpu}
        devices = [pytest.param(x, marks=marks.get(x, ())) for x in grids.DEVICES]
        metafunc.parametrize("device", devices)


def give_memory_back() -> None:
    attention_testing.reference_results.cache_clear()
    attention_testing.own_inputs.cache_clear()
    torch.cuda.empty_cache()


@pytest.fixture
def claim_gpu_memory() -> Iterator[Callable[[int], None]]:
    """Claims bytes of GPU memory, and half as many again for workspaces, or skips the test.

    For tests of large tensors: of all processes, one such test runs at a time. Meanwhile the others
    find in the file how much it needs.
    """
    with CLAIM.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        give_memory_back()

        def claim(size: int) -> None:
            needed, end = size * 3 // 2, time.monotonic() + 60
            lock.truncate(0)
            print(needed, file=lock, flush=True)
            while torch.cuda.mem_get_info()[0] < needed:
                if time.monotonic() > end:
                    pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
                time.sleep(0.5)

        yield claim
        torch.cuda.empty_cache()
        lock.truncate(0)


@pytest.fixture(autouse=True)
def leave_gpu_memory() -> Iterator[None]:
    """Gives back what this process has cached where little is free, or less than another claims."""
    yield
    if not torch.cuda.is_initialized():
        return
    claimed = CLAIM.read_text() if CLAIM.exists() else ""
    if torch.cuda.mem_get_info()[0] < max(LITTLE_GPU_MEMORY, int(claimed or 0)):
        give_memory_back()


def problem_of(item: pytest.Function) -> Problem:
    """The problem of a test, as far as it decides which variants run it."""
    arguments = item.callspec.params
    if isinstance(arguments.get("problem"), Problem):
        return arguments["problem"]
    fields: dict[str, object] = {}
    for marker in item.iter_markers("options"):
        fields |= marker.kwargs
    fields |= arguments.get("options", {}) | arguments
    return Problem(**{name: fields[name] for name in DECISIVE if name in fields})


def cases_left_out(items: Iterable[pytest.Item], quick: bool) -> Iterator[pytest.Item]:
    """The cases that the CPU does not need, of tests that run on each device; if quick, of all."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        arguments = getattr(getattr(item, "callspec", None), "params", {})
        asked = arguments.get("device") == "cpu" or (quick and arguments)
        if asked and not item.get_closest_marker("all_cases"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, of_test in tests.items():
        cases = [
            {name: repr(x) for name, x in item.callspec.params.items() if name != "device"}
            for item in of_test
        ]
        chosen = grids.some_of(cases, name) if cases[0] else {0}
        yield from (item for index, item in enumerate(of_test) if index not in chosen)


def beyond_their_shares(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases that tests do not have with --quick. Those that are kept are drawn, one at least
    unless the share is 0."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("share"):
            tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, cases in tests.items():
        share = cases[0].get_closest_marker("share").args[0]
        kept = random.Random(name).sample(range(len(cases)), math.ceil(share * len(cases)))
        yield from (item for index, item in enumerate(cases) if index not in kept)


@pytest.hookimpl(trylast=True)  # after pytest has left out what -k and -m do not ask for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = gpu_suite.why_no_gpu()
    left_out = []
    for item in items:
        if config.option.soak is None and item.get_closest_marker("soak"):
            left_out.append(item)
            continue
        on_gpu = item.get_closest_marker("gpu") is not None
        if reason and on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
        variant = item.callspec.params.get("variant") if hasattr(item, "callspec") else None
        if variant not in VARIANTS:
            continue
        device = "cuda" if on_gpu else "cpu"
        unsupported = attention_testing.device_unsupported_reason(variant, device)
        if on_gpu and unsupported:
            item.add_marker(pytest.mark.skip(reason=f"{variant} {unsupported}"))
        elif attention_testing.unsupported_reason(variant, problem_of(item), device):
            left_out.append(item)
    if not config.option.all_cases:
        gone = set(left_out)
        left_out += cases_left_out(
            (item for item in items if item not in gone), config.option.quick
        )
    if config.option.quick and not config.option.all_cases:
        gone = set(left_out)
        left_out += beyond_their_shares(item for item in items if item not in gone)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture
def need_gpus(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """Skips a test where there are fewer GPUs; tests.json names the others, with their GPUs."""

    def need(gpus: int) -> None:
        if torch.cuda.device_count() < gpus:
            pytest.skip(f"needs {gpus} GPUs")
        record_property("gpus", gpus)

    return need


def pytest_terminal_summary(config: pytest.Config) -> None:
    write_report(config)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkout without csrc/, in which nothing was built, for tests of setup.py."""
    root, folder = TESTS.parent, tmp_path / "source"
    ignored = shutil.ignore_patterns("_C.*", "__pycache__")
    for name in ("flash_ext", "distribution"):
        shutil.copytree(root / name, folder / name, ignore=ignored)
    (folder / "benchmarks").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "benchmarks/digest.py"):
        shutil.copy(root / name, folder / name)
    return folder
