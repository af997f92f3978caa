"""One line of advice about a run, as ``asyncrl plan`` writes it and the report shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from asyncrl.metrics import read_json

_FILE = "advice.json"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change that pays.

    Attributes:
        change: Hydra overrides. Example: ``buffer.max_lag=1``.
        why: What is in the way now, in a sentence.
        predicted_step_s: Step time after the change.
        interval: Its 5th and 95th percentile over lengths drawn anew.
        predicted_lag: Mean lag after it.
    """

    change: str
    why: str
    predicted_step_s: float
    interval: tuple[float, float]
    predicted_lag: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """What `to_dict` gave, also where it went through JSON."""
        low, high = values["interval"]
        return cls(**{**values, "interval": (low, high)})

    def __str__(self) -> str:
        return (
            f"{self.change}: {self.predicted_step_s:.3g} s per step ({self.interval[0]:.3g} to {self.interval[1]:.3g}) "
            f"at mean lag {self.predicted_lag:.1f}; {self.why}"
        )


def advice_file(run_dir: Path) -> Path:
    """Where the newest advice on a run stands: under ``advice`` the fields of `Advice`, or null where there is none."""
    return run_dir / _FILE


def read_advice(run_dir: Path) -> Advice | None:
    """The newest advice on a run; None where there is none, or nobody has looked for any yet.

    Raises:
        ValueError: the file is damaged; named.
    """
    path = advice_file(run_dir)
    document = read_json(path, "advice")
    if document is None or document["advice"] is None:
        return None
    try:
        return Advice.from_dict(document["advice"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must hold the fields of Advice under advice, got {document['advice']!r}; asyncrl plan writes it "
            "anew, or delete it to go without"
        ) from error
