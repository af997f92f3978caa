"""Groups that the learner trains on in more than one step."""

import pytest

from asyncrl.core.errors import ReplayBufferError, WireError
from buffer import BufferConfig, Durability
from buffer.groups import GroupState
from buffer.rule import StalenessRule
from buffer.service import check_counts
from tests.support.buffer_groups import prompt, rollout, running
from tests.support.ledgers import DrivenLedger, ledger, summary_of


def using(max_lag: int, size: int, max_uses: int, **options) -> DrivenLedger:
    rule = StalenessRule(max_lag=max_lag, groups_per_step=size, max_uses=max_uses)
    of = DrivenLedger(rule, **options)
    of.enqueue(range(100))
    return of


def generate(of: DrivenLedger, number: int, *, behind: int = 0) -> list[int]:
    leases = of.lease(of.learner_version - behind, number)
    for lease in leases:
        of.put(summary_of(lease))
    return [lease.group_id for lease in leases]


def test_a_group_trains_again_if_there_are_too_few_new_groups():
    of = using(max_lag=2, size=2, max_uses=3)
    assert generate(of, 2) == [0, 1]
    steps = [of.step() for _ in range(3)]
    assert steps == [[0, 1], [0, 1], [0, 1]], "each use must be in another step"
    assert of.plan(3) is None
    stats = of.stats()
    assert (stats.tokens_trained, stats.tokens_reused, stats.tokens_buffered) == (10, 20, 0)
    assert (stats.groups["consumed"], stats.groups_reused, stats.lag_histogram) == (2, 4, {0: 2, 1: 2, 2: 2})


def test_no_group_is_used_again_if_new_groups_fill_the_bound():
    of = using(max_lag=1, size=2, max_uses=2)
    generate(of, 4)
    assert of.step() == [0, 1]
    assert [group.group_id for group in of.groups.of_state(GroupState.stored)] == [2, 3]


def test_a_further_use_has_the_deadline_of_the_first_use():
    of = using(max_lag=2, size=1, max_uses=3)
    generate(of, 1)
    of.step()
    generate(of, 1)  # this group is due one version later than the trained group
    assert {group.group_id: group.deadline for group in of.groups.of_state(GroupState.stored)} == {0: 2, 1: 3}
    assert of.plan(1).groups[0].num_uses == 1


def test_with_max_uses_1_a_committed_group_leaves_the_buffer():
    of = ledger(max_lag=2, groups_per_step=1)
    generate(of, 1)
    of.step()
    assert 0 not in of.groups


def test_a_lost_group_that_was_used_is_neither_dropped_nor_generated_again():
    of = using(max_lag=2, size=1, max_uses=2)
    generate(of, 1)
    of.step()
    of.lose([0])
    assert (of.stats().tokens_dropped, of.stats().tokens_trained) == ({}, 5)
    assert 0 not in of.groups
    assert of.enqueue([0]) == []
    assert of.attempts.drain_finished() == [0], "the buffer must forget the group's prompt"


def test_a_used_group_is_evicted_for_any_group_that_does_not_fit():
    of = using(max_lag=2, size=2, max_uses=2, max_bytes=30)
    for lease in of.lease(0, 2):
        of.put(summary_of(lease), num_bytes=10)
    of.step()
    of.lose([1])
    [lease] = of.lease(1, 1)
    assert of.reserve(lease, 25).evicted == (0,)
    assert of.stats().tokens_dropped == {}


def test_a_rewind_removes_only_the_later_uses_of_a_group():
    of = using(max_lag=3, size=1, max_uses=3)
    generate(of, 1)
    of.step()
    of.checkpoint(1)
    of.step()
    of.rewind(1)
    assert of.groups[0].uses == (0,)
    assert (of.stats().tokens_trained, of.stats().tokens_reused) == (5, 0)
    of.step()
    of.rewind(0)
    assert of.groups[0].uses == ()
    assert (of.stats().tokens_trained, of.stats().tokens_buffered, of.stats().lag_histogram) == (0, 5, {})
    assert of.step() == [0]


def test_a_resume_with_a_lower_max_uses_removes_groups_without_remaining_uses():
    of = using(max_lag=2, size=1, max_uses=3)
    generate(of, 1)
    of.step()
    of.checkpoint(1)
    less = DrivenLedger(StalenessRule(max_lag=2, groups_per_step=1))
    less.restore(of.snapshot())
    less.resume(1, tokens_generated=5)
    assert 0 not in less.groups
    assert (less.stats().tokens_trained, less.stats().tokens_dropped) == (5, {})


@pytest.mark.parametrize(("max_lag", "max_uses"), [(0, 2), (2, 4), (2, 0)])
def test_a_max_uses_that_max_lag_does_not_allow_is_refused(max_lag: int, max_uses: int):
    with pytest.raises(ValueError, match=r"buffer.max_uses must be in 1..buffer.max_lag \+ 1"):
        BufferConfig(max_lag=max_lag, max_uses=max_uses)


def test_a_worker_cannot_report_uses_in_a_put():
    of = using(max_lag=1, size=1, max_uses=2)
    generate(of, 1)
    of.step()
    with pytest.raises(WireError, match=r"num_uses .*must be 0 in a put, got 1"):
        check_counts(of.groups[0].result)


@pytest.mark.parametrize("num_store_servers", [0, 1])
async def test_the_payload_of_a_group_stays_until_its_last_use(num_store_servers: int):
    async with running(groups_per_step=1, max_lag=2, max_uses=2, num_store_servers=num_store_servers) as run:
        client = run.client()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.put(rollout(lease))
        for step in range(2):
            assert [group.num_uses for group in (await client.plan(step)).groups] == [step]
            assert [group.group_id for group in await client.fetch([0])] == [0]
            stats = await client.commit(step)
        assert (stats.stored_bytes, stats.held_bytes, stats.groups_reused) == (0, 0, 1)
        with pytest.raises(ReplayBufferError):
            await client.fetch([0])


async def test_a_restarted_buffer_continues_with_the_uses_of_its_groups(tmp_path):
    disk = {"durability": Durability.disk, "directory": str(tmp_path / "buffer")}
    for num_store_servers in (0, 1):
        options = disk | {
            "directory": f"{disk['directory']}-{num_store_servers}",
            "num_store_servers": num_store_servers,
        }
        async with running(groups_per_step=1, max_lag=2, max_uses=2, **options) as run:
            client = run.client()
            await client.enqueue([prompt(0)])
            [lease] = await client.lease(0, 1)
            await client.put(rollout(lease))
            await client.plan(0)
            await client.commit(0)
        async with running(groups_per_step=1, max_lag=2, max_uses=2, **options) as run:
            client = run.client()
            assert [group.num_uses for group in (await client.plan(1)).groups] == [1]
            assert [group.group_id for group in await client.fetch([0])] == [0]
            assert (await client.commit(1)).tokens_reused > 0
