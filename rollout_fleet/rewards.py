"""Computes the rewards of rollouts, in the rollout worker or in scoring processes.

Users' reward functions, and built-in rewards that can hang, run in scoring processes (``python -m rollout_fleet.rewards
NAME PARENT_PID OPTIONS``). The rollouts of a prompt wait for a free process. The deadline to score them starts after
this wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import pickle
import sys
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.core.errors import DeadlineError, RewardError, WorkerDiedError
from asyncrl.core.types import Prompt

from .child_pipes import LENGTH, READY, open_pipes, write_frame
from .children import ChildProcess, child_environment, with_remedy
from .config import RolloutFleetConfig, reward_label
from .reward_functions import FUNCTIONS_IN_PROCESSES, exact_match
from .reward_judge import Judge
from .reward_protocol import REWARDS, Answer, BoundReward, Reward, Rollout, Score

__all__ = [
    "REWARDS",
    "Judge",
    "Reward",
    "RewardProcesses",
    "Rollout",
    "Score",
    "Scores",
    "WeightedRewards",
    "exact_match",
]

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0


class RewardProcesses:
    """Scores groups with one reward function: a built-in, or a user's ``module:function``.

    A user's function, or a built-in that can hang, gets ``reward_processes`` processes. The processes get only the
    secrets in ``pass_secrets``.

    Raises `ValueError` if the function does not exist, or its options do not fit.
    """

    def __init__(self, name: str, config: RolloutFleetConfig) -> None:
        self._name = name
        self._config = config
        self._options = config.options_of(name)
        is_builtin = name in REWARDS.names()
        self._needs_process = not is_builtin or name in FUNCTIONS_IN_PROCESSES
        self._reward = BoundReward(name, self._options, is_made=is_builtin)
        # Has the idle scoring processes. None replaces a failed process: a call that gets None starts a new process.
        self._free: asyncio.Queue[ChildProcess | None] = asyncio.Queue()
        self._processes: set[ChildProcess] = set()
        self._variables: Mapping[str, str] = {}

    async def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the scoring processes, if the reward function needs them, and wait until they are ready.

        ``variables`` are added to the environment variables of the processes. Raises `WorkerDiedError` if a process
        ends before it is ready, and `DeadlineError` if it is not ready in time.
        """
        self._variables = variables or {}
        if self._needs_process:
            for process in await asyncio.gather(*(self._start_process() for _ in range(self._config.reward_processes))):
                self._free.put_nowait(process)

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout], *, may_fail: bool = False) -> list[Answer]:
        """Score the rollouts of one prompt with the reward function. Returns one `Score` per rollout, in order.

        If ``may_fail`` is true, a rollout that cannot be scored gets a message with the cause instead of a score.
        Otherwise `RewardError` is raised. Possible causes: the function raises an error, hangs or returns a number that
        is not finite, or its process ends. A process that failed is replaced.

        Raises `RewardError` in any case if a scoring process does not start.
        """
        if self._needs_process:
            answers = await self._score_in_process(prompt, rollouts, may_fail=may_fail)
        else:
            answers = [one async for one in self._reward.answers(prompt, rollouts, may_fail=may_fail)]
        named = [self._failure(prompt, answer) if isinstance(answer, str) else answer for answer in answers]
        failures = [answer for answer in named if isinstance(answer, RewardError)]
        if failures and not may_fail:
            raise failures[0]
        for failure in failures:
            logger.warning("one response is left out: %s", failure)
        return [str(answer) if isinstance(answer, RewardError) else answer for answer in named]

    async def close(self) -> None:
        """Kill the scoring processes with all their child processes."""
        for process in list(self._processes):
            await self._kill(process)

    async def _score_in_process(self, prompt: Prompt, rollouts: Sequence[Rollout], *, may_fail: bool) -> list[Answer]:
        """Score rollouts in a process. With ``may_fail``, a new process scores the rollouts after one that failed."""
        answers: list[Answer] = []
        while len(answers) < len(rollouts) and (may_fail or not answers):
            process = await self._free.get()
            back: ChildProcess | None = None
            try:
                process = process or await self._start_process()
                async with asyncio.timeout(self._config.reward_timeout_s):
                    await _ask(process, (prompt, list(rollouts[len(answers) :]), may_fail), answers)
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
                        f"{self._config.reward_timeout_s:g} s; make the reward faster, or raise the option"
                    )
                elif isinstance(error, (asyncio.IncompleteReadError, ConnectionError)):
                    answers.append("ended its process; it must not exit or crash")
                else:
                    raise
                if not may_fail:
                    return answers[-1:]
                if self._reward.takes_group:
                    return answers[-1:] * len(rollouts)
            finally:
                self._free.put_nowait(back)
        return answers

    async def _start_process(self) -> ChildProcess:
        path = os.pathsep.join(path for path in sys.path if path)
        process = await ChildProcess.start(
            [sys.executable, "-m", "rollout_fleet.rewards", self._name, str(os.getpid()), json.dumps(self._options)],
            {**child_environment(self._config), **self._variables, "PYTHONPATH": path},
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
        total: [G] float32, for each rollout the weighted sum of its rewards, without ``turn_rewards``.
        parts: For each reward's label, its [G] float32 values, including the rewards of turns. Empty if the run has
            only one reward.
        turn_rewards: Additional rewards of single turns: for each of the G rollouts, a dict from a turn's index in the
            episode to the weighted sum of this turn's rewards. Empty if no turn has a reward.
        failures: For each of the G rollouts, why it has no score, or an empty text. Empty if all have a score.
    """

    total: np.ndarray
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    turn_rewards: Sequence[Mapping[int, float]] = ()
    failures: Sequence[str] = ()

    @property
    def sums(self) -> np.ndarray:
        """[G] float32, the whole reward of each rollout: its ``total`` plus the rewards of all its turns."""
        if not self.turn_rewards:
            return self.total
        return self.total + np.asarray([sum(turns.values()) for turns in self.turn_rewards], dtype=np.float32)

    def of(self, chosen: np.ndarray) -> Scores:
        """Return the scores of the rollouts that the [G] bool array ``chosen`` selects, in order."""
        places = list(map(int, np.flatnonzero(chosen)))
        return Scores(
            total=self.total[chosen],
            parts={name: part[chosen] for name, part in self.parts.items()},
            turn_rewards=[self.turn_rewards[place] for place in places] if self.turn_rewards else (),
            failures=[self.failures[place] for place in places] if self.failures else (),
        )


class WeightedRewards:
    """Scores rollouts with the weighted sum of all rewards in the options. The weights depend on the data source.

    Raises `ValueError` if a function does not exist, or its options do not fit.
    """

    def __init__(self, config: RolloutFleetConfig) -> None:
        config.check_reward_options()
        self._config = config
        self._rewards = {name: RewardProcesses(name, config) for name in config.reward_names}

    async def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the scoring processes of all rewards, and wait until they are ready.

        ``variables`` are added to the environment variables of the processes. Raises `WorkerDiedError` if a process
        ends before it is ready, and `DeadlineError` if it is not ready in time.
        """
        await asyncio.gather(*(reward.start(variables) for reward in self._rewards.values()))

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout | str], *, may_fail: bool = False) -> Scores:
        """Score the rollouts of one prompt with every reward of the prompt's data source, and sum the rewards.

        A string in ``rollouts`` is scored as a rollout with this text as its only answer. If ``may_fail`` is true, a
        rollout that a reward cannot score gets the total NaN. Otherwise `RewardError` is raised.
        """
        weights = self._config.weights_for(prompt.data_source)
        seen = [Rollout.answer(one) if isinstance(one, str) else one for one in rollouts]
        earned = await asyncio.gather(*(self._rewards[name].score(prompt, seen, may_fail=may_fail) for name in weights))
        total = np.zeros(len(seen), dtype=np.float64)
        parts: dict[str, np.ndarray] = {}
        turn_rewards: list[Counter[int]] = [Counter() for _ in seen]
        failures = [""] * len(seen)
        for (name, weight), answers in zip(weights.items(), earned, strict=True):
            values = np.full(len(seen), math.nan, dtype=np.float32)
            for place, answer in enumerate(answers):
                if isinstance(answer, str):
                    failures[place] = failures[place] or answer
                    total[place] = math.nan
                    continue
                values[place] = answer.sum
                total[place] += weight * answer.reward
                for turn, value in answer.turn_rewards.items():
                    turn_rewards[place][turn] += weight * value  # type: ignore[assignment]
            parts[reward_label(name)] = values
        return Scores(
            total=total.astype(np.float32),
            parts=parts if len(self._rewards) > 1 else {},
            turn_rewards=[dict(sums) for sums in turn_rewards] if any(turn_rewards) else (),
            failures=failures if any(failures) else (),
        )

    async def close(self) -> None:
        """Kill the scoring processes of all rewards."""
        await asyncio.gather(*(reward.close() for reward in self._rewards.values()))


