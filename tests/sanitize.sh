#!/usr/bin/env bash
# Runs every kernel on tiny shapes under compute-sanitizer: memcheck (out-of-bounds and
# misaligned accesses), racecheck (shared-memory hazards), synccheck (wrong barriers) and initcheck
# (reads of memory never written), on each GPU a part of the calls. Writes
# benchmarks/results/<gpu>/sanitizer.json, which keeps what other tools found in the same source.
# Exits with 0 only if every tool ran to its end and found nothing.
#
#     bash tests/sanitize.sh [tool ...]
#
# May be set: ONLY, an option (dropout_p), to run the calls that have it and write no report;
# PYTHON, SECONDS_PER_TOOL (300), COMPUTE_SANITIZER (its path), CUDA_VISIBLE_DEVICES: a GPU that is
# named several times has as many parts at a time (0,0,0,0).
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
LIMIT=${SECONDS_PER_TOOL:-300}
SANITIZER=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer)}
SANITIZER=${SANITIZER:-${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer}
[ -x "$SANITIZER" ] || { echo "compute-sanitizer is neither on PATH nor in \$CUDA_HOME/bin"; exit 2; }
tools=("$@")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck synccheck initcheck)

# Every tensor is a separate allocation, so that a read past its end finds no other tensor.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

run_tool() { # tool port part
    local tool=$1 port=$2 part=$3 begin=$SECONDS status
    local options=(--tool "$tool" --port "$port" --error-exitcode 99 --print-limit 20)
    # Only this package's kernels are judged. initcheck must see what the others write, so it
    # watches all; sanitize_cases.py runs no other kernel that reads.
    [ "$tool" = initcheck ] || options+=(--kernel-name kernel_substring=flash_ext)
    CUDA_VISIBLE_DEVICES=${gpus[part]} timeout --kill-after=10 "$LIMIT" \
        "$SANITIZER" "${options[@]}" \
        "$PYTHON" tests/sanitize_cases.py "$tool" "$part" ${#gpus[@]} >"$logs/$tool.$part.log" 2>&1
    status=$?
    echo "$tool $status $((SECONDS - begin))" >"$logs/$tool.$part.summary"
}

IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $(($(nvidia-smi -L | wc -l) - 1)))}"
port=49152
for tool in "${tools[@]}"; do
    for part in "${!gpus[@]}"; do
        run_tool "$tool" "$port" "$part" &
        port=$((port + 256))
    done
done
wait
export CUDA_VISIBLE_DEVICES=${gpus[0]}

failed=0
for tool in "${tools[@]}"; do
    echo "=== $tool"
    tail -n 60 "$logs/$tool".*.log
    # Of the parts the worst status and the longest time.
    sort -k2,2n "$logs/$tool".*.summary |
        awk '{status = $2; if ($3 > most) most = $3} END {print $1, status, most + 0}' >"$logs/$tool.all"
    read -r _ status _ <"$logs/$tool.all"
    [ "$status" -eq 0 ] || failed=1
done
cat "$logs"/*.all >"$logs/summary"
echo "=== tool, exit status (0 clean, 99 errors found, 124 out of time), seconds"
cat "$logs/summary"
[ -z "${ONLY:-}" ] || exit $failed
cases=$("$PYTHON" tests/sanitize_cases.py --count) &&
    "$PYTHON" tests/gpu_test_report.py --cases "$cases" "$logs/summary" || failed=1
exit $failed
