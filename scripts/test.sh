#!/usr/bin/env bash
# Installs the dependencies if necessary. Then runs the tests in two processes, and prints the slowest tests.
# Without arguments, tests with the marks `long` or `slow` are left out. All arguments go to pytest:
#   bash scripts/test.sh -m "not slow"                                      # with the long tests, as CI does
#   bash scripts/test.sh -k ledger tests/buffer
#   bash scripts/test.sh -p no:xdist --pdb tests/buffer/test_ledger.py      # in one process
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source scripts/setup.sh

# One thread per process: the tests start many processes, and their threads would compete for the cores.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_worker_niceness=0
unset PYTHONDONTWRITEBYTECODE # if it is set, each process compiles the project's modules again

if [ $# -eq 0 ]; then
    echo '== tests without the long tests; bash scripts/test.sh -m "long and not slow" runs the long tests'
    set -- -m "not long and not slow"
fi
split=(-n 2 --no-loadscope-reorder)
for argument in "$@"; do
    case $argument in
    no:xdist | -pno:xdist | --pdb | -n* | --numprocesses* | *::*) split=() ;;
    esac
done
exec .venv/bin/python -m pytest --durations=20 --durations-min=1 "${split[@]}" "$@"
