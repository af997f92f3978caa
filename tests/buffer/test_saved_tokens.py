"""A short run of a benchmark. It measures how many of the tokens that dead workers saved are continued."""

import pytest

from benchmarks.buffer_admission import saved_tokens_kept
from buffer import BufferConfig, StalenessRule


@pytest.mark.parametrize("max_lag", [1, 2])
@pytest.mark.parametrize("max_deaths", [0, BufferConfig().max_worker_deaths])
def test_most_saved_tokens_of_dead_workers_are_continued(max_lag: int, max_deaths: int) -> None:
    rule = StalenessRule(max_lag=max_lag, groups_per_step=16)
    kept = [saved_tokens_kept(rule, num_ticks=800, seed=seed, max_deaths=max_deaths) for seed in range(3)]
    assert sum(kept) / len(kept) >= (0.85 if max_deaths else 0.95)
