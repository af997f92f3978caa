"""The state machine of a member. A member is a rollout worker with its engine, which loads the run's weights.

::

    starting ──▶ catching_up(v) ──▶ ready ◀──▶ updating(v)
       ▲ │
       │ ▼
     pending                                                     the cluster has no resources for the member
    any of these, and draining ──▶ fenced(epoch + 1) ──▶ backoff ──▶ starting      a fault, or a missed deadline
                                                    ├──▶ failed     too many faults in ``window_s``, or it did not stop
                                                    └──▶ left       the member was asked to leave
    ready, updating ──▶ draining ──▶ left                        the member was asked to leave while it served
    pending, starting, catching_up, fenced, backoff ──▶ left     the member was asked to leave

A member is ``fenced`` after a fault, until its processes have ended. Its reports then have no effect.

This module does not wait and does no I/O. The code that uses a `Member` does the work of each state, and reports the
result and the time. This code is in `asyncrl/run/fleet_member.py` for the controller, and in `worker.py` and `loop.py`
for the worker. An epoch of a member lasts until the member's next fault. Each report names the epoch in which the
reported work began. Reports of older epochs have no effect.
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
"""Seconds that are added to the options' deadlines for a start and for a stop of a member."""


class MemberState(StrEnum):
    """The state of a member. The docstring of this module shows the transitions."""

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
"""The states that a member never leaves."""
SERVING = frozenset({MemberState.ready, MemberState.updating})
"""The states in which a member holds verified weights and may take new prompt groups."""
NOT_UP = frozenset({MemberState.pending, MemberState.fenced, MemberState.backoff, MemberState.failed})
"""The states in which a member's worker does not run, after a fault or without resources."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberLimits:
    """Deadlines of a member, and limits of its restarts.

    Attributes:
        start_s: Seconds from the start until the member waits for weights.
        stop_s: Seconds from a fault until the processes of the member have ended.
        drain_s: Seconds from the leave request until the member has left.
        restarts: Number of faults within ``window_s`` that are followed by a restart. The next fault is final.
        window_s: Seconds for which a fault counts towards ``restarts``.
        backoff_s: Pause before the second restart within the window. Each further restart doubles the pause.
        longest_backoff_s: Longest pause before a restart.
    """

    start_s: float
    stop_s: float
    drain_s: float
    restarts: int
    window_s: float
    backoff_s: float
    longest_backoff_s: float

    def pause_s(self, num_faults: int) -> float:
        """Return the seconds to wait before a restart, if ``num_faults`` faults happened within ``window_s``.

        Example: 0, 1, 2, 4 s after 1, 2, 3, 4 faults with ``backoff_s`` 1.
        """
        return 0.0 if num_faults < 2 else min(self.longest_backoff_s, self.backoff_s * 2.0 ** min(num_faults - 2, 63))


def member_limits(config: RolloutFleetConfig) -> MemberLimits:
    """Return the deadlines and restart limits of a rollout worker, from the options of the rollout fleet."""
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
    """The state of one member, from its first start through all restarts to its end.

    Attributes:
        name: Name of the member in the run. Example: ``"engine-3"``.
        epoch: Number of faults so far. A report on work that began before the latest fault has no effect.
        version: Policy version whose weights the member has verified or is loading; -1 before the first load.
        deadline: Time in seconds at which the current state must have ended; infinite for no deadline. All times,
            also the argument ``now`` of the methods, are of the same clock.
        reason: Cause of the latest fault; empty before the first fault.
        on_enter: Function that is called with each new state and the epoch.
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
        """Whether the member holds verified weights and may take new prompt groups."""
        return self.state in SERVING

    @property
    def may_release(self) -> bool:
        """Whether the member has started and can free its memory on the device. Its weights may be unverified."""
        return self.may_lease or self.state is MemberState.catching_up

    @property
    def has_ended(self) -> bool:
        """Whether the member has left, or has failed without a restart."""
        return self.state in ENDED

    def accepts(self, epoch: int) -> bool:
        """Return whether a report with this ``epoch`` still has an effect.

        The epoch is the number of faults when the reported work began. Reports have no effect after a later fault, or
        after the end of the member.
        """
        return epoch == self.epoch and self.state not in (MemberState.fenced, MemberState.backoff, *ENDED)

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds from ``now`` to the deadline of the current state; None if the state has no deadline.

        ``now`` is a time in seconds, on the same clock as the ``now`` of the constructor.
        """
        return None if math.isinf(self.deadline) else max(0.0, self.deadline - now)

    # Reports of the member's progress

    def unplaced(self, epoch: int) -> None:
        """Record that the cluster has no resources (such as GPUs) for the member yet. State: ``pending``."""
        if self.accepts(epoch) and self.state is MemberState.starting:
            self._enter(MemberState.pending, math.inf)

    def placed(self, epoch: int, now: float) -> None:
        """Record that a pending member has got its resources, and starts now. State: ``starting``."""
        if self.accepts(epoch) and self.state is MemberState.pending:
            self._enter(MemberState.starting, now + self._limits.start_s)

    def started(self, epoch: int) -> None:
        """Record that the member has started and waits for its first weights. State: ``catching_up``."""
        if self.accepts(epoch) and self.state is MemberState.starting:
            self._enter(MemberState.catching_up, math.inf)
            self.version = -1

    def offered(self, epoch: int, version: int, now: float, *, within_s: float) -> None:
        """Record that the member begins to load a policy version, which may take ``within_s`` seconds from ``now``."""
        if not self.accepts(epoch):
            return
        if self.state is MemberState.catching_up:
            self._enter(MemberState.catching_up, now + within_s)
        elif self.state in SERVING:
            self._enter(MemberState.updating, now + within_s)
        self.version = version

    def skipped(self, epoch: int, version: int) -> None:
        """Record that the offered version was removed. ``version`` is the member's earlier version (-1: none)."""
        if not self.accepts(epoch):
            return
        if self.state is MemberState.catching_up:
            self._enter(MemberState.catching_up, math.inf)
        elif self.state is MemberState.updating:
            self._enter(MemberState.ready, math.inf)
        self.version = version

    def verified(self, epoch: int, version: int) -> None:
        """Record that the member has loaded and verified a policy version, and serves it. State: ``ready``."""
        if self.accepts(epoch) and self.state in (MemberState.catching_up, *SERVING):
            self._enter(MemberState.ready, math.inf)
            self.version = version

    def drained(self, epoch: int) -> None:
        """Record that a leaving member has finished or given back its prompt groups. State: ``left``."""
        if self.accepts(epoch) and self.state is MemberState.draining:
            self._enter(MemberState.left, math.inf)

    # Reports of faults, and requests to leave

    def fault(self, epoch: int, reason: str, now: float) -> bool:
        """Record that the member died, hangs, or holds weights that could not be verified. State: ``fenced``.

        This begins the next epoch, so later reports with ``epoch`` have no effect. Returns whether the fault was
        recorded; False if ``epoch`` had already ended.
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
        """Record that the member's processes have ended after a fault.

        The member then waits for its restart (``backoff``). A member that was asked to leave becomes ``left``. After
        too many faults, the member becomes ``failed``.
        """
        if self.state is not MemberState.fenced:
            return
        if self._is_leaving:
            self._enter(MemberState.left, math.inf)
        elif len(self._faults) > self._limits.restarts:
            self._enter(MemberState.failed, math.inf)
        else:
            self._enter(MemberState.backoff, now + self._limits.pause_s(len(self._faults)))

    def fail(self, reason: str) -> None:
        """Record that the member has failed for good, because a restart would not help. ``reason`` is the cause."""
        if not self.has_ended:
            self.epoch += 1
            self.reason = reason
            self._enter(MemberState.failed, math.inf)

    def drain(self, now: float) -> None:
        """Ask the member to leave the run.

        A member that is ``ready`` or ``updating`` enters ``draining``: it finishes or gives back its groups. A member
        that is ``draining`` or has ended does not change. Any other member enters ``left`` at once.
        """
        self._is_leaving = True
        if self.state in SERVING:
            self._enter(MemberState.draining, now + self._limits.drain_s)
        elif self.state is not MemberState.draining and not self.has_ended:
            self.epoch += 1  # ignore reports of work that still runs
            self._enter(MemberState.left, math.inf)

    def due(self, now: float) -> None:
        """Enter the next state if ``now`` has reached the deadline of the current state. Call this regularly."""
        if now < self.deadline:
            return
        if self.state is MemberState.fenced:  # no restart: the member's processes did not end in time
            self._enter(MemberState.failed, math.inf)
        elif self.state is MemberState.draining:
            self._enter(MemberState.left, math.inf)
        elif self.state is MemberState.backoff:
            self._enter(MemberState.starting, now + self._limits.start_s)
        else:
            self.fault(self.epoch, f"it exceeded the deadline of the state {self.state}", now)

    def _enter(self, state: MemberState, deadline: float) -> None:
        self.state = state
        self.deadline = deadline
        self.on_enter(state, self.epoch)
