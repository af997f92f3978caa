"""Counts what a rollout worker does and on what its time goes. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from .types import FleetCounters


class FleetMeter:
    """The counters of one worker. A second is busy, waiting for admission, or neither."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since = clock()
        self._running = 0
        self._asking = False
        self._busy_s = 0.0
        self._wait_s = 0.0
        self._load_s: list[float] = []
        self._reward_s = 0.0
        self._generated = 0
        self._in_flight = 0
        self._finished = 0
        self._released = 0
        self._refused = 0

    def sent(self, num_groups: int) -> None:
        """Groups went to the engine."""
        self._pass_time()
        self._running += num_groups

    def answered(self, num_groups: int) -> None:
        """The engine is done with groups, one way or another."""
        self._pass_time()
        self._running -= num_groups

    def asking(self, asking: bool) -> None:
        """Whether an admission is being waited for."""
        self._pass_time()
        self._asking = asking

    def loaded(self, seconds: float) -> None:
        """Generation stood still for a weight load of ``seconds``, which is no busy time."""
        self._pass_time()
        self._load_s.append(seconds)
        if self._running:
            self._busy_s = max(0.0, self._busy_s - seconds)

    def generated(self, num_tokens: int) -> None:
        """The engine answered with policy tokens, which are in flight from now on."""
        self._generated += num_tokens
        self._in_flight += num_tokens

    def scored(self, seconds: float) -> None:
        """A group's reward took ``seconds``."""
        self._reward_s += seconds

    def stored(self, num_tokens: int) -> None:
        """A group was stored."""
        self._in_flight -= num_tokens
        self._finished += 1

    def refused(self, num_tokens: int) -> None:
        """The buffer refused a finished group, and counts its tokens as dropped."""
        self._in_flight -= num_tokens
        self._refused += 1

    def released(self, num_tokens: int) -> None:
        """A group was given back unfinished."""
        self._in_flight -= num_tokens
        self._released += 1

    def counters(self) -> FleetCounters:
        """Everything up to now."""
        self._pass_time()
        return FleetCounters(
            tokens_generated=self._generated,
            tokens_in_flight=self._in_flight,
            groups_finished=self._finished,
            groups_released=self._released,
            groups_refused=self._refused,
            busy_s=self._busy_s,
            wait_s=self._wait_s,
            load_s=tuple(self._load_s),
            reward_s=self._reward_s,
        )

    def _pass_time(self) -> None:
        now = self._clock()
        if self._running:
            self._busy_s += now - self._since
        elif self._asking:
            self._wait_s += now - self._since
        self._since = now
