"""The in-process core of the learner: one model, sharded, stepped on batches of token sequences.

RL workers and supervised fine-tuning train through the same `PolicyTrainer`. Every method is a collective: all ranks of
the group call it together, each with its own share of the sequences, and an empty share is fine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .config import Aggregation, LearnerConfig
from .fsdp import shard_model
from .losses import LossInputs, LossTerms, token_weights
from .mesh import LearnerMesh, open_mesh
from .model import PolicyModel, load_causal_lm
from .optimizer import PolicyOptimizer
from .packing import MicroBatch, num_micro_batches, pack
from .sharding import UlyssesShardingManager
from .types import TokenSequence
from .ulysses import validate_ulysses_config

LossFunction = Callable[[LossInputs], LossTerms]


@dataclass(frozen=True)
class _Packed:
    """This rank's micro-batches, and the tokens in the loss and the sequences with any, over all ranks."""

    micro_batches: list[MicroBatch]
    num_tokens: int
    num_sequences: int

    def counts(self) -> dict[str, float]:
        return {
            "num_tokens": float(self.num_tokens),
            "num_sequences": float(self.num_sequences),
            "num_micro_batches": float(len(self.micro_batches)),
        }


class PolicyTrainer:
    """Loads a model, trains it, and gives its weights back.

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
        if temperature <= 0:
            raise ValueError(f"the learner's temperature must be > 0, got {temperature}; greedy samples teach nothing")
        torch.manual_seed(seed)
        self.config = config
        self.model_path = model_path
        self.mesh: LearnerMesh = open_mesh(config)
        self.causal_lm: PreTrainedModel = load_causal_lm(model_path, torch.float32)
        if config.activation_checkpointing:
            self.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.sharding = UlyssesShardingManager(self.mesh.device_mesh)
        validate_ulysses_config(self.causal_lm.config.num_attention_heads, config.sp_size)
        self.model = PolicyModel(
            self.causal_lm, temperature=temperature, logprob_chunk_tokens=config.logprob_chunk_tokens
        )
        shard_model(self.model, self.mesh, self.compute_dtype)
        self.optimizer = PolicyOptimizer(self.model, config.optimizer, total_updates=total_updates)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the parameters while computing, and of published weights."""
        return getattr(torch, self.config.dtype)

    def update(
        self,
        sequences: Sequence[TokenSequence],
        loss: LossFunction,
        *,
        aggregation: Aggregation = Aggregation.token_mean,
    ) -> dict[str, float]:
        """Make one optimizer update on the sequences of all ranks.

        Args:
            sequences: This rank's share; the sp ranks of a group pass the same.
            loss: Gives each token its loss.
            aggregation: How token losses become the loss of the batch.

        Returns:
            The same on every rank: ``loss``, ``entropy`` and the loss's own metrics (means over the batch's tokens),
            ``num_tokens`` (in the loss), ``num_sequences``, ``num_micro_batches``, ``grad_norm``, ``lr``,
            ``skipped_updates``.
        """
        self.model.train()
        totals, rows = self._pack(sequences), []
        with self.sharding:
            for micro_batch in totals.micro_batches:
                share, row = self._share_of_loss(micro_batch, totals, loss, aggregation)
                (share * self.mesh.num_ranks).backward()  # FSDP averages gradients over the ranks; their sum is meant
                rows.append(row)
        return self._reduce(rows) | totals.counts() | self.optimizer.step()

    @torch.no_grad()
    def evaluate(
        self,
        sequences: Sequence[TokenSequence],
        loss: LossFunction,
        *,
        aggregation: Aggregation = Aggregation.token_mean,
    ) -> dict[str, float]:
        """Loss and metrics of sequences without training on them; what `update` returns but for the optimizer's."""
        self.model.eval()
        totals = self._pack(sequences)
        with self.sharding:
            rows = [self._share_of_loss(m, totals, loss, aggregation)[1] for m in totals.micro_batches]
        return self._reduce(rows) | totals.counts()

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Log-probs of this rank's sequences under the weights as they are.

        Returns:
            [T] float32 a sequence, 0 where the token is not in the loss.
        """
        self.model.eval()
        results = [np.zeros(len(sequence.input_ids), dtype=np.float32) for sequence in sequences]
        with self.sharding:
            for micro_batch in self._pack(sequences).micro_batches:
                values = self._forward(micro_batch).log_probs.split(micro_batch.loss_lengths.tolist())
                for source, value in zip(micro_batch.source, values, strict=False):
                    results[source][sequences[source].loss_mask] = value.cpu().numpy()
        return results

    def _share_of_loss(
        self, micro_batch: MicroBatch, totals: _Packed, loss: LossFunction, aggregation: Aggregation
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What a micro-batch adds to the loss of the whole batch, with gradient, and to each metric."""
        inputs = self._forward(micro_batch)
        terms = loss(inputs)
        weights = token_weights(inputs, aggregation, num_tokens=totals.num_tokens, num_sequences=totals.num_sequences)
        share = (terms.per_token * weights).sum()
        per_token = {"entropy": inputs.entropy.detach(), **terms.metrics}
        means = {name: value.sum() / max(1, totals.num_tokens) for name, value in per_token.items()}
        return share, {"loss": share.detach(), **means}

    def _forward(self, micro_batch: MicroBatch) -> LossInputs:
        micro_batch = micro_batch.to(self.mesh.device)
        log_probs, entropy = self.model(micro_batch)
        # An empty micro-batch does not know the columns' names: it has every column, with no entries.
        columns = micro_batch.columns if len(log_probs) else defaultdict(log_probs.detach)
        return LossInputs(
            log_probs=log_probs,
            entropy=entropy,
            sequence_index=micro_batch.sequence_index,
            loss_lengths=micro_batch.loss_lengths,
            columns=columns,
        )

    def _pack(self, sequences: Sequence[TokenSequence]) -> _Packed:
        """Micro-batches, as many on every rank."""
        budget = self.config.max_tokens_per_micro_batch * self.mesh.sp_size
        in_loss = [int(np.count_nonzero(sequence.loss_mask)) for sequence in sequences]
        counts = torch.tensor([sum(in_loss), np.count_nonzero(in_loss)], device=self.mesh.device)
        num_tokens, num_sequences = self.mesh.sum_over_dp(counts).tolist()
        count = max(1, int(self.mesh.largest(torch.tensor(num_micro_batches(sequences, budget)))))
        return _Packed(pack(sequences, max_tokens=budget, count=count), num_tokens, num_sequences)

    def _reduce(self, sums: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Add this rank's micro-batches up, then the ranks, in one collective."""
        names = list(sums[0])
        table = torch.stack([torch.stack([row[name] for name in names]) for row in sums]).double().sum(0)
        return dict(zip(names, self.mesh.sum_over_dp(table).tolist(), strict=True))
