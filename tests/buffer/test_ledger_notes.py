"""The events that the buffer's ledger records for the run's profile."""

from itertools import repeat

import msgpack
import pytest

from asyncrl.core import record
from asyncrl.core.record import Pool, ProfileConfig, Recorder, Tag
from asyncrl.profile.trace import FOLDER, Trace
from buffer.config import OnStale
from buffer.description import LedgerNotes
from buffer.rule import StalenessRule
from tests.support.buffer_groups import prompt, running
from tests.support.ledgers import DrivenLedger, summary_of


def noted(tmp_path, **options):
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), **options)
    recorder = Recorder(tmp_path / FOLDER, process="buffer", pool=Pool.buffer)
    notes = LedgerNotes(ledger, recorder)
    ledger.on_applied = notes.note
    return ledger, notes, recorder


def events(tmp_path, recorder):
    recorder.close()
    return [(stamp.event, stamp.group, stamp.details.get("reason")) for stamp in Trace.load(tmp_path).stamps]


def test_repeated_plans_record_the_events_of_a_group_only_once(tmp_path):
    ledger, _, recorder = noted(tmp_path)
    ledger.enqueue([1, 2])
    for lease in ledger.lease(0, 2):
        ledger.put(summary_of(lease))
    ledger.plan(0)
    ledger.plan(0)
    ledger.commit(0)
    expected = [(event, group, None) for event in ("planned", "trained") for group in (1, 2)]
    assert events(tmp_path, recorder)[-4:] == expected
    trace = Trace.load(tmp_path)
    assert trace.groups[1].lag == 0
    assert trace.groups[1].last("stored").details["tokens"] == 5


def test_a_requeued_group_is_recorded_with_the_reason(tmp_path):
    ledger, _, recorder = noted(tmp_path, on_stale=OnStale.requeue, lease_s=10.0)
    ledger.enqueue([1, 2])
    first, second = ledger.lease(0, 2, now=0.0)
    ledger.release(first.group_id, first.attempt, num_tokens=3, reason="reward")
    ledger.expire(11.0)
    found = [event for event in events(tmp_path, recorder) if event[0] != "lease"]
    assert found == [("requeued", first.group_id, "reward"), ("requeued", second.group_id, "expired")]


def test_counts_are_recorded_only_when_they_change(tmp_path):
    ledger, notes, recorder = noted(tmp_path)
    ledger.enqueue([1, 2, 3])
    notes.levels(held_bytes=0)
    ledger.lease(0, 2)
    notes.levels(held_bytes=0)
    recorder.close()
    trace = Trace.load(tmp_path)
    assert [level.value for level in trace.levels_of("queued", "buffer")] == [3, 1]
    assert [level.value for level in trace.levels_of("leased", "buffer")] == [0, 2]
    assert [level.value for level in trace.levels_of("budget", "buffer")] == [4, 2]
    assert len(trace.levels_of("full", "buffer")) == 1


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_only_a_client_on_another_host_measures_the_offset_of_its_clock(tmp_path, monkeypatch, is_elsewhere):
    config = ProfileConfig(directory=str(tmp_path / FOLDER))
    async with running(heartbeat_s=0.05) as buffer:
        record.start(config, process="engine-0", pool=Pool.fleet)
        try:
            here = record.clock_id()
            answers = iter([here]) if is_elsewhere else repeat(here)  # the server calls clock_id first
            monkeypatch.setattr(record, "clock_id", lambda: next(answers, "elsewhere"))
            client = buffer.client()
            await client.enqueue([prompt(1)])
            await client.lease(0, 1)
        finally:
            record.stop()
    (path,) = (tmp_path / FOLDER).iterdir()
    clocks = [items for items in msgpack.Unpacker(path.open("rb")) if items[0] == Tag.clock]
    assert bool(clocks) == is_elsewhere
    for _, clock, _, offset_ns, error_ns in clocks:
        assert clock == here
        assert abs(offset_ns) <= error_ns  # server and client read the same clock
