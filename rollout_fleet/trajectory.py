"""Lays a finished group's samples end to end, as the buffer stores them."""

from __future__ import annotations

import numpy as np

from asyncrl.protocol.types import Lease, TrajectoryGroup

from .types import GroupOutput


def to_trajectory_group(lease: Lease, output: GroupOutput, rewards: np.ndarray) -> TrajectoryGroup:
    """Return the record of a group whose samples are all finished.

    Args:
        lease: Under which the group was rolled out.
        output: The engine's answer; no sample of it is aborted. Its baselines are masked out whole.
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
        finish_reasons=tuple(sample.finish_reason for sample in samples if sample.finish_reason is not None),
    )
