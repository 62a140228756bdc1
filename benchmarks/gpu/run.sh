#!/usr/bin/env bash
# Every kernel on this machine's GPU: first whether it is right, then how fast linears, attention, the whole engine and
# 256 requests at once are beside torch's own, gemlite's and transformers'.
# usage: run.sh [PART ...] [--quick] [--output FOLDER] [--scratch FOLDER]
# Parts are correctness, speed and attention, which take ten minutes together, engine (five) and serving (ten). The first
# three need torch and triton and nothing installed; the last two what runtime/ imports, and say what is missing.
# --quick does a tenth, results go to benchmarks/results or --output, random models of 20 GB to /tmp or --scratch.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
declare -A limits=([correctness]=250 [speed]=195 [attention]=140 [engine]=270 [serving]=570)
parts=()
while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do
    if [ -z "${limits[$1]:-}" ]; then
        echo "run.sh: $1 is none of the parts correctness, speed, attention, engine, serving" >&2
        exit 2
    fi
    parts+=("$1")
    shift
done
[ ${#parts[@]} -gt 0 ] || parts=(correctness speed attention engine serving)
# The repository is the package smelt.
link="$(mktemp -d)"
trap 'rm -rf "$link"' EXIT
ln -s "$root" "$link/smelt"
export PYTHONPATH="$link:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python="${PYTHON:-python3}"
status=0
for part in "${parts[@]}"; do
    # Each part keeps to its time by itself; this is for one that hangs. Times of wrong kernels are still worth a look, but
    # the script fails.
    timeout "${limits[$part]}" "$python" -m "benchmarks.gpu.$part" "$@" || status=$?
done
exit "$status"
