"""The learner's process in a run: one rank of the group, driven by the controller through the single controller.

It waits for nothing on its own: the controller's calls wake it. Fetching waits for the buffer under the client's
deadline, collectives wait for the other ranks under the process group's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.protocol.errors import StalenessError
from asyncrl.protocol.ports import TrajectorySource
from asyncrl.protocol.types import TrajectoryGroup, WeightSnapshot
from asyncrl.single_controller import Dispatch, Worker, register

from .checkpoint import Checkpointer
from .config import AlgorithmConfig, LearnerConfig
from .credit import CreditAssignment
from .offload import Residence
from .record import TrajectoryRecorder
from .scorer import PolicyScorer
from .step import PolicyStep
from .trainer import PolicyTrainer
from .types import RankBatch, TokenSequence, group_sequences
from .weights import SnapshotWriter, save_policy


def _shard_of_each_rank(
    group: Any, shards: Sequence[RankBatch], *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give all sp ranks of a data-parallel rank its shard; ranks are laid out dp-major."""
    sp_size, rest = divmod(group.world_size, len(shards))
    if rest or args or kwargs:
        raise ValueError(
            f"update_policy takes one batch a data-parallel rank, got {len(shards)} for {group.world_size}"
        )
    return ([shard for shard in shards for _ in range(sp_size)],), {}


def _all_results(_group: Any, results: Any) -> Any:
    return results


PER_DP_RANK = {"dispatch_fn": _shard_of_each_rank, "collect_fn": _all_results}


