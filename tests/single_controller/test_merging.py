"""Union and concat of batches: the joined columns, and the errors if values that must be equal differ."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from asyncrl.core.errors import BatchError, UsageError
from asyncrl.single_controller import (
    DataProto,
    DataProtoItem,
    list_of_dict_to_dict_of_list,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
)
from asyncrl.single_controller.columns import deep_equal, facts_equal
from asyncrl.single_controller.dispatch import merge


def objects(*values):
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def holding_itself():
    array = objects(None)
    array[0] = array
    return array


SAME = [
    (np.arange(24).reshape(2, 3, 4), np.arange(24).reshape(2, 3, 4)),
    (np.array([1.0, np.nan]), np.array([1.0, np.nan])),
    (np.array(["2020", "NaT"], dtype="M8[D]"), np.array(["2020", "NaT"], dtype="M8[D]")),
    (np.array([complex(0, np.nan)]), np.array([complex(0, np.nan)])),
    (np.zeros((0, 3)), np.zeros((0, 3))),
    (objects(1, "hello", np.array([2, 3])), objects(1, "hello", np.array([2, 3]))),
    (objects(float("nan"), "nan"), objects(float("nan"), "nan")),
    (objects({"k": [np.array([np.nan])]}, None), objects({"k": [np.array([np.nan])]}, None)),
    (objects(torch.tensor([1.0, torch.nan])), objects(torch.tensor([1.0, torch.nan]))),
    (np.array([[objects(1), "x"]], dtype=object), np.array([[objects(1), "x"]], dtype=object)),
    (holding_itself(), holding_itself()),
    (np.array([(1, 2.0)], dtype="i4,f8"), np.array([(1, 2.0)], dtype="i4,f8")),
]
DIFFERENT = [
    (np.arange(3), np.arange(3) + 1),
    (np.arange(3), np.arange(4)),
    (np.arange(3), np.arange(3.0)),
    (np.array([1.0, np.nan]), np.array([np.nan, 1.0])),
    (np.zeros((0, 3)), np.zeros((0, 4))),
    (objects(1, "a"), objects(1, "b")),
    (objects(1), objects(1.0)),
    (objects(1), objects(True)),
    (objects([1]), objects((1,))),
    (objects(float("nan")), objects("nan")),
    (objects(np.array([1, 2])), objects(np.array([1, 3]))),
    (objects({"k": 1}), objects({"k": 1, "j": 2})),
    (holding_itself(), objects(None)),
    (np.array([(1, 2.0)], dtype="i4,f8"), np.array([(1, 2.5)], dtype="i4,f8")),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_union_accepts_equal_arrays(first, second):
    united = union_numpy_dict({"a": first}, {"a": second, "b": np.zeros(1)})
    assert list(united) == ["a", "b"]
    assert united["a"] is second


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_union_refuses_different_arrays_in_any_order(first, second):
    for one, other in ((first, second), (second, first)):
        with pytest.raises(AssertionError, match=r"column `a` differs"):
            union_numpy_dict({"a": one}, {"b": np.zeros(1), "a": other})


def test_a_refused_union_adds_nothing():
    array_dict, facts = {"a": np.zeros(1)}, {"a": 1}
    tensors = TensorDict({"a": torch.zeros(1)}, [1])
    for union, first, second in (
        (union_numpy_dict, array_dict, {"b": np.ones(1), "a": np.ones(1)}),
        (union_two_dict, facts, {"b": 2, "a": 2}),
        (union_tensor_dict, tensors, TensorDict({"b": torch.ones(1), "a": torch.ones(1)}, [1])),
    ):
        with pytest.raises(AssertionError):
            union(first, second)
        assert list(first.keys()) == ["a"]
    data = DataProto(tensors, array_dict, {"m": 1})
    with pytest.raises(BatchError, match="the meta information 'm' differs"):
        data.union(DataProto.from_dict({"t": torch.ones(1)}, {"s": ["x"]}, {"m": 2}))
    assert list(data.batch.keys()) == list(data.non_tensor_batch) == ["a"]


def test_union_changes_the_first_batch_in_place():
    array_dict, facts, tensors = {"a": np.zeros(1)}, {"a": 1}, TensorDict({"a": torch.zeros(1)}, [1])
    assert union_numpy_dict(array_dict, {"b": np.ones(1)}) is array_dict
    assert union_two_dict(facts, {"b": 2}) is facts
    assert union_tensor_dict(tensors, TensorDict({"b": torch.ones(1)}, [1])) is tensors
    assert list(array_dict) == list(facts) == list(tensors.keys()) == ["a", "b"]
    data = DataProto(tensors)
    data.union(DataProto.from_dict({"c": torch.ones(1)}))
    assert list(tensors.keys()) == ["a", "b", "c"]


def test_tensors_of_another_dtype_shape_or_batch_size_are_refused():
    tensors = TensorDict({"a": torch.zeros(2, 1)}, [2])
    for other in (torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2), torch.ones(2, 1)):
        with pytest.raises(AssertionError, match="`a`"):
            union_tensor_dict(tensors, TensorDict({"a": other}, [2]))
    with pytest.raises(AssertionError, match="identical batch size"):
        union_tensor_dict(tensors, TensorDict({"b": torch.zeros(3)}, [3]))


def test_meta_info_is_also_compared_with_the_operator_of_its_values():
    assert union_two_dict({"a": 1, "b": OrderedDict(k=1)}, {"a": 1.0, "b": {"k": 1}})["a"] == 1.0
    assert union_two_dict({"a": np.arange(2)}, {"a": np.arange(2)}).keys() == {"a"}
    for one, other in ((np.arange(2), np.arange(3)), (np.arange(2), [0, 1]), ([1], (1,)), (float("nan"), 1.0)):
        assert not facts_equal(one, other)
        with pytest.raises(AssertionError, match=r"meta information 'a' differs"):
            union_two_dict({"a": one}, {"a": other})


def test_batches_are_compared_by_their_entries():
    def columns(number=1.0, name="x"):
        rows = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        words = NonTensorStack.from_list([NonTensorData(name), NonTensorData("b")])
        return TensorDict({"nan": torch.tensor([number, torch.nan]), "rows": rows, name: words}, [2])

    def batch(number=1.0, kind=DataProto):
        return kind(columns(number), {"s": np.array([None, "b"])}, {"inner": columns()})

    for make in (columns, batch):
        assert deep_equal([make()], [make()])
        assert not facts_equal(make(), make(2.0))
    assert not facts_equal(columns(), columns(name="y"))
    assert not facts_equal(columns(), columns()[:1])
    assert not facts_equal(batch(), batch(kind=DataProtoItem))
    assert facts_equal(DataProto, DataProto)
    assert not facts_equal(DataProto, DataProtoItem)
    merged = DataProto.concat(parts({"batch": batch()}, {"batch": batch()})).meta_info
    assert deep_equal(merged, {"batch": batch()})
    with pytest.raises(BatchError, match=r"'batch' differs"):
        parts({"batch": columns()})[0].union(parts({"batch": columns(name="y")})[0])


def test_a_batch_cannot_be_joined_with_another_kind_of_result():
    data, columns = DataProto.from_dict({"a": torch.zeros(1)}), TensorDict({"a": torch.zeros(1)}, [1])
    for results in ([data, None], [None, data], [columns, None], [data, columns], [columns, data]):
        kinds = ", ".join(type(result).__name__ for result in results)
        with pytest.raises(UsageError, match=f"got {kinds}; return a batch on every rank"):
            merge(results)


def test_nested_tensors_are_compared_by_their_rows():
    def nested(*sizes, layout=torch.jagged):
        return torch.nested.nested_tensor([torch.ones(size) for size in sizes], layout=layout)

    assert deep_equal(nested(1, 2), nested(1, 2))
    assert deep_equal(nested(1, 2, layout=torch.strided), nested(1, 2, layout=torch.strided))
    for other in (nested(2, 1), nested(1, 2, 3), torch.ones(2, 2)):
        assert not deep_equal(nested(1, 2), other)
        assert not deep_equal(other, nested(1, 2))


def test_records_become_columns_with_the_keys_of_the_first_record():
    assert list_of_dict_to_dict_of_list([]) == {}
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"b": 3, "a": 4}]) == {"a": [1, 4], "b": [2, 3]}
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3}]) == {"a": [1, 3], "b": [2]}
    with pytest.raises(AssertionError, match="'b'"):
        list_of_dict_to_dict_of_list([{"a": 1}, {"a": 2, "b": 3}])


def parts(*meta_infos):
    return [DataProto.from_dict({"a": torch.tensor([n])}, meta_info=facts) for n, facts in enumerate(meta_infos)]


@pytest.mark.parametrize(
    ("meta_infos", "expected"),
    [
        ([{"metrics": [{"loss": 1}], "f": True}, {"metrics": [{"loss": 2}], "f": True}], {"loss": [1, 2]}),
        ([{"metrics": {"loss": 1, "acc": 3}}, {"metrics": {"loss": 2, "acc": 4}}], {"loss": [1, 2], "acc": [3, 4]}),
        ([{"metrics": {"loss": 1}}, {"metrics": [{"loss": 2}, {"loss": 3}]}], {"loss": [1, 2, 3]}),
        ([{}, {"metrics": {"loss": 2}}], {"loss": [2]}),
        ([{"metrics": [{"loss": 1}]}, {}], {"loss": [1]}),
        ([{"metrics": None}, {"metrics": {"loss": 2}}], {"loss": [2]}),
        ([{"metrics": {"loss": 1}}, {"metrics": {"loss": 2, "acc": 4}}], {"loss": [1, 2], "acc": [4]}),
        ([{"metrics": {"loss": [1, 2]}}, {"metrics": {"loss": [3]}}], {"loss": [[1, 2], [3]]}),
        ([{"metrics": {"loss": 1}}], {"loss": [1]}),
        ([{"metrics": {}}, {"metrics": {}}], {}),
    ],
)
def test_concat_joins_the_metrics_of_all_parts_into_lists(meta_infos, expected):
    merged = DataProto.concat(parts(*meta_infos)).meta_info
    assert merged.pop("metrics") == expected
    assert merged == {key: value for key, value in meta_infos[0].items() if key != "metrics"}


def test_concat_of_parts_without_metrics_has_no_metrics():
    assert DataProto.concat(parts({"metrics": []}, {"metrics": None}, {})).meta_info == {}


def test_concat_joins_the_meta_info_of_all_parts_and_refuses_conflicts():
    merged = DataProto.concat(parts({"a": 1, "s": "x"}, {"b": 2, "s": "x"}, {"c": 3, "s": "x"})).meta_info
    assert merged == {"a": 1, "b": 2, "c": 3, "s": "x"}
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'a'"):
        DataProto.concat(parts({"a": 1}, {}, {"a": 2}))
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'a'"):
        DataProto.concat(parts({"a": np.arange(2)}, {"a": np.arange(3)}))


def test_concat_does_not_change_its_parts():
    first, second = parts({"metrics": {"loss": 1}, "a": 1}, {"metrics": {"loss": 2}})
    DataProto.concat([first, second])
    assert first.meta_info == {"metrics": {"loss": 1}, "a": 1}
    assert second.meta_info == {"metrics": {"loss": 2}}


def test_concat_of_different_columns_is_refused():
    first = DataProto.from_dict({"a": torch.zeros(1)}, {"s": ["x"]})
    for second, part in (
        (DataProto.from_dict({"b": torch.zeros(1)}, {"s": ["x"]}), "batch"),
        (DataProto.from_dict({"a": torch.zeros(1), "b": torch.zeros(1)}, {"s": ["x"]}), "batch"),
        (DataProto.from_dict({"a": torch.zeros(1)}), "non_tensor_batch"),
        (DataProto.from_dict(non_tensors={"s": ["x"]}), "batch"),
    ):
        for pair in ([first, second], [second, first]):
            with pytest.raises(AssertionError, match=f"same keys in {part}"):
                DataProto.concat(pair)


def test_concat_joins_lists_even_if_all_have_the_same_length_in_one_part():
    def lists(*values):
        return DataProto.from_dict(non_tensors={"s": list(values)})

    for rows in ([[1, 2], [3, 4], [5]], [[1], [2, 3], [4, 5]], [[1, 2], [3, [4]], [5, 6, 7]]):
        for cut in (0, 1, 2):
            joined = DataProto.concat([lists(*rows[:cut]), lists(*rows[cut:])])
            assert joined.non_tensor_batch["s"].tolist() == rows
    words = DataProto.concat([lists([[1], [2]]), lists("x", None)]).non_tensor_batch["s"]
    assert words.tolist() == [[[1], [2]], "x", None]


def test_the_error_names_a_column_with_different_shapes():
    for first, second in ((torch.zeros(1, 2), torch.zeros(1, 3)), (np.zeros((1, 2)), np.zeros((1, 3)))):
        with pytest.raises(BatchError, match=r"column `a` .*cannot be joined"):
            DataProto.concat([DataProto.from_single_dict({"a": first}), DataProto.from_single_dict({"a": second})])


def test_results_of_a_subclass_have_the_type_of_the_subclass():
    class Rollouts(DataProto):
        pass

    data = Rollouts.from_single_dict({"a": torch.zeros(2)})
    results = [data[:1], data.select(), data.repeat(), data.chunk(2)[0], data.pop(["a"]), Rollouts.concat([data])]
    assert {type(result) for result in results} == {Rollouts}
