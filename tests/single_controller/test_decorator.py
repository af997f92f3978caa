"""Dispatch modes, their registry and the decorator `register`, tested without Ray."""

import inspect
import pickle

import pytest
import torch
from tensordict import TensorDict

from asyncrl.core.errors import BatchError
from asyncrl.single_controller import (
    DISPATCH_MODE_FN_REGISTRY,
    MAGIC_ATTR,
    DataProto,
    DataProtoFuture,
    Dispatch,
    DynamicEnum,
    Execute,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePool,
    Role,
    SubRayResourcePool,
    UsageError,
    Worker,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    get_random_string,
    merge_resource_pool,
    parallel_put,
    register,
    register_dispatch_mode,
    split_resource_pool,
    update_dispatch_mode,
)
from asyncrl.single_controller.dispatch import (
    _padding_size_key,
    _split_args_kwargs_data_proto,
    _split_args_kwargs_data_proto_with_auto_padding,
    beside,
    collect_nd_compute,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_one_to_all,
    dummy_direct_rollout_call,
)
from asyncrl.single_controller.resource_pool import can_place


class Group:
    world_size = 2


@pytest.fixture
def restored_registry():
    before = dict(DISPATCH_MODE_FN_REGISTRY)
    yield
    DISPATCH_MODE_FN_REGISTRY.clear()
    DISPATCH_MODE_FN_REGISTRY.update(before)


def test_the_predefined_dispatch_modes_exist():
    assert Dispatch.names() == [
        "RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD",
    ]  # fmt: skip
    assert Execute.names() == ["ALL", "RANK_ZERO"]
    assert all(mode in DISPATCH_MODE_FN_REGISTRY for mode in Dispatch)


def test_register_stores_its_arguments_on_the_method():
    @register(dispatch_mode=Dispatch.DP_COMPUTE, execute_mode=Execute.RANK_ZERO, blocking=False)
    def method(self):
        """Do nothing in this method."""

    assert getattr(method, MAGIC_ATTR) == {
        "dispatch_mode": Dispatch.DP_COMPUTE,
        "execute_mode": Execute.RANK_ZERO,
        "blocking": False,
        "materialize_futures": True,
    }
    assert method.__doc__ == "Do nothing in this method."
    defaults = {name: parameter.default for name, parameter in inspect.signature(register).parameters.items()}
    assert defaults == {
        "dispatch_mode": Dispatch.ALL_TO_ALL,
        "execute_mode": Execute.ALL,
        "blocking": True,
        "materialize_futures": True,
    }


def test_a_registered_coroutine_function_stays_a_coroutine_function():
    @register()
    async def method(self):
        return 1

    assert inspect.iscoroutinefunction(method)


@pytest.mark.parametrize("mode", ["ONE_TO_ALL", None, Execute.ALL])
def test_register_refuses_values_that_are_not_modes(mode):
    with pytest.raises(TypeError, match="dispatch_mode"):
        register(dispatch_mode=mode)
    with pytest.raises(TypeError, match="execute_mode"):
        register(execute_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="collect_fn"):
        register(dispatch_mode={"dispatch_fn": print})


@pytest.mark.usefixtures("restored_registry")
def test_a_dispatch_mode_can_be_added_only_once():
    mode = register_dispatch_mode("added_mode", print, repr)
    try:
        assert Dispatch.ADDED_MODE is mode
        assert mode.name == "ADDED_MODE"
        assert get_predefined_dispatch_fn(mode) == {"dispatch_fn": print, "collect_fn": repr}
        with pytest.raises(ValueError, match="already"):
            register_dispatch_mode("ADDED_MODE", print, repr)
    finally:
        Dispatch.remove("ADDED_MODE")


@pytest.mark.usefixtures("restored_registry")
def test_a_dispatch_mode_can_be_replaced():
    update_dispatch_mode(Dispatch.ONE_TO_ALL, print, repr)
    assert get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["dispatch_fn"] is print


