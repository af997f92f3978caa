"""The rollout fleet: the workers that generate, score and store rollouts, each with its own inference engine.

Each name in ``__all__`` is imported at its first use, so importing this package does not load Ray or numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import RolloutFleetConfig, SamplingConfig
    from .metrics import FleetCounters
    from .worker import RolloutWorker

__all__ = ["FleetCounters", "RolloutFleetConfig", "RolloutWorker", "SamplingConfig"]
_PLACES = {"FleetCounters": "metrics", "RolloutWorker": "worker"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES.get(name, 'config')}", __name__), name)
