"""Who was heard of when, and the clock that says so: the loop's monotonic clock without the loop's own stalls.

A loop that was stopped (a debugger, swap, a slow write) reads the messages that came meanwhile only after its timers
have fired. Counted by the wall, its clients would all have been silent. So a gap in the loop's own life does not count.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_LONGEST_GAP_S = 0.5


class LoopClock:
    """Seconds that the running loop was alive, by its own monotonic clock unless a test brings another.

    ``stalled_s`` are the seconds of all gaps, which do not count.
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
    the next one by `at`. So moving a deadline with every message costs nothing.
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


@dataclass(kw_only=True, slots=True)
class _Producer:
    """A client that leases: when it was heard of, and the groups and policy tokens that it stored."""

    last_heard: float
    num_puts: int = 0
    num_tokens: int = 0


class Heartbeats:
    """Producers by client id; one not heard of for ``silent_s`` is gone."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._producers: dict[bytes, _Producer] = {}

    def enter(self, client: bytes, now: float) -> None:
        """A producer is here, and will be heard of again within ``silent_s``."""
        if client not in self._producers:
            self._producers[client] = _Producer(last_heard=now)
        self.hear(client, now)

    def hear(self, client: bytes, now: float) -> None:
        """Any message of a client came; of no effect for one that did not `enter`."""
        producer = self._producers.pop(client, None)
        if producer is not None:
            producer.last_heard = now
            self._producers[client] = producer

    def count_put(self, client: bytes, num_tokens: int) -> None:
        """A producer stored a group."""
        producer = self._producers.get(client)
        if producer is not None:
            producer.num_puts += 1
            producer.num_tokens += num_tokens

    def leave(self, client: bytes) -> None:
        """A producer said goodbye."""
        self._producers.pop(client, None)

    def next_silence(self) -> float | None:
        """When the producer heard of longest ago would be gone; None without producers."""
        longest_ago = next(iter(self._producers.values()), None)
        return None if longest_ago is None else longest_ago.last_heard + self._silent_s

    def take_silent(self, now: float) -> list[bytes]:
        """Remove and return the producers that are gone."""
        gone = []
        for client, producer in self._producers.items():
            if producer.last_heard + self._silent_s > now:
                break
            gone.append(client)
        for client in gone:
            del self._producers[client]
        return gone

    def describe(self, now: float, num_leases: Mapping[bytes, int]) -> list[dict[str, Any]]:
        """What is known of every producer, for people."""
        return [
            {
                "owner": client.hex()[:8],
                "leases": num_leases.get(client, 0),
                "puts": producer.num_puts,
                "tokens": producer.num_tokens,
                "heard_s_ago": round(now - producer.last_heard, 1),
            }
            for client, producer in self._producers.items()
        ]
