"""Turns samples into the record that the buffer stores, `TrajectoryGroup`, and saved progress back into samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.protocol.errors import ReplayBufferError
from asyncrl.protocol.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.protocol.types import FinishReason, Lease

from .types import SampleOutput


def to_trajectory_group(
    lease: Lease, samples: Sequence[SampleOutput], rewards: np.ndarray, *, num_baselines: int = 0
) -> TrajectoryGroup:
    """Return the record of a group.

    Args:
        lease: The lease that the group was rolled out under.
        samples: Its samples, baselines last.
        rewards: [G] float32, one per sample.
        num_baselines: How many of the last samples are baselines.
    """
    prompt, num_trained = Turn.given(lease.prompt.prompt_ids), len(samples) - num_baselines
    trajectories = [
        Trajectory(turns=(prompt, _response(sample)), reward=reward, baseline=index >= num_trained)
        for index, (sample, reward) in enumerate(zip(samples, rewards.tolist(), strict=True))
    ]
    return TrajectoryGroup.from_trajectories(trajectories, group_id=lease.prompt.group_id, attempt=lease.attempt)


def to_progress(lease: Lease, samples: Sequence[SampleOutput]) -> TrajectoryGroup:
    """Return the record of a group that was cut off: its samples so far, without baselines and rewards."""
    return to_trajectory_group(lease, samples, np.zeros(len(samples), dtype=np.float32))


def to_prefixes(progress: TrajectoryGroup, *, num_samples: int) -> tuple[SampleOutput, ...]:
    """Return the samples of a record that `to_progress` made.

    Raises:
        ReplayBufferError: the record's number of samples differs from ``num_samples``.
    """
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
