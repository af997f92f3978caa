"""Each shipped experiment composes, fits its hardware, and reads the files of the data scripts."""

import json
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.checks import check_options
from asyncrl.cli.compose import CONFIG_DIR, compose_run
from asyncrl.core.types import Prompt
from asyncrl.data import PromptStream
from asyncrl.run.cluster import check_nodes
from rollout_fleet.rewards import REWARDS
from tests.support.training_run import ROOT

EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))
OF_TEAMS = [name for name in EXPERIMENTS if "device: cuda" in (CONFIG_DIR / "experiment" / f"{name}.yaml").read_text()]
OF_TEAMS += ["gsm8k_colocated", "gsm8k_lora", "dapo_math_8_nodes", "dapo_math_30b_a3b"]
QUESTION = "Natalia sold 48 clips, and half as many in May. How many in all?"


class Letters:
    """A tokenizer that makes one token per letter and has a chat template."""

    chat_template = "yes"

    def apply_chat_template(self, conversation, **_):
        return conversation[0]["content"]

    def __call__(self, texts, **_):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_passes_the_checks(name):
    config = compose_run([f"experiment={name}"])
    assert config.experiment == name
    check_options(config)


@pytest.mark.parametrize("name", OF_TEAMS)
def test_a_team_experiment_names_its_hardware_and_fits_on_it(name):
    text = (CONFIG_DIR / "experiment" / f"{name}.yaml").read_text()
    assert re.findall(r"^# (\w+): +\S", text, flags=re.MULTILINE) == ["Hardware", "Expect", "Before"]
    num_nodes, num_gpus = re.search(r"# Hardware: (one|\d+) nodes? with (\d) GPU", text).groups()
    config = compose_run([f"experiment={name}"])
    node = {"CPU": 8.0 * int(num_gpus), "GPU": float(num_gpus)}
    nodes = {f"10.0.0.{number}": node for number in range(1 if num_nodes == "one" else int(num_nodes))}
    assert config.placement.num_nodes == len(nodes)
    check_nodes(config, nodes)
    if int(num_gpus) > 1:
        with pytest.raises(ValueError, match="GPUs"):
            check_nodes(config, nodes | {"10.0.0.0": node | {"GPU": node["GPU"] - 1}})
    assert config.evaluation.every_steps
    assert config.checkpoint.every_steps


def make_data(script, source, target):
    command = [sys.executable, str(ROOT / "scripts" / "data" / script), str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


def first_prompt(name, data):
    config = compose_run([f"experiment={name}", f"data.train_files=[{data}]"])
    stream = PromptStream(config.data, Letters(), seed=0)
    return config, stream.num_prompts, stream.take(1)[0]


def test_the_published_gsm8k_is_converted_for_its_experiment(tmp_path):
    row = {"question": QUESTION, "answer": "48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    done = make_data("gsm8k.py", tmp_path / "train.jsonl", tmp_path / "new" / "train.parquet")
    assert done.returncode == 0, done.stderr
    config, count, prompt = first_prompt("gsm8k", tmp_path / "new" / "train.parquet")
    assert (count, prompt.ground_truth) == (1, "1072")
    assert "".join(map(chr, prompt.prompt_ids)).startswith(QUESTION)
    assert REWARDS.get(config.rollout_fleet.reward)(prompt, "so it is 1072.") == 1.0
    (tmp_path / "train.jsonl").write_text(json.dumps({**row, "answer": "72"}) + "\n")
    failed = make_data("gsm8k.py", tmp_path / "train.jsonl", tmp_path / "other.parquet")
    assert "train.jsonl, line 1: the answer must end in '#### NUMBER'" in failed.stderr


def test_the_published_dapo_math_is_converted_for_its_experiment(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": truth, "style": "rule"}}
        for text, truth in (("1 + 1?", "2"), ("2 + 2?", "4"), ("1 + 1?", "2"))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dapo.parquet")
    done = make_data("dapo_math.py", tmp_path / "dapo.parquet", tmp_path / "train.parquet")
    assert done.returncode == 0, done.stderr
    config, count, prompt = first_prompt("dapo_math", tmp_path / "train.parquet")
    assert (count, isinstance(prompt, Prompt)) == (2, True), "a problem that occurs twice must be kept once"
    assert REWARDS.get(config.rollout_fleet.reward)(prompt, f"Answer: {prompt.ground_truth}") == 1.0
