"""``dry_run=true`` prints the resources and deadlines of a run, and does not create or start anything."""

import json
from dataclasses import replace

import pytest

from asyncrl.cli import train_command
from asyncrl.cli.compose import CONFIG_DIR, compose_run
from asyncrl.cli.preflight import dry_run
from asyncrl.planner.fit import MODELS

EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))


@pytest.fixture
def qwen(tmp_path):
    """Return a model folder with the configuration of Qwen3-0.6B, but without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Qwen3-0.6B"]))
    return str(folder)


@pytest.mark.long
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_dry_run_of_every_experiment_shows_its_resources(name, qwen, tmp_path):
    config = compose_run([f"experiment={name}", f"output_dir={tmp_path / 'out'}"])
    if not config.quickstart:
        config = replace(config, model=replace(config.model, path=qwen))
    found = dry_run(config)
    page = found.page
    assert f"the learner trains on a token at most {config.buffer.max_lag} learner step" in page
    assert f"{config.rollout_fleet.num_engines} sglang engines" in page
    assert f"then {config.total_steps} steps" in page
    assert found.memory[0].startswith("learner rank (learner): ")
    assert any(line.startswith("engine: ") for line in found.memory)
    assert bool(found.problems) == ("not ready" in page)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_resolved_devices_and_the_resources_of_an_elastic_fleet(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    own = [f"output_dir={tmp_path}", "rollout_fleet.engine=transformers", "learner.device=auto"]
    page = dry_run(compose_run([*own, "rollout_fleet.num_engines={min:1,max:3}"])).page
    assert "learner pool learner: 1 rank on cpu (auto)" in page
    assert "1 to 3 transformers engines on cpu (auto)" in page
    assert "2 CPUs (4 with all engines) and 0 GPUs" in page
    page = dry_run(compose_run([*own, "ray.address=host:1", "placement.num_nodes=2"])).page
    assert "1 transformers engines on what the cluster has" in page


@pytest.mark.long
def test_a_dry_run_counts_the_tokens_of_episodes_by_their_paths(tmp_path):
    own = ["experiment=tools", f"output_dir={tmp_path}", "algorithm.groups_per_step=4", "learner.device=cpu"]
    page = dry_run(compose_run(own)).page
    assert "an episode has at most 3 turns, 36 sampled tokens, and 64 tokens per path" in page
    assert "at most 2,048 tokens: 32 x 64 of a path; more if episodes branch" in page
    page = dry_run(compose_run([*own, "rollout_fleet.environment.max_tree_tokens=100"])).page
    assert "at most 3,200 tokens: 32 x 100 of all paths of an episode\n" in page
    page = dry_run(compose_run([f"output_dir={tmp_path}", "algorithm.groups_per_step=4"])).page
    assert " of a prompt + 12 of a response)\n" in page


def test_a_dry_run_of_the_quickstart_passes_and_leaves_no_files(tmp_path, capsys):
    options = [f"output_dir={tmp_path / 'out'}", "rollout_fleet.engine=transformers"]
    assert train_command.main(["dry_run=true", *options]) == 0
    page = capsys.readouterr().out
    assert page.startswith("dry run: nothing was started")
    assert "every check passed" in page
    assert "first prompt" in page
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_errors_together_with_the_figures(capsys):
    assert train_command.main(["experiment=custom", "model.path=nowhere", "dry_run=true"]) == 2
    page = capsys.readouterr().out
    assert "model.path must be a directory" in page
    assert "nowhere has no config.json" in page
    assert "at most 96 groups are open" in page
