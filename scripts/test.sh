#!/usr/bin/env bash
# Sets up what is needed, then runs the tests. Arguments go to pytest: bash scripts/test.sh -k ledger tests/buffer
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source scripts/setup.sh

# One thread a process: the tests start many processes, and threads that fight for two cores stop them all.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_worker_niceness=0
exec .venv/bin/python -m pytest "$@"
