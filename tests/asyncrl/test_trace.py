"""Traces of runs: how they are read from the records of a run's processes."""

import pytest

from asyncrl.core.record import Pool, Recorder, clock_id
from asyncrl.profile import Trace, TraceReader
from asyncrl.profile.trace import FOLDER, UNMEASURED_ERROR_NS, ClockOffsets, GroupLife, Span, Stamp
from tests.support.traces import record_run, trace_of


def recorder(folder, process="learner-0", pool=Pool.learner, **options):
    return Recorder(folder / FOLDER, process=process, pool=pool, **options)


def test_a_trace_has_consecutive_steps(tmp_path):
    trace = record_run(tmp_path, num_steps=5)
    assert [step.version for step in trace.steps] == [0, 1, 2, 3, 4]
    assert all(left.end == right.start for left, right in zip(trace.steps, trace.steps[1:], strict=False))
    assert trace.window == (trace.steps[0].start, trace.steps[-1].end)
    assert trace.lanes("fleet") == ("engine-0", "engine-1")
    assert trace.lanes("learner") == ("learner-0", "learner-1")
    assert all(process.is_whole for process in trace.processes)


def steps_of(*spans):
    """Return a pair: the steps of a trace, and its window (the time from the first to the last finished step).

    Each span is a tuple (version, start, end). A span with end 0 is open.
    """
    spans = [
        Span(lane="controller", kind="step", step=step, start=start, end=end or 99, is_open=not end)
        for step, start, end in spans
    ]
    trace = Trace(spans=tuple(spans), end=99)
    return [(step.version, step.start, step.end, step.is_open) for step in trace.steps], trace.window


def test_the_time_between_two_steps_belongs_to_the_second_step():
    steps, window = steps_of((0, 10, 20), (1, 23, 30), (2, 31, 0))
    assert steps == [(0, 10, 20, False), (1, 20, 30, False), (2, 30, 99, True)]
    assert window == (10, 30)


def test_a_repeated_step_begins_where_the_interrupted_step_ended():
    steps, window = steps_of((4, 10, 20), (5, 20, 26), (4, 60, 70))
    assert steps == [(4, 10, 20, False), (5, 20, 26, False), (4, 26, 70, False)]
    assert window == (10, 70)


def test_an_open_step_of_a_dead_controller_is_left_out_and_the_next_step_has_its_time():
    steps, _ = steps_of((0, 10, 20), (1, 21, 0), (1, 40, 50))
    assert steps == [(0, 10, 20, False), (1, 20, 50, False)]


def test_steps_that_overlap_because_of_clock_errors_have_no_negative_time():
    steps, _ = steps_of((0, 10, 30), (1, 25, 28), (2, 29, 40))
    assert steps == [(0, 10, 30, False), (1, 30, 30, False), (2, 30, 40, False)]


def test_a_trained_group_has_its_events_in_order_and_its_lag_in_two_parts(tmp_path):
    trace = record_run(tmp_path, num_steps=6, max_lag=2)
    trained = [group for group in trace.groups.values() if group.step >= 0]
    assert len(trained) == 6 * 4
    for group in trained:
        events = ("lease", "first_token", "last_token", "reward", "stored", "planned", "trained")
        times = [group.time(event) for event in events]
        assert times == sorted(times)
        assert 0 <= group.lag <= 2
        assert group.lag == group.lag_before_queue + group.lag_in_queue
        assert group.lag == group.step - group.last("stored").version
    assert max(group.lag for group in trained) == 2


def test_each_use_of_a_groups_last_trajectories_counts_and_repeated_steps_count_once():
    def stamp(event, version, **details):
        return Stamp(event=event, group=7, attempt=0, lane="buffer", time=len(stamps), version=version, details=details)

    stamps = []
    for event, version in (("stored", 0), ("trained", 1), ("requeued", -1), ("stored", 2)):
        stamps.append(stamp(event, version, learner=version))
    for step in (3, 5, 6, 5):  # after step 6, the learner goes back to version 4
        stamps.append(stamp("trained", step))
    life = GroupLife(group=7, stamps=tuple(stamps))
    assert [(use.step, use.lag, use.lag_in_queue) for use in life.uses()] == [(3, 1, 1), (5, 3, 3)]
    assert GroupLife(group=7, stamps=tuple(stamps[:4])).uses() == []


def test_a_serial_run_has_no_lag(tmp_path):
    trace = record_run(tmp_path, num_steps=3, max_lag=0)
    assert {group.lag for group in trace.groups.values() if group.step >= 0} == {0}


def test_a_recorded_level_is_valid_until_the_next_record():
    trace = trace_of(fleet=[("engine-0", "running", 10, 4), ("engine-0", "running", 20, 1)])
    assert [trace.level_at("running", "engine-0", time) for time in (9, 10, 19, 20, 99)] == [0, 4, 4, 1, 1]


def test_an_open_span_ends_with_the_trace(tmp_path):
    now = 10
    recording = recorder(tmp_path, clock=lambda: now)
    recording.span("backward")
    now = 50
    recording.stamp("lease", 1)
    recording.close()
    trace = Trace.load(tmp_path)
    (backward,) = trace.spans_of("backward")
    assert (backward.start, backward.end, backward.is_open) == (10, 50, True)


