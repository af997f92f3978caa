"""The learner: FSDP workers that train a policy on packed trajectories and publish the policy's weights.

``import learner`` does not import torch. Each name is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages import ADVANTAGES, TokenAdvantages, TokenRewards, group_advantages, token_level, turn_level
    from .batching import rank_batches
    from .config import AlgorithmConfig, LearnerConfig
    from .losses import LOSSES, LossInputs, LossTerms, by_token, negative_log_likelihood
    from .model_folder import save_policy
    from .packed_model import PackedModel
    from .roles import Role
    from .trainer import Trainer
    from .turn_advantages import TurnAdvantages, TurnRewards
    from .types import RankBatch, TokenSequence
    from .verl_api import ActorWorker, CriticWorker, ReferenceWorker, RewardModelWorker
    from .worker import ModelWorker

# `__getattr__` searches these modules for the names of `__all__`, in this order. Modules that import fast come first.
_HOMES = ("config", "types", "batching", "losses", "advantages", "model_folder", "trainer", "verl_api")

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
    "TurnAdvantages",
    "TurnRewards",
    "by_token",
    "group_advantages",
    "negative_log_likelihood",
    "rank_batches",
    "save_policy",
    "token_level",
    "turn_level",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'learner' has no attribute {name!r}")
    homes = (importlib.import_module(f".{home}", __name__) for home in _HOMES)
    return next(getattr(home, name) for home in homes if hasattr(home, name))
