"""Where workers are placed, how they are found again, and what is told when they die."""

import asyncio
import os
import sys
import threading

import pytest
import ray
import torch
from ray import cloudpickle
from ray.util.placement_group import placement_group_table

from asyncrl.protocol import DataProto
from asyncrl.protocol.errors import DeadlineError, WorkerDiedError
from asyncrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    Role,
    Worker,
    merge_resource_pool,
    parallel_put,
    register,
    sort_placement_group_by_node_ip,
    split_resource_pool,
)

from .conftest import HEAD_ADDRESS, NODE_OPTIONS, SECOND_ADDRESS

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Probe(Worker):
    def __init__(self, noise=""):
        super().__init__()
        sys.stdout.write(f"rank {self.rank} begins {noise}\n")

    @register(Dispatch.ONE_TO_ALL)
    def env(self, key):
        return os.environ.get(key)

    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return self.rank, self.world_size, ray.util.get_node_ip_address()

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def die_on_one(self, data):
        if self.rank == 1:
            os.system("echo the child process speaks >&2")
            sys.stdout.write("about to die\n")
            os._exit(1)
        return data

    @register(Dispatch.DP_COMPUTE_PROTO)
    def same(self, data):
        return data

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        threading.Event().wait(60)

    @register(Dispatch.ONE_TO_ALL)
    def reduce_rank(self):
        torch.distributed.init_process_group("gloo")
        total = torch.tensor([float(self.rank)])
        torch.distributed.all_reduce(total)
        torch.distributed.destroy_process_group()
        return total.item()


def pool_of(*process_on_nodes, num_cpus=0.5, **options):
    options = {"max_colocate_count": 1, "use_gpu": False, "num_cpus_per_process": num_cpus, "timeout_s": 30.0} | options
    return RayResourcePool(list(process_on_nodes), **options)


def group_on(pool, **options):
    return RayWorkerGroup(pool, RayClassWithInitArgs(Probe), **options)


@pytest.fixture(scope="module")
def two_nodes(cluster):
    """Four CPUs for each process, so that one pair fits on each node."""
    group = group_on(pool_of(2, 2, num_cpus=4.0), name_prefix="two")
    yield group
    group.shutdown()


def test_ranks_follow_the_order_of_the_nodes_addresses(two_nodes):
    addresses = [address for _, _, address in two_nodes.place()]
    assert addresses == [HEAD_ADDRESS] * 2 + [SECOND_ADDRESS] * 2
    assert [rank for rank, _, _ in two_nodes.place()] == [0, 1, 2, 3]
    assert two_nodes.master_address == HEAD_ADDRESS


def test_workers_are_described_by_their_environment(two_nodes):
    assert two_nodes.env("WORLD_SIZE") == ["4"] * 4
    assert two_nodes.env("RAY_LOCAL_WORLD_SIZE") == ["2"] * 4
    assert two_nodes.env("RAY_LOCAL_RANK") == ["0", "1", "0", "1"]
    assert two_nodes.env("WG_PREFIX") == ["two"] * 4
    assert set(two_nodes.env("MASTER_PORT")) == {two_nodes.master_port}


def test_torch_distributed_finds_its_group(two_nodes):
    assert two_nodes.reduce_rank() == [6.0] * 4


def test_a_job_that_comes_back_finds_its_workers_by_name(cluster):
    pool = pool_of(2)
    first = group_on(pool, name_prefix="kept", detached=True)
    again = RayWorkerGroup.from_detached(
        name_prefix="kept", worker_names=first.worker_names, ray_cls_with_init=RayClassWithInitArgs(Probe)
    )
    assert first.worker_names == ["keptProbe_0:0", "keptProbe_0:1"]
    assert again.pid() == first.pid()
    assert again.world_size == 2
    first.shutdown()
    with pytest.raises(ValueError, match="worker_names"):
        RayWorkerGroup(ray_cls_with_init=RayClassWithInitArgs(Probe))


def test_an_unknown_option_is_refused_and_verls_are_accepted(cluster):
    pool = pool_of(1)
    with pytest.raises(TypeError, match="log_directory"):
        group_on(pool, log_directory="here")
    group = group_on(pool, ray_wait_register_center_timeout=5, master_addr="here", master_port="77")
    assert group.env("MASTER_PORT") == ["77"]
    group.shutdown()


def test_extra_environment_reaches_the_workers(cluster):
    group = group_on(pool_of(1), worker_env={"MY_OPTION": "7"})
    assert group.env("MY_OPTION") == ["7"]
    group.shutdown()