def test_an_open_span_of_a_replaced_process_ends_when_the_new_process_begins(tmp_path):
    now = 100
    first = recorder(tmp_path, clock=lambda: now)
    first.span("backward")
    first.close()
    now = 300
    second = recorder(tmp_path, clock=lambda: now)
    now = 900
    second.level("running", 1)
    second.close()
    trace = Trace.load(tmp_path)
    assert (trace.spans[0].start, trace.spans[0].end) == (100, 300)
    assert [process.name for process in trace.processes] == ["learner-0"] * 2


def test_a_file_truncated_at_any_byte_gives_all_complete_records(tmp_path):
    recording = recorder(tmp_path, clock=iter(range(1000)).__next__)
    for group in range(5):
        recording.stamp("lease", group, version=group)
    recording.close()
    (path,) = (tmp_path / FOLDER).iterdir()
    data, numbers = path.read_bytes(), []
    for size in range(len(data) - 24, len(data) + 1):
        path.write_bytes(data[:size])
        trace = Trace.load(tmp_path)
        numbers.append(len(trace.stamps))
        assert [stamp.group for stamp in trace.stamps] == list(range(len(trace.stamps)))
    assert numbers == sorted(numbers)
    assert numbers[-1] == 5
    assert trace.processes[0].is_whole
    path.write_bytes(data[:-3])
    assert not Trace.load(tmp_path).processes[0].is_whole


def test_the_reader_stops_at_invalid_bytes_and_keeps_the_records_before_them(tmp_path):
    recording = recorder(tmp_path)
    recording.stamp("lease", 1)
    recording.close()
    (path,) = (tmp_path / FOLDER).iterdir()
    path.write_bytes(path.read_bytes() + b"\xc1\xc1garbage")
    trace = Trace.load(tmp_path)
    assert len(trace.stamps) == 1
    assert not trace.processes[0].is_whole


def test_a_reader_reads_added_records(tmp_path):
    recording, reader = recorder(tmp_path), TraceReader(tmp_path)
    recording.stamp("lease", 1)
    recording.close()
    assert [stamp.group for stamp in reader.read().stamps] == [1]
    other = recorder(tmp_path, process="learner-1")
    other.stamp("lease", 2)
    other.close()
    assert [stamp.group for stamp in reader.read().stamps] == [1, 2]


def test_a_run_without_a_record_raises_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"was started with profile\.enabled=true"):
        Trace.load(tmp_path)


def test_records_of_another_schema_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.core.record.SCHEMA", 99)
    recorder(tmp_path).close()
    with pytest.raises(ValueError, match=r"schema 99, .* schema 1;"):
        Trace.load(tmp_path)


def test_the_clock_of_another_host_is_shifted_by_its_measured_offset(tmp_path, monkeypatch):
    recorder(tmp_path, process="buffer", pool=Pool.buffer, clock=lambda: 1000).close()
    monkeypatch.setattr("asyncrl.core.record.clock_id", lambda: "elsewhere")
    now = 50
    far = recorder(tmp_path, clock=lambda: now)
    monkeypatch.undo()
    now = 100
    far.clock(clock_id(), offset_ns=1000, error_ns=7)
    now = 200
    far.clock(clock_id(), offset_ns=1010, error_ns=3)
    now = 150
    far.stamp("lease", 1)
    now = 400
    far.stamp("lease", 2)
    far.close()
    trace = Trace.load(tmp_path)
    assert [stamp.time for stamp in trace.stamps] == [150 + 1005, 400 + 1010]
    assert [process.error_ns for process in trace.processes] == [0, 3]


def test_a_clock_without_measurements_uses_wall_clocks_and_reports_the_error(tmp_path, monkeypatch):
    recorder(tmp_path, process="buffer", pool=Pool.buffer, clock=lambda: 1000).close()
    monkeypatch.setattr("asyncrl.core.record.clock_id", lambda: "elsewhere")
    recorder(tmp_path, clock=lambda: 5_000_000).close()
    near, far = Trace.load(tmp_path).processes
    assert far.error_ns == UNMEASURED_ERROR_NS
    assert far.start - near.start == far.wall_ns - near.wall_ns


def test_clock_offsets_are_interpolated_between_measurements_and_constant_outside():
    offsets = ClockOffsets([(100, 10, 1), (200, 20, 5)])
    assert [offsets.at(time) for time in (0, 100, 150, 200, 999)] == [(10, 1), (10, 5), (15, 5), (20, 5), (20, 5)]
    assert ClockOffsets().at(5) == (0, 0)


def test_clock_measurements_with_late_replies_are_ignored():
    offsets = ClockOffsets([(100, 10, 1), (150, 900, 700), (200, 20, 5)])
    assert offsets.at(150) == (15, 5)


def test_a_reader_that_forgets_keeps_unfinished_records(tmp_path):
    now = 0
    recording, reader = recorder(tmp_path, clock=lambda: now), TraceReader(tmp_path)
    old, still = recording.span("fetch"), recording.span("update")
    recording.level("running", 3)
    recording.stamp("lease", 1)
    old.close()
    now = 100
    recording.stamp("lease", 2)
    recording.close()
    assert len(reader.read().spans) == 2
    reader.forget(before=50)
    trace = reader.read()
    assert [(span.kind, span.is_open) for span in trace.spans] == [("update", True)]
    assert [stamp.group for stamp in trace.stamps] == [2]
    assert trace.level_at("running", "learner-0", 100) == 3
    assert trace.lanes("learner") == ("learner-0",)
    still.close()
