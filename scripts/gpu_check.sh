#!/usr/bin/env bash
# Checks this machine for training, part by part: bash scripts/gpu_check.sh [--model DIR] [--gpus N] [--only training,serving]
# If .venv or python3 has torch, the script uses it and needs no network. Otherwise it runs the setup first.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

for python in .venv/bin/python python3; do
    if "$python" -c "import torch, transformers, msgspec" 2>/dev/null; then
        PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m asyncrl check-gpu "$@"
    fi
done
source scripts/setup.sh
exec .venv/bin/asyncrl check-gpu "$@"
