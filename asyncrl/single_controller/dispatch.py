"""The dispatch modes: for each, how arguments are split over the ranks and results are put together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from asyncrl.protocol.errors import UsageError
from asyncrl.protocol.future import DataProtoFuture, _padding_size_key, merge

from .decorator import Dispatch, Execute, _check_dispatch_mode

Dispatched = tuple[Any, dict[str, Any]]


def dispatch_one_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """The same arguments for every rank."""
    num_workers = worker_group.world_size
    return tuple([arg] * num_workers for arg in args), {key: [value] * num_workers for key, value in kwargs.items()}


def dispatch_all_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Arguments as they are: lists of one entry per rank are handed out, all else goes to everyone."""
    return args, kwargs


def collect_all_to_all(worker_group: Any, output: Any) -> Any:
    """Results as they are: a list in the order of the ranks."""
    return output


def dispatch_dp_compute(worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Arguments that the caller has split: each is a list with one entry per rank."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, list | tuple) or len(value) != worker_group.world_size:
            raise UsageError(
                f"argument {name!r} must be a list with one entry for each of {worker_group.world_size} ranks, "
                f"got {type(value).__name__}; use Dispatch.ONE_TO_ALL to send the same to all"
            )
    return tuple(list(arg) for arg in args), {key: list(value) for key, value in kwargs.items()}


def collect_dp_compute(worker_group: Any, output: Any) -> Any:
    """A list in the order of the ranks."""
    if len(output) != worker_group.world_size:
        raise UsageError(f"expected {worker_group.world_size} results, got {len(output)}; run the method on all ranks")
    return output


def dispatch_dp_compute_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Split every `DataProto` evenly over the ranks; padded where the data asks for it."""
    return _split_args_kwargs_data_proto_with_auto_padding(worker_group.world_size, *args, **kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """The first argument, a function, goes to every rank; the data behind it is split."""
    if not args or not isinstance(args[0], FunctionType):
        raise UsageError(f"the first argument must be a function, got {type(args[0]).__name__ if args else 'none'}")
    num_workers = worker_group.world_size
    split_args, split_kwargs = _split_args_kwargs_data_proto_with_auto_padding(num_workers, *args[1:], **kwargs)
    return ([args[0]] * num_workers, *split_args), split_kwargs


def collect_dp_compute_data_proto(worker_group: Any, output: Any) -> Any:
    """One `DataProto` of the ranks' results, or the future of it."""
    return _concat_data_proto_or_future(collect_dp_compute(worker_group, output))


def dummy_direct_rollout_call(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """A direct rollout method is called on the worker, by the engine; never through the group."""
    raise UsageError("a DIRECT_ROLLOUT_METHOD is called on the worker itself, not through the worker group")


def dispatch_nd_compute(
    dp_rank_mapping: list[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> Dispatched:
    """Hand part ``dp_rank_mapping[rank]`` of every argument to each rank; a part travels once, however many read it.

    Args:
        dp_rank_mapping: For each rank of the group, the part that it receives. Example: ``[0, 0, 1, 1]``.
        dp_size: Number of parts of every argument.
        worker_group: The group.
        args: Lists of ``dp_size`` parts.
        kwargs: The same, by name.
    """
    from .object_store import parallel_put

    def handed_out(name: Any, parts: Any) -> list[Any]:
        if not isinstance(parts, list | tuple) or len(parts) != dp_size:
            raise UsageError(f"argument {name!r} must be a list of {dp_size} parts, one for each dp rank")
        is_future = any(isinstance(part, DataProtoFuture) for part in parts)
        handed = list(parts) if is_future else parallel_put(list(parts))
        return [handed[dp_rank] for dp_rank in dp_rank_mapping]

    all_args = tuple(handed_out(index, arg) for index, arg in enumerate(args))
    return all_args, {key: handed_out(key, value) for key, value in kwargs.items()}


def collect_nd_compute(collect_mask: list[bool], worker_group: Any, output: Any) -> Any:
    """The results of the ranks that the mask selects."""
    collect_dp_compute(worker_group, output)
    return [result for result, is_collect in zip(output, collect_mask, strict=True) if is_collect]


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: list[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> Dispatched:
    """Split every `DataProto` into ``dp_size`` parts, padded where the data asks for it, and hand them out."""
    split_args, split_kwargs = _split_args_kwargs_data_proto_with_auto_padding(dp_size, *args, **kwargs)
    padding = {key: split_kwargs.pop(key) for key in (_padding_size_key,) if key in split_kwargs}
    handed_args, handed_kwargs = dispatch_nd_compute(
        dp_rank_mapping, dp_size, worker_group, *split_args, **split_kwargs
    )
    return handed_args, handed_kwargs | padding


def collect_nd_compute_dataproto(collect_mask: list[bool], worker_group: Any, output: Any) -> Any:
    """One `DataProto` of the results of the ranks that the mask selects, or the future of it."""
    return _concat_data_proto_or_future(collect_nd_compute(collect_mask, worker_group, output))


def dispatch_lazy_compute_data_proto(mesh_name: str, worker_group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """As `dispatch_nd_compute_dataproto`, over a mesh that the workers registered; they are asked once."""
    if mesh_name not in worker_group._dispatch_info:
        worker_group._dispatch_info[mesh_name] = worker_group._query_dispatch_info(mesh_name)
    mapping = worker_group._dispatch_info[mesh_name]
    return dispatch_nd_compute_dataproto(mapping, max(mapping) + 1, worker_group, *args, **kwargs)


def collect_lazy_compute_data_proto(mesh_name: str, worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """As `collect_nd_compute_dataproto`, over a mesh that the workers registered; they are asked once."""
    return collect_nd_compute_dataproto(_collect_mask(mesh_name, worker_group), worker_group, *args, **kwargs)


def silent_ranks(worker_group: Any, collect_fn: Callable[..., Any]) -> frozenset[int]:
    """The ranks whose results a mesh does not collect, and which therefore need not send them."""
    if not isinstance(collect_fn, partial) or collect_fn.func is not collect_lazy_compute_data_proto:
        return frozenset()
    mask = _collect_mask(collect_fn.args[0], worker_group)
    return frozenset(rank for rank, is_collect in enumerate(mask) if not is_collect)


def _collect_mask(mesh_name: str, worker_group: Any) -> list[bool]:
    if mesh_name not in worker_group._collect_info:
        worker_group._collect_info[mesh_name] = worker_group._query_collect_info(mesh_name)
    return worker_group._collect_info[mesh_name]


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """The dispatch mode of a mesh, for `register`; workers state their place by ``_register_dispatch_collect_info``."""
    return {
        "dispatch_fn": partial(dispatch_lazy_compute_data_proto, mesh_name),
        "collect_fn": partial(collect_lazy_compute_data_proto, mesh_name),
    }


DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, dict[str, Callable[..., Any]]] = {
    Dispatch.RANK_ZERO: {"dispatch_fn": dispatch_all_to_all, "collect_fn": collect_all_to_all},
    Dispatch.ONE_TO_ALL: {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_all_to_all},
    Dispatch.ALL_TO_ALL: {"dispatch_fn": dispatch_all_to_all, "collect_fn": collect_all_to_all},
    Dispatch.DP_COMPUTE: {"dispatch_fn": dispatch_dp_compute, "collect_fn": collect_dp_compute},
    Dispatch.DP_COMPUTE_PROTO: {
        "dispatch_fn": dispatch_dp_compute_data_proto,
        "collect_fn": collect_dp_compute_data_proto,
    },
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: {
        "dispatch_fn": dispatch_dp_compute_data_proto_with_func,
        "collect_fn": collect_dp_compute_data_proto,
    },
    Dispatch.DP_COMPUTE_METRIC: {"dispatch_fn": dispatch_dp_compute_data_proto, "collect_fn": collect_dp_compute},
    Dispatch.DIRECT_ROLLOUT_METHOD: {"dispatch_fn": dummy_direct_rollout_call, "collect_fn": dummy_direct_rollout_call},
}

_EXECUTE_FN_NAMES = {Execute.ALL: "execute_all", Execute.RANK_ZERO: "execute_rank_zero"}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> dict[str, Callable[..., Any]]:
    """The two functions of a mode. Raises `UsageError` where it was named, but never given any."""
    if dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        raise UsageError(f"dispatch mode {dispatch_mode!r} has no functions; add it with register_dispatch_mode")
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """The name of the group's method that runs a call in this mode."""
    return {"execute_fn_name": _EXECUTE_FN_NAMES[execute_mode]}


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> Dispatch:
    """Add a mode, which ``Dispatch.NAME`` names from then on.

    Args:
        dispatch_mode_name: Its name.
        dispatch_fn: ``(group, *args, **kwargs)`` to ``(args, kwargs)`` whose values are lists of one entry per rank.
        collect_fn: ``(group, results)`` to what the caller receives.

    Raises:
        ValueError: there is such a mode already.
    """
    dispatch_mode: Dispatch = Dispatch.register(dispatch_mode_name.upper())
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    return dispatch_mode


def update_dispatch_mode(
    dispatch_mode: Dispatch, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the functions of a mode, for the groups made from then on.

    Raises:
        UsageError: there is no such mode.
    """
    _check_dispatch_mode(dispatch_mode)
    get_predefined_dispatch_fn(dispatch_mode)
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


def _split_args_kwargs_data_proto(chunks: int, *args: Any, **kwargs: Any) -> Dispatched:
    """Cut every argument into ``chunks`` parts; each must be a `DataProto`, a future of one or a TensorDict."""
    split_args = [_chunked(index, arg, chunks) for index, arg in enumerate(args)]
    return split_args, {key: _chunked(key, value, chunks) for key, value in kwargs.items()}


def _split_args_kwargs_data_proto_with_auto_padding(chunks: int, *args: Any, **kwargs: Any) -> Dispatched:
    """As `_split_args_kwargs_data_proto`, with rows added, all by the same number, to the arguments that ask for it."""
    lengths = {len(value) for value in (*args, *kwargs.values()) if _asks_for_padding(value)}
    if not lengths:
        return _split_args_kwargs_data_proto(chunks, *args, **kwargs)
    if len(lengths) > 1:
        raise UsageError(f"padded arguments must have the same length, got {sorted(lengths)}")
    padding_size = -lengths.pop() % chunks
    split_args, split_kwargs = _split_args_kwargs_data_proto(
        chunks,
        *(_padded(arg, padding_size) for arg in args),
        **{key: _padded(value, padding_size) for key, value in kwargs.items()},
    )
    return split_args, {**split_kwargs, _padding_size_key: padding_size}


def _asks_for_padding(value: Any) -> bool:
    return not isinstance(value, DataProtoFuture) and getattr(value, "is_padding_enabled", bool)()


def _padded(value: Any, padding_size: int) -> Any:
    """The value with its last row repeated, where it asks for that; its owner's rows stay as they are."""
    if padding_size == 0 or not _asks_for_padding(value):
        return value
    padded = value.slice()
    padded.padding(padding_size)
    return padded


def _chunked(name: Any, value: Any, chunks: int) -> list[Any]:
    """The value in equal parts, where it knows how to be cut."""
    from tensordict import TensorDictBase

    from asyncrl.protocol.future import BatchData

    if not hasattr(value, "chunk"):
        raise UsageError(
            f"argument {name!r} must be a DataProto or a DataProtoFuture, got {type(value).__name__}; "
            "put other values into meta_info"
        )
    if isinstance(value, TensorDictBase) and len(value) % chunks:  # torch would cut it unevenly
        raise UsageError(f"argument {name!r} has {len(value)} rows, which {chunks} ranks cannot share evenly")
    if isinstance(value, TensorDictBase):
        return list(BatchData(value).chunk(chunks))
    return list(value.chunk(chunks=chunks))


def _concat_data_proto_or_future(output: list[Any]) -> Any:
    import ray

    if isinstance(output[0], ray.ObjectRef):
        return DataProtoFuture.concat(output)
    return merge(output)
