"""The configuration of a run: a tree of dataclasses with the options of all packages, and functions that derive values.

The dataclasses hold the defaults of the options. Importing this module does not load torch, Ray or SGLang.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from asyncrl.core.errors import check_bounds
from asyncrl.core.model_config import model_bytes, model_settings
from asyncrl.core.record import ProfileConfig
from asyncrl.core.types import Carrier
from asyncrl.data.config import DataConfig, check_prompt_format
from asyncrl.weights.carriers import CARRIERS, SLOWEST_LOAD, CarrierRules, CollectiveInto, Transport
from buffer.config import BufferConfig, StoresOn
from learner.config import AlgorithmConfig, LearnerConfig
from learner.rope import length_limit
from rollout_fleet.config import RolloutFleetConfig

LOOPBACK = "lo"
LEARNER_POOL = "learner"
"""The pool (set of processes) of the trained policy. Other models use this pool by default."""

RAY_SETS_DEVICES = {f"RAY_EXPERIMENTAL_NOSET_{runtime}_VISIBLE_DEVICES": "" for runtime in ("CUDA", "HIP", "ROCR")}
"""Environment variables that make Ray show each process only its own GPUs. They override the user's settings."""

# A worker uses one thread, because more threads than cores slow every process down.
# Ray must not kill the child processes of a worker, because these clean up and exit by themselves.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_kill_child_processes_on_worker_exit": "0",
    **RAY_SETS_DEVICES,
}
"""Environment variables of all workers (Ray processes) of a run."""
_OWN_CLIENTS = 4
"""Number of processes, other than rollout workers and learner ranks, that use the buffer. Example: the controller."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that a run trains.

    Attributes:
        path: Folder of the initial policy in Hugging Face layout: ``config.json``, weights, tokenizer.
    """

    path: str = ""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation on held-out prompts by the run's engines, before, during and after training.

    Attributes:
        enabled: Whether to evaluate. Needs ``data.eval_files``.
        every_steps: Learner steps between evaluations during training; 0 evaluates only before and after training. An
            evaluation is skipped if the previous evaluation is still running.
        share: Largest share of the engines, and of the samples in progress, that an evaluation uses during training.
            An evaluation uses at least one engine. These engines load no newer version until the evaluation ends.
        num_samples: Number of samples per prompt at the training temperature, in addition to the greedy answer.
        pass_reward: Smallest reward that counts as a pass in ``pass@k``.
    """

    enabled: bool = True
    every_steps: int = 0
    share: float = 0.25
    num_samples: int = 4
    pass_reward: float = 1.0

    def __post_init__(self) -> None:
        check_bounds(
            "evaluation.", self, every_steps=">= 0; 0 means none during training", num_samples=">= 1; 4 is usual"
        )
        if not 0 < self.share <= 1:
            raise ValueError(f"evaluation.share must be in (0, 1], got {self.share}; 0.25 is usual")
        if not math.isfinite(self.pass_reward):
            raise ValueError(f"evaluation.pass_reward must be a finite number, got {self.pass_reward}; 1.0 is usual")


class StopMetric(StrEnum):
    """Metric that decides when fine-tuning stops early: greedy accuracy on ``data.eval_files``, or validation loss."""

    accuracy = "accuracy"
    val_loss = "val_loss"


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Options of supervised fine-tuning, as the command ``asyncrl sft`` or as the first phase of a run (warm start).

    Attributes:
        enabled: Fine-tune ``model.path`` first, and then train the fine-tuned policy.
        train_files: Parquet or jsonl files with a prompt and a response column.
        val_files: Files of the same format for the validation loss.
        val_rows: Number of rows at the end of ``train_files`` that are used only for the validation loss. Must be 0
            if ``val_files`` is set.
        prompt_key: Column of the prompt: a string, or with ``chat_template`` a list of {role, content} messages.
        response_key: Column of the response, a string. With ``chat_template`` it may be empty: the loss then includes
            all assistant turns of the messages.
        chat_template: Render messages with the tokenizer's chat template. If false, the response is plain text, and the
            end-of-sequence token follows it.
        chat_template_kwargs: Further arguments of the template. Example: ``{"enable_thinking": false}``.
        system_prompt: A system message before the messages of each row; empty if there is none.
        tools_key: Column of the tools that the template renders, in the format of ``data.tools_key``; empty if there is
            no such column.
        output_path: Directory of the fine-tuned policy: new, empty, or written earlier with the same settings. Default:
            ``<output_dir>/<experiment>/sft/<digest of the settings>``.
        batch_size: Sequences per optimizer update.
        lr: Peak learning rate, with linear decay to zero over ``max_steps``.
        weight_decay: Decoupled weight decay (as in AdamW), on matrices only.
        warmup_steps: Number of updates over which the learning rate rises linearly to ``lr``.
        max_steps: Maximum number of updates.
        eval_every: Number of updates between evaluations.
        eval_prompts: Number of held-out prompts that each evaluation answers greedily; 0 measures no accuracy.
        stop_metric: The metric that ``patience`` watches.
        target_accuracy: Stop when greedy accuracy on ``data.eval_files`` reaches this value. Above 1: no such stop.
        target_val_loss: Stop when the validation loss falls to this value, in nats per token. 0: no such stop.
        patience: Stop after this many evaluations without a better ``stop_metric``, and keep the best policy. 0
            switches this off, and keeps the final policy.
        progress_timeout_s: Longest time in seconds between two lines of a warm start's log. Each evaluation writes one
            line.
    """

    enabled: bool = False
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    val_rows: int = 0
    prompt_key: str = "prompt"
    response_key: str = "response"
    chat_template: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    system_prompt: str = ""
    tools_key: str = ""
    output_path: str = ""
    batch_size: int = 128
    lr: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 20
    max_steps: int = 1000
    eval_every: int = 50
    eval_prompts: int = 256
    stop_metric: StopMetric = StopMetric.accuracy
    target_accuracy: float = 1.01
    target_val_loss: float = 0.0
    patience: int = 0
    progress_timeout_s: float = 900.0

    @property
    def validates(self) -> bool:
        """True if the options name validation data. Supervised fine-tuning then measures a validation loss."""
        return bool(self.val_files) or self.val_rows > 0

    def __post_init__(self) -> None:
        check_bounds("sft.", self, **dict.fromkeys(("batch_size", "max_steps", "eval_every"), ">= 1"))
        may_be_off = ("val_rows", "eval_prompts", "warmup_steps", "patience", "target_val_loss", "weight_decay")
        check_bounds("sft.", self, **dict.fromkeys(may_be_off, ">= 0; 0 switches it off"))
        check_bounds("sft.", self, target_accuracy=">= 0; above 1 switches it off")
        check_bounds("sft.", self, lr="> 0", progress_timeout_s="> 0")
        check_prompt_format("sft", self)
        if not self.response_key and not self.chat_template:
            raise ValueError(
                "sft.response_key must name a column while sft.chat_template is false, got an empty string; 'response' "
                "is usual"
            )
        if self.val_files and self.val_rows:
            raise ValueError(f"sft.val_rows must be 0 with sft.val_files, got {self.val_rows}; set only one of them")
        needs_loss = self.target_val_loss > 0 or (self.patience > 0 and self.stop_metric is StopMetric.val_loss)
        if needs_loss and not self.validates:
            raise ValueError(
                "sft.target_val_loss and sft.stop_metric=val_loss need a validation loss, got neither sft.val_files "
                "nor sft.val_rows; set one of them"
            )
        needs_accuracy = self.target_accuracy <= 1 or (self.patience > 0 and self.stop_metric is StopMetric.accuracy)
        if needs_accuracy and not self.eval_prompts:
            raise ValueError(
                "sft.target_accuracy and sft.stop_metric=accuracy need sft.eval_prompts >= 1, got 0; raise "
                "eval_prompts, or stop at sft.target_val_loss"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Options of the checkpoints: when a run saves them, where, and which one it continues.

    Attributes:
        every_steps: Learner steps between two checkpoints. If not 0, the run also saves a checkpoint after the last
            step.
        at_stop: Save a checkpoint when a signal stops the training, within ``save_timeout_s``. On several nodes, this
            needs ``every_steps`` or ``directory``.
        keep: Number of checkpoints to keep, the newest ones; -1 keeps all.
        directory: Folder for checkpoints, on a file system that all learner ranks share. Empty: ``checkpoints/`` in
            the run's folder.
        resume: ``never`` starts from the beginning. ``auto`` continues from the experiment's newest checkpoint, if it
            has one. A path names a checkpoint, or a folder of checkpoints.
    """

    every_steps: int = 0
    at_stop: bool = True
    keep: int = 2
    directory: str = ""
    resume: str = "never"

    def __post_init__(self) -> None:
        check_bounds("checkpoint.", self, every_steps=">= 0; 0 saves no checkpoint")
        if self.keep != -1 and self.keep < 1:
            raise ValueError(f"checkpoint.keep must be -1 or >= 1, got {self.keep}; -1 keeps all checkpoints")
        if not self.resume:
            raise ValueError(
                "checkpoint.resume must be 'never', 'auto' or a path, got an empty string; the default is 'never'"
            )


class Strategy(StrEnum):
    """How learner ranks and engines are distributed over nodes: ``pack`` on few nodes, ``spread`` on many."""

    pack = "pack"
    spread = "spread"


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Where learner ranks and engines run. A learner rank uses one GPU, an engine uses ``tp_size`` GPUs.

    Attributes:
        num_nodes: Number of nodes that the Ray cluster must have at the start. With ``autoscale``, nodes may join
            later. 1: the run uses only the node where the user starts it. Above 1: the run uses all nodes
            (``docs/several_hosts.md``).
        ranks_per_node: Number of learner ranks per node, in each pool. 0: all ranks of a pool on one node.
        engines_per_node: Largest number of engines per node; 0: no limit.
        strategy: ``pack`` uses as few nodes as possible; ranks and engines may share a node. With ``spread``, a node
            has at most ``ranks_per_node`` ranks of each pool, and at most ``engines_per_node`` engines.
        learner_labels: Labels that the learner's nodes must have, as given to ``ray start --labels``.
        engine_labels: Labels that the engines' nodes must have. Example: ``{pool: inference}``.
        interface: Network interface of the learner ranks on every node. Empty: gloo and NCCL choose.
        pools: Further pools of the learner: the number of processes by name. Each process has one device. The pool
            ``learner`` always has ``learner.num_ranks`` processes. Example: ``{critic: 2}``.
        critic: Pool of the critic. Models in one pool share its processes. Models in different pools run in parallel.
        reference: Pool of the reference policy. No effect with LoRA, because the policy without its adapters is the
            reference.
        reward_model: Pool of the reward model.
        cpus_per_learner_rank: Logical CPUs per process of a learner pool.
        cpus_per_engine: Logical CPUs per rollout worker together with its engine.
        oversubscribe: Allow more logical CPUs than the machine has cores, if the run starts the Ray cluster. If false,
            a run that needs more does not start.
        autoscale: For an elastic fleet (``rollout_fleet.num_engines={min, max}``): request the resources of ``max``
            engines, so that Ray's autoscaler starts nodes. Engines also start on nodes that the user adds. If false,
            the fleet begins with the free resources, and grows only by ``asyncrl join``.
        colocated: Place a learner rank and an engine on each device. An engine with ``tp_size`` N is on the devices of
            N ranks. Engines and learner use the devices alternately. The engines fill a batch and release the devices.
            Then the learner updates the policy, publishes the weights and releases the devices.
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
        check_bounds("placement.", self, num_nodes=">= 1", ranks_per_node=">= 0", engines_per_node=">= 0")
        default = {"ranks_per_node": 0, "engines_per_node": 0, "learner_labels": {}, "engine_labels": {}}
        for name, value in (default | {"strategy": Strategy.pack}).items():
            if self.num_nodes == 1 and getattr(self, name) != value:
                raise ValueError(
                    f"placement.{name}={getattr(self, name)} needs several nodes, got placement.num_nodes=1; raise "
                    f"num_nodes, or leave out placement.{name}"
                )
        check_bounds("placement.", self, cpus_per_learner_rank="> 0", cpus_per_engine="> 0")
        for name, count in self.pools.items():
            if name == LEARNER_POOL:
                raise ValueError(f"placement.pools must not name {LEARNER_POOL!r}; set its size with learner.num_ranks")
            if count < 1:
                raise ValueError(f"placement.pools.{name} must be >= 1, got {count} processes")
        for role in ("critic", "reference", "reward_model"):
            if getattr(self, role) not in (LEARNER_POOL, *self.pools):
                raise ValueError(
                    f"placement.{role} must name one of the pools {[LEARNER_POOL, *self.pools]}, "
                    f"got {getattr(self, role)!r}; add this pool to placement.pools with its number of processes"
                )

    def on_nodes(self, num_processes: int, per_node: int) -> list[int]:
        """Divide ``num_processes`` over nodes, and return the number of processes on each node.

        A node gets at most ``per_node`` processes. If ``per_node`` is 0, one node gets all processes. Example: 5
        processes with ``per_node=2`` give 2, 2, 1.
        """
        if not per_node:
            return [num_processes]
        full, rest = divmod(num_processes, per_node)
        return [per_node] * full + [rest] * (rest > 0)


REMOVED_OPTIONS = {
    "ray.fork_workers": "it was removed: every worker imports its modules itself; leave it out",
    "learner.keep_checkpoints": "its name is checkpoint.keep now",
}
"""Removed options, each with the reason and the remedy. asyncrl ignores them in the configuration of an old run."""


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Options of the Ray cluster that the run starts or joins.

    Attributes:
        address: ``auto`` or ``host:port``: join a running cluster. Empty: start a cluster on this machine.
        node_address: This machine's ``--node-ip-address`` in a cluster that the run joins. Empty: Ray detects it.
        object_store_bytes: Size of Ray's object store if the run starts the cluster. Weights and batches do not use it.
        start_timeout_s: Time limit for starting the cluster. The reservation of CPUs and GPUs has the same limit.
        python: Command that runs Python in learner ranks and in-process engines. Empty: the Python of this process.
            Example: ``nsys profile python``.
    """

    address: str = ""
    node_address: str = ""
    object_store_bytes: int = 128 * 1024**2
    start_timeout_s: float = 60.0
    python: str = ""

    def __post_init__(self) -> None:
        check_bounds(
            "ray.",
            self,
            object_store_bytes=">= 78643200 bytes, Ray's smallest size; 134217728 is usual",
            start_timeout_s="> 0 seconds",
        )
        if self.node_address and not self.address:
            raise ValueError(
                f"ray.node_address={self.node_address} is only for a cluster that the run joins; set ray.address too"
            )


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Options of publishing: how new weights of the learner reach the engines.

    Attributes:
        transport: ``shared_memory``: the ranks write into memory that the engines map. ``file``: the ranks write into a
            folder. ``auto``: ``shared_memory`` if the kept versions fit into memory, else ``file``. A run that keeps
            all versions uses ``file``. ``collective``: the ranks broadcast over the network, without a shared folder.
        directory: Folder for the transport ``file``, on a file system that ranks and engines share. Empty: a folder in
            the run's folder.
        publish_every: Learner steps between two published versions. The last version is always published.
        collective_into: The receivers of ``collective``. ``host``: the engines' hosts receive into memory while the
            engines generate (gloo). ``engine``: the engines pause and receive tensor by tensor, and no host holds a
            copy. This uses NCCL if learner and engines have separate GPUs, else gloo.
        interface: Network interface on which ``collective`` reaches learner rank 0. ``lo`` connects only processes of
            this host. On other interfaces, any process that reaches the host's ports may read or disturb the transfer.
        full_every: Every ``full_every``-th published version is full. The other versions hold only the exact changes
            since the previous version. Each engine applies the changes to a complete copy of its version (an image) in
            shared memory. With ``collective``, the engines of a host share one image. 1: all versions are full.
        adapters: With ``learner.lora``, publish the frozen weights once, and then only the adapters. Each engine
            applies the adapters. False publishes merged weights.
        copy_to_memory: While an engine generates, its worker copies the next version into the host's shared memory.
            Then the engine loads this copy. Use this option if ``directory`` is slow to read.
    """

    transport: Transport = Transport.auto
    directory: str = ""
    publish_every: int = 1
    collective_into: CollectiveInto = CollectiveInto.host
    interface: str = LOOPBACK
    full_every: int = 1
    adapters: bool = True
    copy_to_memory: bool = False

    @property
    def copies(self) -> bool:
        """True if each engine keeps a complete copy of its weights in shared memory of its host."""
        return self.full_every > 1 or self.copy_to_memory

    @property
    def keeps_images(self) -> bool:
        """True if each engine or each host keeps a complete copy of the weights in shared memory."""
        return self.copies or self.rules.carrier is Carrier.host_stream

    @property
    def rules(self) -> CarrierRules:
        """The rules of the chosen weight transport: whether it supports other hosts, deltas, adapters and so on."""
        is_collective = self.transport is Transport.collective
        return CARRIERS[self.transport, self.collective_into if is_collective else CollectiveInto.host]

    @property
    def given(self) -> dict[str, object]:
        """The transport-specific options that differ from their defaults: a dict from option name to value."""
        names = ("copy_to_memory", "directory", "collective_into", "interface")
        defaults = {one.name: one.default for one in fields(self)}
        return {f"weights.{name}": getattr(self, name) for name in names if getattr(self, name) != defaults[name]}

    def __post_init__(self) -> None:
        if self.transport is Transport.tensor:
            raise ValueError(
                "weights.transport must be auto, shared_memory, file or collective, got tensor, which was removed: "
                "each engine needed access to the GPUs of all learner ranks; use shared_memory on one host, or "
                "collective with collective_into=engine between GPUs"
            )
        check_bounds("weights.", self, publish_every=">= 1 learner steps", full_every=">= 1 versions; 1 has no deltas")


class QuickstartTask(StrEnum):
    """The task of a quickstart. ``reverse``: reverse digits. ``tools``: add numbers with a calculator."""

    reverse = "reverse"
    tools = "tools"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All options of a training run.

    Attributes:
        experiment: Name of the run, and of its folder under ``output_dir``.
        seed: Seed of the prompt order, of sampling, and of initial weights.
        output_dir: Results go to ``<output_dir>/<experiment>/<time>/``.
        run_dir: Folder of this run, new or empty. Empty string: a folder named after the time, under ``output_dir``.
        total_steps: Number of learner steps of the run.
        quickstart: First make the quickstart's model, tokenizer and data, under ``<output_dir>/<experiment>/assets``.
        quickstart_task: The task that the quickstart's data teach.
        dry_run: Check the run and show the resources and deadlines that it needs, without starting it.
        record_trajectories: Write every trajectory that the learner trains on to ``trajectories/``, for inspection.
        save_timeout_s: After a signal that stops the training: seconds to finish the queued steps, and to write the
            checkpoint, the policy and the summary.
        stop_timeout_s: Seconds in which all processes must stop. After that, the run kills the remaining processes.
        dashboard: During training, serve the run's report as a web page at ``dashboard_address``.
        dashboard_address: ``host:port``; port 0 is any free port. An address other than loopback needs a secret token
            in the environment variable ``ASYNCRL_DASHBOARD_TOKEN``. Visitors must enter this token.
        tracker: Trackers that receive the metrics: ``wandb``, ``mlflow``, ``prometheus``. The run also writes the
            metrics to its folder.
        prometheus_address: With the tracker ``prometheus``: the ``host:port`` at which the run serves ``/metrics``.
    """

    experiment: str = "run"
    seed: int = 0
    output_dir: str = "outputs"
    run_dir: str = ""
    total_steps: int = 100
    quickstart: bool = False
    quickstart_task: QuickstartTask = QuickstartTask.reverse
    dry_run: bool = False
    record_trajectories: bool = False
    save_timeout_s: float = 60.0
    stop_timeout_s: float = 15.0
    dashboard: bool = False
    dashboard_address: str = "127.0.0.1:0"
    tracker: list[str] = field(default_factory=list)
    prometheus_address: str = "127.0.0.1:9464"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout_fleet: RolloutFleetConfig = field(default_factory=RolloutFleetConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    sft: WarmStartConfig = field(default_factory=WarmStartConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def publishes_adapters(self) -> bool:
        """True if the learner sends engines only the LoRA adapters, without the frozen weights."""
        return self.weights.adapters and self.learner.lora.rank > 0

    @property
    def publishes_to_memory(self) -> bool:
        """True if the learner publishes versions into shared memory, if they fit, and not into a folder on a disk."""
        return self.weights.transport is not Transport.file and self.learner.keep_snapshots != -1

    @property
    def shares_checkpoints(self) -> bool:
        """True if all learner ranks use the same folder of checkpoints. The run can save checkpoints only then.

        Always True on a single node. On several nodes, True if ``checkpoint.every_steps`` or ``checkpoint.directory``
        is set, because the folder must then be on a shared disk.
        """
        return self.placement.num_nodes == 1 or bool(self.checkpoint.every_steps or self.checkpoint.directory)

    def __post_init__(self) -> None:
        check_bounds("", self, seed=">= 0; 0 is usual", total_steps=">= 1", save_timeout_s="> 0", stop_timeout_s="> 0")
        folder = Path(self.experiment)
        if not folder.parts or folder.is_absolute() or ".." in folder.parts:
            raise ValueError(
                f"experiment must be the name of a folder below output_dir, got {self.experiment!r}; set output_dir to "
                "write elsewhere"
            )
        if late := [step for step in self.profile.torch_steps if step >= self.total_steps]:
            raise ValueError(
                f"profile.torch_steps must be below total_steps={self.total_steps}, got {late}; the last step is "
                f"{self.total_steps - 1}; choose other steps, or raise total_steps"
            )


@dataclass(frozen=True, kw_only=True)
class StopDeadlines:
    """Time limits in seconds for stopping a run: for the engines, the learner ranks, and Ray and the buffer server."""

    fleet_s: float
    learner_s: float
    ray_s: float = 2.0

    @property
    def total_s(self) -> float:
        """Time limit in seconds for stopping the whole run: the sum of the three time limits."""
        return self.fleet_s + self.learner_s + self.ray_s


def stop_deadlines(config: RunConfig) -> StopDeadlines:
    """Return the time limits for stopping a run. They depend on ``rollout_fleet.stop_timeout_s``."""
    fleet = config.rollout_fleet
    return StopDeadlines(fleet_s=fleet.worker_stop_timeout_s, learner_s=fleet.stop_timeout_s)


def num_buffer_clients(config: RunConfig) -> int:
    """Return the maximum number of clients of one buffer server: engines, learner ranks and other processes."""
    sizes, roles = learner_pools(config), learner_roles(config)
    num_ranks = sum(sizes[pool] for pool in roles.values())  # a learner process has one client for each of its roles
    return config.rollout_fleet.most_engines + num_ranks + _OWN_CLIENTS


def num_store_servers(config: RunConfig) -> int:
    """Return the maximum number of store servers of the run. A store server is a process that holds trajectories."""
    return num_engine_hosts(config) if keeps_stores_on_hosts(config) else config.buffer.num_store_servers


def num_images(config: RunConfig) -> int:
    """Return the maximum number of complete copies of the weights in shared memory of one host."""
    if not config.weights.keeps_images:
        return 0
    is_stream = config.weights.rules.carrier is Carrier.host_stream
    return 2 if is_stream else config.rollout_fleet.most_engines  # 2: a copy of the loaded and of the next version


def num_engine_hosts(config: RunConfig) -> int:
    """Return the maximum number of hosts that run engines."""
    fleet, placement = config.rollout_fleet, config.placement
    if placement.num_nodes == 1:
        return 1
    # Without a limit of engines per node, each engine possibly runs on its own host.
    per_node = 1 if fleet.is_elastic else placement.engines_per_node or 1
    return len(placement.on_nodes(fleet.most_engines, per_node))


def keeps_stores_on_hosts(config: RunConfig) -> bool:
    """Return whether each host with rollout workers runs a store server, which holds the trajectories of that host."""
    buffer = config.buffer
    if buffer.stores_on is StoresOn.auto:
        return config.placement.num_nodes > 1 and not buffer.num_store_servers
    return buffer.stores_on is StoresOn.hosts


def requested_cpus(config: RunConfig, num_engines: int | None = None) -> float:
    """Return how many logical CPUs the run reserves for all learner ranks and ``num_engines`` engines.

    If ``num_engines`` is None, the function uses the number of engines at the start of the run.
    """
    num_engines = config.rollout_fleet.fewest_engines if num_engines is None else num_engines
    placement = config.placement
    learner = sum(learner_pools(config).values()) * placement.cpus_per_learner_rank
    return learner + num_engines * placement.cpus_per_engine


def requested_gpus(config: RunConfig) -> int:
    """Return how many GPUs the learner ranks and engines need at the start of the run.

    Ranks and engines on CPUs need none. Engines that share the learner's GPUs need no additional GPUs.
    """
    fleet = config.rollout_fleet
    ranks = sum(learner_pools(config).values()) if config.learner.device == "cuda" else 0
    own_gpus = fleet.device == "cuda" and not config.placement.colocated
    return ranks + (fleet.fewest_engines * fleet.sglang.tp_size if own_gpus else 0)


def learner_roles(config: RunConfig) -> dict[str, str]:
    """Return a dict from each role of the learner in this run to the name of its resource pool.

    Roles are ``rm`` (reward model), ``ref`` (reference policy), ``critic`` and ``actor``. The roles process a batch in
    the order of the dict.
    """
    algorithm, placement = config.algorithm, config.placement
    has_reference = algorithm.needs_reference and not config.learner.lora.rank
    pools = {
        "rm": placement.reward_model if config.learner.reward_model.path else None,
        "ref": placement.reference if has_reference else None,
        "critic": placement.critic if algorithm.needs_critic else None,
        "actor": LEARNER_POOL,
    }
    return {role: pool for role, pool in pools.items() if pool is not None}


def learner_pools(config: RunConfig) -> dict[str, int]:
    """Return a dict from pool name to number of processes, for the pools that this run uses for its learner roles."""
    sizes = {**config.placement.pools, LEARNER_POOL: config.learner.num_ranks}
    return {pool: sizes[pool] for pool in dict.fromkeys(learner_roles(config).values())}


def episode_context(config: RunConfig) -> int:
    """Return the largest possible number of tokens in a model input of an episode; 0 without environments.

    If ``rollout_fleet.environment.max_context`` is 0, the model and each role's micro-batch set the limit.
    """
    if not may_play_episodes(config):
        return 0
    if config.rollout_fleet.environment.max_context:
        return config.rollout_fleet.environment.max_context
    budgets = [role_options(config, role) for role in learner_roles(config)]
    return int(min(longest_rollout(config), *(one.max_tokens_per_micro_batch * one.sp_size for one in budgets)))


def has_environment(config: RunConfig) -> bool:
    """Return whether the options name an environment for all prompts. Rows of the data can name other environments."""
    return bool(config.rollout_fleet.environment.name)


def role_options(config: RunConfig, role: str) -> LearnerConfig:
    """Return the learner options for one role, such as ``critic``. The role's own options override the common options.

    ``num_ranks`` of the result is the number of processes of the role's resource pool.
    """
    return config.learner.of_role(role, num_ranks=learner_pools(config)[learner_roles(config)[role]])


def role_model(config: RunConfig, role: str) -> str:
    """Return the path of the model folder of a learner role. A role without its own path uses the policy's folder."""
    own = {"critic": config.learner.critic.path, "rm": config.learner.reward_model.path}
    return own.get(role, "") or config.model.path


def may_play_episodes(config: RunConfig) -> bool:
    """Return whether the options, or rows of the data, can name environments for prompts."""
    return has_environment(config) or config.data.has_environments


def longest_sequence(config: RunConfig) -> int:
    """Return the length, in tokens, of the longest sequence that the learner may get.

    With an environment, the length is `episode_context`. Without an environment, the length is the longest prompt plus
    the longest response. If only some rows have an environment, the length is the larger of both.
    """
    paths = [episode_context(config)] if may_play_episodes(config) else []
    answers = [config.data.max_prompt_tokens + config.rollout_fleet.sampling.max_new_tokens]
    return max(paths if has_environment(config) else [*paths, *answers])


def num_positions(config: RunConfig) -> float:
    """Return the length, in tokens, of the longest sequence that the model can be trained on.

    It is the smaller of ``max_position_embeddings`` and `learner.rope.length_limit`; infinite if the model has neither.
    """
    settings = model_settings(config.model.path)
    longest, limit = settings.get("max_position_embeddings"), length_limit(settings)
    return min(math.inf if longest is None else longest, math.inf if limit is None else limit.tokens)


def longest_rollout(config: RunConfig) -> float:
    """Return the largest number of tokens in a sequence of an engine: prompt and sampled tokens.

    This number is `num_positions` minus the positions that the engine reserves.
    """
    return num_positions(config) - config.rollout_fleet.num_reserved_positions


def why_positions_end(config: RunConfig) -> str:
    """Return the reason why `num_positions` is below ``max_position_embeddings``, as a text for error messages.

    If it is not below, return an empty string.
    """
    settings = model_settings(config.model.path)
    longest, limit = settings.get("max_position_embeddings"), length_limit(settings)
    if limit is None or (longest is not None and limit.tokens >= longest):
        return ""
    return (
        f" (its config allows {longest}, but beyond {limit.tokens} {limit.reason}, and learner and engines would "
        "compute different log-probs)"
    )


def with_time_to_read(config: RunConfig) -> RunConfig:
    """Return a copy of the options with longer start timeouts: one additional second per 100 MB of model files."""
    learner, fleet = config.learner, config.rollout_fleet
    policy_s = model_bytes(config.model.path) // SLOWEST_LOAD
    others_s = sum(
        model_bytes(path) // SLOWEST_LOAD for path in (learner.critic.path, learner.reward_model.path) if path
    )
    return replace(
        config,
        learner=replace(learner, start_timeout_s=learner.start_timeout_s + policy_s + others_s),
        rollout_fleet=replace(fleet, start_timeout_s=fleet.start_timeout_s + policy_s),
    )


def override_of(option: str, value: object) -> str:
    """Return a command-line argument for Hydra that sets ``option`` to the text of ``value``, with quotes if needed.

    Example: ``output_dir='/data/Zoë (new)'``.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    plain = f"{option}={value}"
    with suppress(HydraException):
        if OverridesParser.create().parse_override(plain).value() == str(value):
            return plain
    return f"{option}={QuotedString(str(value), Quote.single).with_quotes()}"
