"""Tensors as tuples of dtype, shape and memory."""

import pytest
import torch
from tensordict import TensorDict

from asyncrl.core.errors import BatchError
from asyncrl.single_controller import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from asyncrl.single_controller.columns import deep_equal

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 5)])
def test_a_tensor_comes_back_from_its_parts(dtype, shape):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    name, size, memory = serialize_single_tensor(tensor)
    assert name == str(dtype).removeprefix("torch.")
    assert tuple(size) == shape
    assert memory.nbytes == tensor.nbytes
    back = deserialize_single_tensor((name, size, bytes(memory)))
    assert back.shape == tensor.shape
    assert deep_equal(back.float(), tensor.float())
    back.fill_(0)


def test_a_view_is_sent_in_the_order_of_its_elements():
    tensor = torch.arange(6).reshape(2, 3).T
    assert deserialize_single_tensor(serialize_single_tensor(tensor)).tolist() == tensor.tolist()


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_tensordict_comes_back_from_its_parts(layout, device):
    nested = torch.nested.as_nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
    batch = TensorDict({"dense": torch.randn(2, 3), "nested": nested}, batch_size=[2], device=device)
    batch_size, place, items = serialize_tensordict(batch)
    assert (batch_size, place) == ((2,), device)
    assert items["nested"][0] == str(layout).removeprefix("torch.")
    back = deserialize_tensordict((batch_size, place, items))
    assert (back.batch_size, back.device) == (batch.batch_size, batch.device)
    assert back["nested"].layout == layout
    assert deep_equal(dict(back.items()), dict(batch.items()))


def test_more_than_one_batch_dimension_is_kept():
    batch = TensorDict({"a": torch.randn(2, 3, 4)}, batch_size=[2, 3])
    assert deserialize_tensordict(serialize_tensordict(batch)).batch_size == (2, 3)


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(BatchError, match="'save'"):
        deserialize_single_tensor(("save", (1,), b"1234"))
    with pytest.raises(BatchError, match="3 bytes"):
        deserialize_single_tensor(("float32", (1,), b"123"))
    with pytest.raises(ValueError, match="got 4"):
        deserialize_tensordict(((1,), None, {"a": (1, 2, 3, 4)}))
