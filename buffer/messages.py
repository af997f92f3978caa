"""The messages between the buffer's clients and servers: a small msgpack header, then payload frames.

A header is ``[PROTOCOL_VERSION, epoch, name, request_id, fields]``. The epoch names the run. In a request the name is
the operation; in a reply it is ``ok`` or the name of an error in `asyncrl.core.errors`; a message with request id 0
is a push. Payload frames are prompts and trajectories (`buffer.encoding`), which the server does not decode.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

import msgpack
import msgspec

from asyncrl.core import errors
from asyncrl.core.errors import AsyncRLError, WireError
from asyncrl.core.types import BufferStats, GroupSummary, WeightOffer

PROTOCOL_VERSION = 6
MAX_HEADER_BYTES = 1 << 20
MAX_FRAMES = 4096
MAX_REPLY_HEADER_BYTES = 1 << 28
MAX_REPLY_FRAMES = 1 << 20
MAX_BATCH = 64
MAX_LEASES = 4096
"""Leases that one request may name; the server's work grows with each of them."""
BATCH = "batch"
OK = "ok"
REVOKED = "revoked"
SPACE = "space"
ACKS = "acks"
HAND_ON = "hand_on"
PUSHES = frozenset({REVOKED, SPACE, HAND_ON})
PUSH_ID = 0
CONNECT = "connect"
MAX_COUNT = 1 << 40
MAX_REASON = 20_000
_NAMES = tuple(GroupSummary.__dataclass_fields__)
_values_of = attrgetter(*_NAMES)
_counts_of = attrgetter(
    "group_id", "attempt", "num_prompt_tokens", "num_tokens", "oldest_version", "newest_version", "num_truncated"
)
_NUMBERS = frozenset({int, float})
_NAMES_LEASES = frozenset({"renew", "leave"})
_encode = msgspec.msgpack.Encoder().encode
_ERRORS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AsyncRLError)
}


@dataclass(kw_only=True, slots=True)
class Message:
    """One message, in either direction. Not frozen: freezing doubles construction time.

    Attributes:
        name: Operation, ``ok``, an error's name, or the name of a push.
        request_id: Chosen by the client, repeated in the reply; 0 in a push.
        fields: Plain values.
        payload: Frames after the header, as received.
        epoch: The run of the sender; empty in a message that was not received.
    """

    name: str
    request_id: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    payload: Sequence[Any] = ()
    epoch: str = ""

    @classmethod
    def of_error(cls, request_id: int, error: AsyncRLError) -> "Message":
        """The reply that makes the client raise ``error``."""
        return cls(name=type(error).__name__, request_id=request_id, fields={"message": str(error)})

    def frames(self, epoch: str = "") -> list[Any]:
        """The frames of the message, sent by a member of the run ``epoch``."""
        header = _encode((PROTOCOL_VERSION, epoch, self.name, self.request_id, self.fields))
        return [header, *self.payload]


Send = Callable[[bytes, "Message"], None]


