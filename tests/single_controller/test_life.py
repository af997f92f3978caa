"""Workers on several nodes: their order, the lookup of running workers, and the reports of dead workers."""

import asyncio
import os
import sys
import threading

import pytest
import ray
import torch
from ray import cloudpickle
from ray.util.placement_group import placement_group_table

from asyncrl.core.errors import DeadlineError, UsageError, WorkerDiedError
from asyncrl.single_controller import (
    DataProto,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
    sort_placement_group_by_node_ip,
)
from asyncrl.single_controller.resource_pool import node_addresses
from tests.support.placed_workers import Probe, group_on, pool_of
from tests.support.ray_cluster import HEAD_ADDRESS, NODE_OPTIONS, SECOND_ADDRESS

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Mortal(Probe):
    def __init__(self, noise=""):
        super().__init__()
        sys.stdout.write(f"rank {self.rank} begins {noise}\n")

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def die_on_one(self, data):
        if self.rank == 1:
            os.system("echo the child process speaks >&2")
            sys.stdout.write("about to die\n")
            os._exit(1)
        return data

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def die_without_torch(self):
        Mortal.die_on_one.__wrapped__(self, None)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def same(self, data):
        return data

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        threading.Event().wait(60)

    @register(Dispatch.ONE_TO_ALL)
    def reduce_rank(self):
        import torch  # an import at the top of the file would slow down the start of all workers

        torch.distributed.init_process_group("gloo")
        total = torch.tensor([float(self.rank)])
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return total.item()


@pytest.fixture(scope="module")
def two_nodes(cluster):
    """Yield four workers. Only two workers fit on each node."""
    group = group_on(pool_of(2, 2, num_cpus=3.5), Mortal, name_prefix="two")
    yield group
    group.shutdown()


@pytest.mark.long
def test_ranks_are_in_the_order_of_node_addresses(two_nodes):
    addresses = [address for _, _, address in two_nodes.place()]
    assert addresses == [HEAD_ADDRESS] * 2 + [SECOND_ADDRESS] * 2
    assert [rank for rank, _, _ in two_nodes.place()] == [0, 1, 2, 3]
    assert two_nodes.master_address == HEAD_ADDRESS


def test_the_environment_of_each_worker_describes_its_place(two_nodes):
    assert two_nodes.env("WORLD_SIZE") == ["4"] * 4
    assert two_nodes.env("RAY_LOCAL_WORLD_SIZE") == ["2"] * 4
    assert two_nodes.env("RAY_LOCAL_RANK") == ["0", "1", "0", "1"]
    assert two_nodes.env("WG_PREFIX") == ["two"] * 4
    assert set(two_nodes.env("MASTER_PORT")) == {two_nodes.master_port}


@pytest.mark.long
def test_torch_distributed_finds_its_group(two_nodes):
    assert two_nodes.reduce_rank() == [6.0] * 4


def test_placement_groups_are_sorted_by_the_numbers_in_their_addresses(two_nodes):
    pgs = two_nodes.resource_pool.get_placement_groups()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for given in (pgs, pgs[::-1]):
        nodes = [placement_group_table(pg)["bundles_to_node_id"][0] for pg in sort_placement_group_by_node_ip(given)]
        assert [addresses[node] for node in nodes] == [HEAD_ADDRESS, SECOND_ADDRESS]


def rows(num_rows=4):
    return DataProto.from_dict({"a": torch.zeros(num_rows)})


@pytest.mark.long
def test_the_error_for_a_dead_worker_names_group_rank_node_and_last_log_lines(cluster, tmp_path):
    group = group_on(pool_of(2), Mortal, name_prefix="mortal", log_dir=tmp_path)
    other = group_on(pool_of(1), Mortal, name_prefix="other")
    dead = group.die_on_one(rows())
    with pytest.raises(WorkerDiedError) as caught:
        dead.get(60)
    message = str(caught.value)
    assert "group 'mortal', rank 1" in message
    assert str(tmp_path / "mortal-1.log") in message
    assert message.endswith("rank 1 begins \nthe child process speaks\nabout to die")
    with pytest.raises(WorkerDiedError, match="'mortal', rank 1"):
        other.same(dead)
    with pytest.raises(WorkerDiedError, match="'mortal', rank 1"):
        group.place()

    async def control():
        await group.die_on_one(rows())

    with pytest.raises(WorkerDiedError, match="'mortal', rank 1"):
        asyncio.run(control())
    assert (tmp_path / "mortal-0.log").read_text().strip().endswith("rank 0 begins")
    group.shutdown()
    other.shutdown()


def test_the_error_of_a_call_during_the_end_of_its_group_names_the_worker(cluster):
    group = group_on(pool_of(1), Mortal, name_prefix="ended")
    assert group.place()
    pending = group.execute_rank_async(0, "hang")
    group.shutdown()

    async def awaited():
        await pending

    with pytest.raises(WorkerDiedError, match="group 'ended', rank 0"):
        asyncio.run(awaited())
    late = [
        group.place,
        lambda: group.same(DataProto()),
        lambda: group.execute_all_async("place"),
        lambda: group.execute_rank_zero_sync("place"),
        lambda: group.execute_rank_async(0, "place"),
    ]
    for call in late:
        with pytest.raises(UsageError, match=r"group 'ended' has no workers"):
            call()


