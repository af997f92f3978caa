"""What may happen to the ledger: commands, and the outcome that the ledger decides for each.

Both are frozen records of plain values. `buffer.journal` writes them side by side, so that a server that starts again
applies the outcomes and decides nothing anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from asyncrl.core.types import GroupSummary


class PutResult(StrEnum):
    """What became of a put."""

    stored = "stored"
    duplicate = "duplicate"
    filtered = "filtered"
    too_old = "too_old"
    late = "late"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What the ledger knows of a saved, unfinished group: tokens that the policy wrote, and their versions."""

    num_tokens: int
    oldest_version: int
    newest_version: int


# Outcomes


@dataclass(frozen=True, kw_only=True, slots=True)
class Queued:
    """The prompts that were new."""

    group_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantedLease:
    """One group that begins.

    Attributes:
        group_id: The group.
        attempt: Its fence.
        engine_version: u: what the engine serves, or the version of the oldest token that it continues.
        deadline: u + max_lag.
        owner: Who holds the lease; opaque.
        request_id: Which of the owner's requests it answers.
        expires_at: When it runs out unless renewed, on the clock of ``now``.
        progress: The prefix that it continues.
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
        """Tokens of the prefix that it continues."""
        return 0 if self.progress is None else self.progress.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Granted:
    """The leases of one request; none where nothing is admitted now."""

    leases: tuple[GrantedLease, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """When the lease runs out now; None where it is no longer held."""

    expires_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """The progress was noted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """Which store takes a group; ``evicted`` give way: their trajectories if stored, else their saved prefixes."""

    store: int
    evicted: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PutOutcome:
    """What became of a put.

    Attributes:
        result: See `PutResult`.
        rank: Place in the selection order, where it was stored; smallest first.
        reason: The filter that dropped it.
        refusal: Why it was refused, for its sender.
    """

    result: PutResult
    rank: float = 0.0
    reason: str = ""
    refusal: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """What a release did: it ended the running lease, or it was the report that a revoked attempt owed.

    ``is_dropped``: it had failed once too often.
    """

    was_running: bool
    was_owed: bool
    is_dropped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenBack:
    """The groups whose leases were revoked; their prompts are queued again.

    Those that are ``dropped`` are not: they were present at too many deaths. ``num_lost`` tokens of an owner that died
    are counted as lost, None if it may still report.
    """

    group_ids: tuple[int, ...]
    num_lost: int | None = None
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """The groups that were lost; ``dissolved`` are the versions whose batches are planned anew.

    ``unsent`` are the running groups whose reservations are void; ``missing`` are lost when their batch is dissolved.
    """

    group_ids: tuple[int, ...]
    dissolved: tuple[int, ...]
    unsent: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedStore:
    """The number of a store; ``is_new`` unless it was added before."""

    store: int
    is_new: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedStore:
    """What went with a store: ``group_ids`` of stored groups, generated again, ``reserved`` of those on their way.

    ``is_new`` is false for a store that was dropped before.
    """

    is_new: bool
    group_ids: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A batch: the groups that version ``version`` consumes, in order.

    ``given_up`` are running groups whose leases were revoked for it; they are dropped if ``is_dropped``, else queued.
    """

    version: int
    group_ids: tuple[int, ...]
    given_up: tuple[int, ...] = ()
    is_dropped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The groups that the learner consumed."""

    version: int
    group_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewound:
    """Whether the learner was taken back, or had been already; ``group_ids`` lost an attempt, or what was saved."""

    is_new: bool
    group_ids: tuple[int, ...] = ()


Outcome = (
    Queued
    | Granted
    | Renewed
    | Saved
    | Reserved
    | PutOutcome
    | Released
    | TakenBack
    | Lost
    | AddedStore
    | DroppedStore
    | Planned
    | Committed
    | Rewound
)
"""What was decided."""
Result = TypeVar("Result", covariant=True)


