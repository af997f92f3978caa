"""``asyncrl buffer`` exports the groups of a checkpoint, and converts an export to demonstrations."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from asyncrl.cli.buffer_command import demonstrations, main
from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import FinishReason, Prompt
from asyncrl.data.demonstrations import DemonstrationFormat, load_demonstrations
from buffer.exports import BufferContents, ExportedGroup, read_export, write_export
from buffer.groups import GroupState
from tests.buffer.test_checkpoints import first_life, options_of
from tests.support.buffer_groups import chat_prompt, running
from tests.support.checkpoints import save
from tests.support.trajectories import make_group


def answered(prompt: Prompt, answers: list[np.ndarray], rewards: list[float], reasons: str) -> TrajectoryGroup:
    num_tokens = sum(map(len, answers))
    return make_group(
        group_id=prompt.group_id,
        attempt=0,
        prompt_ids=prompt.prompt_ids,
        response_ids=np.concatenate(answers).astype(np.int32),
        response_lengths=np.array([len(answer) for answer in answers], dtype=np.int32),
        logprobs=-np.ones(num_tokens, dtype=np.float32),
        versions=np.arange(num_tokens, dtype=np.int32) + 3,
        rewards=np.array(rewards, dtype=np.float32),
        finish_reasons=tuple(FinishReason.stop if reason == "s" else FinishReason.length for reason in reasons),
    )


def contents_of(*groups: ExportedGroup) -> BufferContents:
    return BufferContents(
        learner_version=0, max_lag=0, groups_per_step=1, groups=groups, tokens_dropped={}, groups_dropped={}
    )


def spelled(token_ids: np.ndarray) -> str:
    return " ".join(map(str, token_ids.tolist()))


def test_the_best_complete_answers_become_demonstrations():
    prompt = chat_prompt(2)
    answers = [np.array([1, 2]), np.array([3]), np.array([4, 5]), np.array([6]), np.array([7])]
    held = answered(prompt, answers, [0.5, 9.0, 1.0, float("nan"), 0.25], "slsss")
    whole = ExportedGroup(prompt=prompt, state=GroupState.stored, is_complete=True, trajectories=held)
    prefix = ExportedGroup(prompt=prompt, state=GroupState.queued, trajectories=held)
    rows = list(demonstrations(contents_of(whole, prefix), spelled, min_reward=0.3, best=3))
    assert [(row["response"], row["reward"], row["version"]) for row in rows] == [("4 5", 1.0, 6), ("1 2", 0.5, 3)]
    assert rows[0]["messages"] == list(prompt.messages)
    assert rows[0]["tools"] == list(prompt.tools)
    [row] = demonstrations(contents_of(whole), spelled, min_reward=-1.0, best=1)
    assert row["reward"] == 1.0


def test_demonstrations_of_an_export_are_read_by_supervised_fine_tuning(tmp_path: Path, capsys, assets):
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    asked, right, wrong = (np.array(tokenizer(text)["input_ids"], dtype=np.int32) for text in ("123=", "321", "12"))
    prompt = Prompt(group_id=4, prompt_ids=asked)
    held = answered(prompt, [wrong, right], [0.0, 1.0], "ss")
    write_export(
        contents_of(ExportedGroup(prompt=prompt, state=GroupState.stored, is_complete=True, trajectories=held)),
        tmp_path / "export",
    )
    file = tmp_path / "demonstrations.jsonl"
    arguments = [str(tmp_path / "export"), "--model", str(assets.model), "--to", str(file), "--min-reward", "0.5"]
    assert main(["demonstrations", *arguments]) == 0
    assert "1 demonstrations of 1 finished groups" in capsys.readouterr().out
    assert json.loads(file.read_text())["group_id"] == 4
    form = DemonstrationFormat(prompt_key="prompt", response_key="response")
    [read] = load_demonstrations([str(file)], form, tokenizer)
    assert read.token_ids.tolist() == [*asked.tolist(), *right.tolist(), tokenizer.eos_token_id]
    assert main(["demonstrations", *arguments, "--best", "0"]) == 2


async def test_a_runs_newest_checkpoint_is_exported(tmp_path: Path, capsys):
    checkpoint = save(tmp_path / "run" / "checkpoints", 1)
    async with running(**options_of("memory", tmp_path)) as run:
        await first_life(run.client(), tmp_path / "run" / "checkpoints" / "buffer" / checkpoint.name)
    for number, path in enumerate((tmp_path / "run", tmp_path / "run" / "checkpoints", checkpoint)):
        folder = tmp_path / f"export{number}"
        assert main(["export", str(path), "--to", str(folder)]) == 0
        shown = f"2 planned, 2 stored, 5 queued, 1 leased of {checkpoint}; 5 groups have tokens"
        assert shown in capsys.readouterr().out
        assert len(read_export(folder).groups) == 10
    assert main(["export", str(tmp_path / "none"), "--to", str(tmp_path / "other")]) == 2
    assert "holds no complete checkpoint; a running training saves one" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["export", "demonstrations"])
def test_the_command_prints_its_help(kind: str, capsys):
    with pytest.raises(SystemExit):
        main([kind, "--help"])
    assert "--to" in capsys.readouterr().out
