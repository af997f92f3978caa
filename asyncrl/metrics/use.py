"""How well a run uses its two pools: seconds of work and of idling by cause, in total and of late."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """The time of a pool since training began.

    Attributes:
        name: ``learner`` or ``fleet``.
        capacity: Ranks of the learner, places for samples of the fleet.
        busy_s: Rank-seconds or place-seconds of work.
        idle_s: The others, by cause; with ``busy_s`` they make up capacity x time.
        recent: Share of the last steps' time by cause; work under ``busy``.
    """

    name: str
    capacity: int
    busy_s: float
    idle_s: Mapping[str, float]
    recent: Mapping[str, float] = field(default_factory=dict)

    @property
    def utilisation(self) -> float:
        """Share of work since training began, from 0 to 1."""
        total = self.busy_s + sum(self.idle_s.values())
        return self.busy_s / total if total > 0 else 0.0

    @property
    def top_cause(self) -> tuple[str, float] | None:
        """What cost most of late, and its share of the time; None where nothing did."""
        causes = {cause: share for cause, share in self.recent.items() if cause != BUSY and share > 0}
        return max(causes.items(), key=lambda item: item[1], default=None)


BUSY = "busy"
"""Stands for work among the causes of `PoolUse.recent`."""


@dataclass(frozen=True, kw_only=True)
class RunUse:
    """Both pools, and what to change, in one line; empty where there is no advice."""

    learner: PoolUse
    fleet: PoolUse
    advice: str = ""
