"""The thread that prepares batches: the order of the batches, and what it does if a batch is withdrawn."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.core.errors import BatchLost
from learner.prepared_batches import BatchPreparer, PreparedBatch, StepGroups
from learner.types import GroupShare, RankBatch

WAIT_S = 10.0


def batch(version: int, *group_ids: int) -> RankBatch:
    rewards = np.zeros(1, dtype=np.float32)
    shares = [GroupShare(group_id=group, samples=(0,), rewards=rewards, mini_batch=0) for group in group_ids]
    return RankBatch(version=version, shares=tuple(shares), max_lag=1)


class ScriptedRole:
    """A fake learner role. `prepare` adds the role's ``name`` to ``begun``, then waits for the event ``may_end``."""

    def __init__(self, begun: list[str], name: str, *, role: str = "actor", fails: bool = False, lost: int = 0) -> None:
        self.role, self.mesh = SimpleNamespace(name=role), SimpleNamespace(rank=3)
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.groups: list[StepGroups] = []
        self._begun, self._name, self._fails, self._lost = begun, name, fails, lost

    def prepare(self, batch: RankBatch, groups: StepGroups) -> PreparedBatch:
        self._begun.append(self._name)
        self.groups.append(groups)
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)
        if self._fails:
            raise RuntimeError(f"{self._name} failed")
        lost = frozenset(batch.group_ids[: self._lost])
        return PreparedBatch(groups={}, lost=lost, most_lost=len(lost), seconds=float(len(self._begun)))


@pytest.fixture
def preparer():
    preparer = BatchPreparer()
    yield preparer
    preparer.close()


@pytest.fixture
def begun() -> list[str]:
    return []


@pytest.fixture
def work(begun) -> Callable[..., ScriptedRole]:
    return lambda name, **options: ScriptedRole(begun, name, **options)


def test_a_batch_is_prepared_before_its_step_requests_it(preparer, work, begun):
    announced = work("announced")
    preparer.announce(announced, batch(3, 1))
    assert announced.has_begun.wait(WAIT_S)
    assert preparer.take(work("again"), batch(3, 1)).seconds == 1
    assert begun == ["announced"]


def test_a_batch_is_prepared_one_step_ahead_and_not_two(preparer, work, begun):
    next_one, later = work("next"), work("later")
    preparer.announce(work("first"), batch(0))
    preparer.announce(next_one, batch(1))
    preparer.announce(later, batch(2))
    preparer.take(work("never"), batch(0))
    assert next_one.has_begun.wait(WAIT_S)
    assert not later.has_begun.is_set()
    preparer.take(work("never"), batch(1))
    assert later.has_begun.wait(WAIT_S)
    assert begun == ["first", "next", "later"]


def test_the_order_of_preparation_does_not_depend_on_the_time_of_announcements(preparer, work, begun):
    """All ranks must prepare batches in the same order, because the preparation needs collectives.

    The controller's calls reach the two threads of a rank in any order.
    """
    for version in (0, 1):
        roles = [work(f"{role} {version}", role=role) for role in ("ref", "actor", "critic")]
        preparer.take(roles[0], batch(version, 1))
        for role in roles:
            preparer.announce(role, batch(version, 1))
        for role in roles[1:]:
            preparer.take(role, batch(version, 1))
    assert begun == ["ref 0", "actor 0", "critic 0", "ref 1", "actor 1", "critic 1"]


def test_roles_of_a_step_share_the_fetched_groups(preparer, work):
    ref, actor = work("ref", role="ref"), work("actor")
    for version, role in ((0, ref), (0, actor), (1, ref)):
        preparer.take(role, batch(version))
    assert ref.groups[0] is actor.groups[0]
    assert ref.groups[0] is not ref.groups[1]


def test_after_a_lost_batch_every_batch_fails_until_forget_is_called(preparer, work):
    with pytest.raises(BatchLost, match="step 4 is lost: rank 3 of 'actor' did not find 2 of its 3 groups"):
        preparer.take(work("lost", lost=2), batch(4, 9, 7, 8))
    with pytest.raises(BatchLost, match="the batch of step 5 is lost"):
        preparer.take(work("whole"), batch(5, 6))
    assert preparer.forget() == [7, 9]
    assert preparer.forget() == []
    preparer.take(work("again"), batch(4, 6))


def test_the_step_of_a_batch_raises_the_error_of_its_preparation(preparer, work):
    preparer.announce(work("first"), batch(0))
    preparer.announce(work("second", fails=True), batch(1))
    preparer.take(work("never"), batch(0))
    with pytest.raises(RuntimeError, match="second failed"):
        preparer.take(work("never"), batch(1))


def test_a_batch_that_is_withdrawn_while_it_is_prepared_is_prepared_again(preparer, work, begun):
    slow, waiting = work("slow"), work("waiting")
    slow.may_end.clear()
    preparer.announce(slow, batch(5, 1))
    preparer.announce(waiting, batch(6, 2))
    assert slow.has_begun.wait(WAIT_S)
    preparer.forget()
    preparer.announce(work("new"), batch(5, 1))
    slow.may_end.set()
    assert preparer.take(work("never"), batch(5, 1)).seconds == 2
    assert begun == ["slow", "new"]


def test_a_batch_with_other_groups_is_not_mistaken_for_the_announced_batch(preparer, work, begun):
    preparer.announce(work("announced"), batch(5, 1))
    preparer.take(work("other"), batch(5, 2))
    assert begun == ["announced", "other"]
