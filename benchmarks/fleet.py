"""Measures the rollout fleet's efficiency: ``python -m benchmarks.fleet [--only PART]``.

There are three parts. The part ``scripted`` measures engines of different speeds, samples of two lengths, and an engine
that dies. This part takes two minutes. The part ``leases`` measures a thousand simulated workers on the real buffer
server. This part takes half a minute. The part ``engines`` compares a fleet on two real SGLang servers with a client
that calls the servers directly. This part also kills a server in each of four fleets. It takes six minutes, and needs
an idle machine with two or more cores. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.report import Target, print_report

TARGETS = {
    "fleet_vs_bare_client": Target(at_least=0.95),
    "engine_occupancy": Target(at_least=0.95),
    "slow_engine_share": Target(at_least=0.85),
    "survivors_during_recovery": Target(at_least=0.95),
    "recovery_vs_engine_start": Target(at_most=1.2),
    "tokens_lost_per_kill": Target(at_most=1.0),
    "commit_to_lease_p99_ms": Target(at_most=100.0),
}
LEASES_PER_COMMIT = (64, 256, 1000)
"""Three measurements: this many groups may begin after a commit, while a thousand workers wait.

The target applies to the first measurement.
"""


def scripted() -> dict[str, float]:
    """Measure four scripted engines, which write tokens at a fixed pace; return the figures by name."""
    from benchmarks import fleet_scripted

    share, busy = asyncio.run(fleet_scripted.share_of_speeds(fleet_scripted.ONE_SLOW))
    figures = {
        "slow_engine_share": share,
        "slow_engine_share_without_hand_over": asyncio.run(
            fleet_scripted.share_of_speeds(fleet_scripted.ONE_SLOW, hand_over=False)
        )[0],
        "equal_engines_share": asyncio.run(fleet_scripted.share_of_speeds(fleet_scripted.EQUAL))[0],
        "slow_engine_process_busy": busy,
        "engine_occupancy": asyncio.run(fleet_scripted.occupancy()),
    }
    return figures | {f"scripted_{name}": value for name, value in asyncio.run(fleet_scripted.recovery()).items()}


def leases() -> dict[str, float]:
    """Measure how long a thousand simulated workers wait for new groups after a learner step.

    `LEASES_PER_COMMIT` lists how many groups may begin after a step. For each of these values, return percentiles of
    the waiting time in milliseconds, by name.
    """
    from benchmarks.fleet_leases import measure_leases

    figures = {}
    for number in LEASES_PER_COMMIT:
        suffix = "" if number == LEASES_PER_COMMIT[0] else f"_of_{number}"
        waits = measure_leases(number)
        figures |= {
            f"commit_to_lease_p{percent}_ms{suffix}": 1e3 * float(np.percentile(waits, percent)) for percent in (50, 99)
        }
    return figures


def engines() -> dict[str, float]:
    """Measure two real SGLang servers; return the figures by name."""
    from benchmarks.fleet_engines import measure_engines

    return measure_engines()


PARTS: dict[str, Callable[[], dict[str, float]]] = {"scripted": scripted, "leases": leases, "engines": engines}
"""The function of each part. The functions import their modules, because the simulated workers do not need torch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the rollout fleet. Print a table, then the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="measure only this part")
    only = parser.parse_args(arguments).only
    logging.basicConfig(level=logging.ERROR)  # Hide warnings about engines that the benchmark kills.
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    figures: dict[str, float] = {}
    for name, measure in PARTS.items():
        if only in (None, name):
            figures |= measure()
    title = "four scripted engines, a thousand simulated workers, two SGLang servers" if only is None else only
    baseline = "the sum of the engines' speeds; a bare client of the same servers; an engine's start"
    print_report(title, {}, figures, TARGETS, baseline=baseline)


if __name__ == "__main__":
    main()
