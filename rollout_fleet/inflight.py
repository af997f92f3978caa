"""The prompt groups of one rollout worker: their samples and phases, how many the engine may hold, their settlement."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import Any

import numpy as np

from asyncrl.core import record
from asyncrl.core.errors import (
    AsyncRLError,
    EngineError,
    LeaseExpired,
    ReplayBufferError,
    RewardError,
    StoreFull,
    VersionTooOld,
)
from asyncrl.core.ports import RolloutBuffer
from asyncrl.core.record import GroupEvent, LevelName, SpanKind
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason, Lease

from .config import OnRewardFailure, RolloutFleetConfig, SamplingConfig, SaveProgress
from .engines.engine import NOTHING, EngineLoad, SampleOutput, SampleRequest
from .metrics import FleetMeter
from .rewards import Scores, WeightedRewards
from .sample_log import Decode, SampleLog

logger = logging.getLogger(__name__)

FEWEST_SAMPLES = 2
"""Responses that a group needs after failed rewards: an advantage compares responses."""
FULL_CACHE = 0.9
"""KV cache use from which the limit shrinks."""
ROOMY_CACHE = 0.75
"""KV cache use below which the limit grows."""
DECREASE = 0.75
READINGS_TO_SHRINK = 2
"""Consecutive full readings before the limit shrinks: new samples always wait for a moment."""


class GroupPhase(Enum):
    """The phase of a prompt group.

    ::

        generating ──▶ settling                            the last sample has arrived: score and store the group
        generating ──▶ cutting ──▶ parked ──▶ generating   aborted for a weight update, continued after it
        generating, cutting ──▶ ending ──▶ settling        revoked or stopped: abort the samples, release the lease
        generating, cutting ──▶ settling                   the engine has failed: save the tokens, release the lease
    """

    generating = auto()
    cutting = auto()
    parked = auto()
    ending = auto()
    settling = auto()


class GroupEnd(StrEnum):
    """Why a group is released unfinished; the buffer counts these reasons."""

    revoked = "revoked"
    handed_on = "handed_on"
    stopped = "stopped"
    engine_failed = "engine_failed"


ON_ENGINE = (GroupPhase.generating, GroupPhase.cutting, GroupPhase.ending)
"""Phases in which the engine has requests of the group."""


@dataclass(eq=False, kw_only=True)
class InflightGroup:
    """One leased prompt group.

    Attributes:
        lease: The lease.
        samples: [G] the tokens of each sample so far, then those of the greedy baseline.
        num_baselines: 1 with a greedy baseline (ReMax, arXiv 2310.10505), else 0. A baseline is scored but not trained
            on, and its tokens are not accounted for.
        num_inherited: Tokens that an earlier attempt wrote.
        phase: Where the group is.
        end: Why the group is released unfinished; None otherwise.
    """

    lease: Lease
    samples: list[SampleOutput]
    num_baselines: int = 0
    num_inherited: int = 0
    phase: GroupPhase = GroupPhase.generating
    end: GroupEnd | None = None
    _outstanding: dict[str, int] = field(default_factory=dict)
    _num_rounds: int = 0

    @classmethod
    def begin(
        cls, lease: Lease, *, num_samples: int, prefixes: Sequence[SampleOutput] = (), greedy_baseline: bool = False
    ) -> InflightGroup:
        """Begin a group, or continue it from its saved ``prefixes`` (empty, or one per sample)."""
        num_baselines = int(greedy_baseline)
        return cls(
            lease=lease,
            samples=[*(prefixes or [NOTHING] * num_samples), *[NOTHING] * num_baselines],
            num_baselines=num_baselines,
            num_inherited=sum(len(prefix.token_ids) for prefix in prefixes),
        )

    @property
    def key(self) -> tuple[int, int]:
        """Group id and attempt."""
        return self.lease.prompt.group_id, self.lease.attempt

    @property
    def trained_samples(self) -> list[SampleOutput]:
        """All samples except the baseline."""
        return self.samples[: len(self.samples) - self.num_baselines]

    @property
    def num_tokens(self) -> int:
        """Tokens to be accounted for, including inherited ones."""
        return sum(len(sample.token_ids) for sample in self.trained_samples)

    @property
    def num_own_tokens(self) -> int:
        """Tokens that this worker's engine wrote."""
        return self.num_tokens - self.num_inherited

    @property
    def is_finished(self) -> bool:
        """Whether every sample is complete."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def outstanding(self) -> list[str]:
        """Ids of the requests that the engine has not answered."""
        return list(self._outstanding)

    @property
    def outstanding_policy(self) -> list[str]:
        """Ids of the unanswered requests whose tokens are accounted for: all except the baseline's."""
        num_trained = len(self.samples) - self.num_baselines
        return [request_id for request_id, index in self._outstanding.items() if index < num_trained]

    def next_requests(
        self, sampling: SamplingConfig, *, on_first_token: Callable[[], None] | None = None
    ) -> list[SampleRequest]:
        """Make one request per unfinished sample; `take` gets the answers. ``sampling`` bounds whole responses."""
        requests = []
        for index, sample in enumerate(self.samples):
            num_left = sampling.max_new_tokens - len(sample.token_ids)
            if sample.finish_reason is None and num_left < 1:
                self.samples[index] = replace(sample, finish_reason=FinishReason.length)
            if self.samples[index].finish_reason is not None:
                continue
            options = sampling if sample is NOTHING else replace(sampling, max_new_tokens=num_left)
            if index >= len(self.samples) - self.num_baselines:
                options = options.greedy()
            prompt_ids = self.lease.prompt.prompt_ids
            if sample is not NOTHING:
                prompt_ids = np.concatenate([prompt_ids, sample.token_ids], dtype=np.int32)
            group_id, attempt = self.key
            request_id = f"{group_id}-{attempt}-{index}-{self._num_rounds}"
            request = SampleRequest(
                id=request_id, prompt_ids=prompt_ids, sampling=options, on_first_token=on_first_token
            )
            self._outstanding[request.id] = index
            requests.append(request)
        self._num_rounds += 1
        return requests

    def take(self, request_id: str, output: SampleOutput) -> int:
        """Append the engine's answer to its sample; returns the tokens to account for, 0 for a baseline."""
        index = self._outstanding.pop(request_id)
        before = self.samples[index]
        if before is NOTHING:
            self.samples[index] = output
        else:
            self.samples[index] = SampleOutput(
                token_ids=np.concatenate([before.token_ids, output.token_ids]),
                logprobs=np.concatenate([before.logprobs, output.logprobs]),
                versions=np.concatenate([before.versions, output.versions]),
                finish_reason=output.finish_reason,
            )
        is_baseline = index >= len(self.samples) - self.num_baselines
        return 0 if is_baseline else len(output.token_ids)


