"""Finds the part that saturates first in a very large system: ``python -m benchmarks.scale``.

The benchmark simulates 4,096 engines and 1,024 ranks with the buffer's own code, and measures the CPU time of this code
per simulated step. The bytes on the network and in stores are computed from the simulation's counts. The assumed rates
of the network and the stores are options. docs/scale.md names the sources of the rates.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.planner.scenario import EngineModel, LearnerModel, LengthModel, Scenario
from asyncrl.planner.simulator import SimulatedRun, Simulation
from benchmarks.report import Target, print_report

_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A resource that a simulated step keeps busy, such as a network link.

    Attributes:
        name: Name of the resource.
        seconds: Time that one step keeps the resource busy.
        why: Text for the report that says how ``seconds`` is computed.
    """

    name: str
    seconds: float
    why: str


def scenario(options: argparse.Namespace) -> Scenario:
    """Return the simulator's scenario for the sizes in ``options``, the arguments of the command line.

    A prompt has 16 responses of 8,000 tokens on average. Each engine generates one group at a time.
    """
    return Scenario(
        num_engines=options.engines,
        num_ranks=options.ranks,
        groups_in_flight=1,
        groups_per_step=options.batch,
        samples_per_prompt=16,
        max_lag=4,
        publish_every=1,
        max_stored_bytes=1 << 45,
        bytes_per_token=options.bytes_per_token,
        settle_s=0.5,
        num_steps=options.steps,
        warm_up_steps=max(1, options.steps // 10),
        whole_groups=True,
        lengths=LengthModel(mean_tokens=8000, spread=0.5, prompt_spread=0.3, prompt_tokens=500),
        engine=EngineModel(step_s=0.012, step_s_per_sample=0.0002, prefill_s_per_token=5e-6),
        learner=LearnerModel(step_s=5.0, rank_s_per_token=3e-4, copy_s=0.5, publish_s=5.0, load_s=1.0),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate the system, and print how busy each resource is in a step. Return 0."""
    options = _parser().parse_args(arguments)
    system = scenario(options)
    began_s = time.process_time()
    simulation = Simulation(system)
    outcome = simulation.run()
    took_s = time.process_time() - began_s
    service_s = simulation.buffer.service_s / options.steps
    resources = _resources(options, outcome, service_s)
    rows = {resource.name: f"{resource.seconds:.2f} s per step: {resource.why}" for resource in resources}
    rows["simulated"] = (
        f"{options.steps} steps of {outcome.step_s:.1f} s with {simulation.buffer.num_requests:,} requests in "
        f"{took_s:.0f} CPU seconds; mean lag {outcome.lag_mean:.2f}, {outcome.stored_bytes / _GB:.1f} GB stored at most"
    )
    first = max(resources, key=lambda resource: resource.seconds)
    rows["saturates first"] = f"{first.name}, at {first.seconds / outcome.step_s:.0%} of the step"
    figures = {
        "simulation_cpu_s": took_s,
        "step_s": outcome.step_s,
        "lag_mean": outcome.lag_mean,
        "requests_per_step": simulation.buffer.num_requests / options.steps,
        "us_per_request": 1e6 * simulation.buffer.service_s / simulation.buffer.num_requests,
        **{f"{resource.name.replace(' ', '_')}_share": resource.seconds / outcome.step_s for resource in resources},
    }
    targets = {"simulation_cpu_s": Target(at_most=600), "ledger_share": Target(at_most=1.0)}
    title = f"{options.engines} engines, {options.ranks} ranks, {options.batch} groups of 16 per step"
    print_report(title, rows, figures, targets, baseline="the simulated step")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description="What saturates first.")
    parser.add_argument("--engines", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1024, help="prompt groups of 16 samples per step")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--bytes-per-token", type=float, default=14.0, help="bytes per stored token")
    parser.add_argument(
        "--wire-us",
        type=float,
        default=30.0,
        help="microseconds per request for its frames and the frames of its reply",
    )
    parser.add_argument("--stores", type=int, default=1, help="number of store servers (buffer.num_store_servers)")
    parser.add_argument("--store-gb-s", type=float, default=1.0, help="rate of one store, in and out together")
    parser.add_argument("--weights-gb", type=float, default=60.0, help="size of the policy")
    parser.add_argument("--engines-per-host", type=int, default=8, help="engines that share one copy of a version")
    parser.add_argument(
        "--file-system-gb-s", type=float, default=100.0, help="rate of the file system for all readers together"
    )
    return parser


def _resources(options: argparse.Namespace, outcome: SimulatedRun, service_s: float) -> list[Resource]:
    tokens = outcome.tokens_per_s * outcome.step_s
    num_bytes = tokens * options.bytes_per_token
    num_requests = 4 * options.engines + 2 * options.batch
    hosts = -(-options.engines // options.engines_per_host)
    return [
        Resource(
            name="ledger",
            seconds=service_s + num_requests * options.wire_us * 1e-6,
            why=f"{service_s:.2f} s of its own code, measured, and {options.wire_us:g} us per request for the wire",
        ),
        Resource(
            name="store",
            seconds=2 * num_bytes / (options.stores * options.store_gb_s * _GB),
            why=f"{num_bytes / _GB:.2f} GB in and out of {options.stores} at {options.store_gb_s:g} GB/s",
        ),
        Resource(
            name="publish",
            seconds=hosts * options.weights_gb / options.file_system_gb_s,
            why=f"{options.weights_gb:g} GB to {hosts} hosts at {options.file_system_gb_s:g} GB/s in all",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
