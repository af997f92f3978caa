"""What the ledger, the log of offers and the stores do when the learner goes back to a checkpoint."""

import asyncio
from itertools import accumulate
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import LeaseExpired, ReplayBufferError, StoreFull, UnknownGroup, WrongEpoch
from buffer import Durability
from buffer.account import IdSet
from buffer.commands import GrantedLease, Progress, Rewind
from buffer.groups import GroupState
from buffer.rule import StalenessRule
from tests.support.buffer_groups import prompt, rollout, running
from tests.support.ledgers import DrivenLedger, RecordedCommands, summary_of
from tests.support.offers import bare_offer

MAX_LAG, SIZE = 2, 2


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)))
def test_the_difference_of_two_id_sets_equals_the_difference_of_python_sets(one: set[int], other: set[int]):
    sets = [IdSet() for _ in range(2)]
    for ids, values in zip(sets, (one, other), strict=True):
        for value in values:
            ids.add(value)
    assert sets[0].minus(sets[1]) == sorted(one - other)


class Life:
    """A ledger, its running leases, and a pair in ``saved`` for each checkpoint: version, number of trained tokens."""

    def __init__(self) -> None:
        self.ledger = self.new()
        self.ledger.log = self.log = RecordedCommands()
        self.saved = [(0, 0)]
        self.running: list[GrantedLease] = []
        self.reported = 0
        self.attempts: set[tuple[int, int]] = set()

    @staticmethod
    def new() -> DrivenLedger:
        return DrivenLedger(StalenessRule(max_lag=MAX_LAG, groups_per_step=SIZE))

    def lease(self, number: int, behind: int = 0) -> None:
        """Lease groups to an engine. The engine's version is the learner's version minus ``behind``."""
        for lease in self.ledger.lease(max(0, self.ledger.learner_version - behind), number, owner=b"w"):
            assert (lease.group_id, lease.attempt) not in self.attempts, "no attempt of a group may be leased twice"
            self.attempts.add((lease.group_id, lease.attempt))
            self.running.append(lease)

    def put(self, number: int) -> None:
        for lease in self.running[:number]:
            self.report(lease, refused=False)
        del self.running[:number]

    def report(self, lease: GrantedLease, *, refused: bool) -> None:
        newest = max(lease.engine_version, self.ledger.learner_version - lease.group_id % 2)
        summary = summary_of(lease, lengths=(lease.group_id % 5 + 1,), newest=newest)
        self.reported += summary.num_tokens
        if refused:
            with pytest.raises(LeaseExpired):
                self.ledger.put(summary)
        else:
            self.ledger.put(summary)

    def step(self, *, plans_ahead: bool) -> None:
        version = self.ledger.learner_version
        if self.ledger.plan(version) is None:
            return
        if plans_ahead:
            self.ledger.plan(version + 1)
        self.ledger.checkpoint(version + 1)
        self.ledger.commit(version)
        account = self.ledger.account
        self.saved.append((version + 1, account.tokens_trained))

    def rewind(self, back: int) -> None:
        del self.saved[max(1, len(self.saved) - back) :]
        version, tokens = self.saved[-1]
        stored = [group.result for group in self.ledger.groups if group.summary is not None]
        kept = {summary.group_id for summary in stored if summary.newest_version <= version}
        command = Rewind(version=version, incarnation=self.ledger.incarnation + 1)
        assert self.ledger.apply(command).is_new
        assert not self.ledger.apply(command).is_new
        for lease in self.running:  # workers that do not know yet that their leases were revoked
            self.report(lease, refused=True)
        self.running.clear()
        assert self.ledger.learner_version == self.ledger.next_plan == version
        assert self.ledger.groups.num_leased == self.ledger.groups.num_planned == 0
        assert {group.group_id for group in self.ledger.groups.of_state(GroupState.stored)} == kept
        due = [*accumulate(self.ledger.groups.open_by_deadline.get(version + k, 0) for k in range(MAX_LAG + 1))]
        assert due[-1] == len(kept), "no group may be due after version + MAX_LAG"
        assert all(number <= (k + 1) * SIZE for k, number in enumerate(due)), "more groups are due than steps can take"
        assert self.ledger.account.tokens_trained == tokens
        self.ledger.enqueue(range(100))  # the ledger ignores groups that it already has

    def check(self) -> None:
        account = self.ledger.account
        assert self.reported == account.tokens_trained + account.tokens_dropped.total() + account.tokens_buffered
        replayed = self.new()
        for command, outcome in self.log.read():
            replayed.enact(command, outcome)
        assert msgpack.packb(replayed.snapshot()) == msgpack.packb(self.ledger.snapshot())
        restored = self.new()
        restored.restore(msgpack.unpackb(msgpack.packb(self.ledger.snapshot()), strict_map_key=False))
        assert msgpack.packb(restored.snapshot()) == msgpack.packb(self.ledger.snapshot())


