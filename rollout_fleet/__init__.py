"""The rollout fleet: workers that lease prompts, generate on their engine, score, and store trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import RolloutFleetConfig, SamplingConfig
from .metrics import FleetCounters

if TYPE_CHECKING:
    from .worker import RolloutWorker

__all__ = ["FleetCounters", "RolloutFleetConfig", "RolloutWorker", "SamplingConfig"]


def __getattr__(name: str) -> Any:
    """Load the worker, and with it Ray, on first use."""
    if name == "RolloutWorker":
        from .worker import RolloutWorker

        return RolloutWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
