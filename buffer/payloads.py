"""Prompts and trajectory groups as payload frames.

A prompt is a message of `asyncrl.protocol.codec`. A group, which is written and read for every rollout, is laid out as
its type is: a head with the codec's array descriptors, then one buffer per column; a third of the codec's time.
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from asyncrl.protocol import codec
from asyncrl.protocol.codec_numpy import array_of, buffer_of, describe, is_plain
from asyncrl.protocol.errors import WireError
from asyncrl.protocol.types import FinishReason, Prompt, TrajectoryGroup

from .parcels import unwrap, wrap

_MAGIC = b"grp\x01"
_COLUMNS = (
    "prompt_ids",
    "response_ids",
    "response_lengths",
    "response_mask",
    "behavior_logprobs",
    "versions",
    "rewards",
)
_REASONS = {str(reason): reason for reason in FinishReason}
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, OverflowError, msgpack.exceptions.UnpackException)


def prompt_frames(prompt: Prompt) -> list[Any]:
    """A prompt as payload."""
    values = {
        "group_id": prompt.group_id,
        "prompt_ids": prompt.prompt_ids,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra": dict(prompt.extra),
    }
    return wrap(codec.encode(values))


def prompt_of(frames: Sequence[Any]) -> Prompt:
    """The prompt in a payload.

    Raises:
        WireError: there is none.
    """
    values = codec.decode(unwrap(frames))
    try:
        return Prompt(**values)
    except TypeError as error:
        raise WireError(f"payload is not a Prompt: {error}") from error


def group_frames(group: TrajectoryGroup) -> list[Any]:
    """A trajectory group as payload; large arrays are not copied.

    Raises:
        TypeError: a column is not an array of numbers.
    """
    columns: list[np.ndarray] = [getattr(group, name) for name in _COLUMNS]
    for name, column in zip(_COLUMNS, columns, strict=True):
        if not isinstance(column, np.ndarray) or not is_plain(column.dtype):
            raise TypeError(f"TrajectoryGroup.{name} must be a numpy array of numbers, got {type(column).__name__}")
    descriptors = [describe(column.dtype, column.shape) for column in columns]
    reasons = [str(reason) for reason in group.finish_reasons]
    head: Any = msgpack.packb((group.group_id, group.attempt, reasons, descriptors))
    return wrap([_MAGIC + head, *map(buffer_of, columns)])


def group_of(frames: Sequence[Any]) -> TrajectoryGroup:
    """The trajectory group in a payload; arrays are read-only views of the frames.

    Raises:
        WireError: there is none.
    """
    head, *buffers = map(memoryview, unwrap(frames))
    if head[: len(_MAGIC)] != _MAGIC:
        raise WireError(f"payload is not a TrajectoryGroup of this release: it begins with {bytes(head[:4])!r}")
    try:
        group_id, attempt, reasons, descriptors = msgpack.unpackb(head[len(_MAGIC) :], max_ext_len=0)
        arrays = [array_of(d, buffer, writable=False) for d, buffer in zip(descriptors, buffers, strict=True)]
        columns = dict(zip(_COLUMNS, arrays, strict=True))
        finish_reasons = tuple([_REASONS[reason] for reason in reasons])
    except _MALFORMED as error:
        raise WireError(f"payload is not a TrajectoryGroup: {type(error).__name__}: {error}") from error
    if type(group_id) is not int or type(attempt) is not int:
        raise WireError("payload is not a TrajectoryGroup: its head does not describe it")
    return TrajectoryGroup(group_id=group_id, attempt=attempt, finish_reasons=finish_reasons, **columns)
