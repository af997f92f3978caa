"""Notices one stream of an engine that has stalled while others of the same engine go on.

`SilenceWatch` notices an engine of which nothing comes at all. A single connection can stall too: a proxy that forgets
it, a network that drops its packets. What had come by then is kept, and its samples go on by other requests.

Silence is right while generation is paused, and while a sample waits inside the engine for room. So a stream that is
silent for the whole deadline is suspected, the engine is asked how many samples wait, and so many silent ones are
excused, those that were sent last first. The others' samples are aborted: a stream that lives ends by that.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from asyncrl.core.errors import DeadlineError

from .engine import PROBE_SHARE, EngineLoad


@dataclass(eq=False, kw_only=True)
class Stream:
    """One connection on which an engine answers samples.

    Attributes:
        unanswered: Ids of the samples whose last token has not come.
        reader: The task that reads it.
        silent_since_s: When its deadline began, on the monotonic clock: something came of it, or a pause ended.
        is_suspected: Its samples were aborted because nothing came of it.
        has_stalled: It did not even end by that, and its reader is cancelled.
        has_ended: Set when nobody reads it any more.
    """

    unanswered: set[str]
    reader: asyncio.Task[None]
    silent_since_s: float = 0.0
    is_suspected: bool = False
    has_stalled: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)


class StreamWatch:
    """Watches the streams of one engine; run `wait` while the engine lives.

    Args:
        name: The engine's, for messages.
        timeout_s: How long a stream may be silent where nothing excuses it.
        read_load: Asks the engine for its load.
        abort: Aborts samples by their ids.
        most: The engine has failed at so many stalled streams within ``window_s``.
        window_s: Streams that stalled before count no more.
        on_stalled: Called with words for people for each stream that stalled.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        read_load: Callable[[], Awaitable[EngineLoad]],
        abort: Callable[[set[str]], Awaitable[None]],
        most: int,
        window_s: float,
        on_stalled: Callable[[str], None],
    ) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._read_load = read_load
        self._abort = abort
        self._most = most
        self._window_s = window_s
        self._on_stalled = on_stalled
        self._streams: dict[Stream, None] = {}  # in the order in which they were opened
        self._heard_s = -math.inf
        self._is_paused = False
        self._watching = asyncio.Event()
        self._stalled_at: list[float] = []

    @contextmanager
    def reading(self, stream: Stream) -> Iterator[None]:
        """A stream is read inside the block."""
        stream.silent_since_s = time.monotonic()
        self._streams[stream] = None
        self._change()
        try:
            yield
        finally:
            del self._streams[stream]
            stream.has_ended.set()
            self._change()

    def heard(self, stream: Stream) -> None:
        """Something came of a stream."""
        self._heard_s = stream.silent_since_s = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Generation stands still on purpose inside the block; after it every stream has the whole deadline again."""
        self._is_paused = True
        self._change()
        try:
            yield
        finally:
            for stream in self._streams:
                stream.silent_since_s = time.monotonic()
            self._is_paused = False
            self._change()

    async def wait(self) -> NoReturn:
        """Cut off streams that stall; raises `DeadlineError` when too many have, or the engine does not say its load.

        Raises `EngineError` too, as the engine does.
        """
        rests_until_s = 0.0
        while True:
            while not self._watching.is_set():
                await self._watching.wait()
            oldest_s = min(stream.silent_since_s for stream in self._streams)
            due_s = max(rests_until_s, oldest_s + self._timeout_s)
            left_s = due_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            stalled = await self._find_stalled()
            await asyncio.gather(*map(self._cut, stalled))
            self._check_number()
            rests_until_s = time.monotonic() + PROBE_SHARE * self._timeout_s

    def _change(self) -> None:
        if self._streams and not self._is_paused:
            self._watching.set()
        else:
            self._watching.clear()

    def _silent(self) -> list[Stream]:
        """The streams that are silent for the whole deadline; none where nothing else comes either, or in a pause."""
        now_s = time.monotonic()
        if self._is_paused or self._heard_s <= now_s - PROBE_SHARE * self._timeout_s:
            return []
        return [stream for stream in self._streams if stream.silent_since_s <= now_s - self._timeout_s]

    async def _find_stalled(self) -> list[Stream]:
        """The silent streams that nothing excuses."""
        if not self._silent():
            return []
        try:
            async with asyncio.timeout(PROBE_SHARE * self._timeout_s):
                load = await self._read_load()
        except TimeoutError:
            raise DeadlineError(
                f"{self._name} answered {len(self._silent())} of its {len(self._streams)} streams nothing within "
                f"rollout_fleet.silence_timeout_s = {self._timeout_s:g} s, and did not say its load within "
                f"{PROBE_SHARE * self._timeout_s:g} s"
            ) from None
        return beyond_queue(self._silent(), load.num_waiting)

    async def _cut(self, stream: Stream) -> None:
        """Abort the samples of a silent stream; one that does not end by that has stalled."""
        stream.is_suspected = True
        grace_s = PROBE_SHARE * self._timeout_s
        try:
            async with asyncio.timeout(grace_s):
                await self._abort(set(stream.unanswered))
                await stream.has_ended.wait()
        except TimeoutError:
            stream.has_stalled = True
            stream.reader.cancel()
            self._stalled_at.append(time.monotonic())
            self._on_stalled(
                f"a stream of {self._name} with {len(stream.unanswered)} samples stalled: nothing came of it within "
                f"rollout_fleet.silence_timeout_s = {self._timeout_s:g} s, nor {grace_s:g} s after they were aborted"
            )

    def _check_number(self) -> None:
        since_s = time.monotonic() - self._window_s
        self._stalled_at = [at_s for at_s in self._stalled_at if at_s > since_s]
        if len(self._stalled_at) >= self._most:
            raise DeadlineError(
                f"{len(self._stalled_at)} streams of {self._name} stalled within rollout_fleet.restart_window_s = "
                f"{self._window_s:g} s, while others went on"
            )


def beyond_queue(silent: Sequence[Stream], num_waiting: int) -> list[Stream]:
    """The silent streams, in the order they were opened, that are not excused by samples that wait in the engine.

    The engine says how many wait, not which. It begins those that were sent first, so that the last are excused.
    Example: of streams with 4, 2 and 3 samples, 5 that wait excuse the last two.
    """
    num_excused = 0
    for place in range(len(silent) - 1, -1, -1):
        num_excused += len(silent[place].unanswered)
        if num_excused > num_waiting:
            return list(silent[: place + 1])
    return []
