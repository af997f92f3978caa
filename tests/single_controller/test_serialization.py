"""`DataProto` between gloo ranks, the frames of a `DataProto` in a file, and tensors as plain tuples."""

import io

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from asyncrl.core.errors import BatchError, WireError
from asyncrl.single_controller import (
    DataProto,
    all_gather_data_proto,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialization,
    serialize_single_tensor,
    serialize_tensordict,
)
from asyncrl.single_controller.columns import deep_equal, rows_of
from asyncrl.single_controller.serialization import broadcast_value
from tests.support.ranks import run_on_ranks

NUM_RANKS = 3


def part_of(rank, *, num_rows=None):
    num_rows = rank if num_rows is None else num_rows
    ids = torch.arange(num_rows) + 10 * rank
    rows = [torch.full((rank + 1,), float(n)) for n in ids] or [torch.zeros(0)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    data = DataProto.from_dict({"id": ids, "half": ids.bfloat16(), "mask": ids > 10})
    data.batch["nested"] = nested if num_rows else DataProto.from_dict({"n": nested})[:0].batch["n"]
    data.non_tensor_batch = {"n": ids.numpy(), "things": np.array([{"n": int(n)} for n in ids], dtype=object)}
    data.meta_info = {"rank": rank}
    return data


def gather():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for case in (rows_of_all_ranks, rows_of_a_subgroup, arrays_alone, different_columns, objects, first_value):
        case(rank)
        dist.barrier()


def rows_of_all_ranks(rank):
    data = part_of(rank)
    assert all_gather_data_proto(data, None) is None
    expected = [10, 20, 21]
    assert data.batch.batch_size == (3,)
    assert data.batch["id"].tolist() == data.batch["half"].tolist() == data.non_tensor_batch["n"].tolist() == expected
    assert data.batch["mask"].tolist() == [False, True, True]
    assert [row.tolist() for row in rows_of(data.batch["nested"])] == [[10.0] * 2, [20.0] * 3, [21.0] * 3]
    assert data.non_tensor_batch["things"].tolist() == [{"n": 10}, {"n": 20}, {"n": 21}]
    assert data.meta_info == {"rank": rank}


def rows_of_a_subgroup(rank):
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    data = part_of(rank, num_rows=1).to("cpu")
    all_gather_data_proto(data, process_group=group)
    assert data.batch["id"].tolist() == [0, 20]
    assert data.batch.device == torch.device("cpu")


def arrays_alone(rank):
    data = DataProto.from_dict(non_tensors={"s": [str(rank)]})
    all_gather_data_proto(data, None)
    assert data.batch is None
    assert data.non_tensor_batch["s"].tolist() == ["0", "1", "2"]


def different_columns(rank):
    with pytest.raises(AssertionError, match="same keys"):
        all_gather_data_proto(DataProto.from_dict({str(rank % 2): torch.zeros(1)}), None)


def objects(rank):
    data = DataProto.from_dict(non_tensors={"s": np.array([{rank}], dtype=object)})
    with pytest.raises(WireError, match="'s'"):
        all_gather_data_proto(data, None)


def first_value(rank):
    value = {"ids": np.arange(3) + rank, "empty": np.zeros((0, 2), dtype=np.float32), "text": "é"}
    received = broadcast_value(value, None)
    assert received["ids"].tolist() == [0, 1, 2]
    assert received["ids"].flags.writeable
    assert received["empty"].shape == (0, 2)
    assert received["text"] == "é"


@pytest.mark.long
def test_after_all_gather_every_rank_has_the_rows_of_all_ranks():
    run_on_ranks(NUM_RANKS, gather)


def written(frames):
    file = io.BytesIO()
    serialization.write_frames(file, frames)
    return file.getvalue()


def test_frames_are_restored_and_begin_at_multiples_of_64():
    frames = [b"header", b"", b"x" * 100, memoryview(b"yy")]
    data = written(frames)
    assert [bytes(frame) for frame in serialization.read_frames(data)] == [bytes(frame) for frame in frames]
    assert data.index(b"header") % 64 == data.index(b"xxx") % 64 == 0


def test_every_truncated_file_raises_wire_error():
    data = written([b"header", b"x" * 70])
    for end in range(len(data)):
        with pytest.raises(WireError):
            serialization.read_frames(data[:end])


def test_a_file_with_a_wrong_length_field_is_refused():
    data = written([b"header"])
    with pytest.raises(WireError, match="truncated"):
        serialization.read_frames(data[:8] + b"\xff\xff\xff\xff" + data[12:])
    with pytest.raises(WireError):
        serialization.read_frames(data + b"more")


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 5)])
def test_a_tensor_is_restored_from_its_parts(dtype, shape):
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
def test_a_tensordict_is_restored_from_its_parts(layout, device):
    nested = torch.nested.as_nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)
    batch = TensorDict({"dense": torch.randn(2, 3), "nested": nested}, batch_size=[2], device=device)
    batch_size, place, items = serialize_tensordict(batch)
    assert (batch_size, place) == ((2,), device)
    assert items["nested"][0] == str(layout).removeprefix("torch.")
    back = deserialize_tensordict((batch_size, place, items))
    assert (back.batch_size, back.device) == (batch.batch_size, batch.device)
    assert back["nested"].layout == layout
    assert deep_equal(dict(back.items()), dict(batch.items()))


def test_several_batch_dimensions_are_restored():
    batch = TensorDict({"a": torch.randn(2, 3, 4)}, batch_size=[2, 3])
    assert deserialize_tensordict(serialize_tensordict(batch)).batch_size == (2, 3)


def test_invalid_parts_of_a_tensor_are_refused():
    with pytest.raises(BatchError, match="'save'"):
        deserialize_single_tensor(("save", (1,), b"1234"))
    with pytest.raises(BatchError, match="3 bytes"):
        deserialize_single_tensor(("float32", (1,), b"123"))
    with pytest.raises(ValueError, match="got 4"):
        deserialize_tensordict(((1,), None, {"a": (1, 2, 3, 4)}))
