"""Groups of four workers on real Ray: every dispatch mode, padding, meshes, futures, deadlines and errors."""

import asyncio
import sys
import time

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle
from tensordict import TensorDict

from asyncrl.core.errors import BatchError, DeadlineError
from asyncrl.single_controller import (
    DataProto,
    DataProtoConfig,
    DataProtoFuture,
    Dispatch,
    Execute,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    call_deadline,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)
from asyncrl.single_controller.dispatch import collect_all_to_all

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def two_to_all(worker_group, *args, **kwargs):
    for arg in [*args, *kwargs.values()]:
        assert len(arg) == 2
    return tuple(list(arg) * 2 for arg in args), {key: list(value) * 2 for key, value in kwargs.items()}


class Adder(Worker):
    def __init__(self, x):
        super().__init__()
        self.x = x
        self._register_dispatch_collect_info("mesh", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    def not_registered(self, y):
        return self.x + y

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, a, b):
        return self.rank, a + b

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def one_to_rank_zero(self, a):
        return self.rank, a

    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, a):
        return self.rank, a

    @register(Dispatch.RANK_ZERO, blocking=False)
    def rank_zero_later(self, a):
        return self.rank, a

    @register(Dispatch.ONE_TO_ALL)
    def one_to_all(self, a, b):
        return self.x + a + b + self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def one_to_all_later(self, a, b):
        return self.x + a + b

    @register(Dispatch.ALL_TO_ALL, blocking=False)
    def all_to_all_later(self, a, b):
        return self.x + a + b

    @register()
    def by_default(self, a):
        return a

    @register(dispatch_mode={"dispatch_fn": two_to_all, "collect_fn": collect_all_to_all})
    def custom(self, a, b):
        return self.x + a + b

    @register(Dispatch.DP_COMPUTE)
    def dp_compute(self, part):
        return self.rank, part

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add_rank(self, data):
        data.batch["a"] += self.rank
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def add_rank_later(self, data):
        await asyncio.sleep(0)
        data.batch["a"] += self.rank
        return data

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add_nothing(self, data):
        return data

    @register(Dispatch.DP_COMPUTE_PROTO)
    def some_return_nothing(self, data):
        return data if self.rank else None

    @register(Dispatch.DP_COMPUTE_PROTO)
    def without_rows(self, data):
        return TensorDict({"t": torch.tensor(float(len(data)))}, batch_size=[])

    @register(Dispatch.DP_COMPUTE_METRIC)
    def length(self, data):
        return self.rank, len(data)

    @register(Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def kind_of_argument(self, data):
        return DataProto(meta_info={"metrics": {"kind": type(data).__name__}})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mesh"))
    def on_mesh(self, data):
        data.batch["a"] += 100 * self.rank
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mesh"), blocking=False)
    def on_mesh_later(self, data):
        data.batch["a"] += 100 * self.rank
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mesh"), blocking=False)
    def fail_on_mesh_later(self, data):
        if self.rank == 3:
            raise ValueError("this cannot be")
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mesh"))
    def sum_on_mesh(self, first, second):
        return DataProto.from_dict({"a": first.batch["a"] + second.batch["a"]})

    @register(Dispatch.ONE_TO_ALL)
    def lengths(self, *batches):
        return [len(batch) for batch in batches]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("no such mesh"))
    def on_unknown_mesh(self, data):
        return data

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank):
        if self.rank == rank:
            raise ValueError("this cannot be")

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fail_later(self, data):
        if self.rank == 2:
            raise ValueError("this cannot be")
        return data

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def wait_later(self, path, only_rank):
        while self.rank == only_rank and not path.exists():
            time.sleep(0.01)


@pytest.fixture(scope="module")
def group(cluster):
    pool = RayResourcePool([4], use_gpu=False, max_colocate_count=1, num_cpus_per_process=0.5)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Adder, x=10), name_prefix="adder")
    yield group
    group.shutdown()


def zeros(num_rows=8, **options):
    return DataProto.from_dict(
        {"a": torch.zeros(num_rows)}, {"s": [str(i) for i in range(num_rows)]}, meta_info={"t": 0.5}, **options
    )


