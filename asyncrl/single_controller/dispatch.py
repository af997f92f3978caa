"""The decorator `register` for methods that a worker group can call, and the dispatch modes.

A dispatch mode distributes the arguments of a call over the ranks, and joins the ranks' results. The import of this
module does not load torch or ray.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from types import FunctionType
from typing import Any, ClassVar, TypeVar

from asyncrl.core.errors import UsageError
from asyncrl.core.remote import fetch, fetch_async

# A dispatch function that appends rows of padding to batches returns the number of these rows in this keyword argument.
# The worker group later removes the rows of padding from the joined result of a call.
_padding_size_key = "_padding_size_key_x123d"


def merge(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of the ranks' results, which are `DataProto` or TensorDict objects.

    Return None if all results are None.
    """
    return None if parts and all(part is None for part in parts) else BatchData(parts).concat()


@dataclass(eq=False)  # ``asyncio.gather`` needs hashable objects
class DataProtoFuture:
    """The result of a call that may still be running.

    Await the future or call `get` for the result. The future can also be an argument of another worker group's call.
    The workers of the other group then fetch the result.

    Attributes:
        collect_fn: Function that joins the list of the ranks' results into one result.
        futures: First a Ray reference for each rank that returns a result, then one for each rank that returns only
            errors.
        dispatch_fn: Function that selects a part of the joined result; None selects the whole result.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def concat(data: list[Any]) -> DataProtoFuture:
        """Return a future of the concatenated rows of several results. ``data`` has Ray references to the results."""
        return DataProtoFuture(collect_fn=merge, futures=list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Return a list of ``chunks`` futures: one per part of the rows of the result. Nothing is fetched yet."""
        return [self.then(partial(_part, index=index, chunks=chunks)) for index in range(chunks)]

    def then(self, select: Callable[[Any], Any]) -> DataProtoFuture:
        """Return a future whose result is the function ``select`` applied to the result of this future.

        The process that fetches the result calls ``select``.
        """
        first = self.dispatch_fn
        return replace(self, dispatch_fn=select if first is None else partial(_both, first=first, second=select))

    def with_errors_of(self, references: list[Any]) -> DataProtoFuture:
        """Return a copy of this future that also waits for other calls.

        ``references`` are Ray references to the results of the other calls. The copy raises the errors of these calls,
        and ignores their results.
        """
        collect_fn = partial(_joined_first, collect_fn=self.collect_fn, count=len(self.futures))
        return replace(self, collect_fn=collect_fn, futures=[*self.futures, *references])

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait at most ``timeout_s`` seconds for the results of all ranks, and return the joined result.

        If ``dispatch_fn`` is not None, return the part of the joined result that ``dispatch_fn`` selects.

        Raises `DeadlineError` after ``timeout_s`` seconds, and `WorkerDiedError` if a worker died.
        """
        return self.resolve(fetch(self.futures, timeout_s))

    def __await__(self) -> Generator[Any, None, Any]:
        return self._finish_async().__await__()

    async def _finish_async(self) -> Any:
        return await asyncio.to_thread(self.resolve, await fetch_async(self.futures))

    def resolve(self, results: list[Any]) -> Any:
        """Return the same result as `get`. ``results`` has the fetched result of each reference in ``futures``."""
        joined = self.collect_fn(results)
        return joined if self.dispatch_fn is None else self.dispatch_fn(joined)


def _joined_first(results: list[Any], collect_fn: Callable[[list[Any]], Any], count: int) -> Any:
    return collect_fn(results[:count])


def _part(data: Any, index: int, chunks: int) -> Any:
    return BatchData(data).chunk(chunks)[index]


def _both(data: Any, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Any:
    return second(first(data))


class BatchData:
    """Wraps a value: a batch to cut into parts, or a list of batches to concatenate.

    A batch is a `DataProto` or a TensorDict. `chunk` also cuts a `DataProtoFuture`. `concat` also accepts a list of
    Ray references to batches.

    Example: ``BatchData(argument).chunk(chunks=4)``, ``BatchData(results).concat()``.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def is_chunkable(self) -> bool:
        """Return whether `chunk` can cut the value: it is a batch or a `DataProtoFuture`."""
        return _is_batch(self._data) or isinstance(self._data, DataProtoFuture)

    def is_concatable(self) -> bool:
        """Return whether the value is a list or tuple whose first item is a batch or a Ray reference."""
        data = self._data
        return isinstance(data, list | tuple) and len(data) > 0 and (_is_batch(data[0]) or _is_reference(data[0]))

    def chunk(self, chunks: int) -> Sequence[Any]:
        """Cut the rows of the value into ``chunks`` parts of the same type as the value.

        Raises `UsageError` if `is_chunkable` returns False. Raises `BatchError` if ``chunks`` does not divide the
        number of rows; a `DataProtoFuture` raises this error when a part is fetched. The parts of a `DataProto` with
        padding enabled may differ in size.
        """
        if _is_tensordict(self._data):
            from asyncrl.single_controller import columns  # import here, because this import loads torch

            return columns.chunk_tensordict(self._data, chunks)
        if not self.is_chunkable():
            raise UsageError(f"a {type(self._data).__name__} cannot be cut into parts; pass a DataProto or TensorDict")
        return self._data.chunk(chunks=chunks)

    def concat(self) -> Any:
        """Concatenate the rows of a list of batches. For a list of Ray references, return a future of the result.

        Raises `ValueError` if the list is empty, and `BatchError` if the batches have different columns. Raises
        `UsageError` if the list has other objects, or both `DataProto` objects and TensorDicts.
        """
        data = self._data
        if not data:
            raise ValueError("an empty list of batches cannot be concatenated")
        if _is_reference(data[0]):
            return DataProtoFuture.concat(list(data))
        if not all(map(_is_batch, data)) or len(set(map(_is_tensordict, data))) > 1:
            kinds = ", ".join(type(part).__name__ for part in data)
            raise UsageError(
                f"results can be joined only if all are DataProto or all are TensorDict, got {kinds}; return a batch "
                "on every rank, if necessary a batch without rows"
            )
        if _is_tensordict(data[0]):
            from asyncrl.single_controller import columns

            return columns.concat_tensordict(data)
        return type(data[0]).concat(data)


