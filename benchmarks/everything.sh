#!/usr/bin/env bash
# Measures on this GPU what README and docs show: within nine minutes on an H200, or all of it.
#
#     make bench                                   # only prints
#     bash benchmarks/everything.sh --record       # into benchmarks/results
#     bash benchmarks/everything.sh --all --record FOLDER
#
# Results are recorded one by one, and those of other cells stay: single commands may run at the same
# time on several GPUs. Packages such as flash-attn 4 are measured if they are installed.

here=$(dirname "${BASH_SOURCE[0]}")
all=false
[[ ${1:-} == --all ]] && all=true && shift
given=("$@") status=0

run() {
    echo "===== $*"
    "${PYTHON:-python}" "$here/$1.py" "${@:2}" "${given[@]}" || { status=1; echo "FAILED: $*"; }
}

speed() { run compare --min-time 0.03 "$@"; }

run support
run memory
speed
speed --set gqa decode chunks prefill --peers flash cudnn efficient standard
speed --d 96 192 --s 1024 4096 16384 --variants fa2 fa3 --peers flash cudnn
speed --dtype fp16 --d 128 --s 1024 4096 16384 --peers flash cudnn
run host --peers flash cudnn
run options --rounds 10
run serving
run train --rounds 2 --model small medium bert-large
if $all; then
    speed --set models --variants fa2 fa3 --peers flash cudnn flash_attn_4
    speed --set mqa --variants fa3 --peers flash cudnn flash_attn_4
    speed --set fp8 --peers cudnn flash_attn_4
    run compare --sustained 0.8 --s 2048 4096 8192 16384 --variants fa3 --peers cudnn flash_attn_4
    run train --rounds 2 --model llama --providers fa3 fa2 sdpa flash flash_attn_4
    run fp8_errors
fi
exit $status
