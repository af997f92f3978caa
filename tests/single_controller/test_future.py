"""Futures on real Ray: callers join, split and pass on results that are not computed yet."""

import asyncio
import functools
import pickle
import threading

import numpy as np
import pytest
import ray
import torch

from asyncrl.core.errors import DeadlineError
from asyncrl.single_controller import DataProto, DataProtoFuture

pytestmark = pytest.mark.usefixtures("cluster")


def rows(*numbers, **meta_info):
    return DataProto.from_dict({"n": torch.tensor(numbers)}, {"s": [str(n) for n in numbers]}, meta_info=meta_info)


def put(*parts):
    return [ray.put(part) for part in parts]


def numbers(data):
    assert data.non_tensor_batch["s"].tolist() == [str(n) for n in data.batch["n"].tolist()]
    return data.batch["n"].tolist()


def test_a_future_joins_the_results_of_all_ranks():
    future = DataProtoFuture.concat(put(rows(1, 2, metrics={"loss": 1}), rows(3, 4, metrics={"loss": 2})))
    data = future.get()
    assert numbers(data) == [1, 2, 3, 4]
    assert data.meta_info == {"metrics": {"loss": [1, 2]}}
    assert numbers(future.get(timeout_s=10)) == [1, 2, 3, 4]


def test_the_constructor_takes_collect_fn_futures_and_dispatch_fn_in_this_order():
    future = DataProtoFuture(
        lambda results: DataProto.concat(results[::-1]), put(rows(1), rows(2)), lambda data: data[:1]
    )
    assert numbers(future.get()) == [2]
    assert DataProtoFuture(DataProto.concat, []).dispatch_fn is None


def test_chunks_of_a_future_are_futures_of_chunks():
    future = DataProtoFuture.concat(put(rows(1, 2, 3), rows(4, 5, 6)))
    assert [numbers(part.get()) for part in future.chunk(chunks=2)] == [[1, 2, 3], [4, 5, 6]]
    assert [numbers(part.get()) for part in future.chunk(3)[1].chunk(2)] == [[3], [4]]
    assert future.dispatch_fn is None
    with pytest.raises(AssertionError, match="equal parts"):
        future.chunk(4)[0].get()


def test_a_future_is_small_and_can_be_pickled():
    future = DataProtoFuture.concat([None]).chunk(2)[1].then(functools.partial(DataProto.select, batch_keys=["n"]))
    stream = pickle.dumps(future)
    assert len(stream) < 1000
    assert numbers_of_tensor(pickle.loads(stream).resolve([rows(1, 2)])) == [2]


def numbers_of_tensor(data):
    return data.batch["n"].tolist()


def test_a_future_can_be_awaited():
    async def wait():
        return await DataProtoFuture.concat(put(rows(1), rows(2)))

    assert numbers(asyncio.run(wait())) == [1, 2]


@pytest.mark.long
def test_the_error_names_late_results(gate):
    future = DataProtoFuture.concat([ray.put(rows(1)), gate.rows.remote()])
    with pytest.raises(DeadlineError, match=r"within 0\.2 s: 1 of 2 are late: result 1"):
        future.get(timeout_s=0.2)
    ray.get(gate.open.remote())
    assert numbers(future.get(timeout_s=30)) == [1, 2]


def test_an_error_has_its_original_type_and_traceback(gate):
    with pytest.raises(KeyError) as caught:
        DataProtoFuture.concat([ray.put(rows(1)), gate.fail.remote()]).get()
    assert 'raise KeyError("here")' in str(caught.value)


def test_a_batch_from_ray_shares_memory_until_a_write_to_it():
    for num_rows in (3, 300_000):  # Ray sends small batches inline, and large ones in shared memory
        ref = ray.put(DataProto.from_dict({"n": torch.zeros(num_rows)}, {"a": np.zeros(num_rows)}))
        first, second = ray.get(ref), ray.get(ref)
        assert not first.non_tensor_batch["a"].flags.writeable
        if num_rows > 3:
            assert first.columns()["n"].data_ptr() == second.columns()["n"].data_ptr()
        first.batch["n"] += 1
        assert second.batch["n"].sum() == ray.get(ref).batch["n"].sum() == 0


@ray.remote(max_concurrency=2, num_cpus=0.1)
class Gate:
    def __init__(self):
        self.opened = threading.Event()

    def rows(self):
        if not self.opened.wait(60):
            raise TimeoutError("the test did not open the gate within 60 s")
        return rows(2)

    def open(self):
        self.opened.set()

    def fail(self):
        raise KeyError("here")


@pytest.fixture(scope="module")
def gate(cluster):
    """Yield an actor that all tests share, because a new actor imports torch, which takes longer than the tests."""
    gate = Gate.remote()
    yield gate
    ray.kill(gate)
