"""``asyncrl evaluate``: the paths that it accepts, and an evaluation of a real model on the in-process engine."""

import json
import os
import shutil

import pyarrow.parquet as pq
import pytest

from asyncrl.cli.compose import compose_run, dump_yaml
from asyncrl.cli.evaluate_command import find_policy, main
from asyncrl.cli.quickstart import make_assets
from learner.checkpoint_folder import SavedProgress, checkpoint_path, write_progress

pytestmark = pytest.mark.long

OPTIONS = ["rollout_fleet.engine=transformers", "rollout_fleet.sampling.max_new_tokens=6", "evaluation.num_samples=2"]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(
        tmp_path_factory.mktemp("evaluate") / "assets", seed=0, num_train=8, num_held_out=24, num_demonstrations=8
    )


def make_run(folder, *, version=0, policy=True, checkpoints=(), directory=None):
    """Make a run's folder with a policy and checkpoints. ``directory`` is a separate folder for checkpoints."""
    folder.mkdir(parents=True)
    options = [f"checkpoint.directory={directory}"] if directory else []
    (folder / "config.yaml").write_text(dump_yaml(compose_run(["quickstart=false", *OPTIONS, *options])))
    if policy:
        (folder / "policy").mkdir()
        (folder / "policy" / "config.json").write_text("{}")
        (folder / "summary.json").write_text(json.dumps({"policy_version": version}))
    for saved in checkpoints:
        path = checkpoint_path(directory or folder / "checkpoints", saved)
        path.mkdir(parents=True)
        write_progress(path, SavedProgress(version=saved, num_updates=saved, num_ranks=1, sp_size=1, dtype="float32"))
    return folder


def test_evaluate_finds_a_policy_in_a_model_a_run_or_a_checkpoint(tmp_path, assets):
    first = make_run(tmp_path / "mine" / "2026-01-01", version=7)
    second = make_run(tmp_path / "mine" / "2026-01-02", policy=False, checkpoints=(3, 12))
    found = find_policy(assets.model)
    assert (found.model, found.run_dir, found.version) == (assets.model, None, 0)
    for path in (first, first / "policy"):
        found = find_policy(path)
        assert (found.model, found.run_dir, found.version) == (first / "policy", first, 7)
    for path in (second, tmp_path / "mine", second / "checkpoints", second / "checkpoints" / "v00000012"):
        found = find_policy(path)
        assert (found.checkpoint, found.run_dir) == (second / "checkpoints" / "v00000012", second)
        assert (found.model, found.version) == (None, 12)
    assert find_policy(second / "checkpoints" / "v00000003").version == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty must hold .*config\.json.* checkpoint"):
        find_policy(tmp_path / "empty")


def test_evaluate_looks_for_checkpoints_in_the_configured_directory(tmp_path):
    elsewhere, nothing = tmp_path / "elsewhere", tmp_path / "nothing"
    run = make_run(tmp_path / "mine" / "2026-01-01", policy=False, checkpoints=(3, 12), directory=elsewhere)
    for path in (run, tmp_path / "mine"):
        found = find_policy(path)
        assert (found.checkpoint, found.run_dir, found.version) == (elsewhere / "v00000012", run, 12)
    without = make_run(tmp_path / "without", policy=False, directory=nothing)
    with pytest.raises(ValueError, match=rf"without must hold .* \(the run's .* would be in {nothing}\); check"):
        find_policy(without)


def test_evaluate_warns_about_a_checkpoint_without_a_run(tmp_path, capsys):
    elsewhere = tmp_path / "else" / "where"
    run = make_run(tmp_path / "run", policy=False, checkpoints=(12,), directory=elsewhere)
    words = f"{elsewhere}/v00000012 is not in a run's folder, so the options"
    for path, is_told in ((elsewhere, True), (elsewhere / "v00000012", True), (run, False)):
        assert main([str(path), "evaluation.samples=3"]) == 2
        assert (words in capsys.readouterr().err) is is_told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs MODEL_OR_RUN as its first argument"),
        (["data.eval_files=[x]"], "needs MODEL_OR_RUN as its first argument"),
        (["/nowhere"], "/nowhere must hold a model"),
        (["MODEL", "quickstart=false"], "data.eval_files must name at least one"),
        (["MODEL", "evaluation.samples=3"], "unknown option evaluation.samples"),
        (["MODEL", "data.eval_files=[HELD_OUT]", "rollout_fleet.engine=scripted"], "must be sglang or transformers"),
    ],
)
def test_evaluate_refuses_wrong_arguments_before_the_start(tmp_path, assets, capsys, arguments, words):
    names = {"MODEL": str(assets.model), "HELD_OUT": str(assets.held_out)}
    for name, value in names.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    assert main([*arguments, *([f"output_dir={tmp_path}"] if arguments else [])]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("name", "size"), [("model.safetensors", 5000), ("config.json", 20)])
def test_evaluate_names_a_truncated_model_file_in_one_line(tmp_path, assets, capsys, name, size):
    shutil.copytree(assets.model, tmp_path / "model")
    os.truncate(tmp_path / "model" / name, size)
    held_out = f"data.eval_files=[{assets.held_out}]"
    assert main([str(tmp_path / "model"), held_out, f"output_dir={tmp_path}", "rollout_fleet.engine=transformers"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: model.path: {tmp_path}/model/{name} must be whole")


def test_evaluate_uses_the_options_of_the_run_and_writes_all_answers(tmp_path, assets, capsys):
    run = make_run(tmp_path / "run", version=7)
    for file in assets.model.iterdir():
        (run / "policy" / file.name).write_bytes(file.read_bytes())
    assert main([str(run), f"data.eval_files=[{assets.held_out}]", "data.max_prompt_tokens=9"]) == 0
    (folder,) = (run / "evaluations").iterdir()
    found = json.loads((folder / "evaluation.json").read_text())
    assert (found["policy_version"], found["num_prompts"], found["num_missing"]) == (7, 24, 0)
    assert list(found["estimates"]) == ["mean@2", "pass@1", "pass@2", "greedy"]
    rows = [row for file in sorted((folder / "samples").iterdir()) for row in pq.read_table(file).to_pylist()]
    assert sorted((row["kind"], row["group_id"]) for row in rows) == sorted(
        [("sampled", index) for index in range(24)] * 2 + [("greedy", index) for index in range(24)]
    )
    assert found["response_length"] == pytest.approx(sum(row["num_tokens"] for row in rows) / len(rows))
    output = capsys.readouterr().out
    assert "policy version 7, 24 prompts" in output
    assert "pass@2" in output


@pytest.mark.parametrize("text", ["", "{}", "null"])
def test_a_damaged_summary_is_refused_by_name(tmp_path, text):
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").write_text(text)
    with pytest.raises(
        ValueError, match=rf"^{run_dir}/summary\.json must hold a JSON object with policy_version, got "
    ):
        find_policy(run_dir)
