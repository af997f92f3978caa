"""One learner step: score the batch where the algorithm needs it, then one optimizer update a mini-batch."""

from __future__ import annotations

from collections.abc import Sequence

from .batching import split_sequences
from .config import AlgorithmConfig, Correction
from .objective import policy_objective, summarized
from .scorer import PolicyScorer
from .trainer import PolicyTrainer
from .types import TokenSequence


class PolicyStep:
    """Steps a policy as an algorithm says. A collective, as the trainer is.

    Args:
        trainer: Holds the policy.
        algorithm: What is optimised.
    """

    def __init__(self, trainer: PolicyTrainer, algorithm: AlgorithmConfig) -> None:
        self._trainer = trainer
        self._algorithm = algorithm
        self._objective = policy_objective(algorithm)

    def run(self, sequences: Sequence[TokenSequence]) -> dict[str, float]:
        """Make one learner step.

        Args:
            sequences: See `scored`, and ``advantages``.

        Returns:
            See `update`.
        """
        return self.update(self.scored(sequences))

    def scored(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """Score the batch before the first update.

        Args:
            sequences: This rank's share of the batch, with ``behavior_logprobs`` and, under ``kl_coef``,
                ``reference_logprobs``.

        Returns:
            The sequences, with ``proximal_logprobs`` where the correction needs them.
        """
        if self._algorithm.num_mini_batches > 1 and self._algorithm.correction is not Correction.none:
            sequences = _with_scores(sequences, "proximal_logprobs", self._trainer)
        return list(sequences)

    def update(self, sequences: Sequence[TokenSequence]) -> dict[str, float]:
        """Make one optimizer update a mini-batch.

        Args:
            sequences: From `scored`, with ``advantages``.

        Returns:
            The trainer's metrics, the same on every rank; over mini-batches counts are summed and all else is
            averaged.
        """
        algorithm = self._algorithm
        updates = [
            self._trainer.update(
                part,
                self._objective,
                aggregation=algorithm.aggregation,
                sequence_norm_tokens=algorithm.sequence_norm_tokens,
            )
            for part in split_sequences([s for s in sequences if s.loss_mask.any()], algorithm.num_mini_batches)
        ]
        return summarized(merged_updates(updates))

    def measure(self, sequences: Sequence[TokenSequence]) -> dict[str, float]:
        """What `update` would report of its first forward, without any update, nor the optimizer's metrics."""
        return summarized(
            self._trainer.evaluate(
                sequences,
                self._objective,
                aggregation=self._algorithm.aggregation,
                sequence_norm_tokens=self._algorithm.sequence_norm_tokens,
            )
        )


def _with_scores(sequences: Sequence[TokenSequence], name: str, scorer: PolicyScorer) -> list[TokenSequence]:
    scores = scorer.log_probs(sequences)
    return [sequence.with_column(name, score) for sequence, score in zip(sequences, scores, strict=True)]


def merged_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """One step's metrics from those of its updates: counts are summed, all else is averaged."""
    sums = {name: sum(update[name] for update in updates) for name in updates[0]}
    return {name: value if _is_count(name) else value / len(updates) for name, value in sums.items()}


def _is_count(name: str) -> bool:
    return name.startswith("num_") or name == "skipped_updates"
