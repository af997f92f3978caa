"""The folder of published weights, and the folder of a run in shared memory."""

import errno
import os
import re
import shutil
import signal
import time
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from asyncrl.cli import train_command
from asyncrl.cli.compose import compose_run
from asyncrl.run import run_folder
from asyncrl.run.run_folder import (
    RunPaths,
    hold_shared_folder,
    join_shared_folder,
    shared_folder,
    sweep_shared_memory,
)

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1 << 20))
    yield tmp_path
    shutil.rmtree(shared_folder(tmp_path), ignore_errors=True)


def snapshots(run_dir, *overrides):
    config = compose_run([f"model.path={run_dir}/model", *overrides])
    return RunPaths.of(config, run_dir).snapshots


def test_weights_go_to_shared_memory_if_they_fit(run_dir):
    assert snapshots(run_dir) == shared_folder(run_dir)


def test_weights_go_to_the_run_folder_without_room_in_memory_or_if_all_versions_are_kept(run_dir, monkeypatch):
    assert snapshots(run_dir, "learner.keep_snapshots=-1") == run_dir / "snapshots"
    (run_dir / "snapshots").rmdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 24, 0, 7 << 20))
    assert snapshots(run_dir) == run_dir / "snapshots"
    in_memory = ("weights.transport=shared_memory", "buffer.max_lag=1")
    with pytest.raises(
        ValueError, match=r"shared_memory needs room: .*7 MiB free and 10 MiB are needed; .*transport=file"
    ):
        snapshots(run_dir, *in_memory)
    # The 28 MiB include all deltas after the latest full version, and one copy of the weights per engine.
    with pytest.raises(ValueError, match=r"28 MiB are needed"):
        snapshots(run_dir, *in_memory, "weights.full_every=5", "rollout_fleet.num_engines=3")


def test_a_fallback_to_the_disk_warns_with_its_seconds_per_version(run_dir, monkeypatch, caplog):
    snapshots(run_dir, "weights.transport=file")
    assert not caplog.records  # the run does not warn, because the user chose the disk
    (run_dir / "snapshots").rmdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 24, 0, 7 << 20))
    snapshots(run_dir)
    (record,) = caplog.records
    assert re.search(r"7 MiB free.*one version of 1 MB takes about \d+\.\d s.*weights\.directory", record.getMessage())


def test_weight_images_of_the_engines_need_room_with_every_transport(run_dir, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 24, 0, 7 << 20))
    options = ("weights.transport=file", "rollout_fleet.num_engines=4")
    snapshots(run_dir, *options)
    for option in ("weights.full_every=2", "weights.copy_to_memory=true"):
        with pytest.raises(
            ValueError, match=r"keep 4 images .* 7 MiB free and 8 MiB are needed; .*weights.full_every=1"
        ):
            snapshots(run_dir, *options, option)


def test_engines_of_a_host_share_two_weight_images_with_collective_transport(run_dir, monkeypatch):
    options = ("weights.transport=collective", "weights.full_every=2", "rollout_fleet.num_engines=4")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 24, 0, 3 << 20))
    with pytest.raises(ValueError, match=r"keep 2 images .* 3 MiB free and 4 MiB are needed"):
        snapshots(run_dir, *options)


