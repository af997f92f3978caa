"""One rank of a learner role: fetches its share of a batch, scores it, trains on it, publishes and saves.

A run calls these methods with a list of `RankBatch`, one per data-parallel rank, and does not wait for them. Each rank
fetches its prompt groups from the buffer. The scores of one role go to another from worker to worker, or stay in the
process that both share. `learner.verl_api` adds verl's methods over the same trainer.

The controller imports this module only to know the methods. Imports that load torch therefore stand in functions.

The controller's calls wake a worker. A fetch waits for the buffer under the client's deadline, and a collective waits
for the other ranks under the deadline of the process group.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from asyncrl import single_controller
from asyncrl.core import record
from asyncrl.core.errors import BatchLost, DeadlineError, StalenessError, UnknownGroup
from asyncrl.core.host import WORKER_BYTES, keep_freed_memory
from asyncrl.core.ports import LearnerBuffer
from asyncrl.core.record import ProfileConfig, SpanKind
from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from asyncrl.weights.carriers import PublishOptions

from .checkpoint_folder import read_progress
from .config import AlgorithmConfig, LearnerConfig
from .roles import CRITIC, Role, Scores, scored_by
from .trajectory_log import LEARNER_LOGPROBS, TokenLogOptions, TrajectoryLog
from .types import RankBatch, SampleKey, TokenSequence, group_sequences

if TYPE_CHECKING:
    from asyncrl.single_controller import DataProto
    from asyncrl.weights.publish import WeightPublisher

    from .checkpoint import ShardedCheckpointer
    from .packed_model import PackedModel

T = TypeVar("T")
logger = logging.getLogger(__name__)

_MESH = "dp"
_GROUP_FIELDS = tuple(field.name for field in fields(TrajectoryGroup))

BY_ROWS = make_nd_compute_dataproto_dispatch_fn(_MESH)
"""Dispatch of verl's methods: the sp ranks of a data-parallel rank get the same part of the rows."""


