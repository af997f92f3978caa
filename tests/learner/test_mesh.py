"""The rendezvous of learner ranks, their listening addresses, and the time-outs of their groups."""

import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from asyncrl.single_controller.serialization import gather_rows, gather_values
from learner.config import RENDEZVOUS_FILE, LearnerConfig
from learner.fsdp import open_mesh
from tests.support.peers import peers
from tests.support.ranks import run_on_ranks


def join(_state, environment):
    """Join the process group that the environment variables describe.

    Returns the addresses on which this process listens, and the values that it gathered from all ranks.
    """
    os.environ.update(environment)
    open_mesh(LearnerConfig(num_ranks=2, device="cpu"))
    listening = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    rank = dist.get_rank()
    values = gather_values((rank, f"rank {rank}"), tuple[int, str], dist.group.WORLD)
    rows = gather_rows((torch.full((rank, 2), rank), torch.arange(rank)), dist.group.WORLD)
    return listening, values, [[part.tolist() for part in parts] for parts in rows]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize("way", ["file", "port"])
def test_ranks_find_each_other_and_listen_on_loopback_only(way, tmp_path):
    place = {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    port = free_port()
    place |= {RENDEZVOUS_FILE: str(tmp_path / "ranks")} if way == "file" else {}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if way == "port" else {}
    with peers(2) as ranks:
        for rank, peer in enumerate(ranks):
            peer.ask(join, place | {"RANK": str(rank)})
        answers = [peer.answer() for peer in ranks]
    addresses = {address.ip for listening, _, _ in answers for address in listening}
    assert addresses == {"127.0.0.1"}
    stores = [address for listening, _, _ in answers for address in listening if str(address.port) == port]
    assert len(stores) == (way == "port")
    for _, values, rows in answers:
        assert values == [(0, "rank 0"), (1, "rank 1")]
        assert rows == [[[], []], [[[1, 1]], [0]]]


def timeouts_of(fsdp_size: int) -> list[float]:
    config = LearnerConfig(num_ranks=4, sp_size=2, fsdp_size=fsdp_size, device="cpu", step_timeout_s=77.0)
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
