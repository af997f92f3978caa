"""``asyncrl buffer``: export the finished groups of a run's buffer, and make demonstrations from an export.

A group is one prompt with all sampled responses to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.core.errors import with_exit_status
from asyncrl.core.trajectory import FINISH_REASONS, TrajectoryGroup
from asyncrl.core.types import FinishReason
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.run.resume import BUFFER
from buffer.exports import BufferContents, ExportedGroup, export_part, read_export
from learner.checkpoint_folder import newest_checkpoint, part_of

_STOPPED = FINISH_REASONS.index(FinishReason.stop)


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl buffer`` and return the exit status."""
    parser = argparse.ArgumentParser(prog="asyncrl buffer", description="Work with the contents of a replay buffer.")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write the groups of a checkpoint as parquet files")
    export.add_argument("run", type=Path, help="folder of a run, of its checkpoints, or of one checkpoint")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder for the files")
    teach = commands.add_parser("demonstrations", help="make rows for asyncrl sft of the best responses of an export")
    teach.add_argument("export", type=Path, help="a folder that 'asyncrl buffer export' wrote")
    teach.add_argument("--model", required=True, metavar="DIR", help="the model whose tokenizer decodes the responses")
    teach.add_argument("--to", type=Path, required=True, metavar="FILE.jsonl", help="the file of demonstrations")
    teach.add_argument("--min-reward", type=float, default=0.0, help="leave out responses of lower reward (default 0)")
    teach.add_argument("--best", type=int, default=1, metavar="N", help="at most N responses per prompt (default 1)")
    options = parser.parse_args(arguments)
    if options.command == "export":
        return _export(options.run, options.to)
    if options.best < 1:
        raise ValueError(f"--best must be >= 1, got {options.best}")
    return _demonstrate(options)


def _export(run: Path, folder: Path) -> int:
    checkpoint = newest_checkpoint(run / "checkpoints") or newest_checkpoint(run)
    if checkpoint is None:
        raise ValueError(
            f"{run} holds no complete checkpoint; a running training saves one with 'asyncrl checkpoint {run}'"
        )
    contents = export_part(part_of(checkpoint, BUFFER), folder)
    states = Counter(str(group.state) for group in contents.groups)
    held = sum(group.trajectories is not None for group in contents.groups)
    shown = ", ".join(f"{number} {state}" for state, number in states.items()) or "no groups"
    sys.stdout.write(f"{folder}: {shown} of {checkpoint}; {held} groups have tokens\n")
    return 0


def _demonstrate(options: argparse.Namespace) -> int:
    tokenizer: Any = load_tokenizer(options.model, chat_template=True)

    def decode(token_ids: np.ndarray) -> str:
        return tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    contents = read_export(options.export)
    rows = list(demonstrations(contents, decode, min_reward=options.min_reward, best=options.best))
    options.to.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    finished = sum(group.is_complete for group in contents.groups)
    sys.stdout.write(f"{options.to}: {len(rows)} demonstrations of {finished} finished groups\n")
    return 0


def demonstrations(
    contents: BufferContents, decode: Callable[[np.ndarray], str], *, min_reward: float, best: int
) -> Iterator[dict[str, Any]]:
    """Yield rows for supervised fine-tuning: up to ``best`` responses per finished group, highest reward first.

    A row has ``messages`` or the text ``prompt``. It also has ``response``, ``reward``, ``group_id`` and ``version``.
    ``version`` is the policy version of the response's oldest token. ``decode`` is a function that converts token ids
    to text. These responses are left out:

    - responses of several turns;
    - responses that the length limit cut off;
    - greedy rollouts that are only a baseline for the rewards;
    - responses whose reward is below ``min_reward`` or not finite.
    """
    for exported in contents.groups:
        group = exported.trajectories
        if group is None or not exported.is_complete:
            continue
        by_reward = np.argsort(-group.rewards, kind="stable").tolist()
        answers = [(index, found) for index in by_reward if (found := _answer(group, index)) is not None]
        rewarded = [(index, tokens) for index, tokens in answers if min_reward <= group.rewards[index] < np.inf]
        for index, tokens in rewarded[:best]:
            yield {
                **_asked(exported, decode),
                "response": decode(group.token_ids[tokens]),
                "reward": float(group.rewards[index]),
                "group_id": group.group_id,
                "version": int(group.versions[tokens].min()),
            }


def _asked(exported: ExportedGroup, decode: Callable[[np.ndarray], str]) -> dict[str, Any]:
    prompt = exported.prompt
    if prompt.messages:
        return {"messages": list(prompt.messages)} | ({"tools": list(prompt.tools)} if prompt.tools else {})
    return {"prompt": decode(prompt.prompt_ids)}


def _answer(group: TrajectoryGroup, index: int) -> slice | None:
    """Return the slice that selects the response of the trajectory at ``index`` from the group's tokens.

    The result is None if the response is empty, has several turns, or was cut off at the length limit. It is also None
    if the trajectory is a greedy rollout, because the learner does not train on greedy rollouts.
    """
    turns = group.turns
    own = np.flatnonzero(turns["trajectory"] == index)
    if group.is_baseline[index] or len(own) != 1:
        return None
    [turn] = own.tolist()
    if not turns["sampled"][turn] or turns["parent"][turn] != 0 or turns["finish_reason"][turn] != _STOPPED:
        return None
    start = int(turns["num_tokens"][:turn].sum())
    length = int(turns["num_tokens"][turn])
    return slice(start, start + length) if length else None
