"""The simulated receivers speak the protocol of the real log."""

from benchmarks.publish_log import measure_log


def test_every_simulated_engine_follows_every_publish():
    [(name, cost_ms)] = measure_log(num_engines=5, num_publishes=2).items()
    assert name == "controller_ms_per_publish_5_engines"
    assert 0 < cost_ms < 1000
