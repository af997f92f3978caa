"""One rank of a learner role: fetches its share of a batch, scores it, trains on it, publishes and saves.

The methods here are a run's own: they take a list of `RankBatch`, one per data-parallel rank. Each rank fetches its
prompt groups from the buffer, the caller does not wait, and what one role scored goes to another from worker to worker,
or stays in the process that both share. `learner.verl_api` adds verl's methods over the same trainer.

The controller imports this module for the names of the methods alone; so what needs torch, which takes seconds, is
imported where it is used.

A worker waits for nothing on its own: the controller's calls wake it. Fetching waits for the buffer under the client's
deadline, collectives wait for the other ranks under the process group's.
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

from asyncrl.core import record
from asyncrl.core.errors import BatchLost, DeadlineError, StalenessError, UnknownGroup
from asyncrl.core.host import WORKER_BYTES, keep_freed_memory
from asyncrl.core.ports import LearnerBuffer
from asyncrl.core.record import ProfileConfig, SpanKind
from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from asyncrl.single_controller.serialization import broadcast_value
from asyncrl.weights.carriers import PublishOptions

from .checkpoint_folder import read_progress
from .config import AlgorithmConfig, LearnerConfig
from .roles import CRITIC, Role, Scores, scored_by
from .trajectory_log import LEARNER_LOGPROBS, TokenLogOptions, TrajectoryLog
from .types import RankBatch, SampleKey, TokenSequence, group_sequences

if TYPE_CHECKING:
    from asyncrl.weights.publish import WeightPublisher

    from .checkpoint import ShardedCheckpointer
    from .packed_model import PackedModel

T = TypeVar("T")
logger = logging.getLogger(__name__)

_MESH = "dp"
_GROUP_FIELDS = tuple(field.name for field in fields(TrajectoryGroup))

BY_ROWS = make_nd_compute_dataproto_dispatch_fn(_MESH)
"""Dispatch of verl's methods: each data-parallel rank gets its part of the rows, its sp ranks the same part."""


