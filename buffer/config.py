"""Options of the replay buffer, with their defaults."""

from dataclasses import dataclass, field
from enum import StrEnum

from asyncrl.core.errors import check_bounds

from .rule import StalenessRule, find_filters, find_order


class OnStale(StrEnum):
    """Selects what the buffer does if the next batch must contain a group that is still running."""

    wait = "wait"
    requeue = "requeue"
    drop = "drop"


class Durability(StrEnum):
    """Selects whether the buffer's contents are only in a server's memory, or also on disk for a restarted server."""

    memory = "memory"
    disk = "disk"


class StoresOn(StrEnum):
    """Selects which servers store the trajectories until the learner trains on them."""

    auto = "auto"
    ledger = "ledger"
    hosts = "hosts"


_LOOPBACK = ("127.", "localhost", "::1", "[::1]")
_EVERY_ADDRESS = ("0.0.0.0", "*", "::", "[::]")

_MAY_BE_ZERO = {
    "max_lag": "use 0 for synchronous training",
    "max_filtered_steps": "0 sets no limit",
    "num_store_servers": "0 stores trajectories in the ledger's server",
    "max_memory_bytes": "0 sets no limit below buffer.max_stored_bytes",
    "restarts": "0 ends the run when a server dies",
    "max_worker_deaths": "0 drops no group",
}


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """Options of the replay buffer.

    Attributes:
        max_lag: Staleness bound in learner steps; 0 is synchronous training.
        max_uses: Largest number of learner steps that train on a group, at most ``max_lag + 1``. The lag of each use is
            at most ``max_lag``. A consumed group stays for a further use only if the learner can use it again by its
            deadline, in addition to all running and stored groups.
        on_stale: What happens to a running group that the next batch must contain: ``wait`` for the group, ``requeue``
            its prompt, or ``drop`` the group.
        order: Order in which a batch takes stored groups, as long as no group misses its deadline. One of ``fifo``,
            ``earliest_deadline``, ``freshest_first``, ``shortest_first``, ``reward_spread`` (largest variance of
            rewards first), ``file.py:function`` or ``module:function``. Your function maps a `GroupSummary` and the
            group's deadline to a number. The smallest number comes first.
        lease_s: The buffer revokes a lease that is not renewed for this number of seconds. Then it leases the prompt
            again.
        queue_size: Largest number of prompts in the queue. Enqueueing waits while the queue is full.
        heartbeat_s: Seconds between heartbeats of a rollout worker. A worker that is silent for four intervals counts
            as gone, and its groups are leased to other workers.
        max_stored_bytes: Bound on trajectories and saved prefixes, in bytes per server. A full buffer grants no leases
            until a batch leaves the buffer. The buffer evicts groups only if no batch is planned and no batch can be
            filled.
        max_memory_bytes: Bound on trajectories and saved prefixes in one server's memory, in bytes; 0 sets no bound.
            Trajectories that do not fit stay in the journal's files until the learner fetches them. Saved prefixes
            always stay in memory. Needs ``durability=disk``.
        max_prompt_bytes: Bound on the prompts whose groups are not stored yet, in bytes. Enqueueing waits at this
            bound.
        request_timeout_s: Deadline of a client's request, in seconds. The server may hold some requests for half of
            this time. Such a request has a deadline that is 1.5 times as long.
        filters: Dynamic-sampling filters: ``equal_rewards``, ``no_tokens``, ``file.py:function`` or
            ``module:function``. Your function gets a `GroupSummary` and returns whether to keep the group. The buffer
            counts the groups that each filter drops. Example: ``["equal_rewards"]``.
        max_filtered_steps: Plans fail when filters have dropped this number times B groups in a row, and no batch can
            be filled. B is the number of groups per learner step. The buffer warns from 4 times B groups on. 0 sets no
            limit.
        durability: ``memory`` loses the contents with the server. ``disk`` keeps every acknowledged put, lease and
            prompt in ``directory``, and a restarted server continues from them.
        directory: Directory of the files of ``durability=disk``. Example: ``outputs/quickstart/buffer``.
        restarts: Largest number of restarts of a ``disk`` server that died, or that did not answer for half of
            ``request_timeout_s``. The limit also holds for each store server. With ``durability=memory``, a
            restarted store server is empty, and its groups are generated again. With 0, the run ends when a server
            dies.
        max_worker_deaths: The buffer drops a prompt group (``worker_died``) when this many rollout workers have died
            or become silent while they held a lease on the group. If this number is 2 or more, a worker's death drops
            at most one group, because a worker leases at most one group that the next death would drop. 0 drops no
            group.
        hand_over: Whether a waiting worker takes over a running group, with the tokens so far, from a worker that is at
            least twice as slow. A group changes workers at most twice.
        max_message_bytes: Largest frame that a client may send, in bytes. The server closes a connection with a longer
            frame.
        max_requests_per_s: Largest number of requests per second that the server answers to one client. The server
            refuses further requests. A request that names leases counts once per lease.
        stores_on: Where the trajectories are. ``ledger``: in the ledger's server, or in ``num_store_servers`` processes
            on its host. ``hosts``: on one store server per host of rollout workers, so trajectories cross the network
            once. ``auto``: ``hosts`` if ``placement.num_nodes`` > 1 and ``num_store_servers`` is 0, otherwise
            ``ledger``.
        num_store_servers: Number of additional processes, on the ledger server's host, that hold the trajectories; 0
            keeps the trajectories in the ledger's server.
        keys: Directory of the run's CURVE keys. The run creates missing keys there. If empty, the run uses its own
            folder. A server with a ``host`` needs keys. Example: ``outputs/keys``.
        checkpoint: Folder of the checkpoint that a server without a journal begins from. The run sets this option when
            it resumes. Example: ``outputs/quickstart/checkpoints/buffer/v00000012``.
        earlier_epoch: Epoch of the journals in ``directory`` that a resumed run takes over. The run sets this option.
        lineage: A name that stays the same when the run resumes. The run sets this option. If empty, the epoch is used.
        epoch: Name of the run. The server refuses messages with another epoch. If empty, the server takes the epoch
            from the journal in ``directory``, or a new epoch.
        host: Address or interface that the server binds. Such a server needs ``keys``. If empty, the server binds no
            port, and listens on Unix sockets that only its own user may open. Example: ``10.0.0.1``, ``eth0``.
        socket_folder: Folder of the Unix sockets. The run sets this option. If empty, the server makes a temporary
            folder, and removes the folder at the end.
        advertised_host: Address at which clients reach the server; empty if clients can use ``host``.
        port: Port of requests; 0 selects a free port.
        bulk_port: Port of large payloads; 0 selects a free port.
    """

    max_lag: int = 2
    max_uses: int = 1
    on_stale: OnStale = OnStale.wait
    order: str = "earliest_deadline"
    lease_s: float = 60.0
    queue_size: int = 256
    heartbeat_s: float = 5.0
    max_stored_bytes: int = 2 * 1024**3
    max_memory_bytes: int = 0
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
    checkpoint: str = ""
    earlier_epoch: str = ""
    lineage: str = ""
    epoch: str = ""
    host: str = ""
    socket_folder: str = ""
    advertised_host: str = ""
    port: int = 0
    bulk_port: int = 0

    def __post_init__(self) -> None:
        check_bounds("buffer.", self, **{name: f">= 0; {meaning}" for name, meaning in _MAY_BE_ZERO.items()})
        times = ("lease_s", "heartbeat_s", "request_timeout_s")
        sizes = ("max_stored_bytes", "max_prompt_bytes", "max_message_bytes")
        check_bounds("buffer.", self, **dict.fromkeys((*times, *sizes, "queue_size", "max_requests_per_s"), "> 0"))
        StalenessRule(max_lag=self.max_lag, groups_per_step=1, max_uses=self.max_uses)
        self._check_stores()
        if self.host in _EVERY_ADDRESS and not self.advertised_host:
            raise ValueError(
                f"clients cannot connect to buffer.host={self.host}; set buffer.advertised_host, or buffer.host, to an "
                "address of this host"
            )
        find_order(self.order)
        find_filters(self.filters)
        for name in ("port", "bulk_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ValueError(f"buffer.{name} must be in 0..65535, got {getattr(self, name)}; 0 selects a free port")

    def _check_stores(self) -> None:
        if self.durability == Durability.disk and not self.directory:
            raise ValueError("buffer.durability=disk needs buffer.directory, got ''; name a directory on a local disk")
        if self.max_memory_bytes and self.durability != Durability.disk:
            raise ValueError(
                f"buffer.max_memory_bytes={self.max_memory_bytes} needs buffer.durability=disk, got "
                f"{self.durability.value}, because payloads above this limit stay only in the journal; set both "
                "options, or neither"
            )
        if self.stores_on is StoresOn.hosts and self.num_store_servers:
            raise ValueError(
                "buffer.num_store_servers must be 0 with buffer.stores_on=hosts, got "
                f"{self.num_store_servers}; set only one of the two options"
            )


def is_loopback(host: str) -> bool:
    """Return whether only clients on the same host can reach a server that binds ``host``."""
    return host in ("", "lo") or host.startswith(_LOOPBACK)
