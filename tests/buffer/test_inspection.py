"""The reports for the inspector: why the next batch waits, where a group is, and what the group contains."""

import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.core.errors import NotAllowed
from buffer.config import OnStale
from buffer.description import describe_group, plan_wait
from buffer.inspect import read, render, render_group
from buffer.keys import BufferRole, client_keys, make_keys
from buffer.role_clients import BufferConnection
from tests.support.buffer_groups import prompt, rollout, running
from tests.support.ledgers import DrivenLedger, ledger, summary_of


def why(of: DrivenLedger) -> str:
    return plan_wait(of, now=0.0)["why"]


def test_the_report_on_an_incomplete_batch_names_running_groups_and_why_no_other_begins():
    of = ledger(0, 2)
    assert why(of) == (
        "batch 0 has 0 of 2 groups; no group runs; 100 prompts are queued, and wait for an engine that requests a "
        "lease at an admitted version"
    )
    [first] = of.lease(0, 1, owner=b"\xab\xcd")
    of.lease(0, 1, owner=b"\x12")
    of.put(summary_of(first))
    assert why(of) == "batch 0 has 1 of 2 groups; 1 run: group 1 (attempt 0, due by 0) on 12"
    assert [group["group_id"] for group in plan_wait(of, now=0.0)["groups"]] == [1]


def test_the_report_on_a_batch_says_that_no_prompt_is_queued():
    of = DrivenLedger(ledger(0, 2).rule)
    assert why(of) == "batch 0 has 0 of 2 groups; no group runs; no prompt is queued"


def test_the_report_on_a_waiting_batch_names_the_option_that_stops_new_groups():
    of = ledger(1, 3, max_bytes=10)
    [lease, other, third] = of.lease(0, 3)
    of.reserve(lease, 9)
    of.put(summary_of(lease), num_bytes=9)
    assert why(of).startswith("batch 0 has 1 of 3 groups; 2 run: ")
    of.release(third.group_id, third.attempt, num_tokens=0)
    assert why(of).endswith("98 prompts are queued, but buffer.max_stored_bytes leaves no room for another group")
    assert f"group {other.group_id} " in why(of)
    synchronous = ledger(0, 1)
    synchronous.put(summary_of(synchronous.lease(0, 1)[0]))
    assert synchronous.plan(0) is not None
    assert why(synchronous).endswith(
        "99 prompts are queued, but buffer.max_lag=0 admits no group until the learner commits batch 0"
    )


def test_the_report_says_that_a_full_batch_waits_for_running_groups_that_are_due():
    of = ledger(1, 2)
    due = of.lease(0, 2, owner=b"\x01")
    for lease in of.lease(0, 2, owner=b"\x02"):
        of.put(summary_of(lease))
    of.step()
    for lease in of.lease(1, 2, owner=b"\x02"):
        of.put(summary_of(lease))
    assert of.plan(1) is None
    assert why(of) == (
        "batch 1 waits for 2 of the groups due by version 1; 2 run: group 0 (attempt 0, due by 1) on 01, group 1 "
        "(attempt 0, due by 1) on 01; buffer.on_stale=wait never gives them up"
    )
    of.put(summary_of(due[0]))
    assert why(of).startswith("batch 1 waits for 1 of the groups due by version 1; 1 run: group 1")
    of.put(summary_of(due[1]))
    assert why(of) == "batch 1 can be made; the controller has not requested it yet"


def test_the_report_says_that_a_third_batch_waits_for_a_commit():
    of = ledger(1, 1, on_stale=OnStale.requeue)
    for lease in of.lease(0, 2):
        of.put(summary_of(lease))
    assert of.plan(0) is not None
    assert of.plan(1) is not None
    assert why(of) == "batch 2 waits until the learner commits batch 0"


def test_the_report_lists_few_running_groups_and_counts_the_others():
    of = ledger(2, 8)
    of.lease(0, 12)
    assert why(of).endswith("and 4 more")


def test_the_report_on_a_group_describes_each_of_its_states():
    of = ledger(0, 1)
    assert describe_group(of, 5000, 0.0)["state"] == "unknown: it was never queued"
    assert describe_group(of, 0, 0.0)["state"] == "queued"
    assert "expires_in_s" not in describe_group(of, 0, 0.0)
    [lease] = of.lease(0, 1, owner=b"\xab", now=0.0)
    of.release(lease.group_id, 0, num_tokens=3, reason="reward", max_failures=3)
    [lease] = of.lease(0, 1, owner=b"\xcd", now=0.0)
    of.expire(1000.0)
    shown = describe_group(of, 0, 0.0)
    assert (shown["num_attempts"], shown["num_failures"]) == (2, 1)
    assert shown["ended_attempts"] == [
        {"attempt": 1, "owner": "cd", "reason": "expired", "owes_report": True, "num_counted_tokens": 0}
    ]
    [lease] = of.lease(0, 1, owner=b"\xcd", now=0.0)
    assert describe_group(of, 0, 0.0)["state"] == "leased"
    of.put(summary_of(lease, rewards=(0.0, 2.0)))
    assert describe_group(of, 0, 0.0)["summary"]["rewards"] == (0.0, 2.0)
    of.plan(0)
    assert describe_group(of, 0, 0.0)["planned_for"] == 0
    of.commit(0)
    assert describe_group(of, 0, 0.0)["state"] == "consumed or dropped"
    of.rewind(0)
    shown = describe_group(of, 0, 0.0)
    assert shown["state"] == "not queued: it finished after the checkpoint that the learner went back to"
    assert shown["num_attempts"] == 3


@pytest.mark.parametrize("num_store_servers", [0, 1])
async def test_the_inspector_can_read_a_stored_group_but_cannot_change_the_buffer(
    tmp_path: Path, num_store_servers: int
):
    make_keys(tmp_path)
    options = {"keys": str(tmp_path), "num_store_servers": num_store_servers, "request_timeout_s": 20.0}
    async with running(groups_per_step=2, **options) as run:
        worker, control, inspector = (
            run.client(keys=client_keys(tmp_path, role), request_timeout_s=20.0)
            for role in (BufferRole.rollout, BufferRole.controller, BufferRole.inspector)
        )
        await control.enqueue([prompt(0)])
        [lease] = await worker.lease(0, 1)
        group = rollout(lease, num_tokens=7, rewards=(0.5, 1.0))
        await worker.put(group)
        connection = BufferConnection(
            address=run.server.address, request_timeout_s=20.0, keys=str(tmp_path), role=BufferRole.inspector
        )
        report = json.loads(json.dumps(await read(connection, group_id=0, with_payload=True)))
        first, second = report["trajectories"]
        assert (first["reward"], second["reward"]) == (0.5, 1.0)
        assert first["turns"][0]["token_ids"] + second["turns"][0]["token_ids"] == list(range(7))
        assert set(first["turns"][0]["logprobs"]) == {-1.0}
        assert "trajectory 1: reward 1\n  turn 2 after 0: 5 tokens of the policy, length" in render_group(report)
        assert "plan       batch 0 has 1 of 2 groups; no group runs; no prompt is queued" in render(
            await read(connection)
        )
        [fetched] = await inspector.fetch([0])
        assert np.array_equal(fetched.turns, group.turns)
        for call in (inspector.commit(0), inspector.plan(0), inspector.lose([0]), inspector.rewind(0, incarnation=1)):
            with pytest.raises(NotAllowed):
                await call
