"""``asyncrl rewards try REWARD DATA``: score existing responses with reward functions, without a run.

The responses are a column of the data, or the samples of an earlier run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from asyncrl.cli.compose import compose_run, read_config
from asyncrl.config import RunConfig
from asyncrl.core.errors import with_exit_status
from asyncrl.core.image_files import image_reader
from asyncrl.core.registry import absolute_name
from asyncrl.core.types import FinishReason, Prompt
from asyncrl.data.chat import Message, read_messages
from asyncrl.data.prompts import PromptStream, load_eval_prompts
from asyncrl.data.row_files import read_rows
from asyncrl.data.samplers import UNIFORM
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.samples import printable, read_samples
from rollout_fleet.engines.engine import load_decoder
from rollout_fleet.rewards import Rollout, WeightedRewards

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class GivenResponses:
    """A prompt, and existing responses to this prompt. The reward functions score all these responses together.

    Attributes:
        name: Name of the prompt in the printed table. Example: ``row 3``.
    """

    name: str
    prompt: Prompt
    rollouts: Sequence[Rollout]


@dataclass(frozen=True, kw_only=True)
class TriedResponse:
    """One response with its reward, or with the reason why it has no reward.

    Attributes:
        reward: Weighted sum of all rewards, including the rewards of turns; None after a failure.
        parts: Value of each reward by name, if there are several reward functions.
        turn_rewards: Weighted reward of each rewarded turn (one generation of the model), by the index of the turn.
        failure: Text that says why there is no reward; empty if there is a reward.
        seconds: Seconds that it took to score all responses to the prompt together.
    """

    name: str
    response: str
    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    turn_rewards: dict[int, float] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl rewards`` and return the exit status: 1 if a response has no reward."""
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if flags := [word for word in overrides if word.startswith("-")]:
        parser.error(f"unknown flag {flags[0]}")
    if options.num < 0:
        parser.error(f"-n must be >= 0, got {options.num}; 0 scores all prompts")
    logging.basicConfig(level=logging.INFO if options.verbose else logging.ERROR, format="%(message)s")
    config = _config(options, overrides)
    given = list(_of_samples(options, config) if options.samples else _of_rows(options, config))
    tried = asyncio.run(try_rewards(config, given))
    if options.json:
        sys.stdout.write(json.dumps({**_summary(tried), "responses": [asdict(one) for one in tried]}, indent=1) + "\n")
    else:
        _show(tried)
    return 1 if any(one.failure for one in tried) else 0


async def try_rewards(config: RunConfig, given: Sequence[GivenResponses]) -> list[TriedResponse]:
    """Score the given responses, one prompt after the other. Returns one result per response, in the given order.

    Raises:
        ValueError: a reward does not exist, or does not accept its options.
        AsyncRLError: a scoring process does not start.
    """
    rewards = WeightedRewards(replace(config.rollout_fleet, reward_processes=1))
    tried: list[TriedResponse] = []
    try:
        await rewards.start()
        for one in given:
            started = time.perf_counter()
            scores = await rewards.score(one.prompt, one.rollouts, may_fail=True)
            seconds = time.perf_counter() - started
            sums = scores.sums.tolist()
            for place, rollout in enumerate(one.rollouts):
                tried.append(
                    TriedResponse(
                        name=one.name,
                        response=rollout.text,
                        reward=sums[place] if math.isfinite(sums[place]) else None,
                        parts={
                            name: float(part[place]) for name, part in scores.parts.items() if np.isfinite(part[place])
                        },
                        turn_rewards=dict(scores.turn_rewards[place]) if scores.turn_rewards else {},
                        failure=scores.failures[place] if scores.failures else "",
                        seconds=round(seconds, 4),
                    )
                )
    finally:
        await rewards.close()
    return tried


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl rewards", description="Work with rewards, outside of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "score given responses, before a run"
    usage = "asyncrl rewards try REWARD DATA [--answers COLUMN | --samples RUN] [-n N] [--json] [OPTION=VALUE ...]"
    one = commands.add_parser("try", help=about, description=about, usage=usage)
    one.add_argument("reward", metavar="REWARD", help="NAME or WEIGHT*NAME; several with commas")
    one.add_argument("data", metavar="DATA", help="parquet or jsonl file with the rows of the prompts")
    one.add_argument("--answers", default="", metavar="COLUMN", help="responses (default data.ground_truth_key)")
    one.add_argument("--samples", type=Path, metavar="RUN", help="responses: the samples of this run of DATA")
    one.add_argument("-n", "--num", type=int, default=20, help="prompts to score; 0 scores all (default 20)")
    one.add_argument("--json", action="store_true", help="print JSON instead of the table")
    one.add_argument("--verbose", action="store_true", help="show what the scoring processes log")
    return parser


def _config(options: argparse.Namespace, overrides: Sequence[str]) -> RunConfig:
    if not options.samples:
        config = compose_run(overrides)
    elif overrides:
        raise ValueError(f"--samples uses the options of the run, but got {list(overrides)} too; leave them out")
    else:
        config = read_config(options.samples)
    entries = [entry.strip().rpartition("*") for entry in options.reward.split(",")]
    rewards = [f"{weight}{star}{absolute_name(name)}" for weight, star, name in entries]
    labels = [name.rpartition(":")[2] for _, _, name in entries]
    fleet = config.rollout_fleet
    own = {label: given for label, given in fleet.reward_options.items() if label in labels}
    given = replace(fleet, rewards=rewards, rewards_by_source={}, reward_options=own)
    return replace(config, rollout_fleet=given)


