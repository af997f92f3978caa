"""Every message between the buffer's clients and servers: operations (requests), answers, and pushes.

A push is a message from a server that no request asked for.

The server refuses an operation if ``roles`` of the operation lacks the client's role. A `Command` is an operation that
the ledger decides. To add an operation, write a record here, a method ``on_<name>`` of the service, and a method of a
client that sends the operation.
"""

from typing import Annotated, Any

from msgspec import Meta

from asyncrl.core.types import BufferStats, GroupSummary, WeightOffer

from .outcomes import (
    AddedStore,
    Committed,
    DroppedStore,
    Granted,
    Lost,
    Marked,
    Planned,
    Progress,
    PutOutcome,
    Queued,
    Released,
    Renewed,
    Reserved,
    Rewound,
    Saved,
    TakenBack,
)
from .records import (
    MAX_COUNT,
    MAX_REASON,
    Answer,
    BufferRole,
    Command,
    Count,
    Int64,
    Key,
    Keys,
    Operation,
    Push,
    Row,
    Seconds,
    Text,
    leaves,
)

_ROLLOUT, _LEARNER, _CONTROLLER, _INSPECTOR, _LEDGER = (frozenset({role}) for role in BufferRole)
_EVERY = frozenset(BufferRole)


# Answers and pushes


class Done(Answer, frozen=True):
    """The operation is done."""


class NothingYet(Answer, frozen=True):
    """The server cannot answer yet. The client repeats the request, and logs ``warning`` if it is not empty."""

    warning: str = ""


class Failure(Answer, frozen=True):
    """A failure. The client raises the error class ``name`` of `asyncrl.core.errors` with this ``message``."""

    name: str
    message: str


class Connected(Answer, frozen=True):
    """The epoch (name of the run) of a server, and its port for large payloads. The port is 0 for a Unix socket."""

    epoch: Text
    bulk_port: Int64


class Welcome(Answer, frozen=True):
    """The server's settings for clients, and the server's time.

    ``is_elsewhere`` is true if store servers hold the trajectories. ``clock`` identifies the clock of ``now_ns``.
    """

    max_lag: int
    groups_per_step: int
    heartbeat_s: float
    is_elsewhere: bool
    clock: str
    now_ns: int


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


class Reservation(Answer, frozen=True):
    """The answer to `Reserve`.

    ``address`` is the store server with the reserved bytes, if the run has store servers. If the sender has lost the
    lease, ``is_held`` is false and nothing is reserved.
    """

    is_held: bool = True
    address: str = ""


class Batch(Answer, frozen=True):
    """The answer to `PlanBatch`: metadata of the batch's groups, in order."""

    groups: tuple[GroupSummary, ...]


class Totals(Answer, frozen=True):
    """The ledger's counts of groups, tokens and bytes."""

    stats: BufferStats


class Report(Answer, frozen=True):
    """The contents of a server as plain values, for `buffer.inspect`."""

    values: dict[str, Any]


class Payloads(Answer, frozen=True):
    """The answer to `Fetch` from a server that holds the trajectories. Their frames follow the record.

    ``counts`` has the number of frames of each group.
    """

    counts: tuple[Int64, ...]


class Places(Answer, frozen=True):
    """The answer to `Fetch` if store servers hold the trajectories.

    ``groups`` has one tuple per group: the index of the store in ``addresses``, the attempt number, and the digest of
    the trajectories.
    """

    addresses: tuple[str, ...]
    groups: tuple[tuple[int, int, bytes], ...]


class Offered(Answer, frozen=True):
    """The answer to `NextOffer`: weights that the worker's engine should load."""

    offer: WeightOffer


class Serving(Answer, frozen=True):
    """The answer to `Served`: the oldest policy version that any engine serves.

    ``seconds`` is the time of the slowest load of this version.
    """

    version: int
    seconds: float


