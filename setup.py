"""Builds flash_ext/_C.abi3.so, the CUDA kernels; everything static is in pyproject.toml.

The binary uses only libtorch's stable ABI and defines no Python module (torch.ops.load_library
loads it), so one build serves every Python >= 3.10 and torch >= 2.11, CPU-only torch included.
Without nvcc the package installs pure. pip hides what a build prints: the reason goes into
flash_ext/_C.missing.txt, and `flash_ext.explain` and the first call on a GPU say it. Beside a
binary goes its record, _C.json. docs/install.md has the variables that change a build.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "distribution"), str(ROOT / "benchmarks")]
import digest  # noqa: E402
import manylinux  # noqa: E402

STABLE_ABI = "0x020b000000000000"  # torch 2.11, the oldest that the binary must load under
# Designated initializers leave out what has a default. -Wrestrict is about GCC 12's own string.
WARNINGS = ("-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Wno-restrict")
# 12.5 has cudaGetDriverEntryPointByVersion. Up to 12.8 ptxas serializes the matmuls of fa3
# (docs/notes/024-nvcc-versions.md).
OLDEST_NVCC = {"80": (12, 5), "90a": (12, 9)}
# What ptxas says of a kernel whose result is right, and which runs slower than it could.
SLOW = re.compile(r"ptxas.*(warning|Potential Performance Loss|serializ|setmaxnreg.*ignored)")
STATISTICS = re.compile(r"ptxas info\s*:|^\s+\d+ bytes stack frame")
WARNING = re.compile(r"warning( #\d+-D)?: ")  # of the front end and of the host's compiler


def is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def find_cuda_home() -> Path | None:
    """The CUDA toolkit: $CUDA_HOME, or the home of the nvcc on PATH, or /usr/local/cuda. That nvcc
    may be a script or a link in a folder without headers, so it is asked for its home."""
    if given := os.environ.get("CUDA_HOME"):
        return Path(given).absolute()  # the build checks it
    homes = [Path("/usr/local/cuda")]
    if nvcc := shutil.which("nvcc"):
        dryrun = [nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"]
        said = subprocess.run(dryrun, capture_output=True, text=True).stderr
        homes[:0] = map(Path, re.findall(r"^#\$ _HERE_=(.+)/bin$", said, re.MULTILINE))
    return next(filter(is_toolkit, homes), None)


def is_toolkit(home: Path) -> bool:
    return (home / "bin/nvcc").is_file() and bool(cuda_folders(home, "include/cuda_runtime.h"))


def cuda_folders(home: Path, name: str) -> list[Path]:
    """The places of a header or library in a toolkit: its top, and, in conda's, each target. The
    linker passes over libraries for other machines; the headers are the same for all."""
    targets = sorted(home.glob("targets/*-linux"))
    return [top / name for top in (home, *targets) if (top / name).exists()]


def targets_of(torch, portable: bool) -> str:
    """The default of FLASH_EXT_CUDA_ARCHS: what the GPUs here run, as torch's own extensions do.
    Without a GPU, and for a wheel, which is for other machines, it is both targets."""
    gpus = [] if portable else range(torch.cuda.device_count())
    majors = {torch.cuda.get_device_capability(gpu)[0] for gpu in gpus}
    return ";".join(sorted({"90a" if x == 9 else "80+PTX" for x in majors})) or "80+PTX;90a"


def gencode_flags(archs: str, source: Path) -> list[str]:
    """Turns "80+PTX;90a" into nvcc's flags for a file. fa3's and FP8's kernels run on 90a alone; a
    build without that target keeps its targets, since the launchers must be linked."""
    targets = re.findall(r"([^\s,;+]+)(\+PTX)?", archs)
    if source.name.startswith(("fa3_", "fp8_")):
        targets = [x for x in targets if x[0] == "90a"] or targets
    code = {"": "sm_{0}", "+PTX": "[sm_{0},compute_{0}]"}
    return [f"-gencode=arch=compute_{x},code={code[ptx].format(x)}" for x, ptx in targets]


def check_nvcc(home: Path, archs: str) -> str:
    """The CUDA release of nvcc, for example "13.0", if it can compile for these targets."""
    if not is_toolkit(home):
        sys.exit(f"flash_ext: CUDA_HOME={home} has no bin/nvcc and include/cuda_runtime.h; correct"
                 " or unset it, or install without kernels by FLASH_EXT_SKIP_CUDA=1")  # fmt: skip
    said = subprocess.getoutput(shlex.join([f"{home}/bin/nvcc", "--version"]))
    if not (found := re.search(r"release ((\d+)\.(\d+))", said)):
        sys.exit(f"flash_ext: {home}/bin/nvcc does not run: {said}")
    hopper = "90a", " for Hopper GPUs", ", FLASH_EXT_CUDA_ARCHS=80+PTX"
    target, of, less = hopper if "90a" in archs else ("80", "", "")
    if (int(found[2]), int(found[3])) < OLDEST_NVCC[target]:
        sys.exit(
            f"flash_ext: {home}/bin/nvcc is of CUDA {found[1]}, and the kernels{of} need"
            f" {'.'.join(map(str, OLDEST_NVCC[target]))} or newer; set CUDA_HOME (pip install"
            f' "cuda-toolkit[nvcc,cccl]" has one){less} or FLASH_EXT_SKIP_CUDA=1'
        )
    return found[1]


def check_torch():
    """The torch of this environment, whose headers and libraries the build needs."""
    try:
        import torch
    except ImportError:
        sys.exit("flash_ext: the build needs your torch; use: pip install --no-build-isolation .")
    if torch.__version__ < (2, 11):
        sys.exit(f"flash_ext: torch must be 2.11 or newer, got {torch.__version__}")
    return torch


def jobs() -> int:  # files compiled at once
    return int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


def flags_of(
    archs: str, release: str, home: Path, torch_home: Path, libraries: Path, portable: bool
) -> tuple[list[str], list[str], list[str]]:
    """The flags of nvcc, all but the targets, of the host's compiler, and of the linker."""
    common = ["-std=c++20", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={STABLE_ABI}", "-Icsrc"]
    # 90a: fa3's kernels are there. Other kernels have code for the shared memory of any Hopper.
    common += [f"-DFLASH_EXT_SM{x.upper()}" for x in ("90a", "90") if x in archs]
    # With a cross compiler nvcc looks for its headers only in that machine's target.
    common += [f"-I{path}" for path in cuda_folders(home, "include")]
    # Older toolkits cannot choose. "size" is slower, and gives wheels a fifth of the size.
    mode = "size" if portable else "balance"
    # As in torch's own extensions: half precision has no implicit conversions.
    absent = ("HALF_OPERATORS", "HALF2_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS")
    nvcc = [
        *common,
        *([f"--compress-mode={mode}"] if float(release) >= 13 else []),
        *(["-lineinfo"] if is_set("FLASH_EXT_LINEINFO") else []),
        *(["-ccbin", os.environ["CC"]] if "CC" in os.environ else []),
        *(f"-isystem={path}" for path in cuda_folders(home, "include/cccl")),
        *(f"-D__CUDA_NO_{x}__" for x in absent),
        *("--expt-relaxed-constexpr", "-Xptxas=-v,-warn-spills,-warn-lmem-usage"),
        # The host's part; nvcc optimizes kernels by itself.
        f"-Xcompiler=-O1,-fPIC,-fvisibility=hidden,{','.join(WARNINGS)}",
        # With few jobs two targets of a file at a time only take turns.
        f"--threads={os.environ.get('NVCC_THREADS') or (1 if jobs() < 16 else 2)}",
    ]
    host = [*common, "-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", *WARNINGS]
    host += [f"-isystem{torch_home / x}" for x in ("include", "include/torch/csrc/api/include")]
    host += [f'-DFLASH_EXT_TARGETS="{archs}"']
    # libtorch.so pulls in libtorch_cuda.so, which holds the current-stream shim. That is a weak
    # symbol here, so the linker would see no need for libtorch.so. -s: half as large.
    cuda = [path for name in ("lib64", "lib") for path in cuda_folders(home, name)]
    link = [f"-L{path}" for path in (libraries, *cuda)]
    link += [f"-l{name}" for name in ("torch_cpu", "cudart_static", "rt", "dl", "pthread")]
    link += ["-s", "-Wl,--exclude-libs,ALL,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
    return nvcc, host, link


# The output of a compilation is kept: a build also judges what an earlier one compiled.
NINJA = """\
builddir = {folder}
rule compile
  command = $tool -MD -MF $out.d -c $in -o $out >$out.log 2>&1 || (cat $out.log; exit 1)
  description = $in
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} -shared $in -o $out {link}
  description = $out
build {folder}/_C.abi3.so: link {objects}
"""


def host_source() -> Path:
    """All C++ files in one: most of the time of each is reading torch's headers."""
    file = ROOT / "build/host.cpp"
    parts = sorted(x for folder in ("api", "plan") for x in ROOT.glob(f"csrc/{folder}/*.cpp"))
    text = "".join(f'#include "{part.relative_to(ROOT / "csrc")}"\n' for part in parts)
    file.parent.mkdir(exist_ok=True)
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)
    return file


def command(words: list[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def compile_and_link(nvcc: list, archs: str, host: list, link: list) -> tuple[Path, list[Path]]:
    """Builds _C.abi3.so by ninja: what changed. Returns its path, and the logs of all files."""
    # The folder of `setup.py build`; an editable installation has a new --build-temp each time.
    folder = Path("build", f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}")
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    # In this order the files that take longest, FA3's and FA2's, are among the first.
    kernels = sorted(ROOT.glob("csrc/instantiate/*.cu"), reverse=True)
    tools = {x.relative_to(ROOT): [*nvcc, *gencode_flags(archs, x)] for x in kernels}
    tools[host_source().relative_to(ROOT)] = [*cxx, *host]
    objects = [folder / f"{source}.o" for source in tools]
    words = {"cxx": command(cxx), "link": command(link), "objects": " ".join(map(str, objects))}
    text = NINJA.format(folder=folder, **words)
    for target, (source, tool) in zip(objects, tools.items(), strict=True):
        text += f"build {target}: compile {source}\n  tool = {command(tool)}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(text)
    # pip puts it next to a Python, which may have been called by its path.
    ninja = shutil.which("ninja") or shutil.which("ninja", path=Path(sys.executable).parent)
    if ninja is None:
        sys.exit("flash_ext: building the CUDA kernels needs ninja; use: pip install ninja")
    run = [ninja, "-j", str(jobs()), "-f", folder / "build.ninja"]
    status = {"NINJA_STATUS": "[%f/%t, %e s] "}
    if subprocess.run(run, cwd=ROOT, env=status | os.environ).returncode:
        sys.exit("flash_ext: the CUDA kernels did not compile, see above")
    return folder / "_C.abi3.so", [Path(f"{x}.log") for x in objects]


def judge(logs: list[Path]) -> list[str]:
    """What ptxas says of slow kernels. A strict build exits for it, and for any warning. All that
    the compilers said goes to build/ptxas.log, with names as in the source."""
    text = "".join(log.read_text(errors="replace") for log in logs)
    if demangle := shutil.which("c++filt"):  # -p: without arguments
        said = subprocess.check_output([demangle, "-p"], input=text, text=True)
        text = said.replace("flash_ext::", "")
    (ROOT / "build/ptxas.log").write_text(text)
    lines = text.splitlines()
    shown = [line for line in lines if SLOW.search(line) or not STATISTICS.search(line)]
    sys.stderr.writelines(f"{line}\n" for line in shown)
    # One line a kernel: of a spill ptxas says twice that there is local memory.
    said = {(re.findall("'(.+)'", line) or [line])[0]: line for line in lines if SLOW.search(line)}
    slow = sorted(said.values())
    if is_set("FLASH_EXT_STRICT") and (slow or any(map(WARNING.search, shown))):
        sys.exit("flash_ext: failed because of the above; FLASH_EXT_STRICT=0 lets it pass")
    if slow:
        print(f"flash_ext: warning: {len(slow)} slow kernels, see above", file=sys.stderr)
    return slow


class BuildKernels(build_ext):
    def get_ext_filename(self, name: str) -> str:  # whatever Python: it is no module
        return name.replace(".", "/") + ".abi3.so"

    def build_extensions(self) -> None:
        home, torch, portable = CUDA_HOME, check_torch(), is_set("FLASH_EXT_PORTABLE")
        archs = os.environ.get("FLASH_EXT_CUDA_ARCHS") or targets_of(torch, portable)
        release = check_nvcc(home, archs)
        print(f"flash_ext: compiling for {archs} (FLASH_EXT_CUDA_ARCHS)", flush=True)
        torch_home = Path(torch.__file__).parent
        libraries, system, platform = torch_home / "lib", [], None
        if portable:
            machine = sysconfig.get_platform().rpartition("-")[2]
            platform = f"manylinux_2_28_{machine}"
            libraries = ROOT / "build" / platform
            system = manylinux.link_flags(libraries, machine, torch_home / "lib/libtorch_cpu.so")
        compiler = shlex.split(os.environ.get("PYTORCH_NVCC") or shlex.quote(f"{home}/bin/nvcc"))
        nvcc, host, link = flags_of(archs, release, home, torch_home, libraries, portable)
        built, logs = compile_and_link([*compiler, *nvcc], archs, host, [*link, *system])
        slow = judge(logs)
        binary = Path(self.get_ext_fullpath("flash_ext._C"))
        binary.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(built, binary)
        record = {
            "version": self.distribution.get_version(), "digest": digest.source_digest(ROOT),
            "kernels": digest.kernel_digest(ROOT), "targets": archs, "cuda": release,
            "torch": torch.__version__, "platform": platform, "slow_kernels": slow,
            "bytes": binary.stat().st_size,
            "sha256": hashlib.sha256(binary.read_bytes()).hexdigest(),
        }  # fmt: skip
        binary.with_name("_C.json").write_text(json.dumps(record, indent=1) + "\n")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        shutil.copy(Path(self.build_lib, "flash_ext/_C.json"), ROOT / "flash_ext")


class BuildPackage(build_py):
    """Copies the package as it is now, without files deleted since the last build."""

    def run(self) -> None:
        # An editable installation installs the source folder itself.
        package = (ROOT if self.editable_mode else Path(self.build_lib)) / "flash_ext"
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        if WHY_NO_KERNELS:
            print(f"flash_ext: the CUDA kernels are not built: {WHY_NO_KERNELS}", file=sys.stderr)
            (package / "_C.missing.txt").write_text(WHY_NO_KERNELS)


CUDA_HOME = find_cuda_home()
WHY_NO_KERNELS = "" if CUDA_HOME else "no nvcc was found (CUDA_HOME, PATH, /usr/local/cuda)"
if is_set("FLASH_EXT_SKIP_CUDA"):
    WHY_NO_KERNELS = "FLASH_EXT_SKIP_CUDA was set"
# A wheel for every Python, except that those without the GIL refuse such wheels.
TAG = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"py_limited_api": "cp310"}

setup(
    ext_modules=[] if WHY_NO_KERNELS else [Extension("flash_ext._C", [], py_limited_api=True)],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
    options={"bdist_wheel": TAG},
)
