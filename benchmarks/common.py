"""What every benchmark shares: the machine's description, memory, progress."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import torch
from digest import ROOT, kernel_digest, source_digest
from results import Json, now, say

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings it
    import tomli as tomllib

__all__ = ["Json", "ROOT", "now", "say", "source_digest"]  # from other modules

# By its path: builds.py times an older build of flash_ext as it times this one.
_spec = importlib.util.spec_from_file_location("timer", ROOT / "flash_ext/timing.py")
assert _spec is not None and _spec.loader is not None
sys.modules["timer"] = timing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(timing)
first_line, progress, cpu_name = timing.first_line, timing.progress, timing.cpu_name

RESULTS = results.FOLDER
SHAPES: Json = tomllib.loads((ROOT / "benchmarks" / "shapes.toml").read_text())

if importlib.util.find_spec("flash_ext") is None:  # not installed: measure the checkout itself
    sys.path.insert(0, str(ROOT))


def driver_version() -> str | None:
    """The driver's, as nvidia-smi reports it; None without it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(command, text=True, timeout=20).split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def describe_setup(device: torch.device) -> Json:
    """Device, versions, digests and date: what every result and test report says of itself."""
    import flash_ext
    from flash_ext.ops import binary

    cuda = device.type == "cuda"
    origin = Path(flash_ext.__file__).resolve()
    if not origin.is_relative_to(ROOT):
        print(f"warning: measuring the installed {origin.parent}, but the digest is of {ROOT};"
              " install with pip install --no-build-isolation -e .", file=sys.stderr)  # fmt: skip
    build, kernels = binary.cuda_build(), kernel_digest()
    if cuda and build is not None and build.kernels not in (None, kernels):
        raise SystemExit(f"the kernels are of csrc {build.kernels}, this is {kernels}: make build")
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "torch": torch.__version__, "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "driver": driver_version() if cuda else None, "python": platform.python_version(),
        "kernels": kernels, "digest": source_digest(), "date": now(),
    }  # fmt: skip


def begin(subject: str, args: argparse.Namespace) -> results.Recorder:
    """A run begins: the seed is set, and its results have a place."""
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")  # SDPA explains there what it then raises
    return results.Recorder(subject, describe_setup(torch.device(args.device)), args)


def read_json(path: Path) -> Json | None:
    """The content of a JSON file, or None if there is none."""
    return json.loads(path.read_text()) if path.is_file() else None


def write_json(path: Path, content: Json) -> None:
    """Write atomically: an interrupted run leaves the old file intact."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def parser(description: str | None, device: bool = False, **more: Any) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring as it is written. `device`: with --device, by
    default the GPU if there is one, and where results go. `more` is for add_argument."""
    help_as_it_is = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=description, formatter_class=help_as_it_is)
    if not device:
        return made
    from flash_ext.__main__ import usable_device

    def chosen(text: str) -> str:
        device = torch.device(usable_device(text))
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where events, which take the times, are recorded
        return text

    default = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", type=chosen, default=default, **more)
    results.add_output(made)
    return made


def free_memory(device: torch.device) -> None:
    """Give unused memory back to the device: one shape's tensors must not crowd out the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_extra_memory(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes that CUDA's allocator held during a call, less what it held before.

    Outputs and temporaries count, inputs do not; for a backward call, what the forward call saved
    does not either. 0 on a CPU, whose allocator does not count."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
