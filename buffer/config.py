"""Options of the replay buffer: the only home of their defaults."""

from dataclasses import dataclass, field
from enum import StrEnum

from .selection import find_filters, find_order


class OnStale(StrEnum):
    """What happens to a group that is still being generated when the learner reaches its deadline."""

    wait = "wait"
    requeue = "requeue"
    drop = "drop"


class Durability(StrEnum):
    """What outlives the server."""

    memory = "memory"
    disk = "disk"


class StoresOn(StrEnum):
    """Where trajectories are kept until they are trained on."""

    auto = "auto"
    ledger = "ledger"
    hosts = "hosts"


_LOOPBACK = ("127.", "localhost", "::1", "[::1]")
_EVERY_ADDRESS = ("0.0.0.0", "*", "::", "[::]")

_MAY_BE_ZERO = {
    "max_lag": "use 0 for synchronous training",
    "max_filtered_steps": "0 goes on for ever",
    "first_version": "a new run begins at 0",
    "num_store_servers": "0 needs no others",
    "restarts": "0 ends the run where a server dies",
    "max_worker_deaths": "0 drops no group",
}


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """The replay buffer.

    Attributes:
        max_lag: Staleness bound in learner steps; 0 is synchronous training.
        on_stale: ``wait`` for the straggler, ``requeue`` its prompt at the new version, or ``drop`` it.
        order: Which stored groups a batch takes first, inside the window that keeps every deadline: ``fifo``,
            ``earliest_deadline``, ``freshest_first``, ``shortest_first``, or ``module:function`` of your own, which
            maps a `GroupSummary` and its deadline to a number, smallest first.
        lease_s: A lease not renewed for this long is taken back, and its prompt leased again.
        queue_size: Prompts queued ahead of admission; enqueueing waits while the queue is full.
        heartbeat_s: How often a producer says that it is there. One silent for four of these is gone, and what it holds
            is leased to others, however long its leases would still run.
        max_stored_bytes: Bound on trajectories and saved prefixes, in bytes, for each server. At it leases are refused
            until a batch leaves; nothing stored is dropped.
        max_prompt_bytes: Bound on prompts, in bytes, from before they are queued until their groups are stored; at it
            enqueueing waits. A stored group contains its prompt and counts against ``max_stored_bytes``.
        request_timeout_s: Deadline of a client's call, and how long the server may hold a call before it answers.
        filters: Dynamic-sampling filters: ``equal_rewards``, ``no_tokens``, or ``module:function`` of your own, which
            says of a `GroupSummary` whether to keep it. A group that one drops is counted under the filter's name and
            replaced by the next prompt. Example: ``["equal_rewards"]``.
        max_filtered_steps: Plans fail when filters have dropped this many steps' worth of groups one after another and
            kept none; a warning comes long before. 0 goes on for ever.
        durability: ``memory`` ends with the server; ``disk`` keeps every acknowledged put, lease and prompt in
            ``directory``, and a server started there again goes on from it.
        directory: Where ``disk`` keeps its file. Example: ``outputs/quickstart/buffer``.
        restarts: How often a run starts a server of ``disk`` again that died, or that answers nothing for half of
            ``request_timeout_s``. Each store server is started again as often, with ``memory`` too: then it is empty,
            and its groups are generated again. 0 ends the run.
        max_worker_deaths: A prompt group is dropped (``worker_died``) when so many rollout workers have died, or fallen
            silent, with a lease on it. A worker holds at most one group that the next death would drop, so that a
            prompt that kills its workers is told from those that were only there. 0 drops none.
        hand_over: Let a worker that waits take over a running group of a worker that is at least twice as slow, with
            what is written of it. A group changes hands at most twice. ``false`` leaves each group where it began.
        max_message_bytes: Largest frame a client may send; longer ones close its connection.
        max_requests_per_s: Requests of one client that are answered in a second; more are refused. A request that
            names leases counts once for each of them.
        stores_on: ``ledger``: in the ledger's own server, or in ``num_store_servers`` processes beside it. ``hosts``:
            on a store server on each host where rollout workers run, so that trajectories cross the network once, from
            there to the learner's ranks; the run places them. ``auto``: ``hosts`` where ``placement.num_nodes`` > 1 and
            ``num_store_servers`` is 0.
        num_store_servers: Further processes beside the ledger that hold the payloads; 0 keeps them in its own.
        keys: Directory of the run's CURVE keys, made there at the start where there are none; a run makes them in its
            own folder where this is empty. The server needs them for ``host``. Example: ``outputs/keys``. See
            `buffer.keys`.
        first_version: Learner version that the ledger begins at; the run sets it where it resumes a checkpoint.
        epoch: Names the run. Every message carries it, and a message of another run is refused. Empty takes the epoch
            of an earlier server in ``directory``, or a new one.
        host: Address or interface that the server binds, which needs ``keys``. Empty: the server listens on Unix
            sockets, in a folder that only its own user may open, and no port is bound. Example: ``10.0.0.1``, ``eth0``.
        socket_folder: Folder of the Unix sockets; the run sets it. Empty makes a folder with a random name in the
            temporary folder, and removes it at the end.
        advertised_host: Address by which clients reach ``host``; empty where that is one itself.
        port: Where requests go; 0 takes a free port.
        bulk_port: Where large payloads go; 0 takes a free port.
    """

    max_lag: int = 2
    on_stale: OnStale = OnStale.wait
    order: str = "earliest_deadline"
    lease_s: float = 60.0
    queue_size: int = 256
    heartbeat_s: float = 5.0
    max_stored_bytes: int = 2 * 1024**3
    max_prompt_bytes: int = 256 * 1024**2
    request_timeout_s: float = 30.0
    filters: list[str] = field(default_factory=list)
    max_filtered_steps: int = 100
    durability: Durability = Durability.memory
    directory: str = ""
    restarts: int = 3
    max_worker_deaths: int = 3
    hand_over: bool = True
    max_message_bytes: int = 256 * 1024**2
    max_requests_per_s: int = 50_000
    stores_on: StoresOn = StoresOn.auto
    num_store_servers: int = 0
    keys: str = ""
    first_version: int = 0
    epoch: str = ""
    host: str = ""
    socket_folder: str = ""
    advertised_host: str = ""
    port: int = 0
    bulk_port: int = 0

    def __post_init__(self) -> None:
        for name, meaning in _MAY_BE_ZERO.items():
            if getattr(self, name) < 0:
                raise ValueError(f"buffer.{name} must be >= 0, got {getattr(self, name)}; {meaning}")
        times = ("lease_s", "heartbeat_s", "request_timeout_s")
        sizes = ("max_stored_bytes", "max_prompt_bytes", "max_message_bytes")
        for name in (*times, *sizes, "queue_size", "max_requests_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"buffer.{name} must be > 0, got {getattr(self, name)}; see buffer/config.py")
        if self.durability == Durability.disk and not self.directory:
            raise ValueError("buffer.durability=disk needs buffer.directory, got ''; name a directory on a local disk")
        if self.stores_on is StoresOn.hosts and self.num_store_servers:
            raise ValueError(
                f"buffer.num_store_servers are beside the ledger, got {self.num_store_servers} with "
                "buffer.stores_on=hosts; leave one of them out"
            )
        if self.host in _EVERY_ADDRESS and not self.advertised_host:
            raise ValueError(
                f"buffer.host={self.host} is no address that a client can reach; set buffer.advertised_host to one of "
                "this host, or buffer.host itself"
            )
        find_order(self.order)
        find_filters(self.filters)
        for name in ("port", "bulk_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ValueError(f"buffer.{name} must be in 0..65535, got {getattr(self, name)}; 0 takes a free port")


def is_loopback(host: str) -> bool:
    """Whether ``buffer.host`` is reached from its own host only."""
    return host in ("", "lo") or host.startswith(_LOOPBACK)
