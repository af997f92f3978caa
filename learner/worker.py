"""One rank of a learner role (such as actor or critic): scores samples, trains, publishes and saves weights.

A run calls the methods with a list of `RankBatch`, one per data-parallel rank, and does not wait for the results. A
worker sends its scores directly to the workers of other roles. If the roles share a process, the scores stay in the
process.

The controller imports this module only for the names of the methods, so torch is imported inside the functions.

A worker waits for the controller's next call. In a step, the worker also waits for the thread that prepares the batch.
In a collective, it waits for the other ranks until the deadline of the process group.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from asyncrl import single_controller
from asyncrl.core import receipts, record
from asyncrl.core.errors import BatchLost, StalenessError
from asyncrl.core.host import WORKER_BYTES, keep_freed_memory
from asyncrl.core.ports import LearnerBuffer
from asyncrl.core.record import ProfileConfig, SpanKind
from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from asyncrl.single_controller.dispatch import beside
from asyncrl.weights.carriers import PublishOptions

from .checkpoint_folder import read_progress
from .config import AlgorithmConfig, LearnerConfig
from .prepared_batches import BatchPreparer, RoleBatches
from .roles import ACTOR, CRITIC, Role, TokenScores, scored_by
from .trajectory_log import LEARNER_LOGPROBS, TokenLogOptions, TrajectoryLog, trained_groups
from .types import RankBatch, SampleKey, TokenSequence

if TYPE_CHECKING:
    from asyncrl.single_controller import DataProto
    from asyncrl.weights.publish import WeightPublisher

    from .checkpoint import ShardedCheckpointer
    from .offload import OffloadPolicy
    from .packed_model import PackedModel

T = TypeVar("T")
logger = logging.getLogger(__name__)

_MESH = "dp"
BY_ROWS = make_nd_compute_dataproto_dispatch_fn(_MESH)
"""How verl's methods are called on the ranks: a `DataProto`'s rows are divided among the data-parallel ranks. The ranks
of a sequence-parallel (sp) group get the same rows."""


def _share_of_each_rank(group: Any, *shares: Sequence[Any], **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass entry i of each list argument to data-parallel rank i (all ranks of sequence-parallel group i)."""
    sizes = {len(share) for share in shares}
    num_shares = sizes.pop() if len(sizes) == 1 else 0
    if num_shares == 0 or group.world_size % num_shares:
        raise ValueError(
            f"arguments must be lists of one entry per data-parallel rank, got {[len(share) for share in shares]} "
            f"entries for {group.world_size} ranks"
        )
    sp_size = group.world_size // num_shares
    spread = tuple([entry for entry in share for _ in range(sp_size)] for share in shares)
    return spread, {name: [value] * group.world_size for name, value in options.items()}


PER_DP_RANK = {"dispatch_fn": _share_of_each_rank, "collect_fn": lambda _group, results: results}
"""How a run calls a method on the ranks: each positional argument is a list with one entry per data-parallel rank. All
ranks get the same keyword arguments."""


def _recorded(method: Callable[..., T]) -> Callable[..., T]:
    kind = SpanKind.update if method.__name__ == "step" else SpanKind.score

    @wraps(method)
    def recorded(self: ModelWorker, batch: RankBatch, *arguments: Any, **options: Any) -> T:
        with record.span(kind, step=batch.version, cause=self.role.name):
            record.cpu()
            return method(self, batch, *arguments, **options)

    return recorded


@dataclass
class BatchCache:
    """Objects that the roles of one process share.

    Attributes:
        preparer: Prepares the batches of all roles.
        scores: The newest scores of each column, with the version of their learner step.
        open_roles: Names of the roles that have not stopped. When all roles have stopped, the process group is
            destroyed.
    """

    preparer: BatchPreparer = field(default_factory=BatchPreparer)
    scores: dict[str, tuple[int, TokenScores]] = field(default_factory=dict)
    open_roles: set[str] = field(default_factory=set)


