"""Modes, their registry and `register`, without Ray."""

import inspect
import pickle

import pytest

from asyncrl.single_controller import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    Execute,
    ResourcePool,
    Role,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    parallel_put,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from asyncrl.single_controller.decorator import MAGIC_ATTR
from asyncrl.single_controller.dispatch import (
    collect_nd_compute,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_one_to_all,
    forbidden_direct_call,
)


class Group:
    world_size = 2


@pytest.fixture
def restored_registry():
    before = dict(DISPATCH_MODE_FN_REGISTRY)
    yield
    DISPATCH_MODE_FN_REGISTRY.clear()
    DISPATCH_MODE_FN_REGISTRY.update(before)


def test_the_predefined_modes_are_there():
    assert Dispatch.names() == [
        "RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO", "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD",
    ]  # fmt: skip
    assert Execute.names() == ["ALL", "RANK_ZERO"]
    assert all(mode in DISPATCH_MODE_FN_REGISTRY for mode in Dispatch)


def test_register_notes_what_the_group_must_know():
    @register(dispatch_mode=Dispatch.DP_COMPUTE, execute_mode=Execute.RANK_ZERO, blocking=False)
    def method(self):
        """Its own docstring."""

    assert getattr(method, MAGIC_ATTR) == {
        "dispatch_mode": Dispatch.DP_COMPUTE,
        "execute_mode": Execute.RANK_ZERO,
        "blocking": False,
        "materialize_futures": True,
    }
    assert method.__doc__ == "Its own docstring."
    defaults = {name: parameter.default for name, parameter in inspect.signature(register).parameters.items()}
    assert defaults == {
        "dispatch_mode": Dispatch.ALL_TO_ALL,
        "execute_mode": Execute.ALL,
        "blocking": True,
        "materialize_futures": True,
    }


def test_a_coroutine_stays_one():
    @register()
    async def method(self):
        return 1

    assert inspect.iscoroutinefunction(method)


@pytest.mark.parametrize("mode", ["ONE_TO_ALL", None, Execute.ALL])
def test_what_is_no_mode_is_refused(mode):
    with pytest.raises(TypeError, match="dispatch_mode"):
        register(dispatch_mode=mode)
    with pytest.raises(TypeError, match="execute_mode"):
        register(execute_mode=Dispatch.ONE_TO_ALL)
    with pytest.raises(ValueError, match="collect_fn"):
        register(dispatch_mode={"dispatch_fn": print})


@pytest.mark.usefixtures("restored_registry")
def test_a_mode_can_be_added_once():
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
def test_a_mode_can_be_replaced():
    update_dispatch_mode(Dispatch.ONE_TO_ALL, print, repr)
    assert get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)["dispatch_fn"] is print


def test_an_unknown_member_is_refused_by_name():
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


def test_execute_modes_name_the_groups_methods():
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}


def test_one_to_all_repeats_each_argument():
    assert dispatch_one_to_all(Group(), 1, k="x") == (([1, 1],), {"k": ["x", "x"]})


def test_the_collect_mask_selects_ranks():
    assert collect_nd_compute([False, True], Group(), ["a", "b"]) == ["b"]
    with pytest.raises(ValueError, match="2 results"):
        collect_nd_compute([True], Group(), ["a"])


def test_the_first_argument_with_func_must_be_a_function():
    with pytest.raises(TypeError, match="function"):
        dispatch_dp_compute_data_proto_with_func(Group(), 1)


def test_a_direct_rollout_method_is_not_called_through_the_group():
    with pytest.raises(TypeError, match="worker itself"):
        forbidden_direct_call(Group())


def test_a_pool_counts_processes_by_node():
    pool = ResourcePool([2, 1])
    pool.add_node(1)
    assert (pool.world_size, pool.store, pool()) == (4, [2, 1, 1], [2, 1, 1])
    assert pool.local_world_size_list() == [2, 2, 1, 1]
    assert pool.local_rank_list() == [0, 1, 0, 0]
    assert (pool.max_colocate_count, pool.n_gpus_per_node) == (10, 8)


def test_parallel_put_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        parallel_put([])
