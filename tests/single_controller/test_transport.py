"""Batches that are pickled or saved to disk: which parts are shared or copied, and which errors are raised."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from asyncrl.core.errors import BatchError, WireError
from asyncrl.single_controller import DataProto, unfold_batch_dim
from tests.single_controller.test_data_proto import batch_of, numbers


def test_a_batch_is_restored_from_disk(tmp_path):
    data = batch_of(3, t=0.5)
    data.save_to_disk(tmp_path / "data.bin")
    loaded = DataProto.load_from_disk(tmp_path / "data.bin")
    loaded.batch["a"] += 0
    assert numbers(loaded) == [0, 1, 2]
    assert loaded.meta_info == {"t": 0.5}
    (tmp_path / "other.bin").write_bytes(pickle.dumps(1))
    with pytest.raises(WireError):
        DataProto.load_from_disk(tmp_path / "other.bin")
    with pytest.raises(WireError, match=r"value\['meta_info'\]\['f'\]"):
        batch_of(1, f=len).save_to_disk(tmp_path / "data.bin")
    assert len(DataProto.load_from_disk(tmp_path / "data.bin")) == 3


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickle_restores_a_batch_with_values_of_any_type(protocol):
    loaded = pickle.loads(pickle.dumps(batch_of(2, f=len), protocol=protocol))
    assert numbers(loaded) == [0, 1]
    assert loaded.meta_info == {"f": len}


def test_pickle_5_copies_a_tensor_only_at_its_first_use():
    data, buffers = batch_of(4), []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    loaded = pickle.loads(stream, buffers=[memoryview(buffer).toreadonly() for buffer in buffers])
    kept = loaded.slice(1, 3)
    assert kept.columns()["a"].data_ptr() == data.batch["a"][1:].data_ptr()
    kept.batch["a"] += 1
    loaded.batch["a"] += 1
    assert data.batch["a"].tolist() == [0, 10, 20, 30]
    assert kept.batch["a"].tolist() == [11, 21]


def test_a_write_to_unfolded_columns_does_not_change_the_memory_of_the_sender():
    data, buffers = DataProto.from_dict({"a": torch.arange(8).reshape(2, 4)}), []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    for change in (lambda batch: batch.unfold_column_chunks(2, ["a"]), unfold_batch_dim):
        change(pickle.loads(stream, buffers=[memoryview(buffer) for buffer in buffers])).batch["a"][:] = -1
        assert data.batch["a"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_deep_and_shallow_copies():
    data = batch_of(2, m=[1])
    deep, shallow = copy.deepcopy(data), copy.copy(data)
    deep.batch["a"][0] = 7
    deep.meta_info["m"].append(2)
    shallow.meta_info["other"] = 1
    assert data.batch["a"].tolist() == [0, 10]
    assert data.meta_info == {"m": [1]}


def test_a_batch_from_a_plain_pickle_is_writable_and_one_in_shared_memory_is_read_only():
    own = pickle.loads(pickle.dumps(batch_of()))
    own.non_tensor_batch["n"][0] = 7
    buffers = []
    stream = pickle.dumps(batch_of(), protocol=5, buffer_callback=buffers.append)
    shared = pickle.loads(stream, buffers=[memoryview(buffer).toreadonly() for buffer in buffers])
    with pytest.raises(ValueError, match="read-only"):
        shared.non_tensor_batch["n"][0] = 7


def test_pickle_restores_deeply_nested_meta_info_of_any_type():
    deep = ["x"]
    for _ in range(200):
        deep = [deep]
    data = batch_of(1, deep=deep, kind=np.ma.masked_array([1, 2], [True, False]), where=torch.device("cpu"))
    loaded = pickle.loads(pickle.dumps(data))
    assert loaded.meta_info["deep"] == deep
    assert loaded.meta_info["kind"].mask.tolist() == [True, False]
    assert loaded.meta_info["where"] == torch.device("cpu")
    deep.append(deep)
    with pytest.raises(WireError, match="the value cannot be encoded"):
        pickle.dumps(data)


def test_a_sparse_column_can_be_pickled_but_not_saved_to_disk(tmp_path):
    data = DataProto.from_dict({"a": torch.eye(2).to_sparse(), "b": torch.ones(2)})
    loaded = pickle.loads(pickle.dumps(data))
    assert loaded.batch["a"].to_dense().tolist() == [[1, 0], [0, 1]]
    assert loaded.batch["b"].tolist() == [1, 1]
    with pytest.raises(WireError, match=r"value\['batch'\]\[1\]\['a'\]: the codec does not support .*sparse"):
        data.save_to_disk(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_a_column_that_is_not_an_array_is_refused_when_the_batch_is_sent(tmp_path):
    data = batch_of(2)
    data.non_tensor_batch["late"] = ["not", "an array"]
    for send in (pickle.dumps, lambda batch: batch.save_to_disk(tmp_path / "data")):
        with pytest.raises(BatchError, match="'late'"):
            send(data)


def test_pickle_and_disk_restore_the_type_of_a_subclass(tmp_path):
    data = Rollouts.from_dict({"a": torch.ones(2)})
    assert type(pickle.loads(pickle.dumps(data))) is Rollouts
    data.save_to_disk(tmp_path / "data")
    assert type(Rollouts.load_from_disk(tmp_path / "data")) is Rollouts
    assert type(DataProto.load_from_disk(tmp_path / "data")) is DataProto


class Rollouts(DataProto):
    pass


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:40], lambda b: b"", lambda b: b + b"x", lambda b: b[1:]]
)
def test_a_damaged_file_raises_wire_error(damage, tmp_path):
    path = tmp_path / "data"
    batch_of().save_to_disk(str(path))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(WireError):
        DataProto.load_from_disk(str(path))
    with pytest.raises(FileNotFoundError):
        DataProto.load_from_disk(tmp_path / "nowhere")


def test_an_unpickled_batch_is_decoded_at_its_first_use():
    stream = pickle.dumps(batch_of(3, t=1))
    asks = [len, repr, lambda data: data.batch, lambda data: data.meta_info, lambda data: data[0], copy.copy]
    for ask in asks:
        data = pickle.loads(stream)
        assert vars(data).keys() == {"_arrived"}
        ask(data)
        assert "_arrived" not in vars(data)
        assert numbers(data) == [0, 1, 2]
    data = pickle.loads(stream)
    data.meta_info = {"t": 2}
    assert numbers(pickle.loads(pickle.dumps(data))) == [0, 1, 2]
    assert data.meta_info == {"t": 2}
    assert not hasattr(data, "nothing of the kind")


def test_several_threads_can_use_an_unpickled_batch_at_the_same_time():
    stream = pickle.dumps(batch_of(3))
    with ThreadPoolExecutor(8) as threads:
        for _ in range(200):
            data = pickle.loads(stream)
            assert list(threads.map(len, [data] * 8)) == [3] * 8
