"""Restarts a part of a run whenever it fails. The time between two restarts is a *life* of the part.

    begin ──▶ watch ──raises──▶ end ──▶ pause ──▶ begin ──▶ watch …
      └─────── raises ───────────▲

`keep_up` is the only such loop. It runs for rollout workers, the buffer server, the stores and the learner's ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from asyncrl.core.errors import WorkerDiedError

T = TypeVar("T")


class Restartable(Protocol):
    """A part that `keep_up` restarts. `keep_up` calls one method at a time."""

    async def begin(self) -> None:
        """Start a new life. Returns when the part is ready."""
        ...

    async def watch(self) -> None:
        """Wait for the end of the life, and raise the error that ended it. Return when the part's work is done."""
        ...

    async def end(self, fault: Exception) -> float:
        """Count a life that ``fault`` has ended, and clean up.

        Returns the seconds to pause before the next life. Raises an error if the part must not be restarted.
        """
        ...


async def keep_up(part: Restartable, *, has_begun: bool = True) -> None:
    """Restart a part until its work is done. Any exception of `Restartable.begin` or `Restartable.watch` ends a life.

    Raises what `Restartable.end` raises.
    """
    while True:
        try:
            if not has_begun:
                await answered(part.begin())
            return await answered(part.watch())
        except Exception as error:  # noqa: BLE001 - after any error, the next life may succeed
            fault = error
        await asyncio.sleep(await part.end(fault))
        has_begun = False


async def answered(call: Awaitable[T]) -> T:
    """Await a call. Raises `WorkerDiedError` if Ray cancels the call."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise WorkerDiedError("Ray cancelled a call that was pending") from None