class Names(Answer, frozen=True):
    """The answer to `Pin` (the names of engines) or to `StoreWanted` (the name of one host)."""

    names: tuple[str, ...]


class Number(Answer, frozen=True):
    """The answer to `Offer` (the oldest offered version) or to `Bury` (the worker's number of generated tokens)."""

    value: int


class Checkpointed(Answer, frozen=True, kw_only=True):
    """The size of a checkpoint, or of one server's files in a checkpoint.

    ``num_groups`` counts groups with trajectories. ``num_prefixes`` counts saved prefixes (tokens of unfinished
    groups). ``num_bytes`` is the size of these trajectories and prefixes in bytes.
    """

    num_groups: int = 0
    num_prefixes: int = 0
    num_bytes: int = 0


class Missing(Answer, frozen=True):
    """The answer to `Reconcile`: ids of groups that the store lacks.

    ``disk_bytes`` is the size of the store's payloads that are only on disk.
    """

    group_ids: tuple[int, ...]
    disk_bytes: int = 0


class Removed(Answer, frozen=True):
    """The answer to `Remove`: the store has dropped the payloads.

    ``disk_bytes`` is the size of the store's remaining payloads that are only on disk.
    """

    disk_bytes: int


class Revoked(Push, frozen=True):
    """The client has lost its lease on this group, and should stop the attempt."""

    group_id: int
    attempt: int


class HandOn(Push, frozen=True):
    """The buffer asks the client to hand these groups over to a faster worker."""

    groups: tuple[Key, ...]


class NewKeys(Push, frozen=True):
    """The client's key was replaced. The client reads its key file again and reconnects."""


class Space(Push, frozen=True):
    """Bytes have become free. The client may repeat the requests that did not fit."""


# Commands: operations that the ledger decides


class Enqueued(Answer, frozen=True):
    """The prompts are queued.

    If the controller wants outcomes, ``outcomes`` has the metadata of the groups finished since the previous answer.
    """

    outcomes: tuple[GroupSummary, ...] = ()


class Enqueue(Command[Queued, Enqueued], frozen=True):
    """Queue prompts. Known prompts are ignored. ``counts`` has the number of frames of each prompt.

    After the first request with ``wants_outcomes``, the server keeps metadata of the newest finished groups for
    later answers.
    """

    roles = _CONTROLLER
    is_held = True
    group_ids: tuple[Int64, ...]
    counts: tuple[Int64, ...] = ()
    wants_outcomes: bool = False


class LeaseGroups(Command[Granted, Leased], frozen=True, kw_only=True):
    """Request leases on up to ``max_groups`` prompts from the head of the queue.

    ``engine_version`` is the policy version that the worker's engine serves. ``incarnation`` counts how often the
    learner had gone back to a checkpoint when it made the engine's weights. The server sets ``request_id``.
    """

    roles = _ROLLOUT
    is_held = True
    has_large_answer = True
    engine_version: Int64
    max_groups: Int64
    incarnation: Int64 = 0
    request_id: Int64 = 0


class Renew(Command[Renewed, Done], frozen=True):
    """Extend leases, given as (group id, attempt number) pairs."""

    roles = _ROLLOUT
    leases: Keys


class SavePrefix(Command[Saved, Done], frozen=True, kw_only=True):
    """Save the tokens that a running group has so far (its prefix). The next attempt may continue them.

    Attributes:
        progress: Token count and policy versions of the prefix, including tokens from earlier attempts.
        continued: False if the worker started again without the saved prefix of an earlier attempt.
        num_bytes: Size of the encoded prefix in bytes; the server sets it.
        longest_response: Number of tokens of the longest sample; -1 if unknown.
    """

    roles = _ROLLOUT
    group_id: Int64
    attempt: Int64
    progress: Progress
    continued: bool = True
    num_bytes: Int64 = 0
    longest_response: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = -1


