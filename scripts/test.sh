#!/usr/bin/env bash
# Sets up what is needed, then runs the tests on two processes and prints the slowest. Arguments go to pytest:
#   bash scripts/test.sh -k ledger tests/buffer
#   bash scripts/test.sh -p no:xdist --pdb tests/buffer/test_ledger.py      # in one process
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source scripts/setup.sh

# One thread per process: the tests start many processes, and their threads would fight for the cores.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_worker_niceness=0
unset PYTHONDONTWRITEBYTECODE # else each of these processes compiles the modules of the project again

split=(-n 2 --no-loadscope-reorder)
for argument in "$@"; do
    case $argument in
    no:xdist | -pno:xdist | --pdb | -n* | --numprocesses* | *::*) split=() ;;
    esac
done
exec .venv/bin/python -m pytest --durations=20 --durations-min=1 "${split[@]}" "$@"
