"""Time as the buffer measures it: the loop's monotonic clock without the loop's own stalls, and timers on it.

A loop that was stopped (a debugger, swap, a slow write) reads the messages that came meanwhile only after its timers
have fired. Counted by the wall, its clients would all have been silent. So a gap in the loop's own life does not count.
"""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_LONGEST_GAP_S = 0.5


class LoopClock:
    """Seconds that the running loop was alive.

    Args:
        time: The monotonic clock; the loop's own unless a test brings another.

    Attributes:
        stalled_s: Seconds of all gaps, which do not count.
    """

    def __init__(self, time: Callable[[], float] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time if time is None else time
        self.stalled_s = 0.0
        self._last_seen = self._time()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._tick()

    def time(self) -> float:
        """Now."""
        now = self._time()
        gap = now - self._last_seen
        self._last_seen = now
        if gap > _LONGEST_GAP_S:
            self.stalled_s += gap
            logger.info("the loop stood still for %.1f s; every deadline is put off by as much", gap)
        return now - self.stalled_s

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back when the clock shows ``when``; after a stall it is early, and the caller looks at the clock."""
        return self._loop.call_later(max(0.0, when - self.time()), callback)

    def close(self) -> None:
        """Stop watching."""
        if self._tick_handle is not None:
            self._tick_handle.cancel()

    def _tick(self) -> None:
        self.time()
        self._tick_handle = self._loop.call_later(_TICK_S, self._tick)


class Deadline:
    """One timer for the earliest of many deadlines that come and go.

    A deadline that moved away is not taken off the loop: the timer fires early, its owner finds nothing due, and names
    the next one. So moving a deadline with every message costs nothing.

    Args:
        on_due: Called at the earliest time that `at` named since the last call; calls `at` again.
        clock: What the times are measured by.
    """

    def __init__(self, on_due: Callable[[], None], clock: LoopClock) -> None:
        self._on_due = on_due
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._when = 0.0

    def at(self, when: float | None) -> None:
        """Be called at ``when`` or earlier; None asks for nothing."""
        if when is None or (self._timer is not None and self._when <= when):
            return
        self.close()
        self._when = when
        self._timer = self._clock.call_at(when, self._fire)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._on_due()
