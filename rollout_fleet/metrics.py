"""What a rollout worker has done, and where its time went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.core import record
from asyncrl.core.record import LevelName, SpanKind

from .inflight import ON_ENGINE, GroupPhase, InflightGroup
from .member import Member, MemberState


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
        groups_failed: Attempts that failed, by reason: ``aborted`` by the engine, ``reward``, …; and
            ``reward_trajectory``, responses that were left out of theirs.
        busy_s: Time with at least one training request on the engine, without weight loads.
        wait_s: Time in which the engine had no training request because none was admitted.
        load_s: Per weight load, the seconds for which generation stood still.
        reward_s: Time spent waiting for rewards, summed over groups.
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

    @classmethod
    def total(cls, parts: Iterable[FleetCounters]) -> FleetCounters:
        """The sum of what several have done, or one in several lives."""
        sums: dict[str, Any] = asdict(cls())
        for part in parts:
            for name in sums:
                sums[name] = sums[name] + getattr(part, name)
        return cls(**sums)


def note_places(groups: Iterable[InflightGroup], *, num_places: int) -> None:
    """Note for the run's profile what the engine's places for samples are held by; see `LevelName`."""
    if record.current() is None:
        return
    running = tail = settling = parked = 0
    for group in groups:
        num_samples = len(group.samples)
        if group.phase in ON_ENGINE:
            running += group.num_outstanding
            tail += num_samples - group.num_outstanding
        elif group.phase is GroupPhase.parked:
            parked += num_samples
        else:
            settling += num_samples
    record.level(LevelName.running, running)
    record.level(LevelName.tail, tail)
    record.level(LevelName.settling, min(settling, num_places - running - tail - parked))
    record.level(LevelName.parked, parked)


class FleetMeter:
    """The counters of one worker. Each second is busy, spent waiting for admission, or neither."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._since = clock()
        self._running = 0
        self._asking = False
        self._counts: dict[str, Any] = asdict(FleetCounters())

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
        self._add(load_s=(seconds,))
        if self._running:
            self._add(busy_s=-min(seconds, self._counts["busy_s"]))

    def generated(self, num_tokens: int) -> None:
        """The engine answered with policy tokens; they are in flight from now on."""
        self._add(tokens_generated=num_tokens, tokens_in_flight=num_tokens)

    def scored(self, seconds: float) -> None:
        """Scoring a group took ``seconds``."""
        self._add(reward_s=seconds)

    def stored(self, num_tokens: int) -> None:
        """A group was stored."""
        self._add(tokens_in_flight=-num_tokens, groups_finished=1)

    def refused(self, num_tokens: int) -> None:
        """The buffer refused a finished group and counts its tokens as dropped."""
        self._add(tokens_in_flight=-num_tokens, groups_refused=1)

    def released(self, num_tokens: int) -> None:
        """A group was given back unfinished."""
        self._add(tokens_in_flight=-num_tokens, groups_released=1)

    def failed(self, reason: str, number: int = 1) -> None:
        """An attempt failed, or so many responses of one."""
        self._add(groups_failed=Counter({reason: number}))

    def counters(self) -> FleetCounters:
        """Everything up to now."""
        self._pass_time()
        return FleetCounters(**self._counts)

    def _add(self, **changes: Any) -> None:
        for name, change in changes.items():
            self._counts[name] = self._counts[name] + change

    def _pass_time(self) -> None:
        now = self._clock()
        if self._running:
            self._add(busy_s=now - self._since)
        elif self._asking:
            self._add(wait_s=now - self._since)
        self._since = now


class MemberNotes:
    """Notes for the run's profile which state a member is in, and its epoch; ``lane`` as for `record.span`."""

    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._span = record.NO_SPAN

    def follow(self, member: Member) -> None:
        """Note where a member is, and every state that it enters from now on."""
        member.on_enter = self.note
        self.note(member.state, member.epoch)

    def note(self, state: MemberState, epoch: int) -> None:
        """A member enters a state."""
        self._span.close()
        self._span = record.span(SpanKind.member, lane=self._lane, cause=state)
        record.level(LevelName.epoch, epoch, lane=self._lane)
