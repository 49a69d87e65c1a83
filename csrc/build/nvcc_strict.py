"""An nvcc that names slow kernels: those with spills, local memory and similar problems.

    python nvcc_strict.py NVCC ARGUMENTS...

runs nvcc, hides ptxas's statistics, and shows everything else and the kernels of which ptxas
reports spilled registers, local memory, serialized wgmma or an ignored setmaxnreg. With
FLASH_EXT_STRICT=1, as `make` sets it, such a kernel fails the compilation, and so does a warning
about the source. Otherwise it is a warning: its result is right, and it runs slower than it could.
(With -Werror in its place, a strict build would compile all files again that others compiled.)
The statistics are stored beside the object file, in OBJECT.ptxas.json; report() collects them for
the whole build. setup.py puts this in front of nvcc.

The files of fa3 and of FP8 are compiled only for sm_90a where that is among the targets.
"""

from __future__ import annotations

import json
import operator
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HOPPER_FILE = re.compile(r"(fa3|fp8)_\w+\.cu")
# The warnings about spills and local memory do not name the target; parse() writes its own.
SPILL = re.compile(r"ptxas warning.*(Registers are spilled|Local memory used)")
COMPLAINT = re.compile(r"ptxas.*(warning|Potential Performance Loss|serializ|setmaxnreg.*ignored)")
WARNING = re.compile(r"warning( #\d+-D)?: ")  # of the front end and of the host's compiler
STATISTICS = re.compile(r"ptxas info\s*:|^\s+\d+ bytes stack frame")
# cicc and ptxas take 3 % less time with huge pages and if malloc gives no memory back.
MALLOC = (
    "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1073741824"
    ":glibc.malloc.mmap_threshold=1073741824:glibc.malloc.top_pad=67108864"
)


FAILED = "failed because of the above; FLASH_EXT_STRICT=0 lets it pass"
SLOW = "the kernels above give right results, and run slower than they could (ptxas)"


def is_strict() -> bool:
    return os.environ.get("FLASH_EXT_STRICT", "0") not in ("", "0")


def parse(lines: list[str]) -> tuple[list[dict], list[str]]:
    """Reads the output of ptxas -v: one record per function and target, and the complaints."""
    kernels: list[dict] = []
    complaints: list[str] = []
    arch = ""
    nothing = {"stack": 0, "spill_stores": 0, "spill_loads": 0, "registers": 0, "seconds": 0.0}
    for line in lines:
        if SPILL.search(line):
            continue
        if COMPLAINT.search(line):
            complaints.append(line)
        elif match := re.search(r"Compiling entry function '\S+' for '(\S+)'", line):
            arch = match[1]
        elif match := re.search(r"Function properties for (\S+)", line):
            kernels.append({"name": match[1], "arch": arch} | nothing)
        elif not kernels:
            continue
        elif match := re.search(r"(\d+) bytes stack frame, (\d+).* stores, (\d+)", line):
            stack, stores, loads = map(int, match.groups())
            kernels[-1] |= {"stack": stack, "spill_stores": stores, "spill_loads": loads}
        elif match := re.search(r"Used (\d+) registers", line):
            kernels[-1]["registers"] = int(match[1])
        elif match := re.search(r"Compile time = ([\d.]+) ms", line):
            kernels[-1]["seconds"] = float(match[1]) / 1000
    complaints += [
        "{name} ({arch}): {stack} bytes of stack, {spill_stores} of spill stores,"
        " {spill_loads} of spill loads".format(**kernel)
        for kernel in kernels
        if kernel["stack"] or kernel["spill_stores"]
    ]
    return kernels, complaints


def without_idle_targets(command: list[str]) -> list[str]:
    """Removes from the command of a file of fa3 or FP8 all targets on which its kernels never run.

    Only sm_90a remains: calls on other GPUs are refused. A build without that target keeps its
    targets, since the launchers must be linked.
    """
    targets = [word for word in command if word.startswith("-gencode")]
    used = [word for word in targets if "sm_90a" in word]
    if not used or not any(HOPPER_FILE.fullmatch(Path(word).name) for word in command):
        return command
    return [word for word in command if word not in targets or word in used]


def demangle(text: str) -> str:
    """The text with the kernels' names as in the source, without arguments and namespace."""
    tool = shutil.which("c++filt")
    if tool is None:
        return text
    done = subprocess.run([tool, "-p"], input=text, capture_output=True, text=True, check=True)
    return done.stdout.replace("flash_ext::", "")


def compile_one(command: list[str]) -> int:
    """Runs nvcc. A strict build removes an object with a complaint: it is compiled again."""
    start = time.monotonic()
    command = without_idle_targets(command)
    run = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={"GLIBC_TUNABLES": MALLOC} | os.environ,
    )
    lines = run.stdout.splitlines()
    kernels, complaints = parse(lines)
    for line in lines:
        if not any(pattern.search(line) for pattern in (SPILL, COMPLAINT, STATISTICS)):
            print(line)
    if "-o" not in command or run.returncode != 0:
        return run.returncode

    obj = Path(command[command.index("-o") + 1])
    if complaints:
        print(demangle("\n".join(f"flash_ext: {line}" for line in complaints)))
    if is_strict() and (complaints or any(map(WARNING.search, lines))):
        print(f"flash_ext: {FAILED}")
        obj.unlink(missing_ok=True)
        return 1
    seconds = time.monotonic() - start
    record = {"seconds": seconds, "kernels": kernels, "complaints": complaints}
    Path(f"{obj}.ptxas.json").write_text(json.dumps(record, indent=1))
    registers = max((kernel["registers"] for kernel in kernels), default=0)
    print(f"    {obj.stem}: {len(kernels)} kernels, {registers} registers at most, {seconds:.1f} s")
    return 0


def report(objects: list[Path], table: Path) -> list[str]:
    """Writes the table of all kernels in these objects. Returns the complaints, with names to read.

    They are also those of objects that an earlier build accepted, which are not compiled again.
    """
    row = (
        "{arch:>9} {registers:>6} {spill_stores:>6} {spill_loads:>6} {seconds:>7.2f}"
        "  {file}: {name}"
    )
    rows, complaints = [], []
    for obj in objects:
        path = Path(f"{obj}.ptxas.json")
        if not path.exists():  # not an nvcc object
            continue
        record = json.loads(path.read_text())
        complaints += [f"{obj.stem}: {line}" for line in record["complaints"]]
        kernels = sorted(record["kernels"], key=operator.itemgetter("name", "arch"))
        rows += [row.format(file=obj.stem, **kernel) for kernel in kernels]
    head = f"{'target':>9} {'regs':>6} {'spillS':>6} {'spillL':>6} {'s':>7}  file: kernel"
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(demangle("\n".join([head, *rows]) + "\n"))
    return demangle("\n".join(complaints)).splitlines()


def settle(complaints: list[str]) -> None:
    """Prints the complaints. Exits if there are any and the build is strict."""
    if not complaints:
        return
    print("\n".join(f"flash_ext: {line}" for line in complaints), file=sys.stderr)
    if is_strict():
        sys.exit(f"flash_ext: {FAILED}")
    print(f"flash_ext: warning: {SLOW}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(compile_one(sys.argv[1:]))
