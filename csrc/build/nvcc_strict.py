"""A strict nvcc: spills, local memory and similar problems fail the compilation.

    python nvcc_strict.py NVCC ARGUMENTS...

runs nvcc, hides ptxas's statistics, shows everything else and exits non-zero where ptxas reports
spilled registers, local memory, serialized wgmma or an ignored setmaxnreg. The statistics are
stored beside the object file, in OBJECT.ptxas.json; report() writes one table of them for the whole
build. setup.py puts this in front of nvcc. FLASH_EXT_STRICT=0 turns failures into warnings.

The files of fa3 and of FP8 are compiled only for sm_90a where that is among the targets.
"""

from __future__ import annotations

import json
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
STATISTICS = re.compile(r"ptxas info\s*:|^\s+\d+ bytes stack frame")
# cicc and ptxas take 3 % less time with huge pages and if malloc gives no memory back.
MALLOC = (
    "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1073741824"
    ":glibc.malloc.mmap_threshold=1073741824:glibc.malloc.top_pad=67108864"
)


def is_strict() -> bool:
    return os.environ.get("FLASH_EXT_STRICT", "1") != "0"


def parse(lines: list[str]) -> tuple[list[dict], list[str]]:
    """Reads the output of ptxas -v: one record per function and target, and the complaints."""
    kernels: list[dict] = []
    complaints: list[str] = []
    arch = ""
    for line in lines:
        if SPILL.search(line):
            continue
        if COMPLAINT.search(line):
            complaints.append(line)
        elif match := re.search(r"Compiling entry function '\S+' for '(\S+)'", line):
            arch = match[1]
        elif match := re.search(r"Function properties for (\S+)", line):
            kernels.append({"name": match[1], "arch": arch})
        elif not kernels:
            continue
        elif match := re.search(r"(\d+) bytes stack frame, (\d+).* stores, (\d+)", line):
            stack, stores, loads = map(int, match.groups())
            kernels[-1] |= {"stack": stack, "spill_stores": stores, "spill_loads": loads}
        elif match := re.search(r"Used (\d+) registers", line):
            kernels[-1]["registers"] = int(match[1])
        elif match := re.search(r"Compile time = ([\d.]+) ms", line):
            kernels[-1]["seconds"] = float(match[1]) / 1000
    spilled = [k for k in kernels if k.get("stack") or k.get("spill_stores")]
    complaints += [
        "{name} ({arch}): {stack} bytes of stack, {spill_stores} of spill stores,"
        " {spill_loads} of spill loads".format(**kernel)
        for kernel in spilled
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
    tool = shutil.which("c++filt")
    if tool is None:
        return text
    return subprocess.run([tool], input=text, capture_output=True, text=True, check=True).stdout


def compile_one(command: list[str]) -> int:
    """Runs nvcc. On a complaint it removes the object, so that the next build compiles it again."""
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
        if is_strict():
            print("flash_ext: failed because of the above; FLASH_EXT_STRICT=0 lets it pass")
            obj.unlink(missing_ok=True)
            return 1
    seconds = time.monotonic() - start
    record = {"seconds": seconds, "kernels": kernels, "complaints": complaints}
    Path(f"{obj}.ptxas.json").write_text(json.dumps(record, indent=1))
    registers = max((kernel.get("registers", 0) for kernel in kernels), default=0)
    print(f"    {obj.stem}: {len(kernels)} kernels, {registers} registers at most, {seconds:.1f} s")
    return 0


def report(objects: list[Path], table: Path) -> None:
    """Writes the table of all kernels in these objects. Exits if a strict build must fail.

    Objects that a build with FLASH_EXT_STRICT=0 accepted are not compiled again, so their
    complaints are checked here too.
    """
    rows = []
    complaints = []
    for obj in objects:
        path = Path(f"{obj}.ptxas.json")
        if not path.exists():  # not an nvcc object
            continue
        record = json.loads(path.read_text())
        complaints += [f"{obj.stem}: {line}" for line in record["complaints"]]
        for kernel in sorted(
            record["kernels"], key=lambda kernel: (kernel["name"], kernel["arch"])
        ):
            numbers = [kernel.get(key, 0) for key in ("registers", "spill_stores", "spill_loads")]
            seconds = kernel.get("seconds", 0.0)
            columns = "{:>9} {:>6} {:>6} {:>6} {:>7.2f}".format(kernel["arch"], *numbers, seconds)
            rows.append(f"{columns}  {obj.stem}: {kernel['name']}")
    head = "{:>9} {:>6} {:>6} {:>6} {:>7}  {}".format(
        "target", "regs", "spillS", "spillL", "s", "file: kernel"
    )
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(demangle("\n".join([head, *rows]) + "\n"))
    if complaints:
        print(demangle("\n".join(f"flash_ext: {line}" for line in complaints)), file=sys.stderr)
        if is_strict():
            sys.exit("flash_ext: ptxas complained, see above; FLASH_EXT_STRICT=0 lets it pass")


if __name__ == "__main__":
    sys.exit(compile_one(sys.argv[1:]))
