"""One timer on the loop's monotonic clock, for the earliest of many deadlines that come and go."""

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls back at the earliest time that `at` named since it last did.

    A deadline that moved away is not taken off the loop: the timer fires early, its owner finds nothing due, and names
    the next one. So moving a deadline with every message costs nothing.

    Args:
        on_due: Called at the time; calls `at` again.
    """

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._on_due = on_due
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def at(self, when: float | None) -> None:
        """Be called at ``when`` or earlier; None asks for nothing."""
        if when is None or (self._timer is not None and self._timer.when() <= when):
            return
        self.close()
        self._timer = self._loop.call_at(when, self._fire)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._on_due()
