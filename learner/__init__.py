"""The learner group: FSDP workers that train a policy on packed trajectories and publish its weights.

``import learner`` loads no torch; each name is resolved when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages import ADVANTAGES, group_advantages, plan_advantages
    from .batching import split_plan
    from .config import AlgorithmConfig, LearnerConfig
    from .losses import LOSSES, negative_log_likelihood
    from .trainer import PolicyTrainer
    from .types import RankBatch, TokenSequence
    from .weights import save_policy
    from .worker import LearnerWorker

_HOMES = {
    "ADVANTAGES": "advantages",
    "LOSSES": "losses",
    "AlgorithmConfig": "config",
    "LearnerConfig": "config",
    "LearnerWorker": "worker",
    "PolicyTrainer": "trainer",
    "RankBatch": "types",
    "TokenSequence": "types",
    "group_advantages": "advantages",
    "negative_log_likelihood": "losses",
    "plan_advantages": "advantages",
    "save_policy": "weights",
    "split_plan": "batching",
}

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "AlgorithmConfig",
    "LearnerConfig",
    "LearnerWorker",
    "PolicyTrainer",
    "RankBatch",
    "TokenSequence",
    "group_advantages",
    "negative_log_likelihood",
    "plan_advantages",
    "save_policy",
    "split_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'learner' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
