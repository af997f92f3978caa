"""The commands: operations that the ledger decides and applies.

A command is one record. A client sends the command. The server checks that the client's role may send it (``roles``),
and the ledger applies it. The journal stores the command and its outcome, which is the ledger's decision. A restarted
server applies the stored outcomes, and does not decide again.

To add a command, change four files. Define its outcome, its answer and its record here, ``_decide_<name>`` and
``_enact_<name>`` in `buffer.ledger`, the handler ``on_<name>`` in `buffer.service`, and a method that sends the command
in `buffer.role_clients`. `Expire` and `TakeBack` have no ``roles``: only the server itself applies these two commands.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from asyncrl.core.types import GroupSummary

from .operations import Checkpointed, Done, Totals
from .records import (
    CONTROLLER,
    MAX_COUNT,
    ROLLOUT,
    Answer,
    Command,
    Count,
    Int64,
    Key,
    Keys,
    LedgerOutcome,
    Operation,
    Row,
    Text,
    leaves,
)

# Prompts and leases


class Queued(LedgerOutcome, frozen=True):
    """The ids of the groups that were added to the queue."""

    group_ids: tuple[int, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """True if a prompt was added to the queue."""
        return bool(self.group_ids)


class Enqueued(Answer, frozen=True):
    """The answer to `Enqueue`: the prompts are queued.

    If the controller wants outcomes, ``outcomes`` has the metadata of the groups finished since the previous answer.
    """

    outcomes: tuple[GroupSummary, ...] = ()


class Enqueue(Command[Queued, Enqueued], frozen=True):
    """Queue prompts. The ledger ignores known prompts. ``counts`` has the number of frames of each prompt.

    After the first request with ``wants_outcomes``, the server keeps the metadata of newly finished groups until the
    next answer to `Enqueue`.
    """

    roles = CONTROLLER
    is_held = True
    group_ids: tuple[Int64, ...]
    counts: tuple[Int64, ...] = ()
    wants_outcomes: bool = False


class Progress(Row, frozen=True, kw_only=True):
    """How many policy tokens a group's saved prefix has, and the oldest and the newest version of these tokens."""

    num_tokens: Count
    oldest_version: Count
    newest_version: Count


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
        """Number of tokens in the saved prefix (the tokens of an earlier attempt) that the attempt continues."""
        return 0 if self.progress is None else self.progress.num_tokens


class Granted(LedgerOutcome, frozen=True, kw_only=True):
    """The leases that the ledger grants to one request.

    The ledger grants no lease if the queue is empty, if the buffer is full, or if the staleness rule forbids a lease.
    """

    leases: tuple[GrantedLease, ...]

    @property
    def is_recorded(self) -> bool:
        """True if a lease is granted."""
        return bool(self.leases)


class LeasedGroup(Row, frozen=True):
    """A lease (a worker's right to generate a group). The frames of the prompt and the saved prefix follow the record.

    The saved prefix holds the tokens of an earlier attempt. ``num_prefix_frames`` is -1 if the prefix was evicted or
    lost. Then the worker must generate the group from the beginning.
    """

    group_id: int
    attempt: int
    engine_version: int
    deadline: int
    num_prompt_frames: int
    num_prefix_frames: int

    @property
    def key(self) -> Key:
        """The (group id, attempt number) pair."""
        return self.group_id, self.attempt


class Leased(Answer, frozen=True):
    """The answer to `LeaseGroups`: the granted leases."""

    leases: tuple[LeasedGroup, ...]


class LeaseGroups(Command[Granted, Leased], frozen=True, kw_only=True):
    """Request leases on up to ``max_groups`` prompts from the head of the queue.

    ``engine_version`` is the policy version that the worker's engine serves. ``incarnation`` counts how often the
    learner had gone back to a checkpoint when it made the engine's weights. The server sets ``request_id``.
    """

    roles = ROLLOUT
    is_held = True
    has_large_answer = True
    engine_version: Int64
    max_groups: Int64
    incarnation: Int64 = 0
    request_id: Int64 = 0