def test_parts_of_a_pool_host_groups_of_their_own(cluster):
    whole = pool_of(4)
    parts = split_resource_pool(whole, [1, 3])
    inner = split_resource_pool(parts[1], [2, 1])
    assert [part.world_size for part in (*parts, *inner)] == [1, 3, 2, 1]
    assert [part.start_bundle_index for part in inner] == [1, 3]
    groups = [group_on(part) for part in (parts[0], inner[0], inner[1])]
    assert [len(group.place()) for group in groups] == [1, 2, 1]
    assert groups[1].env("RANK") == ["0", "1"]
    for group in groups:
        group.shutdown()
    assert whole.pgs is not None
    assert [part.world_size for part in split_resource_pool(whole, 2)] == [2, 2]
    with pytest.raises(ValueError, match="add up"):
        split_resource_pool(whole, 3)
    whole.shutdown()


def test_two_pools_become_one(cluster):
    first, second = pool_of(1), pool_of(2)
    merged = merge_resource_pool(first, second)
    assert merged.store == [1, 2]
    group = group_on(merged)
    assert group.world_size == 3
    group.shutdown()
    assert len(first.pgs) == len(second.pgs) == 1
    with pytest.raises(ValueError, match="max_colocate_count"):
        merge_resource_pool(first, pool_of(1, max_colocate_count=2))
    first.shutdown()
    second.shutdown()


def test_a_pool_that_cannot_be_granted_says_what_is_free(cluster):
    pool = pool_of(1, num_cpus=1000.0, timeout_s=0.5)
    with pytest.raises(DeadlineError, match="did not grant"):
        pool.get_placement_groups()
    states = {
        entry["state"] for entry in placement_group_table().values() if entry["name"].startswith(pool.name_prefix)
    }
    assert states == {"REMOVED"}


def test_bundles_ask_for_devices_and_their_kind():
    pool = RayResourcePool([1], max_colocate_count=3, accelerator_type="A100")
    assert pool.bundle() == {"CPU": 3.0, "GPU": 1.0, "A100": 1e-4}
    assert pool.bundle("npu") == {"CPU": 3.0, "NPU": 1.0, "A100": 1e-4}


def test_a_manager_gives_each_role_its_pool(cluster):
    manager = ResourcePoolManager(
        resource_pool_spec={"main": [2, 1], "rm": [1]},
        mapping={Role.ActorRollout: "main", Role.RewardModel: "rm"},
        use_gpu=False,
    )
    manager.create_resource_pool()
    assert manager.get_n_gpus() == 4
    assert manager.get_resource_pool(Role.ActorRollout).store == [2, 1]
    assert manager.get_resource_pool(Role.RewardModel).max_colocate_count == 1


def test_a_manager_names_what_is_missing_on_which_node(cluster):
    manager = ResourcePoolManager({"main": [8, 1]}, {Role.Actor: "main"})
    with pytest.raises(ValueError, match="8 processes") as caught:
        manager.create_resource_pool()
    assert f"node {HEAD_ADDRESS} lacks" in str(caught.value)
    assert f"node {SECOND_ADDRESS} lacks" in str(caught.value)
    assert "8 GPU (has 0 of 8)" in str(caught.value)


def test_placement_groups_are_sorted_by_number_not_by_text(two_nodes):
    pgs = two_nodes.resource_pool.get_placement_groups()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for given in (pgs, pgs[::-1]):
        nodes = [placement_group_table(pg)["bundles_to_node_id"][0] for pg in sort_placement_group_by_node_ip(given)]
        assert [addresses[node] for node in nodes] == [HEAD_ADDRESS, SECOND_ADDRESS]


def test_values_are_put_in_order(cluster):
    assert ray.get(parallel_put(list(range(20)), max_workers=4)) == list(range(20))


def rows(num_rows=4):
    return DataProto.from_dict({"a": torch.zeros(num_rows)})


def test_a_death_names_group_rank_node_and_last_log_lines(cluster, tmp_path):
    group = group_on(pool_of(2), name_prefix="mortal", log_dir=tmp_path)
    other = group_on(pool_of(1), name_prefix="other")
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


def test_the_liveness_check_reports_a_death_once(cluster):
    group = group_on(pool_of(2), name_prefix="watched")
    told, deaths = threading.Event(), []
    group.start_worker_aliveness_check(0.1, on_death=lambda error: (deaths.append(error), told.set()))
    ray.kill(group.workers[1])
    assert told.wait(30)
    assert "'watched', rank 1" in str(deaths[0])
    group.stop_worker_aliveness_check()
    assert len(deaths) == 1
    group.shutdown()


def test_a_dead_node_surfaces_in_the_call(cluster):
    node = cluster.add_node(num_cpus=40, node_ip_address="127.0.0.11", **NODE_OPTIONS)
    group = group_on(pool_of(1, num_cpus=32.0), name_prefix="lost")
    assert group.place() == [(0, 1, "127.0.0.11")]
    threading.Timer(0.5, cluster.remove_node, [node]).start()
    with pytest.raises(WorkerDiedError, match=r"'lost', rank 0, on node 127\.0\.0\.11"):
        group.hang()
    group.shutdown()
