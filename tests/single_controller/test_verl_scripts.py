"""Parts of driver scripts written for verl, and the results that they must have."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncrl.single_controller import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)


def prompts():
    return DataProto.from_dict(
        tensors={"ids": torch.tensor([[1, 2], [3, 4], [5, 6]])},
        non_tensors={"uid": ["a", "b", "c"]},
        meta_info={"temperature": 1.0},
    )


def test_the_batch_operations_of_a_training_step_work():
    batch = DataProto.from_single_dict(
        {"ids": torch.arange(8).reshape(4, 2), "uid": np.array(list("abcd"), dtype=object), "raw": np.arange(4)}
    )
    prompt_batch = batch.pop(batch_keys=["ids"], non_tensor_batch_keys=["raw"])
    assert list(batch.batch.keys()) == []
    assert len(batch) == 4
    rollouts = prompt_batch.repeat(repeat_times=2, interleave=True)
    answers = DataProto.from_dict({"responses": torch.arange(8)[:, None]}, meta_info={"timing": {"gen": 1.0}})
    batch = batch.repeat(repeat_times=2, interleave=True).union(rollouts).union(answers)
    assert batch.batch["ids"].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert batch.non_tensor_batch["uid"].tolist() == list("aabbccdd")
    batch.batch["scores"] = torch.arange(8.0)
    batch.non_tensor_batch["won"] = np.array([True] * 8)
    batch.reorder(torch.tensor([7, 6, 5, 4, 3, 2, 1, 0]))
    assert batch.batch["scores"].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    kept = batch[batch.batch["scores"] > 5]
    assert kept.non_tensor_batch["uid"].tolist() == ["d", "d"]
    assert kept.meta_info == {"timing": {"gen": 1.0}}
    outputs = [DataProto(meta_info={"metrics": {"loss": float(rank)}}) for rank in range(2)]
    assert DataProto.concat(outputs).meta_info == {"metrics": {"loss": [0.0, 1.0]}}


def test_a_batch_is_padded_for_four_workers_and_unpadded_again():
    padded, pad_size = pad_dataproto_to_divisor(prompts(), 4)
    assert (len(padded), pad_size) == (4, 1)
    assert padded.batch["ids"][-1].tolist() == [1, 2]
    assert [len(chunk) for chunk in padded.chunk(chunks=4)] == [1] * 4
    assert unpad_dataproto(padded, pad_size=pad_size).non_tensor_batch["uid"].tolist() == ["a", "b", "c"]
    assert pad_dataproto_to_divisor(prompts(), size_divisor=7)[1] == 4
    with pytest.raises(AssertionError):
        pad_dataproto_to_divisor([1, 2, 3], 2)


def test_the_padding_flag_has_the_names_of_verl(monkeypatch):
    data = DataProto.from_dict({"a": torch.zeros(3)}, auto_padding=True)
    assert data.meta_info == {"_verl_auto_padding": True}
    assert DataProtoConfig.auto_padding_key == "_verl_auto_padding"
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert prompts().is_padding_enabled()
    with pytest.raises(AssertionError, match="bool"):
        DataProtoConfig.auto_padding = "yes"


def test_groups_are_folded_reordered_and_unfolded():
    folded = fold_batch_dim(prompts().repeat(repeat_times=2, interleave=True), new_batch_size=3)
    assert folded.batch["ids"].shape == (3, 2, 2)
    assert folded.non_tensor_batch["uid"].tolist() == [["a", "a"], ["b", "b"], ["c", "c"]]
    folded.reorder(indices=torch.tensor([1, 2, 0]))
    unfolded = unfold_batch_dim(folded, batch_dims=2)
    assert unfolded.batch["ids"].tolist() == [[3, 4], [3, 4], [5, 6], [5, 6], [1, 2], [1, 2]]
    assert unfolded.non_tensor_batch["uid"].tolist() == list("bbccaa")


def test_columns_of_tensors_and_strings_are_unfolded_into_two_rows():
    data = DataProto.from_dict(
        {"pair": torch.arange(12).reshape(3, 4), "one": torch.arange(3)},
        {"names": [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]], "uid": ["a", "b", "c"]},
    )
    unfolded = data.unfold_column_chunks(2, split_keys=["pair", "names"])
    assert unfolded.batch["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert unfolded.batch["one"].tolist() == [0, 0, 1, 1, 2, 2]
    assert unfolded.non_tensor_batch["names"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"], ["c1"], ["c2"]]
    assert unfolded.non_tensor_batch["uid"].tolist() == list("aabbcc")


def test_a_tensordict_contains_messages_scores_and_meta_info():
    messages = [[{"role": "user", "content": "1"}], [{"role": "user", "content": "2"}] * 2]
    data = DataProto.from_dict(
        {"ids": torch.arange(2)},
        {"messages": messages, "scores": [[], [0.5]], "info": [{"acc": 1.0}, {"acc": 0.0}], "turns": np.arange(2)},
        {"step": 42},
    )
    tensor_dict = data.to_tensordict()
    assert tensor_dict["info"] == [{"acc": 1.0}, {"acc": 0.0}]
    assert tensor_dict["step"] == 42
    assert list(tensor_dict["scores"][1]) == [0.5]
    back = DataProto.from_tensordict(tensor_dict, meta_info={"epoch": 1})
    assert back.non_tensor_batch["messages"].tolist() == messages
    assert back.non_tensor_batch["scores"].tolist() == [[], [0.5]]
    assert back.non_tensor_batch["turns"].tolist() == [0, 1]
    assert back.meta_info == {"epoch": 1, "step": 42}


def test_a_tensordict_without_columns_has_a_number_of_rows():
    data = pickle.loads(pickle.dumps(DataProto(batch=TensorDict({}, batch_size=[10]))))
    assert list(data.batch.keys()) == []
    assert data.batch.batch_size == torch.Size([10])
    selected = prompts().select(batch_keys=[], non_tensor_batch_keys=[])
    assert list(selected.batch.keys()) == []
    assert len(selected) == 3


def test_a_missing_part_of_a_batch_has_no_rows():
    assert len(DataProto(batch=None, non_tensor_batch={"a": np.zeros(3)})) == 3
    assert len(DataProto(batch=None, non_tensor_batch={})) == 0
    assert len(DataProto(batch=None, non_tensor_batch=None, meta_info={"a": 1})) == 0


def test_constructors_refuse_invalid_arguments():
    for num_batch_dims in (0, 2, 3):
        with pytest.raises(AssertionError):
            DataProto.from_dict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}, num_batch_dims=num_batch_dims)
    with pytest.raises(AssertionError):
        DataProto.from_dict({"a": torch.zeros(2)}, {"s": ["x"]})
    with pytest.raises(AssertionError):
        DataProto(TensorDict({"a": torch.zeros(2, 2)}, [2, 2]))
    with pytest.raises(ValueError, match="list"):
        DataProto.from_single_dict({"a": [1]})
    with pytest.raises(TypeError):
        prompts().rename(old_keys=1, new_keys=2)
    with pytest.raises(TypeError):
        prompts()["ids"]
    with pytest.raises(KeyError):
        prompts().select(batch_keys=["nowhere"])


def test_collate_fn_accepts_items_that_a_script_makes():
    items = [DataProtoItem(TensorDict({"a": torch.tensor(n)}, []), {"s": str(n), "l": [n]}) for n in range(3)]
    data = collate_fn(items)
    assert data.batch["a"].tolist() == [0, 1, 2]
    assert data.non_tensor_batch["s"].dtype == object
    assert data.non_tensor_batch["s"].tolist() == ["0", "1", "2"]
    assert data.meta_info == {}


def test_select_and_split_share_the_tensors_of_the_batch():
    data = prompts()
    data.select().batch["new"] = torch.zeros(3)
    assert list(data.batch.keys()) == ["ids", "new"]
    halves = data.split(2)
    halves[0].batch["ids"][0] = 0
    assert data.batch["ids"][0].tolist() == [0, 0]


def test_a_batch_is_a_dataclass_of_its_three_parts():
    assert [field.name for field in dataclasses.fields(DataProto)] == ["batch", "non_tensor_batch", "meta_info"]
    cooler = dataclasses.replace(pickle.loads(pickle.dumps(prompts())), meta_info={"temperature": 0.5})
    assert cooler.batch["ids"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert cooler.meta_info == {"temperature": 0.5}
    assert dataclasses.asdict(prompts())["meta_info"] == {"temperature": 1.0}
    with pytest.raises(AssertionError):
        dataclasses.replace(prompts(), non_tensor_batch={"uid": np.arange(2)})


def test_a_subclass_can_be_a_dataclass_with_an_additional_field():
    @dataclasses.dataclass
    class Stamped(DataProto):
        step: int = 0

    stamped = Stamped(batch=prompts().batch, step=7)
    assert (len(stamped), stamped.step, stamped.meta_info) == (3, 7, {})
    assert stamped[1:].batch["ids"].tolist() == [[3, 4], [5, 6]]
    assert stamped[1:].step == 0  # as in verl, a slice has the default values of a subclass's fields
    with pytest.raises(AssertionError, match="5"):
        Stamped(batch=prompts().batch, non_tensor_batch={"uid": np.arange(5)})


def test_setstate_replaces_the_content_of_a_batch():
    restored = DataProto(meta_info={"old": 1})
    restored.__setstate__(prompts().__getstate__())
    assert restored.batch["ids"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert restored.non_tensor_batch["uid"].tolist() == ["a", "b", "c"]
    assert restored.meta_info == {"temperature": 1.0}


def test_mini_batches_contain_arrays_of_objects():
    data = DataProto.from_dict(
        {"ids": torch.arange(4)},
        {"turns": np.arange(4), "pairs": np.array([[1, 2], [3, 4], [5, 6], [7, 8]]), "text": ["a", "b", "c", "d"]},
        {"temperature": 1.0},
    )
    first, second = data.make_iterator(mini_batch_size=2, epochs=1)
    assert {array.dtype for part in (first, second) for array in part.non_tensor_batch.values()} == {np.dtype(object)}
    assert second.non_tensor_batch["turns"].tolist() == [2, 3]
    assert second.non_tensor_batch["pairs"].tolist() == [[5, 6], [7, 8]]
    assert second.non_tensor_batch["text"].tolist() == ["c", "d"]
    assert second.meta_info is data.meta_info
    assert data.non_tensor_batch["turns"].dtype == np.int64


def test_a_tensor_without_rows_is_refused():
    with pytest.raises(AssertionError, match="'temperature' has no dimension"):
        DataProto.from_dict({"temperature": torch.tensor(1.0)})