class ModelWorker(Worker):
    """One rank of a role, such as actor or critic. Every method is called on all ranks of the role.

    Args:
        role: The role to run.
        config: Options of the learner group; ``num_ranks`` is the number of ranks that run the role. The role's own
            options override the group's options (`LearnerConfig.of_role`).
        algorithm: Options of the algorithm.
        model_path: Directory in Hugging Face layout.
        total_steps: Number of learner steps of the run, for the learning rate's schedule.
        temperature: Softmax temperature at sampling, also used for the worker's log-probs.
        connect_buffer: Connects this rank to the replay buffer. None if only methods with verl's interface are called:
            these methods get their data as arguments.
        seed: Seed for the initial values and the dropout of the adapters.
        snapshot_dir: Folder for published weights, readable by the engines of this host. None means that the worker
            does not publish weights.
        publish: Options for publishing weights.
        trajectory_dir: Folder for a log of all samples that steps train on. None means no such log.
        token_log: Options for the log of a few samples. None means no such log.
        profile: Options for the profile of this process.
        pool: Name of the pool (group of processes) that runs the role.

    Attributes:
        own_cache: The `BatchCache` of this worker. If several roles share a process, all use the `BatchCache` of the
            first role.
        model: The role's packed model: a `Trainer` if the role is trained. `init_model` sets it.
        offload: Moves the model and the optimizer state to the host and back. `init_model` sets it.
    """

    model: PackedModel
    offload: OffloadPolicy

    def __init__(
        self,
        role: Role,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        model_path: str,
        total_steps: int = 1,
        temperature: float = 1.0,
        connect_buffer: Callable[[], LearnerBuffer] | None = None,
        seed: int = 0,
        snapshot_dir: str | None = None,
        publish: PublishOptions | None = None,
        trajectory_dir: str | None = None,
        token_log: TokenLogOptions | None = None,
        profile: ProfileConfig | None = None,
        pool: str = "learner",
    ) -> None:
        super().__init__()
        keep_freed_memory(WORKER_BYTES)
        self._profile = profile or ProfileConfig()
        record.start(self._profile, process=f"{pool}-{self.rank}", pool=record.Pool.learner)
        self.role = role
        self.own_cache = BatchCache()
        self._version: int | None = None
        self._config = config = config.of_role(role.name)
        self._algorithm = algorithm
        self._measured_steps = role.measured_steps(config, algorithm)
        self._model_path = model_path
        self._total_steps = total_steps
        self._temperature = temperature
        self._connect_buffer = connect_buffer
        self._seed = seed
        self._buffer: LearnerBuffer | None = None
        self._checkpoints: dict[str, ShardedCheckpointer] = {}
        self._snapshot_dir = snapshot_dir
        self._publish = publish
        self._publisher: WeightPublisher | None = None
        self._log = TrajectoryLog(trajectory_dir) if trajectory_dir else None
        self._token_log_options = token_log
        dp_rank, sp_rank = divmod(self.rank, config.sp_size)
        self._register_dispatch_collect_info(_MESH, dp_rank=dp_rank, is_collect=sp_rank == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        """Join the process group, load the model and connect to the replay buffer.

        Raises `ValueError` for incompatible options.
        """
        from asyncrl.weights.publish import WeightPublisher

        from .advantages import BatchAdvantages
        from .model_shards import PretrainedShards
        from .offload import OffloadPolicy
        from .trainer import Trainer

        self.model, optimizer, step = self._load(), None, None
        if isinstance(self.model, Trainer):
            optimizer, step = self.model.optimizer, self._step
            self._advantages = BatchAdvantages(self._algorithm, self.model.mesh)
        # The first rank of a sequence-parallel group fetches the prompt groups, and sends them to the other ranks.
        if self._connect_buffer is not None and self.model.mesh.sp_rank == 0:
            self._buffer = self._connect_buffer()
        self._batches = RoleBatches(
            role=self.role,
            config=self._config,
            algorithm=self._algorithm,
            model=self.model,
            step=step,
            measured_steps=self._measured_steps,
            mesh=self.model.mesh if self._connect_buffer is None else self.model.mesh.on_host(),
            buffer=self._buffer,
        )
        if self._snapshot_dir is not None:
            self._publisher = WeightPublisher(
                PretrainedShards.of(self.model),
                self._snapshot_dir,
                keep=self._config.keep_snapshots,
                options=self._publish,
                log=self._buffer,
            )
        self.offload = OffloadPolicy(self._config, self.model.head, optimizer)
        self.cache.open_roles.add(self.role.name)
        gc.freeze()  # exclude the loaded objects from garbage collections, which would take longer and delay a step

    @beside
    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    def announce(self, batch: RankBatch) -> None:
        """Start to prepare the batch of a later step in a thread of this process. Returns immediately.

        The controller must announce the batches of a step in the order in which the roles of a process use these
        batches.
        """
        self.cache.preparer.announce(self._batches, batch)

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    @_recorded
    def score(self, batch: RankBatch, send: bool = True) -> DataProto | None:
        """Compute the role's scores, such as values, for the samples of a batch. An actor switches its adapters off.

        With ``send``, the first rank of a sequence-parallel (sp) group returns one row per trajectory: ``sample_key``
        [B, 2] int64 (group id, index in the group) and the scores, [tokens in the loss] float32 each. The other sp
        ranks return None. Without ``send``, the scores stay in this process for other roles. Raises `ValueError` if the
        role is an actor without adapters, and `BatchLost` if a rank needs a group that the buffer does not have.
        """
        own = self.cache.preparer.take(self._batches, batch)
        # Only the actor has adapters. It computes the reference policy's log-probs, so its adapters are off here.
        weights = self.model.frozen() if self.role.adapters else nullcontext()
        with self.offload.reading(), weights:
            values = self.model.scores(own.sequences, own.scored)
        parts: dict[SampleKey, list[np.ndarray]] = {key: [] for key in batch.sample_keys}
        for sequence, value in zip(own.sequences, values, strict=True):
            parts[sequence.trajectory].append(value[sequence.loss_mask])
        scores = {key: np.concatenate(each) for key, each in parts.items()}
        self.cache.scores[self.role.column] = batch.version, scores
        if not send or self.model.mesh.sp_rank != 0:
            return None
        column = np.empty(len(scores), dtype=object)  # `np.array` would join arrays of equal length into one array
        for row, value in enumerate(scores.values()):
            column[row] = value
        keys = np.array(list(scores), dtype=np.int64).reshape(-1, 2)
        return single_controller.DataProto(non_tensor_batch={"sample_key": keys, self.role.column: column})

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    @_recorded
    def rewards(self, batch: RankBatch) -> dict[SampleKey, float]:
        """Return the reward of each trajectory of a batch. The keys are (group id, index in the group).

        A reward is the reward model's score of the trajectory's last branch (path through its turns), plus the rewards
        of the trajectory's turns. Raises `BatchLost` if a rank needs a group that the buffer does not have.
        """
        own = self.cache.preparer.take(self._batches, batch)
        with self.offload.reading():
            scores = self.model.scores(own.sequences, own.scored)
        earned = {s.trajectory: float(score[-1]) for s, score in zip(own.sequences, scores, strict=True)}
        return {key: score + float(own.groups[key[0]].turn_sums[key[1]]) for key, score in earned.items()}

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    @_recorded
    def step(self, batch: RankBatch, *sent: DataProto | None) -> dict[str, float]:
        """Make one learner step. In the role's first `Role.measured_steps` steps, only compute the metrics.

        Args:
            batch: This rank's batch. All ranks of a sequence-parallel group get the same batch.
            sent: The result of `score` for each column of `Role.reads`, in order; None for a column that this process
                holds.

        Returns:
            The same dict on each rank, with the step's metrics and these entries:

            - ``digest``, only of the actor: `receipts.token_digest` of the tokens that all ranks have trained on;
            - ``fetch_s``, ``prepare_s`` and ``train_s``: seconds to wait for the batch, to prepare the batch, and to
              compute; each number is from the slowest rank;
            - ``started_at`` and ``ended_at``: when the earliest rank started the step, and when the latest rank ended
              it, in seconds since the Unix epoch;
            - ``lag_max``: the step's version minus the oldest version that sampled a token of the batch.

        Raises:
            StalenessError: a group is older than the staleness bound allows.
            ValueError: a column was neither sent nor computed in this process.
            BatchLost: on all ranks, if a rank needs a group that the buffer does not have. The weights have not
                changed. The calls queued after the step raise `BatchLost` too.
        """
        import torch

        started_at = time.time()
        self._check_turn(batch.version)
        self._version = batch.version
        own = self.cache.preparer.take(self._batches, batch)
        lag = _largest_lag(batch, own.groups)
        fetched_at = time.time()
        sequences = self._with_columns(batch, own.sequences, sent)
        with self.offload.updating(), self._torch_trace(batch.version):
            sequences, metrics = self._advantages.assign(sequences, batch.rewards, batch.sources)
            readable = self._for_people(batch.version, sequences)
            learn = self._step.measure if batch.version < self._measured_steps else self._step.run
            metrics |= learn(sequences, own.step)
        self._version = batch.version + 1
        ended_at = time.time()
        if self.role is ACTOR:
            metrics["digest"] = self._witness(batch, own.groups, sequences)
        self._write_logs(batch, own.groups, sequences, readable)
        times = {"fetch_s": fetched_at - started_at, "prepare_s": own.seconds, "train_s": ended_at - fetched_at}
        # Negate the start time, because `mesh.largest` then finds the earliest start of all ranks.
        times |= {"started_at": -started_at, "ended_at": ended_at, "lag_max": lag}
        with record.span(SpanKind.wait_ranks, step=batch.version):
            slowest = self.model.mesh.largest(torch.tensor(list(times.values()), dtype=torch.float64))
        times = dict(zip(times, slowest.tolist(), strict=True))
        return metrics | self.offload.metrics | times | {"started_at": -times["started_at"]}

    def _write_logs(
        self,
        batch: RankBatch,
        groups: Mapping[int, TrajectoryGroup],
        sequences: Sequence[TokenSequence],
        readable: Sequence[TokenSequence],
    ) -> None:
        if self._log is not None and self.model.mesh.sp_rank == 0:
            self._log.write(batch, groups, sequences, rank=self.model.mesh.dp_rank)
        if readable and self._token_log_options is not None and self.rank == 0:
            TrajectoryLog(self._token_log_options.directory).write(batch, groups, readable, rank=0)

    def _witness(
        self, batch: RankBatch, groups: Mapping[int, TrajectoryGroup], sequences: Sequence[TokenSequence]
    ) -> int:
        """Write this rank's receipt (a record of the step's tokens), and return the digest of all ranks' tokens."""
        import torch

        trained, mesh = trained_groups(batch, groups, sequences), self.model.mesh
        if mesh.sp_rank == 0:
            receipts.note(receipts.Act.trained, step=batch.version, rank=mesh.dp_rank, groups=trained)
        own = sum(group["digest"] for group in trained) % (1 << receipts.DIGEST_BITS)
        return int(mesh.sum_over_dp(torch.tensor(own, device=mesh.device))) % (1 << receipts.DIGEST_BITS)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def publish_weights(self, version: int) -> None:
        """Copy the weights, and publish them as ``version`` in the background. Rank 0 then offers them to the engines.

        Raises:
            ValueError: the role does not publish weights.
            WeightsError: publishing the previous version failed.
            BatchLost: the step before this call raised `BatchLost`.
        """
        if self._publisher is None:
            raise ValueError(f"role {self.role.name!r} cannot publish weights: its snapshot_dir is None; pass a folder")
        self._publish_copy(version)

    def _publish_copy(self, version: int, then: Callable[[], None] = lambda: None) -> None:
        """Copy and publish the weights. A rank calls ``then`` after it has copied its weights.

        Rank 0 offers the version to the engines after all ranks have called ``then``.
        """
        assert self._publisher is not None
        self._check_turn(version)
        self._version = version if self._version is None else self._version
        with record.span(SpanKind.publish_copy, version=version), self.offload.reading():
            self._publisher.publish(version, then=then)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def finish_publish(self) -> None:
        """Wait until engines can load the version of the latest `publish_weights`.

        Raises `WeightsError` if publishing failed.
        """
        if self._publisher is not None:
            self._publisher.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def forget_batch(self) -> list[int]:
        """Drop a lost batch and the batches after it. Later calls no longer raise `BatchLost` because of this batch.

        Returns the ids of the groups that this process did not find in the buffer, ascending.
        """
        self.cache.scores.clear()
        return self.cache.preparer.forget()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rollout_mode(self, version: int) -> None:
        """Publish the weights if the role publishes weights. Free device memory for engines on the same device.

        The options of `OffloadPolicy` say which tensors move to the host. Returns after rank 0 has offered the version
        to the engines. All ranks offload before the offer, because engines may load an offered version immediately.
        """
        if self._publisher is None:
            self.offload.enter_rollout()
        else:
            self._publish_copy(version, then=self.offload.enter_rollout)
            self.finish_publish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def trainer_mode(self) -> None:
        """Load the tensors that `rollout_mode` has moved to the host."""
        self.offload.enter_training()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_policy(self, directory: str) -> None:
        """Write model and tokenizer to ``directory`` in Hugging Face layout, with merged adapters."""
        from .model_folder import save_policy

        # The model may be on the host while engines use the device. `persisting` loads the model to the device.
        with self.offload.persisting(optimizer=False):
            save_policy(self.model, directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, directory: str, version: int = 0, wait: bool = True, **options: Any) -> str:
        """Save a checkpoint of this role's training state, and return the checkpoint's folder.

        ``options`` are other arguments of `ShardedCheckpointer.save`. Raises `ValueError` for a frozen role, and
        `BatchLost` if the step before this call raised `BatchLost`.
        """
        self._check_turn(version)
        checkpoints = self._checkpoints_in(directory)
        state = {"kl_reward_coef": self._advantages.kl_coefficient.value}
        with record.span(SpanKind.checkpoint, version=version), self.offload.persisting():
            return str(checkpoints.save(version, wait=wait, role=state, **options))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, directory: str) -> int | None:
        """Load a checkpoint, or the newest complete checkpoint of a folder, and return its policy version.

        Returns None if ``directory`` has no complete checkpoint.
        """
        checkpoints = self._checkpoints_in(directory)
        newest = checkpoints.latest()
        if newest is None:
            return None
        with self.offload.persisting():
            version = self._version = checkpoints.load(newest)
        # Restore only an adaptive KL coefficient: ``algorithm.kl_reward_coef`` may have changed since the save.
        if self._algorithm.kl_target:
            self._advantages.kl_coefficient.value = read_progress(newest).role["kl_reward_coef"]
        return version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def stop(self) -> None:
        """Finish the background work, and disconnect from the buffer.

        When all roles of the process have stopped, the process group is destroyed.
        """
        for checkpoints in self._checkpoints.values():
            checkpoints.finish()
        self.cache.preparer.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._buffer is not None:
            self._buffer.close()
        self.cache.open_roles.discard(self.role.name)
        if not self.cache.open_roles:
            import torch.distributed as dist

            record.stop()
            if dist.is_initialized():
                dist.destroy_process_group()

    @property
    def cache(self) -> BatchCache:
        """The cache that all roles of this process share."""
        sharing = (worker for worker in self.fused_worker_dict.values() if isinstance(worker, ModelWorker))
        return next(sharing, self).own_cache

    def _load(self) -> PackedModel:
        from .advantages import ADVANTAGES, is_token_level, is_turn_level
        from .packed_model import PackedModel
        from .trainer import LearnerStep, Trainer

        algorithm, options = self._algorithm, {"model_path": self._model_path, "temperature": self._temperature}
        if self.role.objective is None:
            return PackedModel(self._config, self.role, **options)
        estimator = ADVANTAGES.get(algorithm.advantage)
        reads_values = is_token_level(estimator) or is_turn_level(estimator)
        if self.role.name == CRITIC.name and algorithm.critic and not reads_values:
            raise ValueError(
                f"algorithm.critic=true needs a token-level or turn-level estimator, which reads values, got "
                f"algorithm.advantage={algorithm.advantage}; decorate your own estimator with learner.token_level or "
                "learner.turn_level, or set algorithm.critic=false"
            )
        total_updates = max(1, self._total_steps - self._measured_steps) * algorithm.num_mini_batches
        trainer = Trainer(self._config, self.role, total_updates=total_updates, seed=self._seed, **options)
        objective = self.role.objective(self._config, algorithm)
        self._step = LearnerStep(trainer, objective, num_mini_batches=algorithm.num_mini_batches)
        return trainer

    def _for_people(self, version: int, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """Return the sequences for the token log, with the learner's log-probs.

        In a step that is not logged, the list is empty. All ranks call this method together.
        """
        options = self._token_log_options
        if options is None or version % options.every_steps:
            return []
        chosen = sequences[: options.num_sequences]
        scores = self.model.scores(chosen)
        return [sequence.with_column(LEARNER_LOGPROBS, own) for sequence, own in zip(chosen, scores, strict=True)]

    def _with_columns(
        self, batch: RankBatch, sequences: Sequence[TokenSequence], sent: Sequence[DataProto | None]
    ) -> list[TokenSequence]:
        names = self.role.reads(self._algorithm)
        given = [*sent, *[None] * (len(names) - len(sent))]
        sequences = list(sequences)
        for name, rows in zip(names, given, strict=True):
            version, scores = self.cache.scores.get(name, (-1, {}))
            if rows is not None:
                keys, values = rows.non_tensor_batch["sample_key"].tolist(), rows.non_tensor_batch[name]
                version, scores = batch.version, {(g, s): value for (g, s), value in zip(keys, values, strict=True)}
            if version != batch.version:
                role = scored_by(name, self._config).name
                raise ValueError(
                    f"role {self.role.name!r} needs {name} of role {role!r} for version {batch.version}, got none; "
                    f"call {role}.score first, and pass its result to step if the roles do not share a process"
                )
            sequences = _with_scores(sequences, name, scores)
        return sequences

    def _checkpoints_in(self, directory: str) -> ShardedCheckpointer:
        if directory not in self._checkpoints:
            from .checkpoint import ShardedCheckpointer
            from .trainer import Trainer

            if not isinstance(self.model, Trainer):
                name = self.role.name
                raise ValueError(f"role {name!r} is frozen and has no checkpoints; its model path does not change")
            self._checkpoints[directory] = ShardedCheckpointer(self.model, directory)
        return self._checkpoints[directory]

    def _check_turn(self, version: int) -> None:
        if self._version is not None and version > self._version:
            raise BatchLost(
                f"role {self.role.name!r} is at version {self._version} and skips a call for version {version}, "
                "because the previous batch was lost"
            )

    @contextmanager
    def _torch_trace(self, version: int) -> Iterator[None]:
        if version not in self._profile.torch_steps or record.current() is None:
            yield
            return
        from torch.profiler import profile

        with profile(record_shapes=False) as trace:
            yield
        name = record.torch_trace_name(version, self.role.name, self.rank)
        trace.export_chrome_trace(str(Path(self._profile.directory, name)))


def _with_scores(sequences: Sequence[TokenSequence], name: str, scores: TokenScores) -> list[TokenSequence]:
    used = dict.fromkeys(scores, 0)
    scored = []
    for sequence in sequences:
        start, count = used[sequence.trajectory], int(np.count_nonzero(sequence.loss_mask))
        used[sequence.trajectory] += count
        scored.append(sequence.with_tokens(name, scores[sequence.trajectory][start : start + count]))
    return scored


def _largest_lag(batch: RankBatch, groups: Mapping[int, TrajectoryGroup]) -> int:
    """Return the largest lag of the batch's groups; 0 without groups.

    Raises `StalenessError` if a lag exceeds the batch's bound.
    """
    lags = {group_id: batch.version - group.oldest_version for group_id, group in groups.items()}
    for group_id, lag in lags.items():
        if not 0 <= lag <= batch.max_lag:
            raise StalenessError(
                f"group {group_id} has lag {lag} at learner version {batch.version}, outside 0..{batch.max_lag}; "
                "the ledger must not plan such a group"
            )
    return max(lags.values(), default=0)
