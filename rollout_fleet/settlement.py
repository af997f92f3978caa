"""Scores and stores finished prompt groups of a rollout worker. Saves and gives back unfinished groups."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from asyncrl.core import receipts, record
from asyncrl.core.errors import AsyncRLError, EngineError, LeaseExpired, RewardError, StoreFull, VersionTooOld
from asyncrl.core.ports import RolloutBuffer
from asyncrl.core.record import GroupEvent, SpanKind
from asyncrl.core.trajectory import TrajectoryGroup

from .answering import AnsweringParts
from .config import OnRewardFailure, RolloutFleetConfig, SaveProgress
from .episodes.config import OnFailure
from .episodes.environment import EpisodeFailure, FailureKind
from .inflight import GroupEnd, InflightGroup
from .metrics import FleetMeter

logger = logging.getLogger(__name__)

FEWEST_SAMPLES = 2
"""The learner can train only on groups with at least this number of scored responses, unless all have one response.

The reason is that an advantage compares the responses of a group.
"""


class Settlement:
    """Stores the finished groups of one rollout worker in the buffer, and gives its unfinished groups back.

        finished ────▶ score ──▶ put             if the reward succeeds
                         └────▶ failed           if the reward or an environment fails
        unfinished ──▶ save ──▶ release          if this worker stops, or another worker takes the group over
                         └────▶ failed           if the engine fails, or aborts the group unasked
        revoked ─────▶ release                   if the buffer has revoked the lease
        failed ──────▶ release                   always

    At ``put``, the buffer refuses a group with an expired lease or with a token that is too old. At a ``release`` of a
    failed group, the buffer drops the group if it has failed ``max_attempts`` times.

    With ``on_reward_failure=drop_trajectory``, a response with a failed reward is dropped from its group and counted as
    ``reward_trajectory``. ``stamp`` records an event of a group. ``engine`` is the engine's name in the
    run's receipts (log lines that ``asyncrl audit`` compares).
    """

    def __init__(
        self,
        config: RolloutFleetConfig,
        parts: AnsweringParts,
        *,
        buffer: RolloutBuffer,
        meter: FleetMeter,
        stamp: Callable[[GroupEvent, InflightGroup], None],
        engine: str = "",
    ) -> None:
        self._config = config
        self._parts = parts
        self._buffer = buffer
        self._meter = meter
        self._stamp = stamp
        self._engine = engine
        self._num_failures_in_a_row = 0

    async def settle(self, group: InflightGroup, *, engine_failure: Exception | None = None) -> None:
        """Score and store a finished group, or save and release an unfinished group for another worker.

        ``engine_failure`` is the failure of the engine, or None if the engine has not failed. A group whose reward or
        environment fails is released. After ``max_failures_in_a_row`` failures in a row, the latest error is raised.
        """
        if group.end is GroupEnd.revoked:
            await self.release(group, group.end)
        elif not group.is_finished:
            await self._settle_unfinished(group, engine_failure)
        else:
            try:
                stored = await self._score(group, self._survivors(group))
            except RewardError as error:
                await self._fail_attempt(group, "reward", error)
            except EpisodeFailure as failure:
                if self._config.save_progress is not SaveProgress.never:
                    await self.save(group)
                await self._fail_attempt(group, f"episode_{failure.kind}", failure)
            else:
                await self._store(group, stored)

    async def save(self, group: InflightGroup) -> None:
        """Save the tokens of an unfinished group in the replay buffer, so that a worker can continue the group.

        If the buffer refuses the tokens, a warning is logged. Nothing is saved if an earlier attempt saved more tokens.
        This happens if an episode differs from its recorded turns. A save would then count the missing tokens as
        dropped, and `release` would count them again (``num_tokens``).
        """
        progress = group.progress()
        if progress is None or progress.summary.num_tokens < group.num_inherited:
            return
        self._note(group, progress)
        try:
            await self._buffer.save_progress(group.lease, progress)
        except (LeaseExpired, StoreFull, VersionTooOld) as error:
            logger.warning("prompt group %d was not saved: %s", group.lease.prompt.group_id, error)

    async def give_back(self, groups: Sequence[InflightGroup]) -> None:
        """Save and release all groups that an ending worker still has, within ``stop_timeout_s``.

        Finished groups are included. Groups with revoked leases are released without being saved. A group that is not
        released in time returns to the buffer when its lease expires.
        """
        if self._config.save_progress is not SaveProgress.never:
            await self._for_each([group for group in groups if group.end is not GroupEnd.revoked], self.save)
        await self._for_each(groups, lambda group: self.release(group, GroupEnd.stopped))

    async def _for_each(
        self, groups: Sequence[InflightGroup], work: Callable[[InflightGroup], Coroutine[Any, Any, Any]]
    ) -> None:
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
        """Give an unfinished group back to the replay buffer, which queues its prompt again.

        ``reason`` says why the group is given back. If ``max_failures`` is not 0, the attempt counts as failed, and the
        buffer drops the group after that many failures. Returns whether the buffer has dropped the group.
        """
        is_dropped = await self._buffer.release(
            group.lease, num_tokens=group.num_tokens, reason=str(reason), max_failures=max_failures
        )
        self._meter.add(tokens_in_flight=-group.num_own_tokens, groups_released=1)
        return is_dropped

    async def _settle_unfinished(self, group: InflightGroup, engine_failure: Exception | None) -> None:
        if self._config.save_progress is not SaveProgress.never:
            await self.save(group)
        if group.end is GroupEnd.engine_failed:
            self._meter.add(groups_failed=Counter([str(group.end)]))
            await self._try_again(group, group.end, engine_failure or EngineError("its engine has failed"))
        elif group.end is not None:
            await self.release(group, group.end)
        else:
            await self._fail_attempt(group, "aborted", EngineError(f"the engine aborted prompt group {group.key}"))

    def _survivors(self, group: InflightGroup) -> list[int]:
        """Return the indices of the episodes to score. Raises an `EpisodeFailure` if the attempt must fail."""
        on_failure, survivors, last = self._config.environment.on_failure, [], None
        for index, run in enumerate(group.runs):
            if run.failure is None and group.episodes[index].answer is None:
                run.failure = EpisodeFailure(
                    FailureKind.environment,
                    f"the environment of episode {run.episode.name} ended without a turn of the policy; ask for one",
                )
            if run.failure is None:
                survivors.append(index)
                continue
            last, action = run.failure, OnFailure(getattr(on_failure, run.failure.kind))
            if action is OnFailure.retry:
                raise last
            self._meter.add(groups_failed=Counter([f"episode_{last.kind}_{action}"]))
            logger.warning("%s (on_failure.%s=%s)", last, last.kind, action)
            if action is OnFailure.score and group.episodes[index].answer is not None:
                survivors.append(index)
        # A group needs its greedy baseline, because the rewards of the other episodes are compared with its reward.
        needed = {*range(len(group.trained), len(group.episodes))}
        fewest = min(FEWEST_SAMPLES, len(group.runs))
        if last is not None and (len(survivors) < fewest or not needed.issubset(survivors)):
            raise last
        return survivors if group.runs else [*range(len(group.episodes))]

    async def _score(self, group: InflightGroup, chosen: Sequence[int]) -> TrajectoryGroup:
        started = time.perf_counter()
        prompt = group.lease.prompt
        rollouts = [group.rollout(index, self._parts.decode) for index in chosen]
        may_fail = self._config.on_reward_failure is OnRewardFailure.drop_trajectory
        fewest = FEWEST_SAMPLES if may_fail else len(rollouts)
        with record.span(SpanKind.reward, lane="/reward", group=prompt.group_id):
            scores = await self._parts.rewards.score(prompt, rollouts, may_fail=may_fail)
        self._stamp(GroupEvent.reward, group)
        self._meter.add(reward_s=time.perf_counter() - started)
        has_reward = np.isfinite(scores.total)
        places = np.flatnonzero(has_reward).tolist()
        num_failed = len(rollouts) - len(places)
        if num_failed:
            if len(places) < fewest:
                raise RewardError(
                    f"the reward failed on {num_failed} of {len(rollouts)} responses to prompt group "
                    f"{prompt.group_id}, but must succeed on at least {fewest}; earlier warnings have the errors"
                )
            self._meter.add(groups_failed=Counter(reward_trajectory=num_failed))
            scores = scores.of(has_reward)
        kept = [chosen[place] for place in places]
        if self._parts.samples is not None:
            texts = [rollouts[place].text for place in places]
            runs = [group.runs[index] for index in kept] if group.runs else []
            await self._parts.samples.add(prompt, [group.written(index) for index in kept], texts, scores, runs=runs)
        return group.scored(scores, kept)

    async def _store(self, group: InflightGroup, stored: TrajectoryGroup) -> None:
        self._num_failures_in_a_row = 0
        self._note(group, stored)
        try:
            num_left_out = group.num_tokens - stored.summary.num_tokens
            source = group.lease.prompt.data_source
            await self._buffer.put(stored, num_left_out=num_left_out, data_source=source)
        except (LeaseExpired, VersionTooOld) as error:
            logger.warning("prompt group %d was refused: %s", group.lease.prompt.group_id, error)
            self._meter.add(tokens_in_flight=-group.num_own_tokens, groups_refused=1)
        else:
            self._meter.add(tokens_in_flight=-group.num_own_tokens, groups_finished=1)

    def _note(self, group: InflightGroup, tokens: TrajectoryGroup) -> None:
        """Record in the run's receipts (log lines for ``asyncrl audit``) which policy versions sampled ``tokens``.

        Call this before the buffer gets the tokens.
        """
        (group_id, attempt), sampled = group.key, receipts.counts_of(tokens.policy_versions)
        receipts.note(
            receipts.Act.sampled,
            engine=self._engine,
            group=group_id,
            attempt=attempt,
            versions=sampled,
            inherited=group.inherited,
        )

    async def _fail_attempt(self, group: InflightGroup, reason: str, error: AsyncRLError) -> None:
        """Release a group, and count the attempt as failed. Raises ``error`` after too many consecutive failures."""
        self._meter.add(groups_failed=Counter([reason]))
        self._num_failures_in_a_row += 1
        if self._num_failures_in_a_row >= self._config.max_failures_in_a_row:
            message = (
                f"{error} (failure {self._num_failures_in_a_row} in a row, the limit of "
                "rollout_fleet.max_failures_in_a_row)"
            )
            raise EpisodeFailure(error.kind, message) if isinstance(error, EpisodeFailure) else type(error)(message)
        await self._try_again(group, reason, error)

    async def _try_again(self, group: InflightGroup, reason: str, error: Exception) -> None:
        is_dropped = await self.release(group, reason, max_failures=self._config.max_attempts)
        what = "dropped" if is_dropped else "queued again"
        logger.warning("attempt %d at group %d failed; the group is %s: %s", group.key[1], group.key[0], what, error)
