"""The state machine of a member. A member is a rollout worker with its engine, as the run's controller sees it.

::

    starting ──▶ catching_up ──▶ ready
       ▲ │
       │ ▼
     pending                                                     the cluster has no resources for the member
    any of these, and draining ──▶ fenced(epoch + 1) ──▶ backoff ──▶ starting      a fault
                                                    ├──▶ failed     too many faults
                                                    └──▶ left       the member was asked to leave
    ready ──▶ draining ──▶ left                                  the member was asked to leave while it served
    pending, starting, catching_up, fenced, backoff ──▶ left     the member was asked to leave
    any of these but left ──▶ failed                             a restart would not help

A member is ``fenced`` after a fault, until its processes have ended. Its reports then have no effect.

This module does not wait and does no I/O. The code that uses a `Member` does the work of each state, sets its deadline
and reports the result. In a run, this code is `asyncrl/run/fleet_member.py`. An epoch of a member lasts until the
member's next fault. Each report names the epoch in which the reported work began. Reports of older epochs have no
effect.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from asyncrl.core.lives import Faults

from .config import RolloutFleetConfig

LONGEST_BACKOFF_S = 60.0


class MemberState(StrEnum):
    """The state of a member. The docstring of this module shows the transitions."""

    pending = "pending"
    starting = "starting"
    catching_up = "catching_up"
    ready = "ready"
    fenced = "fenced"
    backoff = "backoff"
    draining = "draining"
    left = "left"
    failed = "failed"


ENDED = frozenset({MemberState.left, MemberState.failed})
"""The states that a member never leaves."""
NOT_UP = frozenset({MemberState.pending, MemberState.fenced, MemberState.backoff, MemberState.failed})
"""The states in which a member's worker does not run, after a fault or without resources."""


def member_faults(config: RolloutFleetConfig) -> Faults:
    """Return the rule for restarts of a rollout worker, from the options of the rollout fleet."""
    return Faults(
        config.restarts,
        window_s=config.restart_window_s,
        backoff_s=config.restart_backoff_s,
        longest_backoff_s=LONGEST_BACKOFF_S,
    )


class Member:
    """The state of one member, from its first start through all restarts to its end.

    ``faults`` decides after each fault whether the member restarts.

    Attributes:
        name: Name of the member in the run. Example: ``"engine-3"``.
        epoch: Number of faults so far. A report on work that began before the latest fault has no effect.
        on_enter: Function that is called with each new state and the epoch.
    """

    def __init__(self, name: str, faults: Faults) -> None:
        self.name = name
        self.state = MemberState.starting
        self.epoch = 0
        self.on_enter: Callable[[MemberState, int], None] = lambda state, epoch: None
        self._faults = faults
        self._pause_s: float | None = None
        self._is_leaving = False

    @property
    def is_serving(self) -> bool:
        """Whether the member holds verified weights and may take new prompt groups."""
        return self.state is MemberState.ready

    @property
    def may_release(self) -> bool:
        """Whether the member has started and can free its memory on the device. Its weights may be unverified."""
        return self.state in (MemberState.catching_up, MemberState.ready)

    @property
    def has_ended(self) -> bool:
        """Whether the member has left, or has failed without a restart."""
        return self.state in ENDED

    def accepts(self, epoch: int) -> bool:
        """Return whether a report that names this ``epoch`` still has an effect.

        The epoch is the number of faults when the reported work began. Reports have no effect after a later fault, or
        after the end of the member.
        """
        return epoch == self.epoch and self.state not in (MemberState.fenced, MemberState.backoff, *ENDED)

    # The methods below record the member's progress.

    def unplaced(self, epoch: int) -> None:
        """Record that the cluster has no resources (such as GPUs) for the member yet. State: ``pending``."""
        if self.accepts(epoch) and self.state is MemberState.starting:
            self._enter(MemberState.pending)

    def placed(self, epoch: int) -> None:
        """Record that a pending member has got its resources, and starts now. State: ``starting``."""
        if self.accepts(epoch) and self.state is MemberState.pending:
            self._enter(MemberState.starting)

    def started(self, epoch: int) -> None:
        """Record that the member has started and waits for its first weights. State: ``catching_up``."""
        if self.accepts(epoch) and self.state is MemberState.starting:
            self._enter(MemberState.catching_up)

    def verified(self, epoch: int) -> None:
        """Record that the member has loaded and verified its first weights, and serves them. State: ``ready``."""
        if self.accepts(epoch) and self.state is MemberState.catching_up:
            self._enter(MemberState.ready)

    def drained(self) -> None:
        """Record that a leaving member has given back its prompt groups, or did not do so in time. State: ``left``."""
        if self._is_leaving and not self.has_ended:
            self._enter(MemberState.left)

    # The methods below record faults of the member, and requests that it leaves the run.

    def fault(self, epoch: int, now: float) -> bool:
        """Record that the member died, hangs, or holds weights that could not be verified. State: ``fenced``.

        The fault begins the member's next epoch, so later reports with this ``epoch`` have no effect. ``now`` is the
        time in seconds; all faults use the same clock. Returns whether the fault was recorded; False if ``epoch`` had
        already ended.
        """
        if not self.accepts(epoch):
            return False
        self.epoch += 1
        self._pause_s = self._faults.add(now)
        self._enter(MemberState.fenced)
        return True

    def stopped(self) -> float | None:
        """Record that the member's processes have ended after a fault.

        The member then waits for its restart (``backoff``). A member that was asked to leave becomes ``left``. After
        too many faults, the member becomes ``failed``. Returns the seconds to wait before `restart`; None if the
        member has ended.
        """
        if self.state is MemberState.fenced:
            ended = MemberState.left if self._is_leaving else MemberState.failed
            self._enter(ended if self._is_leaving or self._pause_s is None else MemberState.backoff)
        return None if self.has_ended else self._pause_s

    def restart(self) -> None:
        """Record that the pause before a restart is over, and the member starts again. State: ``starting``."""
        if self.state is MemberState.backoff:
            self._enter(MemberState.starting)

    def fail(self) -> None:
        """Record that the member has failed for good, because a restart would not help. State: ``failed``."""
        if not self.has_ended:
            self.epoch += 1
            self._enter(MemberState.failed)

    def drain(self) -> None:
        """Ask the member to leave the run.

        A member that is ``ready`` enters ``draining``: it finishes or gives back its groups. A member that is
        ``draining`` or has ended does not change. Any other member enters ``left`` immediately.
        """
        self._is_leaving = True
        if self.state is MemberState.ready:
            self._enter(MemberState.draining)
        elif self.state is not MemberState.draining and not self.has_ended:
            self.epoch += 1  # from now on, ignore reports of work that began earlier
            self._enter(MemberState.left)

    def _enter(self, state: MemberState) -> None:
        self.state = state
        self.on_enter(state, self.epoch)