def test_the_error_for_a_dead_worker_shows_its_output_without_a_log_option(cluster):
    group = group_on(pool_of(2), Mortal, name_prefix="unlogged")
    with pytest.raises(WorkerDiedError) as caught:
        group.die_without_torch().get(60)
    message = str(caught.value)
    assert "group 'unlogged', rank 1, on node 127." in message
    assert "the child process speaks" in message
    assert "about to die" in message
    assert "rank 0 begins" not in message
    again = RayWorkerGroup.from_detached(
        name_prefix="unlogged", worker_handles=group.workers, ray_cls_with_init=group.ray_cls_with_init
    )
    with pytest.raises(WorkerDiedError, match="about to die"):
        again.place()
    group.shutdown()


def test_the_error_for_a_failed_constructor_of_a_worker_has_the_reason(cluster):
    class Broken(Worker):
        def __init__(self):
            super().__init__()
            raise OSError("no such model")

        @register(Dispatch.ONE_TO_ALL)
        def ping(self):
            return 1

    group = RayWorkerGroup(pool_of(1), RayClassWithInitArgs(Broken), name_prefix="broken", timeout_s=60)
    with pytest.raises(WorkerDiedError, match=r"(?s)'broken', rank \d.*no such model"):
        group.ping()
    with pytest.raises(WorkerDiedError, match="no such model"):
        group.start_worker_aliveness_check()
    group.shutdown()


@pytest.mark.long
def test_the_error_for_a_process_that_does_not_start_has_the_reason(cluster):
    options = {"python": "/no/such/python", "timeout_s": 6, "name_prefix": "bodiless"}
    group = RayWorkerGroup(pool_of(1), RayClassWithInitArgs(Mortal), **options)
    with pytest.raises(DeadlineError, match=r"(?s)it never ran\).*raylet.*\.err:.*/no/such/python: No such file"):
        group.pid()
    group.shutdown()


@pytest.mark.long
def test_the_liveness_check_reports_a_death_once(cluster):
    group = group_on(pool_of(2), Mortal, name_prefix="watched")
    told, deaths = threading.Event(), []
    group.start_worker_aliveness_check(60, on_death=lambda error: (deaths.append(error), told.set()))
    ray.kill(group.workers[1])
    assert told.wait(30)
    assert "'watched', rank 1" in str(deaths[0])
    group.stop_worker_aliveness_check()
    assert len(deaths) == 1
    group.shutdown()


@pytest.mark.long
@pytest.mark.parametrize(
    "rank", [pytest.param(0, id="on this node", marks=pytest.mark.slow), pytest.param(1, id="on another node")]
)
async def test_the_error_names_a_worker_that_dies_between_calls(rank, cluster):
    group = group_on(pool_of(1, 1, apart=True), Mortal, name_prefix="idle")
    assert [address for *_, address in group.place()] == [HEAD_ADDRESS, SECOND_ADDRESS]
    death = asyncio.create_task(group.death())
    await asyncio.sleep(0)
    ray.kill(group.workers[rank])
    assert f"'idle', rank {rank}" in str(await asyncio.wait_for(death, 30))
    group.shutdown()


def test_the_liveness_check_can_be_stopped_and_started_again(cluster):
    group = group_on(pool_of(1), Mortal, name_prefix="watched again")
    told = threading.Event()
    for _ in range(2):
        group.start_worker_aliveness_check(60, on_death=lambda error: told.set())
    group.stop_worker_aliveness_check()
    assert not [thread for thread in threading.enumerate() if thread.name == "aliveness"]
    assert not told.is_set()
    group.shutdown()


@pytest.mark.long
def test_a_call_to_a_worker_on_a_dead_node_raises_an_error(cluster):
    node = cluster.add_node(num_cpus=40, node_ip_address="127.0.0.11", **NODE_OPTIONS)
    group = group_on(pool_of(1, num_cpus=32.0), Mortal, name_prefix="lost")
    assert group.place() == [(0, 1, "127.0.0.11")]
    told, deaths = threading.Event(), []
    group.start_worker_aliveness_check(60, on_death=lambda error: (deaths.append(error), told.set()))
    threading.Timer(0.5, cluster.remove_node, [node]).start()
    with pytest.raises(WorkerDiedError, match=r"'lost', rank 0, on node 127\.0\.0\.11"):
        group.hang()
    assert told.wait(60)
    assert "'lost', rank 0, on node 127.0.0.11" in str(deaths[0])
    group.shutdown()


async def test_a_cancelled_reservation_leaves_nothing_reserved(cluster):
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1, labels={"ray.io/node-id": "none-such"})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.reserve(), 0.3)
    assert pool.pgs is None
    groups = [group for group in placement_group_table().values() if group["name"].startswith(pool.name_prefix)]
    assert {group["state"] for group in groups} <= {"REMOVED"}


@pytest.mark.long
async def test_a_worker_can_have_a_given_rank_and_can_be_replaced(cluster):
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1, num_cpus_per_process=0.01)
    (node,) = await asyncio.wait_for(pool.reserve(), 60)
    address = node_addresses()[node]
    nowhere = {"master_addr": "none", "master_port": "0"}
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Mortal), name_prefix="late", first_rank=3, **nowhere)
    try:
        assert group.place() == [(3, 1, address)]
        assert (group.node_ids, await asyncio.wait_for(group.node_of(0), 60)) == ([node], node)
        group.replace_worker(0, noise="again")
        assert group.place() == [(3, 1, address)]
    finally:
        group.shutdown()
