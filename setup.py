"""Builds flash_ext/_C.abi3.so, the CUDA kernels; everything static is in pyproject.toml.

The binary uses only libtorch's stable ABI and defines no Python module (it is loaded with
torch.ops.load_library), so one build serves every Python >= 3.10 and torch >= 2.11, CPU-only
torch included. Without nvcc the package installs pure, with the CPU kernels. The reason goes into
flash_ext/_C.missing.txt: pip hides what a build prints, so `flash_ext.explain` and the first call
on a GPU say it.

Beside the binary goes flash_ext/_C.json: its version, source digest, targets, CUDA, size and
checksum, which flash_ext.explain shows. The version itself is in flash_ext/__init__.py and nowhere
else. An sdist has the same bytes on every machine, with and without nvcc and torch.

Environment variables:
  FLASH_EXT_SKIP_CUDA=1   install without the CUDA kernels
  FLASH_EXT_CUDA_ARCHS    targets ("+PTX" adds PTX for later GPUs); default: what the GPUs here run,
                          "90a" for Hopper and "80+PTX" for others; without a GPU, and for wheels,
                          "80+PTX;90a"
  FLASH_EXT_LINEINFO=1    source lines in the binary, for profilers: twice its size, longer build
  FLASH_EXT_PORTABLE=1    link for manylinux_2_28, whatever this system's glibc: for wheels
  FLASH_EXT_LIBRARY       a flash_ext/_C.abi3.so that exists: it is packaged, nothing is compiled
  FLASH_EXT_STRICT=1      a kernel that spills registers, uses local memory, ... fails the build (as
                          with `make`); otherwise it is a warning, and python -m flash_ext names it.
                          So does any warning of a compiler
  CUDA_HOME               the CUDA toolkit; if set, no other is tried, and it must be one
  PYTORCH_NVCC            compiler command in place of CUDA_HOME/bin/nvcc, e.g. "ccache nvcc"
  MAX_JOBS, NVCC_THREADS  files compiled at once (default: cores), targets of a file at once
                          (default: 1 of fewer than 16 files, otherwise 2)
"""

import gzip
import hashlib
import json
import os
import platform
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
# 12.5 has cudaGetDriverEntryPointByVersion. Up to 12.8 ptxas serializes the matmuls of fa3
# (docs/notes/024-nvcc-versions.md).
OLDEST_NVCC = {"80": (12, 5), "90a": (12, 9)}


def find_cuda_home() -> Path | None:
    """The CUDA toolkit: $CUDA_HOME, or that of the nvcc on PATH, or /usr/local/cuda.

    A toolkit needs bin/nvcc and the headers. The nvcc on PATH may be a script or a link in a folder
    without headers, so nvcc itself is asked for its home.
    """
    candidates = []
    given = os.environ.get("CUDA_HOME")
    if given:
        candidates = [Path(given).absolute()]
    else:
        if nvcc := shutil.which("nvcc"):
            dryrun = subprocess.run(
                [nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True
            )
            if home := re.search(r"^#\$ _HERE_=(.+)/bin$", dryrun.stderr, re.MULTILINE):
                candidates.append(Path(home[1]))
            candidates.append(Path(nvcc).resolve().parent.parent)
        candidates.append(Path("/usr/local/cuda"))
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
    """Where a toolkit has a header or library: at its top, or, as of conda, in that of a target."""
    targets = (home / "targets").glob(f"{platform.machine()}-linux")
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

    A build for one of the two takes a fifth less of the time, or three quarters. Without a GPU, and
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
    """All C++ files in one: most of what each of them takes is reading torch's headers."""
    file = ROOT / "build/host.cpp"
    parts = find_files("csrc/api/*.cpp", "csrc/plan/*.cpp")
    text = "".join(f'#include "{part.removeprefix("csrc/")}"\n' for part in parts)
    file.parent.mkdir(exist_ok=True)
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)
    return str(file.relative_to(ROOT))


