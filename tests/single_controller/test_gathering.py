"""Real process groups of gloo: every rank ends with the rows of all."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from asyncrl.core.errors import WireError
from asyncrl.single_controller import DataProto, all_gather_data_proto
from asyncrl.single_controller.columns import rows_of
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


def test_every_rank_ends_with_the_rows_of_all():
    run_on_ranks(NUM_RANKS, gather)
