"""All process groups of a dp × sp mesh have the configured time-out."""

import pytest
import torch
import torch.distributed as dist

from learner.config import Device, LearnerConfig
from learner.fsdp import open_mesh
from tests.support.ranks import run_on_ranks


def timeouts_of(fsdp_size: int) -> list[float]:
    config = LearnerConfig(num_ranks=4, sp_size=2, fsdp_size=fsdp_size, device=Device.cpu, step_timeout_s=77.0)
    mesh = open_mesh(config)
    sharding = mesh.fsdp_mesh
    groups = [mesh.dp_group, mesh.sp_group, *(sharding.get_group(axis) for axis in range(sharding.ndim))]
    seconds = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    dist.destroy_process_group()
    return seconds


@pytest.mark.parametrize(("fsdp_size", "num_groups"), [(4, 3), (2, 4)])
def test_every_process_group_has_the_step_timeout(fsdp_size, num_groups):
    for seconds in run_on_ranks(4, timeouts_of, fsdp_size):
        assert seconds == [77.0] * num_groups
