"""Reward functions, built in or a user's own, and the processes that score finished prompt groups with the latter.

A group waits for a free process; its deadline starts when it has one. A process that hangs or dies is replaced. The
processes (``python -m rollout_fleet.rewards NAME PARENT_PID``) are plain children that speak over pipes, so that a
killed worker leaves no semaphores behind; they end when their pipe closes. Each leads a session of its own: what a
reward starts ends with its process, unless it makes a session for itself. They see no GPUs, which belong to the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import pickle
import re
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import numpy as np

from asyncrl.core.errors import DeadlineError, RewardError, WorkerDiedError
from asyncrl.core.registry import Registry
from asyncrl.core.stop_signals import outlive_stop
from asyncrl.core.types import Prompt
from asyncrl.core.visible_gpus import NO_GPUS

from .config import RolloutFleetConfig, reward_label
from .engines.process_guard import signal_at_parent_death, without_secrets

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_LARGEST = float(np.finfo(np.float32).max)


class Reward(Protocol):
    """Scores one response. Called in a scoring process; a built-in in the rollout worker itself."""

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
    """Scores groups with the configured reward function, which is a built-in's name or ``module:function``.

    A user's function gets ``num_processes``, each of which starts within ``start_timeout_s`` and scores a prompt group
    within ``timeout_s``. Of the secrets in the environment they get those that ``pass_secrets`` names.
    Raises `ValueError` if there is no such function.
    """

    def __init__(
        self,
        name: str,
        *,
        num_processes: int,
        timeout_s: float,
        start_timeout_s: float = 60.0,
        pass_secrets: Collection[str] = (),
    ) -> None:
        self._name = name
        self._num_processes = num_processes
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._pass_secrets = pass_secrets
        self._reward = REWARDS.get(name)
        self._free: asyncio.Queue[Process | None] = asyncio.Queue()  # None: one is to be started
        self._processes: dict[Process, asyncio.Task[None]] = {}  # each with what clears up after it

    async def start(self) -> None:
        """Start processes for a user's function; `WorkerDiedError` or `DeadlineError` if one does not come up."""
        if self._name not in REWARDS.names():
            for process in await asyncio.gather(*(self._start_process() for _ in range(self._num_processes))):
                self._free.put_nowait(process)

    async def score(self, prompt: Prompt, texts: Sequence[str], *, may_fail: bool = False) -> np.ndarray:
        """Score a prompt group; returns [G] float32, one reward per text.

        Raises `RewardError` if the function raises, hangs, ends its process, or returns anything but one finite number
        per text; where texts ``may_fail``, those that do have no number (NaN). Its process is replaced for what is
        left; where that fails, the call that needs it raises too.
        """
        if self._name in REWARDS.names():
            answers = _answers_to(self._reward, prompt, texts, may_fail=may_fail)
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
        """As `_answers_to`. A text at which the process hangs or ends is passed over in another."""
        answers: list[float | str] = []
        while len(answers) < len(texts) and (may_fail or not answers):
            process = await self._free.get()
            back: Process | None = None
            try:
                process = process or await self._start_process()
                async with asyncio.timeout(self._timeout_s):
                    await _ask(process, (prompt, list(texts[len(answers) :]), may_fail), answers)
                back = process
            except BaseException as error:
                if process is not None:
                    await self._kill(process)
                if isinstance(error, (WorkerDiedError, DeadlineError)):
                    what = f"could not be scored: {error}; mend it while the run goes on"
                    raise self._failure(prompt, what) from None
                if isinstance(error, TimeoutError):
                    answers.append(
                        f"did not score it within rollout_fleet.reward_timeout_s = {self._timeout_s:g} s; make it "
                        "faster or raise the option"
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

    async def _start_process(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollout_fleet.rewards",
            self._name,
            str(os.getpid()),
            stdin=PIPE,
            stdout=PIPE,
            env={
                **without_secrets(self._pass_secrets),
                **NO_GPUS,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            start_new_session=True,
        )
        self._processes[process] = asyncio.create_task(_end_group_after(process))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await _read(process)
        except TimeoutError:
            await self._kill(process)
            raise DeadlineError(
                f"a scoring process of reward {self._name!r} was not up within {self._start_timeout_s:g} s"
            ) from None
        except asyncio.IncompleteReadError:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 1.0)  # its pipe is closed: it is about to end
            await self._kill(process)
            raise WorkerDiedError(
                f"a scoring process of reward {self._name!r} ended with exit status {process.returncode} before it "
                "could score; its traceback is in the worker's log"
            ) from None
        return process

    async def _kill(self, process: Process) -> None:
        clearing_up = self._processes.pop(process, None)
        with suppress(ProcessLookupError):
            process.kill()
        if clearing_up is not None:
            await asyncio.shield(clearing_up)

    def _failure(self, prompt: Prompt, what: str) -> RewardError:
        withheld = sorted(os.environ.keys() - without_secrets(self._pass_secrets).keys())
        missed = next((name for name in withheld if name in what), None)
        remedy = f"; reward processes get {missed} with rollout_fleet.pass_secrets=[{missed}]" if missed else ""
        return RewardError(f"reward {self._name!r} on prompt group {prompt.group_id} {what}{remedy}")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the samples of a prompt group earned.

    Attributes:
        total: [G] float32, the weighted sum.
        parts: [G] float32 per reward by its label; empty where there is one reward only.
    """

    total: np.ndarray
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    def of(self, chosen: np.ndarray) -> Scores:
        """Those of some samples, by a [G] mask."""
        return Scores(total=self.total[chosen], parts={name: part[chosen] for name, part in self.parts.items()})


class WeightedRewards:
    """All rewards of a fleet's options, each in processes of its own, and their weighted sum.

    Raises `ValueError` if there is no such function.
    """

    def __init__(self, config: RolloutFleetConfig) -> None:
        self._weights = list(config.reward_weights.values())
        self._labels = [reward_label(name) for name in config.reward_weights]
        self._rewards = [
            RewardProcesses(
                name,
                num_processes=config.reward_processes,
                timeout_s=config.reward_timeout_s,
                pass_secrets=config.pass_secrets,
            )
            for name in config.reward_weights
        ]

    async def start(self) -> None:
        """Start the scoring processes; raises as `RewardProcesses.start` does."""
        await asyncio.gather(*(reward.start() for reward in self._rewards))

    async def score(self, prompt: Prompt, texts: Sequence[str], *, may_fail: bool = False) -> Scores:
        """Score a prompt group by every reward; raises as `RewardProcesses.score` does.

        A text for which one of them has no number has none in all.
        """
        parts = await asyncio.gather(*(reward.score(prompt, texts, may_fail=may_fail) for reward in self._rewards))
        total = sum(weight * part for weight, part in zip(self._weights, parts, strict=True))
        named = dict(zip(self._labels, parts, strict=True)) if len(parts) > 1 else {}
        return Scores(total=np.asarray(total, dtype=np.float32), parts=named)

    async def close(self) -> None:
        """Kill the scoring processes."""
        await asyncio.gather(*(reward.close() for reward in self._rewards))


async def _end_group_after(process: Process) -> None:
    """Kill what a process has started as soon as it has ended: later its id may be another's."""
    await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _ask(process: Process, question: tuple[Prompt, list[str], bool], answers: list[float | str]) -> None:
    """Have a process score texts; adds each answer as it comes, so that one is known at which the process ends."""
    assert process.stdin is not None
    frame = pickle.dumps(question)
    process.stdin.write(_LENGTH.pack(len(frame)) + frame)
    await process.stdin.drain()
    _, texts, may_fail = question
    for _ in texts:
        answers.append(await _read(process))
        if isinstance(answers[-1], str) and not may_fail:
            return


async def _read(process: Process) -> Any:
    assert process.stdout is not None
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return json.loads(await process.stdout.readexactly(length))


def _answers_to(reward: Reward, prompt: Prompt, texts: Sequence[str], *, may_fail: bool) -> list[float | str]:
    """One finite number per text, or what went wrong and what to do; up to the first of these unless others may."""
    answers: list[float | str] = []
    for text in texts:
        answers.append(_answer_to(reward, prompt, text))
        if isinstance(answers[-1], str) and not may_fail:
            break
    return answers


def _answer_to(reward: Reward, prompt: Prompt, text: str) -> float | str:
    try:
        number = _to_number(reward(prompt, text))
    except Exception as error:  # noqa: BLE001 - whatever a reward raises costs this group only
        return f"raised {error!r}; fix it, or filter such prompts"
    if isinstance(number, str) or not abs(number) <= _LARGEST:
        return f"returned {number}; it must return one finite number per response"
    return number


def _to_number(value: Any) -> float | str:
    """Convert a Python, numpy or torch scalar; anything else becomes its description."""
    if isinstance(value, (str, bytes)) or getattr(value, "ndim", 0) != 0:
        return repr(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return repr(value)


def main() -> None:
    """Score groups from standard input until it ends."""
    signal_at_parent_death(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outlive_stop()
    name, parent_pid = sys.argv[1:]
    if os.getppid() != int(parent_pid):
        return
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # what the function, or a program that it starts, reads is empty
    os.dup2(2, 1)  # what the function prints goes to the log
    for pipe in (questions.raw, answers.raw):  # with one of a forked child's, the worker would not see this process end
        os.register_at_fork(after_in_child=pipe.close)
    reward = REWARDS.get(name)
    _write(answers, "ready")
    while header := questions.read(_LENGTH.size):
        prompt, texts, may_fail = pickle.loads(questions.read(*_LENGTH.unpack(header)))
        for text in texts:
            answer = _answer_to(reward, prompt, text)
            _write(answers, answer)
            if isinstance(answer, str) and not may_fail:
                break


def _write(stream: BinaryIO, answer: Any) -> None:
    frame = json.dumps(answer).encode()
    stream.write(_LENGTH.pack(len(frame)) + frame)
    stream.flush()


if __name__ == "__main__":
    # By its own name: what a user's module registers is to be found in the registry that it imports.
    from rollout_fleet import rewards

    rewards.main()
