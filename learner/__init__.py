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
    "ADVANTAGES": "advantages",
    "ActorWorker": "verl_api",
    "AlgorithmConfig": "config",
    "CriticWorker": "verl_api",
    "LOSSES": "losses",
    "LearnerConfig": "config",
    "LossInputs": "losses",
    "LossTerms": "losses",
    "ModelWorker": "worker",
    "PackedModel": "packed_model",
    "RankBatch": "types",
    "ReferenceWorker": "verl_api",
    "RewardModelWorker": "verl_api",
    "Role": "roles",
    "TokenAdvantages": "advantages",
    "TokenRewards": "advantages",
    "TokenSequence": "types",
    "Trainer": "trainer",
    "group_advantages": "advantages",
    "negative_log_likelihood": "losses",
    "rank_batches": "batching",
    "save_policy": "weights",
    "token_level": "advantages",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'learner' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
