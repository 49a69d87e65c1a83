"""Python processes that have torch already: forks of one that has imported it and setuptools.

For tests that need a process of their own. Torch's import takes longer than most of what they ask.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import atexit, gc, json, os, runpy, sys, traceback
import setuptools, torch, torch.testing, torch.utils.flop_counter

path, served = sys.path[1:], sys.stdin
gc.freeze()  # at what is imported no collection in a fork needs to look


def run(first, words):
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = ["", *map(os.path.abspath, filter(None, given)), *path]
    sys.argv[:] = words
    if first == "-c":
        sys.argv[0] = first
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


def leave(status):
    "Without the end of the interpreter, which takes a third of a second with torch."
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


for line in served:
    if os.fork() == 0:
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    leave(0)
first, words, folder, environment, *outputs = json.loads(line)
for number, name in enumerate((os.devnull, *outputs)):
    os.dup2(os.open(name, os.O_RDWR), number)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
try:
    run(first, words)
except SystemExit as error:
    if not isinstance(error.code, int | None):
        print(error.code, file=sys.stderr)
    leave(error.code if isinstance(error.code, int) else int(error.code is not None))
except BaseException:
    traceback.print_exc()
    leave(1)
leave(0)
"""


@functools.cache
def server() -> subprocess.Popen[str]:
    """The process with torch, which ends with this one."""
    kept = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=kept | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


def run_python(
    *command: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`python *command`, as by subprocess.run with captured output."""
    words = list(map(str, command))
    first = words.pop(0) if words[0] in ("-c", "-m") else ""
    process = server()
    assert process.stdin is not None and process.stdout is not None
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as errors:
        request = (first, words, str(cwd or Path.cwd()), env or dict(os.environ))
        process.stdin.write(json.dumps([*request, out.name, errors.name]) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        done = subprocess.CompletedProcess(
            command, status, out.read().decode(), errors.read().decode()
        )
    if check:
        done.check_returncode()
    return done
