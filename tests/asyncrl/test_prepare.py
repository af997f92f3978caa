import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from asyncrl.cli.compose import compose_run
from asyncrl.cli.preflight import read_prompts
from asyncrl.cli.quickstart import with_quickstart_assets
from asyncrl.core.errors import DeadlineError, WorkerDiedError
from asyncrl.data.prompts import PromptStream
from asyncrl.sft.warm_start import (
    finished_warm_start,
    settings_digest,
    warm_start,
    warm_start_path,
    write_warm_start,
)

HOLDER = "process 4711 on node-3"


@pytest.fixture
def config(tmp_path):
    return with_quickstart_assets(compose_run([f"output_dir={tmp_path}"]))


def test_the_configuration_has_the_paths_of_the_quickstart_assets(config, tmp_path):
    assert Path(config.model.path, "config.json").is_file()
    assert Path(config.data.train_files[0]).is_relative_to(tmp_path)
    assert config.data.eval_files != config.data.train_files


def test_quickstart_assets_do_not_change_other_experiments():
    config = compose_run(["experiment=custom"])
    assert with_quickstart_assets(config) is config


def test_a_warm_start_is_reused_only_for_the_same_settings(config):
    same = warm_start_path(dataclasses.replace(config, total_steps=7))
    other = warm_start_path(dataclasses.replace(config, sft=dataclasses.replace(config.sft, lr=1e-4)))
    assert same == warm_start_path(config)
    assert other != same
    same.mkdir(parents=True)
    result = {"settings": settings_digest(config), "steps": 9, "accuracy": 0.75, "val_loss": None}
    (same / "sft.json").write_text(json.dumps(result))
    said = []
    policy = asyncio.run(warm_start(config, [], Path("/nowhere/sft.log"), said.append))
    assert policy == same
    assert "accuracy 0.750" in said[0]


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "vocab.txt"])
def test_a_warm_start_is_not_reused_after_a_change_of_the_tokenizer_or_the_chat_template(config, file):
    before = warm_start_path(config)
    path = Path(config.model.path, file)
    path.write_text((path.read_text() if path.is_file() else "") + "\n")
    assert warm_start_path(config) != before


