"""The thread that prepares batches: the order of the batches, and withdrawn batches."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from learner.prepared_batches import BatchPreparer, PreparedBatch, StepGroups
from learner.types import GroupShare, RankBatch

WAIT_S = 10.0


def batch(version: int, *group_ids: int) -> RankBatch:
    rewards = np.zeros(1, dtype=np.float32)
    shares = [GroupShare(group_id=group, samples=(0,), rewards=rewards, mini_batch=0) for group in group_ids]
    return RankBatch(version=version, shares=tuple(shares), max_lag=1)


class Preparation:
    """A preparation that notes when it begins, and waits until it is allowed to end."""

    def __init__(self, begun: list[str], name: str, *, fails: bool = False) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self._begun, self._name, self._fails = begun, name, fails

    def __call__(self, groups: StepGroups) -> PreparedBatch:
        self._begun.append(self._name)
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)
        if self._fails:
            raise RuntimeError(f"{self._name} failed")
        return PreparedBatch(groups={}, lost=frozenset(), most_lost=0, seconds=float(len(self._begun)))


@pytest.fixture
def preparer():
    preparer = BatchPreparer()
    yield preparer
    preparer.close()


@pytest.fixture
def begun() -> list[str]:
    return []


@pytest.fixture
def work(begun) -> Callable[..., Preparation]:
    return lambda name, **options: Preparation(begun, name, **options)


def test_a_batch_is_prepared_before_its_step_asks_for_it(preparer, work, begun):
    announced = work("announced")
    preparer.announce("actor", batch(3, 1), announced)
    assert announced.has_begun.wait(WAIT_S)
    assert preparer.take("actor", batch(3, 1), work("again")).seconds == 1
    assert begun == ["announced"]


def test_a_batch_is_prepared_one_step_ahead_and_not_two(preparer, work, begun):
    next_one, later = work("next"), work("later")
    preparer.announce("actor", batch(0), work("first"))
    preparer.announce("actor", batch(1), next_one)
    preparer.announce("actor", batch(2), later)
    preparer.take("actor", batch(0), work("never"))
    assert next_one.has_begun.wait(WAIT_S)
    assert not later.has_begun.is_set()
    preparer.take("actor", batch(1), work("never"))
    assert later.has_begun.wait(WAIT_S)
    assert begun == ["first", "next", "later"]


def test_batches_are_prepared_in_one_order_whether_announced_before_or_after_their_steps(preparer, work, begun):
    """Preparing needs collectives, but the calls of the controller reach the two threads of each rank in any order."""
    for version in (0, 1):
        preparer.take("ref", batch(version, 1), work(f"ref {version}"))
        for role in ("ref", "actor", "critic"):
            preparer.announce(role, batch(version, 1), work(f"{role} {version}"))
        preparer.take("actor", batch(version, 1), work(f"actor {version}"))
        preparer.take("critic", batch(version, 1), work(f"critic {version}"))
    assert begun == ["ref 0", "actor 0", "critic 0", "ref 1", "actor 1", "critic 1"]


def test_roles_of_a_step_share_the_groups_that_were_fetched(preparer):
    seen: list[StepGroups] = []

    def prepare(groups: StepGroups) -> PreparedBatch:
        seen.append(groups)
        return PreparedBatch(groups={}, lost=frozenset(), most_lost=0)

    for version, role in ((0, "ref"), (0, "actor"), (1, "ref")):
        preparer.take(role, batch(version), prepare)
    assert seen[0] is seen[1]
    assert seen[0] is not seen[2]


def test_a_failed_preparation_is_raised_by_its_own_step(preparer, work):
    preparer.announce("actor", batch(0), work("first"))
    preparer.announce("actor", batch(1), work("second", fails=True))
    preparer.take("actor", batch(0), work("never"))
    with pytest.raises(RuntimeError, match="second failed"):
        preparer.take("actor", batch(1), work("never"))


def test_a_batch_that_is_withdrawn_while_it_is_prepared_is_prepared_again(preparer, work, begun):
    slow, waiting = work("slow"), work("waiting")
    slow.may_end.clear()
    preparer.announce("actor", batch(5, 1), slow)
    preparer.announce("actor", batch(6, 2), waiting)
    assert slow.has_begun.wait(WAIT_S)
    preparer.forget()
    preparer.announce("actor", batch(5, 1), work("new"))
    slow.may_end.set()
    assert preparer.take("actor", batch(5, 1), work("never")).seconds == 2
    assert begun == ["slow", "new"]


def test_a_batch_with_other_groups_is_not_taken_for_the_announced_one(preparer, work, begun):
    preparer.announce("actor", batch(5, 1), work("announced"))
    preparer.take("actor", batch(5, 2), work("other"))
    assert begun == ["announced", "other"]
