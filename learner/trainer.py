"""Trains a role's model: optimizer updates on batches of token sequences, and the learner steps made of them.

RL workers and supervised fine-tuning train through the same `Trainer`. Everything here is a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from .batching import split_sequences
from .config import LearnerConfig
from .fsdp import drop_gradients, prepare_backward
from .heads import TrainableHead
from .losses import token_weights
from .objectives import Objective
from .optimizer import ModelOptimizer
from .packed_model import PackedBatch, PackedModel
from .packing import MicroBatch
from .roles import ACTOR, Role
from .types import TokenSequence


class Trainer(PackedModel):
    """Trains a model, besides scoring with it.

    Args:
        config, model_path, temperature: See `PackedModel`.
        role: What is trained: the policy, unless another role is named.
        total_updates: Optimizer updates of the whole run, for the schedule.
        seed: Seeds dropout, where the model has any, and adapters.

    Raises:
        ValueError: the role is frozen.
    """

    def __init__(
        self,
        config: LearnerConfig,
        role: Role = ACTOR,
        *,
        model_path: str,
        total_updates: int,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        if role.optimizer is None:
            raise ValueError(f"role {role.name!r} is frozen: it has no optimizer; load it as a PackedModel")
        torch.manual_seed(seed)
        super().__init__(config, role, model_path=model_path, temperature=temperature)
        self.optimizer = ModelOptimizer(self.head, role.optimizer(config), total_updates=total_updates)

    def update(self, sequences: Sequence[TokenSequence], objective: Objective) -> dict[str, float]:
        """Make one optimizer update on the sequences of all ranks; the sp ranks of a group pass the same share.

        Returns:
            The same on every rank: ``loss`` and the loss's own metrics (means over the batch's tokens, not summarized),
            ``num_tokens`` (in the loss), ``num_trajectories``, ``num_micro_batches``, ``grad_norm``, ``lr``,
            ``skipped_updates``.
        """
        self._set_training(True)
        batch, rows = self._pack(sequences, keep_branches=objective.needs_trajectories), []
        try:
            with self.sharding:
                for number, micro_batch in enumerate(batch.micro_batches, start=1):
                    prepare_backward(self.head, self.config, is_last=number == len(batch.micro_batches))
                    share, row = self._share_of_loss(micro_batch, objective, batch)
                    (share * self.mesh.num_ranks).backward()  # FSDP averages gradients over ranks; their sum is meant
                    rows.append(row)
        except BaseException:
            drop_gradients(self.head)  # half a gradient must not reach the next update
            raise
        return self._reduce(rows) | batch.counts() | self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, sequences: Sequence[TokenSequence], objective: Objective) -> dict[str, float]:
        """Loss and metrics of sequences without training on them; what `update` returns but for the optimizer's."""
        self._set_training(False)
        batch = self._pack(sequences, keep_branches=objective.needs_trajectories)
        with self.sharding:
            rows = [self._share_of_loss(micro_batch, objective, batch)[1] for micro_batch in batch.micro_batches]
        return self._reduce(rows) | batch.counts()

    def _share_of_loss(
        self, micro_batch: MicroBatch, objective: Objective, batch: PackedBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What a micro-batch adds to the loss of the whole batch, with gradient, and to each metric."""
        head = cast("TrainableHead", self.head)  # a role with an objective has one
        inputs = head.inputs(micro_batch.to(self.mesh.device), entropy=objective.needs_entropy)
        terms = objective.loss(inputs)
        weights = token_weights(
            inputs,
            objective.aggregation,
            num_tokens=batch.num_tokens,
            num_trajectories=batch.num_trajectories,
            sequence_norm_tokens=objective.sequence_norm_tokens,
        )
        share = (terms.per_token * weights).sum()
        means = {name: value.sum() / max(1, batch.num_tokens) for name, value in terms.metrics.items()}
        return share, {"loss": share.detach(), **means}


class LearnerStep:
    """One learner step: score the batch where the objective needs it, then one optimizer update per mini-batch."""

    def __init__(self, trainer: Trainer, objective: Objective, *, num_mini_batches: int = 1) -> None:
        self._trainer = trainer
        self._objective = objective
        self._num_mini_batches = num_mini_batches

    def run(self, sequences: Sequence[TokenSequence]) -> dict[str, float]:
        """Make one learner step on this rank's share of the batch, and return what `update` does.

        The sequences have the columns that the objective reads; ``proximal_logprobs`` are scored here where it needs
        them.
        """
        if self._objective.needs_proximal:
            scores = self._trainer.scores(sequences)
            sequences = [s.with_column("proximal_logprobs", score) for s, score in zip(sequences, scores, strict=True)]
        return self.update(sequences)

    def update(self, sequences: Sequence[TokenSequence]) -> dict[str, float]:
        """Make one optimizer update per mini-batch, on this rank's sequences with every column.

        Returns:
            The trainer's metrics, summarized, the same on every rank; over mini-batches counts are summed and all else
            is averaged.
        """
        trained = [sequence for sequence in sequences if sequence.loss_mask.any()]
        parts = split_sequences(trained, self._num_mini_batches)
        return self._objective.summarize(_merged([self._trainer.update(part, self._objective) for part in parts]))

    def measure(self, sequences: Sequence[TokenSequence]) -> dict[str, float]:
        """What `update` would report of its first forward, without any update, nor the optimizer's metrics."""
        return self._objective.summarize(self._trainer.evaluate(sequences, self._objective))


def _merged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """One step's metrics from those of its updates: counts are summed, all else is averaged."""
    sums = {name: sum(update[name] for update in updates) for name in updates[0]}
    counts = {name for name in sums if name.startswith("num_") or name == "skipped_updates"}
    return {name: value if name in counts else value / len(updates) for name, value in sums.items()}