class GroupLimit:
    """How many prompt groups one engine may hold, from ``lowest`` to ``highest``; equal bounds are a fixed limit.

    The limit follows the load that the engine reports: additive increase, multiplicative decrease (Chiu and Jain,
    1989), with the slow start of TCP. It shrinks while samples wait inside the engine or the KV cache is nearly full:
    waiting samples could run on another engine, and a full cache makes the engine compute samples again.

    Attributes:
        value: The limit now.
    """

    def __init__(self, lowest: int, highest: int) -> None:
        self._lowest = lowest
        self._highest = highest
        self._has_been_full = False
        self._num_full = 0
        self.value = lowest

    @property
    def is_fixed(self) -> bool:
        """Whether the limit never changes."""
        return self._lowest == self._highest

    def note(self, load: EngineLoad, *, num_held: int) -> bool:
        """Adapt the limit to the load of an engine that holds ``num_held`` groups; returns whether the limit changed.

        The limit grows only while all of it is used: a lower use says nothing about the room for more.
        """
        before = self.value
        is_full = load.num_waiting > 0 or load.cache_use >= FULL_CACHE
        self._num_full = self._num_full + 1 if is_full else 0
        if self._num_full >= READINGS_TO_SHRINK:
            self._num_full = 0
            self._has_been_full = True
            self.value = max(self._lowest, int(self.value * DECREASE))
        elif not is_full and load.cache_use < ROOMY_CACHE and num_held >= self.value:
            self.value = min(self._highest, self.value + 1 if self._has_been_full else 2 * self.value)
        return self.value != before


