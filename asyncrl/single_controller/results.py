"""What a call that does not block returns: Ray's references, which can also be awaited and have deadlines."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import ray

from asyncrl.protocol.remote import fetch, fetch_async


class PendingResults(list[Any]):
    """References to the results of all ranks: a list for ``ray.get``, and awaitable."""

    def get(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for all results, in the order of the ranks.

        Raises:
            DeadlineError: they were not there within ``timeout_s`` seconds.
            WorkerDiedError: a worker died.
        """
        return fetch(self, timeout_s)

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return fetch_async(self).__await__()


class PendingResult(ray.ObjectRef):
    """A reference to one rank's result: a reference for Ray, and its errors name the worker."""

    def __init__(self, ref: ray.ObjectRef) -> None:
        super().__init__(ref.binary(), ref.owner_address(), ref.call_site())
        self.ref = ref

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for the result. Raises as `PendingResults.get` does."""
        return fetch([self.ref], timeout_s)[0]

    def __await__(self) -> Generator[Any, None, Any]:
        return self._fetch().__await__()

    async def _fetch(self) -> Any:
        return (await fetch_async([self.ref]))[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.ref,)


def _same(ref: ray.ObjectRef) -> ray.ObjectRef:
    return ref
