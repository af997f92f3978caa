"""Options of the Ray cluster and of the placement of the run's workers on it."""

from dataclasses import dataclass, field
from enum import StrEnum

LEARNER_POOL = "learner"
"""The pool of the actor, and of every role without another pool."""

RAY_SETS_DEVICES = {f"RAY_EXPERIMENTAL_NOSET_{runtime}_VISIBLE_DEVICES": "" for runtime in ("CUDA", "HIP", "ROCR")}
"""Environment in which Ray restricts a process to its own GPUs, even if the user's shell sets other values."""

# One thread per process: more threads than cores slow every process down. Child processes of a worker clean up and exit
# by themselves; Ray would kill them first.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_kill_child_processes_on_worker_exit": "0",
    **RAY_SETS_DEVICES,
}
"""Environment of the workers of every run."""


class Strategy(StrEnum):
    """How workers are distributed over nodes: over as few nodes as possible, or over all nodes."""

    pack = "pack"
    spread = "spread"


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """CPUs, nodes and pools of the workers. A learner rank takes one GPU, an engine ``tp_size`` GPUs.

    Attributes:
        num_nodes: Nodes that the Ray cluster must have at the start, unless ``autoscale`` adds them. 1: the run uses
            only the node of the command. More: it uses all nodes; see ``docs/several_hosts.md``.
        ranks_per_node: Learner ranks of a pool per node. 0: all ranks of a pool on one node.
        engines_per_node: Engines per node. 0: any number, in the order of ``strategy``.
        strategy: ``pack`` uses as few nodes as possible; ranks and engines may share a node. ``spread`` uses all nodes:
            each group of ``ranks_per_node`` ranks, and of ``engines_per_node`` engines, has a separate node.
        learner_labels: Labels that the learner's nodes must have, as given to ``ray start --labels``.
        engine_labels: Labels that the engines' nodes must have. Example: ``{pool: inference}``.
        interface: Network interface of the learner ranks on every node. Empty: gloo and NCCL choose.
        pools: Further pools of the learner: name and number of processes, one device per process. The pool ``learner``
            always exists, with ``learner.num_ranks`` processes. Example: ``{critic: 2}``.
        critic: Pool of the critic. Roles of one pool share its processes; roles of different pools run in parallel.
        reference: Pool of the reference policy. With LoRA, the actor without its adapters is the reference, and this
            option has no effect.
        reward_model: Pool of the reward model.
        cpus_per_learner_rank: Logical CPUs per process of these pools.
        cpus_per_engine: Logical CPUs per rollout worker, including its engine.
        oversubscribe: If the run starts the Ray cluster (``ray.address`` empty), let the cluster have as many logical
            CPUs as the run needs, even on a machine with fewer cores. False refuses such a run.
        autoscale: For an elastic fleet (``rollout_fleet.num_engines={min, max}``): request places for ``max`` engines
            from the cluster all the time, so that Ray's autoscaler starts nodes. Engines also use nodes that are added
            by hand. If false, only the free places at the start and ``asyncrl join`` add engines.
        colocated: Place a learner rank and an engine on each device. They take turns: the engines fill a batch and
            release the device, then the learner updates, publishes and offloads (see
            ``learner.offload_at_transition_only``).
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
                    f"placement.{name} is for several nodes only, got {getattr(self, name)} with num_nodes=1; set "
                    "placement.num_nodes, or leave it out"
                )

    def on_nodes(self, num_processes: int, per_node: int) -> list[int]:
        """Number of processes on each node, at most ``per_node`` (0: no limit). Example: 5 by 2 gives 2, 2, 1."""
        if not per_node:
            return [num_processes]
        full, rest = divmod(num_processes, per_node)
        return [per_node] * full + [rest] * (rest > 0)


REMOVED_OPTIONS = {"ray.fork_workers": "it was removed: every worker imports its modules itself; leave it out"}
"""Removed options without a replacement, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The Ray cluster.

    Attributes:
        address: Empty starts a cluster on this machine; ``auto`` or ``host:port`` joins a running cluster.
        node_address: This machine's ``--node-ip-address`` in a cluster that the run joins. Empty: Ray detects it.
        object_store_bytes: Shared memory of a cluster that the run starts; weights and batches do not use it.
        start_timeout_s: Deadline to start the cluster, and to reserve the run's places.
        python: Command that runs Python in learner ranks and in-process engines, such as ``nsys profile python``.
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
                f"ray.node_address={self.node_address} is only for a cluster that the run joins; set ray.address too"
            )