class LearnerWorker(Worker):
    """One rank of the learner group. Every method is called on all ranks together.

    Args:
        config: The group's options.
        algorithm: What is optimised.
        model_path: Directory in Hugging Face layout, with its tokenizer.
        total_steps: Learner steps of the run, for the schedule.
        temperature: Softmax temperature at sampling; log-probs are taken under it.
        connect_buffer: Opens this rank's connection to the replay buffer.
        snapshot_dir: Where published weights go; readable by the engines of this host.
        seed: Seeds dropout, where the model has any.
        trajectory_dir: Where consumed groups are recorded, a file a step and rank; None records nothing.
        checksums: Digest published tensors, so that engines can verify what they loaded.
    """

    def __init__(
        self,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        model_path: str,
        total_steps: int,
        temperature: float,
        connect_buffer: Callable[[], TrajectorySource],
        snapshot_dir: str,
        seed: int,
        trajectory_dir: str | None = None,
        checksums: bool = True,
    ) -> None:
        super().__init__()
        self._config = config
        self._algorithm = algorithm
        self._model_path = model_path
        self._total_steps = total_steps
        self._temperature = temperature
        self._connect_buffer = connect_buffer
        self._seed = seed
        self._snapshots = SnapshotWriter(snapshot_dir, keep=config.keep_snapshots, checksums=checksums)
        self._checkpoints: dict[str, Checkpointer] = {}
        self._recorder = TrajectoryRecorder(trajectory_dir) if trajectory_dir else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        """Join the group, load the model and connect to the buffer."""
        self._trainer = PolicyTrainer(
            self._config,
            model_path=self._model_path,
            total_updates=self._total_steps * self._algorithm.num_mini_batches,
            temperature=self._temperature,
            seed=self._seed,
        )
        reference = None
        if self._algorithm.kl_coef or self._algorithm.kl_reward_coef:
            reference = PolicyScorer(self._config, model_path=self._model_path, temperature=self._temperature)
        self._step = PolicyStep(self._trainer, self._algorithm, reference=reference)
        self._credit = CreditAssignment(self._algorithm, self._trainer.mesh)
        models = [scorer.model for scorer in (self._trainer, reference) if scorer is not None]
        self._residence = Residence(self._config, models, self._trainer.optimizer)
        # One rank of a sequence-parallel group fetches; the others get the groups from it.
        self._source = self._connect_buffer() if self._trainer.mesh.sp_rank == 0 else None

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    def update_policy(self, batch: RankBatch) -> dict[str, float]:
        """Make one learner step. The controller passes a list, one batch for every data-parallel rank.

        Args:
            batch: This rank's share; the sp ranks of a group have the same.

        Returns:
            The same on every rank: the trainer's metrics, ``fetch_s`` and ``train_s`` of the slowest rank,
            ``started_at`` of the first and ``ended_at`` of the last (seconds since the epoch), and ``lag_max``
            (learner steps).

        Raises:
            StalenessError: a group is older than the staleness bound allows.
        """
        started_at = time.time()
        groups = self._fetch(batch)
        lag = _largest_lag(batch, groups)
        fetched_at = time.time()
        with self._residence.updating():
            metrics, sequences = self._learn(batch, groups)
        ended_at = time.time()
        if self._recorder is not None and self._trainer.mesh.sp_rank == 0:
            self._recorder.write(batch.version, groups, sequences, rank=self._trainer.mesh.dp_rank)
        own = torch.tensor(
            [fetched_at - started_at, ended_at - fetched_at, -started_at, ended_at, lag], dtype=torch.float64
        )
        fetch_s, train_s, minus_start, ended_at, lag = self._trainer.mesh.largest(own).tolist()
        times = {"fetch_s": fetch_s, "train_s": train_s, "started_at": -minus_start, "ended_at": ended_at}
        return metrics | self._residence.metrics | times | {"lag_max": lag}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def publish_weights(self, version: int) -> WeightSnapshot:
        """Write the weights for the engines; the snapshot is there when rank 0 returns.

        Args:
            version: Learner steps contained in the weights.
        """
        with self._residence.reading():
            return self._snapshots.write(version, self._trainer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rollout_mode(self, version: int) -> WeightSnapshot:
        """Hand the devices over to colocated engines: publish the weights, then offload if the options say so.

        Args:
            version: Learner steps contained in the weights.
        """
        with self._residence.reading():
            snapshot = self._snapshots.write(version, self._trainer)
        self._residence.enter_rollout()
        return snapshot

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def trainer_mode(self) -> None:
        """Take the devices back from colocated engines: what `rollout_mode` moved away returns."""
        self._residence.enter_training()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_policy(self, directory: str) -> None:
        """Write model and tokenizer so that ``from_pretrained`` loads both from ``directory``."""
        with self._residence.reading():
            save_policy(self._trainer, directory)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, directory: str, version: int, wait: bool = True) -> str:
        """Save model, optimizer, schedule position and random state.

        Args:
            directory: Holds the checkpoints of the run.
            version: Learner steps contained in the weights.
            wait: Return when the checkpoint is whole; otherwise it is written while training goes on.

        Returns:
            Where the checkpoint is, or will be.
        """
        with self._residence.persisting():
            return str(self._checkpoints_in(directory).save(version, wait=wait))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def load_checkpoint(self, directory: str) -> int | None:
        """Restore the newest whole checkpoint of a directory.

        Returns:
            The policy version in it; None when there is no checkpoint, and nothing changed.
        """
        checkpoints = self._checkpoints_in(directory)
        newest = checkpoints.latest()
        if newest is None:
            return None
        with self._residence.persisting():
            return checkpoints.load(newest)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def stop(self) -> None:
        """Finish a checkpoint in the background, leave the group and close the connection to the buffer."""
        for checkpoints in self._checkpoints.values():
            checkpoints.finish()
        if self._source is not None:
            self._source.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _learn(
        self, batch: RankBatch, groups: Sequence[TrajectoryGroup]
    ) -> tuple[dict[str, float], list[TokenSequence]]:
        """Score the batch, give its tokens their advantages, and update the policy; returns metrics and sequences."""
        advantages = batch.advantages or [None] * len(groups)
        sequences = [
            sequence
            for group, values, mini_batch in zip(groups, advantages, batch.mini_batches, strict=True)
            for sequence in group_sequences(
                group, values, mini_batch=mini_batch, mask_truncated=self._algorithm.mask_truncated
            )
        ]
        sequences = self._step.scored(sequences)
        metrics: dict[str, float] = {}
        if batch.advantages is None:
            rewards = np.concatenate([np.zeros(0, np.float32), *batch.rewards])
            group_ids = np.repeat(batch.group_ids, [group.num_samples for group in groups])
            sequences, metrics = self._credit.assign(sequences, rewards, group_ids.astype(np.int64))
        return self._step.update(sequences) | metrics, sequences

    @property
    def _actor_model_offloaded(self) -> bool:
        return self._residence.model_offloaded

    @property
    def _actor_optimizer_offloaded(self) -> bool:
        return self._residence.optimizer_offloaded

    def _checkpoints_in(self, directory: str) -> Checkpointer:
        if directory not in self._checkpoints:
            self._checkpoints[directory] = Checkpointer(self._trainer, directory, keep=self._config.keep_checkpoints)
        return self._checkpoints[directory]

    def _fetch(self, batch: RankBatch) -> list[TrajectoryGroup]:
        """Get the groups of a batch, over one connection a sequence-parallel group."""
        groups = self._source.fetch(batch.group_ids) if self._source is not None and batch.group_ids else []
        mesh = self._trainer.mesh
        if mesh.sp_size == 1:
            return groups
        shared: list[object] = [groups]
        dist.broadcast_object_list(shared, group_src=0, group=mesh.sp_group)
        return shared[0]  # type: ignore[return-value]


def _largest_lag(batch: RankBatch, groups: Sequence[TrajectoryGroup]) -> int:
    """Largest lag of the batch's groups, 0 when there is none.

    Raises:
        StalenessError: a lag is outside the bound.
    """
    lags = [batch.version - group.summary.oldest_version for group in groups]
    for group_id, lag in zip(batch.group_ids, lags, strict=True):
        if not 0 <= lag <= batch.max_lag:
            raise StalenessError(
                f"group {group_id} has lag {lag} at learner version {batch.version}, outside 0..{batch.max_lag}; "
                "the ledger must not have planned it"
            )
    return max(lags, default=0)
