"""The checks before the start of a run. Each mistake is reported with its option and leaves no files behind."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from asyncrl.checks import check_options
from asyncrl.cli import sft_command as sft
from asyncrl.cli.compose import compose_run
from asyncrl.cli.preflight import check_folders, preflight
from tests.support.checkpoints import STATE, save
from tests.support.vision_models import write_vision_model

REWARDS = """
import os, time
def right(prompt, text):
    return float(text == prompt.ground_truth)
def raises(prompt, text):
    raise KeyError("units")
def no_number(prompt, text):
    return "high"
def exits(prompt, text):
    os._exit(3)
def hangs(prompt, text):
    time.sleep(60)
"""


@pytest.fixture
def run(assets, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)

    def compose(*overrides):
        own = [f"output_dir={tmp_path}", "experiment=custom", f"model.path={assets.model}"]
        files = [f"data.train_files=[{assets.train}]", f"data.eval_files=[{assets.held_out}]"]
        limits = ["data.max_prompt_tokens=9", "rollout_fleet.sampling.max_new_tokens=12"]
        return compose_run([*own, *files, *limits, "rollout_fleet.engine=transformers", *overrides])

    return compose


async def test_the_preflight_returns_prompts_and_shows_the_first_prompt(run, tmp_path):
    said = []
    prompts, held_out = await preflight(run(f"rollout_fleet.reward={tmp_path}/rewards.py:right"), said.append)
    assert (prompts.num_prompts, len(held_out)) == (4, 4)
    assert re.fullmatch(r"first prompt \(\d tokens\): '\d+='", said[0])


async def test_a_checkpoint_of_other_prompts_is_refused_before_anything_starts(run, assets, tmp_path):
    prompts, _ = await preflight(run(), lambda _: None)
    checkpoint = save(tmp_path / "checkpoints", 4, state=replace(STATE, prompts=prompts.state()))
    resume = f"checkpoint.resume={checkpoint}"
    again, _ = await preflight(run(resume), lambda _: None)
    assert again.state() == prompts.state()
    with pytest.raises(ValueError, match=r"seed was 0 .*, got 1"):
        await preflight(run(resume, "seed=1"), lambda _: None)
    with pytest.raises(ValueError, match=r"must be .*saved state"):
        await preflight(run(resume, f"data.train_files=[{assets.held_out}]"), lambda _: None)


@pytest.mark.long
@pytest.mark.parametrize("option", ["output_dir", "checkpoint.directory", "buffer.directory", "buffer.keys"])
def test_the_preflight_names_an_unwritable_folder_and_creates_none(run, tmp_path, option):
    (tmp_path / "file").touch()
    config = run("buffer.durability=disk", f"buffer.directory={tmp_path}/buffer", f"{option}={tmp_path}/file/below")
    with pytest.raises(ValueError, match=rf"{option}=.*/file/below must be a folder.*Not a directory"):
        check_folders(config)
    check_folders(run("checkpoint.directory=" + str(tmp_path / "not" / "yet")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "rewards.py"]


def test_sft_does_not_start_with_an_unwritable_output_path(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert sft.main([f"output_dir={tmp_path}/out", f"sft.output_path={tmp_path}/file/policy"]) == 2
    assert "error: sft.output_path=" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unwritable_shared_memory_is_refused_with_a_remedy(run, tmp_path, monkeypatch):
    read_only = tmp_path / "shm"
    read_only.mkdir()
    monkeypatch.setattr("asyncrl.cli.preflight.SHARED_MEMORY", read_only)

    def refuse(*, dir):
        if dir == read_only:
            raise PermissionError(13, "Permission denied", str(dir))
        return open("/dev/null")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"shared memory.*Permission denied.*weights\.transport=file"):
        check_folders(run())
    check_folders(run("learner.keep_snapshots=-1"))
    check_folders(run("weights.transport=file"))


async def test_weights_too_large_for_an_explicit_shared_memory_transport_are_refused(run, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"weights\.transport=shared_memory needs room.*set weights\.transport=file"):
        await preflight(run("weights.transport=shared_memory"), print)
    await preflight(run(), print)


async def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(run, assets, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    for file in assets.model.iterdir():
        (small / file.name).write_bytes(file.read_bytes())
    settings = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(settings | {"vocab_size": 12}))
    with pytest.raises(ValueError, match=r"model\.path=.*ids up to 13 \('9'\).*vocab_size=12.*resize"):
        await preflight(run(f"model.path={small}"), print)


async def test_a_model_without_a_vocabulary_size_is_refused(run, assets, tmp_path):
    shutil.copytree(assets.model, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match=r"model\.path=.*/model: config\.json .* integer vocab_size, got None"):
        await preflight(run(f"model.path={tmp_path}/model"), print)


async def test_a_model_without_a_file_of_its_tokenizer_is_refused(run, assets, tmp_path):
    shutil.copytree(assets.model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"/model must hold a tokenizer .* got tokenizer_config\.json \(.*copy"):
        await preflight(run(f"model.path={tmp_path}/model"), print)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["learner.num_ranks=3", "learner.sp_size=3"], r"learner\.sp_size must divide the 4 attention heads.*got 3"),
        (["rollout_fleet.sglang.tp_size=3"], r"rollout_fleet\.sglang\.tp_size must divide the 4 attention heads"),
    ],
)
async def test_ranks_that_do_not_divide_the_heads_are_refused(run, overrides, words):
    with pytest.raises(ValueError, match=words):
        await preflight(run(*overrides), print)


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", r"raised KeyError\('units'\)"),
        ("no_number", "returned 'high'"),
        ("exits", "ended its process"),
        ("hangs", r"did not score it within rollout_fleet\.reward_timeout_s = 0\.3 s"),
    ],
)
async def test_a_reward_that_fails_on_the_first_row_is_refused(run, tmp_path, function, words):
    name = f"{tmp_path}/rewards.py:{function}"
    config = run(f"rollout_fleet.reward={name}", "rollout_fleet.reward_timeout_s=0.3")
    with pytest.raises(ValueError, match=rf"rollout_fleet\.reward={name} must return one finite number.*{words}"):
        await preflight(config, print)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("rollout_fleet.reward=nowhere:reward", "rollout_fleet.reward=nowhere:reward cannot be imported"),
        ("algorithm.loss=/nowhere.py:loss", "algorithm.loss=/nowhere.py:loss: there is no file /nowhere.py"),
        ("algorithm.advantage=grop", "algorithm.advantage must be one of"),
    ],
)
async def test_a_wrong_name_of_a_users_function_fails_the_preflight(run, option, words):
    with pytest.raises(ValueError, match=words):
        await preflight(run(option), print)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "calculater",
            r"must name one of \['command', 'gym', .*\], or file.py:Class .*, got 'calculater'; correct the name",
        ),
        ("/nowhere.py:Asker", "has '/nowhere.py:Asker', and there is no file /nowhere.py; check the path"),
        ("nowhere.py:", "must name one of"),
    ],
)
async def test_a_missing_environment_of_a_row_or_of_a_source_is_refused(run, tmp_path, name, words):
    rows = tmp_path / "rows.jsonl"
    known = "rollout_fleet.episodes.calculator:Calculator"
    lines = [{"prompt": "1=", "ground_truth": "1", "where": where, "source": "a"} for where in (known, None, name)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [f"data.train_files=[{rows}]", "evaluation.enabled=false"]
    with pytest.raises(ValueError, match=f"the column 'where' or data.environment_by_source {words}"):
        await preflight(run(*files, "data.environment_key=where"), print)
    by_source = {"data.data_source_key": "source", "data.environment_by_source": f"{{a: '{name}'}}"}
    with pytest.raises(ValueError, match=r"^data.environment_by_source (must|has)"):
        await preflight(run(*files, *(f"{key}={value}" for key, value in by_source.items())), print)


async def test_a_source_that_no_row_has_gives_a_warning(run, tmp_path):
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": "1=", "ground_truth": "1", "source": source} for source in ("sums", "words")]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    by_source = "{sums: [exact_match], wrods: [last_number]}"
    options = ["data.data_source_key=source", f"rollout_fleet.rewards_by_source={by_source}"]
    said = []
    await preflight(run(f"data.train_files=[{rows}]", "evaluation.enabled=false", *options), said.append)
    assert [line for line in said if "wrods" in line] == [
        "warning: rollout_fleet.rewards_by_source names the source 'wrods', but the rows have only these sources in "
        "the column 'source': ['sums', 'words']; correct the name, or leave it out"
    ]
    assert not any("'sums'," in line.split("but the rows")[0] for line in said)


@pytest.mark.parametrize(
    "option",
    [
        "rollout_fleet.rewards_by_source={a: [exact_match]}",
        "rollout_fleet.sampling_by_source={a: {max_new_tokens: 2}}",
        "algorithm.advantage_by_source={a: rloo}",
    ],
)
def test_options_by_source_need_a_column_of_sources(run, option):
    with pytest.raises(ValueError, match=rf"{option.partition('=')[0]} needs data\.data_source_key, the column of"):
        check_options(run(option))


def test_a_failed_preflight_leaves_no_folder_and_ends_with_its_cause(assets, tmp_path):
    options = [f"model.path={assets.model}", f"data.train_files=[{tmp_path}/none.parquet]", "evaluation.enabled=false"]
    command = [sys.executable, "-m", "asyncrl", "train", "experiment=custom", f"output_dir={tmp_path}", *options]
    limits = [
        "rollout_fleet.sampling.max_new_tokens=12",
        "data.max_prompt_tokens=9",
        "rollout_fleet.engine=transformers",
    ]
    done = subprocess.run([*command, *limits], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.match(r"error: .*none\.parquet: no such file", done.stderr.splitlines()[-1])
    assert "logs:" not in done.stderr
    assert not list(tmp_path.glob("custom/*"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout_fleet.engine=sglang", "rollout_fleet.device=cpu"], "sglang on a CPU"),
        (["learner.lora.rank=2"], "learner.lora.rank is set, and the model in .* takes images"),
        (["algorithm.advantage=gae"], "algorithm.advantage=gae is set, and the model in .* takes images"),
    ],
)
async def test_options_that_a_vision_model_does_not_support_are_refused(run, tmp_path, overrides, words):
    model_path = write_vision_model(tmp_path / "model")
    with pytest.raises(ValueError, match=words):
        await preflight(run(f"model.path={model_path}", *overrides), lambda _: None)


async def test_freeze_vision_needs_a_model_with_a_vision_tower(run):
    with pytest.raises(ValueError, match=r"learner\.freeze_vision is true, but the model in .* has no vision tower"):
        await preflight(run("learner.freeze_vision=true"), lambda _: None)
