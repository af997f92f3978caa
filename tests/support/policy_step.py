"""A learner step of the policy with the options of an algorithm."""

from learner.config import AlgorithmConfig
from learner.losses import policy_objective
from learner.trainer import LearnerStep, Trainer


def policy_step(trainer: Trainer, algorithm: AlgorithmConfig) -> LearnerStep:
    return LearnerStep(trainer, policy_objective(algorithm), num_mini_batches=algorithm.num_mini_batches)
