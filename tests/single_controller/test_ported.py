"""Worker classes and driver scripts written for verl, with only their imports changed."""

import asyncio
import os
import sys

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle
from tensordict import TensorDict

from asyncrl.single_controller import (
    ClassWithInitArgs,
    DataProto,
    DataProtoFuture,
    Dispatch,
    Execute,
    FusedWorkerCLSName,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    collect_all_to_all,
    create_colocated_worker_cls_fused,
    func_generator,
    make_nd_compute_dataproto_dispatch_fn,
    parallel_put,
    register,
)

pytestmark = pytest.mark.long

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def as_a_pair(worker_group, *args, **kwargs):
    assert worker_group.world_size == 2
    return [list(arg) for arg in args], {key: list(value) for key, value in kwargs.items()}


@ray.remote
class Counter(Worker):
    def __init__(self, start=0, cuda_visible_devices=None) -> None:
        super().__init__(cuda_visible_devices)
        self.start = start
        self._register_dispatch_collect_info(mesh_name="infer", dp_rank=self.rank, is_collect=True)

    def plain(self, y):
        return self.start + y

    def getenv(self, key):
        return os.environ.get(key, f"{key} is not set")

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first_only(self, x, y):
        return self.start + x + y

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def everyone(self, x, y):
        return self.start + x + y

    @register(dispatch_mode={"dispatch_fn": as_a_pair, "collect_fn": collect_all_to_all})
    def pairs(self, x, y):
        return self.start + x + y

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def bump(self, data):
        data.batch["a"] = data.batch["a"] + 1
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def add_rank(self, data: DataProto) -> DataProto:
        await asyncio.sleep(0)
        data.batch["out"] = data.batch["a"] + self.rank
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def learn(self, data: DataProto) -> None:
        self.start += len(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="infer"), blocking=False)
    def on_tensordict(self, data: TensorDict) -> TensorDict:
        data["sums"] = torch.stack([row.sum() for row in data["ids"].unbind()]) + 100 * self.rank
        return data


@ray.remote
class Constant(Worker):
    """A worker that does not import torch, because this import takes most of the start time of a worker."""

    def __init__(self, value=0) -> None:
        super().__init__()
        self.value = value

    def get(self):
        return self.value

    def getenv(self, key):
        return os.environ.get(key)


@ray.remote
class PlainScorer:
    """A class with registered methods that does not inherit from `Worker`."""

    def __init__(self, scale):
        self.scale = scale

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data):
        return DataProto.from_dict({"score": data.batch["a"] * self.scale})


class NamedWorkerGroup(RayWorkerGroup):
    """A user's subclass of the worker group, like those in verl's backends."""

    def __init__(self, resource_pool, ray_cls_with_init, **kwargs):
        super().__init__(resource_pool=resource_pool, ray_cls_with_init=ray_cls_with_init, **kwargs)
        self.bound = self._bind_worker_method(self.ray_cls_with_init.cls.__ray_actor_class__, func_generator)


@pytest.fixture(scope="module")
def group(cluster):
    resource_pool = RayResourcePool([2], use_gpu=False, max_colocate_count=2)
    group = RayWorkerGroup(
        resource_pool=resource_pool,
        ray_cls_with_init=RayClassWithInitArgs(cls=Counter, start=2),
        name_prefix="ported",
        worker_env={"MY_KEY": "my value"},
    )
    yield group
    group.shutdown()


def rows(num_rows, **options):
    names = np.array([str(row) for row in range(num_rows)], dtype=object)
    return DataProto.from_dict({"a": torch.zeros(num_rows)}, {"name": names}, **options)


@pytest.mark.long
def test_workers_are_called_by_name_and_by_method(group):
    assert group.execute_all_sync("plain", y=3) == [5] * 2
    assert ray.get(group.execute_all_async("plain", y=4)) == [6] * 2
    assert ray.get(group.execute_rank_zero("plain", 5)) == 7
    assert group.first_only(1, y=2) == 5
    assert ray.get(group.everyone(x=1, y=2)) == [5] * 2
    assert group.pairs(x=[1, 2], y=[5, 6]) == [8, 10]


def test_worker_env_reaches_the_workers_but_cannot_set_reserved_variables(group):
    assert group.execute_all_sync("getenv", key="RAY_LOCAL_WORLD_SIZE") == ["2"] * 2
    assert group.execute_all_sync("getenv", "MY_KEY") == ["my value"] * 2
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        RayWorkerGroup(
            group.resource_pool, RayClassWithInitArgs(Counter), name_prefix="clash", worker_env={"WORLD_SIZE": "100"}
        )


@pytest.mark.long
def test_another_process_connects_to_a_worker_group_by_the_names_of_its_workers(group):
    @ray.remote(num_cpus=0)
    def take_up(worker_names):
        again = RayWorkerGroup.from_detached(
            worker_names=worker_names, ray_cls_with_init=RayClassWithInitArgs(cls=Counter, start=2), name_prefix=None
        )
        return again.worker_names, again.pairs(x=[1, 2], y=[5, 6]), again.first_only(x=1, y=2)

    assert group.worker_names == [f"portedCounter_0:{rank}" for rank in range(2)]
    assert ray.get(take_up.remote(group.worker_names)) == (group.worker_names, [8, 10], 5)


