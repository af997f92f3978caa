"""Placement of workers: whole and divided pools, ports and options. A new driver finds running workers again."""

import socket
import subprocess
import sys

import pytest
import ray
from ray import cloudpickle
from ray.util.placement_group import placement_group_table

from asyncrl.core.errors import DeadlineError
from asyncrl.single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    Role,
    merge_resource_pool,
    parallel_put,
    split_resource_pool,
)
from asyncrl.single_controller.resource_pool import NODE_ID_LABEL, node_addresses, nodes_of
from tests.support.placed_workers import Probe, group_on, pool_of
from tests.support.ray_cluster import HEAD_ADDRESS, SECOND_ADDRESS

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DRIVER = """
import sys
import ray
from asyncrl.core.host import own_python
from asyncrl.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register

class Keeper(Worker):
    def __init__(self):
        super().__init__()
        self.kept = []

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, value):
        self.kept.append(value)
        return self.kept

own = {"address": sys.argv[1], "runtime_env": own_python()}
ray.init(**own, namespace="kept by name", log_to_driver=False)
names = [f"trainerKeeper_0:{rank}" for rank in range(2)]
keeper = RayClassWithInitArgs(Keeper)
if sys.argv[2] == "start":
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1, detached=True)
    group = RayWorkerGroup(pool, keeper, name_prefix="trainer", detached=True, timeout_s=60)
    assert group.worker_names == names
else:
    group = RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=keeper, timeout_s=60)
print(group.keep(sys.argv[2]))
if sys.argv[2] == "end":
    group.shutdown()
    for entry in ray.util.placement_group_table().values():
        if entry["state"] == "CREATED" and entry["bundles"][0] == {"CPU": 1.0}:
            ray.util.remove_placement_group(ray.util.get_placement_group(entry["name"]))
"""


def addresses_of(pool):
    nodes = node_addresses()
    return [sorted({nodes[node] for node in nodes_of(pg).values()}) for pg in pool.get_placement_groups()]


def test_each_placement_group_of_a_pool_with_apart_gets_its_own_node(cluster):
    pool = pool_of(1, 1, apart=True)
    assert sorted(addresses_of(pool)) == [[SECOND_ADDRESS], [HEAD_ADDRESS]]
    pool.shutdown()
    with pytest.raises(DeadlineError, match=r"did not grant 1 of 3 placement groups .*each on a node of its own"):
        pool_of(1, 1, 1, apart=True, timeout_s=1.0).get_placement_groups()


def test_a_pool_with_labels_uses_only_nodes_with_these_labels(cluster):
    second = next(node for node, address in node_addresses().items() if address == SECOND_ADDRESS)
    pool = pool_of(2, labels={NODE_ID_LABEL: second})
    assert addresses_of(pool) == [[SECOND_ADDRESS]]
    pool.shutdown()
    with pytest.raises(DeadlineError, match=r"on nodes with labels \{'pool': 'none'\}"):
        pool_of(1, labels={"pool": "none"}, timeout_s=1.0).get_placement_groups()


def test_one_placement_group_can_be_spread_over_nodes(cluster):
    pool = pool_of(2, strategy="SPREAD")
    assert addresses_of(pool) == [[SECOND_ADDRESS, HEAD_ADDRESS]]
    pool.shutdown()


def test_a_new_group_finds_detached_workers_by_name(cluster):
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


