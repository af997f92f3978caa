"""The learner group: FSDP workers that train a policy on packed trajectories and publish its weights.

``import learner`` loads no torch; each name is resolved when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages import ADVANTAGES, TokenAdvantages, TokenRewards, group_advantages, token_level
    from .batching import rank_batches
    from .config import AlgorithmConfig, LearnerConfig
    from .losses import LOSSES, LossInputs, LossTerms, negative_log_likelihood
    from .packed_model import PackedModel
    from .roles import Role
    from .trainer import Trainer
    from .types import RankBatch, TokenSequence
    from .verl_api import ActorWorker, CriticWorker, ReferenceWorker, RewardModelWorker
    from .weights import save_policy
    from .worker import ModelWorker

_HOMES = {
    "advantages": ("ADVANTAGES", "TokenAdvantages", "TokenRewards", "group_advantages", "token_level"),
    "batching": ("rank_batches",),
    "config": ("AlgorithmConfig", "LearnerConfig"),
    "losses": ("LOSSES", "LossInputs", "LossTerms", "negative_log_likelihood"),
    "packed_model": ("PackedModel",),
    "roles": ("Role",),
    "trainer": ("Trainer",),
    "types": ("RankBatch", "TokenSequence"),
    "verl_api": ("ActorWorker", "CriticWorker", "ReferenceWorker", "RewardModelWorker"),
    "weights": ("save_policy",),
    "worker": ("ModelWorker",),
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
    "ModelWorker",
    "PackedModel",
    "RankBatch",
    "ReferenceWorker",
    "RewardModelWorker",
    "Role",
    "TokenAdvantages",
    "TokenRewards",
    "TokenSequence",
    "Trainer",
    "group_advantages",
    "negative_log_likelihood",
    "rank_batches",
    "save_policy",
    "token_level",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module 'learner' has no attribute {name!r}")
