"""Helpers for tests of learner steps: `policy_step` for an algorithm, and the sequences of each data-parallel rank."""

from collections.abc import Sequence

from learner.batching import karmarkar_karp
from learner.config import AlgorithmConfig
from learner.losses import policy_objective
from learner.trainer import LearnerStep, Trainer
from learner.types import TokenSequence


def policy_step(trainer: Trainer, algorithm: AlgorithmConfig) -> LearnerStep:
    return LearnerStep(trainer, policy_objective(algorithm), num_mini_batches=algorithm.num_mini_batches)


def share_of(trainer: Trainer, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Return the sequences that this rank trains on. The data-parallel ranks get similar numbers of tokens."""
    mesh = trainer.mesh
    shares = karmarkar_karp([len(sequence.input_ids) for sequence in sequences], mesh.num_ranks // mesh.sp_size)
    return [sequences[index] for index in shares[mesh.dp_rank]]
