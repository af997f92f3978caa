"""Prompts and trajectory groups as payload frames.

A prompt is a message of `asyncrl.protocol.wire`. A group, which is written and read for every rollout, is laid out as
its type is: a head with the schema of its columns, then one buffer per column; a third of the codec's time.
"""

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

from asyncrl.protocol import wire
from asyncrl.protocol.errors import WireError
from asyncrl.protocol.trajectory import TURN_DTYPE, TrajectoryGroup
from asyncrl.protocol.types import Prompt
from asyncrl.protocol.wire_numpy import array_of, buffer_of, describe, is_plain

from .parcels import unwrap, wrap

_MAGIC = b"grp\x02"
_MALFORMED = (
    *(ValueError, TypeError, KeyError, IndexError, OverflowError, StopIteration, RuntimeError),
    msgpack.exceptions.UnpackException,
)


def prompt_frames(prompt: Prompt) -> list[Any]:
    """A prompt as payload."""
    values = {
        "group_id": prompt.group_id,
        "prompt_ids": prompt.prompt_ids,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra": dict(prompt.extra),
    }
    return wrap(wire.encode(values))


def prompt_of(frames: Sequence[Any]) -> Prompt:
    """The prompt in a payload.

    Raises:
        WireError: there is none.
    """
    values = wire.decode(unwrap(frames))
    try:
        return Prompt(**values)
    except TypeError as error:
        raise WireError(f"payload is not a Prompt: {error}") from error


def group_frames(group: TrajectoryGroup) -> list[Any]:
    """A trajectory group as payload; large arrays are not copied.

    Its head holds the schema: the names and array descriptors of the token, trajectory and turn columns.

    Raises:
        TypeError: a column is not an array of numbers.
    """
    scopes = (group.token_columns, group.trajectory_columns, group.turn_columns)
    schema = [[_described(name, column) for name, column in columns.items()] for columns in scopes]
    head: Any = msgpack.packb((group.group_id, group.attempt, schema))
    buffers = [buffer_of(column) for columns in scopes for column in columns.values()]
    return wrap([_MAGIC + head, group.turns.view(np.uint8).data, *buffers])


def _described(name: str, column: np.ndarray) -> tuple[str, bytes]:
    if not isinstance(column, np.ndarray) or not is_plain(column.dtype):
        raise TypeError(f"column {name!r} of a TrajectoryGroup must be a numpy array of numbers, got {column!r:.40}")
    return name, describe(column.dtype, column.shape)


def group_of(frames: Sequence[Any]) -> TrajectoryGroup:
    """The trajectory group in a payload; arrays are read-only views of the frames.

    Raises:
        WireError: there is none.
    """
    head, *buffers = map(memoryview, unwrap(frames))
    if head[: len(_MAGIC)] != _MAGIC:
        raise WireError(f"payload is not a TrajectoryGroup of this release: it begins with {bytes(head[:4])!r}")
    try:
        group_id, attempt, schema = msgpack.unpackb(head[len(_MAGIC) :], max_ext_len=0)
        turns, rest = np.frombuffer(buffers[0], dtype=TURN_DTYPE), iter(buffers[1:])
        token, trajectory, turn = (
            {str(name): array_of(descriptor, next(rest), writable=False) for name, descriptor in columns}
            for columns in schema
        )
        if type(group_id) is not int or type(attempt) is not int or next(rest, None) is not None:
            raise WireError("payload is not a TrajectoryGroup: its head does not describe it")
        group = TrajectoryGroup(
            group_id=group_id,
            attempt=attempt,
            turns=turns,
            token_columns=token,
            trajectory_columns=trajectory,
            turn_columns=turn,
        )
        group.check()
    except _MALFORMED as error:
        raise WireError(f"payload is not a TrajectoryGroup: {type(error).__name__}: {error}") from error
    return group
