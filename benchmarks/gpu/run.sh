#!/usr/bin/env bash
# Every kernel on this machine's GPU: first whether it is right, then how fast linears and attention are beside torch's own
# and gemlite's.
# Needs torch and triton and this repository; nothing has to be installed. Options: --quick for a tenth of the shapes,
# --output FOLDER for the results (benchmarks/results).
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
# The repository is the package smelt.
link="$(mktemp -d)"
trap 'rm -rf "$link"' EXIT
ln -s "$root" "$link/smelt"
export PYTHONPATH="$link:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python="${PYTHON:-python3}"
status=0
# Each part keeps to its time by itself; this is for one that hangs.
timeout 250 "$python" -m benchmarks.gpu.correctness "$@" || status=$?
# Times of wrong kernels are still worth a look, but the script fails.
timeout 195 "$python" -m benchmarks.gpu.speed "$@" || status=$?
timeout 140 "$python" -m benchmarks.gpu.attention "$@" || status=$?
exit "$status"