def test_a_directory_that_hosts_share_gets_a_folder_per_run(run_dir, tmp_path):
    shared = tmp_path / "mnt" / "weights"
    folder = snapshots(run_dir, "weights.transport=file", f"weights.directory={shared}")
    assert folder.is_dir()
    assert Path(folder).parent == shared


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """Return a folder that replaces the machine's shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(run_folder, "SHARED_MEMORY", folder)
    return folder


def forked(work):
    """Return the pid of a process that does ``work`` and then waits."""
    ready, write = os.pipe()
    if (pid := os.fork()) == 0:
        work()
        os.write(write, b".")
        signal.pause()
        os._exit(1)
    os.read(ready, 1)
    for end in (ready, write):
        os.close(end)
    return pid


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_the_shared_memory_of_a_killed_run_is_removed_after_its_last_process_ends(shared_memory, tmp_path):
    def supervisor():
        hold_shared_folder(tmp_path)
        (shared_folder(tmp_path) / "weights").write_bytes(bytes(100))
        (tmp_path / "controller").write_text(str(forked(lambda: None)))

    run = forked(supervisor)
    controller = int((tmp_path / "controller").read_text())
    assert sweep_shared_memory() == []
    kill(run)
    assert sweep_shared_memory() == [], "the sweep must keep the folder while the controller runs"
    os.kill(controller, signal.SIGKILL)
    wait_until_ended(controller)
    assert sweep_shared_memory() == [shared_folder(tmp_path)]
    assert not list(shared_memory.iterdir())


def wait_until_ended(pid):
    """Wait for a process that is not a child of this process."""
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


def test_a_sweep_of_shared_memory_removes_only_folders_of_this_users_runs(shared_memory, tmp_path):
    (tmp_path / "precious").mkdir()
    (shared_memory / "asyncrl-run-0").symlink_to(tmp_path / "precious")
    (shared_memory / "asyncrl-bench-0").mkdir()
    (shared_memory / "asyncrl-run-file").touch()
    if os.geteuid() == 0:
        (shared_memory / "asyncrl-run-1").mkdir()
        os.chown(shared_memory / "asyncrl-run-1", 12345, 12345)
    before = sorted(shared_memory.iterdir())
    assert sweep_shared_memory() == []
    assert sorted(shared_memory.iterdir()) == before
    assert (tmp_path / "precious").is_dir()


def test_an_existing_folder_in_shared_memory_is_refused(shared_memory, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    other = hold_shared_folder(run_dir)
    with pytest.raises(FileExistsError, match=r"must not exist before the run, .*; remove the"):
        hold_shared_folder(run_dir)
    assert not run_dir.exists()
    os.close(other)


def test_a_run_in_the_folder_of_a_killed_run_replaces_its_shared_memory(shared_memory, tmp_path):
    kill(forked(lambda: hold_shared_folder(tmp_path)))
    (shared_folder(tmp_path) / "weights").touch()
    lock = hold_shared_folder(tmp_path)
    assert not list(shared_folder(tmp_path).iterdir())
    assert sweep_shared_memory() == []
    os.close(lock)


@pytest.mark.parametrize("hold", [hold_shared_folder, lambda run_dir: join_shared_folder(shared_folder(run_dir))])
def test_a_shared_folder_that_another_run_removes_before_the_lock_is_created_again(
    shared_memory, tmp_path, monkeypatch, hold
):
    swept, real_open = [], os.open

    def sweep_first(path, *arguments, **options):
        if path == shared_folder(tmp_path) and not swept:
            swept.append(path)
            path.rmdir()
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", sweep_first)
    lock = hold(tmp_path)
    assert swept
    assert sweep_shared_memory() == []
    os.close(lock)


def test_without_writable_shared_memory_a_run_creates_no_shared_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "SHARED_MEMORY", tmp_path / "absent")
    assert hold_shared_folder(tmp_path) is None
    assert sweep_shared_memory() == []


def test_a_run_that_begins_on_a_full_disk_names_the_file_and_the_remedy_and_leaves_nothing(
    tmp_path, monkeypatch, capsys, shared_memory
):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the error of a real write does not name the file

    monkeypatch.setattr(Path, "write_text", write)
    assert train_command.main([f"output_dir={tmp_path}/out"]) == 1
    said = capsys.readouterr().err
    assert re.search(rf"^error: {tmp_path}/out/.*/config.yaml cannot be written: No space left on device; free", said)
    assert "output_dir=DIR" in said
    assert not list((tmp_path / "out").rglob("config.yaml")) + list((tmp_path / "out").rglob("logs"))
    assert not list(shared_memory.iterdir())


def test_a_disk_that_fills_up_later_is_named_with_the_remedy(tmp_path):
    (tmp_path / "run").mkdir()
    fault = ExceptionGroup("", [OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))])
    words = train_command.last_words(fault, tmp_path / "run")
    assert f"{tmp_path}/run cannot be written: {os.strerror(errno.EDQUOT)}; free space on its disk" in words