def test_the_mode_to_replace_must_be_a_dispatch_member():
    with pytest.raises(UsageError, match="must be a Dispatch"):
        update_dispatch_mode({"dispatch_fn": print, "collect_fn": repr}, print, repr)


def test_only_a_registered_method_can_be_marked_beside():
    def method(worker):
        pass

    with pytest.raises(UsageError, match="@register"):
        beside(method)


def test_the_error_names_an_unknown_dispatch_mode():
    with pytest.raises(AttributeError, match="NO_SUCH"):
        Dispatch.NO_SUCH  # noqa: B018


def test_members_are_pickled_by_name():
    assert pickle.loads(pickle.dumps(Dispatch.ONE_TO_ALL)) is Dispatch.ONE_TO_ALL
    assert "ONE_TO_ALL" in Dispatch
    assert Dispatch.from_name("nothing") is None
    assert Dispatch["ONE_TO_ALL"] is Dispatch.ONE_TO_ALL


def test_roles_can_be_added():
    Role.register("MyWorker")
    try:
        assert Role.MyWorker.name == "MyWorker"
        assert str(Role.ActorRollout) == "actor_rollout"
    finally:
        Role.remove("MyWorker")


def test_the_collect_mask_selects_the_results_of_ranks():
    assert collect_nd_compute([False, True], Group(), ["a", "b"]) == ["b"]
    with pytest.raises(ValueError, match="2 results"):
        collect_nd_compute([True], Group(), ["a"])


def test_a_pool_counts_processes_by_node():
    pool = ResourcePool([2, 1])
    pool.add_node(1)
    assert (pool.world_size, pool.store, pool()) == (4, [2, 1, 1], [2, 1, 1])
    assert pool.local_world_size_list() == [2, 2, 1, 1]
    assert pool.local_rank_list() == [0, 1, 0, 0]
    assert (pool.max_colocate_count, pool.n_gpus_per_node) == (10, 8)


def test_a_dynamic_enum_numbers_its_members_and_writes_names_in_capitals():
    class Stage(DynamicEnum):
        """An enumeration that a user defines."""

    warm_up, main = Stage.register("warm_up"), Stage.register("MAIN")
    assert (warm_up.name, warm_up.value, main.value) == ("WARM_UP", 0, 1)
    assert Stage.remove("main") is main
    assert Stage.register("late").value == 2
    assert Stage.names() == ["WARM_UP", "LATE"]


def test_a_role_is_found_by_its_string():
    assert Role.from_string("actor_rollout") is Role.from_string("ActorRollout") is Role.ActorRollout
    assert str(Role.from_string("rm")) == "rm"
    with pytest.raises(ValueError, match="critics"):
        Role.from_string("critics")
    assert (Role.Actor.value, Role.Env.value, Role.TeacherModel.value) == (0, 7, 8)


def test_can_place_finds_a_placement_whenever_one_exists():
    eight, six, four = ({"GPU": float(count), f"node:{count}": 1.0} for count in (8, 6, 4))
    threes_and_twos = [{"GPU": 3.0}, {"GPU": 3.0}, {"GPU": 2.0}, {"GPU": 2.0}]
    assert can_place(threes_and_twos, [four, six])
    assert not can_place([*threes_and_twos, {"GPU": 1.0}], [four, six])
    assert not can_place([{"GPU": 1.0}], [{"CPU": 4.0}])
    assert not can_place([{"GPU": 8.0}] * 65, [dict(eight, **{f"node:{i}": 1.0}) for i in range(64)])


