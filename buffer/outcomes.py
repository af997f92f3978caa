"""The outcomes of commands. An outcome is the ledger's decision about a command.

`buffer.journal` keeps each outcome with its command, so a restarted server applies outcomes and decides nothing again.
"""

from enum import StrEnum

from .records import Count, Key, LedgerOutcome, Row


class PutResult(StrEnum):
    """What happens to a put (a finished group that a worker sends)."""

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

    @property
    def is_recorded(self) -> bool:
        """True if the queue has a new prompt."""
        return bool(self.group_ids)


class GrantedLease(Row, frozen=True, kw_only=True):
    """A granted lease (a worker's right to generate a group).

    Attributes:
        attempt: Number of the attempt that the lease begins. Messages of earlier attempts do not change the lease.
        engine_version: u, the policy version of the engine, or of the oldest token that the attempt continues.
        deadline: u + max_lag, the last learner version that may consume the group.
        owner: Id of the client that holds the lease.
        request_id: Id of the owner's request that is answered with this lease.
        expires_at: Time when the lease expires, in seconds on the buffer server's clock.
        progress: Token count and versions of the saved prefix that the attempt continues; None without a prefix.
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
    """The leases granted to one request. There are none if the queue is empty or no group may begin now."""

    leases: tuple[GrantedLease, ...]

    @property
    def is_recorded(self) -> bool:
        """True if a lease is granted."""
        return bool(self.leases)


class Renewed(LedgerOutcome, frozen=True, kw_only=True):
    """The new expiry time of the renewed leases.

    ``lost`` has the requested leases that the sender does not hold any more, as (group id, attempt number) pairs.
    """

    expires_at: float
    lost: tuple[Key, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """False: a restarted server renews all leases."""
        return False


class Saved(LedgerOutcome, frozen=True, kw_only=True):
    """The saved prefix (tokens of a running group so far) is accepted."""

    @property
    def is_recorded(self) -> bool:
        """True: the prefix belongs to the state."""
        return True


class Reserved(LedgerOutcome, frozen=True, kw_only=True):
    """The choice of a store for the trajectories of a running group, with room for their bytes.

    Attributes:
        store: Number of the store.
        evicted: Ids of the groups that lose their trajectories or saved prefix, because the store needs their room.
        is_choice: Whether the ledger chose among several stores. A restarted server must know the chosen store, because
            the worker may have sent the trajectories there. With a single store, the put repeats the reservation.
    """

    store: int
    evicted: tuple[int, ...] = ()
    is_choice: bool = False

    @property
    def is_recorded(self) -> bool:
        """True if a restarted server must know the evicted groups or the chosen store."""
        return bool(self.evicted) or self.is_choice


class PutOutcome(LedgerOutcome, frozen=True, kw_only=True):
    """The decision about a put (a finished group that a worker sends).

    Attributes:
        rank: Sort key of a stored group in the order in which batches take groups; smallest first.
        reason: Name of the filter that dropped the group.
        refusal: Why the put was refused, as a message to the sender.
    """

    result: PutResult
    rank: float = 0.0
    reason: str = ""
    refusal: str = ""

    @property
    def is_recorded(self) -> bool:
        """True, also for a refused put: the account counts its tokens."""
        return True


class Released(LedgerOutcome, frozen=True, kw_only=True):
    """The effect of a `Release`, a worker's report about an attempt without a result.

    Attributes:
        was_running: Whether the worker still held the lease. The report then ends the lease.
        was_owed: Whether the attempt's lease was revoked, and the ledger still waits for the attempt's tokens.
        is_dropped: Whether the group is dropped, because too many of its attempts failed.
    """

    was_running: bool
    was_owed: bool
    is_dropped: bool = False

    @property
    def is_recorded(self) -> bool:
        """True if the ledger did not know the end of the attempt."""
        return self.was_running or self.was_owed


class TakenBack(LedgerOutcome, frozen=True, kw_only=True):
    """Revoked leases: the leases have expired, or the worker that holds the leases is silent or dead.

    Attributes:
        group_ids: The groups whose leases are revoked. Their prompts are queued again, except those in ``dropped``.
        num_lost: Number of tokens that a dead worker generated and did not save or report; None if no worker died.
        dropped: Groups that end, because too many workers died or fell silent while they held a lease on the group.
    """

    group_ids: tuple[int, ...]
    num_lost: int | None = None
    dropped: tuple[int, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """True if a lease is revoked or a worker died."""
        return bool(self.group_ids) or self.num_lost is not None


class Lost(LedgerOutcome, frozen=True, kw_only=True):
    """The effects of lost trajectories or saved prefixes.

    Attributes:
        group_ids: The groups that lose their trajectories or saved prefix now.
        dissolved: Versions of the learner steps whose batches are undone, and planned again later.
        unsent: Leased groups. The ledger has reserved bytes for their trajectories in a store, but the store does not
            have the trajectories. The reserved bytes become free, and the workers send the trajectories again.
        missing: Planned groups whose trajectories no store has. A missing group counts as lost only if its batch is
            planned again, because the learner's ranks may have fetched the group already.
    """

    group_ids: tuple[int, ...]
    dissolved: tuple[int, ...]
    unsent: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """True if a group or a batch is lost."""
        return bool(self.group_ids or self.dissolved or self.unsent or self.missing)


class AddedStore(LedgerOutcome, frozen=True, kw_only=True):
    """The number of a store that joins. ``is_new`` is false if the store had joined before."""

    store: int
    is_new: bool

    @property
    def is_recorded(self) -> bool:
        """True if the store is new."""
        return self.is_new


class DroppedStore(LedgerOutcome, frozen=True, kw_only=True):
    """The groups of a dropped store. ``is_new`` is false if the store had been dropped before.

    Stored groups in ``group_ids`` are generated again. Running groups in ``reserved`` lose their reserved bytes.
    """

    is_new: bool
    group_ids: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """True if the loss of the store is new."""
        return self.is_new


class Planned(LedgerOutcome, frozen=True, kw_only=True):
    """A batch: the groups of the learner step ``version``, in order.

    The plan revokes the leases of running groups in ``given_up``. If ``is_dropped``, the plan drops these groups.
    Otherwise the plan queues their prompts again. ``is_new`` is false if the batch was planned before, or cannot be
    made yet. A batch that cannot be made yet has no groups.
    """

    version: int
    group_ids: tuple[int, ...]
    given_up: tuple[int, ...] = ()
    is_dropped: bool = False
    is_new: bool = True

    @property
    def is_recorded(self) -> bool:
        """True if the batch is new."""
        return self.is_new


class Committed(LedgerOutcome, frozen=True, kw_only=True):
    """The groups that the learner step ``version`` consumed.

    ``again`` has (group id, new sort key) pairs of the consumed groups that stay stored for a further step. Batches
    take groups with a small sort key first.
    """

    version: int
    group_ids: tuple[int, ...]
    again: tuple[tuple[int, float], ...] = ()

    @property
    def is_recorded(self) -> bool:
        """True if a group is consumed now."""
        return bool(self.group_ids)


class Rewound(LedgerOutcome, frozen=True, kw_only=True):
    """The effects of the learner's return to a checkpoint.

    Attributes:
        is_new: False if the ledger had applied this rewind before.
        group_ids: Groups that lost their trajectories or saved prefix, because they had a token of a lost version.
        revoked: Groups whose running attempt was revoked.
        missing: Planned groups that no store holds.
        unfit: Groups that the options of a resumed run exclude. These groups cannot be consumed in time, or steps have
            already trained on them ``buffer.max_uses`` times.
        moved: (group id, deadline, sort key) of groups whose deadline or sort key changes with the options of a resumed
            run. Batches take groups with a small sort key first.
    """

    is_new: bool
    group_ids: tuple[int, ...] = ()
    revoked: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    unfit: tuple[int, ...] = ()
    moved: tuple[tuple[int, int, float], ...] = ()

    @property
    def is_recorded(self) -> bool:
        """True if the return to the checkpoint is new."""
        return self.is_new

    @property
    def dropped(self) -> tuple[int, ...]:
        """Ids of the groups that lost their trajectories or saved prefix."""
        return tuple(dict.fromkeys((*self.group_ids, *self.missing, *self.unfit)))


class Marked(LedgerOutcome, frozen=True, kw_only=True):
    """A remembered checkpoint. ``is_new`` is false if the ledger remembered this checkpoint before."""

    is_new: bool

    @property
    def is_recorded(self) -> bool:
        """True if the checkpoint is new."""
        return self.is_new
