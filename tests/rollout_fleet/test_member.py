"""The state machine of a member, in virtual time."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.core.lives import Faults
from rollout_fleet.member import ENDED, Member, MemberState

RESTARTS, WINDOW_S = 4, 100.0
ANY_TIME = {MemberState.fenced, MemberState.failed}
NEXT = {
    MemberState.starting: {MemberState.pending, MemberState.catching_up, MemberState.left, *ANY_TIME},
    MemberState.pending: {MemberState.starting, MemberState.left, *ANY_TIME},
    MemberState.catching_up: {MemberState.ready, MemberState.left, *ANY_TIME},
    MemberState.ready: {MemberState.draining, *ANY_TIME},
    MemberState.draining: {MemberState.left, *ANY_TIME},
    MemberState.fenced: {MemberState.backoff, MemberState.failed, MemberState.left},
    MemberState.backoff: {MemberState.starting, MemberState.failed, MemberState.left},
    MemberState.left: set(),
    MemberState.failed: set(),
}
"""The states that may follow each state, as the docstring of `rollout_fleet.member` draws them."""
epochs_ago = st.integers(0, 2)


def make_member() -> Member:
    return Member("engine-3", Faults(RESTARTS, window_s=WINDOW_S, backoff_s=1.0, longest_backoff_s=3.0))


def up() -> Member:
    """Return a member (a rollout worker with its engine) that has started and serves verified weights."""
    member = make_member()
    member.started(0)
    member.verified(0)
    return member


class MemberMachine(RuleBasedStateMachine):
    """Sends a member events in any order: reports of any epoch, faults, and requests to leave.

    An epoch is one start of the member's worker. The machine checks each change of state, and records the epochs in
    which the member verified weights.
    """

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.member = make_member()
        self.member.on_enter = self.entered
        self.before = (MemberState.starting, 0)
        self.verified_in: set[int] = set()
        self.faults: list[float] = []
        self.is_leaving = False

    def entered(self, state, epoch):
        (before, epoch_before), self.before = self.before, (state, epoch)
        assert state in NEXT[before]
        assert epoch - epoch_before in (0, 1)
        assert state is not MemberState.fenced or epoch == epoch_before + 1
        assert state is not MemberState.starting or not self.is_leaving

    def epoch(self, ago):
        return max(0, self.member.epoch - ago)

    @rule(ago=epochs_ago)
    def unplaced(self, ago):
        self.member.unplaced(self.epoch(ago))

    @rule(ago=epochs_ago)
    def placed(self, ago):
        self.member.placed(self.epoch(ago))

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
        if self.member.fault(epoch, self.now):
            assert (epoch, self.member.epoch) == (before, before + 1)
            self.faults.append(self.now)
        else:
            assert self.member.epoch == before

    @rule()
    def stopped(self):
        was_fenced = self.member.state is MemberState.fenced
        pause_s = self.member.stopped()
        if was_fenced:
            recent = [at for at in self.faults if at + WINDOW_S > self.faults[-1]]
            ends = MemberState.left if self.is_leaving else MemberState.failed
            assert (self.member.state is ends) == (self.is_leaving or len(recent) > RESTARTS)
            assert (self.member.state is MemberState.backoff) == (pause_s is not None)
            assert pause_s is None or pause_s == [0.0, 1.0, 2.0, 3.0][len(recent) - 1]

    @rule()
    def restart(self):
        was_paused = self.member.state is MemberState.backoff
        self.member.restart()
        assert not was_paused or self.member.state is MemberState.starting

    @precondition(lambda self: self.member.epoch > 1)
    @rule()
    def fail(self):
        had_ended = self.member.has_ended
        self.member.fail()
        assert had_ended or self.member.state is MemberState.failed

    @precondition(lambda self: self.member.epoch > 1)
    @rule()
    def drain(self):
        self.is_leaving = True
        self.member.drain()

    @rule()
    def drained(self):
        before = self.member.state
        self.member.drained()
        assert self.member.has_ended if self.is_leaving else self.member.state is before

    @rule(seconds=st.floats(0.0, 40.0))
    def pass_time(self, seconds):
        self.now += seconds

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
    def a_member_that_was_asked_to_leave_takes_no_more_work_and_is_not_started_again(self):
        ending = {MemberState.draining, MemberState.fenced, MemberState.left, MemberState.failed}
        assert not self.is_leaving or self.member.state in ending


MemberMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_a_member_keeps_its_promises_whatever_is_reported_when = MemberMachine.TestCase


def test_a_member_serves_after_it_has_verified_its_first_weights():
    member = make_member()
    member.verified(0)
    assert (member.state, member.is_serving) == (MemberState.starting, False), "the member has not started yet"
    member.started(0)
    assert (member.state, member.is_serving, member.may_release) == (MemberState.catching_up, False, True)
    member.verified(0)
    assert (member.state, member.is_serving, member.may_release) == (MemberState.ready, True, True)


def test_reports_of_an_earlier_epoch_have_no_effect():
    member = up()
    member.fault(0, 1.0)
    member.stopped()
    member.restart()
    assert (member.state, member.epoch) == (MemberState.starting, 1)
    member.started(0)
    member.verified(0)
    assert not member.fault(0, 2.5)
    assert (member.state, member.epoch) == (MemberState.starting, 1)


def test_the_pause_before_a_restart_grows_and_the_restarts_per_window_are_limited():
    member, now, pauses = up(), 0.0, []
    while True:
        member.fault(member.epoch, now)
        if (pause_s := member.stopped()) is None:
            break
        pauses.append(pause_s)
        now += pause_s
        member.restart()
    assert pauses == [0.0, 1.0, 2.0, 3.0]
    assert member.state is MemberState.failed


def test_faults_before_the_window_are_not_counted():
    member = up()
    for fault in range(10):
        member.fault(member.epoch, 101.0 * fault)
        assert (member.stopped(), member.state) == (0.0, MemberState.backoff)
        member.restart()
    assert member.epoch == 10


def test_a_member_restarts_only_after_its_processes_have_ended():
    member = up()
    member.fault(0, 1.0)
    member.restart()
    assert member.state is MemberState.fenced


def test_a_member_without_resources_waits_for_them_and_then_starts():
    member = make_member()
    member.unplaced(0)
    member.started(0)
    assert member.state is MemberState.pending
    member.placed(0)
    assert member.state is MemberState.starting


def test_a_leaving_member_that_dies_is_in_the_state_left():
    member = up()
    member.drain()
    assert member.fault(0, 2.0)
    member.stopped()
    assert (member.state, member.epoch) == (MemberState.left, 1)


@pytest.mark.parametrize("dies", [False, True])
def test_a_draining_member_gets_no_work_and_leaves_when_it_is_drained_or_dies(dies):
    member = up()
    member.drain()
    assert (member.state, member.is_serving, member.accepts(0)) == (MemberState.draining, False, True)
    if dies:
        member.fault(0, 2.0)
    member.drained()
    assert member.state is MemberState.left
    early = make_member()
    early.drain()
    early.started(0)
    assert early.state is MemberState.left
