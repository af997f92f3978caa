"""The in-process core of the learner: one model, sharded, stepped on batches of token sequences.

RL workers and supervised fine-tuning train through the same `PolicyTrainer`. Every method is a collective: all ranks of
the group call it together, each with its own share of the sequences, and an empty share is fine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

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
from .types import TokenSequence

LossFunction = Callable[[LossInputs], LossTerms]


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
        micro_batches, num_tokens, num_sequences = self._pack(sequences)
        sums: list[dict[str, Tensor]] = []
        for micro_batch in micro_batches:
            inputs = self._forward(micro_batch)
            terms = loss(inputs)
            weights = token_weights(inputs, aggregation, num_tokens=num_tokens, num_sequences=num_sequences)
            total = (terms.per_token * weights).sum()
            (total * self.mesh.num_ranks).backward()  # FSDP averages gradients over the ranks; their sum is meant
            per_token = {"entropy": inputs.entropy.detach(), **terms.metrics}
            sums.append({"loss": total.detach(), **{k: v.sum() / max(1, num_tokens) for k, v in per_token.items()}})
        metrics = self._reduce(sums)
        counts = {"num_tokens": num_tokens, "num_sequences": num_sequences, "num_micro_batches": len(micro_batches)}
        return metrics | {name: float(count) for name, count in counts.items()} | self.optimizer.step()

    @torch.no_grad()
    def evaluate(
        self,
        sequences: Sequence[TokenSequence],
        loss: LossFunction,
        *,
        aggregation: Aggregation = Aggregation.token_mean,
    ) -> dict[str, float]:
        """Loss and metrics of sequences without training on them; the keys of `update` up to ``num_sequences``."""
        self.model.eval()
        micro_batches, num_tokens, num_sequences = self._pack(sequences)
        sums = []
        for micro_batch in micro_batches:
            inputs = self._forward(micro_batch)
            terms = loss(inputs)
            weights = token_weights(inputs, aggregation, num_tokens=num_tokens, num_sequences=num_sequences)
            per_token = {"entropy": inputs.entropy, **terms.metrics}
            sums.append(
                {"loss": (terms.per_token * weights).sum()}
                | {name: value.sum() / max(1, num_tokens) for name, value in per_token.items()}
            )
        return self._reduce(sums) | {"num_tokens": float(num_tokens), "num_sequences": float(num_sequences)}

    @torch.no_grad()
    def log_probs(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Log-probs of this rank's sequences under the weights as they are.

        Returns:
            [T] float32 a sequence, 0 where the token is not in the loss.
        """
        self.model.eval()
        results = [np.zeros(len(sequence.input_ids), dtype=np.float32) for sequence in sequences]
        for micro_batch in self._pack(sequences)[0]:
            values = self._forward(micro_batch).log_probs.split(micro_batch.loss_lengths.tolist())
            for source, value in zip(micro_batch.source, values, strict=False):
                results[source][sequences[source].loss_mask] = value.cpu().numpy()
        return results

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

    def _pack(self, sequences: Sequence[TokenSequence]) -> tuple[list[MicroBatch], int, int]:
        """Micro-batches, as many on every rank; tokens in the loss and sequences with any, over all ranks."""
        budget = self.config.max_tokens_per_micro_batch * self.mesh.sp_size
        in_loss = [int(np.count_nonzero(sequence.loss_mask)) for sequence in sequences]
        counts = torch.tensor([sum(in_loss), np.count_nonzero(in_loss)], device=self.mesh.device)
        num_tokens, num_sequences = self.mesh.sum_over_dp(counts).tolist()
        count = max(1, int(self.mesh.largest(torch.tensor(num_micro_batches(sequences, budget)))))
        return pack(sequences, max_tokens=budget, count=count), num_tokens, num_sequences

    def _reduce(self, sums: Sequence[dict[str, Tensor]]) -> dict[str, float]:
        """Add this rank's micro-batches up, then the ranks, in one collective."""
        names = list(sums[0])
        table = torch.stack([torch.stack([row[name] for name in names]) for row in sums]).double().sum(0)
        return dict(zip(names, self.mesh.sum_over_dp(table).tolist(), strict=True))