@pytest.mark.long
def test_detached_workers_continue_after_the_end_of_their_driver(cluster):
    said = [
        subprocess.run(
            [sys.executable, "-c", DRIVER, cluster.address, word],
            check=True,
            timeout=120,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for word in ("start", "resume", "end")
    ]
    assert said[0] == "[['start'], ['start']]"
    assert said[2] == "[['start', 'resume', 'end'], ['start', 'resume', 'end']]"


def test_a_detached_group_on_a_pool_that_is_not_detached_gives_a_warning(cluster, caplog):
    group = group_on(pool_of(1), name_prefix="short lived", detached=True)
    assert "'short lived' is detached and its pool is not" in caplog.text
    group.shutdown()


def test_an_unknown_option_is_refused_and_options_of_verl_are_accepted(cluster):
    pool = pool_of(1)
    with pytest.raises(TypeError, match="log_directory"):
        group_on(pool, log_directory="here")
    group = group_on(pool, ray_wait_register_center_timeout=5, master_addr="here", master_port=77)
    assert group.env("MASTER_PORT") == ["77"]
    group.shutdown()


def test_contradictory_options_are_refused(cluster):
    with pytest.raises(ValueError, match="master_port None; set both"):
        group_on(pool_of(1), master_addr="here")
    with pytest.raises(ValueError, match="reserved no devices"):
        group_on(pool_of(1), use_gpu=True)
    pool = pool_of(1)
    with pytest.raises(ValueError, match="MASTER_PORT"):
        group_on(pool, worker_env={"MASTER_PORT": "1"})
    assert pool.pgs is None


def test_the_master_port_is_the_first_free_one_of_the_range(cluster):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        first = taken.getsockname()[1]
        for node in (HEAD_ADDRESS, SECOND_ADDRESS):
            pool = pool_of(1, num_cpus=9.0 if node == HEAD_ADDRESS else 0.5)
            group = group_on(pool, master_port_range=[first, first + 50])
            assert first < int(group.master_port) < first + 50
            group.shutdown()
        with pytest.raises(ValueError, match="master_port_range"):
            group_on(pool_of(1), master_port_range=(first, first + 1))


def test_workers_with_profiling_run_under_nsight(cluster):
    launched = []

    class Recorded(RayClassWithInitArgs):
        def for_rank(self, options):
            launched.append(options["runtime_env"].get("nsight"))
            return super().for_rank({**options, "runtime_env": {"env_vars": options["runtime_env"]["env_vars"]}})

    nsight = {"trace": "cuda,nvtx", "capture-range": "cudaProfilerApi"}
    for options in ({"profile_steps": [1, 2]}, {"profile_steps": None}, {"profile_steps": [1], "device_name": "npu"}):
        RayWorkerGroup(pool_of(1), Recorded(Probe), worker_nsight_options=nsight, **options).shutdown()
    assert launched == [nsight, None, None]


@pytest.mark.long
def test_a_group_that_cannot_start_releases_its_reservation(cluster):
    first = group_on(pool_of(1), name_prefix="twice")
    pool = pool_of(2)
    with pytest.raises(ValueError, match="twiceProbe_0:0"):
        group_on(pool, name_prefix="twice")
    assert pool.pgs is None
    assert first.place()[0][:2] == (0, 1)
    first.shutdown()


@pytest.mark.long
def test_workers_get_additional_environment_variables(cluster):
    group = group_on(pool_of(1), worker_env={"MY_OPTION": "7"})
    assert group.env("MY_OPTION") == ["7"]
    group.shutdown()


@pytest.mark.long
def test_each_part_of_a_pool_can_have_its_own_group(cluster):
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


def test_two_pools_can_be_merged_into_one(cluster):
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


@pytest.mark.long
def test_a_reservation_lasts_until_no_group_uses_any_part_of_it(cluster):
    whole, other = pool_of(2), pool_of(1)
    on_part = group_on(split_resource_pool(whole, 1)[1])
    on_both = group_on(merge_resource_pool(whole, other))
    on_whole = group_on(whole)
    on_whole.shutdown()
    assert [len(group.place()) for group in (on_part, on_both)] == [1, 3]
    on_both.shutdown()
    assert on_part.place()[0][:2] == (0, 1)
    on_part.shutdown()
    assert whole.pgs is None
    assert other.pgs is not None
    other.shutdown()


@pytest.mark.long
def test_ranks_get_the_same_nodes_each_time_a_job_starts(cluster):
    places = []
    for _ in range(2):
        # Ray places the pool's second placement group on the first node, because only this node has room.
        group = group_on(pool_of(1, 1, num_cpus=7.0, timeout_s=60))
        places.append(group.place())
        group.shutdown()
    assert places[0] == places[1] == [(0, 2, HEAD_ADDRESS), (1, 2, SECOND_ADDRESS)]


def test_a_pool_that_cannot_be_reserved_removes_its_placement_groups(cluster):
    pool = pool_of(1, num_cpus=1000.0, timeout_s=0.5)
    with pytest.raises(DeadlineError, match="did not grant"):
        pool.get_placement_groups()
    states = {
        entry["state"] for entry in placement_group_table().values() if entry["name"].startswith(pool.name_prefix)
    }
    assert states == {"REMOVED"}


def test_bundles_request_devices_of_the_given_kind():
    pool = RayResourcePool([1], max_colocate_count=3, accelerator_type="A100")
    assert pool.bundle() == {"CPU": 3.0, "GPU": 1.0, "A100": 1e-4}
    assert pool.bundle("npu") == {"CPU": 3.0, "NPU": 1.0, "A100": 1e-4}


def test_the_pool_manager_creates_a_pool_for_each_role(cluster):
    manager = ResourcePoolManager(
        resource_pool_spec={"main": [2, 1], "rm": [1]},
        mapping={Role.ActorRollout: "main", Role.RewardModel: "rm"},
        use_gpu=False,
    )
    manager.create_resource_pool()
    assert manager.get_n_gpus() == 4
    assert manager.get_resource_pool(Role.ActorRollout).store == [2, 1]
    assert manager.get_resource_pool(Role.RewardModel).max_colocate_count == 1


def test_the_error_of_the_pool_manager_names_missing_devices_per_node(cluster):
    manager = ResourcePoolManager({"main": [8, 1]}, {Role.Actor: "main"})
    with pytest.raises(ValueError, match="8 processes") as caught:
        manager.create_resource_pool()
    assert f"node {HEAD_ADDRESS} lacks" in str(caught.value)
    assert f"node {SECOND_ADDRESS} lacks" in str(caught.value)
    assert "8 GPU (has 0 of 8)" in str(caught.value)


def test_parallel_put_returns_references_in_the_order_of_the_values(cluster):
    assert ray.get(parallel_put(list(range(20)), max_workers=4)) == list(range(20))