class Renewed(LedgerOutcome, frozen=True, kw_only=True):
    """The new expiry time of the renewed leases.

    ``lost`` lists the leases that could not be renewed because they have ended, as (group id, attempt number) pairs.
    """

    expires_at: float
    lost: tuple[Key, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """Always False. The journal does not record renewals, because a restarted server renews all leases."""
        return False


class Renew(Command[Renewed, Done], frozen=True):
    """Extend leases. ``leases`` holds (group id, attempt number) pairs."""

    roles = ROLLOUT
    leases: Keys


class Saved(LedgerOutcome, frozen=True, kw_only=True):
    """The outcome of `SavePrefix`: the ledger accepts the saved prefix (the tokens that a running group has so far)."""

    @property
    def is_recorded(self) -> bool:
        """Always True, because a restarted server must know the saved prefixes."""
        return True


class SavePrefix(Command[Saved, Done], frozen=True, kw_only=True):
    """Save the tokens that a running group has so far (its prefix). The next attempt may continue these tokens.

    Attributes:
        progress: Token count and policy versions of the prefix, including tokens from earlier attempts.
        continued: False if the worker started again without the saved prefix of an earlier attempt.
        num_bytes: Size of the encoded prefix in bytes. The server sets this field.
        longest_response: Number of tokens of the longest sample; -1 if unknown.
    """

    roles = ROLLOUT
    group_id: Int64
    attempt: Int64
    progress: Progress
    continued: bool = True
    num_bytes: Int64 = 0
    longest_response: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = -1


class Released(LedgerOutcome, frozen=True, kw_only=True):
    """The effect of `Release`, the report of a worker whose attempt ended without storing the group.

    Attributes:
        was_running: Whether the worker still held the lease. The report then ends the lease.
        was_owed: Whether the lease had been revoked before, and the worker had not yet reported the attempt's tokens.
        is_dropped: Whether the group is dropped, because too many of its attempts failed.
    """

    was_running: bool
    was_owed: bool
    is_dropped: bool = False

    @property
    def is_recorded(self) -> bool:
        """True if the report ends a lease, or is the first report of a revoked attempt's number of tokens."""
        return self.was_running or self.was_owed


class Release(Command[Released, Released], frozen=True, kw_only=True):
    """Give back the lease of an unfinished group, or report the tokens of a revoked attempt.

    A repeated report has no effect.

    Attributes:
        num_tokens: Number of tokens of the attempt, including the saved tokens that the attempt continued.
        reason: Why the attempt ended. The tokens that were not saved count as dropped for this reason.
        continued: False if the worker started again without the saved prefix of an earlier attempt.
        max_failures: 0 if the attempt did not fail. Otherwise the group is dropped after this number of failed
            attempts. With fewer failures, the group is queued again.
    """

    roles = ROLLOUT
    group_id: Int64
    attempt: Int64
    num_tokens: Count
    reason: Text
    continued: bool = True
    max_failures: Count = 0


class TakenBack(LedgerOutcome, frozen=True, kw_only=True):
    """The leases that the ledger revokes, because the leases have expired, or because their worker is silent or dead.

    Attributes:
        group_ids: The groups whose leases are revoked. Their prompts are queued again, except those in ``dropped``.
        num_lost: Number of tokens that a dead worker generated but neither saved nor reported; None if no worker died.
        dropped: Groups that end, because too many workers died or fell silent while they held a lease on the group.
    """

    group_ids: tuple[int, ...]
    num_lost: int | None = None
    dropped: tuple[int, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """True if a lease is revoked or a worker died."""
        return bool(self.group_ids) or self.num_lost is not None


class Expire(Command[TakenBack, Done], frozen=True):
    """Revoke every expired lease. When a lease expires, the server applies this command. No client sends it."""


class TakeBack(Command[TakenBack, Done], frozen=True):
    """Revoke every lease of ``owner``, a worker that is silent or dead. A repeated command has no effect.

    ``num_generated`` is the number of tokens that a dead owner generated; None for a silent owner. The unreported
    tokens of a dead owner count as lost, and later reports of this owner are ignored.
    """

    owner: bytes
    num_generated: int | None = None


# Finished groups and their stores


class Reserved(LedgerOutcome, frozen=True, kw_only=True):
    """The ledger's choice of a store that has room for the trajectories of a running group.

    Attributes:
        store: Number of the store.
        evicted: Ids of the groups that lose their trajectories or saved prefix, because the store needs the space.
        is_choice: Whether the ledger chose among several stores. A restarted server must know the chosen store, because
            the worker may have sent the trajectories to this store. With a single store, the put repeats the
            reservation.
    """

    store: int
    evicted: tuple[int, ...] = ()
    is_choice: bool = False

    @property
    def is_recorded(self) -> bool:
        """True if the command evicts groups, or chooses among several stores. A restarted server must know this."""
        return bool(self.evicted) or self.is_choice


class Reservation(Answer, frozen=True):
    """The answer to `Reserve`.

    ``address`` is the address of the store server that reserved the bytes; empty if the run has no store servers. If
    the sender has lost the lease, ``is_held`` is false and no bytes are reserved.
    """

    is_held: bool = True
    address: str = ""


class Reserve(Command[Reserved, Reservation], frozen=True, kw_only=True):
    """Reserve bytes for the trajectories of a running group, in the store on ``host`` if possible."""

    roles = ROLLOUT
    is_held = True
    group_id: Int64
    attempt: Int64
    num_bytes: Int64
    host: Text = ""


class PutResult(StrEnum):
    """The possible results of a put (a finished group that a worker sends)."""

    stored = "stored"
    duplicate = "duplicate"
    filtered = "filtered"
    too_old = "too_old"
    late = "late"


class PutOutcome(LedgerOutcome, frozen=True, kw_only=True):
    """The ledger's decision about a put (a finished group that a worker sends).

    Attributes:
        rank: Sort key of a stored group. Batches take groups with a small sort key first.
        reason: Name of the filter that dropped the group.
        refusal: Why the put was refused, as a message to the sender.
    """

    result: PutResult
    rank: float = 0.0
    reason: str = ""
    refusal: str = ""

    @property
    def is_recorded(self) -> bool:
        """Always True. A restarted server must count the tokens of every put, including refused puts."""
        return True


class Put(Command[PutOutcome, Done], frozen=True, kw_only=True):
    """Store a finished group. A repeated command has no effect.

    Attributes:
        continued: False if the worker started again without the saved prefix of an earlier attempt.
        num_bytes: Size of the trajectories in bytes. If the run has no store servers, the buffer's server sets it.
        digest: XXH3 hash of the trajectories if a store server holds them.
        num_left_out: Number of tokens in trajectories that are left out of the group, because their reward failed.
    """

    roles = ROLLOUT
    summary: GroupSummary
    continued: bool = True
    num_bytes: Int64 = 0
    digest: bytes = b""
    num_left_out: Count = 0

    @property
    def key(self) -> Key:
        """The (group id, attempt number) pair."""
        return self.summary.group_id, self.summary.attempt


class Lost(LedgerOutcome, frozen=True, kw_only=True):
    """The effects of a loss of trajectories or saved prefixes.

    Attributes:
        group_ids: The groups that lose their trajectories or saved prefix now.
        dissolved: Versions of the learner steps whose batches are undone. These batches are planned again later.
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
        """True if the loss affects at least one group or batch."""
        return bool(self.group_ids or self.dissolved or self.unsent or self.missing)


class LoseGroups(Command[Lost, Done], frozen=True, kw_only=True):
    """Queue the prompts of groups again, because their trajectories or saved prefixes are lost.

    Clients may name only planned groups, in ``group_ids``. Only the server sets the other fields.

    Attributes:
        unsent: (group id, attempt number) pairs of leased groups. The ledger has reserved bytes for their trajectories
            in a store, but the store does not have the trajectories. The reserved bytes become free, and the workers
            send the trajectories again.
        missing: Planned groups that their store lacks. The batch stays, because the learner's ranks may already have
            these groups.
    """

    roles = CONTROLLER
    group_ids: tuple[Int64, ...]
    unsent: tuple[Key, ...] = ()
    missing: tuple[Int64, ...] = ()


class AddedStore(LedgerOutcome, frozen=True, kw_only=True):
    """The number of a store server that joins the buffer. ``is_new`` is false if the store had joined before."""

    store: int
    is_new: bool

    @property
    def is_recorded(self) -> bool:
        """True if the store is new."""
        return self.is_new


class AddStore(Command[AddedStore, AddedStore], frozen=True):
    """Add a store server at ``address``. The workers on the host ``host`` prefer this store."""

    roles = CONTROLLER
    address: Text
    host: Text


class DroppedStore(LedgerOutcome, frozen=True, kw_only=True):
    """The groups of a lost store server. ``is_new`` is false if the ledger had already recorded this loss.

    Stored groups in ``group_ids`` are generated again. Running groups in ``reserved`` lose their reserved bytes.
    """

    is_new: bool
    group_ids: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()

    @property
    def is_recorded(self) -> bool:
        """True if the ledger had not recorded the loss of this store before."""
        return self.is_new


class DropStore(Command[DroppedStore, DroppedStore], frozen=True):
    """Declare a store server lost. Planned batches stay, because the learner's ranks may already have fetched them."""

    roles = CONTROLLER
    store: Int64


# Batches


class Planned(LedgerOutcome, frozen=True, kw_only=True):
    """A batch: the ids of the groups that the learner step ``version`` trains on, in the order of the batch.

    The running groups in ``given_up`` lose their leases. If ``is_dropped``, these groups are dropped. Otherwise their
    prompts are queued again. ``is_new`` is false if the batch was planned before, or cannot be made yet. A batch that
    cannot be made yet has no groups.
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


class Batch(Answer, frozen=True):
    """The answer to `PlanBatch`: metadata of the batch's groups, in the order of the batch."""

    groups: tuple[GroupSummary, ...]


class PlanBatch(Command[Planned, Batch], frozen=True):
    """Choose the groups of the batch for the learner step ``version``, and wait until there are enough groups."""

    roles = CONTROLLER
    is_held = True
    version: Int64


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
        """True if the step consumed at least one group."""
        return bool(self.group_ids)


class Commit(Command[Committed, Totals], frozen=True):
    """Record that the learner step ``version`` has trained on its batch."""

    roles = CONTROLLER
    version: Int64


# Checkpoints, and going back to a checkpoint


class Rewound(LedgerOutcome, frozen=True, kw_only=True):
    """The effects on the groups when the learner goes back to a checkpoint.

    Attributes:
        is_new: False if the ledger had applied this command before.
        group_ids: Groups whose trajectories or saved prefix are dropped, because they have a token of a lost version.
        revoked: Groups whose running attempt was revoked.
        missing: Planned groups that no store holds.
        unfit: Groups that the options of a resumed run exclude. These groups cannot be consumed in time, or steps have
            already trained on them ``buffer.max_uses`` times.
        moved: (group id, new deadline, new sort key) of each kept group whose deadline or sort key changes. Batches
            take groups with a small sort key first.
    """

    is_new: bool
    group_ids: tuple[int, ...] = ()
    revoked: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    unfit: tuple[int, ...] = ()
    moved: tuple[tuple[int, int, float], ...] = ()

    @property
    def is_recorded(self) -> bool:
        """True if the ledger had not applied this command before."""
        return self.is_new

    @property
    def dropped(self) -> tuple[int, ...]:
        """Ids of the groups that lost their trajectories or saved prefix."""
        return tuple(dict.fromkeys((*self.group_ids, *self.missing, *self.unfit)))


class Rewind(Command[Rewound, Done], frozen=True, kw_only=True):
    """Record that the learner goes back to the checkpoint of ``version``. The weights of later versions are lost.

    The ledger revokes every running attempt. Stored groups and saved prefixes with a token of a lost version are
    dropped. The planned batches are undone. Prompts whose groups finished after the checkpoint may be queued again.

    ``incarnation`` counts how often the learner has gone back to a checkpoint, including this time.
    """

    roles = CONTROLLER
    version: Int64
    incarnation: Int64


class Resume(Command[Rewound, Done], frozen=True, kw_only=True):
    """Restore the ledger from a checkpoint of an earlier process of the run.

    The ledger keeps groups, drops groups and revokes leases in the same way as for `Rewind`. The learner's incarnation
    (how often the learner has gone back to a checkpoint) becomes 0.

    Attributes:
        version: Learner version to continue from. The steps before this version then count as committed.
        key: Key of the `Checkpoint`.
        tokens_generated: Number of policy tokens that the run generated up to the checkpoint. If the account has
            counted fewer tokens, the difference counts as dropped (``resume``).
    """

    roles = CONTROLLER
    version: Int64
    key: Text
    tokens_generated: Count


class Marked(LedgerOutcome, frozen=True, kw_only=True):
    """The outcome of `Checkpoint`. ``is_new`` is false if the ledger remembered this checkpoint before."""

    is_new: bool

    @property
    def is_recorded(self) -> bool:
        """True if the ledger did not remember the checkpoint before."""
        return self.is_new


class Checkpoint(Command[Marked, Checkpointed], frozen=True, kw_only=True):
    """Write a checkpoint of the buffer into ``folder``. The server answers when the folder is complete.

    Attributes:
        folder: A path that every store server can use. Example: ``/runs/a/checkpoints/buffer/v00000012``.
        version: Learner version of the ranks' checkpoint. The steps before this version are planned or committed.
        key: A random name of this checkpoint. A repeated request with the same key does not write the checkpoint again.
    """

    roles = CONTROLLER
    is_held = True
    folder: Annotated[str, Meta(pattern="^/(.*/)?v[0-9]{8,}$", max_length=4096)]
    version: Int64
    key: Annotated[str, Meta(min_length=1, max_length=200)]


OPERATIONS = [kind for kind in leaves(Operation) if kind.roles]
"""The operations that clients may send: most commands, and all operations of `buffer.operations`."""
