"""Simulated time: simpy's clock, the event loop that code with asyncio timers finds on it, and shared processors.

The buffer waits with asyncio timers. `SimulatedLoop` is the event loop that it finds: its clock is simpy's, and a timer
becomes a simpy event.
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
"""Deadlines of a simulated buffer: no simulated client dies, and none is answered "nothing yet"."""


_COLLECT_EVERY = 200_000


class SimulatedLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as timers need, on a simpy clock."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._never = asyncio.TimerHandle(NEVER_S, lambda: None, (), self)  # of most calls: one handle for all

    def time(self) -> float:
        """Now, in simulated seconds."""
        return self._env.now

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        """Call back after ``delay`` seconds; never, where that is `NEVER_S` or more."""
        if delay >= NEVER_S / 2:
            return self._never
        handle = asyncio.TimerHandle(self._env.now + delay, callback, arguments, self, context)
        call_after(self._env, delay, lambda: None if handle.cancelled() else handle._run())
        return handle

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        """Call back at ``when``."""
        return self.call_later(when - self._env.now, callback, *arguments, context=context)

    def get_debug(self) -> bool:
        """Timers ask; there is no debug mode."""
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer stays on simpy's queue, and does nothing when it is due."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the running loop of this thread, in the place of whichever runs; nothing else of it runs meanwhile.

        The buffer's warnings are of a run that does not take place, and are not logged. Garbage is looked for rarely:
        most of the many objects of a large simulation stay, and each look would visit them all.
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
    """The loop's clock, which never stalls."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        """See `LoopClock.time`."""
        return self._loop.time()

    def close(self) -> None:
        """See `LoopClock.close`."""


def call_after(env: simpy.Environment, delay: float, callback: Callable[[], None]) -> None:
    """Call back after ``delay`` simulated seconds."""
    event = simpy.Timeout(env, delay)
    assert event.callbacks is not None
    event.callbacks.append(lambda _: callback())


class SharedCore:
    """A processor core that everything which runs on it shares equally (processor sharing).

    Work is in seconds that it would take alone. With n jobs each goes on at 1/n of that speed, so that one number, the
    work that a job which runs since the beginning would have done, stands for the progress of all.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []
        self._done_s = self._seen_at = 0.0
        self._number = self._timer = 0
        self.busy_s = 0.0

    @property
    def num_running(self) -> int:
        """Jobs that share it now."""
        return len(self._jobs)

    def run(self, work_s: float, then: Callable[[], None]) -> None:
        """Do so much work, and call ``then``."""
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
        self._timer += 1  # those set before come to nothing
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
