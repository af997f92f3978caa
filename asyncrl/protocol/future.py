"""Results that are still being computed, and may go from one worker group to another without being fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .remote import fetch, fetch_async


def merge(parts: Sequence[Any]) -> Any:
    """Join the results of the collecting ranks, `DataProto`s or TensorDicts, along the batch; None if all are None."""
    from .data_concat import BatchData

    return None if parts and all(part is None for part in parts) else BatchData(parts).concat()


@dataclass
class DataProtoFuture:
    """The results of a call as references: awaited, waited for, or passed on to the call of another group.

    Passed on, only the references go through the driver; the workers that receive it fetch the results themselves.

    Attributes:
        collect_fn: Joins the list of fetched results into one.
        futures: References to the results, one for each collecting rank.
        dispatch_fn: Selects a part of the joined result; None takes all of it.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def concat(data: list[Any]) -> DataProtoFuture:
        """A future of the results behind the references, joined along the batch."""
        return DataProtoFuture(collect_fn=merge, futures=list(data))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """One future for each of ``chunks`` equal parts; nothing is fetched."""
        return [self.then(partial(_part, index=index, chunks=chunks)) for index in range(chunks)]

    def then(self, select: Callable[[Any], Any]) -> DataProtoFuture:
        """The future of ``select(result)``, which is called where the result is fetched."""
        first = self.dispatch_fn
        return replace(self, dispatch_fn=select if first is None else partial(_both, first=first, second=select))

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for the results and join them.

        Raises:
            DeadlineError: they were not there within ``timeout_s`` seconds.
            WorkerDiedError: a worker that was to compute them died.
        """
        return self.resolve(fetch(self.futures, timeout_s))

    def __await__(self) -> Generator[Any, None, Any]:
        return self._finish_async().__await__()

    async def _finish_async(self) -> Any:
        return await asyncio.to_thread(self.resolve, await fetch_async(self.futures))

    def resolve(self, results: list[Any]) -> Any:
        """What `get` returns, from results that were fetched already."""
        joined = self.collect_fn(results)
        return joined if self.dispatch_fn is None else self.dispatch_fn(joined)


def _part(data: Any, index: int, chunks: int) -> Any:
    from .data_concat import BatchData

    return BatchData(data).chunk(chunks)[index]


def _both(data: Any, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Any:
    return second(first(data))
