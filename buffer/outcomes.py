"""The outcomes that the ledger decides for its commands. `buffer.journal` keeps each outcome with its command.

A restarted server applies the outcomes of the journal and decides nothing.
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
    """The saved prefix of an unfinished group: the number of policy tokens, and their versions."""

    num_tokens: Count
    oldest_version: Count
    newest_version: Count


class Queued(LedgerOutcome, frozen=True):
    """The groups of the new prompts."""

    group_ids: tuple[int, ...] = ()


class GrantedLease(Row, frozen=True, kw_only=True):
    """One granted lease on a group.

    Attributes:
        group_id: The group.
        attempt: Number of the attempt; messages of earlier attempts have no effect.
        engine_version: u. The version that the engine serves, or the version of the oldest token in the continued
            prefix.
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
        """Number of tokens of the prefix that the attempt continues."""
        return 0 if self.progress is None else self.progress.num_tokens


class Granted(LedgerOutcome, frozen=True, kw_only=True):
    """The leases of one request. Empty if no group is admitted now."""

    leases: tuple[GrantedLease, ...]


class Renewed(LedgerOutcome, frozen=True, kw_only=True):
    """The expiry of the renewed leases. ``lost`` names the groups and attempts that their owner no longer holds."""

    expires_at: float
    lost: tuple[Key, ...] = ()


class Saved(LedgerOutcome, frozen=True, kw_only=True):
    """The progress was recorded."""


class Reserved(LedgerOutcome, frozen=True, kw_only=True):
    """The store with the reserved bytes of a group.

    Groups in ``evicted`` lose their trajectories or their saved prefix.
    """

    store: int
    evicted: tuple[int, ...] = ()


class PutOutcome(LedgerOutcome, frozen=True, kw_only=True):
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


class Released(LedgerOutcome, frozen=True, kw_only=True):
    """Whether a release ended a running lease, or was the owed report of a revoked attempt.

    ``is_dropped``: the group reached its maximum number of failures.
    """

    was_running: bool
    was_owed: bool
    is_dropped: bool = False


class TakenBack(LedgerOutcome, frozen=True, kw_only=True):
    """The groups whose leases were revoked. Their prompts are queued again, except those of the ``dropped`` groups.

    A group is dropped when too many of its workers have died. ``num_lost`` is the number of tokens that a dead owner
    lost; None if the owner may still report.
    """

    group_ids: tuple[int, ...]
    num_lost: int | None = None
    dropped: tuple[int, ...] = ()


class Lost(LedgerOutcome, frozen=True, kw_only=True):
    """The lost groups. The batches of the versions in ``dissolved`` are planned again.

    The running groups in ``unsent`` lose their reservations. The groups in ``missing`` are lost when their batch is
    dissolved.
    """

    group_ids: tuple[int, ...]
    dissolved: tuple[int, ...]
    unsent: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


class AddedStore(LedgerOutcome, frozen=True, kw_only=True):
    """The number of a store. ``is_new`` is false if the store was added before."""

    store: int
    is_new: bool


class DroppedStore(LedgerOutcome, frozen=True, kw_only=True):
    """The groups of a dropped store.

    The stored groups in ``group_ids`` are generated again. The running groups in ``reserved`` lose their reservations.
    ``is_new`` is false if the store was dropped before.
    """

    is_new: bool
    group_ids: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()


class Planned(LedgerOutcome, frozen=True, kw_only=True):
    """A batch: the groups that the learner step of ``version`` consumes, in order.

    ``given_up`` has the running groups whose leases the plan revokes. They are dropped if ``is_dropped`` is true, else
    queued.
    """

    version: int
    group_ids: tuple[int, ...]
    given_up: tuple[int, ...] = ()
    is_dropped: bool = False


class Committed(LedgerOutcome, frozen=True, kw_only=True):
    """The groups that the learner consumed. Those in ``again`` (with their new ranks) stay stored for a further use."""

    version: int
    group_ids: tuple[int, ...]
    again: tuple[tuple[int, float], ...] = ()


class Rewound(LedgerOutcome, frozen=True, kw_only=True):
    """What a rewind dropped.

    Attributes:
        is_new: False if the ledger had applied this rewind before.
        group_ids: Groups that lost their trajectories or a saved prefix, because a token is of a lost version.
        revoked: Groups whose running attempt was revoked.
        missing: Planned groups whose trajectories no store has.
        unfit: Groups that cannot be consumed in time under the options of a resumed run.
        moved: Groups with another deadline and rank under these options.
    """

    is_new: bool
    group_ids: tuple[int, ...] = ()
    revoked: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    unfit: tuple[int, ...] = ()
    moved: tuple[tuple[int, int, float], ...] = ()

    @property
    def dropped(self) -> tuple[int, ...]:
        """Groups that lost their trajectories or a saved prefix."""
        return tuple(dict.fromkeys((*self.group_ids, *self.missing, *self.unfit)))


class Marked(LedgerOutcome, frozen=True, kw_only=True):
    """The ledger remembers a checkpoint. ``is_new`` is false if the ledger had remembered it before."""

    is_new: bool
