"""A group's samples end to end, as the buffer stores them: finished, or as far as they were written."""

from __future__ import annotations

import numpy as np

from asyncrl.protocol.errors import ReplayBufferError
from asyncrl.protocol.types import FinishReason, Lease, TrajectoryGroup

from .types import GroupOutput, SampleOutput


def to_trajectory_group(lease: Lease, output: GroupOutput, rewards: np.ndarray) -> TrajectoryGroup:
    """Return the record of a group.

    Args:
        lease: Under which the group was rolled out.
        output: The engine's answer. Its baselines are masked out whole.
        rewards: [G] float32.
    """
    samples = output.samples
    response_ids = np.concatenate([sample.token_ids for sample in samples])
    trained = np.arange(len(response_ids)) < output.num_tokens
    return TrajectoryGroup(
        group_id=lease.prompt.group_id,
        attempt=lease.attempt,
        prompt_ids=lease.prompt.prompt_ids,
        response_ids=response_ids,
        response_lengths=np.asarray([len(sample.token_ids) for sample in samples], dtype=np.int32),
        response_mask=trained,
        behavior_logprobs=np.where(trained, np.concatenate([sample.logprobs for sample in samples]), np.float32(0.0)),
        versions=np.concatenate([sample.versions for sample in samples]),
        rewards=rewards,
        finish_reasons=tuple(sample.finish_reason or FinishReason.unfinished for sample in samples),
    )


def to_progress(lease: Lease, output: GroupOutput) -> TrajectoryGroup:
    """Return the record of a group that was cut off: its samples so far, without baselines, and no rewards yet."""
    kept = GroupOutput(rid=output.rid, samples=output.trained)
    return to_trajectory_group(lease, kept, np.zeros(len(kept.samples), dtype=np.float32))


def to_prefixes(progress: TrajectoryGroup, *, num_samples: int) -> tuple[SampleOutput, ...]:
    """Return the samples of a record that `to_progress` made.

    Raises:
        ReplayBufferError: it has another number of samples than this run takes of a prompt.
    """
    if progress.num_samples != num_samples:
        raise ReplayBufferError(
            f"what was saved of prompt group {progress.group_id} has {progress.num_samples} samples, this run takes "
            f"{num_samples}; begin it in a new buffer.directory"
        )
    ends = np.cumsum(progress.response_lengths)[:-1]
    columns = (
        np.split(column, ends) for column in (progress.response_ids, progress.behavior_logprobs, progress.versions)
    )
    return tuple(
        SampleOutput(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            finish_reason=None if reason is FinishReason.unfinished else reason,
        )
        for token_ids, logprobs, versions, reason in zip(*columns, progress.finish_reasons, strict=True)
    )
