"""Reward functions, built in or a user's own, and the scoring processes that call a user's functions.

A prompt group waits for a free process; its deadline starts when it has one. A process that hangs or dies is replaced.
The processes (``python -m rollout_fleet.rewards NAME PARENT_PID``) are those of `rollout_fleet.children`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from asyncrl.core.errors import DeadlineError, RewardError, WorkerDiedError
from asyncrl.core.registry import Registry
from asyncrl.core.types import Prompt

from .child_pipes import LENGTH, READY, open_pipes, write_frame
from .children import ChildProcess, child_environment, with_remedy
from .config import RolloutFleetConfig, reward_label

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0  # of a scoring process
_LARGEST = float(np.finfo(np.float32).max)


class Reward(Protocol):
    """Scores one response. Called in a scoring process, or in the rollout worker if it is built in."""

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """Return the reward of a response, decoded without special tokens, to a prompt with its ground truth."""
        ...


REWARDS: Registry[Reward] = Registry("rollout_fleet.reward")


@REWARDS.register("exact_match")
def exact_match(prompt: Prompt, response_text: str) -> float:
    """Return 1.0 if ``response_text`` (special tokens removed) equals the prompt's ground truth, else 0.0."""
    return 1.0 if response_text == prompt.ground_truth else 0.0


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@REWARDS.register("last_number")
def last_number(prompt: Prompt, response_text: str) -> float:
    """Return 1.0 if the response's last number is the ground truth, else 0.0. Example: ``$1,250.`` is 1250."""
    numbers = _NUMBER.findall(response_text)
    return float(bool(numbers) and _as_number(numbers[-1]) == _as_number(str(prompt.ground_truth)))


@REWARDS.register("final_answer")
def final_answer(prompt: Prompt, response_text: str) -> float:
    r"""Return 1.0 if the last ``\boxed{…}``, or else what follows the last ``Answer:``, is the ground truth, else 0.0.

    Numbers are compared as numbers, all else as text without spaces: ``1/2`` is not ``0.5``.
    """
    written, expected = (re.sub(r"[\s$]|\.$", "", text) for text in (_final(response_text), str(prompt.ground_truth)))
    number = _as_number(expected)
    return float(written == expected or (number is not None and _as_number(written) == number))


def _final(text: str) -> str:
    _, boxed, rest = text.rpartition("\\boxed{")
    depth = 1
    for place, letter in enumerate(rest if boxed else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:place]
    return (re.findall(r"answer\s*:\s*(.*)", text, flags=re.IGNORECASE) or [""])[-1]


def _as_number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


