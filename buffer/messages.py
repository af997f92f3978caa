"""What the buffer's clients and server say to each other: a small msgpack header, then payload frames.

A header is ``[PROTOCOL_VERSION, name, request_id, fields]``. In a request the name is the operation; in a reply it is
``ok`` or the name of an error in `asyncrl.protocol.errors`; a message with request id 0 is a push. Payload frames are
`asyncrl.protocol.wire` messages of prompts and trajectories, which the server passes on unopened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from asyncrl.protocol import errors, wire
from asyncrl.protocol.errors import AsyncRLError, WireError
from asyncrl.protocol.types import BufferStats, FinishReason, GroupSummary, Prompt, TrajectoryGroup

from .parcels import unwrap, wrap

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_FRAMES = 4096
MAX_REPLY_HEADER_BYTES = 1 << 28
MAX_REPLY_FRAMES = 1 << 20
OK = "ok"
REVOKED = "revoked"
SPACE = "space"
ACKS = "acks"
PUSHES = frozenset({REVOKED, SPACE})
PUSH_ID = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message, in either direction.

    Attributes:
        name: Operation, ``ok``, an error's name, or the name of a push.
        request_id: Chosen by the client, repeated in the reply; 0 in a push.
        fields: Plain values.
        payload: Frames behind the header, as they came.
    """

    name: str
    request_id: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    payload: Sequence[Any] = ()

    def frames(self) -> list[Any]:
        """The message as it is sent."""
        header = msgpack.packb([PROTOCOL_VERSION, self.name, self.request_id, self.fields])
        return [header, *self.payload]


def parse(frames: Sequence[Any], *, max_frames: int = MAX_FRAMES, max_header_bytes: int = MAX_HEADER_BYTES) -> Message:
    """Read a message; the payload stays as it came.

    A server takes the limits as they are; its replies to a client, a plan or a batch, may be longer.

    Raises:
        WireError: the header is not one of this protocol, or is of another version of it.
    """
    if not 1 <= len(frames) <= max_frames:
        raise WireError(f"a message has 1 to {max_frames} frames, got {len(frames)}")
    header = memoryview(frames[0])
    if header.nbytes > max_header_bytes:
        raise WireError(f"a header has at most {max_header_bytes} bytes, got {header.nbytes}")
    try:
        parts = msgpack.unpackb(header, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"the header is not msgpack: {type(error).__name__}") from error
    if not isinstance(parts, list) or len(parts) != 4 or parts[0] != PROTOCOL_VERSION:
        got = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], int) else "none"
        raise WireError(
            f"expected a header of buffer protocol version {PROTOCOL_VERSION}, got version {got}; run the same release "
            "of asyncrl on both sides"
        )
    _, name, request_id, fields = parts
    if not (isinstance(name, str) and isinstance(request_id, int) and isinstance(fields, dict)):
        raise WireError("a header is [version, name, request_id, fields]")
    return Message(name=name, request_id=request_id, fields=fields, payload=frames[1:])


def parse_reply(frames: Sequence[Any]) -> Message:
    """Read a message from the server, under a client's wider limits."""
    return parse(frames, max_frames=MAX_REPLY_FRAMES, max_header_bytes=MAX_REPLY_HEADER_BYTES)


def coalesce(replies: Sequence[Message]) -> list[Message]:
    """Replies to one client, those that say no more than ``ok`` as one push of their request ids."""
    plain = [r.request_id for r in replies if r.name == OK and not r.fields and not r.payload]
    if len(plain) < 2:
        return list(replies)
    acknowledged = set(plain)
    others = [reply for reply in replies if reply.request_id not in acknowledged]
    return [*others, Message(name=ACKS, request_id=PUSH_ID, fields={"ids": plain})]


def error_reply(request_id: int, error: AsyncRLError) -> Message:
    """The reply that makes the client raise ``error``."""
    return Message(name=type(error).__name__, request_id=request_id, fields={"message": str(error)})


def error_of(reply: Message) -> AsyncRLError:
    """The error that a reply other than ``ok`` stands for."""
    kind = getattr(errors, reply.name, None)
    message = str(reply.fields.get("message", reply.name))
    if isinstance(kind, type) and issubclass(kind, AsyncRLError):
        return kind(message)
    return WireError(f"unknown reply {reply.name!r}: {message}")


def integer(fields: Mapping[str, Any], name: str) -> int:
    """A field that must be an int64 >= 0.

    Raises:
        WireError: it is missing, or something else.
    """
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise WireError(f"field {name!r} must be an integer in [0, 2**63), got {value!r:.40}")
    return value


def text(fields: Mapping[str, Any], name: str) -> str:
    """A field that must be a string of at most 200 characters.

    Raises:
        WireError: it is missing, or something else.
    """
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > 200:
        raise WireError(f"field {name!r} must be a string of at most 200 characters, got {value!r:.40}")
    return value


