"""The actor: one rank of the group that trains the policy and publishes its weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncrl.protocol.data_proto import DataProto
from asyncrl.protocol.errors import StalenessError
from asyncrl.protocol.ports import TrajectorySource
from asyncrl.protocol.trajectory import TrajectoryGroup
from asyncrl.protocol.types import WeightSnapshot
from asyncrl.single_controller import Dispatch, register

from .config import AlgorithmConfig, Correction, LearnerConfig
from .credit import CreditAssignment
from .record import TrajectoryRecorder
from .reference_worker import reference_rows
from .rows import response_rows, scored_sequences, trained_sequences
from .step import PolicyStep
from .trainer import PolicyTrainer
from .types import RankBatch, TokenSequence
from .weights import SnapshotWriter, save_policy
from .worker import BY_ROWS, PER_DP_RANK, RoleWorker

Columns = Mapping[int, np.ndarray]


class ActorWorker(RoleWorker[PolicyTrainer]):
    """One rank of the actor. With LoRA it is the reference too: the policy with its adapters off.

    Args:
        config: Options of the group it runs in.
        algorithm: What is optimised.
        model_path: Directory in Hugging Face layout, with its tokenizer.
        total_steps: Learner steps of the run, for the schedule.
        temperature: Softmax temperature at sampling; log-probs are taken under it.
        snapshot_dir: Where published weights go; readable by the engines of this host.
        connect_buffer: See `RoleWorker`.
        seed: Seeds dropout, where the model has any, and adapters.
        trajectory_dir: Where consumed groups are recorded, a file a step and rank; None records nothing.
        checksums: Digest published tensors, so that engines can verify what they loaded.
    """

    role = "actor"

    def __init__(
        self,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        model_path: str,
        total_steps: int,
        temperature: float,
        snapshot_dir: str,
        connect_buffer: Callable[[], TrajectorySource] | None = None,
        seed: int = 0,
        trajectory_dir: str | None = None,
        checksums: bool = True,
    ) -> None:
        super().__init__(config, algorithm, model_path=model_path, connect_buffer=connect_buffer)
        self._total_steps = total_steps
        self._temperature = temperature
        self._seed = seed
        self._snapshots = SnapshotWriter(snapshot_dir, keep=config.keep_snapshots, checksums=checksums)
        self._recorder = TrajectoryRecorder(trajectory_dir) if trajectory_dir else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        """Join the group, load the model and connect to the buffer."""
        warmup_steps = self._config.critic.warmup_steps if self._algorithm.needs_critic else 0
        trainer = PolicyTrainer(
            self._config,
            model_path=self._model_path,
            total_updates=max(1, self._total_steps - warmup_steps) * self._algorithm.num_mini_batches,
            temperature=self._temperature,
            seed=self._seed,
        )
        self._warmup_steps = warmup_steps
        self._credit = CreditAssignment(self._algorithm, trainer.mesh)
        self._step = PolicyStep(trainer, self._algorithm)
        self._start(trainer, trainer.optimizer)

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    def score(self, batch: RankBatch, send: bool = True) -> DataProto | None:
        """Score the reference log-probs of planned groups with the adapters off; see `RoleWorker._keep`.

        Raises:
            ValueError: the policy has no adapters.
        """
        with self._residence.reading(), self._scorer.adapters_off():
            values = self._scorer.log_probs(self._sequences(batch))
        return self._keep(batch, values, "ref_log_prob", send=send)

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    def step(
        self, batch: RankBatch, values: Columns | None = None, references: Columns | None = None
    ) -> dict[str, float]:
        """Make one learner step; in the critic's warm-up steps the policy is only measured.

        Args:
            batch: This rank's share; the sp ranks of a group have the same.
            values: What the critic scored, by group id; None where it shares the process, or there is none.
            references: What the reference scored, in the same way.

        Returns:
            The same on every rank: the step's metrics, ``fetch_s`` and ``train_s`` of the slowest rank,
            ``started_at`` of the first and ``ended_at`` of the last (seconds since the epoch), and ``lag_max``
            (learner steps).

        Raises:
            StalenessError: a group is older than the staleness bound allows.
        """
        started_at = time.time()
        groups = self._fetch(batch)
        lag = _largest_lag(batch, groups)
        fetched_at = time.time()
        sequences = self._scored_sequences(batch, values, references)
        with self._residence.updating():
            sequences, metrics = self._learn(batch, groups, sequences)
        ended_at = time.time()
        if self._recorder is not None and self._scorer.mesh.sp_rank == 0:
            self._recorder.write(batch, groups, sequences, rank=self._scorer.mesh.dp_rank)
        own = torch.tensor(
            [fetched_at - started_at, ended_at - fetched_at, -started_at, ended_at, lag], dtype=torch.float64
        )
        fetch_s, train_s, minus_start, ended_at, lag = self._scorer.mesh.largest(own).tolist()
        times = {"fetch_s": fetch_s, "train_s": train_s, "started_at": -minus_start, "ended_at": ended_at}
        return metrics | self._residence.metrics | times | {"lag_max": lag}

    def _scored_sequences(
        self, batch: RankBatch, values: Columns | None, references: Columns | None
    ) -> list[TokenSequence]:
        sequences = self._sequences(batch)
        if self._algorithm.needs_critic:
            sequences = self._with_scores(batch, sequences, "values", values, "critic")
        if self._algorithm.needs_reference:
            reference = self.role if self._config.lora.rank else "ref"
            sequences = self._with_scores(batch, sequences, "reference_logprobs", references, reference)
        return sequences

    def _learn(
        self, batch: RankBatch, groups: Sequence[TrajectoryGroup], sequences: list[TokenSequence]
    ) -> tuple[list[TokenSequence], dict[str, float]]:
        """Give the tokens their advantages and update the policy; returns the sequences and the metrics."""
        metrics: dict[str, float] = {}
        if batch.advantages is None:
            sequences, metrics = self._credit.assign(sequences, *outcomes_of(batch, groups))
        if batch.version < self._warmup_steps:
            return sequences, metrics | self._step.measure(sequences)
        return sequences, metrics | self._step.run(sequences)

    @register(dispatch_mode=BY_ROWS)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs and entropies of responses under the policy as it is.

        Args:
            data: Rows of ``input_ids``, ``attention_mask``, ``position_ids``, ``responses``; ``temperature`` of
                ``meta_info`` replaces that of the run. Micro-batches are packed by this worker's own token budget,
                whatever ``meta_info`` says about them.

        Returns:
            ``old_log_probs`` and ``entropys``, [B, R] float32, 0 where the response is padded.
        """
        temperature = float(data.meta_info.get("temperature", self._temperature))
        with self._residence.reading(), self._scorer.at_temperature(temperature):
            log_probs, entropies = self._scorer.log_probs_and_entropies(scored_sequences(data))
        return DataProto.from_dict(
            {"old_log_probs": response_rows(data, log_probs), "entropys": response_rows(data, entropies)},
            meta_info={"temperature": temperature},
        )

    @register(dispatch_mode=BY_ROWS)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of responses under the policy with its adapters off; see `ReferenceWorker`.

        Raises:
            ValueError: the policy has no adapters.
        """
        with self._residence.reading(), self._scorer.adapters_off():
            return reference_rows(self._scorer, data, self._temperature)

    @register(dispatch_mode=BY_ROWS)
    def update_actor(self, data: DataProto) -> DataProto:
        """Make the optimizer updates of one step.

        Args:
            data: Rows as for `compute_log_prob`, with ``old_log_probs`` and ``advantages``, ``response_mask`` where
                not all attended response tokens are the policy's, ``rollout_log_probs`` where an off-policy correction
                is configured and the engine's log-probs are not the old ones, ``ref_log_prob`` under
                ``algorithm.kl_coef``. ``temperature`` of ``meta_info`` replaces that of the run.

        Returns:
            ``meta_info["metrics"]``: the step's metrics as ``actor/<name>``, the same on every rank.
        """
        sequences = trained_sequences(
            data, _columns_of(data, self._algorithm), num_mini_batches=self._algorithm.num_mini_batches
        )
        temperature = float(data.meta_info.get("temperature", self._temperature))
        with self._residence.updating(), self._scorer.at_temperature(temperature):
            metrics = self._step.update(sequences)
        return DataProto(meta_info={"metrics": {f"actor/{name}": value for name, value in metrics.items()}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def publish_weights(self, version: int) -> WeightSnapshot:
        """Write the weights for the engines; the snapshot is there when rank 0 returns.

        Args:
            version: Learner steps contained in the weights.
        """
        with self._residence.reading():
            return self._snapshots.write(version, self._scorer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def rollout_mode(self, version: int) -> WeightSnapshot:
        """Hand the devices over to colocated engines: publish the weights, then offload if the options say so.

        Args:
            version: Learner steps contained in the weights.
        """
        with self._residence.reading():
            snapshot = self._snapshots.write(version, self._scorer)
        self._residence.enter_rollout()
        return snapshot

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_policy(self, directory: str) -> None:
        """Write model and tokenizer so that ``from_pretrained`` loads both from ``directory``."""
        with self._residence.reading():
            save_policy(self._scorer, directory)

    def _role_state(self) -> dict[str, Any]:
        return {"kl_reward_coef": self._credit.kl_coefficient.value}

    def _take_role_state(self, state: Mapping[str, Any]) -> None:
        if self._algorithm.kl_target:  # a fixed coefficient is the option's, also where that was changed
            self._credit.kl_coefficient.value = state["kl_reward_coef"]

    @property
    def _actor_model_offloaded(self) -> bool:
        return self._residence.model_offloaded

    @property
    def _actor_optimizer_offloaded(self) -> bool:
        return self._residence.optimizer_offloaded


def outcomes_of(batch: RankBatch, groups: Sequence[TrajectoryGroup]) -> tuple[np.ndarray, np.ndarray]:
    """Reward [B] float32 and prompt group [B] int64 of each sequence of a batch."""
    rewards = np.concatenate([np.zeros(0, dtype=np.float32), *batch.rewards])
    return rewards, np.repeat(np.array(batch.group_ids, dtype=np.int64), [group.num_samples for group in groups])


def _columns_of(data: DataProto, algorithm: AlgorithmConfig) -> dict[str, str]:
    """A sequence's columns, and verl's names for them."""
    names = {str(name) for name in data.batch.keys()} if data.batch is not None else set()  # noqa: SIM118
    columns = {"behavior_logprobs": "old_log_probs", "advantages": "advantages"}
    if algorithm.correction is not Correction.none:
        columns["proximal_logprobs"] = "old_log_probs"
        if "rollout_log_probs" in names:
            columns["behavior_logprobs"] = "rollout_log_probs"
    if algorithm.kl_coef:
        columns["reference_logprobs"] = "ref_log_prob"
    return columns


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
