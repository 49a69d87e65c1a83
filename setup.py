"""Builds flash_ext/_C.abi3.so, the CUDA kernels; everything static is in pyproject.toml.

The binary uses only libtorch's stable ABI and defines no Python module (it is loaded with
torch.ops.load_library), so one build serves every Python >= 3.10 and torch >= 2.11, CPU-only
torch included. Without nvcc the package installs pure, with the CPU kernels. The reason goes into
flash_ext/_C.missing.txt: pip hides what a build prints, so `flash_ext.explain` and the first call
on a GPU say it.

Beside the binary goes flash_ext/_C.json: its version, source digest, targets, CUDA, size and
checksum, which flash_ext.explain shows. The version itself is in flash_ext/__init__.py and nowhere
else. An sdist has the same bytes on every machine, with and without nvcc and torch.

docs/install.md has the environment variables that change a build.
"""

import gzip
import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
RECORD = "_C.json"
BUILDS = {"build", "build_ext", "build_py", "bdist_wheel", "editable_wheel", "install", "develop"}
STABLE_ABI = "0x020b000000000000"  # torch 2.11, the oldest that the binary must load under
# Designated initializers leave out what has a default. -Wrestrict is about GCC 12's own string.
WARNINGS = ("-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Wno-restrict")
# As in torch's own extensions: half precision has no implicit conversions.
NO_CONVERSIONS = "HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS"
# 12.5 has cudaGetDriverEntryPointByVersion. Up to 12.8 ptxas serializes the matmuls of fa3
# (docs/notes/024-nvcc-versions.md).
OLDEST_NVCC = {"80": (12, 5), "90a": (12, 9)}


def find_cuda_home() -> Path | None:
    """The CUDA toolkit: $CUDA_HOME, or the home of the nvcc on PATH, or /usr/local/cuda.

    A toolkit needs bin/nvcc and the headers. The nvcc on PATH may be a script or a link in a folder
    without headers, so nvcc itself is asked for its home.
    """
    given = os.environ.get("CUDA_HOME")
    candidates = [Path(given).absolute()] if given else [Path("/usr/local/cuda")]
    if not given and (nvcc := shutil.which("nvcc")):
        dryrun = [nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"]
        said = subprocess.run(dryrun, capture_output=True, text=True).stderr
        if home := re.search(r"^#\$ _HERE_=(.+)/bin$", said, re.MULTILINE):
            candidates.insert(0, Path(home[1]))
    for home in candidates:
        if (home / "bin/nvcc").is_file() and cuda_folders(home, "include/cuda_runtime.h"):
            return home
    if given:
        sys.exit(
            f"flash_ext: CUDA_HOME={given} has no bin/nvcc and include/cuda_runtime.h; correct or"
            " unset it, or set FLASH_EXT_SKIP_CUDA=1 to install without the CUDA kernels"
        )
    return None


def cuda_folders(home: Path, name: str) -> list[Path]:
    """The places of a header or library in a toolkit: its top, and, in conda's, each target.

    The linker passes over libraries for other machines; the headers are the same for all.
    """
    targets = sorted(home.glob("targets/*-linux"))
    return [top / name for top in (home, *targets) if (top / name).exists()]


def gencode_flags(archs: str) -> list[str]:
    """Turns "80+PTX;90a" into nvcc flags; their presence switches off torch's own guess."""
    flags = []
    for arch in re.split(r"[;,\s]+", archs.strip("; ,")):
        if not re.fullmatch(r"\d+[af]?(\+PTX)?", arch):
            sys.exit(f"flash_ext: FLASH_EXT_CUDA_ARCHS must be like '80+PTX;90a', got {archs!r}")
        number = arch.removesuffix("+PTX")
        code = f"sm_{number}" if number == arch else f"[sm_{number},compute_{number}]"
        flags.append(f"-gencode=arch=compute_{number},code={code}")
    return flags


def targets_of(torch, portable: bool) -> str:
    """The default of FLASH_EXT_CUDA_ARCHS: what the GPUs here run, as torch's own extensions do.

    A build for one of the two is faster by a fifth, or by three quarters. Without a GPU, and
    for a wheel, which is for other machines, it is both.
    """
    gpus = [] if portable else range(torch.cuda.device_count())
    majors = {torch.cuda.get_device_capability(gpu)[0] for gpu in gpus}
    return ";".join(sorted({"90a" if x == 9 else "80+PTX" for x in majors})) or "80+PTX;90a"


def too_old(release: str, archs: str) -> str | None:
    """Why the nvcc of a CUDA release, for example "12.8", cannot compile for these targets."""
    hopper = "90a" in archs
    oldest = OLDEST_NVCC["90a" if hopper else "80"]
    if tuple(map(int, release.split("."))) >= oldest:
        return None
    others = ", FLASH_EXT_CUDA_ARCHS=80+PTX without these" if hopper else ""
    return (
        f"the kernels{' for Hopper GPUs' if hopper else ''} need {oldest[0]}.{oldest[1]} or newer"
        f'; set CUDA_HOME (pip install "cuda-toolkit[nvcc,cccl]" has one){others}, or'
        " FLASH_EXT_SKIP_CUDA=1 to install without the CUDA kernels"
    )


def find_files(*patterns: str) -> list[str]:
    """The files of the repository that match, relative to its root and in a fixed order."""
    return sorted(str(path.relative_to(ROOT)) for glob in patterns for path in ROOT.glob(glob))


def host_source() -> str:
    """All C++ files in one: most of the time of each is reading torch's headers."""
    file = ROOT / "build/host.cpp"
    parts = find_files("csrc/api/*.cpp", "csrc/plan/*.cpp")
    text = "".join(f'#include "{part.removeprefix("csrc/")}"\n' for part in parts)
    file.parent.mkdir(exist_ok=True)
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)
    return str(file.relative_to(ROOT))


