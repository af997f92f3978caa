"""The in-process core of the learner: one model, sharded, stepped on batches of token sequences.

RL workers and supervised fine-tuning train through the same `PolicyTrainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Aggregation, LearnerConfig
from .lora import adapters_off
from .losses import LossInputs, LossTerms, token_weights
from .optimizer import PolicyOptimizer
from .packing import MicroBatch
from .scorer import PackedBatch, PolicyScorer
from .types import TokenSequence

LossFunction = Callable[[LossInputs], LossTerms]


class PolicyTrainer(PolicyScorer):
    """Trains a model, besides scoring with it.

    Args:
        config: The learner group's options.
        model_path: Directory in Hugging Face layout.
        total_updates: Optimizer updates of the whole run, for the schedule.
        temperature: Softmax temperature of log-probs; that of sampling in RL, 1.0 for supervised training. > 0.
        seed: Seeds dropout, where the model has any.
    """

    def __init__(
        self, config: LearnerConfig, *, model_path: str, total_updates: int, temperature: float = 1.0, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        super().__init__(config, model_path=model_path, temperature=temperature, adapted=True)
        self.optimizer = PolicyOptimizer(self.model, config.optimizer, total_updates=total_updates)

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Inside, the model computes what it did without adapters, as `learner.lora.adapters_off` says."""
        with adapters_off(self.model):
            yield

    def update(
        self,
        sequences: Sequence[TokenSequence],
        loss: LossFunction,
        *,
        aggregation: Aggregation = Aggregation.token_mean,
        sequence_norm_tokens: int = 0,
    ) -> dict[str, float]:
        """Make one optimizer update on the sequences of all ranks.

        Args:
            sequences: This rank's share; the sp ranks of a group pass the same.
            loss: Gives each token its loss.
            aggregation: How token losses become the loss of the batch.
            sequence_norm_tokens: See `learner.losses.token_weights`.

        Returns:
            The same on every rank: ``loss``, ``entropy`` and the loss's own metrics (means over the batch's tokens),
            ``num_tokens`` (in the loss), ``num_sequences``, ``num_micro_batches``, ``grad_norm``, ``lr``,
            ``skipped_updates``.
        """
        self._set_training(True)
        totals, rows = _Totals(self._pack(sequences), aggregation, sequence_norm_tokens), []
        try:
            with self.sharding:
                for micro_batch in totals.batch.micro_batches:
                    share, row = self._share_of_loss(micro_batch, loss, totals)
                    (share * self.mesh.num_ranks).backward()  # FSDP averages gradients over ranks; their sum is meant
                    rows.append(row)
        except BaseException:
            self.optimizer.adamw.zero_grad()  # half a gradient must not reach the next update
            raise
        return self._reduce(rows) | totals.batch.counts() | self.optimizer.step()

    @torch.no_grad()
    def evaluate(
        self,
        sequences: Sequence[TokenSequence],
        loss: LossFunction,
        *,
        aggregation: Aggregation = Aggregation.token_mean,
        sequence_norm_tokens: int = 0,
    ) -> dict[str, float]:
        """Loss and metrics of sequences without training on them; what `update` returns but for the optimizer's."""
        self._set_training(False)
        totals = _Totals(self._pack(sequences), aggregation, sequence_norm_tokens)
        with self.sharding:
            rows = [self._share_of_loss(micro_batch, loss, totals)[1] for micro_batch in totals.batch.micro_batches]
        return self._reduce(rows) | totals.batch.counts()

    def _share_of_loss(
        self, micro_batch: MicroBatch, loss: LossFunction, totals: _Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What a micro-batch adds to the loss of the whole batch, with gradient, and to each metric."""
        inputs = self._forward(micro_batch)
        terms = loss(inputs)
        share = (terms.per_token * totals.weights(inputs)).sum()
        per_token = {"entropy": inputs.entropy.detach(), **terms.metrics}
        means = {name: value.sum() / max(1, totals.batch.num_tokens) for name, value in per_token.items()}
        return share, {"loss": share.detach(), **means}


@dataclass(frozen=True)
class _Totals:
    """A batch and how its token losses are aggregated."""

    batch: PackedBatch
    aggregation: Aggregation
    sequence_norm_tokens: int

    def weights(self, inputs: LossInputs) -> Tensor:
        return token_weights(
            inputs,
            self.aggregation,
            num_tokens=self.batch.num_tokens,
            num_sequences=self.batch.num_sequences,
            sequence_norm_tokens=self.sequence_norm_tokens,
        )