class Reserve(Command[Reserved, Reservation], frozen=True, kw_only=True):
    """Reserve bytes for the trajectories of a running group, in the store on ``host`` if possible."""

    roles = _ROLLOUT
    is_held = True
    group_id: Int64
    attempt: Int64
    num_bytes: Int64
    host: Text = ""


class Put(Command[PutOutcome, Done], frozen=True, kw_only=True):
    """Store a finished group. A repetition has no effect.

    Attributes:
        continued: False if the worker started again without the saved prefix of an earlier attempt.
        num_bytes: Size of the trajectories in bytes. If there are no store servers, the buffer's server sets this.
        digest: XXH3 hash of the trajectories if a store server holds them.
        num_left_out: Number of tokens in trajectories that are left out of the group, because their reward failed.
    """

    roles = _ROLLOUT
    summary: GroupSummary
    continued: bool = True
    num_bytes: Int64 = 0
    digest: bytes = b""
    num_left_out: Count = 0

    @property
    def key(self) -> Key:
        """The (group id, attempt number) pair."""
        return self.summary.group_id, self.summary.attempt


class Release(Command[Released, Released], frozen=True, kw_only=True):
    """Return the lease of an unfinished group, or report the tokens of a revoked attempt. Each attempt counts once.

    Attributes:
        num_tokens: Number of tokens of the attempt, including the saved tokens that it continued.
        reason: Why the attempt ended. The tokens that were not saved count as dropped for this reason.
        continued: False if the worker started again without the saved prefix of an earlier attempt.
        max_failures: 0 if the attempt did not fail. Otherwise the group is dropped after this number of failed
            attempts. With fewer failures, the group is queued again.
    """

    roles = _ROLLOUT
    group_id: Int64
    attempt: Int64
    num_tokens: Count
    reason: Text
    continued: bool = True
    max_failures: Count = 0


class Expire(Command[TakenBack, Done], frozen=True):
    """Revoke every expired lease. The server itself applies this command when a lease expires."""


class TakeBack(Command[TakenBack, Done], frozen=True):
    """Revoke every lease of ``owner``, a worker that is silent or dead. A repetition has no effect.

    ``num_generated`` is the number of tokens that a dead owner generated; None for a silent owner. The unreported
    tokens of a dead owner count as lost, and later reports of this owner do not count.
    """

    owner: bytes
    num_generated: int | None = None


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

    roles = _CONTROLLER
    group_ids: tuple[Int64, ...]
    unsent: tuple[Key, ...] = ()
    missing: tuple[Int64, ...] = ()


class AddStore(Command[AddedStore, AddedStore], frozen=True):
    """Add a store server at ``address``. The workers of ``host`` prefer this store."""

    roles = _CONTROLLER
    address: Text
    host: Text


class DropStore(Command[DroppedStore, DroppedStore], frozen=True):
    """Declare a store lost. Planned batches stay, because the learner's ranks may already have fetched them."""

    roles = _CONTROLLER
    store: Int64


class PlanBatch(Command[Planned, Batch], frozen=True):
    """Choose the groups of the batch for the learner step ``version``, and wait until there are enough groups."""

    roles = _CONTROLLER
    is_held = True
    version: Int64


class Commit(Command[Committed, Totals], frozen=True):
    """Record that the learner step ``version`` has trained on its batch."""

    roles = _CONTROLLER
    version: Int64


class Rewind(Command[Rewound, Done], frozen=True, kw_only=True):
    """Return the learner to the checkpoint of ``version``. Weights of later versions are lost.

    The ledger revokes every running attempt. Stored groups and saved prefixes with a token of a lost version are
    dropped. Batches are planned again. Prompts that finished after ``version`` may be queued again.

    ``incarnation`` counts the learner's returns to a checkpoint, including this one. The first return has the number 1.
    """

    roles = _CONTROLLER
    version: Int64
    incarnation: Int64


