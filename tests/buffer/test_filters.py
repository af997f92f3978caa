"""If filters drop all groups, the client logs a warning. If no group passes the filters, `plan` raises an error."""

import asyncio
import logging

import pytest

from asyncrl.core.errors import ReplayBufferError
from asyncrl.core.types import Lease
from buffer.account import Account
from tests.support.buffer_groups import AnyRole, prompt, rollout, running


async def put_filtered(client: AnyRole, number: int) -> None:
    """Put groups until their number is ``number``. The filter drops them, because the rewards in a group are equal."""
    num_put = 0
    while num_put < number:
        for lease in await client.lease(0, number - num_put):
            await client.put(rollout(lease, rewards=(1.0, 1.0)))
            num_put += 1


async def test_the_client_logs_a_warning_while_a_plan_waits_and_filters_drop_all_groups(
    caplog: pytest.LogCaptureFixture,
):
    async with running(groups_per_step=2, filters=["equal_rewards"], request_timeout_s=60.0) as run:
        worker, control = run.client(), run.client(request_timeout_s=60.0)
        await control.enqueue([prompt(i) for i in range(20)])
        plan = asyncio.ensure_future(control.plan(0))
        with caplog.at_level(logging.WARNING, logger="buffer.client"):
            await put_filtered(worker, 7)
            assert caplog.records == []
            await put_filtered(worker, 1)
            await control.stats()
        assert [record.getMessage() for record in caplog.records if record.name == "buffer.client"] == [
            "waiting for the next batch: 0 of the 2 groups of batch 0 are stored, and buffer.filters dropped the "
            "last 8 finished groups; dropped in total: 8 for equal_rewards. Check the rewards, use other "
            "prompts or filters, or raise buffer.max_filtered_steps"
        ]
        assert (await control.stats()).filtered_in_a_row == 8
        for lease in await worker.lease(0, 2):
            await worker.put(rollout(lease))
        assert len((await plan).groups) == 2
        assert (await control.stats()).filtered_in_a_row == 0


async def test_a_plan_fails_after_filters_dropped_all_groups_of_max_filtered_steps():
    async with running(groups_per_step=2, filters=["equal_rewards"], max_filtered_steps=3, max_lag=0) as run:
        worker, control = run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(20)])
        plan = asyncio.ensure_future(control.plan(0))
        await put_filtered(worker, 5)
        assert not plan.done()
        await put_filtered(worker, 1)
        with pytest.raises(ReplayBufferError, match=r"0 of the 2 groups.*dropped the last 6.*6 for equal_rewards"):
            await asyncio.wait_for(plan, 30)
        with pytest.raises(ReplayBufferError, match="dropped the last 6"):
            await control.plan(0)


async def test_a_plan_fails_when_filters_dropped_groups_and_no_prompts_are_left():
    async with running(groups_per_step=2, filters=["equal_rewards"], request_timeout_s=0.5) as run:
        worker, control = run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(3)])
        await put_filtered(worker, 2)
        [lease] = await worker.lease(0, 1)
        await worker.put(rollout(lease))
        with pytest.raises(ReplayBufferError, match=r"1 of the 2 groups.*no prompts are queued.*2 for equal_rewards"):
            await control.plan(0)


async def test_a_plan_waits_for_the_first_prompt():
    async with running(groups_per_step=1, filters=["equal_rewards"], request_timeout_s=0.5) as run:
        worker, control = run.client(), run.client()
        plan = asyncio.ensure_future(control.plan(0))
        await asyncio.sleep(0.6)
        await control.enqueue([prompt(0)])
        [lease] = await worker.lease(0, 1)
        await worker.put(rollout(lease))
        assert [group.group_id for group in (await plan).groups] == [0]


def test_a_restarted_server_counts_filtered_groups_in_a_row_from_zero():
    account, restored = Account(), Account()
    account.filter(
        rollout(Lease(prompt=prompt(0), attempt=0, engine_version=0, deadline_version=2)).summary,
        "mine",
        num_inherited=0,
    )
    assert account.filtered_in_a_row == 1
    restored.restore(account.snapshot())
    assert restored.filtered_in_a_row == 0
    assert restored.groups_dropped == {"mine": 1}
