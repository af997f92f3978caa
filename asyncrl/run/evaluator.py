"""Evaluates a policy version: engines that serve this version sample answers to the held-out prompts.

Importing this module does not load Ray or torch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from asyncrl.config import RunConfig
from asyncrl.core.errors import AsyncRLError, WeightsGone
from asyncrl.core.remote import raised_in_worker
from asyncrl.core.types import AnsweredPrompt, Prompt
from asyncrl.metrics import Evaluation, evaluation_of

logger = logging.getLogger(__name__)

_CALLS_PER_ENGINE = 4
"""Each engine gets its prompts in about this many calls. So a slow engine can get fewer prompts than a fast engine."""


class AnsweringFleet(Protocol):
    """The interface of a fleet whose engines answer held-out prompts."""

    def engines(self) -> Sequence[str]:
        """Return the names of the fleet's engines."""
        ...

    async def answer(
        self, engine: str, prompts: Sequence[Prompt], *, version: int, num_samples: int
    ) -> list[AnsweredPrompt]:
        """Sample and score answers to prompts, on one engine that serves policy version ``version``.

        Returns one object per prompt. Prompts whose answers have tokens of other versions are left out. Raises
        `AsyncRLError` if the engine is lost or serves another version.
        """
        ...


PinnedEngines = Callable[[Collection[str]], Awaitable[set[str]]]
"""A function that takes the known set of pinned engines, waits until this set changes, and returns the new set.

A pinned engine stays on one policy version until the evaluation of this version ends.
"""


def num_pinned_engines(share: float, num_engines: int) -> int:
    """Return the number of engines for an evaluation during training: ``share`` * ``num_engines``, at least 1."""
    return max(1, math.floor(share * num_engines))


def slots_of_evaluation(config: RunConfig, num_engines: int) -> int:
    """Return how many samples of an evaluation may run at the same time on one engine.

    The result is at least the number of samples of one prompt. ``num_engines`` is the number of engines of the fleet.
    """
    slots = config.rollout_fleet.most_groups_in_flight * config.algorithm.samples_per_prompt
    num_pinned = num_pinned_engines(config.evaluation.share, num_engines)
    share = min(1.0, config.evaluation.share * num_engines / num_pinned)
    return max(config.evaluation.num_samples + 1, math.floor(share * slots))


class HeldOutEvaluator:
    """Evaluates versions on held-out prompts. If an engine is lost, other engines answer the engine's prompts."""

    def __init__(self, config: RunConfig, *, fleet: AnsweringFleet, prompts: Sequence[Prompt]) -> None:
        self._config = config
        self._fleet = fleet
        self._prompts = list(prompts)

    async def evaluate_all(self, version: int) -> Evaluation | None:
        """Evaluate ``version`` on all engines, which must serve this version and be idle.

        Returns None if no answer has a reward.
        """
        engines = set(self._fleet.engines())
        size = math.ceil(len(self._prompts) / (max(1, len(engines)) * _CALLS_PER_ENGINE))
        return await self._evaluate(version, _Deal(self._prompts, size=size, calls=_CALLS_PER_ENGINE), engines)

    async def evaluate_pinned(self, version: int, pinned: PinnedEngines) -> Evaluation | None:
        """Evaluate ``version`` during training, on engines that stay on this version (pinned engines).

        ``pinned`` is a function that takes a set of engines. It waits until the set of pinned engines differs from its
        argument, and returns the pinned engines. At most `slots_of_evaluation` samples run on an engine at the same
        time. Returns None if no answer has a reward, or if the weights of ``version`` no longer exist.
        """
        slots = slots_of_evaluation(self._config, len(self._fleet.engines()))
        per_call = max(1, slots // (_CALLS_PER_ENGINE * (self._config.evaluation.num_samples + 1)))
        calls = max(1, slots // (per_call * (self._config.evaluation.num_samples + 1)))
        try:
            engines = await pinned(())
        except WeightsGone as gone:  # the learner has restarted, so the buffer no longer offers this version
            logger.warning("evaluation of version %d: %s", version, gone)
            return None
        return await self._evaluate(version, _Deal(self._prompts, size=per_call, calls=calls), engines, pinned)

    async def _evaluate(
        self, version: int, deal: _Deal, engines: set[str], pinned: PinnedEngines | None = None
    ) -> Evaluation | None:
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(deal.follow(engines, pinned)) if pinned else None
            deal.join(engines)
            num_samples = self._config.evaluation.num_samples
            await deal.run(tasks, partial(self._fleet.answer, version=version, num_samples=num_samples))
            if watch is not None:
                watch.cancel()
        for engine, reason in deal.lost.items():
            logger.warning("evaluation of version %d: engine %s is left out: %s", version, engine, reason)
        return evaluation_of(
            deal.answers,
            policy_version=version,
            num_prompts=len(self._prompts),
            pass_reward=self._config.evaluation.pass_reward,
            incomplete=deal.lost if len(deal.answers) < len(self._prompts) else {},
            took_s=time.monotonic() - began_s,
        )


Answer = Callable[[str, Sequence[Prompt]], Awaitable[list[AnsweredPrompt]]]


class _Deal:
    """Distributes prompts to engines, ``size`` prompts per call and at most ``calls`` calls per engine at a time."""

    def __init__(self, prompts: Sequence[Prompt], *, size: int, calls: int) -> None:
        self.answers: list[AnsweredPrompt] = []
        self.lost: dict[str, str] = {}
        self._size = size
        self._calls = calls
        self._left = deque(prompts)
        self._num_running: dict[str, int] = {}
        self._changed = asyncio.Event()

    def join(self, engines: Collection[str]) -> None:
        """Add engines to the evaluation. Lost engines get no prompts."""
        for engine in sorted(engines):
            self._num_running.setdefault(engine, 0)
        self._changed.set()

    async def follow(self, engines: set[str], pinned: PinnedEngines) -> None:
        with suppress(WeightsGone):  # the buffer no longer offers the version, so no more engines can load it
            while True:
                engines = await pinned(engines)
                self.join(engines)

    async def run(self, tasks: asyncio.TaskGroup, answer: Answer) -> None:
        while True:
            self._changed.clear()
            running = self._num_running
            while self._left and (present := [name for name in running if name not in self.lost]):
                engine = min(present, key=running.__getitem__)
                if running[engine] >= self._calls:
                    break
                hand = [self._left.popleft() for _ in range(min(self._size, len(self._left)))]
                running[engine] += 1
                tasks.create_task(self._play(engine, hand, answer))
            if not any(running.values()):
                return
            await self._changed.wait()

    async def _play(self, engine: str, prompts: Sequence[Prompt], answer: Answer) -> None:
        answered: list[AnsweredPrompt] = []
        try:
            answered = await answer(engine, prompts)
            if len(answered) < len(prompts):
                self.lost[engine] = "the engine loaded another policy version during the evaluation"
        except AsyncRLError as error:
            self.lost[engine] = str(raised_in_worker(error))
        self.answers += answered
        known = {one.group_id for one in answered}
        self._left.extend(prompt for prompt in prompts if prompt.group_id not in known)
        self._num_running[engine] -= 1
        self._changed.set()