class Command(Generic[Result]):
    """Something asked of the ledger; ``Result`` is the type of its outcome.

    Where a command has an ``owner`` it is the client that sends it; None is trusted and not checked.
    """

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Enqueue(Command[Queued]):
    """Queue prompts; those that are known already are left out."""

    group_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseGroups(Command[Granted]):
    """Admit up to ``max_groups`` from the head of the queue on an engine that serves ``engine_version``."""

    engine_version: int
    max_groups: int
    owner: bytes = b""
    request_id: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Renew(Command[Renewed]):
    """Extend a lease."""

    group_id: int
    attempt: int
    owner: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePrefix(Command[Saved]):
    """Note what a running group has so far; its next attempt may continue it.

    Attributes:
        progress: All of it, including the prefix that it began with.
        continued: False if its worker did not take that prefix, and began afresh.
        num_bytes: What its frames take.
    """

    group_id: int
    attempt: int
    progress: Progress
    continued: bool = True
    owner: bytes | None = None
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve(Command[Reserved]):
    """Make room for the trajectories of a running group, before they are sent or put; on ``host`` where it has any."""

    group_id: int
    attempt: int
    num_bytes: int
    owner: bytes | None = None
    host: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Put(Command[PutOutcome]):
    """Store a finished group, once however often it is sent; ``continued`` and ``num_bytes`` as in `SavePrefix`.

    ``digest`` is that of its trajectories, where a store server holds them. ``num_left_out`` tokens were written for
    trajectories that are not part of it, because their reward failed.
    """

    summary: GroupSummary
    continued: bool = True
    owner: bytes | None = None
    num_bytes: int = 0
    digest: bytes = b""
    num_left_out: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Release(Command[Released]):
    """Give a lease back unfinished, or report what a revoked attempt had written; counted once.

    Attributes:
        num_tokens: What the attempt has written, including the prefix that it continued.
        reason: What the tokens that are not saved are dropped for.
        continued: As in `SavePrefix`.
        max_failures: Where the attempt has failed, so many failures of the group drop it with all of its tokens, on
            whichever workers they were; 0 if it has not failed. Otherwise its prompt is queued again.
    """

    group_id: int
    attempt: int
    num_tokens: int
    reason: str
    continued: bool = True
    owner: bytes | None = None
    max_failures: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Expire(Command[TakenBack]):
    """Take back every lease that has run out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeBack(Command[TakenBack]):
    """Take back every lease of an owner that is gone.

    ``num_generated`` are the tokens of an owner that has ended for certain: what it has not reported of them is lost,
    and nothing that it reports later counts. None for an owner that is only silent. Burying it again changes nothing.
    """

    owner: bytes
    num_generated: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoseGroups(Command[Lost]):
    """The trajectories of stored or planned groups are gone, and their prompts are queued again; or saved prefixes.

    ``unsent`` are running groups and attempts whose reserved trajectories are not in their store: they are sent again.
    ``missing`` are planned groups that are not in their store. Their batch stays, for its ranks may have them.
    """

    group_ids: tuple[int, ...]
    unsent: tuple[tuple[int, int], ...] = ()
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AddStore(Command[AddedStore]):
    """A store server joins, at ``address``, for the workers of ``host`` first."""

    address: str
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DropStore(Command[DroppedStore]):
    """A store is gone for good, with all that it held. A planned batch stays as it is: its ranks may have it."""

    store: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBatch(Command[Planned]):
    """Make the batch of ``version``."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit(Command[Committed]):
    """Mark the batch of ``version`` consumed."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewind(Command[Rewound]):
    """Take the learner back to ``version``, where a checkpoint stands: its weights of later versions are lost.

    No attempt that runs is accepted any more, and what is stored is dropped: it may hold tokens of such a version. All
    unfinished prompts are queued; those that were finished since then may be queued again.

    Attributes:
        version: Learner version to go on from; no later than the learner's.
        incarnation: Which life of the learner begins: 1 for the first that follows another.
        finished: Groups that were consumed or dropped before ``version``, as sorted ranges [start, end).
        tokens_trained: Policy tokens that this ledger's groups consumed before ``version`` had.
        lag_histogram: Lag in learner steps and number of these groups.
    """

    version: int
    incarnation: int
    finished: tuple[tuple[int, int], ...] = ()
    tokens_trained: int = 0
    lag_histogram: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Revocation:
    """A lease that its owner no longer holds."""

    owner: bytes
    group_id: int
    attempt: int


Frames = Sequence[Any]
"""Bytes that the buffer passes on unopened: a prompt, a prefix, a trajectory group."""
LoggedFrames = Mapping[tuple[str, int], Frames | int]
"""Kind and group id to the frames that belong to a command, or to their place in the journal; 0 takes them out."""


class CommandLog(Protocol):
    """Where commands are written, with their outcomes, before they take effect."""

    def record(self, command: Command[Any], outcome: Outcome, frames: LoggedFrames) -> None:
        """Write one command, its outcome, and the frames that belong to it."""