class InflightGroups:
    """The groups of one rollout worker by key, and the places on its engine.

    Args:
        limit: How many groups the engine may hold.
        samples_per_group: Samples of one group, the greedy baseline included.
        meter: Told how many groups are on the engine.
    """

    def __init__(self, limit: GroupLimit, *, samples_per_group: int, meter: FleetMeter) -> None:
        self._limit = limit
        self._samples_per_group = samples_per_group
        self._meter = meter
        self._groups: dict[tuple[int, int], InflightGroup] = {}
        self._is_noting = False
        self.note_capacity()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[InflightGroup]:
        return iter(list(self._groups.values()))

    def get(self, key: tuple[int, int]) -> InflightGroup | None:
        """The group with this id and attempt."""
        return self._groups.get(key)

    def add(self, group: InflightGroup) -> None:
        """Hold a group."""
        self._groups[group.key] = group

    def remove(self, group: InflightGroup) -> None:
        """Hold a group no longer."""
        del self._groups[group.key]
        self.note_places()

    def in_phase(self, *phases: GroupPhase) -> list[InflightGroup]:
        """The groups in one of ``phases``; by default those on the engine."""
        return [group for group in self._groups.values() if group.phase in (phases or ON_ENGINE)]

    @property
    def num_on_engine(self) -> int:
        """Groups that the engine has, or gets back after a weight update."""
        return len(self.in_phase(*ON_ENGINE, GroupPhase.parked))

    @property
    def num_free(self) -> int:
        """Groups that may be leased now. As many groups as the limit may be settling beside those on the engine."""
        num_settling = min(self._limit.value, len(self._groups) - self.num_on_engine)
        return max(0, self._limit.value - len(self._groups) + num_settling)

    @property
    def outstanding_policy(self) -> list[str]:
        """Ids of all unanswered requests whose tokens are accounted for."""
        return [request_id for group in self._groups.values() for request_id in group.outstanding_policy]

    def moved(self) -> None:
        """Note that a group has entered another phase."""
        self._meter.running(len(self.in_phase()))
        self.note_places()

    # Notes for the run's profile

    def note_capacity(self) -> None:
        """Record how many samples may run on the engine now."""
        record.level(LevelName.capacity, self._limit.value * self._samples_per_group)

    def note_places(self) -> None:
        """Record which states occupy the places of the engine, at most once per iteration of the event loop."""
        if not self._is_noting and record.current() is not None:
            self._is_noting = True
            asyncio.get_running_loop().call_soon(self._note_places)

    def _note_places(self) -> None:
        self._is_noting = False
        running = tail = settling = parked = 0
        for group in self._groups.values():
            num_samples, num_outstanding = len(group.samples), len(group.outstanding)
            if group.phase in ON_ENGINE:
                running += num_outstanding
                tail += num_samples - num_outstanding
            elif group.phase is GroupPhase.parked:
                parked += num_samples
            else:
                settling += num_samples
        num_places = self._limit.value * self._samples_per_group
        record.level(LevelName.running, running)
        record.level(LevelName.tail, tail)
        record.level(LevelName.settling, min(settling, num_places - running - tail - parked))
        record.level(LevelName.parked, parked)


