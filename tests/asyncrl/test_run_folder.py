"""Where published weights go."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.controller.run_folder import RunPaths, shared_folder

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


def test_weights_go_to_shared_memory_where_they_fit(run_dir):
    assert snapshots(run_dir) == shared_folder(run_dir)


def test_and_into_the_runs_folder_where_they_do_not_or_where_all_are_kept(run_dir, monkeypatch):
    assert snapshots(run_dir, "learner.keep_snapshots=-1") == run_dir / "snapshots"
    (run_dir / "snapshots").rmdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 24, 0, 7 << 20))
    assert snapshots(run_dir) == run_dir / "snapshots"
    in_memory = ("weights.transport=shared_memory", "buffer.max_lag=1")
    with pytest.raises(ValueError, match=r"shared_memory needs room: .*7 MiB free, 10 are wanted; .*transport=file"):
        snapshots(run_dir, *in_memory)
    with pytest.raises(ValueError, match=r"28 are wanted"):  # deltas since the full version, and everybody's images
        snapshots(run_dir, *in_memory, "weights.full_every=5", "rollout_fleet.num_engines=3")


def test_the_engines_images_of_the_weights_need_room_whatever_the_transport(run_dir, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 24, 0, 7 << 20))
    options = ("weights.transport=file", "rollout_fleet.num_engines=4")
    snapshots(run_dir, *options)
    for option in ("weights.full_every=2", "weights.copy_to_memory=true"):
        with pytest.raises(ValueError, match=r"keeps an image .* 7 MiB free, 8 are wanted; .*weights.full_every=1"):
            snapshots(run_dir, *options, option)


def test_a_directory_that_hosts_share_gets_a_folder_per_run(run_dir, tmp_path):
    shared = tmp_path / "mnt" / "weights"
    folder = snapshots(run_dir, "weights.transport=file", f"weights.directory={shared}")
    assert folder.is_dir()
    assert Path(folder).parent == shared