def run_ninja(build_directory: str, *_: object, **__: object) -> None:
    """Stands in for torch's, which shows 2,000 characters a file and ends in a traceback.

    setuptools sorts the files by name. In reverse those that take the longest, FA3's and FA2's, are
    among the first, and the host's, which takes nine seconds, is the last.
    """
    ninja_file = Path(build_directory, "build.ninja")
    text = ninja_file.read_text()
    files = re.findall(r"^build .+: (?:cuda_)?compile .+\n", text, re.MULTILINE)
    text = text.replace("".join(files), "".join(reversed(files)))
    for rule, tool in ("compile", "c++"), ("cuda_compile", "nvcc"):
        text = text.replace(f"rule {rule}\n", f"rule {rule}\n  description = {tool} $in\n")
    ninja_file.write_text(text)
    sys.stdout.flush()
    ninja = subprocess.run(["ninja", "-j", os.environ["MAX_JOBS"]], cwd=build_directory)
    if ninja.returncode != 0:
        sys.exit("flash_ext: the CUDA kernels did not compile, see above")


def cuda_options(cuda_home: Path) -> dict:
    """The arguments of setup() that add the extension."""
    os.environ["CUDA_HOME"] = str(cuda_home)  # otherwise torch looks for it, and warns
    try:
        import torch
        from torch.utils import cpp_extension as cpp
    except ImportError:
        sys.exit(
            "flash_ext: building the CUDA kernels needs the torch of your environment; use:"
            " pip install --no-build-isolation ."
        )
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or tuple(map(int, version.groups())) < (2, 11):
        sys.exit(f"flash_ext: torch must be 2.11 or newer, got {torch.__version__}")
    if not shutil.which("ninja"):  # pip put it next to a Python that was called by its path
        folders = Path(sys.executable).parent, sysconfig.get_path("scripts", "posix_user")
        os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *map(str, folders)])
    if not cpp.is_ninja_available():
        sys.exit("flash_ext: building the CUDA kernels needs ninja; use: pip install ninja")

    # A CPU-only torch ignores CUDA_HOME, and without torch.version.cuda nvcc gets no depfiles. The
    # binary carries its own CUDA runtime, so the version that torch was built with does not matter,
    # and torch's check is given nvcc's version.
    nvcc = str(cuda_home / "bin/nvcc")
    try:
        said = subprocess.check_output([nvcc, "--version"], text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"flash_ext: {nvcc} does not run: {error}")
    release = re.search(r"release (\d+\.\d+)", said)
    portable = os.environ.get("FLASH_EXT_PORTABLE") == "1"
    archs = os.environ.get("FLASH_EXT_CUDA_ARCHS") or targets_of(torch, portable)
    if release and (why := too_old(release[1], archs)):
        sys.exit(f"flash_ext: {nvcc} is of CUDA {release[1]}, and {why}")
    cpp.CUDA_HOME = str(cuda_home)
    torch.version.cuda = release[1] if release else "13.0"
    compiler = os.environ.get("PYTORCH_NVCC", shlex.quote(nvcc))
    guard = shlex.join([sys.executable, str(ROOT / "csrc/build/nvcc_strict.py")])
    os.environ["PYTORCH_NVCC"] = f"{guard} {compiler}"
    os.environ["MAX_JOBS"] = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    os.environ.setdefault("NINJA_STATUS", "[%f/%t, %e s] ")

    sys.path.insert(0, str(ROOT / "csrc/build"))
    import nvcc_strict

    cpp._run_ninja_build = run_ninja

    class BuildExtension(Recorded, cpp.BuildExtension):
        def build_extensions(self) -> None:
            super().build_extensions()
            objects = [Path(self.build_temp, source).with_suffix(".o") for source in sources]
            complaints = nvcc_strict.report(objects, ROOT / "build/ptxas.log")
            self.record(
                digest=digests["source_digest"](ROOT),
                kernels=digests["kernel_digest"](ROOT),
                targets=archs,
                cuda=release[1] if release else None,
                torch=torch.__version__,
                platform=manylinux.get("PLATFORM"),
                slow_kernels=complaints,
            )
            nvcc_strict.settle(complaints)

    digests = runpy.run_path(str(ROOT / "benchmarks/digest.py"))
    print(f"flash_ext: compiling for {archs} (FLASH_EXT_CUDA_ARCHS)", flush=True)
    if portable and platform.machine() != "x86_64":
        sys.exit("flash_ext: FLASH_EXT_PORTABLE=1 is for x86-64 alone")
    manylinux = runpy.run_path(str(ROOT / "distribution/manylinux.py")) if portable else {}

    # Older toolkits cannot choose. "size" takes longer, and gives wheels a fifth of the size.
    mode = "size" if portable else "balance"
    compress = [f"--compress-mode={mode}"] if release and float(release[1]) >= 13 else []
    common = ["-std=c++20", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={STABLE_ABI}"]
    targets = gencode_flags(archs)
    if any("sm_90a" in flag for flag in targets):
        common.append("-DFLASH_EXT_SM90A")  # fa3's kernels are there
    if any("sm_90" in flag for flag in targets):
        common.append("-DFLASH_EXT_SM90")  # other kernels have code for Hopper's shared memory
    # With few jobs two targets of a file at a time only take turns.
    targets_at_once = 1 if int(os.environ["MAX_JOBS"]) < 16 else 2
    nvcc_flags = [
        *common,
        *targets,
        *compress,
        *(["-lineinfo"] if os.environ.get("FLASH_EXT_LINEINFO") == "1" else []),
        "--expt-relaxed-constexpr",
        "-Xptxas=-v,-warn-spills,-warn-lmem-usage",
        # The host's part; nvcc optimizes kernels by itself.
        f"-Xcompiler=-O1,-fvisibility=hidden,{','.join(WARNINGS)}",
        f"--threads={os.environ.get('NVCC_THREADS') or targets_at_once}",
    ]
    sources = [*find_files("csrc/instantiate/*.cu"), host_source()]
    extension = Extension(
        "flash_ext._C",
        sources,
        depends=find_files(
            *("csrc/**/*.h", "csrc/**/*.cuh", "csrc/**/*.cpp"),
            *("csrc/build/*.py", "distribution/manylinux.py"),
        ),
        language="c++",
        py_limited_api=True,
        include_dirs=[
            str(ROOT / "csrc"),
            *map(str, cuda_folders(cuda_home, "include")),
        ],
        library_dirs=[
            *cpp.library_paths("cuda"),
            *(str(path) for name in ("lib64", "lib") for path in cuda_folders(cuda_home, name)),
        ],
        libraries=["torch_cpu", "cudart_static", "rt", "dl", "pthread"],
        extra_compile_args={
            # Python's own flags may have -g, which costs over a quarter of the time.
            "cxx": [
                *common,
                "-O3",
                "-g0",
                f'-DFLASH_EXT_TARGETS="{archs}"',
                *WARNINGS,
                *(["-Werror"] if nvcc_strict.is_strict() else []),
                *(f"-isystem{path}" for path in cpp.include_paths("cpu")),  # without its warnings
                "-fvisibility=hidden",
            ],
            "nvcc": nvcc_flags,
        },
        # libtorch.so pulls in libtorch_cuda.so, which holds the current-stream shim. That is a weak
        # symbol here, so the linker would see no need for libtorch.so.
        # Stripped, it is half as large.
        extra_link_args=[
            "-s",
            "-Wl,--exclude-libs,ALL,--no-as-needed",
            "-ltorch",
            "-Wl,--as-needed",
            *(manylinux["link_flags"](ROOT / "build/manylinux_2_28") if portable else []),
        ],
    )
    return extension_options(extension, BuildExtension)


def extension_options(extension: Extension, command: type) -> dict:
    """A wheel for every Python, except that those without the GIL refuse such wheels."""
    tag = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"py_limited_api": "cp310"}
    return {
        "ext_modules": [extension],
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

    class CopyLibrary(Recorded, build_ext):
        def build_extensions(self) -> None:
            target = self.binary()
            target.parent.mkdir(parents=True, exist_ok=True)
            if not (target.exists() and target.samefile(library)):
                shutil.copy(library, target)
            names = "digest", "kernels", "targets", "cuda", "torch", "platform", "slow_kernels"
            self.record(**{name: known.get(name) for name in names})

    return extension_options(Extension("flash_ext._C", [], py_limited_api=True), CopyLibrary)


def checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Recorded:
    """A build_ext that writes what it knows of the binary beside it."""

    def get_ext_filename(self, name: str) -> str:
        return str(Path(*name.split("."))) + ".abi3.so"  # whatever Python: it is no module

    def binary(self) -> Path:
        return Path(self.get_ext_fullpath("flash_ext._C"))

    def record(self, **facts: object) -> None:
        binary = self.binary()
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
        if format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, *_, **__)

        def same_everywhere(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        path = Path(f"{base_name}.tar.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            path.open("wb") as file,
            gzip.GzipFile("", "wb", 9, file, mtime=0) as compressed,
            tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for entry in [Path(base_dir), *sorted(Path(base_dir).rglob("*"))]:
                archive.add(entry, recursive=False, filter=same_everywhere)
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
