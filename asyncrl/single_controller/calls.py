"""Calls methods of the workers of a worker group, and waits for the results with a deadline.

An argument of a call may be a future: the result of an earlier call that possibly still runs. The group then passes the
future's Ray references to Ray, and Ray starts the new call after the end of the earlier call. So no worker is blocked
while the earlier call runs. If the earlier call failed, the new call raises the same error.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import ray

from asyncrl.core.remote import fetch, fetch_async

from .dispatch import (
    BESIDE,
    MAGIC_ATTR,
    Arguments,
    DataProtoFuture,
    _padding_size_key,
    collect_all_to_all,
    collect_dp_compute,
    mapped,
    runs_beside,
    silent_ranks,
)

deadline_s: ContextVar[float | None] = ContextVar("call_deadline_s", default=None)
"""Seconds that a blocking call in this context may take; None means the ``timeout_s`` of the worker group."""


@contextmanager
def call_deadline(timeout_s: float) -> Iterator[None]:
    """Limit each blocking call of a worker group in the ``with`` block to ``timeout_s`` seconds.

    A call that takes longer raises `DeadlineError`, but the workers continue with the call.
    """
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
    token = deadline_s.set(timeout_s)
    try:
        yield
    finally:
        deadline_s.reset(token)


class PendingResults(list[Any]):
    """A list of Ray references to the results of a call, one per rank. Await the list or call `get` for the results."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType] - `asyncio.gather` needs hashable objects

    def __init__(self, refs: Iterable[Any] = ()) -> None:
        super().__init__(refs)
        self.queued_s = time.monotonic()

    def get(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for the results of all ranks, and return them in rank order.

        Raises `DeadlineError` after ``timeout_s`` seconds, and `WorkerDiedError` if a worker died.
        """
        return fetch(self, timeout_s)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return fetch_async(self).__await__()


class PendingResult(ray.ObjectRef):
    """A Ray reference to the result of a call on one rank.

    If the call failed, `get` raises an error that names the worker. Ray's own errors do not name the worker.
    """

    def __init__(self, ref: ray.ObjectRef) -> None:
        super().__init__(ref.binary(), ref.owner_address(), ref.call_site())
        self.ref = ref

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for the result and return it.

        Raises `DeadlineError` after ``timeout_s`` seconds, and `WorkerDiedError` if the worker died.
        """
        return fetch([self.ref], timeout_s)[0]

    def __await__(self) -> Generator[Any, None, Any]:
        return (yield from fetch_async([self.ref]).__await__())[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.ref,)


def _same(ref: ray.ObjectRef) -> ray.ObjectRef:
    return ref


def detach_references(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Any]]:
    """Take the Ray references out of a call's arguments, so that the caller can send the references separately.

    Returns a pair: the arguments, and a list of the references. In the returned arguments, each `DataProtoFuture` has
    None in place of each reference. An argument that is a reference becomes a `DataProtoFuture` of its value, because
    Ray does not fetch references inside of other arguments.
    """
    references: list[Any] = []

    def blank(value: Any) -> Any:
        if isinstance(value, ray.ObjectRef):
            value = DataProtoFuture(collect_fn=itemgetter(0), futures=[value])
        if not isinstance(value, DataProtoFuture):
            return value
        references.extend(value.futures)
        return replace(value, futures=[None] * len(value.futures))

    return mapped(blank, args, kwargs), references


def attach_results(args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]) -> Arguments:
    """Return the arguments of a call with each `DataProtoFuture` replaced by its result.

    ``args`` and ``kwargs`` come from `detach_references`. ``results`` has the value of each reference that
    `detach_references` returned, in the same order.
    """
    remaining = iter(results)

    def resolved(value: Any) -> Any:
        is_future = isinstance(value, DataProtoFuture)
        return value.resolve([next(remaining) for _ in value.futures]) if is_future else value

    return mapped(resolved, args, kwargs)


