"""The prompt groups that one rollout worker generates now, and the limit on their number.

A group has one episode (rollout) per sample, and a phase (`GroupPhase`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from functools import partial

import numpy as np

from asyncrl.core import record
from asyncrl.core.errors import ReplayBufferError, RequestRefused
from asyncrl.core.images import PlacedImage
from asyncrl.core.receipts import counts_of
from asyncrl.core.record import LevelName
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason, Lease

from .config import SamplingConfig
from .engines.engine import EngineLoad, SampleOutput, SampleRequest, mixed_seed
from .episodes.episode import PROMPT, Episode, EpisodeBudget
from .episodes.episode_run import EpisodeRun
from .metrics import FleetMeter
from .reward_protocol import Rollout
from .rewards import Scores

FULL_CACHE = 0.9
"""The limit on groups shrinks if at least this fraction of the KV cache is used."""
ROOMY_CACHE = 0.75
"""The limit on groups may grow if less than this fraction of the KV cache is used."""
DECREASE = 0.75
READINGS_TO_SHRINK = 2
"""The limit shrinks after this number of load reports in a row that show a full engine.

A single such report may only show new samples that do not run yet.
"""


class GroupPhase(Enum):
    """The phase of a prompt group on its worker.

    The worker aborts the requests of a ``cutting`` or ``ending`` group. A ``parked`` group has no requests, and waits
    for new weights. The worker stores a ``settling`` group, or gives it back to the buffer.

    ::

        generating ──▶ settling                            the last sample has arrived: score and store the group
        generating ──▶ cutting ──▶ parked ──▶ generating   aborted for a weight update, continued after it
        cutting ──▶ generating                             the abort took too long: the samples continue
        cutting ──▶ settling                               the last sample arrived before the abort: score and store
        generating, cutting ──▶ ending ──▶ settling        revoked or stopped: abort the samples, release the lease
        generating, cutting ──▶ settling                   the engine has failed: save the tokens, release the lease
        parked ──▶ settling                                revoked, stopped or the engine has failed: release the lease
    """

    generating = auto()
    cutting = auto()
    parked = auto()
    ending = auto()
    settling = auto()


class GroupEnd(StrEnum):
    """The reason why a worker gives an unfinished prompt group back to the buffer."""

    revoked = "revoked"
    handed_on = "handed_on"
    stopped = "stopped"
    engine_failed = "engine_failed"


ON_ENGINE = (GroupPhase.generating, GroupPhase.cutting, GroupPhase.ending)
"""Phases in which the engine may have requests of the group."""


@dataclass(eq=False, kw_only=True)
class InflightGroup:
    """One prompt group that this worker generates, with its lease (the right to generate it).

    Attributes:
        episodes: One episode per trajectory ([G]), then the episode of a greedy baseline, if there is one.
        num_baselines: 1 with a greedy baseline (ReMax, arXiv 2310.10505), else 0. A baseline is scored. The learner
            does not train on it, and its tokens are not counted.
        num_inherited: Number of tokens that an earlier attempt wrote.
        inherited: Number of tokens of earlier attempts by policy version.
        end: Why the unfinished group is given back; None if it is not given back.
        runs: One run per episode if an environment plays the episodes; empty for single answers.
    """

    lease: Lease
    episodes: list[Episode]
    num_baselines: int = 0
    num_inherited: int = 0
    inherited: Mapping[str, int] = field(default_factory=dict)
    phase: GroupPhase = GroupPhase.generating
    end: GroupEnd | None = None
    runs: list[EpisodeRun] = field(default_factory=list)
    _outstanding: dict[str, int] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        lease: Lease,
        *,
        num_samples: int,
        sampling: SamplingConfig,
        budget: EpisodeBudget | None = None,
        progress: TrajectoryGroup | None = None,
        greedy_baseline: bool = False,
        images: tuple[PlacedImage, ...] = (),
        seed: int | None = None,
    ) -> InflightGroup:
        """Make the group of a prompt that the worker has leased, with one episode (rollout) per sample.

        A lease is the right to generate a group. If ``progress`` is not None, the episodes continue the rollouts that
        an earlier worker saved. ``images`` are the images of the prompt. ``budget`` limits the turns and tokens of each
        episode; without a budget, each episode is a single answer to the prompt. ``greedy_baseline`` adds a greedy
        episode. ``seed`` is the seed of the run. If it is not None, each single answer gets its own seed, which depends
        only on ``seed``, the group and the sample.

        Raises `ReplayBufferError` if ``progress`` does not have ``num_samples`` trajectories.
        """
        prompt_ids = lease.prompt.prompt_ids
        is_single = budget is None
        budget = budget or EpisodeBudget(
            max_turns=1, max_tokens=sampling.max_new_tokens, max_context=len(prompt_ids) + sampling.max_new_tokens
        )
        recorded = [None] * num_samples if progress is None else _recorded(progress, num_samples)
        group_id, attempt = lease.prompt.group_id, lease.attempt
        episodes = [
            Episode(f"{group_id}-{attempt}-{index}", prompt_ids, budget, recorded=record, images=images)
            for index, record in enumerate([*recorded, *[None] * greedy_baseline])
        ]
        for index, episode in enumerate(episodes if is_single else []):
            own = sampling if seed is None else replace(sampling, seed=mixed_seed(seed, group_id, index) >> 1)
            episode.sample(PROMPT, (), own if index < num_samples else own.greedy())
        return cls(
            lease=lease,
            episodes=episodes,
            num_baselines=int(greedy_baseline),
            num_inherited=0 if progress is None else progress.summary.num_tokens,
            inherited={} if progress is None else counts_of(progress.policy_versions),
        )

    @property
    def key(self) -> tuple[int, int]:
        """The pair (group id, attempt number). Attempt 0 is the first time that a worker leased the group."""
        return self.lease.prompt.group_id, self.lease.attempt

    @property
    def trained(self) -> list[Episode]:
        """All episodes of the group except the greedy baseline. The learner trains on these G episodes."""
        return self.episodes[: len(self.episodes) - self.num_baselines]

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens in the episodes that the learner trains on, including tokens of earlier attempts.

        Tokens of the greedy baseline, which the learner does not train on, are not counted.
        """
        return sum(episode.num_held for episode in self.trained)

    @property
    def num_own_tokens(self) -> int:
        """Number of tokens that this attempt has sampled. Tokens of earlier attempts are not counted.

        Tokens of the greedy baseline, which the learner does not train on, are not counted either.
        """
        return self.num_tokens - self.num_inherited

    @property
    def is_playing(self) -> bool:
        """Whether the environment of at least one episode still runs. The environment may request further turns."""
        return any(not run.is_over for run in self.runs)

    @property
    def is_replayable(self) -> bool:
        """Whether another attempt can continue all episodes from their recorded turns."""
        return all(run.is_replayable for run in self.runs)

    @property
    def is_finished(self) -> bool:
        """Whether every episode is complete: no environment runs, and no turn is unfinished."""
        return not self.is_playing and not any(episode.num_running for episode in self.episodes)

    @property
    def num_running(self) -> int:
        """Number of turns that the engine is sampling or will continue after a weight update."""
        return sum(episode.num_running for episode in self.episodes)

    @property
    def is_done_here(self) -> bool:
        """Whether the engine has answered all requests of the group, and no environment can send more requests."""
        return not self._outstanding and not (
            self.is_playing and self.phase is GroupPhase.generating and self.end is None
        )

    @property
    def outstanding(self) -> list[str]:
        """Ids of the group's requests that the engine has not answered yet."""
        return list(self._outstanding)

    @property
    def outstanding_policy(self) -> list[str]:
        """Ids of the group's unanswered requests, without requests of the greedy baseline, which is not trained on."""
        num_trained = len(self.trained)
        return [request_id for request_id, index in self._outstanding.items() if index < num_trained]

    def next_requests(self, *, on_first_token: Callable[[], None] | None = None) -> list[SampleRequest]:
        """Make the requests to send to the engine: one for each unfinished turn that has no request yet.

        Pass each answer of the engine to `take`. ``on_first_token`` is called at the first token of each request.
        """
        requests = []
        for index, source in enumerate(self.runs or self.episodes):
            for request in source.next_requests():
                self._outstanding[request.id] = index
                told = [tell for tell in (on_first_token, request.on_first_token) if tell is not None]
                requests.append(replace(request, on_first_token=partial(_tell_all, told)) if told else request)
        return requests

    def take(self, request_id: str, output: SampleOutput) -> int:
        """Append the tokens of the engine's answer to the turn that the request samples.

        Returns the number of appended tokens; 0 for the greedy baseline, whose tokens are not counted.
        """
        index = self._outstanding.pop(request_id)
        (self.runs or self.episodes)[index].take(request_id, output)
        return len(output.token_ids) if index < len(self.trained) else 0

    def belongs_to(self, request_id: str, index: int) -> bool:
        """Return whether ``request_id`` is an unanswered request of the episode ``index`` of this group."""
        return self._outstanding.get(request_id) == index

    def refuse(self, request_ids: Iterable[str], error: RequestRefused) -> None:
        """Drop requests that the engine refused, and raise ``error`` in the environments that sent them.

        Ids of other groups and of answered requests are ignored.
        """
        for request_id in self._outstanding.keys() & set(request_ids):
            self.runs[self._outstanding.pop(request_id)].refuse(request_id, error)

    def progress(self) -> TrajectoryGroup | None:
        """Return the tokens so far as an unfinished group without rewards, so that the caller can save them.

        The group has all episodes except the greedy baseline. Returns None if the policy has not sampled a token of
        these episodes yet.
        """
        trajectories = [episode.progress() for episode in self.trained]
        if not any(turn.sampled and len(turn.token_ids) for each in trajectories for turn in each.turns):
            return None
        nothing = Turn.given(np.empty(0, dtype=np.int32), parent=0)
        unwritten = replace(nothing, sampled=True, finish_reason=FinishReason.unfinished)
        padded = [
            each if len(each.turns) > 1 else replace(each, turns=(*each.turns, unwritten)) for each in trajectories
        ]
        group_id, attempt = self.key
        return TrajectoryGroup.from_trajectories(padded, group_id=group_id, attempt=attempt)

    def rollout(self, index: int, decode: Callable[[Sequence[int]], str]) -> Rollout:
        """Return the finished episode ``index`` as a `Rollout`, the input of reward functions.

        ``decode`` converts token ids to text.
        """
        if self.runs:
            return self.runs[index].rollout(decode)
        answer = self.written(index)
        is_truncated = answer.finish_reason is FinishReason.length
        return Rollout.answer(
            decode(answer.token_ids.tolist()), num_tokens=len(answer.token_ids), is_truncated=is_truncated
        )

    def written(self, index: int) -> Turn | SampleOutput:
        """Return all tokens that the policy sampled in the episode ``index``, with log-probs and versions."""
        answer = self.episodes[index].answer
        assert answer is not None
        return self.runs[index].sampled() if self.runs else answer

    def scored(self, scores: Scores, chosen: Sequence[int]) -> TrajectoryGroup:
        """Return the finished group with rewards, as the buffer stores it.

        ``chosen`` are the indices of the episodes to keep. ``scores`` has one entry per chosen episode, in the same
        order. If the run has several rewards, each reward becomes a metric ``reward.NAME`` of the trajectory.
        """
        trajectories = []
        for place, index in enumerate(chosen):
            metrics = {f"reward.{name}": float(values[place]) for name, values in scores.parts.items()}
            if self.runs:
                run = self.runs[index]
                metrics |= run.metrics | dict(run.outcome.metrics if run.outcome else {})
            trajectory = self.episodes[index].trajectory(
                float(scores.total[place]),
                turn_rewards=scores.turn_rewards[place] if scores.turn_rewards else None,
                metrics=metrics,
            )
            trajectories.append(replace(trajectory, baseline=index >= len(self.trained)))
        group_id, attempt = self.key
        return TrajectoryGroup.from_trajectories(trajectories, group_id=group_id, attempt=attempt)


