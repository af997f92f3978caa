"""Results that are still being computed, and batches of any kind cut up and joined. Loads neither torch nor ray."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from asyncrl.core.errors import UsageError
from asyncrl.core.remote import fetch, fetch_async

T = TypeVar("T")

# Dispatch functions put the number of rows they added under this keyword argument; the call takes them off again.
_padding_size_key = "_padding_size_key_x123d"


def merge(parts: Sequence[Any]) -> Any:
    """Join the results of the collecting ranks, `DataProto`s or TensorDicts, along the batch; None if all are None."""
    return None if parts and all(part is None for part in parts) else BatchData(parts).concat()


@dataclass
class DataProtoFuture:
    """The results of a call as references: await it, ``get`` it, or pass it to the call of another group.

    When it is passed on, only references go through the driver; the receiving workers fetch the results.

    Attributes:
        collect_fn: Joins the list of fetched results into one.
        futures: References to the results, one per collecting rank.
        dispatch_fn: Selects a part of the joined result; None takes all of it.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def concat(data: list[Any]) -> DataProtoFuture:
        """A future of the referenced results, joined along the batch."""
        return DataProtoFuture(collect_fn=merge, futures=list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """One future per part, of ``chunks`` equal parts; nothing is fetched."""
        return [self.then(partial(_part, index=index, chunks=chunks)) for index in range(chunks)]

    def then(self, select: Callable[[Any], Any]) -> DataProtoFuture:
        """The future of ``select(result)``; ``select`` runs in the process that fetches the result."""
        first = self.dispatch_fn
        return replace(self, dispatch_fn=select if first is None else partial(_both, first=first, second=select))

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for the results, at most ``timeout_s`` seconds, and join them. Raises as `fetch` does."""
        return self.resolve(fetch(self.futures, timeout_s))

    def __await__(self) -> Generator[Any, None, Any]:
        return self._finish_async().__await__()

    async def _finish_async(self) -> Any:
        return await asyncio.to_thread(self.resolve, await fetch_async(self.futures))

    def resolve(self, results: list[Any]) -> Any:
        """What `get` returns, from results that are fetched already."""
        joined = self.collect_fn(results)
        return joined if self.dispatch_fn is None else self.dispatch_fn(joined)


def _part(data: Any, index: int, chunks: int) -> Any:
    return BatchData(data).chunk(chunks)[index]


def _both(data: Any, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Any:
    return second(first(data))


class BatchData:
    """One batch or a list of batches: `DataProto`, `DataProtoFuture`, TensorDict, or Ray references to them.

    Example: ``BatchData(argument).chunk(chunks=4)``, ``BatchData(results).concat()``.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def is_chunkable(self) -> bool:
        """Whether `chunk` can cut it."""
        return _is_batch(self._data) or isinstance(self._data, DataProtoFuture)

    def is_concatable(self) -> bool:
        """Whether it is a list of at least one batch, or of references."""
        data = self._data
        return isinstance(data, list | tuple) and len(data) > 0 and (_is_batch(data[0]) or _is_reference(data[0]))

    def chunk(self, chunks: int) -> Sequence[Any]:
        """Cut it into parts of its own kind, as `DataProto.chunk` does; a TensorDict only evenly.

        Raises `BatchError` if the rows cannot be cut evenly, `UsageError` if it is of none of these kinds.
        """
        if _is_tensordict(self._data):
            from asyncrl.single_controller import columns  # this process has loaded torch already

            return columns.chunk_tensordict(self._data, chunks)
        if not self.is_chunkable():
            raise UsageError(f"a {type(self._data).__name__} cannot be cut into parts; give a DataProto or TensorDict")
        return self._data.chunk(chunks=chunks)

    def concat(self) -> Any:
        """Concatenate the batches of the list, at least one; for references, return a future of the result."""
        data = self._data
        if not data:
            raise ValueError("an empty list of batches cannot be concatenated")
        if _is_reference(data[0]):
            return DataProtoFuture.concat(list(data))
        if _is_tensordict(data[0]):
            from asyncrl.single_controller import columns

            return columns.concat_tensordict(data)
        if not _is_batch(data[0]):
            raise UsageError(f"results must be DataProto or TensorDict to be joined, got {type(data[0]).__name__}")
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
