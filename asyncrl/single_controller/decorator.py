"""`register` states, on a worker's method, how the group sends its arguments out and brings its results back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from asyncrl.protocol.errors import UsageError
from asyncrl.protocol.future import DataProtoFuture

from .dynamic_enum import DynamicEnum

MAGIC_ATTR = "attrs_3141562937"

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(DynamicEnum):
    """How the arguments of a call reach the workers, and what becomes of their results."""

    RANK_ZERO: Dispatch
    ONE_TO_ALL: Dispatch
    ALL_TO_ALL: Dispatch
    DP_COMPUTE: Dispatch
    DP_COMPUTE_PROTO: Dispatch
    DP_COMPUTE_PROTO_WITH_FUNC: Dispatch
    DP_COMPUTE_METRIC: Dispatch
    DIRECT_ROLLOUT_METHOD: Dispatch


class Execute(DynamicEnum):
    """Which workers run a call."""

    ALL: Execute
    RANK_ZERO: Execute


def init_predefined_dispatch_mode() -> None:
    """Register the modes that `Dispatch` names. Done here already: `ValueError` where it is done twice."""
    for name in Dispatch.__annotations__:
        Dispatch.register(name)


def init_predefined_execute_mode() -> None:
    """Register the modes that `Execute` names. Done here already: `ValueError` where it is done twice."""
    for name in Execute.__annotations__:
        Execute.register(name)


init_predefined_dispatch_mode()
init_predefined_execute_mode()


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Method], Method]:
    """Make a method callable through the worker group.

    Args:
        dispatch_mode: A member of `Dispatch`, or a dict with ``dispatch_fn`` and ``collect_fn``.
        execute_mode: Whether all workers run the method, or rank 0 alone.
        blocking: Whether the group's caller waits for the results, or receives references or a `DataProtoFuture`.
        materialize_futures: Whether a `DataProtoFuture` among the arguments is fetched, in the worker, before the
            method runs.

    Raises:
        UsageError: ``dispatch_mode`` or ``execute_mode`` is something else, or the dict lacks a function.
    """
    _check_dispatch_mode(dispatch_mode)
    _check_execute_mode(execute_mode)

    attrs = {
        "dispatch_mode": dispatch_mode,
        "execute_mode": execute_mode,
        "blocking": blocking,
        "materialize_futures": materialize_futures,
    }

    def decorate(method: Method) -> Method:
        wrap = _wrapped_coroutine if inspect.iscoroutinefunction(method) else _wrapped
        wrapped = wrap(method, materialize_futures)
        setattr(wrapped, MAGIC_ATTR, attrs)
        return wrapped

    return decorate


def _wrapped(method: Any, materialize_futures: bool) -> Any:
    """The method as the worker runs it: with its futures fetched, and its errors marked with the rank."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if materialize_futures:
            args, kwargs = _materialize_futures(*args, **kwargs)
        with _named(self, method.__name__):
            return method(self, *args, **kwargs)

    return call


def _wrapped_coroutine(method: Any, materialize_futures: bool) -> Any:
    """As `_wrapped`, for a coroutine function."""

    @wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if materialize_futures:
            args, kwargs = await materialize_async(args, kwargs)
        with _named(self, method.__name__):
            return await method(self, *args, **kwargs)

    return call


class _named:
    """Adds the worker's rank to an exception that leaves its method."""

    def __init__(self, worker: Any, method_name: str) -> None:
        self.worker = worker
        self.method_name = method_name

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        rank = getattr(self.worker, "_rank", None)
        if error is not None and rank is not None:
            error.add_note(f"in {type(self.worker).__name__}.{self.method_name} on rank {rank}")


def _check_dispatch_mode(dispatch_mode: Any) -> None:
    if isinstance(dispatch_mode, dict):
        missing = {"dispatch_fn", "collect_fn"} - dispatch_mode.keys()
        if missing:
            raise UsageError(f"dispatch_mode lacks {sorted(missing)}; give both dispatch_fn and collect_fn")
    elif not isinstance(dispatch_mode, Dispatch):
        raise UsageError(f"dispatch_mode must be a Dispatch or a dict of its two functions, got {dispatch_mode!r}")


def _check_execute_mode(execute_mode: Any) -> None:
    if not isinstance(execute_mode, Execute):
        raise UsageError(f"execute_mode must be an Execute, got {execute_mode!r}")


def _materialize_futures(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fetch the futures among the arguments."""

    def fetched(value: Any) -> Any:
        return value.get() if isinstance(value, DataProtoFuture) else value

    return tuple(fetched(arg) for arg in args), {key: fetched(value) for key, value in kwargs.items()}


async def materialize_async(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fetch the futures among the arguments without blocking the event loop."""

    async def fetched(value: Any) -> Any:
        return await value if isinstance(value, DataProtoFuture) else value

    return tuple([await fetched(arg) for arg in args]), {key: await fetched(value) for key, value in kwargs.items()}