def check_torch():
    """The torch of this environment, whose headers and libraries the build needs."""
    try:
        import torch
    except ImportError:
        sys.exit(
            "flash_ext: building the CUDA kernels needs the torch of your environment; use:"
            " pip install --no-build-isolation ."
        )
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or tuple(map(int, version.groups())) < (2, 11):
        sys.exit(f"flash_ext: torch must be 2.11 or newer, got {torch.__version__}")
    return torch


def find_ninja() -> str:
    # pip puts it next to a Python, which may have been called by its path.
    folders = Path(sys.executable).parent, sysconfig.get_path("scripts", "posix_user")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, folders)])
    if ninja := shutil.which("ninja", path=path):
        return ninja
    sys.exit("flash_ext: building the CUDA kernels needs ninja; use: pip install ninja")


def nvcc_release(nvcc: str, archs: str) -> str:
    """The CUDA release of nvcc, for example "13.0", if it can compile for these targets."""
    try:
        said = subprocess.check_output([nvcc, "--version"], text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"flash_ext: {nvcc} does not run: {error}")
    release = re.search(r"release (\d+\.\d+)", said)
    if release and (why := too_old(release[1], archs)):
        sys.exit(f"flash_ext: {nvcc} is of CUDA {release[1]}, and {why}")
    return release[1] if release else "13.0"


def jobs() -> int:
    """How many files are compiled at once."""
    return int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