class Resume(Command[Rewound, Done], frozen=True, kw_only=True):
    """Restore the ledger from a checkpoint of an earlier process of the run.

    Groups are kept, dropped or revoked as in `Rewind`. The learner's incarnation (number of rewinds) becomes 0.

    Attributes:
        version: Learner version to continue from. The steps before this version then count as committed.
        key: Key of the `Checkpoint`.
        tokens_generated: Policy tokens that the run generated up to the checkpoint. Tokens that the account lacks count
            as dropped (``resume``).
    """

    roles = _CONTROLLER
    version: Int64
    key: Text
    tokens_generated: Count


class Checkpoint(Command[Marked, Checkpointed], frozen=True, kw_only=True):
    """Write everything that a resumed run needs into ``folder``. The answer comes when the folder is complete.

    Attributes:
        folder: A path that every store server can use. Example: ``/runs/a/checkpoints/buffer/v00000012``.
        version: Learner version of the ranks' checkpoint. The steps before this version are planned or committed.
        key: A random name of this checkpoint. A repeated request with the same key does not write the checkpoint again.
    """

    roles = _CONTROLLER
    is_held = True
    folder: Annotated[str, Meta(pattern="^/(.*/)?v[0-9]{8,}$", max_length=4096)]
    version: Int64
    key: Annotated[str, Meta(min_length=1, max_length=200)]


# The other operations


class Connect(Operation[Connected], frozen=True):
    """Request a server's epoch (name of the run), and its port for large payloads."""

    roles = _EVERY


class Hello(Operation[Welcome], frozen=True):
    """Request the server's settings for clients.

    The request of a producer (a client that generates groups) also registers the producer. A registered producer must
    send heartbeats.
    """

    roles = _EVERY
    produces: bool = False
    host: Text = ""


class RenewKeys(Operation[Done], frozen=True):
    """Make a server read the keys of its clients from disk again."""

    roles = _CONTROLLER


class Stats(Operation[Totals], frozen=True):
    """Request the ledger's counts of groups, tokens and bytes."""

    roles = _EVERY


class Inspect(Operation[Report], frozen=True):
    """Request a description of a server's contents, or of the group ``group_id`` if it is not -1."""

    roles = _INSPECTOR | _CONTROLLER
    group_id: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] = -1


class Loaded(Operation[Done], frozen=True, kw_only=True):
    """Report that the worker's engine serves the policy version ``version``, and that the load took ``seconds``."""

    roles = _ROLLOUT
    version: Int64
    seconds: Seconds
    engine: Text
    incarnation: Int64 = 0


class Beat(Operation[Welcome], frozen=True, kw_only=True):
    """A producer's heartbeat, with the version that the engine serves and the number of tokens generated so far."""

    roles = _ROLLOUT
    serves: Loaded | None = None
    host: Text = ""
    generated: Count = 0


class Cancel(Operation[Done], frozen=True):
    """Cancel the request for leases with the id ``request``. Groups granted to that request go back to the queue."""

    roles = _ROLLOUT
    request: Int64


class Leave(Operation[Done], frozen=True):
    """Release the leases of a worker that disconnects, except ``leases``. Unregister the worker if no lease is left.

    ``leases`` holds the (group id, attempt number) pairs of the leases that `WorkerClient.lease` has returned and the
    worker has not released. These leases last until they expire, or until the buffer counts the worker as silent.
    """

    roles = _ROLLOUT
    leases: Keys


class NextOffer(Operation[Offered], frozen=True):
    """Wait for weights of version ``at_least`` or newer.

    If ``incarnation`` is not the current learner's incarnation, wait for weights of any version.
    """

    roles = _ROLLOUT
    is_held = True
    at_least: Int64
    incarnation: Int64 = 0


class Fenced(Operation[Done], frozen=True):
    """Report that the worker's engine serves no policy version now."""

    roles = _ROLLOUT


