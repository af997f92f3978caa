"""A prompt group that a rollout worker holds: its lease, its phase, its samples, and the record that the buffer stores.

Pure and synchronous; the rollout loop drives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto

import numpy as np

from asyncrl.core.errors import ReplayBufferError
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason, Lease

from .config import SamplingConfig
from .engines.engine import SampleOutput, SampleRequest

_NOTHING = SampleOutput(
    token_ids=np.empty(0, dtype=np.int32),
    logprobs=np.empty(0, dtype=np.float32),
    versions=np.empty(0, dtype=np.int32),
    finish_reason=None,
)


class GroupPhase(Enum):
    """Where a prompt group is.

    ::

        generating ──▶ settling                        the last sample is in: score and store
        generating ──▶ cutting ──▶ parked ──▶ generating   cut off for a weight update, continued after it
        generating, cutting ──▶ ending ──▶ settling    revoked or stopped: cut off, and the lease given back
        generating, cutting ──▶ settling               its engine has failed: given back with what is written
    """

    generating = auto()
    cutting = auto()
    parked = auto()
    ending = auto()
    settling = auto()


class GroupEnd(StrEnum):
    """Why a group is given back unfinished; the reason that the buffer counts."""

    revoked = "revoked"
    handed_on = "handed_on"
    stopped = "stopped"
    engine_failed = "engine_failed"


ON_ENGINE = (GroupPhase.generating, GroupPhase.cutting, GroupPhase.ending)


@dataclass(eq=False, kw_only=True)
class InflightGroup:
    """One lease that this worker holds.

    Attributes:
        lease: The lease.
        samples: [G] what is written of each sample, and of the greedy baseline after them; empty before the first
            token.
        num_baselines: 1 with a greedy baseline (ReMax, arXiv 2310.10505), else 0. It is scored, never trained on, and
            its tokens are in no account.
        num_inherited: Tokens that an earlier attempt wrote.
        phase: See `GroupPhase`.
        end: Why the group is given back unfinished; None while it is not.
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
        """Begin a group, or continue one from its saved ``prefixes`` (empty, or one per sample)."""
        num_baselines = int(greedy_baseline)
        return cls(
            lease=lease,
            samples=[*(prefixes or [_NOTHING] * num_samples), *[_NOTHING] * num_baselines],
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
        """Whether every sample has ended by itself."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def outstanding(self) -> list[str]:
        """Ids of the requests that the engine has not answered."""
        return list(self._outstanding)

    @property
    def outstanding_policy(self) -> list[str]:
        """Those of them whose tokens are to be accounted for: all but that of the baseline."""
        num_trained = len(self.samples) - self.num_baselines
        return [request_id for request_id, index in self._outstanding.items() if index < num_trained]

    @property
    def num_outstanding(self) -> int:
        """Requests that the engine has not answered."""
        return len(self._outstanding)

    def next_requests(
        self, sampling: SamplingConfig, *, on_first_token: Callable[[], None] | None = None
    ) -> list[SampleRequest]:
        """One request per unfinished sample, which `take` gets the answer to; ``sampling`` bounds whole responses."""
        requests = []
        for index, sample in enumerate(self.samples):
            num_left = sampling.max_new_tokens - len(sample.token_ids)
            if sample.finish_reason is None and num_left < 1:
                self.samples[index] = replace(sample, finish_reason=FinishReason.length)
            if self.samples[index].finish_reason is not None:
                continue
            options = sampling if sample is _NOTHING else replace(sampling, max_new_tokens=num_left)
            if index >= len(self.samples) - self.num_baselines:
                options = options.greedy()
            prompt_ids = self.lease.prompt.prompt_ids
            if sample is not _NOTHING:
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
        """Add what the engine wrote to its sample; returns the tokens to be accounted for, 0 for a baseline."""
        index = self._outstanding.pop(request_id)
        before = self.samples[index]
        if before is _NOTHING:
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


def to_trajectory_group(
    lease: Lease,
    samples: Sequence[SampleOutput],
    rewards: np.ndarray,
    *,
    parts: Mapping[str, np.ndarray] | None = None,
    num_baselines: int = 0,
) -> TrajectoryGroup:
    """Return the record of a group with [G] float32 rewards; the last ``num_baselines`` samples are baselines.

    Where several rewards add up, ``parts`` are they by name; they become the metrics ``reward.NAME``.
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
    """Return the record of a group that was cut off: its samples so far, without baselines and rewards."""
    return to_trajectory_group(lease, samples, np.zeros(len(samples), dtype=np.float32))


def to_prefixes(progress: TrajectoryGroup, *, num_samples: int) -> tuple[SampleOutput, ...]:
    """Return the samples of a record that `to_progress` made; `ReplayBufferError` unless they are ``num_samples``."""
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
