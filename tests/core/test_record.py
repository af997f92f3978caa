"""The recorder: its records, its writes, and its cost when recording is off."""

import os
import signal
import subprocess
import sys
import threading

import msgpack
import pytest

from asyncrl.core import record
from asyncrl.core.record import Pool, ProfileConfig, Recorder, Tag


def written(folder):
    return [list(msgpack.Unpacker(path.open("rb"))) for path in sorted(folder.glob("*.msgpack"))]


@pytest.fixture(autouse=True)
def stopped():
    """After each test, stop what `record.start` began. Even without a profile, it starts receipts and stack traces."""
    yield
    record.stop()


@pytest.fixture
def recorded(tmp_path):
    record.start(ProfileConfig(directory=str(tmp_path)), process="learner-0", pool=Pool.learner)
    return tmp_path


def test_without_start_the_recorder_writes_nothing_and_all_spans_are_the_same_object():
    first, second = record.span("fetch", step=1), record.span("forward")
    assert first is second
    with first:
        record.level("running", 3)
        record.stamp("lease", 7, version=2)
    assert record.current() is None


def test_spans_levels_and_stamps_are_written_in_order(recorded):
    with record.span("update", step=3):
        record.level("running", 2, lane="engine-0")
        record.stamp("stored", 9, attempt=1, version=4, tokens=12)
    record.clock("another boot", offset_ns=-5, error_ns=2)
    record.stop()
    ((header, *rest),) = written(recorded)
    assert header[1]["process"] == "learner-0"
    assert header[1]["pool"] == "learner"
    assert [item[0] for item in rest] == [Tag.open, Tag.level, Tag.stamp, Tag.close, Tag.clock]
    assert rest[0][2:4] == ["learner-0", "update"]
    assert rest[2][1:5] == ["stored", 9, 1, "learner-0"]
    assert rest[2][6:] == [4, {"tokens": 12}]
    assert rest[4][1] == "another boot"


def test_a_level_is_recorded_only_when_it_changes(recorded):
    for value in (1, 1, 2, 2, 1):
        record.level("running", value)
    record.stop()
    assert [item[4] for item in written(recorded)[0] if item[0] == Tag.level] == [1, 2, 1]


def test_a_span_ends_at_its_first_close(recorded):
    span = record.span("fetch")
    span.close()
    span.close()
    record.stop()
    assert sum(item[0] == Tag.close for item in written(recorded)[0]) == 1


def test_a_second_start_of_the_recorder_has_no_effect(recorded):
    record.start(ProfileConfig(directory=str(recorded)), process="critic-0", pool=Pool.learner)
    record.stop()
    assert len(written(recorded)) == 1


def test_a_disabled_profile_makes_no_folder(tmp_path):
    config = ProfileConfig(enabled=False, directory=str(tmp_path / "profile"))
    record.start(config, process="p", pool=Pool.fleet)
    assert record.current() is None
    assert not (tmp_path / "profile").exists()


def test_an_unwritable_profile_folder_is_logged_and_nothing_is_recorded(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file")
    record.start(ProfileConfig(directory=str(tmp_path / "profile")), process="p", pool=Pool.fleet)
    assert record.current() is None
    assert "p is not recorded" in caplog.text


def test_a_killed_process_leaves_complete_records_with_its_open_span(tmp_path):
    code = (
        "import os, sys, time; from asyncrl.core import record\n"
        f"config = record.ProfileConfig(directory={str(tmp_path)!r})\n"
        "record.start(config, process='p', pool=record.Pool.learner)\n"
        "record.span('backward', step=5)\n"
        "path = os.path.join(sys.argv[1], os.listdir(sys.argv[1])[0])\n"
        "while b'backward' not in open(path, 'rb').read(): time.sleep(0.001)\n"
        "print('written', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"written\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert written(tmp_path)[0][1][2:4] == ["p", "backward"]


def test_records_beyond_the_file_limit_are_dropped_and_counted(tmp_path):
    recorder = Recorder(tmp_path, process="p", pool=Pool.learner, max_file_bytes=1000)
    for group in range(100):
        recorder.stamp("lease", group)
    recorder.close()
    records = written(tmp_path)[0]
    stamps = sum(item[0] == Tag.stamp for item in records)
    assert 0 < stamps < 100
    assert recorder.num_dropped == 100 - stamps
    assert sum(item[1] for item in records if item[0] == Tag.dropped) == recorder.num_dropped
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1100


def test_a_dropped_level_is_recorded_at_the_next_call(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, process="p", pool=Pool.learner)
    with monkeypatch.context() as patched:
        patched.setattr(recorder, "_add", lambda *_: False)
        recorder.level("running", 1)
    recorder.level("running", 1)
    recorder.close()
    assert [item[4] for item in written(tmp_path)[0] if item[0] == Tag.level] == [1]


def test_a_failing_disk_is_logged_once_and_later_records_are_dropped(tmp_path, monkeypatch, caplog):
    recorder = Recorder(tmp_path, process="p", pool=Pool.learner)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        recorder.level("running", 1)
        for thread in threading.enumerate():
            if thread.name == "record":
                thread.join(5)
    recorder.level("running", 2)
    recorder.close()
    assert recorder.num_dropped == 1
    assert "No space left on device" in caplog.text


def test_invalid_profile_options_are_refused():
    with pytest.raises(ValueError, match="torch_steps must list learner steps"):
        ProfileConfig(torch_steps=[-1])
    with pytest.raises(ValueError, match=r"max_file_bytes must be >="):
        ProfileConfig(max_file_bytes=10)
    with pytest.raises(ValueError, match=r"needs profile\.enabled=true"):
        ProfileConfig(enabled=False, torch_steps=[1])
