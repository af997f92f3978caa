#!/usr/bin/env bash
# Installs the dependencies if necessary, then trains the quickstart, or the experiment of experiment=NAME.
# Every argument is a Hydra override: bash scripts/run_async.sh buffer.max_lag=4 rollout_fleet.num_engines=2
# Relative paths start at the current directory. --help explains the most common options.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 1

for argument in "$@"; do
    case $argument in rollout_fleet.engine=transformers) NEED_SGLANG=0 ;; esac
done
(cd "$root" && source scripts/setup.sh) || exit 1

# exec replaces this shell with the run, so that signals and the terminal reach the run directly.
exec "$root/.venv/bin/asyncrl" train "$@"