def _is_batch(data: Any) -> bool:
    from asyncrl.single_controller.data_proto import DataProto

    return isinstance(data, DataProto) or _is_tensordict(data)


def _is_tensordict(data: Any) -> bool:
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(data, tensordict.TensorDictBase)


def _is_reference(data: Any) -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(data, ray.ObjectRef)


class _Members(type):
    """Metaclass of `DynamicEnum`. It makes ``for``, ``in`` and ``len`` possible for an enumeration ``Kind``.

    ``Kind["name"]`` and ``Kind.name`` return the member with the name ``name``, in upper or lower case.
    """

    _registry: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._registry.values())

    def __contains__(cls, item: Any) -> bool:
        return item.upper() in cls._registry if isinstance(item, str) else item in cls._registry.values()

    def __getitem__(cls, name: str) -> Any:
        return cls._registry[name.upper()]

    def __len__(cls) -> int:
        return len(cls._registry)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        member = cls._registry.get(name.upper())
        if member is None:
            known = ", ".join(member.name for member in cls)
            raise AttributeError(f"{cls.__name__} has no member {name!r}, only {known}; add a member with register()")
        return member


class DynamicEnum(metaclass=_Members):
    """Base class of enumerations to which members can be added at run time.

    Names are unique regardless of case. Members are compared by identity.
    """

    keeps_case: ClassVar[bool] = False  # if `keeps_case` is False, member names become upper case
    _registry: ClassVar[dict[str, Any]] = {}
    _next_value: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        cls._registry = {}
        cls._next_value = 0

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value

    @classmethod
    def register(cls, name: str) -> Any:
        """Add a member to the enumeration, and return the member. Raises `ValueError` if the name exists already.

        Example: ``Dispatch.register("mine")`` adds ``Dispatch.MINE``.
        """
        if name.upper() in cls._registry:
            raise ValueError(f"{cls.__name__} has a member {name!r} already; choose another name")
        member = cls(name if cls.keeps_case else name.upper(), cls._next_value)
        cls._next_value += 1
        cls._registry[name.upper()] = member
        return member

    @classmethod
    def remove(cls, name: str) -> Any:
        """Remove the member with this name from the enumeration, and return the member.

        The name may be in upper or lower case. Raises `KeyError` if there is no such member.
        """
        return cls._registry.pop(name.upper())

    @classmethod
    def from_name(cls, name: str) -> Any:
        """Return the member with this name, or None if there is none. The name may be in upper or lower case."""
        return cls._registry.get(name.upper())

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all members of this enumeration, in the order of their registration."""
        return [member.name for member in cls]

    def __reduce__(self) -> tuple[Any, ...]:
        return _member, (type(self), self.name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"


def _member(kind: type[DynamicEnum], name: str) -> Any:
    """Return the member of the enumeration ``kind`` with this name, for unpickling.

    If ``kind`` has no such member in this process, register the member.
    """
    return kind.from_name(name) or kind.register(name)


MAGIC_ATTR = "attrs_3141562937"

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(DynamicEnum):
    """Determines how a worker group distributes the arguments of a call over the ranks, and joins their results."""

    RANK_ZERO: Dispatch
    ONE_TO_ALL: Dispatch
    ALL_TO_ALL: Dispatch
    DP_COMPUTE: Dispatch
    DP_COMPUTE_PROTO: Dispatch
    DP_COMPUTE_PROTO_WITH_FUNC: Dispatch
    DP_COMPUTE_METRIC: Dispatch
    DIRECT_ROLLOUT_METHOD: Dispatch


class Execute(DynamicEnum):
    """Determines which workers of a group run a call: all workers, or only rank 0."""

    ALL: Execute
    RANK_ZERO: Execute


for _mode in Dispatch.__annotations__:
    Dispatch.register(_mode)
for _mode in Execute.__annotations__:
    Execute.register(_mode)


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Method], Method]:
    """Return a decorator for methods of a worker class. The decorator makes a method callable through a worker group.

    Args:
        dispatch_mode: How a call's arguments are distributed over the ranks, and how the ranks' results are joined: a
            member of `Dispatch`, or a dict with the functions ``dispatch_fn`` and ``collect_fn``.
        execute_mode: Whether all workers run the method, or only rank 0. With ``Dispatch.RANK_ZERO``, only rank 0 runs
            the method.
        blocking: Whether the group's call waits for the results. If False, the call returns references or a
            `DataProtoFuture`.
        materialize_futures: Whether the method gets the result of a `DataProtoFuture` instead of the future.
    """
    _check_dispatch_mode(dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise UsageError(f"execute_mode must be an Execute, got {execute_mode!r}")
    attrs = {
        "dispatch_mode": dispatch_mode,
        "execute_mode": execute_mode,
        "blocking": blocking,
        "materialize_futures": materialize_futures,
    }

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if materialize_futures:
                args, kwargs = _materialize_futures(*args, **kwargs)
            with _named(self, method.__name__):
                return method(self, *args, **kwargs)

        @wraps(method)
        async def call_coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
            if materialize_futures:
                args, kwargs = await materialize_async(args, kwargs)
            with _named(self, method.__name__):
                return await method(self, *args, **kwargs)

        wrapped: Any = call_coroutine if inspect.iscoroutinefunction(method) else call
        setattr(wrapped, MAGIC_ATTR, attrs)
        return wrapped

    return decorate


BESIDE = "beside"
"""Name of the Ray concurrency group (here a single thread) that runs methods with the decorator `beside`."""


def beside(method: Method) -> Method:
    """Make the worker run the method in a second thread. The method must have the decorator `register` already.

    The second thread runs the calls of all methods with this decorator in order. These methods must be thread-safe. The
    first thread runs all other methods of the class. Neither thread is the main thread of the process.

    Raises `UsageError` if the method is not registered yet.
    """
    if not hasattr(method, MAGIC_ATTR):
        raise UsageError(f"{method.__qualname__} has no @register; put @beside above @register")
    getattr(method, MAGIC_ATTR)[BESIDE] = True
    return method


def runs_beside(method: Any) -> bool:
    """Return whether a method has the decorator `beside`."""
    return BESIDE in getattr(method, MAGIC_ATTR, {})


@contextmanager
def _named(worker: Any, method_name: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        rank = getattr(worker, "_rank", None)
        if rank is not None:
            error.add_note(f"in {type(worker).__name__}.{method_name} on rank {rank}")
        raise


def _check_dispatch_mode(dispatch_mode: Any) -> None:
    if isinstance(dispatch_mode, dict):
        missing = {"dispatch_fn", "collect_fn"} - dispatch_mode.keys()
        if missing:
            raise UsageError(f"dispatch_mode lacks {sorted(missing)}; set both dispatch_fn and collect_fn")
    elif not isinstance(dispatch_mode, Dispatch):
        raise UsageError(
            f"dispatch_mode must be a Dispatch or a dict with dispatch_fn and collect_fn, got {dispatch_mode!r}"
        )


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def mapped(change: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Apply the function ``change`` to each argument of a call. Return the new (args, kwargs)."""
    return tuple(map(change, args)), {key: change(value) for key, value in kwargs.items()}


