"""Restarts a component of a run after each failure. A *life* of the component lasts from a start to the next failure.

    begin ──▶ watch ──raises──▶ end ──▶ pause ──▶ begin ──▶ watch …
      └─────── raises ───────────▲

A run calls `keep_up` for each rollout worker, the buffer server, the stores of trajectories and the learner's ranks.
`Faults` decides whether a component restarts, and how long the pause before the restart is.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from asyncrl.core.errors import WorkerDiedError

T = TypeVar("T")


class Faults:
    """Decides after each fault of a component whether the component restarts, and when.

    Args:
        restarts: Largest number of restarts within ``window_s``. After one more fault, the component stays down.
        window_s: A fault is forgotten after this many seconds; with infinity, no fault is forgotten.
        backoff_s: Pause before the second restart within ``window_s``. Each further restart doubles the pause.
        longest_backoff_s: Longest pause before a restart.

    Attributes:
        restarts: The argument ``restarts``.
        num_restarts: Number of restarts that `add` has allowed so far.
    """

    def __init__(
        self,
        restarts: int,
        *,
        window_s: float = math.inf,
        backoff_s: float = 0.0,
        longest_backoff_s: float = math.inf,
    ) -> None:
        self.restarts = restarts
        self.num_restarts = 0
        self._window_s = window_s
        self._backoff_s = backoff_s
        self._longest_backoff_s = longest_backoff_s
        self._times: deque[float] = deque()

    def add(self, now: float) -> float | None:
        """Record a fault at the time ``now``, in seconds. All calls must use the same clock.

        Returns the seconds to wait before the restart; None if the component must not restart. Example: with
        ``backoff_s`` 1, the results for the first four faults are 0, 1, 2 and 4.
        """
        while self._times and self._times[0] + self._window_s <= now:
            self._times.popleft()
        num_before = len(self._times)
        self._times.append(now)
        if num_before >= self.restarts:
            return None
        self.num_restarts += 1
        doublings = min(num_before - 1, 63)  # a larger power of two might overflow
        return min(self._longest_backoff_s, self._backoff_s * 2.0**doublings) if num_before else 0.0


class Restartable(Protocol):
    """A component that `keep_up` restarts. `keep_up` calls one method at a time."""

    async def begin(self) -> None:
        """Start the component, and wait until it is ready."""
        ...

    async def watch(self) -> None:
        """Wait until the component fails, and raise its error. Return without an error after the component finishes."""
        ...

    async def end(self, fault: Exception) -> float:
        """Record ``fault``, the error of the component, and release the component's resources.

        Returns the pause before the next start, in seconds. Raises an error if the component must not be restarted.
        """
        ...


async def keep_up(part: Restartable, *, has_begun: bool = True) -> None:
    """Watch a component, and restart it after each failure, until the component has finished.

    A failure is any exception that the component's `begin` or `watch` raises. If ``has_begun`` is true, the component
    already runs, so `begin` is not called at first. Raises the errors of the component's `end`.
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