ACTIONS = st.one_of(
    st.tuples(st.just("lease"), st.integers(1, 6), st.integers(0, 2)),
    st.tuples(st.just("put"), st.integers(1, 6)),
    st.tuples(st.just("step"), st.booleans()),
    st.tuples(st.just("rewind"), st.integers(0, 4)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_after_any_rewinds_the_account_balances_and_no_attempt_is_leased_twice(actions):
    life = Life()
    life.ledger.enqueue(range(100))
    for name, *arguments in actions:
        if name == "step":
            life.step(plans_ahead=arguments[0])
        else:
            getattr(life, name)(*arguments)
        if name == "rewind":
            life.check()
    life.rewind(0)
    for _ in range(100):  # every prompt is trained, also prompts that were trained before the rewind
        life.lease(2 * SIZE)
        life.put(2 * SIZE)
        life.step(plans_ahead=False)
    life.check()
    assert life.ledger.history.finished.ranges() == [(0, 100)]
    assert max(life.ledger.account.lags) <= MAX_LAG


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTIONS, max_size=30), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2))
def test_a_resume_with_another_bound_keeps_as_many_groups_as_steps_can_take_in_time(
    actions, max_lag: int, size: int, back: int
):
    life = Life()
    life.ledger.enqueue(range(100))
    for name, *arguments in actions:
        life.step(plans_ahead=arguments[0]) if name == "step" else getattr(life, name)(*arguments)
    version, _ = life.saved[max(0, len(life.saved) - 1 - back)]
    ledger = DrivenLedger(StalenessRule(max_lag=max_lag, groups_per_step=size))
    ledger.restore(msgpack.unpackb(msgpack.packb(life.ledger.snapshot()), strict_map_key=False))
    may_stay = [g.engine_version + max_lag for g in ledger.groups if g.summary and g.newest_version <= version]
    num_tokens = ledger.account.num_tokens
    resumed = ledger.resume(version, tokens_generated=num_tokens + 3, key="saved" if version else "")
    assert ledger.account.num_tokens == num_tokens + 3
    assert ledger.incarnation == 0
    due = [*accumulate(ledger.groups.open_by_deadline.get(version + k, 0) for k in range(max_lag + 1))]
    assert due[-1] == ledger.groups.num_stored == len(may_stay) - len(resumed.unfit)
    assert all(number <= (k + 1) * size for k, number in enumerate(due)), "more groups are due than steps can take"
    most = max(n for n in range(len(may_stay) + 1) if _fits(sorted(may_stay)[len(may_stay) - n :], version, size))
    assert ledger.groups.num_stored >= most, "the ledger must keep as many groups as fit"
    if (max_lag, size) == (MAX_LAG, SIZE):
        assert not resumed.unfit


