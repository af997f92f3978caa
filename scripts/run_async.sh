#!/usr/bin/env bash
# Sets up what is needed, then trains: the quickstart unless experiment=NAME says otherwise.
# Every argument is a Hydra override: bash scripts/run_async.sh buffer.max_lag=4 rollout_fleet.num_engines=2
# Paths are seen from where you stand. --help explains the options that are turned most.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 1

for argument in "$@"; do
    case $argument in rollout_fleet.engine=transformers) NEED_SGLANG=0 ;; esac
done
(cd "$root" && source scripts/setup.sh) || exit 1

# exec: signals reach the run itself, and nothing stands between it and the terminal.
exec "$root/.venv/bin/asyncrl" train "$@"
