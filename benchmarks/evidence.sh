#!/usr/bin/env bash
# What shows that this source works on this GPU, and how fast. Exits with 1 where something fails.
#
#     bash benchmarks/evidence.sh tests               # the GPU tests, and beside them the sanitizers
#     bash benchmarks/evidence.sh results [PART ...]  # everything.py, or these parts of it
#
# May be set: PYTHON; OUT, a folder that gets the logs and, as results.tgz, the result files.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/evidence}
mkdir -p "$OUT"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
what=${1:-}
shift
failed=0
case $what in
    tests)
        bash tests/sanitize.sh >"$OUT/sanitizers.log" 2>&1 &
        "$PYTHON" tests/gpu_suite.py >"$OUT/tests.log" 2>&1 || failed=1
        wait $! || failed=1
        tail -n 40 "$OUT/tests.log"
        tail -n 8 "$OUT/sanitizers.log"
        ;;
    results)
        "$PYTHON" benchmarks/everything.py ${1:+--only "$@"} >"$OUT/results.log" 2>&1 || failed=1
        tail -n 40 "$OUT/results.log"
        ;;
    *)
        sed -n '2,7s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
esac
tar -czf "$OUT/results.tgz" benchmarks/results
exit $failed
