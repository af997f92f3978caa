"""The advice on a run: ``asyncrl plan`` writes it and the report shows it as one line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from asyncrl.metrics import read_json

_FILE = "advice.json"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change of options that makes the run faster.

    Attributes:
        change: Hydra overrides. Example: ``buffer.max_lag=1``.
        why: The present bottleneck, as a sentence.
        predicted_step_s: Predicted seconds per step after the change.
        interval: 5th and 95th percentile of ``predicted_step_s`` over resampled response lengths.
        predicted_lag: Predicted mean lag after the change.
    """

    change: str
    why: str
    predicted_step_s: float
    interval: tuple[float, float]
    predicted_lag: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Create an advice from the values of `to_dict`, also after a round trip through JSON."""
        low, high = values["interval"]
        return cls(**{**values, "interval": (low, high)})

    def __str__(self) -> str:
        return (
            f"{self.change}: {self.predicted_step_s:.3g} s per step ({self.interval[0]:.3g} to {self.interval[1]:.3g}) "
            f"at mean lag {self.predicted_lag:.1f}; {self.why}"
        )


def advice_file(run_dir: Path) -> Path:
    """The file of the newest advice on a run. Its key ``advice`` holds the fields of `Advice`, or null."""
    return run_dir / _FILE


def read_advice(run_dir: Path) -> Advice | None:
    """The newest advice on a run; None if the planner found none or has not searched yet.

    Raises:
        ValueError: the file is damaged. The message names it.
    """
    path = advice_file(run_dir)
    document = read_json(path, "advice")
    if document is None or document["advice"] is None:
        return None
    try:
        return Advice.from_dict(document["advice"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must hold the fields of Advice under advice, got {document['advice']!r}; run asyncrl plan to "
            "write the file again, or delete it"
        ) from error