@contextlib.contextmanager
def locked(config):
    """Hold the lock of the warm start's folder, as a process of another run does."""
    folder = warm_start_path(config)
    folder.parent.mkdir(parents=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(HOLDER)
        held.flush()
        yield


def test_a_run_waits_for_a_warm_start_that_another_run_makes_and_reuses_it(config):
    folder, said = warm_start_path(config), []

    async def reused() -> Path:
        has_spoken = asyncio.Event()

        def say(line: str) -> None:
            said.append(line)
            has_spoken.set()

        with locked(config):
            waiting = asyncio.create_task(warm_start(config, [], Path("/nowhere/sft.log"), say))
            await has_spoken.wait()
            write_warm_start(config, {"steps": 9, "accuracy": 0.75, "val_loss": None}, write_nothing)
        return await waiting

    assert asyncio.run(asyncio.wait_for(reused(), 20)) == folder
    assert f"another run ({HOLDER}) makes" in said[0]
    assert "accuracy 0.750" in said[1]


def test_a_run_waits_for_a_hanging_warm_start_until_a_deadline(config):
    config = dataclasses.replace(config, sft=dataclasses.replace(config.sft, progress_timeout_s=0.3))
    with locked(config), pytest.raises(DeadlineError, match=rf"\({HOLDER}\) makes .* for 0\.3 s; stop that run"):
        asyncio.run(asyncio.wait_for(warm_start(config, [], Path("/nowhere/sft.log"), lambda line: None), 20))


def test_a_warm_start_without_file_locks_continues_with_a_warning(config, monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr("asyncrl.sft.warm_start._COMMAND", ("-c", "raise SystemExit(1)"))
    said = []
    with pytest.raises(WorkerDiedError, match="ended with status 1"):
        asyncio.run(warm_start(config, [], tmp_path / "sft.log", said.append))
    assert f"{warm_start_path(config).parent} has no locks (No locks available)" in said[0]


def write_nothing(directory):
    directory.mkdir()


def with_output(config, path, **sft):
    return dataclasses.replace(config, sft=dataclasses.replace(config.sft, output_path=str(path), **sft))


def test_an_output_path_is_reused_for_the_same_settings_and_refused_for_other_settings(config, tmp_path):
    named = with_output(config, tmp_path / "policy")
    assert finished_warm_start(named) is None
    write_warm_start(named, {"steps": 3, "accuracy": 0.5, "val_loss": None}, write_nothing)
    assert finished_warm_start(named)["steps"] == 3
    assert finished_warm_start(with_output(config, tmp_path / "policy", progress_timeout_s=1.0)) is not None
    for other in (
        with_output(config, tmp_path / "policy", lr=1e-4),
        dataclasses.replace(named, seed=5),
        dataclasses.replace(named, data=dataclasses.replace(named.data, eval_files=[])),
    ):
        with pytest.raises(ValueError, match=r"sft\.output_path=.*policy of other settings"):
            finished_warm_start(other)


def test_an_output_path_with_other_files_is_never_replaced(config, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("dear")
    named = with_output(config, tmp_path / "home")
    with pytest.raises(ValueError, match="got other files"):
        finished_warm_start(named)
    with pytest.raises(ValueError, match="got other files"):
        write_warm_start(named, {}, write_nothing)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "dear"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".home")) == []


def test_a_silent_warm_start_ends_at_its_deadline(config, tmp_path, monkeypatch):
    config = dataclasses.replace(config, sft=dataclasses.replace(config.sft, progress_timeout_s=0.3))
    monkeypatch.setattr("asyncrl.sft.warm_start._COMMAND", ("-c", "import time; time.sleep(60)"))
    with pytest.raises(DeadlineError, match=r"wrote no line for 0\.3 s.*sft\.progress_timeout_s"):
        asyncio.run(warm_start(config, [], tmp_path / "sft.log", lambda line: None))


def test_training_continues_when_the_warm_start_has_written_its_policy(config, tmp_path, monkeypatch):
    """A real warm start exits a second after it has written the policy. The process of this test never exits."""
    policy, made = warm_start_path(config), tmp_path / "made"
    write_warm_start(config, {"steps": 3, "accuracy": 0.5, "val_loss": None}, write_nothing)
    policy.rename(made)
    code = "import sys; print('sft: 3 steps', flush=True); sys.exit(3)"
    monkeypatch.setattr("asyncrl.sft.warm_start._COMMAND", ("-c", code))
    with pytest.raises(WorkerDiedError, match="ended with status 3"):
        asyncio.run(warm_start(config, [], tmp_path / "sft.log", lambda line: None))
    code = f"import os, time; os.rename('{made}', '{policy}'); print('sft: 3 steps', flush=True); time.sleep(600)"
    monkeypatch.setattr("asyncrl.sft.warm_start._COMMAND", ("-c", code))
    assert asyncio.run(warm_start(config, [], tmp_path / "sft.log", lambda line: None)) == policy


@pytest.mark.long
def test_prompts_are_read_without_torch_and_equal_the_prompts_of_transformers(config):
    code = (
        "import sys; from asyncrl.cli.compose import compose_run\n"
        "from asyncrl.cli.quickstart import with_quickstart_assets\n"
        "from asyncrl.cli.preflight import read_prompts\n"
        f"config = with_quickstart_assets(compose_run(['output_dir={config.output_dir}']))\n"
        "prompts, held_out = read_prompts(config)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print([p.prompt_ids.tolist() for p in prompts.take(5)], len(held_out))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    expected = PromptStream(config.data, AutoTokenizer.from_pretrained(config.model.path), seed=config.seed)
    assert done.stdout.strip() == f"{[p.prompt_ids.tolist() for p in expected.take(5)]} 256"
    too_long = dataclasses.replace(config, data=dataclasses.replace(config.data, max_prompt_tokens=6))
    with pytest.raises(ValueError, match=r"at most data\.max_prompt_tokens = 6"):
        read_prompts(too_long)


def test_without_a_warm_start_the_policy_is_model_path(config):
    cold = dataclasses.replace(config, sft=dataclasses.replace(config.sft, enabled=False))
    assert asyncio.run(warm_start(cold, [], Path("/nowhere/sft.log"), print)) == Path(config.model.path)


def test_a_failed_warm_start_is_an_error_with_its_last_lines(config, tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.sft.warm_start._COMMAND", ("-c", "print('no column question'); raise SystemExit(2)"))
    with pytest.raises(WorkerDiedError, match=r"ended with status 2(.|\n)*no column question"):
        asyncio.run(warm_start(config, [], tmp_path / "sft.log", lambda line: None))
