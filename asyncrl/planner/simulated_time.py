"""Simulated time: an event loop for asyncio timers on simpy's clock, and shared CPU cores.

The buffer uses asyncio timers. `SimulatedLoop` is the running event loop of the buffer: it has simpy's clock, and it
turns each timer into a simpy event.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

import simpy

from buffer.heartbeats import LoopClock

NEVER_S = 1e12
"""Deadline of a simulated buffer: simulated clients never die, and their requests never time out."""
_COLLECT_EVERY = 200_000


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that timers need, on a simpy clock."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._never = asyncio.TimerHandle(NEVER_S, lambda: None, (), self)  # shared by all timers that never fire

    def time(self) -> float:
        """The current time in simulated seconds."""
        return self._env.now

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        """Call ``callback`` after ``delay`` seconds; never if the delay is about `NEVER_S` or more."""
        if delay >= NEVER_S / 2:
            return self._never
        handle = asyncio.TimerHandle(self._env.now + delay, callback, arguments, self, context)
        call_after(self._env, delay, lambda: None if handle.cancelled() else handle._run())
        return handle

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        """Call ``callback`` at the time ``when``."""
        return self.call_later(when - self._env.now, callback, *arguments, context=context)

    def get_debug(self) -> bool:
        """Return False: there is no debug mode. Timers call this method."""
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer stays in simpy's queue and has no effect when it is due."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace the running event loop of this thread until the context ends. The replaced loop does not run.

        The context hides the warnings of the simulated buffer. It also makes garbage collection rare: most objects of a
        large simulation stay alive, and each collection visits all of them.
        """
        before, log = events._get_running_loop(), logging.getLogger("buffer")
        events._set_running_loop(self)
        level, thresholds = log.level, gc.get_threshold()
        log.setLevel(logging.ERROR)
        gc.set_threshold(_COLLECT_EVERY)
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)
            log.setLevel(level)
            events._set_running_loop(before)


class SimulatedClock(LoopClock):
    """The clock of a simulated loop; it never stalls."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        """The current time in simulated seconds."""
        return self._loop.time()

    def close(self) -> None:
        """Do nothing: the clock holds no resources."""


def call_after(env: simpy.Environment, delay: float, callback: Callable[[], None]) -> None:
    """Call ``callback`` after ``delay`` simulated seconds."""
    event = simpy.Timeout(env, delay)
    assert event.callbacks is not None
    event.callbacks.append(lambda _: callback())


class SharedCore:
    """A CPU core that all its jobs share equally (processor sharing).

    The work of a job is the seconds that it takes alone. With n jobs, each job runs at 1/n of the full speed. Therefore
    one number represents the progress of all jobs: the work that a job since the start of the simulation would have
    done.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []
        self._done_s = self._seen_at = 0.0
        self._number = self._timer = 0
        self.busy_s = 0.0

    @property
    def num_running(self) -> int:
        """Number of jobs on the core now."""
        return len(self._jobs)

    def run(self, work_s: float, then: Callable[[], None]) -> None:
        """Run a job of ``work_s`` seconds, then call ``then``."""
        self._advance()
        self._number += 1
        heappush(self._jobs, (self._done_s + work_s, self._number, then))
        self._set_timer()

    def _advance(self) -> None:
        passed_s, self._seen_at = self._env.now - self._seen_at, self._env.now
        if self._jobs:
            self.busy_s += passed_s
            self._done_s += passed_s / len(self._jobs)

    def _set_timer(self) -> None:
        self._timer += 1  # invalidates the previous timer
        if self._jobs:
            timer, left_s = self._timer, max(0.0, self._jobs[0][0] - self._done_s) * len(self._jobs)
            call_after(self._env, left_s, lambda: self._end_first(timer))

    def _end_first(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._advance()
        self._done_s = max(self._done_s, self._jobs[0][0])
        _, _, then = heappop(self._jobs)
        self._set_timer()
        then()
