"""The benchmark of a thousand waiting workers counts every lease that a commit admits, once."""

import pytest

from benchmarks.fleet_leases import WARM_UP_STEPS, measure_leases


@pytest.mark.timeout(60)
def test_every_lease_that_a_commit_admits_is_heard_of_once():
    waits = measure_leases(4, num_workers=8, num_steps=WARM_UP_STEPS + 2)
    assert len(waits) == 2 * 4
    assert all(0 < wait < 10 for wait in waits)