@pytest.mark.long
def test_unregistered_methods_are_called_by_name(group):
    assert group.execute_all_sync("not_registered", y=3) == [13] * 4
    assert ray.get(group.execute_all_async("not_registered", y=4)) == [14] * 4
    assert group.execute_rank_zero_sync("not_registered", 5) == 15
    assert ray.get(group.execute_rank_zero_async("not_registered", 5)) == 15
    assert group.execute_all_sync("not_registered", [1, 2, 3, 4]) == [11, 12, 13, 14]


def test_a_method_on_rank_zero_runs_once_and_returns_one_result(group):
    assert group.on_rank_zero(1, b=2) == (0, 3)
    assert group.rank_zero("x") == group.one_to_rank_zero("x") == (0, "x")
    assert ray.get(group.rank_zero_later("x")) == (0, "x")


def test_one_to_all_sends_the_same_arguments_to_every_rank(group):
    assert group.one_to_all(1, b=2) == [13, 14, 15, 16]


def test_all_to_all_sends_each_rank_its_entry_of_a_list(group):
    assert ray.get(group.all_to_all_later([1, 2, 3, 4], b=[5, 6, 7, 8])) == [16, 18, 20, 22]
    assert group.by_default("same") == ["same"] * 4


def test_calls_that_do_not_block_return_ray_references(group):
    pending = group.one_to_all_later(1, b=2)
    assert isinstance(pending, list)
    assert all(isinstance(ref, ray.ObjectRef) for ref in pending)
    assert ray.get(pending) == pending.get(timeout_s=30) == [13] * 4


def test_results_of_calls_that_do_not_block_can_be_awaited(group):
    async def control():
        many, one, data = group.one_to_all_later(1, b=2), group.rank_zero_later(3), group.add_rank_later(zeros(4))
        return await many, await one, (await data).batch["a"].tolist()

    assert asyncio.run(control()) == ([13] * 4, (0, 3), [0, 1, 2, 3])


def test_results_of_calls_that_do_not_block_can_be_gathered(group):
    async def control():
        return await asyncio.gather(
            group.one_to_all_later(1, b=2), group.rank_zero_later(3), *(group.add_rank_later(zeros(4)) for _ in "ab")
        )

    many, one, *batches = asyncio.run(control())
    assert (many, one) == ([13] * 4, (0, 3))
    assert [data.batch["a"].tolist() for data in batches] == [[0, 1, 2, 3]] * 2


def test_the_pending_result_of_one_rank_is_a_ray_reference(group):
    pending = group.rank_zero_later("x")
    assert ray.wait([pending], timeout=30)[0] == [pending]
    assert group.rank_zero(pending) == (0, (0, "x"))
    assert pending.get(30) == (0, "x")


def test_a_method_can_have_custom_dispatch_and_collect_functions(group):
    assert group.custom(a=[1, 2], b=[5, 6]) == [16, 18, 16, 18]


def test_dp_compute_needs_one_entry_per_rank(group):
    assert group.dp_compute(("a", "b", "c", "d")) == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    with pytest.raises(ValueError, match="4 ranks"):
        group.dp_compute(["a"])


