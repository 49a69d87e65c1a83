"""Links against the symbols of manylinux_2_28, on a system that has newer ones.

A library asks at load time for the versions of symbols that it was linked with: with a newer glibc
or libstdc++ than manylinux_2_28 has it does not load on older systems. So `link_flags` makes
stand-ins for the system's libraries. They hold no code, only the symbols that existed then, each
with the version it had then; the linker sees these in place of the real ones. The little of
libstdc++ that is newer (constructors of string streams) is linked statically and hidden, as in
the compilers of the manylinux images.

libtorch has stand-ins as well, with its stable ABI alone: other functions of torch do not link.
They are for the machine that the compiler compiles for, which torch's libraries need not be.

Nothing here proves the result: `make check-wheel` has auditwheel do that.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
"""The machines that wheels are made for, with their dynamic linkers."""

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""The newest versions of symbols that the platform has."""

LIBRARIES = ("libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6")
STATIC = ("libstdc++.a", "libc_nonshared.a", "libgcc.a")
"""libc_nonshared has atexit, which each library has for itself; libgcc the atomics of aarch64."""
MOVED = {"dl": "libdl.so.2", "pthread_": "libpthread.so.0", "sem_": "libpthread.so.0",
         "shm_": "librt.so.1"}  # fmt: skip
"""The libraries of the symbols that glibc 2.34 moved to libc, by their prefix."""

# The headers of a newer glibc tell libstdc++ that this exists. 0: there may be threads.
ABSENT = 'extern "C" { __attribute__((visibility("hidden"))) char __libc_single_threaded = 0; }\n'


def run(*command: str | Path, text: str | None = None) -> str:
    return subprocess.run(
        [*map(str, command)], input=text, check=True, capture_output=True, text=True
    ).stdout.strip()


def compiler(*arguments: str | Path, text: str | None = None) -> str:
    return run(*shlex.split(os.environ.get("CXX", "c++")), *arguments, text=text)


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.rpartition("_")[2].split(".")))


def too_new(version: str) -> bool:
    return number(version) > NEWEST[version.rpartition("_")[0]]


def symbols_of(library: str | Path, pattern: str) -> dict[str, list[tuple[str, str, bool]]]:
    """By name the versions of a symbol that match: (version, type, whether the linker takes it)."""
    found: dict[str, list[tuple[str, str, bool]]] = {}
    for line in run("readelf", "--dyn-syms", "-W", library).splitlines():
        # Num: Value Size Type Bind Vis Ndx Name@@Version
        match = re.match(
            r"\s*\d+: \w+\s+\w+ (\w+)\s+(?:GLOBAL|WEAK|UNIQUE)\s+DEFAULT\s+\d+ ([^\s@]+)(@*)(\S*)",
            line,
        )
        if match and re.fullmatch(pattern, f"{match[2]}@{match[4]}"):
            found.setdefault(match[2], []).append((match[4], match[1], match[3] == "@@"))
    return found


def chosen(library: str) -> dict[str, list[tuple[str, str, str]]]:
    """By library of the old system (name, version, type) of the symbols that it had."""
    kept: dict[str, list[tuple[str, str, str]]] = {}
    path = compiler(f"-print-file-name={library}")
    for name, versions in symbols_of(path, r".*@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+").items():
        old = [(number(v), v, kind) for v, kind, _ in versions if not too_new(v)]
        if not old:
            continue
        home = library
        if any(too_new(v) and default for v, _, default in versions):
            home = next((so for prefix, so in MOVED.items() if name.startswith(prefix)), library)
        _, version, kind = max(old)
        kept.setdefault(home, []).append((name, version, kind))
    return kept


PLACES = {
    "OBJECT": ('.data,"aw",@progbits', "object"),
    "TLS": ('.tdata,"awT",@progbits', "tls_object"),
}
"""By a symbol's type in readelf: the section and the assembler's type; other types are code."""


def make_stand_in(folder: Path, soname: str, symbols: list[tuple[str, str, str]]) -> Path:
    lines = []
    for index, (name, version, kind) in enumerate(sorted(symbols)):
        section, type_ = PLACES.get(kind, ('.text,"ax",@progbits', "function"))
        label = f"s{index}" if version else name
        lines += [
            f".section {section}",
            f".globl {label}",
            f".type {label}, @{type_}",
            f"{label}: .quad 0",
            f".size {label}, 8",
            *([f".symver {label}, {name}@@{version}"] if version else []),
        ]
    versions = sorted({version for _, version, _ in symbols if version})
    script = folder / f"{soname}.map"
    script.write_text("".join(f"{version} {{}};\n" for version in versions))
    path = folder / soname
    compiler(
        "-shared", "-nostdlib", f"-Wl,-soname,{soname}",
        *([f"-Wl,--version-script,{script}"] if versions else []),
        "-o", path, "-x", "assembler", "-", text="\n".join(lines) + "\n",
    )  # fmt: skip
    return path


def link_flags(folder: Path, machine: str, libtorch: Path) -> list[str]:
    """Makes the stand-ins in `folder`; returns what g++ needs at the end of the link command.

    `libtorch` is the libtorch_cpu.so of any machine. The stand-ins of libtorch are for -l.
    """
    if machine not in LOADERS:
        raise SystemExit(f"flash_ext: FLASH_EXT_PORTABLE=1 is not for {machine}")
    folder.mkdir(parents=True, exist_ok=True)
    stable = symbols_of(libtorch, r"(aoti_)?torch_\w+@").items()
    make_stand_in(folder, "libtorch_cpu.so", [(name, "", x[0][1]) for name, x in stable])
    make_stand_in(folder, "libtorch.so", [])
    symbols: dict[str, list[tuple[str, str, str]]] = {}
    for library in (*LIBRARIES, LOADERS[machine]):
        for home, found in chosen(library).items():
            symbols.setdefault(home, []).extend(found)
    stand_ins = [str(make_stand_in(folder, so, found)) for so, found in symbols.items()]
    absent = folder / "absent.o"
    compiler("-fPIC", "-c", "-x", "c++", "-", "-o", absent, text=ABSENT)
    # The static libstdc++ comes last: for what the stand-ins do not have.
    static = [compiler(f"-print-file-name={x}") for x in STATIC]
    return [
        *("-nodefaultlibs", str(absent), "-Wl,--as-needed"),
        *stand_ins,
        *static,
        *stand_ins[1:],  # without libstdc++'s
        "-Wl,-z,defs",
    ]