def _share_of_each_rank(group: Any, *shares: Sequence[Any], **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the sp ranks of each data-parallel rank its entry of every list. The ranks are ordered dp-major."""
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
"""Dispatch of a run's methods: lists with one entry per data-parallel rank; keyword arguments go to every rank."""


def _recorded(method: Callable[..., T]) -> Callable[..., T]:
    """Record the time that a method spends on a batch, its first argument, for the run's profile."""
    kind = SpanKind.update if method.__name__ == "step" else SpanKind.score

    @wraps(method)
    def recorded(self: ModelWorker, batch: RankBatch, *arguments: Any, **options: Any) -> T:
        with record.span(kind, step=batch.version, cause=self.role.name):
            record.cpu()
            return method(self, batch, *arguments, **options)

    return recorded


class BatchCache:
    """What the roles of one process share in a learner step: the fetched groups and each role's scores.

    Attributes:
        open_roles: Roles that have not stopped; the last one leaves the process group.
        lost: Groups that a fetch did not find in the buffer.
    """

    def __init__(self) -> None:
        self.open_roles: set[str] = set()
        self.lost: set[int] = set()
        self._groups: tuple[int, dict[int, TrajectoryGroup]] = (-1, {})
        self._scores: dict[str, tuple[int, Scores]] = {}

    def groups(self, version: int) -> dict[int, TrajectoryGroup]:
        """The groups of a step by id, for reading and adding. Drops the groups of another step."""
        if self._groups[0] != version:
            self._groups = (version, {})
        return self._groups[1]

    def clear(self) -> None:
        """Drop everything, because the step gets another batch."""
        self.lost = set()
        self._groups = (-1, {})
        self._scores = {}

    def keep_scores(self, version: int, column: str, scores: Scores) -> None:
        """Keep a column of a step in place of the one kept before."""
        self._scores[column] = (version, scores)

    def scores(self, version: int, column: str) -> Scores | None:
        """A column of a step, or None if no role of this process has scored it."""
        known, scores = self._scores.get(column, (-1, {}))
        return scores if known == version else None


class ModelWorker(Worker):
    """One rank of a role. Every method is called on all ranks.

    Args:
        role: What it loads, computes and learns.
        config: Options of the group that the role runs in; ``num_ranks`` is that of its pool.
        algorithm: What is optimised.
        model_path: Directory in Hugging Face layout.
        total_steps: Learner steps of the run, for the schedule.
        temperature: Softmax temperature at sampling; log-probs are taken under it.
        connect_buffer: Connects this rank to the replay buffer; None if only verl's methods are called.
        seed: Seeds the adapters and their dropout.
        snapshot_dir: Folder of published weights, readable by the engines of this host; None publishes none.
        publish: How weights are published.
        trajectory_dir: Folder of consumed samples, one file per step and rank; None logs none.
        token_log: Which samples are kept for people to read; None keeps none.
        profile: What this process records of its time, as ``pool`` and its rank.
        pool: Name of the pool that the role runs in.

    Attributes:
        own_cache: The cache of this worker. The first role of a process shares its cache with the others.
    """

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
        self._config = config
        self._algorithm = algorithm
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
        """Join the group, load the model, connect to the buffer. Raises `ValueError` for options that do not fit."""
        from asyncrl.weights.publish import WeightPublisher

        from .advantages import BatchAdvantages
        from .model_shards import PretrainedShards
        from .offload import OffloadPolicy
        from .trainer import Trainer

        self._model, optimizer = self._load(), None
        if isinstance(self._model, Trainer):
            optimizer = self._model.optimizer
            self._advantages = BatchAdvantages(self._algorithm, self._model.mesh)
        # One rank of a sequence-parallel group fetches, and sends the groups to the others.
        if self._connect_buffer is not None and self._model.mesh.sp_rank == 0:
            self._buffer = self._connect_buffer()
        if self._snapshot_dir is not None:
            self._publisher = WeightPublisher(
                PretrainedShards.of(self._model),
                self._snapshot_dir,
                keep=self._config.keep_snapshots,
                options=self._publish,
                log=self._buffer,
            )
        self._offload = OffloadPolicy(self._config, self._model.head, optimizer)
        self.cache.open_roles.add(self.role.name)
        gc.freeze()  # a collection of everything that was loaded would delay a step

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    @_recorded
    def score(self, batch: RankBatch, send: bool = True) -> DataProto | None:
        """Score the role's column for planned samples. A frozen role uses the weights that the run starts from.

        With ``send`` the first sp rank returns the scores, one row per trajectory: ``sample_key`` [B, 2] int64 and the
        role's column, [tokens in the loss] float32 each. Otherwise they stay in this process for its other roles.
        Raises `ValueError` if the role is an actor without adapters, and `BatchLost` as `step` does.
        """
        self._fetch_on_all(batch)
        scores = self._scored(batch)
        self.cache.keep_scores(batch.version, self.role.column, scores)
        return _rows_of(scores, self.role.column) if send and self._model.mesh.sp_rank == 0 else None

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    @_recorded
    def rewards(self, batch: RankBatch) -> dict[SampleKey, float]:
        """The reward of each planned trajectory: the score of its last branch, plus the rewards of its turns.

        Raises `BatchLost` as `step` does.
        """
        groups = self._fetch_on_all(batch)
        sequences = self._sequences(batch)
        with self._offload.reading():
            scores = self._model.scores(sequences)
        earned = {s.trajectory: float(score[-1]) for s, score in zip(sequences, scores, strict=True)}
        return {key: score + float(groups[key[0]].turn_sums[key[1]]) for key, score in earned.items()}

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    @_recorded
    def step(self, batch: RankBatch, *sent: DataProto | None) -> dict[str, float]:
        """Make one learner step. In the measured steps of the role, only compute the metrics.

        Args:
            batch: This rank's share; the sp ranks of a group have the same.
            sent: What `score` returned for each column, in the order of `Role.reads`; None if it is in this process.

        Returns:
            The same on every rank: the step's metrics, ``fetch_s`` and ``train_s`` of the slowest rank,
            ``started_at`` of the first and ``ended_at`` of the last (seconds since the epoch), and ``lag_max``
            (learner steps).

        Raises:
            StalenessError: a group is older than the staleness bound allows.
            ValueError: a column was neither sent nor scored in this process.
            BatchLost: on all ranks, if the buffer no longer has a group that one of them needs. No rank has changed
                anything, and the calls queued behind the step raise it too.
        """
        import torch

        started_at = time.time()
        self._check_turn(batch.version)
        self._version = batch.version
        groups = self._fetch_on_all(batch)
        lag = _largest_lag(batch, groups)
        fetched_at = time.time()
        sequences = self._with_columns(batch, self._sequences(batch), sent)
        with self._offload.updating(), self._torch_trace(batch.version):
            sequences, metrics = self._advantages.assign(sequences, batch.rewards)
            readable = self._for_people(batch.version, sequences)
            learn = self._step.measure if batch.version < self._measured_steps else self._step.run
            metrics |= learn(sequences)
        self._version = batch.version + 1
        ended_at = time.time()
        if self._log is not None and self._model.mesh.sp_rank == 0:
            self._log.write(batch, groups, sequences, rank=self._model.mesh.dp_rank)
        if readable and self._token_log_options is not None and self.rank == 0:
            TrajectoryLog(self._token_log_options.directory).write(batch, groups, readable, rank=0)
        own = [fetched_at - started_at, ended_at - fetched_at, -started_at, ended_at, lag]
        with record.span(SpanKind.wait_ranks, step=batch.version):
            slowest = self._model.mesh.largest(torch.tensor(own, dtype=torch.float64))
        fetch_s, train_s, minus_start, ended_at, lag = slowest.tolist()
        times = {"fetch_s": fetch_s, "train_s": train_s, "started_at": -minus_start, "ended_at": ended_at}
        return metrics | self._offload.metrics | times | {"lag_max": lag}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def publish_weights(self, version: int) -> None:
        """Copy the weights and publish them in the background; rank 0 offers them to the engines.

        Raises `ValueError` if the role publishes nothing, `WeightsError` if the previous version failed, and
        `BatchLost` if the step before it raised that.
        """
        if self._publisher is None:
            raise ValueError(f"role {self.role.name!r} publishes no weights: it was given no snapshot_dir")
        self._check_turn(version)
        self._version = version if self._version is None else self._version
        with record.span(SpanKind.publish_copy, version=version), self._offload.reading():
            self._publisher.publish(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def finish_publish(self) -> None:
        """Wait until the version being published is offered. Raises `WeightsError` if publishing failed."""
        if self._publisher is not None:
            self._publisher.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def forget_batch(self) -> list[int]:
        """Drop a lost batch; returns the groups of it that this process did not find."""
        lost = sorted(self.cache.lost)
        self.cache.clear()
        return lost

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rollout_mode(self, version: int) -> None:
        """Publish the weights if the role publishes any, and offload as the options say."""
        if self._publisher is not None:
            self.publish_weights(version)
        self._offload.enter_rollout()
        self.finish_publish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def trainer_mode(self) -> None:
        """Load back what `rollout_mode` offloaded."""
        self._offload.enter_training()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_policy(self, directory: str) -> None:
        """Write model and tokenizer to ``directory`` in Hugging Face layout."""
        from .model_folder import save_policy

        with self._offload.reading():
            save_policy(self._model, directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(
        self, directory: str, version: int = 0, wait: bool = True, run: Mapping[str, Any] | None = None
    ) -> str:
        """Save a checkpoint and return its folder, as `ShardedCheckpointer.save` does.

        Raises `ValueError` for a frozen role, and `BatchLost` as `publish_weights` does.
        """
        self._check_turn(version)
        checkpoints = self._checkpoints_in(directory)
        state = {"kl_reward_coef": self._advantages.kl_coefficient.value}
        with record.span(SpanKind.checkpoint, version=version), self._offload.persisting():
            return str(checkpoints.save(version, wait=wait, role=state, run=run))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, directory: str) -> int | None:
        """Load a checkpoint, or the newest complete one of a folder. Returns its version, or None if there is none."""
        checkpoints = self._checkpoints_in(directory)
        newest = checkpoints.latest()
        if newest is None:
            return None
        with self._offload.persisting():
            version = self._version = checkpoints.load(newest)
        if self._algorithm.kl_target:  # a fixed coefficient follows the option, which may have changed
            self._advantages.kl_coefficient.value = read_progress(newest).role["kl_reward_coef"]
        return version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def stop(self) -> None:
        """Finish the background checkpoint, leave the process group and close the connection to the buffer."""
        for checkpoints in self._checkpoints.values():
            checkpoints.finish()
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
        """The cache of this process, which belongs to its first role."""
        sharing = (worker for worker in self.fused_worker_dict.values() if isinstance(worker, ModelWorker))
        return next(sharing, self).own_cache

    def _load(self) -> PackedModel:
        """The role's model, with an optimizer where it is trained."""
        from .advantages import ADVANTAGES, is_token_level
        from .packed_model import PackedModel
        from .trainer import LearnerStep, Trainer

        algorithm, options = self._algorithm, {"model_path": self._model_path, "temperature": self._temperature}
        if self.role.objective is None:
            return PackedModel(self._config, self.role, **options)
        if (
            self.role.name == CRITIC.name
            and algorithm.critic
            and not is_token_level(ADVANTAGES.get(algorithm.advantage))
        ):
            raise ValueError(
                f"algorithm.critic=true needs an estimator of tokens, which reads values, got algorithm.advantage="
                f"{algorithm.advantage}; mark your own with learner.token_level, or set algorithm.critic=false"
            )
        self._measured_steps = self.role.measured_steps(self._config, algorithm)
        total_updates = max(1, self._total_steps - self._measured_steps) * algorithm.num_mini_batches
        trainer = Trainer(self._config, self.role, total_updates=total_updates, seed=self._seed, **options)
        objective = self.role.objective(self._config, algorithm)
        self._step = LearnerStep(trainer, objective, num_mini_batches=algorithm.num_mini_batches)
        return trainer

    def _scored(self, batch: RankBatch) -> dict[SampleKey, np.ndarray]:
        """[tokens in the loss] float32 per trajectory of the batch, branch after branch."""
        # A role with adapters scores under the weights that the run started from, other roles under their present ones.
        weights = self._model.frozen() if self.role.adapters else nullcontext()
        sequences = self._sequences(batch)
        with self._offload.reading(), weights:
            values = self._model.scores(sequences)
        scores: dict[SampleKey, list[np.ndarray]] = {key: [] for key in batch.sample_keys}
        for sequence, value in zip(sequences, values, strict=True):
            scores[sequence.trajectory].append(value[sequence.loss_mask])
        return {key: np.concatenate(parts) for key, parts in scores.items()}

    def _for_people(self, version: int, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """In steps that are due, this rank's first sequences with its own log-probs. A collective in these steps."""
        options = self._token_log_options
        if options is None or version % options.every_steps:
            return []
        chosen = sequences[: options.num_sequences]
        scores = self._model.scores(chosen)
        return [sequence.with_column(LEARNER_LOGPROBS, own) for sequence, own in zip(chosen, scores, strict=True)]

    def _with_columns(
        self, batch: RankBatch, sequences: Sequence[TokenSequence], sent: Sequence[DataProto | None]
    ) -> list[TokenSequence]:
        """The sequences with all columns that the role reads."""
        names = self.role.reads(self._algorithm)
        given = [*sent, *[None] * (len(names) - len(sent))]
        sequences = list(sequences)
        for name, rows in zip(names, given, strict=True):
            scores = self.cache.scores(batch.version, name) if rows is None else _scores_in(rows, name)
            if scores is None:
                role = scored_by(name, self._config).name
                raise ValueError(
                    f"role {self.role.name!r} needs {name} of role {role!r} for version {batch.version}, got none; "
                    f"call {role}.score first, and pass its result on if the roles do not share a process"
                )
            sequences = _with_scores(sequences, name, scores)
        return sequences

    def _checkpoints_in(self, directory: str) -> ShardedCheckpointer:
        if directory not in self._checkpoints:
            from .checkpoint import ShardedCheckpointer
            from .trainer import Trainer

            if not isinstance(self._model, Trainer):
                name = self.role.name
                raise ValueError(f"role {name!r} is frozen: it has no checkpoints; its model stays where it was")
            keep = self._config.keep_checkpoints
            self._checkpoints[directory] = ShardedCheckpointer(self._model, directory, keep=keep)
        return self._checkpoints[directory]

    def _check_turn(self, version: int) -> None:
        """Raise `BatchLost` for a call that follows a lost step."""
        if self._version is not None and version > self._version:
            raise BatchLost(
                f"role {self.role.name!r} is at version {self._version} and skips a call for version {version}, "
                "because the batch before it was lost"
            )

    def _fetch_on_all(self, batch: RankBatch) -> dict[int, TrajectoryGroup]:
        """As `_fetch`. If one rank did not find a group, all ranks raise `BatchLost`. A collective."""
        import torch

        groups = self._fetch(batch)
        lost = set(batch.group_ids).difference(groups)
        self.cache.lost |= lost
        most_lost = int(self._model.mesh.largest(torch.tensor([len(lost)], dtype=torch.float64)).item())
        if most_lost:
            raise BatchLost(
                f"the batch of step {batch.version} is lost: rank {self.rank} of {self.role.name!r} did not find "
                f"{len(lost)} of its {len(batch.group_ids)} groups in the buffer, one rank {most_lost}"
            )
        return groups

    def _fetch(self, batch: RankBatch) -> dict[int, TrajectoryGroup]:
        """The groups of a batch by id, without those that the buffer does not have.

        One rank per sp group fetches what no role of this process has fetched yet.
        """
        known = self.cache.groups(batch.version)
        missing = [group_id for group_id in batch.group_ids if group_id not in known]
        if missing:
            with record.span(SpanKind.fetch, step=batch.version):
                known.update((group.group_id, group) for group in self._fetch_missing(missing))
        return {group_id: known[group_id] for group_id in batch.group_ids if group_id in known}

    def _fetch_missing(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        groups = _found(self._buffer, group_ids) if self._buffer is not None else []
        mesh = self._model.mesh
        if mesh.sp_size > 1:
            from asyncrl.single_controller.serialization import broadcast_value

            columns = [{name: getattr(group, name) for name in _GROUP_FIELDS} for group in groups]
            groups = [TrajectoryGroup(**group) for group in broadcast_value(columns, mesh.sp_group)]
        return groups

    @contextmanager
    def _torch_trace(self, version: int) -> Iterator[None]:
        """Write a trace of torch.profiler of the block if ``profile.torch_steps`` names the step."""
        if version not in self._profile.torch_steps or record.current() is None:
            yield
            return
        from torch.profiler import profile

        with profile(record_shapes=False) as trace:
            yield
        name = record.torch_trace_name(version, self.role.name, self.rank)
        trace.export_chrome_trace(str(Path(self._profile.directory, name)))

    def _sequences(self, batch: RankBatch) -> list[TokenSequence]:
        """The sequences of a batch, share by share."""
        groups = self._fetch(batch)
        return [
            sequence
            for share in batch.shares
            for sequence in group_sequences(
                groups[share.group_id],
                samples=share.samples,
                mini_batch=share.mini_batch,
                mask_truncated=self._algorithm.mask_truncated,
                all_columns=self._algorithm.has_own_loss,
            )
        ]


def _found(buffer: LearnerBuffer, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    """The groups that the buffer has. After a `DeadlineError` it is asked again: the store may be gone by then."""
    with suppress(UnknownGroup):
        try:
            return buffer.fetch(group_ids)
        except DeadlineError as late:
            logger.warning("fetched again: %s", late)
            return buffer.fetch(group_ids)
    found: list[TrajectoryGroup] = []
    for group_id in group_ids:
        with suppress(UnknownGroup):
            found += buffer.fetch([group_id])
    return found


def _rows_of(scores: Scores, column: str) -> DataProto:
    """Scores as a batch with one row per trajectory."""
    values = np.empty(len(scores), dtype=object)
    for row, value in enumerate(scores.values()):
        values[row] = value
    keys = np.array(list(scores), dtype=np.int64).reshape(-1, 2)
    return single_controller.DataProto(non_tensor_batch={"sample_key": keys, column: values})


def _scores_in(rows: DataProto, column: str) -> Scores:
    """The inverse of `_rows_of`."""
    arrays = rows.non_tensor_batch
    return {(g, s): value for (g, s), value in zip(arrays["sample_key"].tolist(), arrays[column], strict=True)}


def _with_scores(sequences: Sequence[TokenSequence], name: str, scores: Scores) -> list[TokenSequence]:
    """The sequences with a column: scores at the tokens in the loss, 0 elsewhere."""
    used = dict.fromkeys(scores, 0)
    scored = []
    for sequence in sequences:
        start, count = used[sequence.trajectory], int(np.count_nonzero(sequence.loss_mask))
        used[sequence.trajectory] += count
        scored.append(sequence.with_tokens(name, scores[sequence.trajectory][start : start + count]))
    return scored


def _largest_lag(batch: RankBatch, groups: Mapping[int, TrajectoryGroup]) -> int:
    """The largest lag of the batch's groups, 0 without groups. Raises `StalenessError` for one outside the bound."""
    lags = {group_id: batch.version - group.summary.oldest_version for group_id, group in groups.items()}
    for group_id, lag in lags.items():
        if not 0 <= lag <= batch.max_lag:
            raise StalenessError(
                f"group {group_id} has lag {lag} at learner version {batch.version}, outside 0..{batch.max_lag}; "
                "the ledger must not have planned it"
            )
    return max(lags.values(), default=0)
