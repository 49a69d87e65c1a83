#!/usr/bin/env bash
# What shows that this source works on this GPU, and how fast. Exits with 1 where something fails.
#
#     bash benchmarks/evidence.sh tests               # the GPU tests, and beside them the sanitizers
#     bash benchmarks/evidence.sh results [PART ...]  # everything.py, or these parts of it
#     bash benchmarks/evidence.sh results PART ... / PART ...   # on two GPUs (or more) at the same time
#
# May be set: PYTHON; OUT, a folder that gets the logs and, as results.tgz, the result files; MINUTES,
# after which no measurement begins; FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1, with which flash-attn 4
# compiles a kernel once for all parts.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/evidence}
mkdir -p "$OUT"
OUT=$(realpath "$OUT")
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
what=${1:-}
shift
failed=0

# `timeout` ends the measurements, too: what they have written is kept.
trap 'failed=1' TERM

# Through MPS processes that share a GPU run side by side, which takes the tests two thirds of the
# time. Does it work here?
start_mps() {
    export CUDA_MPS_PIPE_DIRECTORY=$mps/pipe CUDA_MPS_LOG_DIRECTORY=$mps/log
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    timeout 10 nvidia-cuda-mps-control -d &&
        timeout 60 "$PYTHON" -c "import torch; [torch.ones(9, device=f'cuda:{i}').sum().item()
for i in range(torch.cuda.device_count())]"
}
stop_mps() {
    echo quit | timeout 10 nvidia-cuda-mps-control
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# GPU PART ...: in a checkout of its own, whose results are added to those here.
results_on() {
    local gpu=$1 copy visible
    shift
    trap : TERM
    IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-0,1,2,3,4,5,6,7}"
    copy=$(mktemp -d)
    tar -c --anchored --exclude=./.git --exclude=./.venv --exclude=./build \
        --exclude="./$(realpath --relative-to=. "$OUT")" . | tar -x -C "$copy" || return 1
    cp -r "$copy/benchmarks/results" "$copy.before" 2>/dev/null  # the first run has none
    (cd "$copy" && CUDA_VISIBLE_DEVICES=${visible[$gpu]} "$PYTHON" benchmarks/everything.py --no-report \
        ${MINUTES:+--minutes "$MINUTES"} --only "$@") \
        >"$OUT/results_$gpu.log" 2>&1
    local status=$?
    # Not to be ended by `timeout`: what has been measured would be lost.
    (trap '' TERM && flock "$OUT" "$PYTHON" benchmarks/merge.py "$copy/benchmarks/results" \
        --before "$copy.before") || status=1
    rm -rf "$copy" "$copy.before"
    return $status
}

case $what in
    tests)
        bash tests/sanitize.sh >"$OUT/sanitizers.log" 2>&1 &
        sanitizers=$!
        jobs=()
        mps=$(mktemp -d)
        if start_mps >"$OUT/mps.log" 2>&1; then
            # For each GPU by its memory, for all by the cores: see gpu_suite.default_jobs.
            jobs=(--jobs "$(nvidia-smi ${CUDA_VISIBLE_DEVICES:+--id="$CUDA_VISIBLE_DEVICES"} \
                --query-gpu=memory.total --format=csv,noheader,nounits |
                awk -v most=$(($(nproc) / 2)) '{ n = int($1 / 10000); jobs += n < 8 ? n : 8 }
                    END { print int(jobs < most ? jobs : most) }')")
        else
            stop_mps >>"$OUT/mps.log" 2>&1
        fi
        "$PYTHON" tests/gpu_suite.py "${jobs[@]}" >"$OUT/tests.log" 2>&1 || failed=1
        [ ${#jobs[@]} -eq 0 ] || stop_mps
        wait $sanitizers || failed=1
        rm -rf "$mps"
        tail -n 40 "$OUT/tests.log"
        tail -n 8 "$OUT/sanitizers.log"
        ;;
    results)
        if [[ " $* " == *" / "* ]]; then
            running=()
            parts=()
            for part in "$@" /; do
                if [ "$part" != / ]; then
                    parts+=("$part")
                    continue
                fi
                results_on ${#running[@]} "${parts[@]}" &
                running+=($!)
                parts=()
            done
            for each in "${running[@]}"; do
                wait "$each" || wait "$each" || failed=1  # a signal ends the first one
            done
            tail -qn 20 "$OUT"/results_?.log
        else
            "$PYTHON" benchmarks/everything.py --no-report ${MINUTES:+--minutes "$MINUTES"} \
                ${1:+--only "$@"} >"$OUT/results.log" 2>&1 || failed=1
            tail -n 40 "$OUT/results.log"
        fi
        ;;
    *)
        sed -n '2,10s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
esac
tar -czf "$OUT/results.tgz" benchmarks/results
exit $failed
