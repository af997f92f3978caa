"""The counters of a rollout worker: its tokens and groups, and how it spent its time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from asyncrl.core import record
from asyncrl.core.record import LevelName, SpanKind

from .member import Member, MemberState


class EpisodeCount(StrEnum):
    """Events that a rollout worker counts: failed episodes, refused requests, ended processes of environments."""

    unknown_keys = "unknown_keys"  # counts requests with an API key that is not the key of any episode
    closed_keys = "closed_keys"  # counts requests with the key of an episode that has ended
    lost_answers = "lost_answers"  # counts answers that were not delivered, because the client had disconnected
    error_answers = "error_answers"  # counts requests that got an error as their answer, such as a wrong key
    # Each of the next five names counts the failed episodes with one kind of failure (`FailureKind`).
    failed_environment = "failed_environment"
    failed_tool = "failed_tool"
    failed_reward = "failed_reward"
    failed_overflow = "failed_overflow"
    failed_infrastructure = "failed_infrastructure"
    processes_killed = "processes_killed"  # counts processes killed for a blocked event loop or too much memory
    processes_ended = "processes_ended"  # counts processes that were replaced because they had ended or were killed
    # counts processes that were replaced because ended episodes had left too many threads or tasks
    processes_retired = "processes_retired"
    leftovers = "leftovers"  # counts programs and tasks that still ran after their episodes had ended


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetCounters:
    """Counters of one rollout worker since its start.

    Attributes:
        tokens_generated: Tokens that the engine sampled. Tokens of evaluations and of greedy baselines (greedy rollouts
            that are not trained on) are not counted.
        tokens_in_flight: Generated tokens of groups that are neither stored in the buffer nor given back to it yet.
        groups_finished: Prompt groups stored in the buffer.
        groups_released: Unfinished prompt groups that were given back to the buffer.
        groups_refused: Finished groups that the buffer refused, because the lease had expired or the group was too old.
        groups_failed: Number of failed attempts at groups by reason. ``reward_trajectory`` counts dropped responses.
        busy_s: Seconds with at least one training request on the engine, minus the time of weight loads.
        wait_s: Seconds without a training request on the engine while the worker waited for leases of prompt groups.
        load_s: For each weight load, the seconds for which generation was paused.
        reward_s: Seconds from the request for a group's rewards to their arrival, summed over groups.
        episodes: Number of events by `EpisodeCount`; empty without environments.
    """

    tokens_generated: int = 0
    tokens_in_flight: int = 0
    groups_finished: int = 0
    groups_released: int = 0
    groups_refused: int = 0
    groups_failed: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    wait_s: float = 0.0
    load_s: tuple[float, ...] = ()
    reward_s: float = 0.0
    episodes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def total(cls, parts: Iterable[FleetCounters]) -> FleetCounters:
        """Return the sums of the counters of several workers, or of several starts of one worker."""
        sums: dict[str, Any] = asdict(cls())
        for part in parts:
            for name in sums:
                if isinstance(sums[name], Counter):
                    sums[name].update(getattr(part, name))  # `update` keeps entries that are 0; `+` drops them
                else:
                    sums[name] = sums[name] + getattr(part, name)
        return cls(**sums)


class FleetMeter:
    """Keeps the counters of one rollout worker, including its busy time and its time of waiting for leases."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._since = clock()
        self._running = 0
        self._asking = False
        self._counts: dict[str, Any] = asdict(FleetCounters())

    def running(self, num_groups: int) -> None:
        """Record that ``num_groups`` groups are on the engine from now on. If there are any, the worker is busy."""
        self._pass_time()
        self._running = num_groups

    def asking(self, asking: bool) -> None:
        """Record whether the worker waits for leases from now on. Time with groups counts as busy, not as waiting."""
        self._pass_time()
        self._asking = asking

    def loaded(self, seconds: float) -> None:
        """Record a weight load that paused generation for ``seconds``. This time is not counted as busy."""
        self._pass_time()
        self.add(load_s=(seconds,))
        if self._running:
            self.add(busy_s=-min(seconds, self._counts["busy_s"]))

    def add(self, **changes: Any) -> None:
        """Add a value to each named counter. The names and types are the fields of `FleetCounters`."""
        for name, change in changes.items():
            self._counts[name] = self._counts[name] + change

    def counters(self) -> FleetCounters:
        """Return all counters up to now."""
        self._pass_time()
        return FleetCounters(**self._counts)

    def _pass_time(self) -> None:
        now = self._clock()
        if self._running:
            self.add(busy_s=now - self._since)
        elif self._asking:
            self.add(wait_s=now - self._since)
        self._since = now


def note_member(member: Member, lane: str) -> None:
    """Record each state of a member, and its number of faults, in the run's profile.

    ``lane`` is the row of the profile that shows the states. This function replaces ``member.on_enter``.
    """
    span = record.NO_SPAN

    def note(state: MemberState, epoch: int) -> None:
        nonlocal span
        span.close()
        span = record.span(SpanKind.member, lane=lane, cause=state)
        record.level(LevelName.epoch, epoch, lane=lane)

    member.on_enter = note
    note(member.state, member.epoch)
