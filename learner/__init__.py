"""The learner group: FSDP workers that train a policy on packed trajectories and publish its weights.

``import learner`` loads no torch; each name is resolved when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .actor_worker import ActorWorker
    from .advantages import group_advantages
    from .config import AlgorithmConfig, LearnerConfig
    from .critic_worker import CriticWorker
    from .losses import LossInputs, LossTerms, negative_log_likelihood
    from .planning import rank_batches
    from .reference_worker import ReferenceWorker
    from .registry import ADVANTAGES, LOSSES
    from .reward_worker import RewardModelWorker
    from .token_advantages import TokenAdvantages, TokenRewards, token_level
    from .trainer import PolicyTrainer
    from .types import RankBatch, TokenSequence
    from .weights import save_policy

_HOMES = {
    "ADVANTAGES": "registry",
    "LOSSES": "registry",
    "ActorWorker": "actor_worker",
    "AlgorithmConfig": "config",
    "CriticWorker": "critic_worker",
    "LearnerConfig": "config",
    "LossInputs": "losses",
    "LossTerms": "losses",
    "PolicyTrainer": "trainer",
    "RankBatch": "types",
    "ReferenceWorker": "reference_worker",
    "RewardModelWorker": "reward_worker",
    "TokenAdvantages": "token_advantages",
    "TokenRewards": "token_advantages",
    "TokenSequence": "types",
    "group_advantages": "advantages",
    "negative_log_likelihood": "losses",
    "rank_batches": "planning",
    "save_policy": "weights",
    "token_level": "token_advantages",
}

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "ActorWorker",
    "AlgorithmConfig",
    "CriticWorker",
    "LearnerConfig",
    "LossInputs",
    "LossTerms",
    "PolicyTrainer",
    "RankBatch",
    "ReferenceWorker",
    "RewardModelWorker",
    "TokenAdvantages",
    "TokenRewards",
    "TokenSequence",
    "group_advantages",
    "negative_log_likelihood",
    "rank_batches",
    "save_policy",
    "token_level",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'learner' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
