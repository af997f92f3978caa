"""Pairs of methods of `DataProto`: the second method undoes the first one."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.single_controller import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from asyncrl.single_controller.columns import deep_equal


@st.composite
def batches(draw, min_rows=0):
    num_rows = draw(st.integers(min_rows, 9))
    width = draw(st.integers(0, 3))
    tensors = {
        "dense": torch.arange(num_rows * width).reshape(num_rows, width).float(),
        "half": torch.arange(num_rows).to(torch.bfloat16),
    }
    arrays = {
        "numbers": np.arange(num_rows) * 3,
        "things": draw(
            st.lists(st.none() | st.text(max_size=3) | st.lists(st.integers()), min_size=num_rows, max_size=num_rows)
        ),
    }
    kind = draw(st.sampled_from(["both", "tensors", "arrays"]))
    return DataProto.from_dict(
        tensors if kind != "arrays" else None,
        arrays if kind != "tensors" else None,
        meta_info={"k": draw(st.integers())},
    )


def parts(data):
    columns = {} if data.batch is None else dict(data.batch.items())
    return columns, data.non_tensor_batch, data.meta_info


def same(left, right):
    return len(left) == len(right) and deep_equal(parts(left), parts(right))


@given(batches(), st.integers(1, 4))
@settings(max_examples=60)
def test_concat_reverses_chunk_and_split(data, size):
    if len(data) % size == 0:
        assert same(DataProto.concat(data.chunk(size)), data)
    if len(data):
        assert same(DataProto.concat(data.split(size)), data)


@given(batches(min_rows=1), st.data())
@settings(max_examples=60)
def test_union_reverses_pop(data, draw):
    def some(keys):
        return draw.draw(st.lists(st.sampled_from(sorted(keys)), unique=True)) if keys else []

    original = data.select(deepcopy=True)
    tensor_keys = [] if data.batch is None else list(data.batch.keys())
    if data.batch is not None:
        original.batch = original.batch.clone()
    popped = data.pop(some(tensor_keys), some(list(data.non_tensor_batch)), some(list(data.meta_info)))
    assert same(data.union(popped), original)


@given(batches(), st.integers(1, 7))
@settings(max_examples=60)
def test_unpad_reverses_pad(data, divisor):
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert same(unpad_dataproto(padded, pad_size), data)


@given(batches(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_reorder_by_the_inverse_order_restores_the_batch(data, random):
    original = data.select(deepcopy=True)
    order = list(range(len(data)))
    random.shuffle(order)
    data.reorder(torch.tensor(order, dtype=torch.int64))
    data.reorder(torch.argsort(torch.tensor(order, dtype=torch.int64)))
    assert same(data, original)
