"""The state machine of a member, in virtual time."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_fleet.member import ENDED, Member, MemberLimits, MemberState

LIMITS = MemberLimits(
    start_s=10.0, stop_s=4.0, drain_s=20.0, restarts=4, window_s=100.0, backoff_s=1.0, longest_backoff_s=3.0
)
epochs_ago = st.integers(0, 2)


def up(now: float = 0.0) -> Member:
    """Return a member that serves."""
    member = Member("engine-3", LIMITS, now)
    member.started(0)
    member.verified(0)
    return member


class MemberMachine(RuleBasedStateMachine):
    """Drives a member in any order: with reports of any epoch, with faults, and with deadlines.

    Records the epochs in which the member verified weights.
    """

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.member = Member("engine-3", LIMITS, 0.0)
        self.verified_in: set[int] = set()
        self.faults: list[float] = []
        self.entered = (MemberState.starting, 0, 0.0)
        self.starts = 1
        self.is_leaving = False

    def epoch(self, ago):
        return max(0, self.member.epoch - ago)

    @rule(ago=epochs_ago)
    def unplaced(self, ago):
        self.member.unplaced(self.epoch(ago))

    @rule(ago=epochs_ago)
    def placed(self, ago):
        self.member.placed(self.epoch(ago), self.now)

    @rule(ago=epochs_ago)
    def started(self, ago):
        self.member.started(self.epoch(ago))

    @rule(ago=epochs_ago)
    def verified(self, ago):
        epoch = self.epoch(ago)
        before = self.member.state
        self.member.verified(epoch)
        if self.member.accepts(epoch) and before not in (MemberState.pending, MemberState.starting):
            self.verified_in.add(epoch)

    @rule(ago=epochs_ago)
    def fault(self, ago):
        epoch, before = self.epoch(ago), self.member.epoch
        if self.member.fault(epoch, "it died", self.now):
            assert (epoch, self.member.epoch) == (before, before + 1)
            self.faults.append(self.now)
        else:
            assert self.member.epoch == before

    @rule()
    def stopped(self):
        was_fenced = self.member.state is MemberState.fenced
        self.member.stopped(self.now)
        if was_fenced:
            recent = [at for at in self.faults if at + LIMITS.window_s > self.faults[-1]]
            ends = MemberState.left if self.is_leaving else MemberState.failed
            assert (self.member.state is ends) == (self.is_leaving or len(recent) > LIMITS.restarts)

    @precondition(lambda self: self.member.epoch > 1)
    @rule()
    def drain(self):
        self.member.drain(self.now)
        self.is_leaving = True

    @rule(ago=epochs_ago)
    def drained(self, ago):
        self.member.drained(self.epoch(ago))

    @rule(seconds=st.floats(0.0, 40.0))
    def pass_time(self, seconds):
        """Let time pass, and tell the member when one of its deadlines has passed."""
        until = self.now + seconds
        while self.member.deadline <= until:
            self.now, state, epoch = self.member.deadline, self.member.state, self.member.epoch
            self.member.due(self.now)
            assert (self.member.state, self.member.epoch) != (state, epoch), "a missed deadline changes the state"
            if self.member.epoch > epoch:
                self.faults.append(self.now)
        self.now = until

    @invariant()
    def serves_only_with_weights_verified_in_this_epoch(self):
        if self.member.is_serving:
            assert self.member.epoch in self.verified_in
        assert self.member.is_serving == (self.member.state is MemberState.ready)

    @invariant()
    def nothing_of_an_older_epoch_is_accepted(self):
        assert not any(self.member.accepts(epoch) for epoch in range(self.member.epoch))
        if self.member.state in (MemberState.fenced, MemberState.backoff, *ENDED):
            assert not self.member.accepts(self.member.epoch)

    @invariant()
    def every_state_that_waits_for_the_member_has_a_deadline(self):
        waits_for_others = {MemberState.pending, MemberState.ready, MemberState.catching_up, *ENDED}
        if self.member.state not in waits_for_others:
            assert self.now <= self.member.deadline < math.inf
            assert self.member.seconds_left(self.now) == self.member.deadline - self.now

    @invariant()
    def a_member_that_was_asked_to_leave_takes_no_more_work_and_is_not_started_again(self):
        ending = {MemberState.draining, MemberState.fenced, MemberState.left, MemberState.failed}
        assert not self.is_leaving or self.member.state in ending

    @invariant()
    def the_pause_before_a_restart_is_bounded(self):
        if self.member.state is MemberState.backoff:
            assert self.member.deadline - self.now <= LIMITS.longest_backoff_s


MemberMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_a_member_keeps_its_promises_whatever_is_reported_when = MemberMachine.TestCase


def test_a_member_serves_from_its_first_verified_weights_on():
    member = Member("engine-3", LIMITS, 0.0)
    member.verified(0)
    assert (member.state, member.is_serving) == (MemberState.starting, False), "it has not started yet"
    member.started(0)
    assert (member.state, member.is_serving, member.may_release) == (MemberState.catching_up, False, True)
    member.verified(0)
    assert (member.state, member.is_serving, member.may_release) == (MemberState.ready, True, True)


def test_reports_of_an_older_life_have_no_effect():
    member = up()
    member.fault(0, "it died", 1.0)
    member.stopped(1.0)
    member.due(1.0)
    assert (member.state, member.epoch) == (MemberState.starting, 1)
    member.started(0)
    member.verified(0)
    assert not member.fault(0, "it died, again", 2.5)
    assert (member.state, member.epoch, member.reason) == (MemberState.starting, 1, "it died")


def test_restarts_are_paused_longer_each_time_and_capped_within_a_window():
    member, now, pauses = up(), 0.0, []
    while True:
        member.fault(member.epoch, "it died", now)
        member.stopped(now)
        if member.has_ended:
            break
        pauses.append(member.deadline - now)
        now = member.deadline
        member.due(now)
    assert pauses == [0.0, 1.0, 2.0, 3.0]
    assert member.state is MemberState.failed


def test_faults_that_are_older_than_the_window_are_forgotten():
    member = up()
    for fault in range(10):
        now = 101.0 * fault
        member.fault(member.epoch, "it died", now)
        member.stopped(now)
        assert member.deadline == now
        member.due(now)
    assert member.epoch == 10


def test_a_member_that_cannot_be_stopped_is_not_started_a_second_time():
    member = up()
    member.fault(0, "it hangs", 1.0)
    member.due(5.0)
    assert member.state is MemberState.failed


def test_a_member_without_a_place_waits_as_long_as_it_takes_and_then_starts_under_its_deadline():
    member = Member("engine-3", LIMITS, 0.0)
    member.unplaced(0)
    member.due(1e6)
    assert (member.state, member.seconds_left(1e6)) == (MemberState.pending, None)
    member.placed(0, 1e6)
    assert (member.state, member.seconds_left(1e6)) == (MemberState.starting, 10.0)


def test_a_member_that_dies_while_it_leaves_has_left():
    member = up()
    member.drain(1.0)
    assert member.fault(0, "it died", 2.0)
    member.stopped(3.0)
    assert (member.state, member.epoch) == (MemberState.left, 1)


def test_a_member_that_is_asked_to_leave_takes_no_more_work_and_leaves_by_its_deadline():
    member = up()
    member.drain(1.0)
    assert (member.state, member.is_serving, member.accepts(0)) == (MemberState.draining, False, True)
    member.due(21.0)
    assert member.state is MemberState.left
    early = Member("engine-4", LIMITS, 0.0)
    early.drain(1.0)
    early.started(0)
    assert early.state is MemberState.left