class Offer(Operation[Number], frozen=True, kw_only=True):
    """Offer weights to the engines, or report why a version was not published."""

    roles = _LEARNER
    offer: WeightOffer | None = None
    failure: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    incarnation: Int64 = 0

    def __post_init__(self) -> None:
        if (self.offer is None) == (not self.failure):
            raise ValueError("an offer must have either weights, or the reason why no weights were published")


class Served(Operation[Serving], frozen=True):
    """Wait until there are ``num_engines`` engines and all engines serve version ``at_least`` or newer."""

    roles = _CONTROLLER
    is_held = True
    at_least: Int64
    num_engines: Int64


class Pin(Operation[Names], frozen=True):
    """Keep ``num_engines`` engines on the policy version ``version``, even if newer weights are offered.

    Wait until the set of pinned engines that serve ``version`` differs from ``known``.
    """

    roles = _CONTROLLER
    is_held = True
    version: Int64
    num_engines: Int64
    known: tuple[Text, ...] = ()


class Unpin(Operation[Done], frozen=True):
    """End the effect of `Pin`: offer the newest version to all engines."""

    roles = _CONTROLLER


class Bury(Operation[Number], frozen=True):
    """Declare a worker dead. ``worker`` is the worker's client id in hexadecimal digits.

    ``generated`` is the number of tokens that the worker has generated, as far as the sender knows.
    """

    roles = _CONTROLLER
    worker: Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=200)]
    generated: Count = 0


class StoreWanted(Operation[Names], frozen=True):
    """Wait until a worker connects from a host that is not in ``known``."""

    roles = _CONTROLLER
    is_held = True
    known: tuple[Text, ...]


class Fetch(Operation[Payloads | Places], frozen=True):
    """Fetch the trajectories of stored groups.

    A fetch from a store server also has the attempt number of each group in ``attempts``. ``read`` is the largest
    request id of a fetch whose answer the client has received.
    """

    roles = _LEARNER | _CONTROLLER | _INSPECTOR
    has_large_answer = True
    group_ids: tuple[Int64, ...]
    attempts: tuple[Int64, ...] = ()
    read: Int64 = 0

    def __post_init__(self) -> None:
        if len(set(self.group_ids)) != len(self.group_ids):
            raise ValueError("a fetch must not name a group twice")


class PutPayload(Operation[Done], frozen=True):
    """Store the payload of an attempt on a store server."""

    roles = _ROLLOUT
    group_id: Annotated[int, Meta(ge=0, lt=1 << 47)]
    attempt: Annotated[int, Meta(ge=0, lt=1 << 16)]


class Remove(Operation[Removed], frozen=True):
    """Drop the payloads of the finished groups ``group_ids``, and the payloads of ended attempts.

    ``ended`` holds (group id, attempt number) pairs. Earlier attempts at the same group have ended too.
    """

    roles = _LEDGER
    group_ids: tuple[Int64, ...]
    ended: tuple[Key, ...] = ()


class SavePart(Operation[Checkpointed], frozen=True, kw_only=True):
    """Write a store server's payloads for the checkpoint ``key``. The names of the files begin with ``path``."""

    roles = _LEDGER
    is_held = True
    key: Text
    path: Annotated[str, Meta(pattern="^/(.*/)?store[0-9]+$", max_length=4096)]


class Reconcile(Operation[Missing], frozen=True, kw_only=True):
    """Ask which of the ``attempts`` a store lacks. Drop the payloads of ``finished`` groups and ``ended`` attempts.

    ``attempts`` and ``ended`` hold (group id, attempt number) pairs. ``finished`` holds ranges of group ids. ``part``
    is the path of the store's files in a checkpoint, or empty. The store first loads missing payloads from these files.
    """

    roles = _LEDGER
    attempts: tuple[Key, ...]
    finished: tuple[Key, ...] = ()
    ended: tuple[Key, ...] = ()
    part: Annotated[str, Meta(max_length=4096)] = ""


OPERATIONS = [kind for kind in leaves(Operation) if kind.roles]
"""The operations that clients may send."""