def _fits(deadlines: list[int], version: int, size: int) -> bool:
    return all(deadline >= version + i // size for i, deadline in enumerate(deadlines))


def test_a_rewind_to_a_future_version_or_without_a_checkpoint_is_refused():
    life = Life()
    with pytest.raises(ReplayBufferError, match=r"rewind\(1\) was requested at learner version 0"):
        life.ledger.apply(Rewind(version=1, incarnation=1))
    life.ledger.enqueue(range(2))
    life.lease(2)
    life.put(2)
    assert life.ledger.step() == [0, 1]
    with pytest.raises(ReplayBufferError, match=r"cannot go back to version 1: it remembers checkpoints .* \[0\]"):
        life.ledger.apply(Rewind(version=1, incarnation=1))
    with pytest.raises(ReplayBufferError, match=r"checkpoint\(2\) was requested at learner version 1.* in 1\.\.1"):
        life.ledger.checkpoint(2)


def test_a_rewind_keeps_groups_and_prefixes_without_tokens_of_lost_versions():
    ledger = Life.new()
    ledger.enqueue(range(10))
    leases = ledger.lease(0, 6, owner=b"w")
    for lease in leases[:4]:
        ledger.put(summary_of(lease))
    assert ledger.step() == [0, 1]
    ledger.checkpoint(1)
    assert ledger.step() == [2, 3]
    new, running = ledger.lease(2, 2, owner=b"w")
    stopped = leases[5]
    ledger.save(stopped, Progress(num_tokens=4, oldest_version=0, newest_version=1))
    ledger.release(stopped.group_id, stopped.attempt, num_tokens=4, reason="stopped")
    ledger.put(summary_of(leases[4], newest=1))
    ledger.put(summary_of(new))
    ledger.save(running, Progress(num_tokens=4, oldest_version=2, newest_version=2))
    plan = ledger.plan(2)
    assert plan is not None
    assert [group.group_id for group in plan.groups] == [4, 6]

    ledger.rewind(1)
    assert ledger.account.tokens_dropped == {"rewound": 10 + 5 + 4}, "batch 1, the group and the prefix are lost"
    assert (ledger.account.tokens_trained, ledger.account.tokens_buffered) == (10, 5 + 4)
    again = ledger.lease(1, 3, owner=b"w")
    assert [lease.group_id for lease in again] == [6, 7, 5]
    assert [lease.num_inherited for lease in again] == [0, 0, 4]
    assert [lease.deadline for lease in again] == [3, 3, 2], "the prefix begins at version 0"
    ledger.put(summary_of(again[0]))
    assert ledger.step() == [4, 6]
    assert ledger.account.lags == {0: 3, 1: 1}


async def train(client, version: int) -> None:
    for lease in await client.lease(version, 2):
        await client.put(rollout(lease))
    await client.plan(version)
    await client.commit(version)


async def test_engines_get_leases_only_after_they_loaded_weights_of_the_restarted_learner(tmp_path: Path):
    async with running(groups_per_step=2, max_lag=4, num_store_servers=1) as run:
        control, worker = run.client(), run.client()
        old, new = run.client(), run.client(incarnation=1)
        await control.enqueue([prompt(i) for i in range(8)])
        await old.offer(bare_offer(0))
        for version in range(2):
            await worker.loaded((await worker.next_offer(version - 1)).version, 0.1)
            await train(worker, version)
            await control.checkpoint(tmp_path / f"v{version + 1:08d}", version + 1, key=f"{version}")
            await old.offer(bare_offer(version + 1))
        await worker.loaded((await worker.next_offer(1)).version, 0.1)
        [held] = await worker.lease(2, 1)
        waiting = asyncio.ensure_future(worker.next_offer(2))
        following = asyncio.ensure_future(control.served(1, 1))
        assert (await following)[0] == 2
        await control.rewind(1, incarnation=1)
        await control.rewind(1, incarnation=1)  # a repeated request

        assert await worker.revocation() == (held.prompt.group_id, held.attempt)
        with pytest.raises(LeaseExpired):
            await worker.put(rollout(held))
        with pytest.raises(WrongEpoch, match=r"from incarnation 0 .* serves 1"):
            await old.offer(bare_offer(3))
        leasing = asyncio.ensure_future(worker.lease(2, 2))
        await control.enqueue([prompt(i) for i in range(8)])
        await control.stats()
        assert not leasing.done(), "an engine with lost weights must not get a lease"
        assert not waiting.done()
        await new.offer(bare_offer(1))
        offer = await asyncio.wait_for(waiting, 5)
        assert (offer.version, offer.incarnation) == (1, 1)
        leasing.cancel()
        await asyncio.gather(leasing, return_exceptions=True)
        await worker.loaded(1, 0.2)
        assert await control.served(0, 1) == (1, 0.2)
        for version in range(1, 4):
            await train(worker, version)
        stats = await control.stats()
        assert (stats.tokens_trained, stats.learner_version) == (40, 4)
        assert stats.tokens_dropped == {"rewound": 15}, "a trained batch and a late report are lost"


async def test_a_waiting_lease_request_uses_the_version_that_its_engine_loads_meanwhile():
    async with running(groups_per_step=1, max_lag=4) as run:
        control, worker, new = run.client(), run.client(), run.client(incarnation=1)
        await control.enqueue([prompt(0)])
        await control.rewind(0, incarnation=1)
        leasing = asyncio.ensure_future(worker.lease(0, 1))
        await new.offer(bare_offer(0))
        await worker.loaded((await worker.next_offer(5)).version, 0.1)
        [lease] = await asyncio.wait_for(leasing, 2)
        assert lease.engine_version == 0


async def test_withdrawn_offers_stay_withdrawn_after_a_server_restart(tmp_path):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "max_lag": 4}
    async with running(groups_per_step=2, **options) as run:
        control = run.client()
        await control.enqueue([prompt(i) for i in range(4)])
        await control.offer(bare_offer(0))
        await train(control, 0)
        await control.offer(bare_offer(1))
        await control.rewind(0, incarnation=1)
        before = await control.stats()
    async with running(groups_per_step=2, **options) as run:
        control, worker, new = run.client(), run.client(), run.client(incarnation=1)
        assert await control.stats() == before
        waiting = asyncio.ensure_future(worker.next_offer(-1))
        await worker.stats()
        assert not waiting.done()
        await new.offer(bare_offer(0))
        assert (await waiting).incarnation == 1


def test_after_a_resume_new_stores_take_over_the_groups_of_earlier_stores():
    rule = StalenessRule(max_lag=MAX_LAG, groups_per_step=SIZE)
    ledger = DrivenLedger(rule, num_stores=0)
    ledger.enqueue(range(4))
    assert [ledger.add_store(host) for host in "ab"] == [0, 1]
    for lease, host in zip(ledger.lease(0, 2), "ab", strict=True):
        ledger.reserve(lease, 8, host=host)
        ledger.put(summary_of(lease), num_bytes=8)
    ledger.checkpoint(0)
    ledger.resume(0)
    assert ledger.groups.space.open_stores() == []
    with pytest.raises(UnknownGroup, match="group 1 are lost: store 1 was not replaced after the resume"):
        ledger.groups.in_store(1)
    [lease] = ledger.lease(0, 1)
    with pytest.raises(StoreFull, match="no store has joined"):
        ledger.reserve(lease, 8)
    assert [ledger.add_store(host) for host in "cad"] == [0, 1, 2]
    assert ledger.groups.in_store(1).store == 1
    assert ledger.groups.num_stored == 2