def test_a_custom_dispatch_function_can_use_the_split_functions():
    data = DataProto.from_dict({"a": torch.arange(5.0)}, auto_padding=True)
    (parts,), kwargs = _split_args_kwargs_data_proto_with_auto_padding(4, data)
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert kwargs == {_padding_size_key: 3}
    (parts,), kwargs = _split_args_kwargs_data_proto(2, data.slice(0, 4))
    assert [part.batch["a"].tolist() for part in parts] == [[0, 1], [2, 3]]
    with pytest.raises(UsageError, match="same length"):
        _split_args_kwargs_data_proto_with_auto_padding(
            4, data, other=DataProto.from_dict({"a": torch.zeros(3)}, auto_padding=True)
        )
    with pytest.raises(UsageError, match="3 rows"):
        _split_args_kwargs_data_proto(2, TensorDict({"a": torch.zeros(3)}, batch_size=[3]))


def test_a_future_is_padded_like_the_batches_of_the_same_call():
    data = DataProto.from_dict({"a": torch.arange(5.0)}, auto_padding=True)
    future = DataProtoFuture.concat([None])
    (_, parts), kwargs = _split_args_kwargs_data_proto_with_auto_padding(4, data, future)
    assert kwargs == {_padding_size_key: 3}
    parts = [pickle.loads(pickle.dumps(part)).resolve([data]) for part in parts]
    assert [part.batch["a"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 4], [4, 4]]
    (parts,), kwargs = _split_args_kwargs_data_proto_with_auto_padding(4, future)
    assert ([len(part.resolve([data])) for part in parts], kwargs) == ([2, 2, 1, 0], {})
    (_, parts), _ = _split_args_kwargs_data_proto_with_auto_padding(4, data, future)
    with pytest.raises(UsageError, match=r"same length, got \[3, 5\]"):
        parts[0].resolve([data.slice(0, 3)])
    with pytest.raises(BatchError, match="6 rows cannot be cut"):
        parts[0].resolve([DataProto.from_dict({"a": torch.zeros(6)})])


@pytest.mark.parametrize("split_size", [0, -1, [], [2, 0]])
def test_each_part_of_a_pool_needs_at_least_one_process(split_size):
    with pytest.raises(UsageError, match="do not add up to the 2 processes of the pool"):
        split_resource_pool(RayResourcePool([2], use_gpu=False), split_size)


def test_a_worker_class_can_read_additional_environment_variables(monkeypatch):
    class Described(Worker):
        @classmethod
        def env_keys(cls):
            return [*super().env_keys(), "MY_RACK"]

    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MY_RACK": "r7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "")  # let monkeypatch also undo the value that the worker sets
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    worker = Described()
    assert (worker.rank, worker.world_size, worker._my_rack) == (3, 4, "r7")
    assert (worker._local_rank, worker._local_world_size) == (0, 2)
    worker._configure_with_store({"_rank": 1, "_my_rack": "r8"})
    assert (worker.rank, worker._my_rack) == (1, "r8")


def without_devices(processes, name="pool"):
    return RayResourcePool(processes, use_gpu=False, name_prefix=name)


HALF = SubRayResourcePool([], 0, 1, process_on_nodes=[2], use_gpu=False, name_prefix="half")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: dispatch_dp_compute_data_proto_with_func(Group(), 1), TypeError, "function"),
        (lambda: dummy_direct_rollout_call(Group()), TypeError, "worker itself"),
        (lambda: parallel_put([]), AssertionError, "at least one"),
        (lambda: merge_resource_pool(HALF, without_devices([1])), UsageError, "'half' is a part of a pool"),
        (lambda: merge_resource_pool(without_devices([1]), HALF), UsageError, "'half' is a part of a pool"),
        (
            lambda: RayWorkerGroup(without_devices([], "empty"), RayClassWithInitArgs(Worker)),
            UsageError,
            "'empty' has no processes",
        ),
    ],
)
def test_meaningless_calls_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_small_functions_of_verl_return_the_expected_values():
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}
    assert dispatch_one_to_all(Group(), 1, k="x") == (([1, 1],), {"k": ["x", "x"]})
    assert len(get_random_string(6)) == 6
    assert get_random_string(length=12).isalnum()