class RewardProcesses:
    """Scores groups with one reward function: a built-in's name or ``module:function``.

    A user's function gets ``reward_processes`` processes. Of the secrets in the environment they get only those that
    ``pass_secrets`` names. Raises `ValueError` if the function does not exist.
    """

    def __init__(self, name: str, config: RolloutFleetConfig) -> None:
        self._name = name
        self._config = config
        self._reward = REWARDS.get(name)
        self._free: asyncio.Queue[ChildProcess | None] = asyncio.Queue()  # None: start one
        self._processes: set[ChildProcess] = set()

    async def start(self) -> None:
        """Start the processes of a user's function. Raises `WorkerDiedError` or `DeadlineError` if one does not."""
        if self._name not in REWARDS.names():
            for process in await asyncio.gather(*(self._start_process() for _ in range(self._config.reward_processes))):
                self._free.put_nowait(process)

    async def score(self, prompt: Prompt, texts: Sequence[str], *, may_fail: bool = False) -> np.ndarray:
        """Score a prompt group; returns [G] float32, one reward per text.

        Raises `RewardError` if the function raises, hangs, ends its process, or returns anything but one finite number
        per text. If texts ``may_fail``, failed texts get NaN instead. A failed process is replaced; if the new process
        does not start, the call that needs it raises `RewardError`.
        """
        if self._name in REWARDS.names():
            answers = list(_answers_to(self._reward, prompt, texts, may_fail=may_fail))
        else:
            answers = await self._score_in_process(prompt, texts, may_fail=may_fail)
        failures = [self._failure(prompt, answer) for answer in answers if isinstance(answer, str)]
        if failures and not may_fail:
            raise failures[0]
        for failure in failures:
            logger.warning("one response is left out: %s", failure)
        return np.asarray([math.nan if isinstance(answer, str) else answer for answer in answers], dtype=np.float32)

    async def close(self) -> None:
        """Kill the scoring processes."""
        for process in list(self._processes):
            await self._kill(process)

    async def _score_in_process(self, prompt: Prompt, texts: Sequence[str], *, may_fail: bool) -> list[float | str]:
        """Score texts in a process, as `main` does. After a text that ends the process another process has the rest."""
        answers: list[float | str] = []
        while len(answers) < len(texts) and (may_fail or not answers):
            process = await self._free.get()
            back: ChildProcess | None = None
            try:
                process = process or await self._start_process()
                async with asyncio.timeout(self._config.reward_timeout_s):
                    await _ask(process, (prompt, list(texts[len(answers) :]), may_fail), answers)
                back = process
            except BaseException as error:
                if process is not None:
                    await self._kill(process)
                if isinstance(error, (WorkerDiedError, DeadlineError)):
                    what = f"could not be scored: {error}; you may fix it during the run"
                    raise self._failure(prompt, what) from None
                if isinstance(error, TimeoutError):
                    answers.append(
                        "did not score it within rollout_fleet.reward_timeout_s = "
                        f"{self._config.reward_timeout_s:g} s; make it faster or raise the option"
                    )
                elif isinstance(error, (asyncio.IncompleteReadError, ConnectionError)):
                    answers.append("ended its process; it must not exit or crash")
                else:
                    raise
                if not may_fail:
                    return answers[-1:]
            finally:
                self._free.put_nowait(back)
        return answers

    async def _start_process(self) -> ChildProcess:
        path = os.pathsep.join(path for path in sys.path if path)
        process = await ChildProcess.start(
            [sys.executable, "-m", "rollout_fleet.rewards", self._name, str(os.getpid())],
            {**child_environment(self._config), "PYTHONPATH": path},
            what=f"a scoring process of reward {self._name!r}",
            timeout_s=START_TIMEOUT_S,
        )
        self._processes.add(process)
        return process

    async def _kill(self, process: ChildProcess) -> None:
        self._processes.discard(process)
        await process.kill()

    def _failure(self, prompt: Prompt, what: str) -> RewardError:
        message = f"reward {self._name!r} on prompt group {prompt.group_id} {what}"
        return RewardError(with_remedy(message, self._config, who="reward processes"))


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of a prompt group.

    Attributes:
        total: [G] float32, the weighted sum.
        parts: [G] float32 per reward by its label; empty if there is one reward only.
    """

    total: np.ndarray
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    def of(self, chosen: np.ndarray) -> Scores:
        """Select samples by a [G] mask."""
        return Scores(total=self.total[chosen], parts={name: part[chosen] for name, part in self.parts.items()})


class WeightedRewards:
    """All configured rewards, each with its own processes, and their weighted sum.

    Raises `ValueError` if a function does not exist.
    """

    def __init__(self, config: RolloutFleetConfig) -> None:
        self._weights = list(config.reward_weights.values())
        self._labels = [reward_label(name) for name in config.reward_weights]
        self._rewards = [RewardProcesses(name, config) for name in config.reward_weights]

    async def start(self) -> None:
        """Start the scoring processes; raises as `RewardProcesses.start` does."""
        await asyncio.gather(*(reward.start() for reward in self._rewards))

    async def score(self, prompt: Prompt, texts: Sequence[str], *, may_fail: bool = False) -> Scores:
        """Score a prompt group by every reward; raises as `RewardProcesses.score` does.

        A text with NaN from one reward has NaN in the sum.
        """
        parts = await asyncio.gather(*(reward.score(prompt, texts, may_fail=may_fail) for reward in self._rewards))
        total = sum(weight * part for weight, part in zip(self._weights, parts, strict=True))
        named = dict(zip(self._labels, parts, strict=True)) if len(parts) > 1 else {}
        return Scores(total=np.asarray(total, dtype=np.float32), parts=named)

    async def close(self) -> None:
        """Kill the scoring processes."""
        await asyncio.gather(*(reward.close() for reward in self._rewards))


async def _ask(process: ChildProcess, question: tuple[Prompt, list[str], bool], answers: list[float | str]) -> None:
    """Let a process score texts. Each answer is appended as it arrives, so that the fatal text is known."""
    await process.send(question)
    _, texts, may_fail = question
    for _ in texts:
        answers.append(await process.receive())
        if isinstance(answers[-1], str) and not may_fail:
            return


def _answers_to(
    reward: Reward, prompt: Prompt, texts: Sequence[str], *, may_fail: bool = False
) -> Iterator[float | str]:
    """Yield one finite number or one description of a failure per text; ends at a failure unless texts ``may_fail``."""
    for text in texts:
        answer: float | str
        try:
            value: Any = reward(prompt, text)
            with suppress(TypeError, ValueError):  # a Python, numpy or torch scalar
                if not isinstance(value, (str, bytes)) and getattr(value, "ndim", 0) == 0:
                    value = float(value)
            is_number = type(value) is float and abs(value) <= _LARGEST
            answer = float(value) if is_number else f"returned {value!r}; it must return one finite number per response"
        except Exception as error:  # noqa: BLE001 - any error of a reward costs this group only
            answer = f"raised {error!r}; fix it, or filter such prompts"
        yield answer
        if isinstance(answer, str) and not may_fail:
            return


def main() -> None:
    """Score groups from standard input until it ends."""
    name, parent_pid = sys.argv[1:]
    questions, answers = open_pipes(int(parent_pid))
    reward = REWARDS.get(name)
    write_frame(answers, READY)
    while header := questions.read(LENGTH.size):
        prompt, texts, may_fail = pickle.loads(questions.read(*LENGTH.unpack(header)))
        for answer in _answers_to(reward, prompt, texts, may_fail=may_fail):
            write_frame(answers, answer)


if __name__ == "__main__":
    # Imported by its own name, so that a user's module registers rewards in the same registry.
    from rollout_fleet import rewards

    rewards.main()
