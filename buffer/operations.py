"""The operations that are not commands, their answers, and the pushes.

An operation is a request of a client. A command is an operation that the ledger decides and applies; `buffer.commands`
has the commands. A push is a message that a server sends without a request.

To add an operation, change three files. Define its answer and its record here, the handler ``on_<name>`` in
`buffer.service`, and a method that sends the operation in `buffer.role_clients`. The ledger's server itself sends some
operations to the store servers, in `buffer.store_links` and `buffer.checkpoint_parts`. `buffer.store_servers` handles
these operations.
"""

from typing import Annotated, Any

from msgspec import Meta

from asyncrl.core.types import BufferStats, WeightOffer

from .records import (
    CONTROLLER,
    EVERY_ROLE,
    INSPECTOR,
    LEARNER,
    LEDGER,
    MAX_REASON,
    ROLLOUT,
    Answer,
    Count,
    Int64,
    Key,
    Keys,
    Operation,
    Push,
    Seconds,
    Text,
)

# Answers that several operations share


class Done(Answer, frozen=True):
    """The operation is done."""


class NothingYet(Answer, frozen=True):
    """The server cannot answer yet. The client repeats the request, and logs ``warning`` if it is not empty."""

    warning: str = ""


class Failure(Answer, frozen=True):
    """A failure. The client raises the error class ``name`` of `asyncrl.core.errors` with this ``message``."""

    name: str
    message: str


class Totals(Answer, frozen=True):
    """The ledger's counts of groups, tokens and bytes."""

    stats: BufferStats


# Pushes


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
    """The server has free bytes again. The client may repeat the requests that failed with `StoreFull`."""


# Operations: the class of each operation follows the class of its answer


class Connected(Answer, frozen=True):
    """The epoch (name of the run) of a server, and the server's port for large payloads; 0 for a Unix socket."""

    epoch: Text
    bulk_port: Int64


class Connect(Operation[Connected], frozen=True):
    """Request a server's epoch (name of the run), and the server's port for large payloads."""

    roles = EVERY_ROLE


class Welcome(Answer, frozen=True):
    """The server's settings for clients, and the server's time.

    ``is_elsewhere`` is true if store servers hold the trajectories. ``now_ns`` is the server's time in nanoseconds.
    ``clock`` identifies the server's clock.
    """

    max_lag: int
    groups_per_step: int
    heartbeat_s: float
    is_elsewhere: bool
    clock: str
    now_ns: int


class Hello(Operation[Welcome], frozen=True):
    """Request the server's settings for clients.

    If ``produces`` is true, the request also registers the client as a rollout worker. A registered worker must send
    heartbeats.
    """

    roles = EVERY_ROLE
    produces: bool = False
    host: Text = ""


class RenewKeys(Operation[Done], frozen=True):
    """Make a server read the keys of its clients from disk again."""

    roles = CONTROLLER


class Stats(Operation[Totals], frozen=True):
    """Request the ledger's counts of groups, tokens and bytes."""

    roles = EVERY_ROLE


class Report(Answer, frozen=True):
    """The contents of a server as plain values, for `buffer.inspect`."""

    values: dict[str, Any]


class Inspect(Operation[Report], frozen=True):
    """Request a description of a server's contents, or of the group ``group_id`` if it is not -1."""

    roles = INSPECTOR | CONTROLLER
    group_id: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] = -1


class Loaded(Operation[Done], frozen=True, kw_only=True):
    """Report that the worker's engine serves the policy version ``version``, and that the load took ``seconds``."""

    roles = ROLLOUT
    version: Int64
    seconds: Seconds
    engine: Text
    incarnation: Int64 = 0


class Beat(Operation[Welcome], frozen=True, kw_only=True):
    """A rollout worker's heartbeat. ``generated`` is the number of tokens that the worker has generated so far."""

    roles = ROLLOUT
    serves: Loaded | None = None
    host: Text = ""
    generated: Count = 0


class Cancel(Operation[Done], frozen=True):
    """Cancel the request for leases with the id ``request``. Groups granted to that request go back to the queue."""

    roles = ROLLOUT
    request: Int64


class Leave(Operation[Done], frozen=True):
    """Release the leases of a worker that disconnects, except ``leases``. Unregister the worker if no lease is left.

    ``leases`` has (group id, attempt number) pairs. The worker has received these leases and not released them. They
    last until they expire, or until the buffer counts the worker as silent.
    """

    roles = ROLLOUT
    leases: Keys


class Offered(Answer, frozen=True):
    """The answer to `NextOffer`: weights that the worker's engine should load."""

    offer: WeightOffer


class NextOffer(Operation[Offered], frozen=True):
    """Wait for weights of version ``at_least`` or newer.

    If ``incarnation`` is not the current learner's incarnation, wait for weights of any version.
    """

    roles = ROLLOUT
    is_held = True
    at_least: Int64
    incarnation: Int64 = 0


class Fenced(Operation[Done], frozen=True):
    """Report that the worker's engine serves no policy version now."""

    roles = ROLLOUT


class Number(Answer, frozen=True):
    """A number. For `Offer`, the oldest offered version. For `Bury`, how many tokens the dead worker generated."""

    value: int