FUSED_METHOD_SEPARATOR = "_fwmn_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Describes how to call a method of a worker: directly, or in a fused worker (several workers in one process).

    Attributes:
        remote_name: Name of the actor's method to call.
        role_method: Role and method name that a fused worker gets; None if the worker is called directly.
        is_worker: Whether the actor's class is a `Worker`. A `Worker` can call another method with the results of
            futures (`_call_chained`), or without returning the method's result (`_call_silently`).
        is_coroutine: Whether the called method is async. An async method awaits the futures in its arguments itself.
        takes_results: Whether the method receives the results of futures instead of the futures.
        is_beside: Whether the method has the decorator `beside`, so that it runs in a second thread of the worker.
    """

    remote_name: str
    role_method: str | None = None
    is_worker: bool = False
    is_coroutine: bool = False
    takes_results: bool = False
    is_beside: bool = False

    @classmethod
    def of(cls, actor_class: Any, method_name: str, role: str) -> Route:
        """Find out how to call a method of an actor class.

        ``role`` names the worker in a fused class (a class with one worker per role); it is empty for other classes.
        """
        owner = actor_class.raw_cls_dict[role] if role else actor_class
        method = getattr(owner, method_name, None)
        remote_name = "_fuw_execute" if role else method_name
        return cls(
            remote_name=remote_name,
            role_method=f"{role}{FUSED_METHOD_SEPARATOR}{method_name}" if role else None,
            is_worker=hasattr(actor_class, "_call_chained"),
            is_coroutine=inspect.iscoroutinefunction(getattr(actor_class, remote_name, None)),
            takes_results=bool(getattr(method, MAGIC_ATTR, {}).get("materialize_futures")),
            is_beside=runs_beside(method),
        )

    def call(
        self, worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_silent: bool = False
    ) -> ray.ObjectRef:
        """Call the method on ``worker``, a Ray actor handle. Return a Ray reference to the result.

        If ``is_silent``, the result is None, but errors are still raised.
        """
        name = self.remote_name
        if self.role_method is not None:
            args = (self.role_method, *args)
        if self.is_worker and not self.is_coroutine:
            has_future = any(isinstance(value, DataProtoFuture) for value in (*args, *kwargs.values()))
            if self.takes_results and has_future:
                (blank_args, blank_kwargs), references = detach_references(args, kwargs)
                args, kwargs, name = (name, blank_args, blank_kwargs, *references), {}, "_call_chained"
            if is_silent:
                args, name = (name, *args), "_call_silently"
        method = getattr(worker, name)
        return (method.options(concurrency_group=BESIDE) if self.is_beside else method).remote(*args, **kwargs)


_SHARE_FROM_BYTES = 100_000
# The collect functions that return a list of the ranks' results. Rows of padding are not removed from such a list.
_COLLECT_BY_RANK = (collect_all_to_all, collect_dp_compute)


def func_generator(
    group: Any,
    method_name: str,
    dispatch_fn: Callable[..., Any],
    collect_fn: Callable[..., Any],
    execute_fn: Callable[..., Any],
    blocking: bool,
) -> Callable[..., Any]:
    """Return a function, for use as a method of ``group``, that calls a registered method of the group's workers.

    Args:
        group: The worker group.
        method_name: Name of the workers' method.
        dispatch_fn: Function that turns the caller's arguments into arguments per rank.
        collect_fn: Function that turns the list of the ranks' results into the caller's result.
        execute_fn: The group's method that calls all workers, or only rank 0.
        blocking: Whether the returned function waits for the results.

    The returned function also removes rows of padding from the result.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        group._running()
        args, kwargs = dispatch_fn(group, *args, **kwargs)
        padding_size = kwargs.pop(_padding_size_key, 0)
        silent = silent_ranks(group, collect_fn)
        if silent and execute_fn == group.execute_all:
            output = group._execute_all(method_name, args, kwargs, silent)
        else:
            output = execute_fn(method_name, *args, **kwargs)
        if blocking:
            output = group._fetch(output)
        sent, output = output, collect_fn(group, output)
        if silent and not blocking:
            output = output.with_errors_of([sent[rank] for rank in sorted(silent)])
        return output if not padding_size or collect_fn in _COLLECT_BY_RANK else _unpadded(output, padding_size)

    call.__name__ = method_name
    return call


def _unpadded(output: Any, padding_size: int) -> Any:
    if isinstance(output, DataProtoFuture):
        return output.then(partial(_unpadded, padding_size=padding_size))
    # A TensorDict with an empty batch size has no rows.
    has_rows = hasattr(output, "chunk") and getattr(output, "batch_size", True)
    return output[:-padding_size] if has_rows or isinstance(output, list) else output


def shared(values: list[Any]) -> list[Any]:
    """Store a large argument once in Ray's object store, so that it is not sent to each rank separately.

    ``values`` has one argument per rank. If all entries are the same object of at least 100 kB, return a list of
    references to the stored object. Otherwise return ``values``.
    """
    if len(values) < 2 or getattr(values[0], "nbytes", 0) < _SHARE_FROM_BYTES:
        return values
    if any(value is not values[0] for value in values):
        return values
    return [ray.put(values[0])] * len(values)