def _materialize_futures(*args: Any, **kwargs: Any) -> Arguments:
    return mapped(lambda value: value.get() if isinstance(value, DataProtoFuture) else value, args, kwargs)


async def materialize_async(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the (args, kwargs) of a call with each `DataProtoFuture` replaced by its result.

    The event loop is not blocked while the results are fetched.
    """
    futures = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProtoFuture)]
    results = {id(future): await future for future in futures}
    return mapped(lambda value: results.get(id(value), value), args, kwargs)


Dispatched = tuple[Any, dict[str, Any]]


def dispatch_one_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Repeat each argument for every rank. Return (args, kwargs), whose values are lists with one entry per rank."""
    return mapped(lambda value: [value] * worker_group.world_size, args, kwargs)


def dispatch_all_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Return the (args, kwargs) of a call unchanged.

    If every argument is a list with one entry per rank, `execute_all` gives each rank its entry. Otherwise every rank
    receives all arguments.
    """
    return args, kwargs


def collect_all_to_all(worker_group: Any, output: Any) -> Any:
    """Return ``output`` unchanged: a list with one result per rank, or one result if only rank 0 was called."""
    return output


def dispatch_dp_compute(worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Check that every argument of a call is a list or tuple with one entry per rank. Return (args, kwargs).

    In the returned (args, kwargs), each argument is a list. Raises `UsageError` if an argument has another form.
    """
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, list | tuple) or len(value) != worker_group.world_size:
            raise UsageError(
                f"argument {name!r} must be a list with one entry for each of {worker_group.world_size} ranks, "
                f"got {type(value).__name__}; use Dispatch.ONE_TO_ALL to send the same to all"
            )
    return mapped(list, args, kwargs)


