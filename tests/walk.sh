#!/usr/bin/env bash
# Walks through README as a new user does: from a copy of this checkout, in an environment of its
# own, beside the torch that `python3` has. Prints the exit status and the time of each step.
# Without a GPU README's example runs on the CPU. `make test` is not among the steps.
#
#     bash tests/walk.sh [FOLDER]     # the copy, the environment and the logs; default: a new one
#
# Exits with 0 only if every step does.
set -uo pipefail
cd "$(dirname "$0")/.."

folder=${1:-$(mktemp -d)}
mkdir -p "$folder/clone" "$folder/logs"
tar -c --exclude='./.*' --exclude=./build --exclude='./flash_ext/_C*' . | tar -x -C "$folder/clone"
cd "$folder"
number=0 failed=0

step() {
    local begin=$(date +%s%N) status
    number=$((number + 1))
    bash -c "$*" >"$folder/logs/$number.log" 2>&1
    status=$?
    [ $status -eq 0 ] || failed=1
    local ms=$((($(date +%s%N) - begin) / 1000000))
    printf '%2d  status %d %6d.%03d s  %s\n' $number $status $((ms / 1000)) $((ms % 1000)) "$*"
}

step python3 -m venv venv
python3 -c 'import sys; print(*[x for x in sys.path if x.endswith("-packages")], sep="\n")' \
    >"$(echo venv/lib/python*/site-packages)/shared.pth"
export PATH="$folder/venv/bin:$PATH"
cd "$folder/clone"
step pip install '"setuptools>=77,<82"' ninja
step pip install --no-build-isolation -v .
cd "$folder"
python - <<'EXAMPLE'
import re
import torch
code = re.search(r"```python\n(.*?)```", open("clone/README.md").read(), re.S)[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
open("example.py", "w").write(code.replace('device="cuda"', f'device="{device}"'))
EXAMPLE
step python example.py
step python -m flash_ext
step python -m flash_ext.bench
step python -m flash_ext.bench --shape 2 1024 16 128 --kv-heads 8 --causal
cd "$folder/clone"
step make PY=python demo
for example in generate pairformer; do step python examples/$example.py; done
exit $failed
