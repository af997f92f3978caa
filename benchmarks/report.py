"""Prints the report of a benchmark: a table of measurements, and the figures as JSON on the last line."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The bounds of a figure. A bound that is None does not apply.

    Attributes:
        at_least: Smallest value that meets the target.
        at_most: Largest value that meets the target.
    """

    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, value: float) -> bool:
        """Return whether ``value`` is within both bounds."""
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        bounds = [(">=", self.at_least), ("<=", self.at_most)]
        return " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None) or "reported"


def median_times(
    calls: dict[str, Callable[[], Any]], *, num_runs: int = 9, num_calls: int = 1, warm_up: int = 1
) -> dict[str, float]:
    """Time several functions; return the median seconds per call by name.

    The functions are called alternately, so other work of the machine affects all of them. Every second run reverses
    the order of the functions.

    Args:
        calls: The functions by name.
        num_runs: Runs per function. The result is the median of these runs.
        num_calls: Calls per run. Use more than one for short calls.
        warm_up: Number of first runs per function that are not measured.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(num_runs + warm_up):
        for name in calls if run % 2 == 0 else reversed(calls):
            seconds = _timed(calls[name], num_calls)
            if run >= warm_up:
                times[name].append(seconds / num_calls)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _timed(call: Callable[[], Any], num_calls: int) -> float:
    """Return the seconds of ``num_calls`` calls, without garbage collection, as in ``timeit``."""
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        return time.perf_counter() - start
    finally:
        gc.enable()


def print_report(
    title: str,
    rows: Mapping[str, str],
    figures: Mapping[str, float | None],
    targets: Mapping[str, Target],
    *,
    baseline: str,
) -> bool:
    """Print measurements and figures as tables, then the figures as one line of JSON.

    Args:
        title: Title of the measurement.
        rows: The value of each measurement, as text. Example: ``{"codec": "0.021 ms"}``.
        figures: The value of each figure. None means that the figure could not be measured on this machine.
        targets: The bounds of figures, by name.
        baseline: What the figures are compared with, as text.

    Returns:
        True if every target is met. Figures that were not measured are ignored.
    """
    print(f"{title}; against {baseline}")
    width = max(map(len, [*rows, *figures]))
    for name, value in rows.items():
        print(f"  {name:{width}}  {value}")
    print("figures")
    all_met = True
    for name, value in figures.items():
        target = targets.get(name, Target())
        if value is None:
            print(f"  {name:{width}}  not measured {target}")
            continue
        is_met = target.is_met(value)
        all_met &= is_met
        print(f"  {name:{width}}  {value:<10.4g} {target}{'' if is_met else '  MISSED'}")
    rounded = {name: None if value is None else round(float(value), 6) for name, value in figures.items()}
    print(json.dumps({"figures": rounded, "baseline": baseline}))
    return all_met


def milliseconds(seconds: float) -> str:
    """Return a time in seconds as text in milliseconds. Example: ``0.021 ms``."""
    return f"{seconds * 1e3:.3f} ms"