def _tell_all(told: Sequence[Callable[[], None]]) -> None:
    for tell in told:
        tell()


def _recorded(progress: TrajectoryGroup, num_samples: int) -> list[Trajectory | None]:
    if progress.num_trajectories != num_samples:
        raise ReplayBufferError(
            f"the saved progress of prompt group {progress.group_id} has {progress.num_trajectories} samples, but this "
            f"run takes {num_samples}; start this run with a new buffer.directory"
        )
    return [*progress.trajectories()]


class GroupLimit:
    """Limits how many prompt groups are on one engine at the same time, between ``lowest`` and ``highest``.

    The limit adapts to the load that the engine reports. The limit doubles until it shrinks for the first time (slow
    start, as in TCP). From then on it grows by one (additive increase, multiplicative decrease; Chiu and Jain, 1989).
    The limit shrinks while samples wait inside the engine, or while the KV cache is nearly full.

    Attributes:
        value: The current limit.
    """

    def __init__(self, lowest: int, highest: int) -> None:
        self._lowest = lowest
        self._highest = highest
        self._has_been_full = False
        self._num_full = 0
        self.value = lowest

    @property
    def is_fixed(self) -> bool:
        """Whether the limit never changes, because its lower and upper bound are equal."""
        return self._lowest == self._highest

    def note(self, load: EngineLoad, *, num_held: int) -> bool:
        """Adapt the limit to a reported ``load`` of the engine. Returns whether the limit changed.

        ``num_held`` is the number of groups on the engine. The limit grows only if ``num_held`` has reached the limit.
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
    """Holds the groups of one rollout worker, and computes how many more groups the worker may lease.

    Args:
        limit: Limit of groups on the engine.
        samples_per_group: Samples of one group, including the greedy baseline.
        meter: The worker's counters, which record the number of groups on the engine.
        most_held: Largest number of groups of the worker, including groups that wait for tools or are being settled. 0
            means twice the current value of ``limit``.
    """

    def __init__(self, limit: GroupLimit, *, samples_per_group: int, meter: FleetMeter, most_held: int = 0) -> None:
        self._limit = limit
        self._most_held = most_held
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
        """Return the group with the key (group id, attempt number); None if this worker does not have it."""
        return self._groups.get(key)

    def add(self, group: InflightGroup) -> None:
        """Add a group that this worker has just leased."""
        self._groups[group.key] = group

    def remove(self, group: InflightGroup) -> None:
        """Remove a group that has been stored or released."""
        del self._groups[group.key]
        self.note_places()

    def in_phase(self, *phases: GroupPhase) -> list[InflightGroup]:
        """Return the groups whose phase is in ``phases``; by default, groups that may have requests on the engine."""
        return [group for group in self._groups.values() if group.phase in (phases or ON_ENGINE)]

    @property
    def num_on_engine(self) -> int:
        """Number of groups on the engine, including groups that are paused for a weight update.

        For groups with environments, the unfinished turns are counted: ``samples_per_group`` turns make one group.
        """
        groups = self.in_phase(*ON_ENGINE, GroupPhase.parked)
        num_turns = sum(group.num_running for group in groups if group.is_playing)
        return sum(not group.is_playing for group in groups) + -(-num_turns // self._samples_per_group)

    @property
    def num_free(self) -> int:
        """Number of further groups that this worker may lease now.

        Two limits apply: the limit of groups on the engine, and the limit of all groups of the worker (``most_held``).
        Only the second limit includes groups that are being scored, or that wait for tools.
        """
        most = self._most_held or 2 * self._limit.value
        return max(0, min(self._limit.value - self.num_on_engine, most - len(self._groups)))

    @property
    def outstanding_policy(self) -> list[str]:
        """Ids of the unanswered requests of all groups, without requests of greedy baselines (not trained on)."""
        return [request_id for group in self._groups.values() for request_id in group.outstanding_policy]

    def moved(self) -> None:
        """Update the worker's counters of time and the run's profile. Call this when a group has changed its phase."""
        self._meter.running(sum(not group.is_playing or bool(group.outstanding) for group in self.in_phase()))
        self.note_places()

    # The methods below record the state of the groups in the run's profile.

    def note_capacity(self) -> None:
        """Record in the run's profile how many samples may be on the engine now."""
        record.level(LevelName.capacity, self._limit.value * self._samples_per_group)

    def note_places(self) -> None:
        """Record in the run's profile how many samples are in each state, at most once per event loop iteration."""
        if not self._is_noting and record.current() is not None:
            self._is_noting = True
            asyncio.get_running_loop().call_soon(self._note_places)

    def _note_places(self) -> None:
        self._is_noting = False
        running = tail = settling = parked = 0
        free = Counter[LevelName]()  # counts the episodes in each state (`EpisodeRun.place`)
        for group in self._groups.values():
            if group.phase is GroupPhase.settling:
                settling += len(group.episodes)
                continue
            num_running, num_outstanding = group.num_running, len(group.outstanding)
            running += num_outstanding
            if group.phase is not GroupPhase.generating:
                parked += num_running - num_outstanding
            if group.is_playing:
                free.update(run.place for run in group.runs)
            else:
                tail += len(group.episodes) - num_running
        left = max(0, self._limit.value * self._samples_per_group - running - tail - parked)
        shares = {}
        free[LevelName.settling] = settling
        for name in (LevelName.settling, LevelName.tool, LevelName.environment, LevelName.tail):
            shares[name] = min(free[name], left)
            left -= shares[name]
        record.level(LevelName.running, running)
        record.level(LevelName.tail, tail + shares.pop(LevelName.tail))
        for name, places in shares.items():
            record.level(name, places)
        record.level(LevelName.parked, parked)