def test_a_batch_is_split_over_the_ranks_and_the_results_are_joined(group):
    output = group.add_rank(zeros())
    assert output.batch["a"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert output.non_tensor_batch["s"].tolist() == [str(i) for i in range(8)]
    assert output.meta_info == {"t": 0.5}
    assert group.add_rank(data=zeros()).batch["a"].tolist() == output.batch["a"].tolist()


def test_a_worker_writes_to_its_own_copy(group):
    data = zeros()
    assert group.add_rank(data).batch["a"].sum() == group.add_rank(data).batch["a"].sum() == 12
    assert data.batch["a"].sum() == 0


def test_tensordicts_are_split_over_the_ranks(group):
    output = group.length(TensorDict({"a": torch.zeros(8)}, batch_size=[8]))
    assert output == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_values_that_cannot_be_split_are_refused(group):
    with pytest.raises(TypeError, match="DataProto"):
        group.add_rank([1, 2, 3, 4])
    with pytest.raises(BatchError, match="equal parts"):
        group.add_rank(zeros(10))


@pytest.mark.parametrize("num_rows", [1, 3, 4, 10])
def test_a_batch_with_padding_enabled_is_padded_and_unpadded(group, num_rows):
    data = zeros(num_rows, auto_padding=True)
    for output in (group.add_rank(data), group.add_rank_later(data).get(), group.add_rank(data=data)):
        assert output.non_tensor_batch["s"].tolist() == [str(i) for i in range(num_rows)]
        assert len(output.batch["a"]) == num_rows
    assert len(data) == num_rows
    assert group.without_rows(data)["t"] == (num_rows + 3) // 4


def test_a_batch_for_a_mesh_is_padded_and_unpadded(group):
    for num_rows in (1, 3, 4):
        data = zeros(num_rows, auto_padding=True)
        for output in (group.on_mesh(data), group.on_mesh_later(data=data).get()):
            assert output.non_tensor_batch["s"].tolist() == [str(i) for i in range(num_rows)]
    assert group.on_mesh(zeros(3, auto_padding=True)).batch["a"].tolist() == [0, 0, 200]


def test_a_batch_without_rows_is_sent_to_every_rank(group):
    for output in (group.add_rank(zeros(0)), group.add_rank_later(zeros(0, auto_padding=True)).get()):
        assert len(output) == 0
        assert output.batch["a"].shape == (0,)
    assert group.length(zeros(0, auto_padding=True)) == [(rank, 0) for rank in range(4)]
    facts = DataProto(meta_info={"t": 1})
    assert group.add_nothing(facts).meta_info == {"t": 1}


def test_padding_can_be_enabled_for_all_batches(group, monkeypatch):
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert len(group.add_rank(zeros(5))) == 5


def test_a_chunk_of_a_padded_future_has_no_padding(group):
    data = zeros(3, auto_padding=True)
    assert len(group.add_rank_later(data).chunk(1)[0].get()) == 3


def test_dp_compute_metric_returns_the_results_as_a_list(group):
    assert group.length(zeros()) == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert group.length(zeros(5, auto_padding=True)) == [(0, 2), (1, 2), (2, 2), (3, 2)]


def test_a_function_runs_on_every_rank_with_the_part_of_the_rank(group):
    def scaled(worker, data):
        data.batch["a"] += 10 * worker.rank
        return data

    assert group.execute_with_func_generator(scaled, zeros(4)).batch["a"].tolist() == [0, 10, 20, 30]
    assert group.execute_func_rank_zero(lambda a, b: a + b, 1, 2) == 3


def test_a_mesh_sends_parts_to_dp_ranks_and_collects_from_the_collecting_ranks(group):
    for output in (group.on_mesh(zeros(4)), group.on_mesh_later(zeros(4)).get()):
        assert output.batch["a"].tolist() == [0, 0, 200, 200]
    assert group._dispatch_info["mesh"] == [0, 0, 1, 1]
    assert group._collect_info["mesh"] == [True, False, True, False]


def test_ranks_that_are_not_collected_send_only_their_errors(group):
    sent = group._execute_all("on_mesh", ([zeros(1)] * 4,), {}, frozenset({1, 3})).get(60)
    assert [type(result).__name__ for result in sent] == ["DataProto", "NoneType", "DataProto", "NoneType"]
    with pytest.raises(ValueError, match="on rank 1"):
        group._execute_all("fail_on", (1,), {}, frozenset({1})).get(60)


def test_a_future_of_a_mesh_raises_the_errors_of_ranks_that_are_not_collected(group):
    future = group.fail_on_mesh_later(zeros(4))
    for call in (lambda: future.get(60), lambda: future.chunk(2)[0].get(60), lambda: group.on_mesh(future)):
        with pytest.raises(ValueError, match="this cannot be"):
            call()


def test_results_that_cannot_be_joined_are_refused(group):
    with pytest.raises(ValueError, match="NoneType"):
        group.some_return_nothing(zeros())


def test_a_batch_can_be_passed_on_and_can_be_changed_by_its_receiver(group):
    passed = group.add_nothing(zeros())
    assert [part.batch["a"].tolist() for part in passed.chunk(2)] == [[0.0] * 4] * 2
    read = ray.get(ray.put(zeros(4)))
    read.meta_info = {"t": 2}
    read.batch["b"] = torch.ones(4)
    again = ray.get(ray.put(read))
    assert (again.meta_info, sorted(again.batch.keys())) == ({"t": 2}, ["a", "b"])


def test_the_error_names_an_unknown_mesh(group):
    with pytest.raises(ValueError, match="no such mesh"):
        group.on_unknown_mesh(zeros(4))


def test_a_future_can_be_the_argument_of_another_call(group):
    first = group.add_rank_later(zeros())
    assert isinstance(first, DataProtoFuture)
    second = group.add_rank_later(first)
    assert group.add_rank(second).batch["a"].tolist() == [0, 0, 3, 3, 6, 6, 9, 9]
    assert group.on_mesh(second).batch["a"].tolist() == [0, 0, 2, 2, 204, 204, 206, 206]


def test_one_call_can_have_a_future_and_a_stored_batch_as_arguments(group):
    """Ray stores a batch for a mesh, or a large batch for all ranks. The group sends only a reference to the batch."""
    later = group.add_rank_later(zeros())
    for output in (group.sum_on_mesh(zeros(), later), group.sum_on_mesh(second=zeros(), first=later)):
        assert output.batch["a"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert group.lengths(later, zeros(50_000), ray.put(zeros(2))) == [[8, 50_000, 2]] * 4


def test_a_method_can_get_the_future_instead_of_its_result(group):
    output = group.kind_of_argument(group.add_rank_later(zeros()))
    assert output.meta_info["metrics"]["kind"] == ["DataProtoFuture"] * 4


def test_an_exception_has_its_type_traceback_and_rank(group):
    with pytest.raises(ValueError, match="this cannot be") as caught:
        group.fail_on(3)
    assert "on rank 3" in str(caught.value)
    assert 'raise ValueError("this cannot be")' in str(caught.value)


def test_a_chained_call_raises_the_exception_of_the_earlier_call(group):
    chained = group.add_rank_later(group.fail_later(zeros()))
    with pytest.raises(ValueError, match="this cannot be") as caught:
        chained.get(30)
    assert "fail_later on rank 2" in str(caught.value)

    async def control():
        await chained

    with pytest.raises(ValueError, match="on rank 2"):
        asyncio.run(control())


def test_the_error_of_a_late_call_names_the_group_and_the_late_ranks(group, tmp_path):
    with call_deadline(0.3), pytest.raises(DeadlineError, match="group 'adder' rank 0"):
        group.sleep(1.0)
    group.sleep(0)  # returns when all ranks have finished the late call
    pending = group.wait_later(tmp_path / "go on", only_rank=2)
    ray.wait(list(pending), num_returns=3, timeout=60)
    with pytest.raises(DeadlineError, match=r"1 of 4 are late: .*rank 2"):
        pending.get(timeout_s=0.1)
    (tmp_path / "go on").touch()
    with pytest.raises(ValueError, match="timeout_s"), call_deadline(0):
        pass


def test_each_group_has_its_own_deadline(group):
    short = RayWorkerGroup.from_detached(
        name_prefix="short", worker_handles=group.workers, ray_cls_with_init=group.ray_cls_with_init, timeout_s=0.3
    )
    with pytest.raises(DeadlineError):
        short.sleep(1.0)
    group.sleep(0)


def test_a_large_value_for_all_ranks_is_stored_once(group, monkeypatch):
    stored = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    array = np.zeros(50_000)
    assert [result.sum() for result in group.one_to_all_later(array, 1.0).get()] == [11.0 * 50_000] * 4
    assert len(stored) == 1


@pytest.mark.long
def test_a_registered_dispatch_mode_works_in_workers(cluster):
    mode = register_dispatch_mode(
        "TEST_REVERSED", lambda group, values: ([values[::-1]], {}), lambda _, output: output[::-1]
    )

    class Reversed(Worker):
        @register(dispatch_mode=mode)
        def echo(self, value):
            return self.rank, value

    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1, num_cpus_per_process=0.5)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Reversed), name_prefix="reversed")
    try:
        assert group.echo(["a", "b"]) == [(1, "a"), (0, "b")]
    finally:
        group.shutdown()
        Dispatch.remove("TEST_REVERSED")