def _share_of_each_rank(group: Any, *shares: Sequence[Any], **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give all sp ranks of a data-parallel rank its shares; ranks are laid out dp-major."""
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
"""Dispatch of a run's methods: lists of one entry per data-parallel rank; options by name go to everyone."""


def _recorded(method: Callable[..., T]) -> Callable[..., T]:
    """Note for the run's profile when a method worked on a batch, its first argument."""
    kind = SpanKind.update if method.__name__ == "step" else SpanKind.score

    @wraps(method)
    def recorded(self: ModelWorker, batch: RankBatch, *arguments: Any, **options: Any) -> T:
        with record.span(kind, step=batch.version, cause=self.role.name):
            record.cpu()
            return method(self, batch, *arguments, **options)

    return recorded


class BatchCache:
    """What the roles of one process share of a learner step: the fetched groups, and what each role scored.

    Attributes:
        open_roles: Roles that have not stopped; the last one leaves the process group.
        lost: Groups that the buffer no longer had when they were to be fetched.
    """

    def __init__(self) -> None:
        self.open_roles: set[str] = set()
        self.lost: set[int] = set()
        self._groups: tuple[int, dict[int, TrajectoryGroup]] = (-1, {})
        self._scores: dict[str, tuple[int, Scores]] = {}

    def groups(self, version: int) -> dict[int, TrajectoryGroup]:
        """Groups of a step by id, to be read and added to; those of another step are forgotten."""
        if self._groups[0] != version:
            self._groups = (version, {})
        return self._groups[1]

    def clear(self) -> None:
        """Forget everything: the step is made on another batch."""
        self.lost = set()
        self._groups = (-1, {})
        self._scores = {}

    def keep_scores(self, version: int, column: str, scores: Scores) -> None:
        """Keep a column of a step; it replaces that of another step."""
        self._scores[column] = (version, scores)

    def scores(self, version: int, column: str) -> Scores | None:
        """A column of a step, or None where no role of this process scored it."""
        known, scores = self._scores.get(column, (-1, {}))
        return scores if known == version else None


class ModelWorker(Worker):
    """One rank of a role. Every method is called on all ranks together.

    Args:
        role: What it loads, computes and learns.
        config: Options of the group that the role runs in; ``num_ranks`` is that of its pool.
        algorithm: What is optimised.
        model_path: Directory in Hugging Face layout.
        total_steps: Learner steps of the run, for the schedule.
        temperature: Softmax temperature at sampling; log-probs are taken under it.
        connect_buffer: Opens this rank's connection to the replay buffer; None where only verl's methods are called.
        seed: Seeds the adapters and their dropout.
        snapshot_dir: Where published weights go, readable by the engines of this host; None publishes none.
        publish: How weights are published.
        trajectory_dir: Where consumed samples are logged, one file per step and rank; None logs nothing.
        token_log: What is kept for people to read; None keeps nothing.
        profile: What this process records of its time, as ``pool`` and its rank.
        pool: Name of the pool that the role runs in.

    Attributes:
        own_cache: The cache of this worker, which the first role of a process shares with the others.
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
        # One rank of a sequence-parallel group fetches; the others get the groups from it.
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
        gc.freeze()  # what was loaded stays: a step would wait for each look at all of it

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    @_recorded
    def score(self, batch: RankBatch, send: bool = True) -> Scores | None:
        """Score the role's column for planned samples, under the weights that the run starts from where it is frozen.

        Under ``send`` the first sp rank returns the scores; otherwise they stay in this process, for its other roles.
        Raises `ValueError` if the role is the actor, and has no adapters to switch off; `BatchLost` as `step` does.
        """
        self._fetch_on_all(batch)
        scores = self._scored(batch)
        self.cache.keep_scores(batch.version, self.role.column, scores)
        return scores if send and self._model.mesh.sp_rank == 0 else None

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    @_recorded
    def rewards(self, batch: RankBatch) -> dict[SampleKey, float]:
        """What each planned trajectory earned: the reward model's score of its last branch, and its turns' rewards.

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
    def step(self, batch: RankBatch, *sent: Scores | None) -> dict[str, float]:
        """Make one learner step; in its measured steps the role is only measured.

        Args:
            batch: This rank's share; the sp ranks of a group have the same.
            sent: One entry per column that the role reads, in the order of `Role.reads`: what another role scored;
                None where the scores are in this process.

        Returns:
            The same on every rank: the step's metrics, ``fetch_s`` and ``train_s`` of the slowest rank,
            ``started_at`` of the first and ``ended_at`` of the last (seconds since the epoch), and ``lag_max``
            (learner steps).

        Raises `StalenessError` if a group is older than the staleness bound allows, `ValueError` if a column was
        neither sent nor scored in this process, and on all ranks `BatchLost` if the buffer no longer has a group that
        one of them needs. Nothing has changed then, and what is queued behind the step raises it too.
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
        """Copy the weights, and publish them in the background; rank 0 offers them to the engines.

        Raises `ValueError` if the role publishes nothing, `WeightsError` if the version before failed, `BatchLost` if
        the step that was to make the version has raised it.
        """
        if self._publisher is None:
            raise ValueError(f"role {self.role.name!r} publishes no weights: it was given no snapshot_dir")
        self._check_turn(version)
        self._version = version if self._version is None else self._version
        with record.span(SpanKind.publish_copy, version=version), self._offload.reading():
            self._publisher.publish(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def finish_publish(self) -> None:
        """Wait until the version that is on its way is offered. Raises `WeightsError` if it could not be published."""
        if self._publisher is not None:
            self._publisher.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def forget_batch(self) -> list[int]:
        """Let go of a batch that was lost, which is planned anew; the groups of it that this process did not find."""
        lost = sorted(self.cache.lost)
        self.cache.clear()
        return lost

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rollout_mode(self, version: int) -> None:
        """Publish the weights, where the role publishes any, and offload for colocated engines as the options say."""
        if self._publisher is not None:
            self.publish_weights(version)
        self._offload.enter_rollout()
        self.finish_publish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def trainer_mode(self) -> None:
        """Take the devices back from colocated engines: what `rollout_mode` moved away returns."""
        self._offload.enter_training()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_policy(self, directory: str) -> None:
        """Write model and tokenizer so that ``from_pretrained`` loads both from ``directory``."""
        from .model_folder import save_policy

        with self._offload.reading():
            save_policy(self._model, directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(
        self, directory: str, version: int = 0, wait: bool = True, run: Mapping[str, Any] | None = None
    ) -> str:
        """See `ShardedCheckpointer.save`; raises `ValueError` for a frozen role, `BatchLost` as `publish_weights`."""
        self._check_turn(version)
        checkpoints = self._checkpoints_in(directory)
        state = {"kl_reward_coef": self._advantages.kl_coefficient.value}
        with record.span(SpanKind.checkpoint, version=version), self._offload.persisting():
            return str(checkpoints.save(version, wait=wait, role=state, run=run))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, directory: str) -> int | None:
        """Restore the newest whole checkpoint of a folder, or one itself; returns its version, or None without any."""
        checkpoints = self._checkpoints_in(directory)
        newest = checkpoints.latest()
        if newest is None:
            return None
        with self._offload.persisting():
            version = self._version = checkpoints.load(newest)
        if self._algorithm.kl_target:  # a fixed coefficient is the option's, also where that was changed
            self._advantages.kl_coefficient.value = read_progress(newest).role["kl_reward_coef"]
        return version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def stop(self) -> None:
        """Finish a checkpoint in the background, leave the group and close the connection to the buffer."""
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
        """The cache of this process: that of the first role in it."""
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
        # A role with adapters scores under the weights that the run started from, the others under those of now.
        weights = self._model.frozen() if self.role.adapters else nullcontext()
        sequences = self._sequences(batch)
        with self._offload.reading(), weights:
            values = self._model.scores(sequences)
        scores: dict[SampleKey, list[np.ndarray]] = {key: [] for key in batch.sample_keys}
        for sequence, value in zip(sequences, values, strict=True):
            scores[sequence.trajectory].append(value[sequence.loss_mask])
        return {key: np.concatenate(parts) for key, parts in scores.items()}

    def _for_people(self, version: int, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """In the steps that are due, this rank's first sequences with its own log-probs; a collective there."""
        options = self._token_log_options
        if options is None or version % options.every_steps:
            return []
        chosen = sequences[: options.num_sequences]
        scores = self._model.scores(chosen)
        return [sequence.with_column(LEARNER_LOGPROBS, own) for sequence, own in zip(chosen, scores, strict=True)]

    def _with_columns(
        self, batch: RankBatch, sequences: Sequence[TokenSequence], sent: Sequence[Scores | None]
    ) -> list[TokenSequence]:
        """The sequences with the columns that the role reads."""
        names = self.role.reads(self._algorithm)
        given = [*sent, *[None] * (len(names) - len(sent))]
        sequences = list(sequences)
        for name, scores in zip(names, given, strict=True):
            scores = scores if scores is not None else self.cache.scores(batch.version, name)
            if scores is None:
                role = scored_by(name, self._config).name
                raise ValueError(
                    f"role {self.role.name!r} needs {name} of role {role!r} for version {batch.version}, got none; "
                    f"call {role}.score first, and pass on what it returns where the two do not share a process"
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
        """Raise `BatchLost` for what follows a step that was not made."""
        if self._version is not None and version > self._version:
            raise BatchLost(
                f"role {self.role.name!r} is at version {self._version}: what was queued for version {version} is not "
                "done, because the batch before it was lost"
            )

    def _fetch_on_all(self, batch: RankBatch) -> dict[int, TrajectoryGroup]:
        """As `_fetch`, or `BatchLost` on all ranks of the role if one of them did not find a group; a collective."""
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
        """The groups of a batch by id, as far as the buffer has them.

        What no role of this process fetched comes over one connection per sp group.
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
            columns = [{name: getattr(group, name) for name in _GROUP_FIELDS} for group in groups]
            groups = [TrajectoryGroup(**group) for group in broadcast_value(columns, mesh.sp_group)]
        return groups

    @contextmanager
    def _torch_trace(self, version: int) -> Iterator[None]:
        """Write a trace of torch.profiler of what runs inside, where ``profile.torch_steps`` names the step."""
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
    """The groups that the buffer has. One that a store did not answer for is asked for again: it may be gone by now."""
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


def _with_scores(sequences: Sequence[TokenSequence], name: str, scores: Scores) -> list[TokenSequence]:
    """The sequences with a column of scores at the tokens in the loss, 0 elsewhere."""
    used = dict.fromkeys(scores, 0)
    scored = []
    for sequence in sequences:
        start, count = used[sequence.trajectory], int(np.count_nonzero(sequence.loss_mask))
        used[sequence.trajectory] += count
        scored.append(sequence.with_tokens(name, scores[sequence.trajectory][start : start + count]))
    return scored


def _largest_lag(batch: RankBatch, groups: Mapping[int, TrajectoryGroup]) -> int:
    """Largest lag of the batch's groups, 0 when there is none; one outside the bound is a `StalenessError`."""
    lags = {group_id: batch.version - group.summary.oldest_version for group_id, group in groups.items()}
    for group_id, lag in lags.items():
        if not 0 <= lag <= batch.max_lag:
            raise StalenessError(
                f"group {group_id} has lag {lag} at learner version {batch.version}, outside 0..{batch.max_lag}; "
                "the ledger must not have planned it"
            )
    return max(lags.values(), default=0)
