"""Finds slow kernels in nvcc's output: those with spills, local memory and similar problems.

nvcc writes the output with -Xptxas=-v,-warn-spills,-warn-lmem-usage. setup.py has ninja store it
beside each object, so a build also finds a kernel that an earlier build accepted.
"""

from __future__ import annotations

import operator
import re
import shutil
import subprocess
from pathlib import Path

# Warnings about spills and local memory do not name the target; `slow_kernels` writes its own.
SPILL = re.compile(r"ptxas warning.*(Registers are spilled|Local memory used)")
COMPLAINT = re.compile(r"ptxas.*(warning|Potential Performance Loss|serializ|setmaxnreg.*ignored)")
WARNING = re.compile(r"warning( #\d+-D)?: ")  # of the front end and of the host's compiler
STATISTICS = re.compile(r"ptxas info\s*:|^\s+\d+ bytes stack frame")
FACT = re.compile(
    r"""Compiling entry function '\S+' for '(?P<arch>\S+)'
    |Function properties for (?P<name>\S+)
    |(?P<stack>\d+) bytes stack frame, (?P<stores>\d+).* stores, (?P<loads>\d+)
    |Used (?P<registers>\d+) registers
    |Compile time = (?P<ms>[\d.]+) ms""".replace("\n    ", "")
)
NOTHING = dict.fromkeys(("stack", "stores", "loads", "registers", "ms"), "0")


def kernels(lines: list[str]) -> list[dict[str, str]]:
    """What ptxas says of each function and target."""
    found: list[dict[str, str]] = []
    arch = ""
    for match in filter(None, map(FACT.search, lines)):
        facts = {name: x for name, x in match.groupdict().items() if x is not None}
        arch = facts.pop("arch", arch)
        if "name" in facts:
            found.append(NOTHING | facts | {"arch": arch})
        elif found:
            found[-1] |= facts
    return found


def slow_kernels(lines: list[str]) -> list[str]:
    """ptxas's complaints."""
    said = [line for line in lines if COMPLAINT.search(line) and not SPILL.search(line)]
    text = (
        "{name} ({arch}): {stack} bytes of stack, {stores} of spill stores, {loads} of spill loads"
    )
    spilled = (x for x in kernels(lines) if x["stack"] != "0" or x["stores"] != "0")
    return said + [text.format(**x) for x in spilled]


def demangle(text: str) -> str:
    """The text with the kernels' names as in the source, without arguments and namespace."""
    if (tool := shutil.which("c++filt")) is None:
        return text
    done = subprocess.run([tool, "-p"], input=text, capture_output=True, text=True, check=True)
    return done.stdout.replace("flash_ext::", "")


def report(logs: list[Path], table: Path) -> tuple[list[str], list[str]]:
    """Writes a table of all kernels. Returns ptxas's complaints and the compilers' warnings.

    Prints what else the logs have, such as the lines that a warning is about.
    """
    rows = [f"{'target':>9} {'regs':>6} {'spillS':>6} {'spillL':>6} {'ms':>7}  file: kernel"]
    slow, warnings = [], []
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()
        file = log.name.partition(".")[0]
        row = "{arch:>9} {registers:>6} {stores:>6} {loads:>6} {ms:>7}  {file}: {name}"
        by_name = sorted(kernels(lines), key=operator.itemgetter("name", "arch"))
        rows += [row.format(file=file, **x) for x in by_name]
        slow += [f"{file}: {x}" for x in slow_kernels(lines)]
        for line in lines:
            if not any(x.search(line) for x in (SPILL, COMPLAINT, STATISTICS)):
                print(line)
                warnings += [line] if WARNING.search(line) else []
    table.write_text(demangle("\n".join(rows) + "\n"))
    return demangle("\n".join(slow)).splitlines(), warnings