def to_trajectory_group(
    lease: Lease,
    samples: Sequence[SampleOutput],
    rewards: np.ndarray,
    *,
    parts: Mapping[str, np.ndarray] | None = None,
    num_baselines: int = 0,
) -> TrajectoryGroup:
    """Return the record of a group with [G] float32 rewards; the last ``num_baselines`` samples are baselines.

    ``parts`` holds the values of each reward by name, where there are several; they become the metrics ``reward.NAME``.
    """
    prompt, num_trained = Turn.given(lease.prompt.prompt_ids), len(samples) - num_baselines
    trajectories = [
        Trajectory(
            turns=(prompt, _response(sample)),
            reward=reward,
            metrics={f"reward.{name}": float(values[index]) for name, values in (parts or {}).items()},
            baseline=index >= num_trained,
        )
        for index, (sample, reward) in enumerate(zip(samples, rewards.tolist(), strict=True))
    ]
    return TrajectoryGroup.from_trajectories(trajectories, group_id=lease.prompt.group_id, attempt=lease.attempt)


def to_progress(lease: Lease, samples: Sequence[SampleOutput]) -> TrajectoryGroup:
    """Return the record of an unfinished group: its samples so far, without baselines and rewards."""
    return to_trajectory_group(lease, samples, np.zeros(len(samples), dtype=np.float32))


def to_prefixes(progress: TrajectoryGroup, *, num_samples: int) -> tuple[SampleOutput, ...]:
    """Return the samples of a `to_progress` record. Raises `ReplayBufferError` unless it has ``num_samples``."""
    if progress.num_trajectories != num_samples:
        raise ReplayBufferError(
            f"the saved progress of prompt group {progress.group_id} has {progress.num_trajectories} samples, this run "
            f"takes {num_samples}; start this run with a new buffer.directory"
        )
    responses = [trajectory.turns[1] for trajectory in progress.trajectories()]
    return tuple(
        SampleOutput(
            token_ids=response.token_ids,
            logprobs=response.logprobs,
            versions=response.versions,
            finish_reason=None if response.finish_reason is FinishReason.unfinished else response.finish_reason,
        )
        for response in responses
    )


def _response(sample: SampleOutput) -> Turn:
    return Turn(
        token_ids=sample.token_ids,
        parent=0,
        sampled=True,
        logprobs=sample.logprobs,
        versions=sample.versions,
        finish_reason=sample.finish_reason or FinishReason.unfinished,
    )


class Settlement:
    """Settles groups that have left the engine of one rollout worker.

        finished ──▶ score ──▶ put              refused: its lease has expired, or its oldest token is too old
           │           │
           │           └─ the reward fails ─┐
        cut off ──▶ save ──▶ release        ├──▶ released; dropped after ``max_attempts`` failures
           └─ aborted, or its engine fails ─┘

    With ``on_reward_failure=drop_trajectory`` a response on which the reward fails is left out of its group and counted
    (``reward_trajectory``); its tokens are dropped (``reward``). Then each advantage compares the other responses.
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
        self._meter.add(tokens_in_flight=-group.num_own_tokens, groups_released=1)
        return is_dropped

    async def _settle_unfinished(self, group: InflightGroup, engine_failure: Exception | None) -> None:
        if self._config.save_progress is not SaveProgress.never:
            await self.save(group)
        if group.end is GroupEnd.engine_failed:
            self._meter.add(groups_failed=Counter([str(group.end)]))
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
        self._meter.add(reward_s=time.perf_counter() - started)
        has_reward = np.isfinite(scores.total)
        num_failed = len(samples) - int(has_reward.sum())
        if num_failed:
            if len(samples) - num_failed < fewest:
                raise RewardError(
                    f"the reward failed on {num_failed} of {len(samples)} responses to prompt group {prompt.group_id}, "
                    f"and a group needs {fewest}; the warnings before this message have the errors"
                )
            self._meter.add(groups_failed=Counter(reward_trajectory=num_failed))
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
            self._meter.add(tokens_in_flight=-group.num_own_tokens, groups_refused=1)
        else:
            self._meter.add(tokens_in_flight=-group.num_own_tokens, groups_finished=1)

    async def _fail_attempt(self, group: InflightGroup, reason: str, error: AsyncRLError) -> None:
        """Release a group after a failure of its own. Raises ``error`` after too many failures in a row."""
        self._meter.add(groups_failed=Counter([reason]))
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
