import asyncio
import json
import shutil

import numpy as np
import pytest

from asyncrl.cli import rewards_command
from asyncrl.cli.compose import compose_run, dump_yaml
from asyncrl.core.types import FinishReason
from asyncrl.data.prompts import PromptStream, load_eval_prompts
from asyncrl.data.tokenizer import load_tokenizer
from rollout_fleet.config import SamplesConfig
from rollout_fleet.engines.engine import SampleOutput, load_decoder
from rollout_fleet.rewards import Scores
from rollout_fleet.sample_log import SampleLog


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "6*7=", "truth": "42", "answers": ["42", "it is 42", "41"], "cases": "a"},
        {"prompt": "1+1=", "truth": "two", "answers": ["2"], "cases": "b"},
        {"prompt": "2+1=", "truth": "3", "answers": ["3"], "cases": "c"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answers(capsys, *arguments):
    """Run ``asyncrl rewards try --json``. Returns a pair: the exit status, and the parsed output."""
    status = rewards_command.main(["try", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_rewards_of_responses_are_shown_with_parts_and_failures(data, capsys):
    arguments = ["numeric,0.5*exact_match", data, "data.ground_truth_key=truth", "--answers", "answers"]
    status, found = answers(capsys, *arguments)
    assert status == 1
    assert [one["reward"] for one in found["responses"]] == [1.5, 1.0, 0.0, None, 1.5]
    assert found["responses"][1]["parts"] == {"numeric": 1.0, "exact_match": 0.0}
    assert "the ground truth must be a number, got 'two'" in found["responses"][3]["failure"]
    assert (found["num_responses"], found["num_failed"], found["mean_reward"]) == (5, 1, 1.0)
    assert all(one["seconds"] > 0 for one in found["responses"])
    assert rewards_command.main(["try", *arguments]) == 1
    table = capsys.readouterr().out
    for part in ("exact_match", "seconds", "line 2", "5 responses, mean reward 1.000, 1 without a reward"):
        assert part in table


def test_without_a_response_column_the_ground_truth_of_num_prompts_is_scored(data, capsys):
    status, found = answers(capsys, "exact_match", data, "data.ground_truth_key=truth", "--num", "2")
    assert (status, [one["response"] for one in found["responses"]]) == (0, ["42", "two"])
    assert [one["reward"] for one in found["responses"]] == [1.0, 1.0]


def test_a_users_reward_is_scored_in_its_process_with_options_columns_and_turns(data, capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from rollout_fleet.rewards import Score\n"
        "def by_case(prompt, rollout, *, bonus):\n"
        "    return Score(reward=ord(prompt.extra['cases']) - 97, turn_rewards={1: bonus})\n"
    )
    bonus = "+rollout_fleet.reward_options.by_case.bonus=0.5"
    arguments = ["data.ground_truth_key=truth", "data.extra_keys=[cases]", bonus]
    status, found = answers(capsys, f"2*{tmp_path}/mine.py:by_case", data, *arguments)
    assert status == 0
    assert [one["reward"] for one in found["responses"]] == [1.0, 3.0, 5.0]
    assert found["responses"][0]["turn_rewards"] == {"1": 1.0}


def test_a_reward_is_checked_with_the_messages_of_a_run(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def roles(prompt, text):\n    return sum(len(one['content']) for one in prompt.messages)\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}], "truth": "a"}) + "\n")
    options = ["data.ground_truth_key=truth", "data.chat_template=true", "data.system_prompt=brief"]
    status, found = answers(capsys, f"{tmp_path}/mine.py:roles", str(rows), *options)
    assert (status, [one["reward"] for one in found["responses"]]) == (0, [7.0])
    for wrong in (None, "hi", [{"role": "user"}]):
        rows.write_text(json.dumps({"prompt": wrong, "truth": "a"}) + "\n")
        assert rewards_command.main(["try", "exact_match", str(rows), *options]) == 2
        assert "rows.jsonl, line 1: column 'prompt'" in capsys.readouterr().err


