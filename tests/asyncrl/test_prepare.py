import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from asyncrl.compose import compose_run
from asyncrl.prepare import warm_start, warm_start_path, with_quickstart_assets
from asyncrl.protocol.errors import WorkerDiedError


@pytest.fixture
def config(tmp_path):
    return with_quickstart_assets(compose_run([f"output_dir={tmp_path}"]))


def test_the_quickstarts_assets_are_named_in_the_configuration(config, tmp_path):
    assert Path(config.model.path, "config.json").is_file()
    assert Path(config.data.train_files[0]).is_relative_to(tmp_path)
    assert config.data.eval_files != config.data.train_files


def test_other_experiments_are_left_as_they_are():
    config = compose_run(["experiment=custom"])
    assert with_quickstart_assets(config) is config


def test_a_warm_start_is_reused_for_the_same_settings_only(config):
    same = warm_start_path(dataclasses.replace(config, total_steps=7))
    other = warm_start_path(dataclasses.replace(config, sft=dataclasses.replace(config.sft, lr=1e-4)))
    assert same == warm_start_path(config)
    assert other != same
    same.mkdir(parents=True)
    (same / "sft.json").write_text(json.dumps({"accuracy": 0.75}))
    said = []
    policy = asyncio.run(warm_start(config, [], Path("/nowhere/sft.log"), said.append))
    assert policy == same
    assert "0.750" in said[0]


def test_without_a_warm_start_the_policy_is_the_models_own(config):
    cold = dataclasses.replace(config, sft=dataclasses.replace(config.sft, enabled=False))
    assert asyncio.run(warm_start(cold, [], Path("/nowhere/sft.log"), print)) == Path(config.model.path)


def test_a_failed_warm_start_is_an_error_with_its_last_words(config, tmp_path):
    overrides = [f"output_dir={tmp_path}", "sft.prompt_key=question"]
    config = with_quickstart_assets(compose_run(overrides))
    with pytest.raises(WorkerDiedError, match=r"ended with status 2(.|\n)*question"):
        asyncio.run(warm_start(config, overrides, tmp_path / "sft.log", lambda line: None))
