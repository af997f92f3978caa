"""The ledger's commands, and the outcome that the ledger decides for each command.

Both are frozen records of plain values. `buffer.journal` writes each command with its outcome. A restarted server
applies the recorded outcomes and does not decide again.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar, Union

from msgspec import Struct

from asyncrl.core.types import GroupSummary

Result = TypeVar("Result", covariant=True)


def _wire_name(name: str) -> str:
    """The tag of a record in messages and journals. Example: ``PlanBatch`` is ``plan_batch``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Row(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A part of a record; it is encoded as an array of its fields."""


class Outcome(Row, frozen=True, tag=_wire_name):
    """What the ledger decided."""


class Command(Row, Generic[Result], frozen=True, tag=_wire_name):
    """A request to the ledger; ``Result`` is the type of its outcome."""


def union_of(base: type) -> Any:
    """The union of a class's subclasses without subclasses of their own."""
    leaves, found = [], [base]
    while found:
        kind = found.pop()
        leaves += [] if kind.__subclasses__() else [kind]
        found += kind.__subclasses__()
    return Union[tuple(leaves)]  # noqa: UP007 - the members are not known here


class PutResult(StrEnum):
    """The result of a put."""

    stored = "stored"
    duplicate = "duplicate"
    filtered = "filtered"
    too_old = "too_old"
    late = "late"


class Progress(Row, frozen=True):
    """The saved prefix of an unfinished group: the number of policy tokens, and their versions."""

    num_tokens: int
    oldest_version: int
    newest_version: int


# Outcomes


class Queued(Outcome, frozen=True):
    """The groups of the new prompts."""

    group_ids: tuple[int, ...]


class GrantedLease(Row, frozen=True):
    """One granted lease on a group.

    Attributes:
        group_id: The group.
        attempt: The number that fences off messages of earlier attempts.
        engine_version: u: the version that the engine serves, or the oldest token's version in the continued prefix.
        deadline: u + max_lag.
        owner: The client that holds the lease; opaque.
        request_id: The owner's request that the lease answers.
        expires_at: When the lease expires unless it is renewed, on the clock of ``now``.
        progress: The prefix that the attempt continues.
    """

    group_id: int
    attempt: int
    engine_version: int
    deadline: int
    owner: bytes = b""
    request_id: int = 0
    expires_at: float = 0.0
    progress: Progress | None = None

    @property
    def num_inherited(self) -> int:
        """Tokens of the prefix that the attempt continues."""
        return 0 if self.progress is None else self.progress.num_tokens


class Granted(Outcome, frozen=True):
    """The leases of one request; empty if no group is admitted now."""

    leases: tuple[GrantedLease, ...]


class Renewed(Outcome, frozen=True):
    """When the renewed lease expires; None if the owner no longer holds it."""

    expires_at: float | None


class Saved(Outcome, frozen=True):
    """The progress was recorded."""


class Reserved(Outcome, frozen=True):
    """The store that takes a group. Groups in ``evicted`` lose their stored trajectories, or their saved prefix."""

    store: int
    evicted: tuple[int, ...] = ()


class PutOutcome(Outcome, frozen=True):
    """The result of a put.

    Attributes:
        result: See `PutResult`.
        rank: Place of a stored group in the selection order; smallest first.
        reason: The filter that dropped the group.
        refusal: Why the put was refused; the sender gets this message.
    """

    result: PutResult
    rank: float = 0.0
    reason: str = ""
    refusal: str = ""


class Released(Outcome, frozen=True):
    """Whether a release ended a running lease, or was the report that a revoked attempt owed.

    ``is_dropped``: the group reached its maximum number of failures.
    """

    was_running: bool
    was_owed: bool
    is_dropped: bool = False


class TakenBack(Outcome, frozen=True):
    """The groups whose leases were revoked; their prompts are queued again, except for ``dropped`` groups.

    A dropped group was on too many workers that died. ``num_lost`` is the number of tokens that a dead owner lost; None
    if the owner may still report.
    """

    group_ids: tuple[int, ...]
    num_lost: int | None = None
    dropped: tuple[int, ...] = ()


class Lost(Outcome, frozen=True):
    """The lost groups. The batches of the versions in ``dissolved`` are planned again.

    The running groups in ``unsent`` lose their reservations. The groups in ``missing`` are lost when their batch is
    dissolved.
    """

    group_ids: tuple[int, ...]
    dissolved: tuple[int, ...]
    unsent: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


class AddedStore(Outcome, frozen=True):
    """The number of a store; ``is_new`` unless it was added before."""

    store: int
    is_new: bool


class DroppedStore(Outcome, frozen=True):
    """The groups that a dropped store held.

    The stored groups in ``group_ids`` are generated again. The running groups in ``reserved`` lose their reservations.
    ``is_new`` is false if the store was dropped before.
    """

    is_new: bool
    group_ids: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()


class Planned(Outcome, frozen=True):
    """A batch: the groups that version ``version`` consumes, in order.

    ``given_up`` are running groups whose leases the plan revokes; they are dropped if ``is_dropped``, else queued.
    """

    version: int
    group_ids: tuple[int, ...]
    given_up: tuple[int, ...] = ()
    is_dropped: bool = False


class Committed(Outcome, frozen=True):
    """The groups that the learner consumed."""

    version: int
    group_ids: tuple[int, ...]


class Rewound(Outcome, frozen=True):
    """Whether this rewind is new. Groups in ``group_ids`` lost a running attempt, their trajectories or a prefix."""

    is_new: bool
    group_ids: tuple[int, ...] = ()


class Enqueue(Command[Queued], frozen=True):
    """Queue prompts; known prompts are ignored."""

    group_ids: tuple[int, ...]


class LeaseGroups(Command[Granted], frozen=True):
    """Admit up to ``max_groups`` from the head of the queue on an engine that serves ``engine_version``."""

    engine_version: int
    max_groups: int
    request_id: int = 0


class Renew(Command[Renewed], frozen=True):
    """Extend a lease."""

    group_id: int
    attempt: int


class SavePrefix(Command[Saved], frozen=True):
    """Save the prefix of a running group; the group's next attempt may continue the prefix.

    Attributes:
        progress: The whole prefix, including the prefix that the attempt inherited.
        continued: False if the worker did not continue the inherited prefix but started again.
        num_bytes: Size of the prefix's frames.
    """

    group_id: int
    attempt: int
    progress: Progress
    continued: bool = True
    num_bytes: int = 0


class Reserve(Command[Reserved], frozen=True):
    """Reserve bytes for the trajectories of a running group before they are sent, on ``host`` if possible."""

    group_id: int
    attempt: int
    num_bytes: int
    host: str = ""


class Put(Command[PutOutcome], frozen=True):
    """Store a finished group; repeated puts store it once. ``continued`` and ``num_bytes`` are as in `SavePrefix`.

    ``digest`` is the digest of the trajectories if a store server holds them. ``num_left_out`` is the number of tokens
    in trajectories that the group leaves out because their reward failed.
    """

    summary: GroupSummary
    continued: bool = True
    num_bytes: int = 0
    digest: bytes = b""
    num_left_out: int = 0


class Release(Command[Released], frozen=True):
    """Return an unfinished lease, or report the tokens of a revoked attempt. Each attempt is counted once.

    Attributes:
        num_tokens: Tokens that the attempt wrote, including the prefix that it continued.
        reason: The account drops the tokens that are not saved under this reason.
        continued: As in `SavePrefix`.
        max_failures: 0 if the attempt did not fail. Otherwise the group is dropped, with all of its tokens, when it has
            failed this many times on any workers; before that its prompt is queued again.
    """

    group_id: int
    attempt: int
    num_tokens: int
    reason: str
    continued: bool = True
    max_failures: int = 0


class Expire(Command[TakenBack], frozen=True):
    """Revoke every expired lease."""


class TakeBack(Command[TakenBack], frozen=True):
    """Revoke every lease of an owner that is gone.

    ``num_generated`` is the number of tokens that a dead owner generated. The tokens that it did not report are lost,
    and its later reports do not count. None means that the owner is only silent. Repeating the command has no effect.
    """

    owner: bytes
    num_generated: int | None = None


class LoseGroups(Command[Lost], frozen=True):
    """The trajectories of stored or planned groups, or saved prefixes, are lost; the prompts are queued again.

    ``unsent`` names running groups and attempts whose store does not have their trajectories; the workers send these
    again. ``missing`` names planned groups that their store does not have. Their batch stays, because the learner's
    ranks may already have the groups.
    """

    group_ids: tuple[int, ...]
    unsent: tuple[tuple[int, int], ...] = ()
    missing: tuple[int, ...] = ()


class AddStore(Command[AddedStore], frozen=True):
    """A store server joins at ``address``; it serves the workers of ``host`` first."""

    address: str
    host: str


class DropStore(Command[DroppedStore], frozen=True):
    """A store is lost with its contents. A planned batch does not change: the learner's ranks may already have it."""

    store: int


class PlanBatch(Command[Planned], frozen=True):
    """Make the batch of ``version``."""

    version: int


class Commit(Command[Committed], frozen=True):
    """Mark the batch of ``version`` consumed."""

    version: int


class Rewind(Command[Rewound], frozen=True):
    """Take the learner back to the checkpoint of ``version``; its weights of later versions are lost.

    The ledger revokes every running attempt and drops every stored group, because these may hold tokens of a lost
    version. All unfinished prompts are queued. Prompts that finished after ``version`` may be queued again.

    Attributes:
        version: Learner version to continue from; at most the current version.
        incarnation: Number of the learner's new incarnation; the first rewind has 1.
        finished: Groups that were consumed or dropped before ``version``, as sorted ranges [start, end).
        tokens_trained: Policy tokens of the groups that were consumed before ``version``.
        lag_histogram: Pairs of a lag in learner steps and the number of these groups with that lag.
    """

    version: int
    incarnation: int
    finished: tuple[tuple[int, int], ...] = ()
    tokens_trained: int = 0
    lag_histogram: tuple[tuple[int, int], ...] = ()


class Revocation(Row, frozen=True):
    """A lease that its owner no longer holds."""

    owner: bytes
    group_id: int
    attempt: int


Frames = Sequence[Any]
"""Bytes that the buffer does not decode: a prompt, a prefix, or a trajectory group."""
LoggedFrames = Mapping[tuple[str, int], Frames | int]
"""Kind and group id to the frames of a command, or to their place in the journal; place 0 removes them."""


class CommandLog(Protocol):
    """Records commands with their outcomes before they take effect."""

    def record(self, command: Command[Any], outcome: Outcome, frames: LoggedFrames) -> None:
        """Write one command, its outcome, and its frames."""