class Replies:
    """Sends replies and pushes with a function that sends one message to one client."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def reply(
        self, client: bytes, request_id: int, fields: Mapping[str, Any] | None = None, payload: Sequence[Any] = ()
    ) -> None:
        """Answer a request."""
        self._send(client, Message(name=OK, request_id=request_id, fields=fields or {}, payload=payload))

    def fail(self, client: bytes, request_id: int, error: AsyncRLError) -> None:
        """Answer a request with an error, which the client raises."""
        self._send(client, Message.of_error(request_id, error))

    def push(self, client: bytes, name: str, fields: Mapping[str, Any] | None = None) -> None:
        """Send a client a message that answers no request."""
        self._send(client, Message(name=name, request_id=PUSH_ID, fields=fields or {}))


def parse(frames: Sequence[Any], *, max_frames: int = MAX_FRAMES, max_header_bytes: int = MAX_HEADER_BYTES) -> Message:
    """Read a message; the payload is not decoded. A client's limits are wider: see `parse_reply`.

    Raises `WireError` if the header does not follow this protocol, or has another version of it.
    """
    if not 1 <= len(frames) <= max_frames:
        raise WireError(f"a message must have 1 to {max_frames} frames, got {len(frames)}")
    header = memoryview(frames[0])
    if header.nbytes > max_header_bytes:
        raise WireError(f"a header must have at most {max_header_bytes} bytes, got {header.nbytes}")
    try:
        parts = msgpack.unpackb(header, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"the header is not msgpack: {type(error).__name__}") from error
    if not isinstance(parts, list) or len(parts) != 5 or parts[0] != PROTOCOL_VERSION:
        got = parts[0] if isinstance(parts, list) and parts and isinstance(parts[0], int) else "none"
        raise WireError(
            f"expected a header of buffer protocol version {PROTOCOL_VERSION}, got version {got}; run the same release "
            "of asyncrl on both sides"
        )
    _, epoch, name, request_id, fields = parts
    if [*map(type, parts[1:])] != [str, str, int, dict]:
        raise WireError("a header must be [version, epoch, name, request_id, fields]")
    return Message(name=name, request_id=request_id, fields=fields, payload=frames[1:], epoch=epoch)


def parse_reply(frames: Sequence[Any]) -> Message:
    """Read a message from the server, under a client's wider limits."""
    return parse(frames, max_frames=MAX_REPLY_FRAMES, max_header_bytes=MAX_REPLY_HEADER_BYTES)


def batch(requests: Sequence[Message]) -> Message:
    """Join requests in one message, which costs ZMQ and both event loops as much as one request."""
    heads = [(r.name, r.request_id, r.fields, len(r.payload)) for r in requests]
    payload = [frame for request in requests for frame in request.payload]
    return Message(name=BATCH, request_id=PUSH_ID, fields={"requests": heads}, payload=payload)


def unbatch(message: Message) -> list[Message]:
    """Split a message into its requests. Raises `WireError` if the message does not describe them."""
    if message.name != BATCH:
        return [message]
    heads = message.fields.get("requests")
    if not isinstance(heads, list) or len(heads) > MAX_BATCH:
        raise WireError(f"a batch must be a list of at most {MAX_BATCH} requests")
    requests, end = [], 0
    for head in heads:
        if not isinstance(head, list) or [*map(type, head)] != [str, int, dict, int]:
            raise WireError("a request in a batch must be [name, request_id, fields, number of frames]")
        name, request_id, fields, num_frames = head
        if not 0 <= num_frames <= len(message.payload) - end:
            raise WireError(f"a batch has {len(message.payload)} frames, but its requests name more")
        payload = message.payload[end : end + num_frames]
        requests.append(Message(name=name, request_id=request_id, fields=fields, payload=payload))
        end += num_frames
    return requests


def coalesce(replies: Sequence[Message]) -> list[Message]:
    """Join the replies to one client: plain ``ok`` replies become one push of their request ids."""
    plain = [r.request_id for r in replies if r.name == OK and not r.fields and not r.payload]
    if len(plain) < 2:
        return list(replies)
    acknowledged = set(plain)
    others = [reply for reply in replies if reply.request_id not in acknowledged]
    return [*others, Message(name=ACKS, request_id=PUSH_ID, fields={"ids": plain})]


def error_of(reply: Message) -> AsyncRLError:
    """The error of a reply that is not ``ok``."""
    message = str(reply.fields.get("message", reply.name))
    kind = _ERRORS.get(reply.name)
    return WireError(f"unknown reply {reply.name!r}: {message}") if kind is None else kind(message)


def integer(fields: Mapping[str, Any], name: str) -> int:
    """An int64 >= 0. Raises `WireError` if it is missing or of another type."""
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise WireError(f"field {name!r} must be an integer in [0, 2**63), got {value!r:.40}")
    return value


def num_leases(request: Message) -> int:
    """Number of leases that a request names."""
    named = request.fields.get("groups") if request.name in _NAMES_LEASES else None
    return len(named) if isinstance(named, list) else 0


def count(fields: Mapping[str, Any], name: str) -> int:
    """An integer in [0, 2**40], so that totals fit into 63 bits. Raises `WireError` if it is missing or not a count."""
    value = integer(fields, name)
    if value > MAX_COUNT:
        raise WireError(f"field {name!r} must be a count of at most 2**40, got {value}")
    return value


