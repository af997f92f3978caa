"""What a run says if Ray does not start."""

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.controller import cluster
from asyncrl.protocol.errors import ClusterDiedError


@pytest.mark.parametrize(
    ("overrides", "where"), [([], "on this machine"), (["ray.address=10.0.0.1:6379"], "at ray.address=10.0.0.1:6379")]
)
async def test_a_ray_that_does_not_start_is_a_named_error(monkeypatch, overrides, where):
    def fail(**options):
        raise Exception("The current node timed out during startup.")

    stopped = []
    monkeypatch.setattr(cluster.ray, "init", fail)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: stopped.append(True))
    with pytest.raises(ClusterDiedError, match=f"^Ray {where} did not come up: The current node timed out"):
        async with cluster.ray_cluster(compose_run(overrides)):
            pass
    assert stopped
