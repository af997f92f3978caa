"""The buffer drops a prompt whose workers die again and again. It does not drop other prompts of these workers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import LeaseExpired
from buffer import BufferConfig
from buffer.commands import GrantedLease, Progress, TakeBack
from buffer.groups import Group
from buffer.rule import StalenessRule
from tests.support.buffer_groups import prompt, rollout, running
from tests.support.ledgers import DrivenLedger, summary_of


def ledger(num_prompts: int, *, max_deaths: int) -> DrivenLedger:
    of = DrivenLedger(StalenessRule(max_lag=4, groups_per_step=1000), max_deaths=max_deaths)
    of.enqueue(range(num_prompts))
    return of


@settings(max_examples=60, deadline=None)
@given(
    num_prompts=st.integers(1, 40),
    max_deaths=st.integers(2, 4),
    num_workers=st.integers(1, 3),
    num_places=st.integers(1, 9),
    data=st.data(),
)
def test_only_the_prompt_that_kills_its_workers_is_dropped(
    num_prompts: int, max_deaths: int, num_workers: int, num_places: int, data: st.DataObject
) -> None:
    of, poison = ledger(num_prompts, max_deaths=max_deaths), data.draw(st.integers(0, num_prompts - 1))
    num_deaths, stored = 0, 0
    while stored + num_deaths // max_deaths < num_prompts:
        owner = bytes([data.draw(st.integers(0, num_workers - 1))])
        of.lease(0, num_places - of.groups.leases.num_of_owner(owner), owner=owner)
        held = of.groups.leases.of_owner(owner)
        assert sum(group.num_deaths >= max_deaths - 1 for group in held) <= 1
        if poison in [group.group_id for group in held]:
            num_deaths += 1
            of.take_back(owner)
        elif held:
            done = data.draw(st.sampled_from(held))
            of.put(summary_of(lease_of(done)))
            stored += 1
    assert num_deaths == max_deaths
    assert dict(of.account.groups_dropped) == {"worker_died": 1}
    assert poison not in of.groups


def lease_of(group: Group) -> GrantedLease:
    return GrantedLease(group_id=group.group_id, attempt=group.attempt, engine_version=0, deadline=group.deadline)


def test_a_group_that_finished_after_a_death_is_not_suspected_any_longer():
    of = ledger(2, max_deaths=2)
    of.lease(0, 2, owner=b"a")
    of.take_back(b"a")
    [first] = of.lease(0, 2, owner=b"a")
    assert of.lease(0, 1, owner=b"a") == [], "worker a already has a lease of a suspect group"
    [other] = of.lease(0, 1, owner=b"b")
    of.put(summary_of(first))
    of.lose([first.group_id])
    [again] = of.lease(0, 2, owner=b"b")
    assert (again.group_id, again.attempt) == (first.group_id, 2)
    of.take_back(b"b")
    assert of.stats().groups_dropped == {"worker_died": 1}
    assert other.group_id not in of.groups
    assert first.group_id in of.groups


def test_tokens_of_a_dropped_group_are_counted_once_and_its_late_put_is_refused():
    of = ledger(1, max_deaths=1)
    [lease] = of.lease(0, 1, owner=b"a")
    of.save(lease, Progress(num_tokens=3, oldest_version=0, newest_version=0))
    taken = of.apply(TakeBack(owner=b"a", num_generated=9))
    assert (taken.group_ids, taken.dropped, taken.num_lost) == ((0,), (0,), 6)
    assert of.stats().tokens_dropped == {"worker_died": 3, "lost": 6}
    with pytest.raises(LeaseExpired):
        of.put(summary_of(lease))
    assert of.stats().groups["dropped"] == 1


def test_without_a_limit_the_deaths_of_workers_drop_no_group():
    of = ledger(1, max_deaths=0)
    for _ in range(20):
        assert len(of.lease(0, 1, owner=b"a")) == 1
        of.take_back(b"a")
    assert of.groups.num_queued == 1


async def test_a_prompt_is_dropped_after_max_worker_deaths_and_other_prompts_are_trained():
    async with running(groups_per_step=3, max_worker_deaths=2) as run:
        control = run.client()
        await control.enqueue([prompt(i) for i in range(4)])
        for number in range(2):
            worker = run.client(name=f"worker {number}")
            name = await worker.enter()
            leases = await worker.lease(0, 4)
            assert 3 in [lease.prompt.group_id for lease in leases], "the worker must get the prompt that kills workers"
            assert len(leases) == (4, 1)[number], "after a death, suspects are leased one at a time"
            await control.bury(name)
        survivor = run.client(name="worker 2")
        for _ in range(3):
            [lease] = await survivor.lease(0, 4)
            await survivor.put(rollout(lease))
        assert sorted(group.group_id for group in (await control.plan(0)).groups) == [0, 1, 2]
        assert (await control.stats()).groups_dropped == {"worker_died": 1}


def test_the_limit_on_worker_deaths_must_not_be_negative():
    with pytest.raises(ValueError, match=r"buffer.max_worker_deaths must be >= 0, got -1; 0 drops no group"):
        BufferConfig(max_worker_deaths=-1)
