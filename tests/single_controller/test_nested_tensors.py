"""Nested tensors as columns: jagged in any dimension, with gaps, and strided."""

import numpy as np
import pytest
import torch

from asyncrl.core.errors import BatchError
from asyncrl.single_controller import BatchData, DataProto, DataProtoFuture
from asyncrl.single_controller.columns import cat_rows, rows_of, take_rows


def jagged():
    return torch.nested.nested_tensor([torch.arange(n).float() for n in (1, 3, 0, 2)], layout=torch.jagged)


def jagged_matrices():
    return torch.nested.nested_tensor([torch.ones(n, 2) * n for n in (1, 3, 0, 2)], layout=torch.jagged)


def ragged_in_the_second_dimension():
    values = torch.arange(24).view(4, 6)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 4, 4, 6]), jagged_dim=2)


def with_holes():
    return torch.nested.nested_tensor_from_jagged(
        torch.arange(8.0), torch.tensor([0, 2, 5, 6, 8]), torch.tensor([1, 3, 0, 2])
    )


def strided():
    return torch.nested.nested_tensor([torch.ones(n, n + 1) for n in (1, 3, 0, 2)], layout=torch.strided)


KINDS = [jagged, jagged_matrices, ragged_in_the_second_dimension, with_holes, strided]


def rows(nested):
    return [row.tolist() for row in rows_of(nested)]


@pytest.mark.parametrize("make", KINDS)
def test_rows_of_nested_tensors_are_selected_joined_and_repeated(make):
    data, expected = DataProto.from_dict({"x": make(), "n": torch.arange(4)}), [row.tolist() for row in make().unbind()]
    assert rows(data.batch["x"]) == expected
    assert data.batch["x"].layout == make().layout
    for result, order in (
        (data[1:3], [1, 2]),
        (data[[3, -4]], [3, 0]),
        (data[torch.tensor([True, False, True, False])], [0, 2]),
        (data.repeat(2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (data.repeat(2, interleave=False), [0, 1, 2, 3] * 2),
        (data.sample_level_repeat([0, 2, 0, 1]), [1, 1, 3]),
        (data.unfold_column_chunks(2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (DataProto.concat([data[2:], data[:2]]), [2, 3, 0, 1]),
        (DataProto.concat(data.chunk(4)), [0, 1, 2, 3]),
        (DataProto.from_tensordict(data.to_tensordict()), [0, 1, 2, 3]),
    ):
        assert result.batch["n"].tolist() == order
        assert rows(result.batch["x"]) == [expected[row] for row in order]
        assert result.batch["x"].layout == make().layout
    assert data[1].batch["x"].tolist() == expected[1]


@pytest.mark.parametrize("make", KINDS[:4])
def test_a_batch_without_rows_can_be_joined_with_other_batches(make):
    data = DataProto.from_dict({"x": make()})
    empty = data[:0]
    assert len(empty) == 0
    assert rows(DataProto.concat([empty, data, empty]).batch["x"]) == rows(make())


def test_columns_to_unfold_must_not_be_ragged():
    with pytest.raises(BatchError, match=r"'x' has no second dimension"):
        DataProto.from_dict({"x": jagged_matrices()}).unfold_column_chunks(2, ["x"])
    with pytest.raises(BatchError, match="nested and dense"):
        cat_rows([jagged(), torch.zeros(2, 2)])


def test_data_info_describes_nested_tensors():
    data = DataProto.from_dict({"x": jagged(), "y": strided()})
    assert data.get_data_info().splitlines()[1:3] == [
        "  x: (4, jagged) (torch.float32) cpu",
        "  y: (4, strided) (torch.float32) cpu",
    ]


def test_dispatch_splits_and_joins_tensordicts_with_nested_and_other_entries():
    whole = DataProto.from_dict(
        {"x": jagged(), "n": torch.arange(4)}, {"s": list("abcd")}, {"temperature": 0.5}
    ).to_tensordict()
    assert BatchData(whole).is_chunkable()
    chunks = BatchData(whole).chunk(chunks=2)
    assert [rows(part["x"]) for part in chunks] == [rows(jagged())[:2], rows(jagged())[2:]]
    assert [part["s"] for part in chunks] == [["a", "b"], ["c", "d"]]
    assert BatchData(chunks).is_concatable()
    joined = DataProto.from_tensordict(BatchData(chunks).concat())
    assert rows(joined.batch["x"]) == rows(jagged())
    assert joined.non_tensor_batch["s"].tolist() == list("abcd")
    with pytest.raises(BatchError, match="3 equal parts"):
        BatchData(whole).chunk(3)
    with pytest.raises(BatchError, match="same keys"):
        BatchData([chunks[0], chunks[1].exclude("x")]).concat()


def test_dispatch_splits_only_batches_and_futures():
    data = DataProto.from_dict({"n": torch.arange(4)})
    assert [part.batch["n"].tolist() for part in BatchData(data).chunk(2)] == [[0, 1], [2, 3]]
    assert len(BatchData([data, data]).concat()) == 8
    future = DataProtoFuture(collect_fn=DataProto.concat, futures=[None])
    assert [type(part) for part in BatchData(future).chunk(3)] == [DataProtoFuture] * 3
    assert not BatchData(future).is_concatable()
    assert not BatchData([]).is_concatable()
    assert not BatchData([1]).is_concatable()
    assert not BatchData(np.zeros(2)).is_chunkable()
    with pytest.raises(TypeError, match="ndarray"):
        BatchData(np.zeros(2)).chunk(2)
    with pytest.raises(TypeError, match="int"):
        BatchData([1]).concat()
    with pytest.raises(ValueError, match="empty list"):
        BatchData([]).concat()


def test_a_slice_of_a_strided_nested_tensor_has_the_same_layout():
    assert take_rows(strided(), slice(1, 3)).layout is torch.strided
