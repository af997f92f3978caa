"""A rolled-out prompt group as the record that the buffer stores: finished, or as far as it was written."""

from __future__ import annotations

import numpy as np

from asyncrl.protocol.errors import ReplayBufferError
from asyncrl.protocol.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.protocol.types import FinishReason, Lease

from .types import GroupOutput, SampleOutput


def to_trajectory_group(lease: Lease, output: GroupOutput, rewards: np.ndarray) -> TrajectoryGroup:
    """Return the record of a group.

    Args:
        lease: Under which the group was rolled out.
        output: The engine's answer; what follows its trained samples are baselines.
        rewards: [G] float32.
    """
    prompt, num_trained = Turn.given(lease.prompt.prompt_ids), len(output.trained)
    trajectories = [
        Trajectory(turns=(prompt, _answer(sample)), reward=reward, baseline=index >= num_trained)
        for index, (sample, reward) in enumerate(zip(output.samples, rewards.tolist(), strict=True))
    ]
    return TrajectoryGroup.from_trajectories(trajectories, group_id=lease.prompt.group_id, attempt=lease.attempt)


def to_progress(lease: Lease, output: GroupOutput) -> TrajectoryGroup:
    """Return the record of a group that was cut off: its samples so far, without baselines, and no rewards yet."""
    kept = GroupOutput(rid=output.rid, samples=output.trained)
    return to_trajectory_group(lease, kept, np.zeros(len(kept.samples), dtype=np.float32))


def to_prefixes(progress: TrajectoryGroup, *, num_samples: int) -> tuple[SampleOutput, ...]:
    """Return the samples of a record that `to_progress` made.

    Raises:
        ReplayBufferError: it has another number of samples than this run takes of a prompt.
    """
    if progress.num_trajectories != num_samples:
        raise ReplayBufferError(
            f"what was saved of prompt group {progress.group_id} has {progress.num_trajectories} samples, this run "
            f"takes {num_samples}; begin it in a new buffer.directory"
        )
    answers = [trajectory.turns[1] for trajectory in progress.trajectories()]
    return tuple(
        SampleOutput(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            versions=answer.versions,
            finish_reason=None if answer.finish_reason is FinishReason.unfinished else answer.finish_reason,
        )
        for answer in answers
    )


def _answer(sample: SampleOutput) -> Turn:
    return Turn(
        token_ids=sample.token_ids,
        parent=0,
        sampled=True,
        logprobs=sample.logprobs,
        versions=sample.versions,
        finish_reason=sample.finish_reason or FinishReason.unfinished,
    )