def integers(fields: Mapping[str, Any], name: str) -> list[int]:
    """A field that must be a list of int64 >= 0.

    Raises:
        WireError: it is missing, or something else.
    """
    values = fields.get(name)
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise WireError(f"field {name!r} must be a list of integers in [0, 2**63)")
    return values


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
    """The prompt in a payload."""
    return _build(Prompt, wire.decode(unwrap(frames)))


def group_frames(group: TrajectoryGroup) -> list[Any]:
    """A trajectory group as payload; large arrays are not copied."""
    values = {
        "group_id": group.group_id,
        "attempt": group.attempt,
        "prompt_ids": group.prompt_ids,
        "response_ids": group.response_ids,
        "response_lengths": group.response_lengths,
        "response_mask": group.response_mask,
        "behavior_logprobs": group.behavior_logprobs,
        "versions": group.versions,
        "rewards": group.rewards,
        "finish_reasons": [str(reason) for reason in group.finish_reasons],
    }
    return wrap(wire.encode(values))


def group_of(frames: Sequence[Any]) -> TrajectoryGroup:
    """The trajectory group in a payload; arrays are read-only views of the frames."""
    values = wire.decode(unwrap(frames))
    if isinstance(values, dict) and "finish_reasons" in values:
        try:
            values["finish_reasons"] = tuple(FinishReason(reason) for reason in values["finish_reasons"])
        except (ValueError, TypeError) as error:
            raise WireError(f"payload holds an unknown finish reason: {error}") from error
    return _build(TrajectoryGroup, values)


def _build(kind: type, values: Any) -> Any:
    try:
        return kind(**values)
    except TypeError as error:
        raise WireError(f"payload is not a {kind.__name__}: {error}") from error


def split_by_store(group_ids: Sequence[int], attempts: Sequence[int], num_stores: int) -> list[dict[str, list[int]]]:
    """The fields of the fetch that each store server is asked for."""
    asked: list[dict[str, list[int]]] = [{"groups": [], "attempts": []} for _ in range(num_stores)]
    for group_id, attempt in zip(group_ids, attempts, strict=True):
        asked[group_id % num_stores]["groups"].append(group_id)
        asked[group_id % num_stores]["attempts"].append(attempt)
    return asked


def join_from_stores(replies: Sequence[Message], group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    """The groups in the replies of all store servers, in the order asked for.

    Raises:
        WireError: they are not the groups asked for.
    """
    streams = [iter(_groups_in(reply)) for reply in replies]
    return _checked([next(streams[group_id % len(streams)]) for group_id in group_ids], group_ids)


def groups_of(reply: Message, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    """The groups in the reply to a fetch.

    Raises:
        WireError: they are not the groups asked for.
    """
    return _checked(_groups_in(reply), group_ids)


def _groups_in(reply: Message) -> list[TrajectoryGroup]:
    frames = iter(reply.payload)
    counts = integers(reply.fields, "counts")
    if sum(counts) != len(reply.payload):
        raise WireError(f"a fetch says that it has {sum(counts)} frames, and has {len(reply.payload)}")
    return [group_of([next(frames) for _ in range(number)]) for number in counts]


def _checked(groups: list[TrajectoryGroup], group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    if (got := [group.group_id for group in groups]) != list(group_ids):
        raise WireError(f"fetched groups {got[:5]}… instead of {list(group_ids)[:5]}…")
    return groups


def summary_fields(summary: GroupSummary) -> dict[str, Any]:
    """A summary as header fields."""
    return {
        "group_id": summary.group_id,
        "attempt": summary.attempt,
        "num_prompt_tokens": summary.num_prompt_tokens,
        "response_lengths": summary.response_lengths,
        "num_tokens": summary.num_tokens,
        "oldest_version": summary.oldest_version,
        "newest_version": summary.newest_version,
        "rewards": summary.rewards,
    }


def summary_of(fields: Any) -> GroupSummary:
    """The summary in header fields.

    Raises:
        WireError: a field is missing or of the wrong type.
    """
    if not isinstance(fields, dict):
        raise WireError(f"a group summary is a map, got {type(fields).__name__}")
    rewards = fields.get("rewards")
    if not isinstance(rewards, list) or not all(type(reward) in (float, int) for reward in rewards):
        raise WireError("field 'rewards' must be a list of numbers")
    return GroupSummary(
        group_id=integer(fields, "group_id"),
        attempt=integer(fields, "attempt"),
        num_prompt_tokens=integer(fields, "num_prompt_tokens"),
        response_lengths=tuple(integers(fields, "response_lengths")),
        num_tokens=integer(fields, "num_tokens"),
        oldest_version=integer(fields, "oldest_version"),
        newest_version=integer(fields, "newest_version"),
        rewards=tuple(rewards),
    )


def stats_fields(stats: BufferStats) -> dict[str, Any]:
    """The ledger's totals as header fields."""
    fields = asdict(stats)
    fields["lag_histogram"] = list(stats.lag_histogram.items())
    return fields


def stats_of(fields: Mapping[str, Any]) -> BufferStats:
    """The ledger's totals in header fields."""
    return _build(BufferStats, {**fields, "lag_histogram": dict(fields.get("lag_histogram", ()))})
