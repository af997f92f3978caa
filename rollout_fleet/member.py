"""One member of a run as a state machine, such as a rollout worker with its engine.

::

    starting ──▶ catching_up(v) ──▶ ready ◀──▶ updating(v)
       ▲ │
       │ ▼
     pending                                                     no place: it waits for one, and nobody for it
    any of these, and draining ──▶ fenced(epoch + 1) ──▶ backoff ──▶ starting      a fault, or a missed deadline
                                                    ├──▶ failed     too many faults in one window, or not stopped
                                                    └──▶ left       it was asked to leave
    ready, updating ──▶ draining ──▶ left                           any other that is asked to leave ──▶ left

Pure and synchronous: whoever drives a member passes the time in, does the work that belongs to a state, and reports
what came of it. What is reported names the epoch in which it was begun. A fault begins the next epoch, and what an
older one still reports changes nothing. So no answer of a fenced life counts, and no two lives are one member.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from .config import RolloutFleetConfig

LONGEST_BACKOFF_S = 60.0
STOP_MARGIN_S = 5.0
"""How much longer than its own deadlines a start or a stop may take before it is given up."""


class MemberState(StrEnum):
    """Where a member is."""

    pending = "pending"
    starting = "starting"
    catching_up = "catching_up"
    ready = "ready"
    updating = "updating"
    fenced = "fenced"
    backoff = "backoff"
    draining = "draining"
    left = "left"
    failed = "failed"


ENDED = frozenset({MemberState.left, MemberState.failed})
"""States that nothing leaves."""
SERVING = frozenset({MemberState.ready, MemberState.updating})
"""States in which a member holds verified weights and may lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLimits:
    """How long a member may take, and how often it is started again.

    Attributes:
        start_s: From the start to the first answer.
        stop_s: From a fault until nothing is left of the life that ended.
        drain_s: From the word to leave until it has left.
        restarts: Faults within ``window_s`` that are mended; the next one is final. Example: 3.
        window_s: Older faults are forgotten.
        backoff_s: Pause before the second restart within the window; each further one doubles it.
        longest_backoff_s: The longest pause.
    """

    start_s: float
    stop_s: float
    drain_s: float
    restarts: int
    window_s: float
    backoff_s: float
    longest_backoff_s: float

    def pause_s(self, num_faults: int) -> float:
        """The pause after so many faults. Example: 0, 1, 2, 4 s after 1, 2, 3, 4 faults with ``backoff_s`` 1."""
        return 0.0 if num_faults < 2 else min(self.longest_backoff_s, self.backoff_s * 2.0 ** min(num_faults - 2, 63))


def member_limits(config: RolloutFleetConfig) -> MemberLimits:
    """The limits of a rollout worker with its engine."""
    return MemberLimits(
        start_s=config.start_timeout_s + config.server_stop_timeout_s + STOP_MARGIN_S,
        stop_s=config.server_stop_timeout_s + STOP_MARGIN_S,
        drain_s=config.drain_timeout_s,
        restarts=config.restarts,
        window_s=config.restart_window_s,
        backoff_s=config.restart_backoff_s,
        longest_backoff_s=LONGEST_BACKOFF_S,
    )