async def _ask(process: ChildProcess, question: tuple[Prompt, list[Rollout], bool], answers: list[Answer]) -> None:
    """Let a process score rollouts, and append each answer to ``answers`` when it arrives.

    If the process fails, the length of ``answers`` is the index of the rollout that was being scored.
    """
    await process.send(question)
    _, rollouts, may_fail = question
    for _ in rollouts:
        answer = await process.receive()
        if isinstance(answer, str):
            answers.append(answer)
            if not may_fail:
                return
        else:
            reward, turns = answer
            answers.append(Score(reward=reward, turn_rewards={int(turn): value for turn, value in turns.items()}))


def main() -> None:
    """Run a scoring process: read groups of rollouts from standard input and write scores, until the input closes."""
    name, parent_pid, options = sys.argv[1:]
    questions, answers = open_pipes(int(parent_pid))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("rollout_fleet").setLevel(logging.INFO)
    reward = BoundReward(name, json.loads(options))

    async def answer(prompt: Prompt, rollouts: list[Rollout], may_fail: bool) -> None:
        async for one in reward.answers(prompt, rollouts, may_fail=may_fail):
            write_frame(answers, one if isinstance(one, str) else [one.reward, dict(one.turn_rewards)])

    with asyncio.Runner() as runner:
        run = runner.run if reward.is_async else _complete
        runner.run(reward.start())
        write_frame(answers, READY)
        while header := questions.read(LENGTH.size):
            run(answer(*pickle.loads(questions.read(*LENGTH.unpack(header)))))


def _complete(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never waits, without an event loop, because a user's function may start its own loop."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise RuntimeError("a reward function that is not async must not await anything")


if __name__ == "__main__":
    # Import this module by its name, so that a user's module and this process use the same registry of rewards.
    from rollout_fleet import rewards

    rewards.main()