def common_flags(archs: str) -> list[str]:
    flags = ["-std=c++20", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={STABLE_ABI}", "-Icsrc"]
    if "90a" in archs:
        flags.append("-DFLASH_EXT_SM90A")  # fa3's kernels are there
    if "90" in archs:
        flags.append("-DFLASH_EXT_SM90")  # other kernels have code for Hopper's shared memory
    return flags


def nvcc_flags(archs: str, cuda_home: Path, release: str, portable: bool) -> list[str]:
    # Older toolkits cannot choose. "size" is slower, and gives wheels a fifth of the size.
    mode = "size" if portable else "balance"
    return [
        *common_flags(archs),
        *gencode_flags(archs),
        *([f"--compress-mode={mode}"] if float(release) >= 13 else []),
        *(["-lineinfo"] if os.environ.get("FLASH_EXT_LINEINFO") == "1" else []),
        *(["-ccbin", os.environ["CC"]] if "CC" in os.environ else []),
        # With a cross compiler nvcc looks for its headers only in that machine's target.
        *(f"-I{path}" for path in cuda_folders(cuda_home, "include")),
        *(f"-isystem={path}" for path in cuda_folders(cuda_home, "include/cccl")),
        *(f"-D__CUDA_NO_{name}__" for name in NO_CONVERSIONS),
        "--expt-relaxed-constexpr",
        "-Xptxas=-v,-warn-spills,-warn-lmem-usage",
        # The host's part; nvcc optimizes kernels by itself.
        f"-Xcompiler=-O1,-fPIC,-fvisibility=hidden,{','.join(WARNINGS)}",
        # With few jobs two targets of a file at a time only take turns.
        f"--threads={os.environ.get('NVCC_THREADS') or (1 if jobs() < 16 else 2)}",
    ]


def host_flags(archs: str, torch_home: Path, cuda_home: Path, strict: bool) -> list[str]:
    torch_headers = torch_home / "include", torch_home / "include/torch/csrc/api/include"
    return [
        *common_flags(archs),
        *("-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden"),
        f'-DFLASH_EXT_TARGETS="{archs}"',
        *WARNINGS,
        *(["-Werror"] if strict else []),
        *(f"-I{path}" for path in cuda_folders(cuda_home, "include")),
        *(f"-isystem{path}" for path in torch_headers),  # without its warnings
    ]


def link_flags(torch_libraries: Path, cuda_home: Path) -> list[str]:
    """The libraries, and what makes of the objects one that is stripped: half as large.

    libtorch.so pulls in libtorch_cuda.so, which holds the current-stream shim. That is a weak
    symbol here, so the linker would see no need for libtorch.so.
    """
    cuda = [path for name in ("lib64", "lib") for path in cuda_folders(cuda_home, name)]
    return [
        *(f"-L{path}" for path in (torch_libraries, *cuda)),
        *(f"-l{name}" for name in ("torch_cpu", "cudart_static", "rt", "dl", "pthread")),
        *("-s", "-Wl,--exclude-libs,ALL,--no-as-needed", "-ltorch", "-Wl,--as-needed"),
    ]


NINJA = """\
builddir = {folder}
rule compile
  command = $tool -MD -MF $out.d -c $in -o $out
  description = $in
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} -shared $in -o $out {link}
  description = $out
build {folder}/_C.abi3.so: link {objects}
"""


def compile_and_link(folder: Path, nvcc: list[str], host: list[str], link: list[str]) -> list[Path]:
    """Builds folder/_C.abi3.so by ninja: what changed. Returns the objects of all files."""

    def command(words: list[str]) -> str:
        return shlex.join(words).replace("$", "$$")

    def path(name: Path) -> str:
        return re.sub(r"([$ :])", r"$\1", str(name))

    # In this order the files that take longest, FA3's and FA2's, are among the first.
    sources = [*reversed(find_files("csrc/instantiate/*.cu")), host_source()]
    objects = [(folder / source).with_suffix(".o") for source in sources]
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    text = NINJA.format(
        folder=path(folder),
        cxx=command(cxx),
        link=command(link),
        objects=" ".join(map(path, objects)),
    )
    for source, target in zip(sources, objects, strict=True):
        tool = nvcc if source.endswith(".cu") else [*cxx, *host]
        text += f"build {path(target)}: compile {source}\n  tool = {command(tool)}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(text)
    sys.stdout.flush()
    ninja = [find_ninja(), "-j", str(jobs()), "-f", str(folder / "build.ninja")]
    status = {"NINJA_STATUS": "[%f/%t, %e s] "} | os.environ
    if subprocess.run(ninja, cwd=ROOT, env=status).returncode:
        sys.exit("flash_ext: the CUDA kernels did not compile, see above")
    return objects


def cuda_options(cuda_home: Path) -> dict:
    """The arguments of setup() that add the extension."""
    torch = check_torch()
    nvcc = str(cuda_home / "bin/nvcc")
    portable = os.environ.get("FLASH_EXT_PORTABLE") == "1"
    archs = os.environ.get("FLASH_EXT_CUDA_ARCHS") or targets_of(torch, portable)
    release = nvcc_release(nvcc, archs)
    digests = runpy.run_path(str(ROOT / "benchmarks/digest.py"))
    manylinux = runpy.run_path(str(ROOT / "distribution/manylinux.py")) if portable else {}
    machine = sysconfig.get_platform().rpartition("-")[2]
    platform = f"manylinux_2_28_{machine}" if portable else None
    strict = runpy.run_path(str(ROOT / "csrc/build/nvcc_strict.py"))
    compiler = shlex.split(os.environ.get("PYTORCH_NVCC") or shlex.quote(nvcc))
    guarded = [sys.executable, "csrc/build/nvcc_strict.py", *compiler]
    torch_home = Path(torch.__file__).parent
    print(f"flash_ext: compiling for {archs} (FLASH_EXT_CUDA_ARCHS)", flush=True)

    class Compile(Recorded):
        def build_extensions(self) -> None:
            folder = Path(self.build_temp)
            libraries, system = torch_home / "lib", []
            if platform:
                libtorch, libraries = libraries / "libtorch_cpu.so", ROOT / "build" / platform
                system = manylinux["link_flags"](libraries, machine, libtorch)
            objects = compile_and_link(
                folder,
                [*guarded, *nvcc_flags(archs, cuda_home, release, portable)],
                host_flags(archs, torch_home, cuda_home, strict["is_strict"]()),
                [*link_flags(libraries, cuda_home), *system],
            )
            complaints = strict["report"](objects, ROOT / "build/ptxas.log")
            self.record(
                folder / "_C.abi3.so",
                digest=digests["source_digest"](ROOT),
                kernels=digests["kernel_digest"](ROOT),
                targets=archs,
                cuda=release,
                torch=torch.__version__,
                platform=platform,
                slow_kernels=complaints,
            )
            strict["settle"](complaints)

    return extension_options(Compile)


def extension_options(command: type) -> dict:
    """A wheel for every Python, except that those without the GIL refuse such wheels."""
    tag = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"py_limited_api": "cp310"}
    return {
        "ext_modules": [Extension("flash_ext._C", [], py_limited_api=True)],
        "cmdclass": {"build_ext": command, "build_py": BuildPy, "sdist": Sdist},
        "options": {"bdist_wheel": tag},
    }


