"""Each method of DataProto on each kind of batch: with and without tensors, with and without arrays, without rows."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncrl.single_controller import (
    DataProto,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from asyncrl.single_controller.columns import deep_equal, rows_of

FACTS = {"temperature": 0.5}


def tensors(num_rows):
    ids = torch.arange(num_rows)
    return {"id": ids, "matrix": ids[:, None] * torch.tensor([1, 10]), "half": ids.to(torch.bfloat16)}


def arrays(num_rows):
    things = np.empty(num_rows, dtype=object)
    for row in range(num_rows):
        things[row] = {"id": row, "more": [row] * row}
    return {"number": np.arange(num_rows), "text": np.array([str(row) for row in range(num_rows)]), "things": things}


def jagged(num_rows):
    rows = [torch.full((row + 1,), float(row)) for row in range(num_rows)] or [torch.zeros(0)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return DataProto.from_dict({"jagged": nested}, meta_info=dict(FACTS))[:num_rows]


def no_columns(num_rows):
    return DataProto(TensorDict({}, batch_size=[num_rows]), meta_info=dict(FACTS))


SHAPES = {
    "both": lambda n: DataProto.from_dict(tensors(n), arrays(n), dict(FACTS)),
    "tensors": lambda n: DataProto.from_dict(tensors(n), meta_info=dict(FACTS)),
    "arrays": lambda n: DataProto.from_dict(non_tensors=arrays(n), meta_info=dict(FACTS)),
    "arrays with an empty TensorDict": lambda n: DataProto(TensorDict({}, batch_size=[n]), arrays(n), dict(FACTS)),
    "jagged": jagged,
    "rows without columns": no_columns,
}
BATCHES = {f"{name}, {n} rows": (make, n) for name, make in SHAPES.items() for n in (0, 1, 6)}
BATCHES["no entries"] = (lambda _: DataProto(), 0)
BATCHES["only meta_info"] = (lambda _: DataProto(meta_info=dict(FACTS)), 0)

every_batch = pytest.mark.parametrize(("make", "num_rows"), BATCHES.values(), ids=BATCHES)


def tensor_names(data):
    return [] if data.batch is None else list(data.batch.keys())


def ids_of(data):
    """Return the row numbers, which must be the same in all columns. Returns None if the batch has no columns."""
    columns = {} if data.batch is None else dict(data.batch.items())
    found = [column[:, 0] if key == "matrix" else column for key, column in columns.items() if key != "jagged"]
    found = [column.long().tolist() for column in found]
    if "jagged" in columns:
        rows = rows_of(columns["jagged"])
        assert all(len(row) == int(row[0]) + 1 for row in rows)
        found.append([int(row[0]) for row in rows])
    for key, array in data.non_tensor_batch.items():
        found.append([value["id"] for value in array] if key == "things" else [int(value) for value in array])
    assert all(ids == found[0] for ids in found)
    assert data.batch is None or data.batch.batch_size == (len(data),)
    assert not found or len(found[0]) == len(data)
    return found[0] if found else None


def joined(data, parts):
    return DataProto.concat(parts) if parts else DataProto(meta_info=data.meta_info)


def reordered(data, order):
    data.reorder(order)
    return data


def padded_by_rows(data, size, candidate):
    data.padding(size, candidate)
    return data


def shuffled_batches(data):
    return joined(data, list(data.make_iterator(2, 2, seed=1, dataloader_kwargs={"shuffle": True})))


def shuffled(rows):
    generator = torch.Generator().manual_seed(1)
    loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True, generator=generator) if rows else []
    return [row for _ in range(2) for part in loader for row in part.tolist()]


METHODS = {
    "all": (lambda data: data[:], lambda rows: rows),
    "slice": (lambda data: data.slice(1, 4), lambda rows: rows[1:4]),
    "slice from the end": (lambda data: data[-3:-1], lambda rows: rows[-3:-1]),
    "stepped slice": (lambda data: data[::2], lambda rows: rows[::2]),
    "backward slice": (lambda data: data[::-1], lambda rows: rows[::-1]),
    "backward slice with a step": (lambda data: data[4:0:-2], lambda rows: rows[4:0:-2]),
    "empty slice": (lambda data: data[3:3], lambda rows: []),
    "slice beyond the end": (lambda data: data[2:99], lambda rows: rows[2:]),
    "empty list": (lambda data: data[[]], lambda rows: []),
    "list": (lambda data: data[[-1] * min(len(data), 1)], lambda rows: rows[-1:]),
    "array": (lambda data: data[np.arange(len(data))[::-1]], lambda rows: rows[::-1]),
    "array of small ints": (lambda data: data[np.arange(len(data), dtype=np.uint8)], lambda rows: rows),
    "tensor": (lambda data: data[torch.arange(len(data)).flip(0)], lambda rows: rows[::-1]),
    "mask list": (lambda data: data[[n % 2 == 0 for n in range(len(data))]], lambda rows: rows[::2]),
    "mask array": (lambda data: data[np.arange(len(data)) % 2 == 0], lambda rows: rows[::2]),
    "mask tensor": (lambda data: data[torch.arange(len(data)) % 2 == 0], lambda rows: rows[::2]),
    "select": (lambda data: data.select(), lambda rows: rows),
    "select with a deep copy": (lambda data: data.select(deepcopy=True), lambda rows: rows),
    "union with itself": (lambda data: data.union(data), lambda rows: rows),
    "union with its copy": (lambda data: data.union(copy.deepcopy(data)), lambda rows: rows),
    "union with nothing": (lambda data: data.union(DataProto()), lambda rows: rows),
    "union of nothing with the batch": (
        lambda data: DataProto(meta_info=dict(data.meta_info)).union(data),
        lambda rows: rows,
    ),
    "reorder": (lambda data: reordered(data, torch.arange(len(data)).flip(0)), lambda rows: rows[::-1]),
    "repeat": (lambda data: data.repeat(), lambda rows: [n for n in rows for _ in range(2)]),
    "repeat tiled": (lambda data: data.repeat(3, interleave=False), lambda rows: rows * 3),
    "repeat zero times": (lambda data: data.repeat(0), lambda rows: []),
    "repeat zero times tiled": (lambda data: data.repeat(0, interleave=False), lambda rows: []),
    "repeat rows": (
        lambda data: data.sample_level_repeat(list(range(len(data)))),
        lambda rows: [n for n in rows for _ in range(n)],
    ),
    "repeat rows by tensor": (lambda data: data.sample_level_repeat(torch.ones(len(data)).long()), lambda rows: rows),
    "unfold": (lambda data: data.unfold_column_chunks(2), lambda rows: [n for n in rows for _ in range(2)]),
    "chunk": (lambda data: joined(data, data.chunk(1)), lambda rows: rows),
    "split": (lambda data: joined(data, data.split(4)), lambda rows: rows),
    "concat": (lambda data: DataProto.concat([data, data]), lambda rows: rows * 2),
    "iterator": (lambda data: joined(data, list(data.make_iterator(1, 2))), lambda rows: rows * 2),
    "to a device": (lambda data: data.to("cpu"), lambda rows: rows),
    "tensordict": (lambda data: DataProto.from_tensordict(data.to_tensordict()), lambda rows: rows),
    "pickle": (lambda data: pickle.loads(pickle.dumps(data)), lambda rows: rows),
    "pickle with protocol 2": (lambda data: pickle.loads(pickle.dumps(data, protocol=2)), lambda rows: rows),
    "copy": (copy.copy, lambda rows: rows),
    "deep copy": (copy.deepcopy, lambda rows: rows),
    "pad": (lambda data: pad_dataproto_to_divisor(data, 4)[0], lambda rows: (rows * 9)[: -(-len(rows) // 4) * 4]),
    "pad and unpad": (lambda data: unpad_dataproto(*pad_dataproto_to_divisor(data, 4)), lambda rows: rows),
    "no padding": (lambda data: padded_by_rows(data, 0, "first"), lambda rows: rows),
}


@every_batch
@pytest.mark.parametrize(("method", "expected"), METHODS.values(), ids=METHODS)
def test_every_method_returns_the_expected_rows(method, expected, make, num_rows):
    data = make(num_rows)
    result = method(data)
    assert type(result) is DataProto
    rows = expected(list(range(num_rows)))
    assert len(result) == len(rows)
    assert ids_of(result) in (None, rows)
    assert result.meta_info == data.meta_info
    columns = {*tensor_names(data), *data.non_tensor_batch}
    if num_rows or result.batch is not None:
        assert columns == {*tensor_names(result), *result.non_tensor_batch}


@every_batch
def test_chunk_needs_equal_parts_unless_padding_is_enabled(make, num_rows):
    data = make(num_rows)
    if num_rows % 4:
        with pytest.raises(AssertionError, match="equal parts"):
            data.chunk(4)
        data.meta_info["_verl_auto_padding"] = True
    parts = data.chunk(4)
    assert len(parts) == 4
    assert [n for part in parts for n in ids_of(part) or []] in ([], list(range(num_rows)))
    assert sum(map(len, parts)) == num_rows
    assert all(part.meta_info is data.meta_info for part in parts)


@every_batch
def test_parts_of_a_split_have_the_requested_length(make, num_rows):
    assert [len(part) for part in make(num_rows).split(4)] == {0: [], 1: [1], 6: [4, 2]}[num_rows]


@every_batch
def test_items_are_rows_and_collate_fn_joins_them_again(make, num_rows):
    data = make(num_rows)
    items = [data[np.int64(row)] for row in range(num_rows)]
    assert all(type(item) is DataProtoItem and item.meta_info is data.meta_info for item in items)
    assert ids_of(collate_fn(items)) in (None, list(range(num_rows)))
    for row in (num_rows, -num_rows - 1):
        with pytest.raises(IndexError, match=f"of {num_rows} rows"):
            data[row]
    if num_rows:
        assert deep_equal(data[-1].non_tensor_batch, items[-1].non_tensor_batch)
        assert deep_equal(data[torch.tensor(-1)].non_tensor_batch, items[-1].non_tensor_batch)


@every_batch
def test_shuffled_mini_batches_contain_each_row_once_per_epoch(make, num_rows):
    if num_rows % 2:
        with pytest.raises(AssertionError, match="must divide"):
            make(num_rows).make_iterator(2, 1)
        return
    assert ids_of(shuffled_batches(make(num_rows))) in (None, shuffled(list(range(num_rows))))


@every_batch
def test_padding_appends_copies_of_the_first_or_the_last_row(make, num_rows):
    if not num_rows:
        with pytest.raises(AssertionError, match="empty batch"):
            make(num_rows).padding(2)
        return
    rows = list(range(num_rows))
    assert ids_of(padded_by_rows(make(num_rows), 2, "first")) in (None, [*rows, 0, 0])
    assert ids_of(padded_by_rows(make(num_rows), 2, "")) in (None, [*rows, rows[-1], rows[-1]])
    assert len(padded_by_rows(make(num_rows), 2, "")) == num_rows + 2


@every_batch
def test_union_restores_a_batch_after_all_columns_were_popped(make, num_rows):
    data, original = make(num_rows), make(num_rows)
    popped = data.pop(tensor_names(data), list(data.non_tensor_batch), list(data.meta_info))
    assert data.non_tensor_batch == data.meta_info == {}
    assert tensor_names(data) == []
    assert popped.meta_info == original.meta_info
    assert ids_of(popped) in (None, list(range(num_rows)))
    assert ids_of(data.union(popped)) in (None, list(range(num_rows)))
    with pytest.raises(AssertionError, match="nowhere"):
        data.pop(batch_keys=["nowhere"])


@every_batch
def test_a_batch_that_is_loaded_from_disk_is_writable(make, num_rows, tmp_path):
    data = make(num_rows)
    data.save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch")
    assert ids_of(loaded) == ids_of(data)
    assert loaded.meta_info == data.meta_info
    assert all(array.flags.writeable for array in loaded.non_tensor_batch.values())
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


@every_batch
def test_fold_batch_dim_groups_rows(make, num_rows):
    data = make(num_rows)
    if "jagged" in tensor_names(data):
        with pytest.raises(AssertionError, match="nested"):
            fold_batch_dim(data, 1)
        return
    if num_rows == 1:
        with pytest.raises(AssertionError, match="must divide"):
            fold_batch_dim(data, 3)
        return
    folded = fold_batch_dim(data, 3)
    assert len(folded) == (3 if data.batch is not None or data.non_tensor_batch else 0)
    for column in tensor_names(data):
        assert folded.batch[column].shape[:2] == (3, num_rows // 3)
    if ids_of(data) is not None:
        assert ids_of(unfold_batch_dim(folded)) == list(range(num_rows))


@every_batch
def test_data_info_and_repr_describe_a_batch(make, num_rows):
    data = make(num_rows)
    info = data.get_data_info().splitlines()
    headings = [line for line in info if not line.startswith("  ")]
    assert headings == ["batch", "non_tensor_batch", "meta_info"]
    assert len(info) == 3 + len(tensor_names(data)) + len(data.non_tensor_batch) + len(data.meta_info)
    assert repr(data).startswith(f"DataProto of {num_rows} rows")
    assert (data.nbytes > 0) == (num_rows > 0 and ids_of(data) is not None) or "jagged" in tensor_names(data)
    data.check_consistency()


@every_batch
def test_rename_works_only_for_tensors(make, num_rows):
    data = make(num_rows)
    if data.batch is None:
        with pytest.raises(AssertionError, match="no tensors"):
            data.rename("id", "other")
    elif "id" in tensor_names(data):
        assert data.rename("id", "other") is data
        assert data.batch["other"].tolist() == list(range(num_rows))
