#!/usr/bin/env bash
# What a GPU is asked, in four stages that each end inside nine minutes:
#   check    does every kernel, and the whole engine, run and compute right?
#   numbers  how fast are a decode step, attention, linears and what stands between them, beside the device's limits?
#   tune     the tiles of this device; then what they change is measured again
#   serve    256 ragged requests, beside transformers' continuous batching
# usage: run.sh STAGE [--output FOLDER] [--scratch FOLDER] [--commit NAME] [--only TEXT] [--quick] [--sanitizer TOOL]
# Needs no installation: torch, triton and transformers, and the wheels that `python -m benchmarks.gpu.wheels` fetches.
# A stage that is cut keeps what it has; run again, it goes on. Python is $PYTHON, or python3.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
# The repository is the package smelt.
link="$(mktemp -d)"
trap 'rm -rf "$link"' EXIT
ln -s "$root" "$link/smelt"
export PYTHONPATH="$link:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# The stage keeps to its time by itself; this is for one that hangs, and does not hear that it should stop.
timeout -k 10 535 "${PYTHON:-python3}" -m benchmarks.gpu.stage "$@"
