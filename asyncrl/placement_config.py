"""Options of the Ray cluster and of the places that a run's workers take there: the only home of their defaults."""

from dataclasses import dataclass, field
from enum import StrEnum

LEARNER_POOL = "learner"
"""The pool of the actor, and of every role that is placed nowhere else."""

RAY_SETS_DEVICES = {f"RAY_EXPERIMENTAL_NOSET_{runtime}_VISIBLE_DEVICES": "" for runtime in ("CUDA", "HIP", "ROCR")}
"""Environment in which Ray restricts a process to its own GPUs, even if a user's shell says otherwise."""

# One thread per process: on a machine with few cores, threads that compete for them stop every process. The children of
# a worker that exits end by themselves, after they have removed what it left; Ray would kill them first.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_kill_child_processes_on_worker_exit": "0",
    **RAY_SETS_DEVICES,
}
"""Environment of the workers of every run."""


class Strategy(StrEnum):
    """How workers are shared out over nodes: as few nodes as will do, or as many as there are."""

    pack = "pack"
    spread = "spread"


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """What each worker takes of the cluster, and where; a learner rank takes one GPU, an engine ``tp_size`` of them.

    Attributes:
        num_nodes: Nodes of the Ray cluster that must be there when the run starts, unless ``autoscale`` brings them. 1
            is the node where it is started, alone; with more, the run uses all nodes; see ``docs/several_hosts.md``.
        ranks_per_node: Learner ranks on one node; a pool takes as many nodes as that makes. 0: a pool is on one node.
        engines_per_node: Engines on one node. 0: wherever there is room, in the order of ``strategy``.
        strategy: ``pack`` takes as few nodes as will do, and may put ranks beside engines. ``spread`` takes as many as
            there are: each node's share of ranks or engines has a node of its own, apart from others of its kind.
        learner_labels: Labels that the nodes of the learner must have, as ``ray start --labels`` gives them.
        engine_labels: The same for the engines. Example: ``{pool: inference}``.
        interface: Network interface over which learner ranks talk to each other, on every node. Empty: as gloo and NCCL
            choose.
        pools: Further pools of the learner: name and number of processes, one device each. The pool ``learner`` always
            exists, with ``learner.num_ranks``. Example: ``{critic: 2}``.
        critic: Pool of the critic. Roles of one pool share its processes; those of others compute at the same time.
        reference: Pool of the reference policy. With LoRA it is the actor with its adapters off, in ``learner``.
        reward_model: Pool of the reward model.
        cpus_per_learner_rank: Logical CPUs of one process of these pools.
        cpus_per_engine: Logical CPUs of one rollout worker with its engine.
        oversubscribe: On a cluster of our own (``ray.address`` empty), offer as many logical CPUs as the run asks for,
            even where the machine has fewer cores. If false, that is an error.
        autoscale: With an elastic fleet (``rollout_fleet.num_engines={min, max}``): keep asking the cluster for the
            places of ``max`` engines. Ray's autoscaler starts nodes for them, where the cluster has one; a node that is
            started by hand brings engines too. If false, engines take the places that are free at the start, and those
            that ``asyncrl join`` asks for.
        colocated: Put a learner rank and an engine on each device, taking turns: the engines fill a batch and release
            the device, the learner updates, publishes and offloads as ``learner.offload_at_transition_only`` says.
    """

    num_nodes: int = 1
    ranks_per_node: int = 0
    engines_per_node: int = 0
    strategy: Strategy = Strategy.pack
    learner_labels: dict[str, str] = field(default_factory=dict)
    engine_labels: dict[str, str] = field(default_factory=dict)
    interface: str = ""
    pools: dict[str, int] = field(default_factory=dict)
    critic: str = LEARNER_POOL
    reference: str = LEARNER_POOL
    reward_model: str = LEARNER_POOL
    cpus_per_learner_rank: float = 1.0
    cpus_per_engine: float = 1.0
    oversubscribe: bool = True
    autoscale: bool = False
    colocated: bool = False

    def __post_init__(self) -> None:
        self._check_nodes()
        for name in ("cpus_per_learner_rank", "cpus_per_engine"):
            if getattr(self, name) <= 0:
                raise ValueError(f"placement.{name} must be > 0, got {getattr(self, name)}")
        for name, count in self.pools.items():
            if name == LEARNER_POOL:
                raise ValueError(f"placement.pools must not name {LEARNER_POOL!r}; learner.num_ranks is its size")
            if count < 1:
                raise ValueError(f"placement.pools.{name} must be >= 1 processes, got {count}")
        for role in ("critic", "reference", "reward_model"):
            if getattr(self, role) not in (LEARNER_POOL, *self.pools):
                raise ValueError(
                    f"placement.{role} must name one of the pools {[LEARNER_POOL, *self.pools]}, "
                    f"got {getattr(self, role)!r}; add it to placement.pools with its processes"
                )

    def _check_nodes(self) -> None:
        for name, low in (("num_nodes", 1), ("ranks_per_node", 0), ("engines_per_node", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"placement.{name} must be >= {low}, got {getattr(self, name)}")
        default = {"ranks_per_node": 0, "engines_per_node": 0, "learner_labels": {}, "engine_labels": {}}
        for name, value in (default | {"strategy": Strategy.pack}).items():
            if self.num_nodes == 1 and getattr(self, name) != value:
                raise ValueError(
                    f"placement.{name} is for several nodes, got {getattr(self, name)} with placement.num_nodes=1; set "
                    "placement.num_nodes, or leave it out"
                )

    def on_nodes(self, num_processes: int, per_node: int) -> list[int]:
        """Number of processes on each node, at most ``per_node``, 0 for all on one. Example: 5 by 2 is 2, 2, 1."""
        if not per_node:
            return [num_processes]
        full, rest = divmod(num_processes, per_node)
        return [per_node] * full + [rest] * (rest > 0)


REMOVED_OPTIONS = {"ray.fork_workers": "it is gone: every worker imports what it needs; leave it out"}
"""Options of earlier releases that have no replacement, with what to do."""


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The Ray cluster.

    Attributes:
        address: Empty starts a cluster of our own on this machine; ``auto`` or ``host:port`` joins a running one.
        node_address: Of this machine in a cluster that is joined: the ``--node-ip-address`` of its ``ray start``.
            Empty: as Ray finds out.
        object_store_bytes: Shared memory of a cluster of our own; weights and batches do not pass through it.
        start_timeout_s: Deadline for the cluster to come up, and for it to grant the run's places.
        python: What runs Python in learner ranks and engines in process, as in a shell (``nsys profile python``).
            Empty: the Python of this process.
    """

    address: str = ""
    node_address: str = ""
    object_store_bytes: int = 128 * 1024**2
    start_timeout_s: float = 60.0
    python: str = ""

    def __post_init__(self) -> None:
        if self.node_address and not self.address:
            raise ValueError(
                f"ray.node_address={self.node_address} is used in a cluster that is joined; set ray.address too"
            )