def incarnation_of(fields: Mapping[str, Any]) -> int:
    """The learner's incarnation in a message; 0 if it is missing. Raises `WireError` if it is not an integer."""
    return integer(fields, "incarnation") if "incarnation" in fields else 0


def text(fields: Mapping[str, Any], name: str) -> str:
    """A string of at most 200 characters. Raises `WireError` if it is missing or of another type."""
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > 200:
        raise WireError(f"field {name!r} must be a string of at most 200 characters, got {value!r:.40}")
    return value


def flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A boolean; ``default`` if it is missing. Raises `WireError` if it is of another type."""
    value = fields.get(name, default)
    if type(value) is not bool:
        raise WireError(f"field {name!r} must be a boolean, got {value!r:.40}")
    return value


def seconds(fields: Mapping[str, Any], name: str) -> float:
    """A finite number >= 0. Raises `WireError` if it is missing or of another type."""
    value: Any = fields.get(name)
    if type(value) not in _NUMBERS or not 0 <= value < math.inf:
        raise WireError(f"field {name!r} must be a number of seconds >= 0, got {value!r:.40}")
    return float(value)


def integers(fields: Mapping[str, Any], name: str) -> list[int]:
    """A list of int64 >= 0. Raises `WireError` if it is missing or of another type."""
    values = fields.get(name)
    if isinstance(values, list) and (not values or _are_int64(values)):
        return values
    raise WireError(f"field {name!r} must be a list of integers in [0, 2**63)")


def pairs(fields: Mapping[str, Any], name: str) -> list[tuple[int, int]]:
    """Pairs of int64 >= 0, sent as one flat list. Raises `WireError` if it is missing or of another type."""
    values = integers(fields, name)
    if len(values) % 2:
        raise WireError(f"field {name!r} must be pairs of integers, got {len(values)} of them")
    return list(zip(values[::2], values[1::2], strict=True))


def _are_int64(values: list[Any]) -> bool:
    """Whether all are integers in [0, 2**63). Checking all at once takes a quarter of the time."""
    return {*map(type, values)} == {int} and min(values) >= 0 and max(values) < 1 << 63


def summary_fields(summary: GroupSummary) -> dict[str, Any]:
    """A summary as header fields."""
    return dict(zip(_NAMES, _values_of(summary), strict=True))


def summary_of(fields: Any) -> GroupSummary:
    """The summary in header fields. Raises `WireError` if a field is missing or of the wrong type."""
    try:
        summary = msgspec.convert(fields, GroupSummary)
    except msgspec.ValidationError as error:
        raise WireError(f"not the summary of a group: {error}") from error
    lists = summary.response_lengths, summary.branch_tokens, summary.num_branches
    numbers = (*_counts_of(summary), *lists[0], *lists[1], *lists[2])
    if min(numbers) < 0 or max(numbers) >= 1 << 63:
        raise WireError(f"the counts of a group must be integers in [0, 2**63), got {min(numbers)} to {max(numbers)}")
    if (most := max(summary.num_tokens, *map(sum, lists))) > MAX_COUNT:
        raise WireError(f"a group must have at most 2**40 tokens, got {most}")
    return summary


def offer_of(fields: Any) -> WeightOffer:
    """The offer in header fields. Raises `WireError` if they are not an offer."""
    try:
        return WeightOffer(**fields)
    except TypeError as error:
        raise WireError(f"not an offer of weights: got {str(fields)[:200]}: {error}") from error


def stats_fields(stats: BufferStats) -> dict[str, Any]:
    """The ledger's totals as header fields."""
    return {**asdict(stats), "lag_histogram": list(stats.lag_histogram.items())}


def stats_of(fields: Mapping[str, Any]) -> BufferStats:
    """The ledger's totals in header fields. Raises `WireError` if a field is missing or of the wrong type."""
    try:
        return BufferStats(**{**fields, "lag_histogram": dict(fields.get("lag_histogram", ()))})
    except TypeError as error:
        raise WireError(f"not the totals of a ledger: {error}") from error