def library_options(library: Path) -> dict:
    """The arguments of setup() that package a binary which exists."""
    if not library.is_file():
        sys.exit(f"flash_ext: FLASH_EXT_LIBRARY={library} does not exist")
    beside = library.with_name(RECORD)
    known = json.loads(beside.read_text()) if beside.is_file() else {}
    if known and known["sha256"] != checksum(library):
        sys.exit(f"flash_ext: {beside} is not of {library}: the checksums differ")

    class CopyLibrary(Recorded):
        def build_extensions(self) -> None:
            names = "digest", "kernels", "targets", "cuda", "torch", "platform", "slow_kernels"
            self.record(library, **{name: known.get(name) for name in names})

    return extension_options(CopyLibrary)


def checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Recorded(build_ext):
    """Installs a binary, and writes its record beside it."""

    def get_ext_filename(self, name: str) -> str:
        return str(Path(*name.split("."))) + ".abi3.so"  # whatever Python: it is no module

    def record(self, library: Path, **facts: object) -> None:
        binary = Path(self.get_ext_fullpath("flash_ext._C"))
        binary.parent.mkdir(parents=True, exist_ok=True)
        if not (binary.exists() and binary.samefile(library)):
            shutil.copy(library, binary)
        facts = {"version": self.distribution.get_version()} | facts
        facts |= {"bytes": binary.stat().st_size, "sha256": checksum(binary)}
        binary.with_name(RECORD).write_text(json.dumps(facts, indent=1) + "\n")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        shutil.copy(Path(self.build_lib, "flash_ext", RECORD), ROOT / "flash_ext")


class Sdist(sdist):
    """The same bytes from the same files: no times, owners or order of this machine."""

    def run(self) -> None:
        (ROOT / "flash_ext.egg-info/SOURCES.txt").unlink(missing_ok=True)  # adds to the next list
        super().run()

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, *_, **__):
        def same_everywhere(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        path = Path(f"{base_name}.tar.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            gzip.GzipFile("", "wb", mtime=0, fileobj=path.open("wb")) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as archive,
        ):
            archive.add(base_dir, filter=same_everywhere)  # sorted by name
        return str(path)


class BuildPy(build_py):
    """Copies the package as it is now, without files deleted since the last build."""

    why_no_kernels = ""

    def run(self) -> None:
        if self.editable_mode:  # which installs the source folder itself
            if self.why_no_kernels:
                (ROOT / "flash_ext/_C.missing.txt").write_text(self.why_no_kernels)
            return super().run()
        package, built = Path(self.build_lib, "flash_ext"), ("_C.abi3.so", RECORD)
        for path in package.glob("*"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in built or self.why_no_kernels:
                path.unlink()
        super().run()
        if self.why_no_kernels:
            Path(package, "_C.missing.txt").write_text(self.why_no_kernels)


def cpu_options(why: str) -> dict:
    """The arguments of setup() without the extension."""
    print(
        f"flash_ext: {why}: the CUDA kernels are not built, the CPU kernels work", file=sys.stderr
    )
    BuildPy.why_no_kernels = why
    return {"cmdclass": {"build_py": BuildPy, "sdist": Sdist}}


def build_options() -> dict:
    if not BUILDS & set(sys.argv):  # an sdist, or metadata: nothing of this machine matters
        return {"cmdclass": {"sdist": Sdist}}
    if library := os.environ.get("FLASH_EXT_LIBRARY"):
        return library_options(Path(library).resolve())
    if os.environ.get("FLASH_EXT_SKIP_CUDA", "0") not in ("", "0"):
        return cpu_options("FLASH_EXT_SKIP_CUDA was set")
    if cuda_home := find_cuda_home():
        return cuda_options(cuda_home)
    return cpu_options("no nvcc was found (CUDA_HOME, PATH, /usr/local/cuda)")


setup(**build_options())
