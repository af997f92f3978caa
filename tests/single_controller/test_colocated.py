"""Several roles in one process: colocated, fused and nested workers on real Ray."""

import sys
import threading

import pytest
import ray
import torch
from ray import cloudpickle

from asyncrl.single_controller import (
    DataProto,
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from asyncrl.single_controller.dispatch import beside

pytestmark = pytest.mark.long

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@ray.remote
class Actor(Worker):
    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("actor mesh", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data):
        data.batch["a"] += self.rank + 1
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, data):
        return self.add(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor mesh"))
    def add_on_mesh(self, data):
        return self.add(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def plus_rank(self, x):
        return x + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def other_worker(self):
        return type(self.get_fused_worker_by_name("critic")).__name__


@ray.remote
class Critic(Worker):
    def __init__(self, config):
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def sub(self, data):
        data.batch["a"] -= self.config["b"]
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def minus(self, x):
        return x - self.config["b"]


@ray.remote
class SyncCritic(Worker):
    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def minus_ten(self, x):
        return x - 10


ROLES = {"actor": RayClassWithInitArgs(Actor), "critic": RayClassWithInitArgs(Critic, config={"b": 10})}
SYNC_ROLES = {"actor": RayClassWithInitArgs(Actor), "critic": RayClassWithInitArgs(SyncCritic)}


class Hybrid(create_colocated_worker_raw_cls(SYNC_ROLES)):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def both(self, x):
        return self.critic.minus_ten(self.actor.plus_rank(x))


class Inner(Worker):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def get(self):
        return self.x + self.rank


class Outer(Worker):
    def __init__(self, x):
        super().__init__()
        self.inner = Inner(x=x)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get(self):
        return self.inner.get()


class Listener(Worker):
    def __init__(self):
        super().__init__()
        self.told = threading.Event()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def wait(self):
        return self.told.wait(60.0)

    @beside
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def tell(self):
        self.told.set()


def small_pool(num_processes=2):
    return RayResourcePool([num_processes], use_gpu=False, max_colocate_count=2, num_cpus_per_process=0.5)


def zeros():
    return DataProto.from_dict({"a": torch.zeros(4)})


@pytest.fixture(scope="module")
def host(cluster):
    group = RayWorkerGroup(small_pool(), create_colocated_worker_cls_fused(ROLES))
    yield group
    group.shutdown()


@pytest.mark.long
def test_each_role_is_a_group_of_its_own_methods(host):
    roles = host.spawn(prefix_set=ROLES.keys())
    assert roles["actor"].add(zeros()).batch["a"].tolist() == [1, 1, 2, 2]
    assert roles["critic"].sub(zeros()).batch["a"].tolist() == [-10] * 4
    assert roles["actor"].plus_rank(1) == [1, 2]
    assert not hasattr(roles["critic"], "add")
    assert roles["actor"].other_worker() == ["Critic", "Critic"]


def test_colocated_roles_share_one_process(host):
    roles = host.spawn(ROLES)
    assert roles["actor"].workers == roles["critic"].workers == host.workers
    assert roles["actor"].worker_names == host.worker_names


@pytest.mark.long
def test_futures_and_meshes_work_through_roles(host):
    roles = host.spawn(ROLES)
    assert roles["critic"].sub(roles["actor"].add_later(zeros())).batch["a"].tolist() == [-9, -9, -8, -8]
    assert roles["actor"].add_on_mesh(roles["actor"].add_later(zeros())).batch["a"].tolist() == [2, 2, 4, 4]


def test_an_unknown_role_is_refused(host):
    with pytest.raises(ValueError, match="no role 'rm'"):
        host.spawn(["rm"])


@pytest.mark.slow  # `test_ported.py` tests groups that share a pool, and is not slow
def test_separate_groups_on_one_pool_give_the_same_results(cluster):
    pool = small_pool(1)
    actors = RayWorkerGroup(pool, ROLES["actor"])
    critics = RayWorkerGroup(pool, ROLES["critic"])
    assert critics.sub(actors.add(zeros())).batch["a"].tolist() == [-9] * 4
    actors.shutdown()
    assert critics.minus(1) == [-9]
    critics.shutdown()
    assert pool.pgs is None


@pytest.mark.long
def test_a_fused_class_can_have_methods_that_use_several_roles(cluster):
    hybrid = RayClassWithInitArgs(ray.remote(Hybrid))
    hybrid.fused_worker_used = True
    group = RayWorkerGroup(small_pool(1), hybrid)
    group.fuse(SYNC_ROLES.keys())
    summed = group.actor.plus_rank(0.5)
    assert summed == [0.5]
    assert group.critic.minus_ten(summed) == group.both(0.5) == [-9.5]
    assert group.actor.add(group.actor.add_later(zeros())).batch["a"].tolist() == [2] * 4
    group.shutdown()


def test_a_worker_can_contain_another_worker(cluster):
    group = RayWorkerGroup(small_pool(), RayClassWithInitArgs(ray.remote(Outer), x=2))
    assert group.get() == [2, 3]
    group.shutdown()


def test_the_two_names_of_verl_for_colocated_classes_are_equal():
    assert create_colocated_worker_cls is create_colocated_worker_cls_fused


def test_a_colocated_class_needs_roles():
    with pytest.raises(ValueError, match="at least one role"):
        create_colocated_worker_cls({})


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_method_marked_beside_runs_while_another_method_runs(is_fused):
    member = RayClassWithInitArgs(Listener)
    group = host = RayWorkerGroup(
        small_pool(1), create_colocated_worker_cls_fused({"listener": member}) if is_fused else member
    )
    try:
        if is_fused:
            group = host.spawn(["listener"])["listener"]
        waiting = group.wait()
        group.tell()
        assert waiting.get(timeout_s=60.0) == [True]
    finally:
        host.shutdown()