def collect_dp_compute(worker_group: Any, output: Any) -> Any:
    """Return the list of results, one per rank. Raises `UsageError` if there are more or fewer results."""
    if len(output) != worker_group.world_size:
        raise UsageError(f"expected {worker_group.world_size} results, got {len(output)}; run the method on all ranks")
    return output


def dispatch_dp_compute_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Cut the rows of each argument into one part per rank.

    Each argument must be a `DataProto`, a `DataProtoFuture` or a TensorDict. Returns (args, kwargs), whose values are
    lists with one entry per rank. If a `DataProto` has padding enabled, this function cuts a padded copy instead. The
    returned ``kwargs`` then also has the number of appended rows, under `_padding_size_key`.
    """
    return _split_args_kwargs_data_proto_with_auto_padding(worker_group.world_size, *args, **kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Repeat the first argument for every rank. Cut the rows of the other arguments into one part per rank.

    Returns (args, kwargs) in the same form as `dispatch_dp_compute_data_proto`. Raises `UsageError` if the first
    argument is not a Python function (``def`` or ``lambda``).
    """
    if not args or not isinstance(args[0], FunctionType):
        raise UsageError(f"the first argument must be a function, got {type(args[0]).__name__ if args else 'none'}")
    num_workers = worker_group.world_size
    split_args, split_kwargs = _split_args_kwargs_data_proto_with_auto_padding(num_workers, *args[1:], **kwargs)
    return ([args[0]] * num_workers, *split_args), split_kwargs


