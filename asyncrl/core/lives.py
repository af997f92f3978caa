"""Restarts a component of a run whenever it fails. A *life* of the component lasts from a start to the next failure.

    begin ──▶ watch ──raises──▶ end ──▶ pause ──▶ begin ──▶ watch …
      └─────── raises ───────────▲

Runs use `keep_up` for rollout workers, the buffer server, the stores of trajectories and the learner's ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from asyncrl.core.errors import WorkerDiedError

T = TypeVar("T")


class Restartable(Protocol):
    """A component that `keep_up` restarts. `keep_up` calls one method at a time."""

    async def begin(self) -> None:
        """Start the component, and wait until it is ready."""
        ...

    async def watch(self) -> None:
        """Wait until the component fails, and raise its error. Return without an error after the component finishes."""
        ...

    async def end(self, fault: Exception) -> float:
        """Record ``fault``, the error of the component, and clean up after the component.

        Returns the pause before the next start, in seconds. Raises an error if the component must not be restarted.
        """
        ...


async def keep_up(part: Restartable, *, has_begun: bool = True) -> None:
    """Watch a component, and restart it after each failure, until the component has finished.

    A failure is any exception of the component's `begin` or `watch`. If ``has_begun`` is true, the component already
    runs. Raises the errors of the component's `end`.
    """
    while True:
        try:
            if not has_begun:
                await answered(part.begin())
            return await answered(part.watch())
        except Exception as error:  # noqa: BLE001 - a restart can help after any error
            fault = error
        await asyncio.sleep(await part.end(fault))
        has_begun = False


async def answered(call: Awaitable[T]) -> T:
    """Await a call and return its result. Raises `WorkerDiedError` if Ray cancels the call."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise WorkerDiedError("Ray cancelled a call that was pending") from None
