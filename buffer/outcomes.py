"""The outcomes that the ledger decides for its commands.

`buffer.journal` keeps each outcome with its command, so a restarted server applies outcomes and decides nothing.
"""

from enum import StrEnum

from .records import Count, Key, LedgerOutcome, Row


class PutResult(StrEnum):
    """The result of a put."""

    stored = "stored"
    duplicate = "duplicate"
    filtered = "filtered"
    too_old = "too_old"
    late = "late"


class Progress(Row, frozen=True, kw_only=True):
    """The number of policy tokens in the saved prefix of an unfinished group, and their oldest and newest version."""

    num_tokens: Count
    oldest_version: Count
    newest_version: Count


class Queued(LedgerOutcome, frozen=True):
    """The ids of the groups that were added to the queue."""

    group_ids: tuple[int, ...] = ()


class GrantedLease(Row, frozen=True, kw_only=True):
    """A granted lease.

    Attributes:
        attempt: Number of the attempt. Messages of earlier attempts have no effect.
        engine_version: u, the version of the engine, or of the oldest token in the continued prefix.
        deadline: u + max_lag, the last version that may consume the group.
        owner: The client that holds the lease; opaque.
        request_id: The owner's request that the lease answers.
        expires_at: Time when the lease expires, in seconds on the clock of the leases.
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
        """Number of tokens in the prefix that the attempt continues."""
        return 0 if self.progress is None else self.progress.num_tokens


class Granted(LedgerOutcome, frozen=True, kw_only=True):
    """The leases of one request; empty if no group is admitted."""

    leases: tuple[GrantedLease, ...]


class Renewed(LedgerOutcome, frozen=True, kw_only=True):
    """The expiry of the renewed leases. ``lost`` names the groups and attempts that their owner has lost."""

    expires_at: float
    lost: tuple[Key, ...] = ()


class Saved(LedgerOutcome, frozen=True, kw_only=True):
    """The saved prefix is recorded."""


class Reserved(LedgerOutcome, frozen=True, kw_only=True):
    """The store with the reserved bytes. Groups in ``evicted`` lose their trajectories or saved prefix."""

    store: int
    evicted: tuple[int, ...] = ()


class PutOutcome(LedgerOutcome, frozen=True, kw_only=True):
    """The result of a put.

    Attributes:
        rank: Position of a stored group in the selection order; smallest first.
        reason: The filter that dropped the group.
        refusal: Why the put was refused, as a message to the sender.
    """

    result: PutResult
    rank: float = 0.0
    reason: str = ""
    refusal: str = ""


class Released(LedgerOutcome, frozen=True, kw_only=True):
    """The effect of a release. It ended a running lease, or it was the owed report of a revoked attempt.

    ``is_dropped`` is true if the group had too many failures.
    """

    was_running: bool
    was_owed: bool
    is_dropped: bool = False


class TakenBack(LedgerOutcome, frozen=True, kw_only=True):
    """The groups with revoked leases. Their prompts are queued again, except those in ``dropped``.

    A group is dropped when too many of its workers have died. ``num_lost`` is the number of lost tokens of a dead
    owner; None for a silent owner.
    """

    group_ids: tuple[int, ...]
    num_lost: int | None = None
    dropped: tuple[int, ...] = ()


class Lost(LedgerOutcome, frozen=True, kw_only=True):
    """The lost groups. The batches of the versions in ``dissolved`` are planned again.

    Running groups in ``unsent`` lose their reservations. Groups in ``missing`` are lost when their batch is dissolved.
    """

    group_ids: tuple[int, ...]
    dissolved: tuple[int, ...]
    unsent: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


class AddedStore(LedgerOutcome, frozen=True, kw_only=True):
    """The number of a store. ``is_new`` is false for a known store."""

    store: int
    is_new: bool


class DroppedStore(LedgerOutcome, frozen=True, kw_only=True):
    """The groups of a dropped store. ``is_new`` is false if it was dropped before.

    Stored groups in ``group_ids`` are generated again. Running groups in ``reserved`` lose their reservations.
    """

    is_new: bool
    group_ids: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()


class Planned(LedgerOutcome, frozen=True, kw_only=True):
    """A batch: the groups of the learner step ``version``, in order.

    The plan revokes the leases of running groups in ``given_up``. If ``is_dropped``, it drops these groups. Otherwise
    it queues them.
    """

    version: int
    group_ids: tuple[int, ...]
    given_up: tuple[int, ...] = ()
    is_dropped: bool = False


class Committed(LedgerOutcome, frozen=True, kw_only=True):
    """The consumed groups. Those in ``again``, with their new ranks, stay stored for a further use."""

    version: int
    group_ids: tuple[int, ...]
    again: tuple[tuple[int, float], ...] = ()


class Rewound(LedgerOutcome, frozen=True, kw_only=True):
    """The effects of a rewind.

    Attributes:
        is_new: False if the ledger had applied this rewind before.
        group_ids: Groups that lost their trajectories or saved prefix, because they had a token of a lost version.
        revoked: Groups whose running attempt was revoked.
        missing: Planned groups that no store holds.
        unfit: Groups that cannot be consumed in time under the options of the resumed run.
        moved: Groups with another deadline and rank under the options of the resumed run.
    """

    is_new: bool
    group_ids: tuple[int, ...] = ()
    revoked: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    unfit: tuple[int, ...] = ()
    moved: tuple[tuple[int, int, float], ...] = ()

    @property
    def dropped(self) -> tuple[int, ...]:
        """Ids of the groups that lost their trajectories or saved prefix."""
        return tuple(dict.fromkeys((*self.group_ids, *self.missing, *self.unfit)))


class Marked(LedgerOutcome, frozen=True, kw_only=True):
    """A remembered checkpoint. ``is_new`` is false if the ledger had remembered it before."""

    is_new: bool