def collect_dp_compute_data_proto(worker_group: Any, output: Any) -> Any:
    """Concatenate the rows of the results of all ranks. If the results are references, return a `DataProtoFuture`."""
    return _concat_data_proto_or_future(collect_dp_compute(worker_group, output))


def dummy_direct_rollout_call(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise `UsageError`, because a worker group cannot call a method with the mode ``DIRECT_ROLLOUT_METHOD``."""
    raise UsageError("a DIRECT_ROLLOUT_METHOD is called on the worker itself, not through the worker group")


def dispatch_nd_compute(
    dp_rank_mapping: list[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> Dispatched:
    """Give each rank one part of every argument. Return (args, kwargs), whose values are lists with one entry per rank.

    Every argument is a list of ``dp_size`` parts. ``dp_rank_mapping`` has the index of the part that each rank gets,
    such as ``[0, 0, 1, 1]``. This function puts each part once into Ray's object store, and gives the ranks references.
    If the parts are `DataProtoFuture` objects, the ranks get the parts themselves.
    """

    def handed_out(name: Any, parts: Any) -> list[Any]:
        if not isinstance(parts, list | tuple) or len(parts) != dp_size:
            raise UsageError(f"argument {name!r} must be a list of {dp_size} parts, one for each dp rank")
        is_future = any(isinstance(part, DataProtoFuture) for part in parts)
        handed = list(parts) if is_future else parallel_put(list(parts))
        return [handed[dp_rank] for dp_rank in dp_rank_mapping]

    all_args = tuple(handed_out(index, arg) for index, arg in enumerate(args))
    return all_args, {key: handed_out(key, value) for key, value in kwargs.items()}


def collect_nd_compute(collect_mask: list[bool], worker_group: Any, output: Any) -> Any:
    """Return a list of the results of the ranks that ``collect_mask`` selects. The mask has one bool per rank."""
    collect_dp_compute(worker_group, output)
    return [result for result, is_collect in zip(output, collect_mask, strict=True) if is_collect]


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: list[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> Dispatched:
    """Cut the rows of each argument into ``dp_size`` parts, and give each rank one of the parts.

    ``dp_rank_mapping`` has the index of the part that each rank gets. The arguments, the padding and the returned
    ``kwargs`` are as in `dispatch_dp_compute_data_proto`. The ranks get references as in `dispatch_nd_compute`.
    """
    split_args, split_kwargs = _split_args_kwargs_data_proto_with_auto_padding(dp_size, *args, **kwargs)
    padding = {key: split_kwargs.pop(key) for key in (_padding_size_key,) if key in split_kwargs}
    handed_args, handed_kwargs = dispatch_nd_compute(
        dp_rank_mapping, dp_size, worker_group, *split_args, **split_kwargs
    )
    return handed_args, handed_kwargs | padding


def collect_nd_compute_dataproto(collect_mask: list[bool], worker_group: Any, output: Any) -> Any:
    """Concatenate the rows of the results of the ranks that ``collect_mask`` selects.

    The mask has one bool per rank. If the results are references, return a `DataProtoFuture`.
    """
    return _concat_data_proto_or_future(collect_nd_compute(collect_mask, worker_group, output))


def dispatch_lazy_compute_data_proto(mesh_name: str, worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Cut the rows of every argument into one part per dp rank, and give each worker the part of its dp rank.

    Each worker must have registered its dp rank in the mesh ``mesh_name``. The first call of this function for a group
    asks the workers for their dp ranks. Returns (args, kwargs) like `dispatch_nd_compute_dataproto`.
    """
    if mesh_name not in worker_group._dispatch_info:
        worker_group._dispatch_info[mesh_name] = worker_group._query_dispatch_info(mesh_name)
    mapping = worker_group._dispatch_info[mesh_name]
    return dispatch_nd_compute_dataproto(mapping, max(mapping) + 1, worker_group, *args, **kwargs)


def collect_lazy_compute_data_proto(mesh_name: str, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Concatenate the rows of the results of one worker per dp rank. Ignore the results of the other workers.

    Each worker must have registered in the mesh ``mesh_name`` whether its result is used. If the results are
    references, return a `DataProtoFuture`.
    """
    return collect_nd_compute_dataproto(_collect_mask(mesh_name, worker_group), worker_group, *args, **kwargs)


def silent_ranks(worker_group: Any, collect_fn: Callable[..., Any]) -> frozenset[int]:
    """Return the ranks whose results ``collect_fn`` ignores. These ranks need to send only errors.

    If ``collect_fn`` does not come from `make_nd_compute_dataproto_dispatch_fn`, the set is empty.
    """
    if not isinstance(collect_fn, partial) or collect_fn.func is not collect_lazy_compute_data_proto:
        return frozenset()
    mask = _collect_mask(collect_fn.args[0], worker_group)
    return frozenset(rank for rank, is_collect in enumerate(mask) if not is_collect)


def _collect_mask(mesh_name: str, worker_group: Any) -> list[bool]:
    if mesh_name not in worker_group._collect_info:
        worker_group._collect_info[mesh_name] = worker_group._query_collect_info(mesh_name)
    return worker_group._collect_info[mesh_name]


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """Return a dict with the functions ``dispatch_fn`` and ``collect_fn``. Pass it to `register` as ``dispatch_mode``.

    A call of the registered method cuts each batch into one part per dp rank of the mesh ``mesh_name``. Before the
    first call, each worker must register its dp rank in this mesh with ``_register_dispatch_collect_info``.
    """
    return {
        "dispatch_fn": partial(dispatch_lazy_compute_data_proto, mesh_name),
        "collect_fn": partial(collect_lazy_compute_data_proto, mesh_name),
    }


DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, dict[str, Callable[..., Any]]] = {
    mode: {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    for mode, dispatch_fn, collect_fn in (
        (Dispatch.RANK_ZERO, dispatch_all_to_all, collect_all_to_all),
        (Dispatch.ONE_TO_ALL, dispatch_one_to_all, collect_all_to_all),
        (Dispatch.ALL_TO_ALL, dispatch_all_to_all, collect_all_to_all),
        (Dispatch.DP_COMPUTE, dispatch_dp_compute, collect_dp_compute),
        (Dispatch.DP_COMPUTE_PROTO, dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
        (Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto),
        (Dispatch.DP_COMPUTE_METRIC, dispatch_dp_compute_data_proto, collect_dp_compute),
        (Dispatch.DIRECT_ROLLOUT_METHOD, dummy_direct_rollout_call, dummy_direct_rollout_call),
    )
}

_EXECUTE_FN_NAMES = {Execute.ALL: "execute_all", Execute.RANK_ZERO: "execute_rank_zero"}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> dict[str, Callable[..., Any]]:
    """Return a dict with the functions ``dispatch_fn`` and ``collect_fn`` of a dispatch mode.

    Raises `UsageError` if the dispatch mode has no such functions.
    """
    if dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        raise UsageError(f"dispatch mode {dispatch_mode!r} has no functions; add the mode with register_dispatch_mode")
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """Return a dict with the entry ``execute_fn_name``: the name of the worker group's method for this execute mode.

    The method of the group calls a method of all workers, or of rank 0.
    """
    return {"execute_fn_name": _EXECUTE_FN_NAMES[execute_mode]}


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> Dispatch:
    """Add a mode to `Dispatch`, and return the mode. Raises `ValueError` if the name exists already.

    Args:
        dispatch_mode_name: Name of the new mode, in upper or lower case. The mode gets the name in upper case. Example:
            ``"mine"`` adds ``Dispatch.MINE``.
        dispatch_fn: Function that turns ``(group, *args, **kwargs)`` into ``(args, kwargs)``. Each new argument is a
            list with one entry per rank.
        collect_fn: Function that turns ``(group, results)`` into the caller's result.
    """
    dispatch_mode: Dispatch = Dispatch.register(dispatch_mode_name.upper())
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    return dispatch_mode


def update_dispatch_mode(
    dispatch_mode: Dispatch, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the functions of a dispatch mode. Worker groups that exist already keep the old functions.

    Raises `UsageError` for an unknown mode.
    """
    if not isinstance(dispatch_mode, Dispatch):
        raise UsageError(f"dispatch_mode must be a Dispatch, got {dispatch_mode!r}; to use a dict, call register")
    get_predefined_dispatch_fn(dispatch_mode)
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def _split_args_kwargs_data_proto(chunks: int, *args: Any, **kwargs: Any) -> Dispatched:
    split_args = [_chunked(index, arg, chunks) for index, arg in enumerate(args)]
    return split_args, {key: _chunked(key, value, chunks) for key, value in kwargs.items()}


def _split_args_kwargs_data_proto_with_auto_padding(chunks: int, *args: Any, **kwargs: Any) -> Dispatched:
    """Copy each batch that has padding enabled, and append rows to the copy. Cut all arguments into ``chunks`` parts.

    All batches with padding enabled must have the same number of rows. Each copy gets the same number of new rows. The
    returned ``kwargs`` then has this number under `_padding_size_key`.

    If there is such a batch, the results of `DataProtoFuture` arguments get new rows too, when the results are fetched.
    These results must have as many rows as the batch. A result without padding enabled gets no new rows.
    """
    lengths = {len(value) for value in (*args, *kwargs.values()) if _asks_for_padding(value)}
    if not lengths:
        return _split_args_kwargs_data_proto(chunks, *args, **kwargs)
    if len(lengths) > 1:
        raise UsageError(f"padded arguments must have the same length, got {sorted(lengths)}")
    num_rows = lengths.pop()
    padding_size = -num_rows % chunks
    args, kwargs = mapped(partial(_padded, num_rows=num_rows, padding_size=padding_size), args, kwargs)
    split_args, split_kwargs = _split_args_kwargs_data_proto(chunks, *args, **kwargs)
    return split_args, {**split_kwargs, _padding_size_key: padding_size}


def _asks_for_padding(value: Any) -> bool:
    return not isinstance(value, DataProtoFuture) and getattr(value, "is_padding_enabled", bool)()


def _padded(value: Any, num_rows: int, padding_size: int) -> Any:
    if padding_size and isinstance(value, DataProtoFuture):
        return value.then(partial(_padded, num_rows=num_rows, padding_size=padding_size))
    if padding_size == 0 or not _asks_for_padding(value):
        return value
    if len(value) != num_rows:
        raise UsageError(f"padded arguments must have the same length, got {sorted({len(value), num_rows})}")
    padded = value.slice()
    padded.padding(padding_size)
    return padded


def _chunked(name: Any, value: Any, chunks: int) -> list[Any]:
    from tensordict import TensorDictBase

    if not hasattr(value, "chunk"):
        raise UsageError(
            f"argument {name!r} must be a DataProto or a DataProtoFuture, got {type(value).__name__}; "
            "put other values into meta_info"
        )
    if isinstance(value, TensorDictBase) and len(value) % chunks:
        raise UsageError(f"argument {name!r} has {len(value)} rows, which cannot be cut into {chunks} equal parts")
    return list(BatchData(value).chunk(chunks) if isinstance(value, TensorDictBase) else value.chunk(chunks=chunks))


def _concat_data_proto_or_future(output: list[Any]) -> Any:
    return DataProtoFuture.concat(output) if _is_reference(output[0]) else merge(output)


_MAX_THREADS = 16


def parallel_put(data_list: list[Any], max_workers: int | None = None) -> list[Any]:
    """Put values into Ray's object store from parallel threads. Return Ray references in the order of the values.

    ``data_list`` must not be empty. ``max_workers`` is the number of threads; by default one per value, at most 16.
    """
    import ray

    if not data_list:
        raise UsageError("parallel_put needs at least one value, got an empty list")
    if len(data_list) == 1:
        return [ray.put(data_list[0])]
    with ThreadPoolExecutor(max_workers or min(len(data_list), _MAX_THREADS)) as threads:
        return list(threads.map(ray.put, data_list))
