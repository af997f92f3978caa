"""Who may join a fleet, and who may leave it: a driver that does everything at any time, against a plain model."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncrl.core.errors import MembershipRefused
from rollout_fleet.roster import Presence, Roster

FEWEST, MOST, NEEDED = 2, 5, 1
ranks = st.integers(0, 12)


class RosterMachine(RuleBasedStateMachine):
    """Joins, arrivals, departures and deaths in any order; every life that a rank was given for is written down."""

    def __init__(self):
        super().__init__()
        self.roster = Roster(fewest=FEWEST, most=MOST, needed=NEEDED)
        self.lives = list(range(FEWEST))

    @rule(number=st.integers(0, 4), kept=st.booleans())
    def join(self, number, kept):
        before, free = set(self.roster.ranks), self.roster.num_free
        try:
            given = self.roster.join(number, in_kept_places=kept)
        except MembershipRefused:
            assert number < 1 or number > free
            assert set(self.roster.ranks) == before
        else:
            assert len(given) == number
            assert not before & set(given), "no two members under one rank"
            assert kept or min(given) >= FEWEST
            self.lives += given

    @rule(rank=ranks)
    def arrived(self, rank):
        self.roster.arrived(rank)

    @rule(rank=ranks)
    def leave(self, rank):
        before = self.roster.presence_of(rank)
        others = [one for one in self.roster.ranks if one != rank and self.is_present(one)]
        try:
            self.roster.leave(rank)
        except MembershipRefused:
            assert before in (None, Presence.leaving) or (before is Presence.present and len(others) < NEEDED)
        else:
            assert before is Presence.coming or len(others) >= NEEDED
            assert self.roster.presence_of(rank) is Presence.leaving

    @rule(rank=ranks)
    def gone(self, rank):
        self.roster.gone(rank)

    def is_present(self, rank):
        return self.roster.presence_of(rank) is Presence.present

    @invariant()
    def the_fleet_is_never_larger_than_it_may_be(self):
        assert len(self.roster.ranks) + self.roster.num_free == MOST

    @invariant()
    def a_rank_beyond_the_kept_places_has_one_life(self):
        later = [rank for rank in self.lives if rank >= FEWEST]
        assert len(later) == len(set(later))


RosterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_a_roster_keeps_its_promises_whoever_comes_and_goes_when = RosterMachine.TestCase


def test_a_place_that_the_run_keeps_is_given_out_again_before_new_ones_are_asked_for():
    roster = Roster(fewest=2, most=4, needed=1)
    roster.leave(0)
    assert roster.num_free == 2
    roster.gone(0)
    assert roster.join(2) == [0, 2]
    roster.gone(2)
    assert roster.join(1) == [3]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda roster: roster.join(3), r"allows 3 engines; 2 are present or coming, got 3 more; ask for at most 1"),
        (lambda roster: roster.join(0), "--num must be >= 1 engines, got 0"),
        (lambda roster: roster.leave(7), r"no rollout worker 7, only \[0, 1\]"),
        (lambda roster: (roster.leave(0), roster.leave(0)), "rollout worker 0 is leaving already"),
        (lambda roster: (roster.leave(0), roster.leave(1)), "rollout worker 1 must stay: 0 engines would be left"),
        (lambda _: Roster(fewest=2, most=None, needed=1).join(1), r"a fixed size; .*num_engines=\{min: 2, max: 4\}"),
        (lambda _: Roster(fewest=2, most=None, needed=1).leave(1), "engines leave an elastic fleet only"),
    ],
)
def test_the_roster_refuses_with_a_remedy(ask, words):
    with pytest.raises(MembershipRefused, match=words):
        ask(Roster(fewest=2, most=3, needed=1))
