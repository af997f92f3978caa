"""Settles a prompt group that has left the engine: it is scored and stored, saved, released or dropped.

    finished ──▶ score ──▶ put              refused: its lease has expired, or its oldest token is too old
       │           │
       │           └─ the reward fails ─┐
    cut off ──▶ save ──▶ release        ├──▶ released; dropped after ``max_attempts`` failures
       └─ aborted, or its engine fails ─┘

With ``on_reward_failure=drop_trajectory`` a response on which the reward fails is left out of its group and counted
(``reward_trajectory``); its tokens are dropped (``reward``). Then the group's mean, and so each advantage, is that of
the other responses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from asyncrl.core import record
from asyncrl.core.errors import AsyncRLError, EngineError, LeaseExpired, RewardError, StoreFull, VersionTooOld
from asyncrl.core.ports import RolloutBuffer
from asyncrl.core.record import GroupEvent, SpanKind

from .config import OnRewardFailure, RolloutFleetConfig, SaveProgress
from .engines.engine import SampleOutput
from .engines.model_files import Decode
from .inflight import GroupEnd, InflightGroup, to_progress, to_trajectory_group
from .metrics import FleetMeter
from .rewards import Scores, WeightedRewards
from .sample_log import SampleLog

logger = logging.getLogger(__name__)

FEWEST_SAMPLES = 2
"""Responses that a group needs after failed rewards: an advantage compares responses."""


class Settlement:
    """Settles the groups of one rollout worker with its buffer.

    ``decode`` turns response tokens into the text that rewards read; ``samples`` keeps some scored samples for reading;
    ``stamp`` records an event of a group in the run's profile.
    """

    def __init__(
        self,
        config: RolloutFleetConfig,
        *,
        buffer: RolloutBuffer,
        rewards: WeightedRewards,
        decode: Decode,
        meter: FleetMeter,
        stamp: Callable[[GroupEvent, InflightGroup], None],
        samples: SampleLog | None = None,
    ) -> None:
        self._config = config
        self._buffer = buffer
        self._rewards = rewards
        self._decode = decode
        self._meter = meter
        self._stamp = stamp
        self._samples = samples
        self._num_failures_in_a_row = 0

    async def settle(self, group: InflightGroup, *, engine_failure: Exception | None = None) -> None:
        """Score and store a finished group, or release an unfinished one.

        Raises the failure of this attempt if it is the ``max_failures_in_a_row``-th in a row, and the buffer's errors
        except for an expired lease.
        """
        if group.end is GroupEnd.revoked:
            await self.release(group, group.end)
        elif not group.is_finished:
            await self._settle_unfinished(group, engine_failure)
        else:
            try:
                samples, scores = await self._score(group)
            except RewardError as error:
                await self._fail_attempt(group, "reward", error)
            else:
                await self._store(group, samples, scores)

    async def save(self, group: InflightGroup) -> None:
        """Save the tokens of an unfinished group. If the buffer has no room for them, the group continues unsaved."""
        if group.num_tokens == 0:
            return
        try:
            await self._buffer.save_progress(group.lease, to_progress(group.lease, group.trained_samples))
        except (LeaseExpired, StoreFull, VersionTooOld) as error:
            logger.warning("prompt group %d was not saved: %s", group.lease.prompt.group_id, error)

    async def give_back(self, groups: Sequence[InflightGroup]) -> None:
        """Save and release all groups of an ended loop, finished ones too, within ``stop_timeout_s``.

        A revoked group is released only. A lease that the buffer does not take back in time expires; its tokens stay
        in flight in the counters, and the run lets the buffer account for them (`ControlBuffer.bury`).
        """
        if self._config.save_progress is not SaveProgress.never:
            await self._for_each([group for group in groups if group.end is not GroupEnd.revoked], self.save)
        await self._for_each(groups, lambda group: self.release(group, GroupEnd.stopped))

    async def _for_each(
        self, groups: Sequence[InflightGroup], work: Callable[[InflightGroup], Coroutine[Any, Any, Any]]
    ) -> None:
        """Do ``work`` for all groups at once, within half of ``stop_timeout_s``; failures are logged."""
        tasks = {group.key: asyncio.create_task(work(group)) for group in groups}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=self._config.stop_timeout_s / 2)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        for key, task in tasks.items():
            failure = TimeoutError() if task.cancelled() else task.exception()
            if failure is not None:
                logger.warning("prompt group %d, attempt %d, could not be given back: %r", *key, failure)

    async def release(self, group: InflightGroup, reason: str, *, max_failures: int = 0) -> bool:
        """Release a group unfinished; returns as `RolloutBuffer.release`."""
        is_dropped = await self._buffer.release(
            group.lease, num_tokens=group.num_tokens, reason=str(reason), max_failures=max_failures
        )
        self._meter.released(group.num_own_tokens)
        return is_dropped

    async def _settle_unfinished(self, group: InflightGroup, engine_failure: Exception | None) -> None:
        if self._config.save_progress is not SaveProgress.never:
            await self.save(group)
        if group.end is GroupEnd.engine_failed:
            self._meter.failed(group.end)
            await self._try_again(group, group.end, engine_failure)
        elif group.end is not None:
            await self.release(group, group.end)
        else:
            await self._fail_attempt(group, "aborted", EngineError(f"the engine aborted prompt group {group.key}"))

    async def _score(self, group: InflightGroup) -> tuple[Sequence[SampleOutput], Scores]:
        """Return the samples with a reward, and their scores. Raises `RewardError` if too few have one."""
        started = time.perf_counter()
        prompt, samples = group.lease.prompt, group.samples
        texts = [self._decode(sample.token_ids.tolist()) for sample in samples]
        may_fail = self._config.on_reward_failure is OnRewardFailure.drop_trajectory
        fewest = FEWEST_SAMPLES if may_fail else len(samples)
        with record.span(SpanKind.reward, lane="/reward", group=prompt.group_id):
            scores = await self._rewards.score(prompt, texts, may_fail=may_fail)
        self._stamp(GroupEvent.reward, group)
        self._meter.scored(time.perf_counter() - started)
        has_reward = np.isfinite(scores.total)
        num_failed = len(samples) - int(has_reward.sum())
        if num_failed:
            if len(samples) - num_failed < fewest:
                raise RewardError(
                    f"the reward failed on {num_failed} of {len(samples)} responses to prompt group {prompt.group_id}, "
                    f"and a group needs {fewest}; the warnings before this message have the errors"
                )
            self._meter.failed("reward_trajectory", num_failed)
            samples = [sample for sample, has in zip(samples, has_reward, strict=True) if has]
            texts = [text for text, has in zip(texts, has_reward, strict=True) if has]
            scores = scores.of(has_reward)
        if self._samples is not None:
            await self._samples.add(prompt, samples, texts, scores)
        return samples, scores

    async def _store(self, group: InflightGroup, samples: Sequence[SampleOutput], scores: Scores) -> None:
        self._num_failures_in_a_row = 0
        stored = to_trajectory_group(
            group.lease, samples, scores.total, parts=scores.parts, num_baselines=group.num_baselines
        )
        try:
            await self._buffer.put(stored, num_left_out=group.num_tokens - stored.summary.num_tokens)
        except (LeaseExpired, VersionTooOld) as error:
            logger.warning("prompt group %d was refused: %s", group.lease.prompt.group_id, error)
            self._meter.refused(group.num_own_tokens)
        else:
            self._meter.stored(group.num_own_tokens)

    async def _fail_attempt(self, group: InflightGroup, reason: str, error: AsyncRLError) -> None:
        """Release a group after a failure of its own. Raises ``error`` after too many failures in a row."""
        self._meter.failed(reason)
        self._num_failures_in_a_row += 1
        if self._num_failures_in_a_row >= self._config.max_failures_in_a_row:
            raise type(error)(
                f"{error} (failure {self._num_failures_in_a_row} in a row, the limit of "
                "rollout_fleet.max_failures_in_a_row)"
            )
        await self._try_again(group, reason, error)

    async def _try_again(self, group: InflightGroup, reason: str, error: Exception | None) -> None:
        """Release a group as failed; the buffer drops it after ``max_attempts`` failures."""
        is_dropped = await self.release(group, reason, max_failures=self._config.max_attempts)
        what = "dropped" if is_dropped else "queued again"
        logger.warning("attempt %d at group %d failed; the group is %s: %s", group.key[1], group.key[0], what, error)