def test_a_method_accepts_parts_that_parallel_put_has_stored(group):
    parts = rows(8).chunk(group.world_size)
    output = ray.get(group.bump(parallel_put(parts)))
    assert [part.batch["a"].tolist() for part in output] == [[1] * 4] * 2
    assert parts[0].batch["a"].tolist() == [0] * 4


def test_a_registered_coroutine_returns_a_future(group):
    future = group.add_rank(rows(8))
    assert isinstance(future, DataProtoFuture)
    assert future.get().batch["out"].tolist() == [0] * 4 + [1] * 4


def test_a_method_that_returns_nothing_returns_none(group):
    before = group.execute_all_sync("plain", 0)
    assert group.learn(rows(8)) is None
    assert group.execute_all_sync("plain", 0) == [start + 4 for start in before]
    assert group.learn(rows(5, auto_padding=True)) is None


def test_functions_run_on_the_workers(group):
    def lengths(worker, data):
        counts = torch.full((len(data),), float(len(data) + worker.rank))
        return DataProto(batch=TensorDict({"count": counts}, batch_size=len(data)))

    output = group.execute_with_func_generator(lengths, rows(8))
    assert output.batch["count"].tolist() == [4] * 4 + [5] * 4
    assert len(group.execute_with_func_generator(lengths, rows(5, auto_padding=True))) == 5
    assert group.execute_func_rank_zero(lambda tensor: tensor + 1, torch.ones(2)).tolist() == [2, 2]


def test_a_mesh_splits_tensordicts_with_ragged_columns(group):
    ids = torch.nested.as_nested_tensor([torch.arange(length) for length in (2, 3, 4, 5)], layout=torch.jagged)
    output = group.on_tensordict(TensorDict({"ids": ids}, batch_size=[4])).get()
    assert isinstance(output, TensorDict)
    assert output["sums"].tolist() == [1, 3, 106, 110]
    assert [len(row) for row in output["ids"].unbind()] == [2, 3, 4, 5]
    with pytest.raises(AssertionError, match="5 rows"):
        group.on_tensordict(TensorDict({"a": torch.zeros(5)}, batch_size=[5]))


@pytest.mark.long
def test_a_worker_class_does_not_need_to_inherit_from_worker(group):
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    scorers = NamedWorkerGroup(pool, RayClassWithInitArgs(cls=PlainScorer, scale=3))
    assert scorers.score(group.add_rank(rows(8))).batch["score"].tolist() == [0.0] * 8
    assert scorers.bound == ["score"]
    scorers.shutdown()


@pytest.mark.long
def test_several_groups_share_the_processes_of_a_pool_without_devices(cluster):
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    groups = [
        RayWorkerGroup(pool, RayClassWithInitArgs(cls=Constant, value=value), timeout_s=60) for value in (1, 2, 3)
    ]
    assert [group.execute_all_sync("get") for group in groups] == [[1, 1], [2, 2], [3, 3]]
    for group in groups:
        group.shutdown()
    assert pool.pgs is None


def test_a_worker_class_keeps_its_own_options(cluster):
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=4)
    counter = RayClassWithInitArgs(cls=ray.remote(num_cpus=2)(Constant.__ray_actor_class__))
    counter.update_options({"max_concurrency": 3, "runtime_env": {"env_vars": {"MINE": "7", "RANK": "9"}}, "name": "x"})
    counter.set_additional_resource({"num_cpus": 3, "max_task_retries": 0})
    before = dict(counter._options)
    group = RayWorkerGroup(pool, counter, name_prefix="own")
    assert group.execute_all_sync("getenv", ["MINE"]) == ["7"]
    assert group.execute_all_sync("getenv", ["RANK"]) == ["0"]
    assert group.worker_names == ["ownConstant_0:0"]
    assert counter._options == before
    group.shutdown()


def test_a_worker_can_copy_the_mesh_position_of_another_worker(monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    inner, outer = Worker(), Worker(cuda_visible_devices="not set")
    inner._register_dispatch_collect_info("train", dp_rank=1, is_collect=True)
    outer.set_dispatch_collect(mesh_name="actor", **inner.get_dispatch_collect())
    assert outer._query_dispatch_info("actor") == 1
    assert outer.query_collect_info("actor") is outer._query_collect_info(mesh_name="actor") is True
    assert outer.get_cuda_visible_devices() == os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    with pytest.raises(AssertionError, match="no mesh"):
        outer.set_dispatch_collect("other", {}, {})
    with pytest.raises(AssertionError, match="registered already"):
        outer.set_dispatch_collect("actor", {"train": 0}, {"train": False})


def test_small_classes_of_verl_exist():
    held = ClassWithInitArgs(dict, [("a", 1)], b=2)
    assert held() == {"a": 1, "b": 2}
    assert held.fused_worker_used is False
    fused = create_colocated_worker_cls_fused({"a": RayClassWithInitArgs(Counter), "b": RayClassWithInitArgs(Counter)})
    assert fused.cls.__ray_actor_class__.__name__ == f"{FusedWorkerCLSName}_a_b"
    assert fused.fused_worker_used