def test_a_negative_number_of_prompts_is_refused(data, capsys):
    with pytest.raises(SystemExit):
        rewards_command.main(["try", "exact_match", data, "data.ground_truth_key=truth", "-n", "-1"])
    assert "-n must be >= 0, got -1; 0 scores all prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope", "DATA"], "rollout_fleet.reward must be one of"),
        (["length", "DATA"], "reward_options.length must fit"),
        (["x*numeric", "DATA"], "must hold NAME or WEIGHT*NAME"),
        (["numeric", "DATA", "--answers", "cases"], ""),
        (["numeric", "DATA", "--answers", "nowhere"], "nowhere"),
        (["numeric", "DATA", "data.ground_truth_key=''"], "name the column of the responses with --answers"),
        (["numeric", "missing.jsonl"], "missing.jsonl"),
        (["numeric", "DATA", "--samples", "no_run"], "without config.yaml"),
        (["numeric", "DATA", "--samples", "no_run", "seed=1"], "leave them out"),
    ],
)
def test_wrong_arguments_of_rewards_are_refused_by_name(data, capsys, arguments, words):
    arguments = [data if word == "DATA" else word for word in arguments]
    if "data.ground_truth_key=''" not in arguments and "--samples" not in arguments:
        arguments.append("data.ground_truth_key=truth")
    status = rewards_command.main(["try", *arguments])
    assert status == (2 if words else 1)
    assert words in capsys.readouterr().err


async def _log(folder, config, prompts, kind):
    decode = load_decoder(config.model.path)
    log = SampleLog(folder / "samples", rank=0, config=SamplesConfig(num_groups=len(prompts)), decode=decode)
    for prompt in prompts:
        samples = [
            SampleOutput(
                token_ids=np.arange(3, 3 + count, dtype=np.int32),
                logprobs=np.zeros(count, dtype=np.float32),
                versions=np.zeros(count, dtype=np.int32),
                finish_reason=FinishReason.stop,
            )
            for count in (1, 2)
        ]
        texts = [str(prompt.ground_truth), "wrong"]
        scores = Scores(total=np.asarray([1.0, 0.0], dtype=np.float32))
        if kind == "train":
            await log.add(prompt, samples, texts, scores)
        else:
            await log.keep_answers(0, log.rows(prompt, samples, texts, scores), per_prompt=2)


@pytest.fixture
def run_folder(assets, tmp_path):
    """Return the folder of a run with samples of two training groups, and of one held-out prompt."""
    files = [f"data.train_files=[{assets.train}]", f"data.eval_files=[{assets.held_out}]"]
    config = compose_run([f"model.path={assets.model}", *files, "data.extra_keys=[prompt]", "seed=3"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_yaml(config))
    tokenizer = load_tokenizer(config.model.path, chat_template=False)
    trained = PromptStream(config.data, tokenizer, seed=config.seed).at([1, 6])
    asyncio.run(_log(tmp_path / "run", config, trained, "train"))
    asyncio.run(_log(tmp_path / "run", config, load_eval_prompts(config.data, tokenizer)[:1], "eval"))
    return tmp_path / "run"


def test_samples_of_a_run_are_scored_again_with_the_columns_of_their_rows(assets, run_folder, capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def reverses(prompt, rollouts):\n"
        "    truth = prompt.extra['prompt'].rstrip('=')[::-1]\n"
        "    return [(rollout.text == truth) + rollout.num_tokens / 10 for rollout in rollouts]\n"
    )
    for data, num in ((assets.train, 4), (assets.held_out, 2)):
        status, found = answers(capsys, f"{tmp_path}/mine.py:reverses", str(data), "--samples", str(run_folder))
        assert status == 0
        rewards = sorted(one["reward"] for one in found["responses"])
        assert rewards == pytest.approx([0.2] * (num // 2) + [1.1] * (num // 2))


def test_samples_of_other_data_are_refused(assets, run_folder, capsys):
    status = rewards_command.main(["try", "exact_match", str(assets.demonstrations), "--samples", str(run_folder)])
    assert status == 2
    shutil.copy(assets.held_out, run_folder / "copy.parquet")
    status = rewards_command.main(
        ["try", "exact_match", str(run_folder / "copy.parquet"), "--samples", str(run_folder)]
    )
    assert status == 2
    assert "must be the file with the run's prompts, but does not have the prompt of group 1" in capsys.readouterr().err
    (run_folder / "samples").rename(run_folder / "elsewhere")
    assert rewards_command.main(["try", "exact_match", str(assets.train), "--samples", str(run_folder)]) == 2
    assert "must have samples (samples/train-v*.parquet), got none" in capsys.readouterr().err