class Offer(Operation[Number], frozen=True, kw_only=True):
    """Offer weights to the engines, or report why a version was not published."""

    roles = LEARNER
    offer: WeightOffer | None = None
    failure: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    incarnation: Int64 = 0

    def __post_init__(self) -> None:
        if (self.offer is None) == (not self.failure):
            raise ValueError("an offer must have either weights, or the reason why no weights were published")


class Serving(Answer, frozen=True):
    """The answer to `Served`: the oldest policy version that any engine serves.

    ``seconds`` is the time of the slowest load of this version.
    """

    version: int
    seconds: float


class Served(Operation[Serving], frozen=True):
    """Wait until there are ``num_engines`` engines and all engines serve version ``at_least`` or newer."""

    roles = CONTROLLER
    is_held = True
    at_least: Int64
    num_engines: Int64


class Names(Answer, frozen=True):
    """The answer to `Pin` has the names of the pinned engines. The answer to `StoreWanted` has the name of a host."""

    names: tuple[str, ...]


class Pin(Operation[Names], frozen=True):
    """Keep ``num_engines`` engines on (pin them to) policy version ``version``, even if newer weights are offered.

    The answer comes when the set of pinned engines that serve ``version`` differs from ``known``.
    """

    roles = CONTROLLER
    is_held = True
    version: Int64
    num_engines: Int64
    known: tuple[Text, ...] = ()


class Unpin(Operation[Done], frozen=True):
    """End the effect of `Pin`: offer the newest version to all engines."""

    roles = CONTROLLER


class Bury(Operation[Number], frozen=True):
    """Declare a worker dead. ``worker`` is the worker's client id in hexadecimal digits.

    ``generated`` is the number of tokens that the worker has generated, as far as the sender knows.
    """

    roles = CONTROLLER
    worker: Annotated[str, Meta(pattern="^([0-9a-f]{2})*$", max_length=200)]
    generated: Count = 0


class StoreWanted(Operation[Names], frozen=True):
    """Wait until a worker connects from a host that is not in ``known``."""

    roles = CONTROLLER
    is_held = True
    known: tuple[Text, ...]


class Payloads(Answer, frozen=True):
    """The answer to `Fetch` from a server that holds the trajectories. The encoded trajectories follow this record.

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


class Fetch(Operation[Payloads | Places], frozen=True):
    """Fetch the trajectories of stored groups.

    A fetch from a store server also has the attempt number of each group in ``attempts``. ``read`` is the largest
    request id of the client's earlier fetches that were answered.
    """

    roles = LEARNER | CONTROLLER | INSPECTOR
    has_large_answer = True
    group_ids: tuple[Int64, ...]
    attempts: tuple[Int64, ...] = ()
    read: Int64 = 0

    def __post_init__(self) -> None:
        if len(set(self.group_ids)) != len(self.group_ids):
            raise ValueError("a fetch must not name a group twice")


class PutPayload(Operation[Done], frozen=True):
    """Store the payload (encoded trajectories) of an attempt on a store server."""

    roles = ROLLOUT
    group_id: Annotated[int, Meta(ge=0, lt=1 << 47)]
    attempt: Annotated[int, Meta(ge=0, lt=1 << 16)]


class Removed(Answer, frozen=True):
    """The answer to `Remove`: the store has dropped the payloads.

    ``disk_bytes`` is the size of the store's remaining payloads that are only on disk.
    """

    disk_bytes: int


class Remove(Operation[Removed], frozen=True):
    """Drop the payloads of the finished groups ``group_ids``, and the payloads of ended attempts.

    ``ended`` holds (group id, attempt number) pairs. The payloads of earlier attempts at these groups are dropped too.
    """

    roles = LEDGER
    group_ids: tuple[Int64, ...]
    ended: tuple[Key, ...] = ()


class Checkpointed(Answer, frozen=True, kw_only=True):
    """The size of a checkpoint, or of one server's files in a checkpoint.

    ``num_groups`` counts groups with trajectories. ``num_prefixes`` counts saved prefixes (tokens of unfinished
    groups). ``num_bytes`` is the size of these trajectories and prefixes in bytes.
    """

    num_groups: int = 0
    num_prefixes: int = 0
    num_bytes: int = 0


class SavePart(Operation[Checkpointed], frozen=True, kw_only=True):
    """Write a store server's payloads for the checkpoint ``key``. The names of the files begin with ``path``."""

    roles = LEDGER
    is_held = True
    key: Text
    path: Annotated[str, Meta(pattern="^/(.*/)?store[0-9]+$", max_length=4096)]


class Missing(Answer, frozen=True):
    """The answer to `Reconcile`: ids of groups that the store lacks.

    ``disk_bytes`` is the size of the store's payloads that are only on disk.
    """

    group_ids: tuple[int, ...]
    disk_bytes: int = 0


class Reconcile(Operation[Missing], frozen=True, kw_only=True):
    """Ask a store which payloads of ``attempts`` the store lacks.

    The store drops the payloads of ``finished`` groups and of ``ended`` attempts. ``attempts`` and ``ended`` hold
    (group id, attempt number) pairs. ``finished`` holds ranges of group ids. ``part`` is the path of the store's files
    in a checkpoint, or empty. The store first loads missing payloads from these files.
    """

    roles = LEDGER
    attempts: tuple[Key, ...]
    finished: tuple[Key, ...] = ()
    ended: tuple[Key, ...] = ()
    part: Annotated[str, Meta(max_length=4096)] = ""
