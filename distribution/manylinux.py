"""Links against the symbols of manylinux_2_28, on a system that has newer ones.

A library asks at load time for the versions of symbols that it was linked with. So `link_flags`
makes stand-ins for the system's libraries, which hold no code, only the symbols that existed then,
each with the version it had; the linker sees these in place of the real ones. The little of
libstdc++ that is newer (constructors of string streams) is linked statically and hidden, as in the
compilers of the manylinux images. libtorch has stand-ins as well, with its stable ABI alone: other
functions of torch do not link, nor do Python's. The stand-ins are for the machine that the compiler
compiles for. Nothing here proves the result: `make check-wheel` has auditwheel do that.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

# The machines that wheels are made for, with their dynamic linkers.
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
# The newest versions of symbols that the platform has.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = ("libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6")
# libc_nonshared has atexit, which each library has for itself; libgcc the atomics of aarch64.
STATIC = ("libstdc++.a", "libc_nonshared.a", "libgcc.a")
# The libraries of the symbols that glibc 2.34 moved to libc, by their prefix.
MOVED = {"dl": "libdl.so.2", "pthread_": "libpthread.so.0", "sem_": "libpthread.so.0",
         "shm_": "librt.so.1"}  # fmt: skip
# The assembler's types of symbols by readelf's; the others are functions.
TYPES = {"OBJECT": "object", "TLS": "tls_object"}
# The headers of a newer glibc tell libstdc++ that this exists. 0: there may be threads.
ABSENT = 'extern "C" { __attribute__((visibility("hidden"))) char __libc_single_threaded = 0; }\n'

# Num: Value Size Type Bind Vis Ndx Name@@Version
SYMBOL = r"(?m)^ *\d+: \w+ +\w+ (\w+) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+ ([^\s@]+)@*(\S*)"


def compiler(*arguments: str | Path, text: str = "") -> str:
    command = [*shlex.split(os.environ.get("CXX", "c++")), *arguments]
    return subprocess.check_output(command, input=text, text=True).strip()


def symbols_of(library: str | Path) -> list[tuple[str, str, str]]:
    """(type, name, version) of each symbol that a library defines."""
    command = ["readelf", "--dyn-syms", "-W", library]
    return re.findall(SYMBOL, subprocess.check_output(command, text=True))


def old_symbols(libraries: Iterable[str]) -> dict[str, dict[str, tuple[str, str]]]:
    """By library of the old system and name: (version, type) of the symbols that it had."""
    kept: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for library in libraries:
        old, newer = defaultdict(list), set()
        for kind, name, version in symbols_of(compiler(f"-print-file-name={library}")):
            family, _, digits = version.rpartition("_")
            if family in NEWEST and re.fullmatch(r"[\d.]+", digits):
                number = tuple(map(int, digits.split(".")))
                if number <= NEWEST[family]:
                    old[name].append((number, version, kind))
                else:
                    newer.add(name)
        for name, versions in old.items():
            moved = MOVED.items() if name in newer else ()
            home = next((so for prefix, so in moved if name.startswith(prefix)), library)
            kept[home][name] = max(versions)[1:]
    return kept


def make_stand_in(folder: Path, soname: str, symbols: dict[str, tuple[str, str]]) -> str:
    lines = []
    for index, (name, (version, kind)) in enumerate(sorted(symbols.items())):
        label = f"s{index}" if version else name
        section = '.section .tdata,"awT",@progbits' if kind == "TLS" else ".data"
        lines += [section, f".globl {label}", f".type {label}, @{TYPES.get(kind, 'function')}"]
        lines += [f"{label}: .quad 0", f".symver {label}, {name}@@{version}" if version else ""]
    versions = sorted({version for version, _ in symbols.values() if version})
    script = folder / f"{soname}.map"
    script.write_text("".join(f"{x} {{}};\n" for x in versions) or "{ *; };\n")
    options = f"-Wl,-soname,{soname},--version-script,{script}", "-o", folder / soname
    compiler("-shared", "-nostdlib", *options, "-x", "assembler", "-", text="\n".join([*lines, ""]))
    return str(folder / soname)


def link_flags(folder: Path, machine: str, libtorch: Path) -> list[str]:
    """Makes the stand-ins in `folder`; returns what g++ needs at the end of the link command.
    `libtorch` is the libtorch_cpu.so of any machine; its stand-ins are for -l."""
    if machine not in LOADERS:
        raise SystemExit(f"flash_ext: FLASH_EXT_PORTABLE=1 is not for {machine}")
    folder.mkdir(parents=True, exist_ok=True)
    stable = [x for _, x, _ in symbols_of(libtorch) if re.fullmatch(r"(aoti_)?torch_\w+", x)]
    make_stand_in(folder, "libtorch_cpu.so", dict.fromkeys(stable, ("", "FUNC")))
    make_stand_in(folder, "libtorch.so", {})
    symbols = old_symbols((*LIBRARIES, LOADERS[machine]))
    stand_ins = [make_stand_in(folder, so, found) for so, found in symbols.items()]
    absent = folder / "absent.o"
    compiler("-fPIC", "-c", "-x", "c++", "-", "-o", absent, text=ABSENT)
    # The static libstdc++ comes after the stand-ins, for what these do not have; then the others'.
    static = [compiler(f"-print-file-name={x}") for x in STATIC]
    libraries = [*stand_ins, *static, *stand_ins[1:]]
    return ["-nodefaultlibs", str(absent), "-Wl,--as-needed", *libraries, "-Wl,-z,defs"]
