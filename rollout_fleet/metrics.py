"""What a rollout worker has done, where its time went, and how its policy did on held-out prompts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetCounters:
    """What one rollout worker has done since it started.

    Attributes:
        tokens_generated: Policy tokens that the engine answered with, including those of aborted samples, excluding
            evaluation and greedy baselines.
        tokens_in_flight: Those of them that are neither stored nor released yet.
        groups_finished: Prompt groups stored in the buffer.
        groups_released: Prompt groups given back unfinished.
        groups_refused: Finished groups that the buffer refused because their lease had run out.
        groups_failed: Attempts that failed, by reason: ``aborted`` by the engine, or ``reward``.
        busy_s: Time with at least one training request on the engine, without weight loads.
        wait_s: Time in which the engine had no training request because none was admitted.
        load_s: Per weight load, the seconds for which generation stood still.
        reward_s: Time spent waiting for rewards, summed over groups.
    """

    tokens_generated: int
    tokens_in_flight: int
    groups_finished: int
    groups_released: int
    groups_refused: int
    groups_failed: Mapping[str, int]
    busy_s: float
    wait_s: float
    load_s: tuple[float, ...]
    reward_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """Rewards of held-out prompts.

    Attributes:
        rewards: One float per sample, prompt by prompt.
        mean_length: Mean response length in tokens; 0 without prompts.
        num_failed: Prompts whose reward failed; ``rewards`` leaves them out.
    """

    rewards: tuple[float, ...]
    mean_length: float
    num_failed: int = 0


class FleetMeter:
    """The counters of one worker. Each second is busy, spent waiting for admission, or neither."""

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
        self._failed: Counter[str] = Counter()

    def running(self, num_groups: int) -> None:
        """This many groups are on the engine from now on."""
        self._pass_time()
        self._running = num_groups

    def asking(self, asking: bool) -> None:
        """Whether the worker waits for admission from now on."""
        self._pass_time()
        self._asking = asking

    def loaded(self, seconds: float) -> None:
        """Generation stood still for ``seconds`` during a weight load; they do not count as busy."""
        self._pass_time()
        self._load_s.append(seconds)
        if self._running:
            self._busy_s = max(0.0, self._busy_s - seconds)

    def generated(self, num_tokens: int) -> None:
        """The engine answered with policy tokens; they are in flight from now on."""
        self._generated += num_tokens
        self._in_flight += num_tokens

    def scored(self, seconds: float) -> None:
        """Scoring a group took ``seconds``."""
        self._reward_s += seconds

    def stored(self, num_tokens: int) -> None:
        """A group was stored."""
        self._in_flight -= num_tokens
        self._finished += 1

    def refused(self, num_tokens: int) -> None:
        """The buffer refused a finished group and counts its tokens as dropped."""
        self._in_flight -= num_tokens
        self._refused += 1

    def released(self, num_tokens: int) -> None:
        """A group was given back unfinished."""
        self._in_flight -= num_tokens
        self._released += 1

    def failed(self, reason: str) -> None:
        """An attempt failed."""
        self._failed[reason] += 1

    def counters(self) -> FleetCounters:
        """Everything up to now."""
        self._pass_time()
        return FleetCounters(
            tokens_generated=self._generated,
            tokens_in_flight=self._in_flight,
            groups_finished=self._finished,
            groups_released=self._released,
            groups_refused=self._refused,
            groups_failed=dict(self._failed),
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
