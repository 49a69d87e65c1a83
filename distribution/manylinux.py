"""Links against the symbols of manylinux_2_28, on a system that has newer ones.

A library asks at load time for the versions of symbols that it was linked with: with a newer glibc
or libstdc++ than manylinux_2_28 has it does not load on older systems. So `link_flags` makes
stand-ins for the system's libraries. They hold no code, only the symbols that existed then, each
with the version it had then; the linker sees these in place of the real ones. The little of
libstdc++ that is newer (constructors of string streams) is linked statically and hidden, as in
the compilers of the manylinux images.

Nothing here proves the result: `distribution/make_wheel.py` has auditwheel do that.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

PLATFORM = "manylinux_2_28_x86_64"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""The newest versions of symbols that the platform has."""

LIBRARIES = ("libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2")
STATIC = ("libstdc++.a", "libc_nonshared.a")
MOVED = {"dl": "libdl.so.2", "pthread_": "libpthread.so.0", "sem_": "libpthread.so.0",
         "shm_": "librt.so.1"}  # fmt: skip
"""Where the symbols were that glibc 2.34 moved to libc, by their prefix."""

# The headers of a newer glibc tell libstdc++ that this exists. 0: there may be threads.
ABSENT = 'extern "C" { __attribute__((visibility("hidden"))) char __libc_single_threaded = 0; }\n'


def run(*command: str | Path, text: str | None = None) -> str:
    return subprocess.run(
        [*map(str, command)], input=text, check=True, capture_output=True, text=True
    ).stdout


def too_new(version: str) -> bool:
    name, _, number = version.rpartition("_")
    return tuple(map(int, number.split("."))) > NEWEST[name]


def symbols_of(library: str) -> dict[str, list[tuple[str, str, bool]]]:
    """By name the versions of a symbol: (version, type, whether the linker takes it)."""
    found: dict[str, list[tuple[str, str, bool]]] = {}
    for line in run("readelf", "--dyn-syms", "-W", library).splitlines():
        # Num: Value Size Type Bind Vis Ndx Name@@Version
        match = re.match(
            r"\s*\d+: \w+\s+\w+ (\w+)\s+(?:GLOBAL|WEAK|UNIQUE)\s+DEFAULT\s+\d+ (\S+?)(@@?)(\S+)",
            line,
        )
        if match and re.fullmatch(r"(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+", match[4]):
            found.setdefault(match[2], []).append((match[4], match[1], match[3] == "@@"))
    return found


def chosen(library: str) -> dict[str, list[tuple[str, str, str]]]:
    """By library of the old system (name, version, type) of the symbols that it had."""
    kept: dict[str, list[tuple[str, str, str]]] = {}
    path = run("g++", f"-print-file-name={library}").strip()
    for name, versions in symbols_of(path).items():
        old = [(number(v), v, kind) for v, kind, _ in versions if not too_new(v)]
        if not old:
            continue
        home = library
        if any(too_new(v) and default for v, _, default in versions):
            home = next((so for prefix, so in MOVED.items() if name.startswith(prefix)), library)
        _, version, kind = max(old)
        kept.setdefault(home, []).append((name, version, kind))
    return kept


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.rpartition("_")[2].split(".")))


PLACES = {
    "OBJECT": ('.data,"aw",@progbits', "object"),
    "TLS": ('.tdata,"awT",@progbits', "tls_object"),
}
"""By a symbol's type in readelf: the section and the assembler's type; other types are code."""


def make_stand_in(folder: Path, soname: str, symbols: list[tuple[str, str, str]]) -> Path:
    lines = []
    for index, (name, version, kind) in enumerate(sorted(symbols)):
        section, type_ = PLACES.get(kind, ('.text,"ax",@progbits', "function"))
        lines += [
            f".section {section}",
            f".globl s{index}",
            f".type s{index}, @{type_}",
            f"s{index}: .quad 0",
            f".size s{index}, 8",
            f".symver s{index}, {name}@@{version}",
        ]
    versions = sorted({version for _, version, _ in symbols})
    script = folder / f"{soname}.map"
    script.write_text("".join(f"{version} {{}};\n" for version in versions))
    path = folder / soname
    run(
        "gcc", "-shared", "-nostdlib", f"-Wl,-soname,{soname},--version-script,{script}",
        "-o", path, "-x", "assembler", "-", text="\n".join(lines) + "\n",
    )  # fmt: skip
    return path


def link_flags(folder: Path) -> list[str]:
    """Makes the stand-ins in `folder`; returns what g++ needs at the end of the link command."""
    folder.mkdir(parents=True, exist_ok=True)
    symbols: dict[str, list[tuple[str, str, str]]] = {}
    for library in LIBRARIES:
        for home, found in chosen(library).items():
            symbols.setdefault(home, []).extend(found)
    stand_ins = {so: make_stand_in(folder, so, found) for so, found in symbols.items()}
    absent = folder / "absent.o"
    run("g++", "-fPIC", "-c", "-x", "c++", "-", "-o", absent, text=ABSENT)
    # libc_nonshared has atexit, which each library has for itself.
    static = [run("g++", f"-print-file-name={x}").strip() for x in STATIC]
    first = stand_ins.pop("libstdc++.so.6")
    # The static libstdc++ comes last: for what the stand-ins do not have.
    return [
        "-nodefaultlibs",
        str(absent),
        "-Wl,--as-needed",
        str(first),
        *map(str, stand_ins.values()),
        *static,
        *map(str, stand_ins.values()),
        "-Wl,-z,defs",
    ]