def _of_rows(options: argparse.Namespace, config: RunConfig) -> Iterator[GivenResponses]:
    data = config.data
    column = options.answers or data.ground_truth_key
    if not column:
        raise ValueError("asyncrl rewards try needs responses; name the column of the responses with --answers")
    keys = [data.ground_truth_key, data.data_source_key, column]
    keys += [data.prompt_key] if data.chat_template else []
    rows = read_rows(options.data, [key for key in dict.fromkeys(keys) if key], optional=data.extra_keys)
    values = {key: rows.column(key) for key in dict.fromkeys(keys) if key}
    extra = {key: rows.optional_column(key) for key in data.extra_keys}
    messages: Sequence[tuple[Message, ...]] = [()] * len(rows)
    if data.chat_template:
        messages = read_messages(rows, data.prompt_key, system_prompt=data.system_prompt, has_images=True)
    for row in range(len(rows))[: options.num or None]:
        texts = values[column][row]
        texts = texts if isinstance(texts, list) else [texts]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"{rows.where(row)}: column {column!r} must be a response or a list of responses, got {texts!r:.200}; "
                "name another column with --answers"
            )
        prompt = Prompt(
            group_id=row,
            prompt_ids=np.empty(0, dtype=np.int32),
            ground_truth=values[data.ground_truth_key][row] if data.ground_truth_key else None,
            data_source=values[data.data_source_key][row] if data.data_source_key else "",
            extra={key: own[row] for key, own in extra.items() if own[row] is not None},
            messages=messages[row],
        )
        name = f"{rows.unit} {rows.numbers[row]}"
        yield GivenResponses(name=name, prompt=prompt, rollouts=[Rollout.answer(text) for text in texts])


def _of_samples(options: argparse.Namespace, config: RunConfig) -> Iterator[GivenResponses]:
    """Yield the samples of a run, grouped by prompt: samples of evaluations if DATA is a file of held-out prompts."""
    held_out = [str(Path(file).resolve()) for file in config.data.eval_files]
    is_held_out = str(Path(options.data).resolve()) in held_out
    pattern = "samples/[sg]*-v*.parquet" if is_held_out else "samples/train-v*.parquet"
    samples = read_samples(sorted(options.samples.glob(pattern)))
    if not samples:
        raise ValueError(f"{options.samples} must have samples ({pattern}), got none; name a run that keeps samples")
    tokenizer = load_tokenizer(config.model.path, chat_template=config.data.chat_template)
    decode = load_decoder(config.model.path)
    images = image_reader(config.model.path, max_pixels=config.rollout_fleet.max_image_pixels)
    if is_held_out:
        prompts = {prompt.group_id: prompt for prompt in load_eval_prompts(config.data, tokenizer, images=images)}
    else:
        if config.data.sampler != UNIFORM:
            raise ValueError(
                f"training samples need data.sampler={UNIFORM}, got {config.data.sampler}: with this sampler, the row "
                "of a sample's prompt in the data is unknown; name one of data.eval_files to score held-out samples"
            )
        data = replace(config.data, train_files=[options.data])
        stream = PromptStream(data, tokenizer, seed=config.seed, images=images)
        numbers = sorted({sample["group_id"] for sample in samples})
        prompts = dict(zip(numbers, stream.at(numbers), strict=True))
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault((sample["version"], sample["group_id"]), []).append(sample)
    for (version, number), group in sorted(groups.items())[: options.num or None]:
        prompt = prompts.get(number)
        if prompt is None or decode(prompt.prompt_ids.tolist()) != group[0]["prompt"]:
            raise ValueError(
                f"{options.data} must be the file with the run's prompts, but does not have the prompt of group "
                f"{number} of {options.samples}; name one of the run's data.eval_files, or of its data.train_files if "
                "the run has no data.sampler"
            )
        rollouts = [
            Rollout.answer(
                sample["response"],
                num_tokens=sample["num_tokens"],
                is_truncated=sample["finish_reason"] == FinishReason.length,
            )
            for sample in group
        ]
        yield GivenResponses(name=f"group {number}, version {version}", prompt=prompt, rollouts=rollouts)


def _summary(tried: Sequence[TriedResponse]) -> dict[str, Any]:
    rewards = [one.reward for one in tried if one.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    return {"num_responses": len(tried), "num_failed": len(tried) - len(rewards), "mean_reward": mean}


def _show(tried: Sequence[TriedResponse]) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    names = list(dict.fromkeys(name for one in tried for name in one.parts))
    has_turns = any(one.turn_rewards for one in tried)
    table = Table("prompt", "reward", *names, *(["by turn"] if has_turns else []), "seconds", "response", box=None)
    for one in tried:
        turns = " ".join(f"{turn}:{value:g}" for turn, value in sorted(one.turn_rewards.items()))
        cells = ["-" if one.reward is None else f"{one.reward:.3f}"]
        cells += [f"{one.parts[name]:.3f}" if name in one.parts else "-" for name in names]
        shown = printable(" ".join(one.failure.split()) or one.response[:_SHOWN_CHARACTERS].replace("\n", "⏎"))
        table.add_row(one.name, *cells, *([turns] if has_turns else []), f"{one.seconds:.3f}", shown)
    console.print(table)
    found = _summary(tried)
    mean = "none" if found["mean_reward"] is None else f"{found['mean_reward']:.3f}"
    console.print(f"{found['num_responses']} responses, mean reward {mean}, {found['num_failed']} without a reward")
