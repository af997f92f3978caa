"""The deadlines and the environment variables that follow from the models and devices of a run."""

import os

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.config import with_time_to_read
from asyncrl.run.cluster import learner_env, worker_env

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def model_of(folder, size):
    folder.mkdir()
    with (folder / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(size)
    return str(folder)


def test_start_deadlines_grow_with_the_bytes_of_the_models(tmp_path):
    policy, critic = model_of(tmp_path / "policy", 16 * 10**9), model_of(tmp_path / "critic", 2 * 10**9)
    config = compose_run([f"model.path={policy}", f"learner.critic.path={critic}"])
    timed = with_time_to_read(config)
    assert timed.rollout_fleet.start_timeout_s == config.rollout_fleet.start_timeout_s + 160
    assert timed.learner.start_timeout_s == config.learner.start_timeout_s + 160 + 20
    assert timed.rollout_fleet.load_timeout_s == config.rollout_fleet.load_timeout_s, "callers add the time for bytes"


def test_small_and_missing_models_do_not_change_the_start_deadlines(tmp_path):
    for path in (model_of(tmp_path / "small", 300_000), str(tmp_path / "missing")):
        config = compose_run([f"model.path={path}"])
        assert with_time_to_read(config) == config


@pytest.mark.parametrize(
    ("options", "own", "want"),
    [
        (["learner.device=cuda"], None, "expandable_segments:True"),
        (["learner.device=cuda"], "max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        (["learner.device=cuda"], "expandable_segments:False", "expandable_segments:False"),
        (["experiment=gsm8k_colocated"], None, "expandable_segments:False"),
        (["experiment=gsm8k_colocated"], "expandable_segments:True", "expandable_segments:False"),
        (["experiment=gsm8k"], None, "expandable_segments:True"),
        (["learner.device=cpu"], None, None),
    ],
)
def test_ranks_on_cuda_get_expandable_segments_unless_they_are_colocated(monkeypatch, options, own, want):
    monkeypatch.delenv(ALLOCATOR, raising=False)
    if own is not None:
        monkeypatch.setenv(ALLOCATOR, own)
    config = compose_run(options)
    assert learner_env(config).get(ALLOCATOR) == want
    assert ALLOCATOR not in worker_env(config), "engines must not get the variable"
    assert os.environ.get(ALLOCATOR) == own