class Member:
    """The life of one member, over all its epochs.

    Attributes:
        name: Its identity. Example: ``"engine-3"``.
        state: See `MemberState`.
        epoch: Faults so far. What was begun under an older epoch no longer counts.
        version: Policy version that it has verified, or loads; -1 before the first one is offered.
        deadline: When it has to have left the state, on the clock of ``now``; infinite where only others end it.
        reason: What the last fault was; empty before the first.
        on_enter: Hears of each state that it enters, and of the epoch.
    """

    def __init__(self, name: str, limits: MemberLimits, now: float) -> None:
        self.name = name
        self.state = MemberState.starting
        self.epoch = 0
        self.version = -1
        self.deadline = now + limits.start_s
        self.reason = ""
        self.on_enter: Callable[[MemberState, int], None] = lambda state, epoch: None
        self._limits = limits
        self._faults: deque[float] = deque()
        self._is_leaving = False

    @property
    def may_lease(self) -> bool:
        """Whether it may take new work: only under weights that it has verified."""
        return self.state in SERVING

    @property
    def has_ended(self) -> bool:
        """Whether it has left, or failed for good."""
        return self.state in ENDED

    def accepts(self, epoch: int) -> bool:
        """Whether what was begun under ``epoch`` still counts."""
        return epoch == self.epoch and self.state not in (MemberState.fenced, MemberState.backoff, *ENDED)

    def seconds_left(self, now: float) -> float | None:
        """Until the deadline of the state; None where there is none. For `asyncio.timeout`."""
        return None if math.isinf(self.deadline) else max(0.0, self.deadline - now)

    # What the member does

    def unplaced(self, epoch: int) -> None:
        """It is to start, and has no place: it waits for the cluster to have one."""
        if self.accepts(epoch) and self.state is MemberState.starting:
            self._enter(MemberState.pending, math.inf)

    def placed(self, epoch: int, now: float) -> None:
        """It has a place, and starts."""
        if self.accepts(epoch) and self.state is MemberState.pending:
            self._enter(MemberState.starting, now + self._limits.start_s)

    def started(self, epoch: int) -> None:
        """It is up, and waits for weights: for the learner, which has deadlines of its own."""
        if self.accepts(epoch) and self.state is MemberState.starting:
            self._enter(MemberState.catching_up, math.inf)
            self.version = -1

    def offered(self, epoch: int, version: int, now: float, *, within_s: float) -> None:
        """It begins to load a version, which may take ``within_s``."""
        if not self.accepts(epoch):
            return
        if self.state is MemberState.catching_up:
            self._enter(MemberState.catching_up, now + within_s)
        elif self.state in SERVING:
            self._enter(MemberState.updating, now + within_s)
        self.version = version

    def skipped(self, epoch: int, version: int) -> None:
        """The version that it was to load is gone; it serves ``version``, -1 for none, and waits for another."""
        if not self.accepts(epoch):
            return
        if self.state is MemberState.catching_up:
            self._enter(MemberState.catching_up, math.inf)
        elif self.state is MemberState.updating:
            self._enter(MemberState.ready, math.inf)
        self.version = version

    def verified(self, epoch: int, version: int) -> None:
        """It holds a version, every byte of it compared, and serves it."""
        if self.accepts(epoch) and self.state in (MemberState.catching_up, *SERVING):
            self._enter(MemberState.ready, math.inf)
            self.version = version

    def drained(self, epoch: int) -> None:
        """It has put down its work."""
        if self.accepts(epoch) and self.state is MemberState.draining:
            self._enter(MemberState.left, math.inf)

    # What happens to it

    def fault(self, epoch: int, reason: str, now: float) -> bool:
        """It died, hangs, or could not be verified: nothing of this epoch counts from now on.

        Returns whether this ended the epoch; a second report of the same fault does not.
        """
        if not self.accepts(epoch):
            return False
        self.epoch += 1
        self.reason = reason
        while self._faults and self._faults[0] + self._limits.window_s <= now:
            self._faults.popleft()
        self._faults.append(now)
        self._enter(MemberState.fenced, now + self._limits.stop_s)
        return True

    def stopped(self, now: float) -> None:
        """Nothing is left of the epoch that ended: begin the pause before the next, or end for good."""
        if self.state is not MemberState.fenced:
            return
        if self._is_leaving:
            self._enter(MemberState.left, math.inf)
        elif len(self._faults) > self._limits.restarts:
            self._enter(MemberState.failed, math.inf)
        else:
            self._enter(MemberState.backoff, now + self._limits.pause_s(len(self._faults)))

    def fail(self, reason: str) -> None:
        """It has failed, and no restart would mend it."""
        if not self.has_ended:
            self.epoch += 1
            self.reason = reason
            self._enter(MemberState.failed, math.inf)

    def drain(self, now: float) -> None:
        """It is asked to leave: it takes no more work. One that holds none has left at once."""
        self._is_leaving = True
        if self.state in SERVING:
            self._enter(MemberState.draining, now + self._limits.drain_s)
        elif self.state is not MemberState.draining and not self.has_ended:
            self.epoch += 1  # what is under way, a start for one, comes too late
            self._enter(MemberState.left, math.inf)

    def due(self, now: float) -> None:
        """The deadline of the state may have passed: leave the state if it has."""
        if now < self.deadline:
            return
        if self.state is MemberState.fenced:  # what cannot be stopped is not started a second time
            self._enter(MemberState.failed, math.inf)
        elif self.state is MemberState.draining:
            self._enter(MemberState.left, math.inf)
        elif self.state is MemberState.backoff:
            self._enter(MemberState.starting, now + self._limits.start_s)
        else:
            self.fault(self.epoch, f"it was {self.state} for longer than it may be", now)

    def _enter(self, state: MemberState, deadline: float) -> None:
        self.state = state
        self.deadline = deadline
        self.on_enter(state, self.epoch)
