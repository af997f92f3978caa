"""The critic's process: one rank of the group that learns the values of states."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from asyncrl.protocol.data_proto import DataProto
from asyncrl.protocol.ports import TrajectorySource
from asyncrl.single_controller import Dispatch, register

from .actor_worker import outcomes_of
from .batching import split_sequences
from .config import AlgorithmConfig, LearnerConfig
from .credit import CreditAssignment
from .critic import CriticTrainer
from .registry import ADVANTAGES
from .rows import response_rows, scored_sequences, trained_sequences
from .step import merged_updates
from .token_advantages import is_token_level
from .types import RankBatch, TokenSequence
from .worker import BY_ROWS, PER_DP_RANK, RoleWorker

_VERL_METRICS = {"value_loss": "vf_loss", "value_clip_fraction": "vf_clipfrac", "value_mean": "vpred_mean"}


class CriticWorker(RoleWorker[CriticTrainer]):
    """One rank of the critic.

    Args:
        config: Options of the group it runs in; ``config.critic`` is its own part.
        algorithm: What is optimised.
        model_path: Directory in Hugging Face layout: a token classifier, or a causal language model to start from.
        total_steps: Learner steps of the run, for the schedule.
        connect_buffer: See `RoleWorker`.
        seed: Seeds dropout, where the model has any.
    """

    role = "critic"

    def __init__(
        self,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        model_path: str,
        total_steps: int,
        connect_buffer: Callable[[], TrajectorySource] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(config, algorithm, model_path=model_path, connect_buffer=connect_buffer)
        self._total_steps = total_steps
        self._seed = seed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        """Join the group, load the model and connect to the buffer.

        Raises:
            ValueError: the advantages take no values, and give no returns to learn.
        """
        advantage = self._algorithm.advantage
        if self._algorithm.critic and not is_token_level(ADVANTAGES.get(advantage)):
            raise ValueError(
                f"algorithm.critic=true needs an estimator of tokens, which reads values, got algorithm.advantage="
                f"{advantage}; mark your own with learner.token_level, or set algorithm.critic=false"
            )
        trainer = CriticTrainer(
            self._config,
            self._config.critic,
            model_path=self._model_path,
            total_updates=self._total_steps * self._algorithm.num_mini_batches,
            seed=self._seed,
        )
        self._credit = CreditAssignment(self._algorithm, trainer.mesh)
        self._start(trainer, trainer.optimizer)

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    def score(self, batch: RankBatch, send: bool = True) -> DataProto | None:
        """Score the values of planned groups; see `RoleWorker._keep`."""
        with self._residence.reading():
            values = self._scorer.values(self._sequences(batch))
        return self._keep(batch, values, "values", send=send)

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    def step(self, batch: RankBatch, references: Mapping[int, np.ndarray] | None = None) -> dict[str, float]:
        """Learn the returns of planned groups that were scored.

        Args:
            batch: This rank's share; the sp ranks of a group have the same.
            references: What the reference scored, by group id; None where it shares the process, or where rewards
                have no KL penalty.

        Returns:
            The same on every rank: the metrics of `CriticTrainer.update`, over mini-batches counts are summed and all
            else is averaged, and ``train_s`` of the slowest rank.
        """
        started_at = time.time()
        sequences = self._with_scores(batch, self._sequences(batch), "values", None, self.role)
        if self._algorithm.kl_reward_coef:
            reference = "actor" if self._config.lora.rank else "ref"
            sequences = self._with_scores(batch, sequences, "reference_logprobs", references, reference)
        with self._residence.updating():
            credited, _ = self._credit.assign(sequences, *outcomes_of(batch, self._fetch(batch)))
            metrics = self._learn(credited)
        train_s = self._scorer.mesh.largest(torch.tensor([time.time() - started_at], dtype=torch.float64)).item()
        return metrics | {"train_s": train_s}

    def _role_state(self) -> dict[str, Any]:
        return {"kl_reward_coef": self._credit.kl_coefficient.value}

    def _take_role_state(self, state: Mapping[str, Any]) -> None:
        if self._algorithm.kl_target:  # a fixed coefficient is the option's, also where that was changed
            self._credit.kl_coefficient.value = state["kl_reward_coef"]

    def _learn(self, sequences: list[TokenSequence]) -> dict[str, float]:
        parts = split_sequences(sequences, self._algorithm.num_mini_batches)
        return merged_updates([self._scorer.update(part) for part in parts])

    @register(dispatch_mode=BY_ROWS)
    def compute_values(self, data: DataProto) -> DataProto:
        """Values of the states before the tokens of responses.

        Args:
            data: Rows of ``input_ids``, ``attention_mask``, ``position_ids``, ``responses``.

        Returns:
            ``values`` [B, R] float32, 0 where the response is padded.
        """
        with self._residence.reading():
            values = self._scorer.values(scored_sequences(data))
        return DataProto.from_dict({"values": response_rows(data, values)})

    @register(dispatch_mode=BY_ROWS)
    def update_critic(self, data: DataProto) -> DataProto:
        """Make the optimizer updates of one step.

        Args:
            data: Rows as for `compute_values`, with ``values`` and ``returns``, and ``response_mask`` where not all
                attended response tokens are the policy's.

        Returns:
            ``meta_info["metrics"]``: ``critic/vf_loss``, ``critic/vf_clipfrac``, ``critic/vpred_mean``,
            ``critic/grad_norm``, ``critic/lr`` and the further metrics of `CriticTrainer.update` under ``critic/``.
        """
        columns = {"values": "values", "returns": "returns"}
        sequences = trained_sequences(data, columns, num_mini_batches=self._algorithm.num_mini_batches)
        with self._residence.updating():
            metrics = self._learn(sequences)
        named = {f"critic/{_VERL_METRICS.get(name, name)}": value for name, value in metrics.items()}
        return DataProto(meta_info={"metrics": named})
