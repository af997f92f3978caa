"""Golden results of every method of DataProto on small batches."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncrl.core.errors import BatchError
from asyncrl.single_controller import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)


def batch_of(num_rows=4, **meta_info):
    return DataProto.from_dict(
        tensors={"a": torch.arange(num_rows) * 10},
        non_tensors={"s": [f"row {i}" for i in range(num_rows)], "n": np.arange(num_rows)},
        meta_info=meta_info,
    )


def rows_of(data):
    """Return each row as a triple (tensor, string, number). Tests check that the three values belong together."""
    return list(
        zip(data.batch["a"].tolist(), data.non_tensor_batch["s"], data.non_tensor_batch["n"].tolist(), strict=True)
    )


def numbers(data):
    for a, s, n in rows_of(data):
        assert a == 10 * n
        assert s == f"row {n}"
    return data.non_tensor_batch["n"].tolist()


def test_the_constructor_accepts_a_tensordict():
    data = DataProto(batch=TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3]), meta_info={"t": 1})
    assert len(data) == 3
    assert data.non_tensor_batch == {}
    assert data.meta_info == {"t": 1}


def test_columns_of_different_length_are_refused():
    with pytest.raises(BatchError, match="first dimension"):
        DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(2)})
    with pytest.raises(BatchError, match="3 rows"):
        DataProto.from_dict({"a": torch.zeros(3)}, {"s": ["x"]})
    with pytest.raises(BatchError, match="numpy"):
        DataProto(non_tensor_batch={"s": ["x"]})
    with pytest.raises(BatchError, match=r"'s'\] must have \d+ rows, got shape \(\)"):
        DataProto(non_tensor_batch={"s": np.array({"a": 1}, dtype=object)})
    with pytest.raises(BatchError, match="one batch dimension"):
        DataProto(batch=TensorDict({"a": torch.zeros(2, 2)}, batch_size=[2, 2]))


def test_from_single_dict_separates_tensors_and_arrays():
    data = DataProto.from_single_dict(
        {"a": torch.zeros(2), "s": np.array(["x", "y"], dtype=object)}, meta_info={"m": 1}
    )
    assert list(data.batch.keys()) == ["a"]
    assert data.non_tensor_batch["s"].tolist() == ["x", "y"]
    assert data.meta_info == {"m": 1}
    with pytest.raises(ValueError, match="list"):
        DataProto.from_single_dict({"a": [1, 2]})


def test_lists_become_the_same_object_arrays_as_in_numpy():
    matrices = [np.zeros((2, 3)), np.zeros((2, 4))]
    data = DataProto.from_dict(
        non_tensors={"even": [[1, 2], [3, 4]], "ragged": [[1], [2, 3]], "dicts": [{"a": 1}, {}], "matrices": matrices}
    )
    assert {array.dtype for array in data.non_tensor_batch.values()} == {np.dtype(object)}
    assert data.non_tensor_batch["even"].shape == (2, 2)
    assert data.non_tensor_batch["ragged"].tolist() == [[1], [2, 3]]
    assert data.non_tensor_batch["dicts"].tolist() == [{"a": 1}, {}]
    assert data.non_tensor_batch["matrices"].shape == (2,)
    with pytest.raises(BatchError, match="dict"):
        DataProto.from_dict(non_tensors=[1, 2])


def test_an_int_index_returns_an_item():
    item = batch_of(t=5)[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["a"].item() == 30
    assert item.non_tensor_batch == {"s": "row 3", "n": 3}
    assert item.meta_info == {"t": 5}
    with pytest.raises(IndexError):
        batch_of()[4]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (slice(-1, None), [3]),
        ([3, 0, 3], [3, 0, 3]),
        ([], []),
        ([True, False, False, True], [0, 3]),
        (np.array([2, 1]), [2, 1]),
        (np.array([False, True, True, False]), [1, 2]),
        (torch.tensor([1, -1]), [1, 3]),
        (torch.tensor([False, False, False, True]), [3]),
    ],
)
def test_every_kind_of_index_selects_the_same_rows_of_tensors_and_arrays(index, expected):
    assert numbers(batch_of()[index]) == expected


def test_a_slice_shares_memory_with_the_batch_but_a_selection_is_a_copy():
    data = batch_of()
    data.slice(1, 2).batch["a"][0] = 99
    data.select_idxs([0]).batch["a"][0] = 77
    assert data.batch["a"].tolist() == [0, 99, 20, 30]


def test_select_returns_only_the_named_columns():
    selected = batch_of(t=1, u=2).select(batch_keys=["a"], non_tensor_batch_keys=["s"], meta_info_keys=["u"])
    assert list(selected.batch.keys()) == ["a"]
    assert list(selected.non_tensor_batch) == ["s"]
    assert selected.meta_info == {"u": 2}


def test_select_with_deepcopy_does_not_share_values():
    data = DataProto.from_dict(non_tensors={"l": [[1], [2, 3]]}, meta_info={"m": [1]})
    selected = data.select(deepcopy=True)
    selected.non_tensor_batch["l"][0].append(9)
    selected.meta_info["m"].append(9)
    assert data.non_tensor_batch["l"][0] == [1]
    assert data.meta_info["m"] == [1]


def test_pop_moves_columns_out():
    data = batch_of(t=1, u=2)
    popped = data.pop(batch_keys=["a"], non_tensor_batch_keys=["s"], meta_info_keys=["t"])
    assert popped.batch["a"].tolist() == [0, 10, 20, 30]
    assert list(popped.non_tensor_batch) == ["s"]
    assert popped.meta_info == {"t": 1}
    assert list(data.batch.keys()) == []
    assert list(data.non_tensor_batch) == ["n"]
    assert data.meta_info == {"u": 2}


def test_pop_of_a_missing_column_removes_nothing():
    data = batch_of()
    with pytest.raises(BatchError, match="missing"):
        data.pop(batch_keys=["a"], non_tensor_batch_keys=["missing"])
    assert data.batch["a"].shape == (4,)


def test_rename_changes_the_names_of_tensors():
    data = DataProto.from_dict({"a": torch.zeros(2), "b": torch.ones(2)})
    assert data.rename("a", "x") is data
    data.rename(["x", "b"], ["b", "x"])
    assert data.batch["x"].tolist() == [1, 1]
    data.rename(["x", "b"], ["p", "q"])
    assert sorted(data.batch.keys()) == ["p", "q"]
    with pytest.raises(BatchError, match="missing"):
        data.rename("missing", "x")
    with pytest.raises(ValueError, match="one new name per old name"):
        data.rename(["p", "q"], ["only one"])
    with pytest.raises(TypeError):
        data.rename(1, 2)


def test_union_adds_columns_and_meta_info():
    data = batch_of(t=1)
    other = DataProto.from_dict({"b": torch.ones(4), "a": torch.arange(4) * 10}, {"z": [None] * 4}, {"u": 2, "t": 1})
    assert data.union(other) is data
    assert sorted(data.batch.keys()) == ["a", "b"]
    assert sorted(data.non_tensor_batch) == ["n", "s", "z"]
    assert data.meta_info == {"t": 1, "u": 2}


@pytest.mark.parametrize(
    "other",
    [
        DataProto.from_dict({"a": torch.zeros(4, dtype=torch.int64)}),
        DataProto.from_dict({"b": torch.zeros(3)}),
        DataProto.from_dict({"b": torch.zeros(4)}, {"n": np.ones(4, dtype=np.int64)}),
        DataProto.from_dict({"b": torch.zeros(4)}, meta_info={"t": 2}),
    ],
)
def test_union_of_different_values_raises_an_error(other):
    with pytest.raises(BatchError):
        batch_of(t=1).union(other)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_sample_level_repeat_takes_a_count_for_each_row(kind):
    assert numbers(batch_of(3).sample_level_repeat(kind([2, 0, 1]))) == [0, 0, 2]


def test_unfold_column_chunks_splits_named_columns_and_repeats_other_columns():
    data = DataProto.from_dict(
        {"a": torch.arange(8).reshape(2, 4), "b": torch.tensor([5, 6])},
        {"s": ["x", "y"], "m": np.arange(8).reshape(2, 4)},
    )
    unfolded = data.unfold_column_chunks(2, split_keys=["a", "m"])
    assert unfolded.batch["a"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.non_tensor_batch["m"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.batch["b"].tolist() == [5, 5, 6, 6]
    assert unfolded.non_tensor_batch["s"].tolist() == ["x", "x", "y", "y"]
    with pytest.raises(BatchError, match="must be a multiple of n_split"):
        data.unfold_column_chunks(3, split_keys=["a"])


def test_chunk_makes_parts_of_different_length_if_padding_is_enabled():
    data = batch_of(10)
    data.meta_info[DataProtoConfig.auto_padding_key] = True
    assert [len(part) for part in data.chunk(4)] == [3, 3, 3, 1]
    assert [len(part) for part in data.slice(0, 5).chunk(4)] == [2, 2, 1, 0]
    data.batch = None
    assert [len(part) for part in data.chunk(4)] == [3, 3, 2, 2]


def test_make_iterator_yields_every_row_once_per_epoch_in_an_order_of_the_seed():
    def epoch_orders(seed):
        parts = list(batch_of(6, t=1).make_iterator(2, epochs=2, seed=seed, dataloader_kwargs={"shuffle": True}))
        assert [len(part) for part in parts] == [2] * 6
        assert parts[0].meta_info == {"t": 1}
        order = [number for part in parts for number in numbers(part)]
        assert sorted(order[:6]) == sorted(order[6:]) == list(range(6))
        return order

    assert epoch_orders(1) == epoch_orders(1)
    assert epoch_orders(1) != epoch_orders(2)
    with pytest.raises(BatchError, match="divide"):
        batch_of(5).make_iterator(2, epochs=1)


def test_make_iterator_shuffles_like_a_dataloader_over_the_rows():
    generator = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(range(6), batch_size=2, shuffle=True, generator=generator)
    expected = [number for _ in range(2) for part in loader for number in part.tolist()]
    parts = batch_of(6).make_iterator(2, epochs=2, seed=3, dataloader_kwargs={"shuffle": True})
    assert [number for part in parts for number in numbers(part)] == expected


def test_padding_repeats_the_first_or_the_last_row():
    data = batch_of(2, metrics={"m": 1})
    data.padding(2)
    assert numbers(data) == [0, 1, 1, 1]
    data.padding(1, "first")
    assert numbers(data) == [0, 1, 1, 1, 0]
    assert data.meta_info == {"metrics": {"m": 1}}


def test_a_negative_number_of_rows_is_refused():
    with pytest.raises(BatchError, match="padding_size must be >= 0, got -1"):
        batch_of(2).padding(-1)
    for size in (0, -1):
        with pytest.raises(BatchError, match=f"split_size must be >= 1, got {size}"):
            batch_of(2).split(size)


def test_pad_to_divisor_repeats_rows_from_the_beginning():
    padded, pad_size = pad_dataproto_to_divisor(batch_of(2), 5)
    assert (numbers(padded), pad_size) == ([0, 1, 0, 1, 0], 3)
    assert numbers(unpad_dataproto(padded, pad_size)) == [0, 1]
    assert pad_dataproto_to_divisor(padded, 5) == (padded, 0)


def test_padding_can_be_enabled_for_one_batch_or_for_all_batches(monkeypatch):
    assert not batch_of().is_padding_enabled()
    assert DataProto.from_dict({"a": torch.zeros(1)}, auto_padding=True).is_padding_enabled()
    assert DataProto.from_single_dict({"a": torch.zeros(1)}, auto_padding=True).is_padding_enabled()
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert batch_of().is_padding_enabled()


def test_a_batch_is_restored_from_its_tensordict():
    tensor_dict = batch_of(3, t=0.5).to_tensordict()
    assert list(tensor_dict["s"]) == ["row 0", "row 1", "row 2"]
    assert tensor_dict["t"] == 0.5
    data = DataProto.from_tensordict(tensor_dict)
    assert numbers(data) == [0, 1, 2]
    assert data.meta_info == {"t": 0.5}
    with pytest.raises(BatchError, match="'a'"):
        batch_of(2, a=1).to_tensordict()


def test_data_info_describes_each_entry_in_words():
    data = batch_of(2, names=["x"], table={"k": (1, "s")}, nothing={})
    assert data.get_data_info() == (
        "batch\n  a: (2,) (torch.int64) cpu\n"
        "non_tensor_batch\n  s: ndarray(2,) (object)\n  n: ndarray(2,) (int64)\n"
        "meta_info\n  names: list[str]\n  table: dict[str: tuple(int, str)]\n  nothing: dict"
    )


def test_to_moves_tensors_in_place():
    data = batch_of()
    assert data.to("meta") is data
    assert data.batch["a"].device.type == "meta"


def test_chunk_and_concat_do_not_change_the_device():
    data = batch_of().to("meta")
    parts = data.chunk(2)
    assert DataProto.concat(parts).batch.device == parts[0].batch.device == data.batch.device
    assert DataProto.concat([batch_of(), batch_of().to("cpu")]).batch.device is None


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        ([[0, 1]], IndexError, r"one dimension, got shape \(1, 2\)"),
        ([True, False], IndexError, "each of 4 rows, got 2"),
        ([0.0, 1.0], TypeError, "float64"),
        ([0, 4], IndexError, r"rows must be in \[-4, 4\), got 0 to 4"),
        ([-5], IndexError, "got -5 to -5"),
    ],
)
def test_the_error_for_an_invalid_index_describes_the_mistake(index, error, words):
    with pytest.raises(error, match=words):
        batch_of(4).select_idxs(index)


def test_invalid_repeat_counts_are_refused():
    for counts, words in (([1, 2], "each of 4 rows"), ([1, 1, 1, -1], "from -1"), ([1.0] * 4, "float64")):
        with pytest.raises(BatchError, match=words):
            batch_of(4).sample_level_repeat(counts)


def test_union_compares_a_tensordict_inside_a_batch_by_its_values():
    def holding(value):
        return DataProto(TensorDict({"inner": TensorDict({"a": torch.full((2,), value)}, [2])}, [2]))

    assert len(holding(1.0).union(holding(1.0))) == 2
    with pytest.raises(BatchError, match="`inner`"):
        holding(1.0).union(holding(2.0))
