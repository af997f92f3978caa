"""Scores finished prompt groups: built-ins in place, users' functions in processes that can be killed when they hang.

A group waits for a free process; its deadline runs from when it has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from asyncrl.protocol.errors import RewardError
from asyncrl.protocol.types import Prompt
from rollout_fleet.engines.guard import signal_at_parent_death

from .registry import BUILT_IN_REWARDS, find_reward


@dataclass(frozen=True, kw_only=True)
class _Process:
    """One scoring process."""

    executor: ProcessPoolExecutor
    pid: int


class RewardScorer:
    """Scores groups with the reward function of the config."""

    def __init__(self, name: str, *, num_processes: int, timeout_s: float) -> None:
        """Find the reward function.

        Args:
            name: A built-in's name or ``module:function``.
            num_processes: Processes for a user's function.
            timeout_s: Deadline of one prompt group.

        Raises:
            ValueError: there is no such function.
        """
        self._name = name
        self._num_processes = num_processes
        self._timeout_s = timeout_s
        self._reward = find_reward(name)
        self._free: asyncio.Queue[_Process] = asyncio.Queue()
        self._pids: set[int] = set()

    async def start(self) -> None:
        """Start the scoring processes, if the function needs them."""
        if self._name in BUILT_IN_REWARDS:
            return
        for _ in range(self._num_processes):
            await self._add_process()

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> np.ndarray:
        """Score a prompt group.

        Returns:
            [G] float32, one reward for each text.

        Raises:
            RewardError: the function raised, hung, or returned no finite number.
        """
        if self._name in BUILT_IN_REWARDS:
            rewards = _score_group(self._name, prompt, texts)
        else:
            rewards = await self._score_in_process(prompt, texts)
        wrong = [reward for reward in rewards if not isinstance(reward, (int, float)) or not math.isfinite(reward)]
        if wrong:
            raise self._failure(prompt, f"returned {wrong[0]!r}", "it must return a finite float")
        return np.asarray(rewards, dtype=np.float32)

    async def close(self) -> None:
        """Kill the scoring processes."""
        for pid in self._pids:
            _kill(pid)
        while not self._free.empty():
            self._free.get_nowait().executor.shutdown(wait=False, cancel_futures=True)
        self._pids.clear()

    async def _score_in_process(self, prompt: Prompt, texts: Sequence[str]) -> list[float]:
        process = await self._free.get()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                rewards = await loop.run_in_executor(process.executor, _score_group, self._name, prompt, list(texts))
        except TimeoutError:
            self._discard(process)
            raise self._failure(
                prompt,
                f"did not score it within {self._timeout_s} s",
                "make it faster or raise rollout_fleet.reward_timeout_s",
            ) from None
        except BrokenProcessPool as error:
            self._discard(process)
            raise self._failure(prompt, "ended its process", "it must not exit or crash") from error
        except Exception as error:
            self._free.put_nowait(process)
            raise self._failure(prompt, f"raised {error!r}", "mend it, or filter such prompts") from error
        self._free.put_nowait(process)
        return rewards

    async def _add_process(self) -> None:
        executor = ProcessPoolExecutor(
            max_workers=1, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare_process
        )
        pid = await asyncio.get_running_loop().run_in_executor(executor, os.getpid)
        self._pids.add(pid)
        self._free.put_nowait(_Process(executor=executor, pid=pid))

    def _discard(self, process: _Process) -> None:
        _kill(process.pid)
        self._pids.discard(process.pid)
        process.executor.shutdown(wait=False, cancel_futures=True)

    def _failure(self, prompt: Prompt, what: str, remedy: str) -> RewardError:
        return RewardError(f"reward {self._name!r} on prompt group {prompt.group_id} {what}; {remedy}")


def _prepare_process() -> None:
    signal_at_parent_death(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _score_group(name: str, prompt: Prompt, texts: Sequence[str]) -> list[float]:
    reward = find_reward(name)
    return [reward(prompt, text) for text in texts]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
