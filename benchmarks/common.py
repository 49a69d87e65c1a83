"""What every benchmark shares: the machine's description, the source digest, results, progress.

``python benchmarks/common.py --digest`` prints the source digest; see digest.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digest import ROOT, source_digest

with contextlib.suppress(ModuleNotFoundError):  # --digest needs no torch
    import torch

    # By its path: builds.py times an older build of flash_ext as it times this one.
    _spec = importlib.util.spec_from_file_location("timer", ROOT / "flash_ext/timing.py")
    assert _spec is not None and _spec.loader is not None
    sys.modules["timer"] = timing = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(timing)
    first_line, progress, cpu_name = timing.first_line, timing.progress, timing.cpu_name

RESULTS = ROOT / "benchmarks" / "results"
# What must be equal for two runs to be in one result file.
SAME_SETUP = ("device", "torch", "cuda", "cudnn", "driver", "digest")

if importlib.util.find_spec("flash_ext") is None:  # not installed: measure the checkout itself
    sys.path.insert(0, str(ROOT))

Json = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A goal and what was measured for it, or why nothing was."""

    goal: str
    measured: str  # "": it was not asked for
    reached: bool | None  # None: not all that the goal speaks of was measured
    why: str = ""  # it is not reached, where that is known

    def __str__(self) -> str:
        words = {True: "reached", False: "NOT REACHED", None: "not all was measured"}
        return f"{self.goal}: {self.measured or 'not measured'}; {words[self.reached]}"


def nvidia_smi(device: torch.device) -> dict[str, str]:
    """Driver, clocks and power of ``device`` as nvidia-smi reports them, or {} without it."""
    fields = (
        "driver_version",
        "power.limit",
        "power.draw",
        "temperature.gpu",
        "clocks.sm",
        "clocks.max.sm",
        "clocks.mem",
    )
    if shutil.which("nvidia-smi") is None:
        return {}
    # By its UUID, because CUDA_VISIBLE_DEVICES renumbers what torch sees; otherwise the first one.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    for chosen in ([f"--id=GPU-{uuid}"], []):
        command = ["nvidia-smi", *chosen, f"--query-gpu={','.join(fields)}"]
        try:
            done = subprocess.run(
                [*command, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return {}
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            return dict(zip(fields, (v.strip() for v in lines[0].split(",")), strict=False))
    return {}


class ClockLog:
    """SM clock, power and temperature of a GPU over time, from a running nvidia-smi.

    `power.draw` would be the mean of a second, in which other calls ran as well.
    """

    FIELDS = {
        "sm_mhz": "clocks.sm",
        "power_w": "power.draw.instant",
        "temperature_c": "temperature.gpu",
    }
    PERIOD_MS, START_SECONDS = 50, 3.0

    def __init__(self, device: torch.device) -> None:
        self.samples: list[list[float]] = []
        self.process: subprocess.Popen[str] | None = None
        if device.type != "cuda" or shutil.which("nvidia-smi") is None:
            return
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        chosen = [f"--id=GPU-{uuid}"] if uuid else []
        query = f"--query-gpu={','.join(self.FIELDS.values())}"
        self.process = subprocess.Popen(
            ["nvidia-smi", *chosen, query, "--format=csv,noheader,nounits", "-lms",
             str(self.PERIOD_MS)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            self.add(line)

    def add(self, line: str) -> None:
        """One line of nvidia-smi; values that it cannot read ("[N/A]") are left out."""
        try:
            self.samples.append([float(x) for x in line.split(",")])
        except ValueError:
            return

    def wait_for_sample(self) -> None:
        """Return when there is one, or when there should have been: nvidia-smi takes a moment."""
        end = time.monotonic() + self.START_SECONDS
        while self.process is not None and not self.samples and time.monotonic() < end:
            time.sleep(self.PERIOD_MS * 1e-3)

    def since_last(self) -> dict[str, float]:
        """Medians of the values since the last call; {} if there are none."""
        found, self.samples = self.samples, []
        columns = zip(*found, strict=True)
        return {n: statistics.median(c) for n, c in zip(self.FIELDS, columns, strict=False)}

    def close(self) -> None:
        """End the nvidia-smi that was started."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


def describe_setup(device: torch.device) -> Json:
    """Device, versions, source digest, date and clocks: the head of every result file."""
    import flash_ext
    from flash_ext.ops import binary

    cuda = device.type == "cuda"
    smi = nvidia_smi(device) if cuda else {}
    origin = Path(flash_ext.__file__).resolve()
    if not origin.is_relative_to(ROOT):
        print(
            f"warning: measuring the installed {origin.parent}, but the digest is of {ROOT};"
            " install with pip install --no-build-isolation -e .",
            file=sys.stderr,
        )
    build, digest = binary.cuda_build(), source_digest()
    if cuda and build is not None and build.digest not in (None, digest):
        raise SystemExit(f"the kernels are of source {build.digest}, this is {digest}: make build")
    setup: Json = {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "driver": smi.get("driver_version"),
        "python": platform.python_version(),
        "digest": digest,
        "date": now(),
    }
    if smi:
        setup["nvidia_smi_at_start"] = smi
    if not cuda:
        setup["threads"] = torch.get_num_threads()
    return setup


def now() -> str:
    """The time in UTC, to the second, in ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def slug(device: torch.device) -> str:
    """The name of a device's folder under results: 'NVIDIA H200' gives 'nvidia-h200'."""
    if device.type != "cuda":
        return device.type
    name = torch.cuda.get_device_name(device).lower()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def result_path(device: torch.device, name: str, out: str | None = None) -> Path:
    """``out`` if given, otherwise results/<device>/<name>; creates the folder."""
    path = Path(out) if out else RESULTS / slug(device) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def read_json(path: Path) -> Json | None:
    """The content of a result file, or None where there is none."""
    return json.loads(path.read_text()) if path.is_file() else None


def write_json(path: Path, content: Json) -> None:
    """Write atomically: an interrupted run leaves the old file intact."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """No other process is within this, of the same folder, at the same time."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def same_setup(a: Json, b: Json) -> bool:
    """Whether two results come from the same device, versions and sources."""
    return all(a.get(key) == b.get(key) for key in SAME_SETUP)


def earlier(path: Path, setup: Json) -> Json:
    """What a result file has of the same device, versions and sources, or {}."""
    found = read_json(path)
    return found if found and same_setup(found, setup) else {}


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_device(parser: argparse.ArgumentParser, **more: Any) -> None:
    """Add --device, by default the GPU where there is one. `more` is for add_argument."""
    from flash_ext.__main__ import usable_device

    def chosen(text: str) -> str:
        device = torch.device(usable_device(text))
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where events, which take the times, are recorded
        return text

    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=chosen, default=default, **more)


def say(line: str) -> None:
    """Print a line without breaking a progress bar."""
    try:
        from tqdm import tqdm
    except ImportError:
        print(line)
    else:
        tqdm.write(line)


EXTRA_MEMORY = (
    "Peak extra memory of one call: the most memory the allocator held for tensors during the "
    "call, less what it held just before. Outputs and temporaries count, inputs do not; for a "
    "backward call, what the forward call saved does not either."
)


def peak_extra_memory(call: Callable[[], object], device: torch.device) -> int:
    """Bytes of peak extra memory of one call, as defined by ``EXTRA_MEMORY``.

    On CUDA the caching allocator's own statistics. On CPU torch's profiler, which sees every
    allocation and release of torch's CPU allocator.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it logs every start and stop
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = recorded.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--digest", action="store_true", required=True)
    arguments.parse_args()
    print(source_digest())
