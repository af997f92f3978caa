"""``dry_run=true``: show the resources and deadlines of a run without starting it.

The checks of `asyncrl.cli.preflight` run first. Their errors are shown together with the figures.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from asyncrl.checks import resolve_devices
from asyncrl.cli.preflight import check_folders, preflight
from asyncrl.cli.quickstart import with_quickstart_assets
from asyncrl.config import (
    RunConfig,
    keeps_stores_on_hosts,
    learner_pools,
    learner_roles,
    requested_cpus,
    requested_gpus,
    with_time_to_read,
)
from asyncrl.core.visible_gpus import visible_gpus
from asyncrl.metrics import counted
from asyncrl.planner.device_memory import GIB, ModelSize, engine_memory, kv_tokens, rank_memory

_BYTES_PER_TOKEN = 14
"""Bytes of a stored token: id, log-prob, version, and a share of the metadata."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The result of a dry run; each list holds lines for the user.

    Attributes:
        problems: Errors of the checks; empty if the run can start.
        placement: Devices and resources of each part.
        memory: Bytes by device and part; empty without a model.
        tokens: Token figures of one learner step.
        staleness: Consequences of the staleness bound.
        waits: Awaited events in order, with their deadlines.
        notes: Other lines of the checks.
    """

    problems: list[str] = field(default_factory=list)
    placement: list[str] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    staleness: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def page(self) -> str:
        """Format all sections for the terminal."""
        lines = ["dry run: nothing was started", *_section("placement", self.placement)]
        if self.memory:
            lines += _section("memory per device (activations, logits and KV cache are estimates)", _table(self.memory))
        lines += _section("tokens of a learner step", self.tokens)
        lines += _section("staleness", self.staleness)
        lines += _section("waits for, in this order", self.waits)
        lines += _section("checked", self.notes)
        lines += _section("not ready", self.problems) if self.problems else ["", "every check passed"]
        return "\n".join(lines) + "\n"


def dry_run(config: RunConfig) -> DryRun:
    """Check a run and compute its resources. Creates no folder of the run and starts none of its processes."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-dry-run-") as folder:
        problems: list[str] = []
        notes: list[str] = []
        with_assets = with_quickstart_assets(replace(config, output_dir=folder)) if config.quickstart else config
        with_assets = replace(with_assets, output_dir=config.output_dir)
        try:
            if not config.ray.address:
                with_assets = resolve_devices(with_assets, visible_gpus(), notes.append)
            check_folders(config)
            asyncio.run(preflight(with_assets, notes.append))
        except ValueError as error:
            problems.append(str(error))
        memory = _memory(with_assets, problems)
    return DryRun(
        problems=problems,
        placement=list(_placement(config, with_assets)),
        memory=memory,
        tokens=list(_tokens(config)),
        staleness=list(_staleness(config)),
        waits=list(_waits(with_time_to_read(with_assets))),
        notes=notes,
    )


def _memory(config: RunConfig, problems: list[str]) -> dict[str, dict[str, int]]:
    """Memory per kind of device; colocated ranks and engines share a device."""
    try:
        model = ModelSize.of(config.model.path)
    except ValueError as error:
        problems.append(str(error))
        return {}
    ranks = {f"learner rank ({pool})": parts for pool, parts in rank_memory(config, model).items()}
    engine = engine_memory(config, model)
    if not config.placement.colocated:
        return {**ranks, "engine": engine}
    return {f"{name} and engine, in turns": {**parts, **engine} for name, parts in ranks.items()}


def _placement(asked: RunConfig, config: RunConfig) -> Iterator[str]:
    """Placement of all parts; ``asked`` has the devices of the command line, ``config`` the resolved devices."""
    fleet, learner = config.rollout_fleet, config.learner
    roles = learner_roles(config)
    named = ((asked.learner.device, learner.device), (asked.rollout_fleet.device, fleet.device))
    devices = [_device(before, after) for before, after in named]
    for pool, size in learner_pools(config).items():
        hosted = ", ".join(role for role, of in roles.items() if of == pool)
        shape = f"dp {size // learner.sp_size} x sp {learner.sp_size}"
        yield f"learner pool {pool}: {counted(size, 'rank')} on {devices[0]} ({shape}), {hosted}"
    size = f" x {fleet.sglang.tp_size} tensor-parallel ranks" if fleet.sglang.tp_size > 1 else ""
    fewest, most = fleet.fewest_groups_in_flight, fleet.most_groups_in_flight
    groups = str(most) if fewest == most else f"{fewest} to {most}"
    where = "the learner's devices, in turns" if config.placement.colocated else devices[1]
    count = f"{fleet.fewest_engines} to {fleet.most_engines}" if fleet.is_elastic else fleet.num_engines
    yield f"fleet: {count} {fleet.engine} engines{size} on {where}, {groups} groups each"
    if keeps_stores_on_hosts(config):
        stores = "1 server, and a store on each host of engines"
    elif config.buffer.num_store_servers:
        stores = f"1 server and {counted(config.buffer.num_store_servers, 'store')}"
    else:
        stores = "1 server, which also stores the groups"
    yield f"buffer: {stores}; durability {config.buffer.durability}"
    cluster = f"the Ray cluster at {config.ray.address}" if config.ray.address else "a separate Ray cluster"
    more = f" ({requested_cpus(config, fleet.most_engines):g} with all engines)" if fleet.is_elastic else ""
    have = f"; this machine has {os.cpu_count()} and {visible_gpus()}" if not config.ray.address else ""
    gpus = counted(requested_gpus(config), "GPU")
    if "auto" in (learner.device, fleet.device):
        gpus = "as many GPUs as its devices need"
    yield f"{cluster}: {counted(requested_cpus(config), 'CPU')}{more} and {gpus}{have}"


def _device(asked: str, resolved: str) -> str:
    """A device for the terminal. A run resolves ``auto`` on a cluster when it joins the cluster."""
    if asked != "auto":
        return asked
    return "what the cluster has" if resolved == "auto" else f"{resolved} (auto)"


def _tokens(config: RunConfig) -> Iterator[str]:
    algorithm, learner = config.algorithm, config.learner
    samples = algorithm.groups_per_step * algorithm.samples_per_prompt
    response, prompt = config.rollout_fleet.sampling.max_new_tokens, config.data.max_prompt_tokens
    most = samples * (response + prompt)
    dp_size = learner.num_ranks // learner.sp_size
    budget = dp_size * learner.sp_size * learner.max_tokens_per_micro_batch
    yield f"{algorithm.groups_per_step} groups x {algorithm.samples_per_prompt} samples = {samples} trajectories"
    yield f"at most {most:,} tokens: {samples} x ({prompt:,} of a prompt + {response:,} of a response)"
    micro_batches = counted(-(-most // budget), "micro-batch")
    yield f"at most {micro_batches} per rank, {counted(algorithm.num_mini_batches, 'optimizer update')}"
    yield f"an engine's KV cache holds {kv_tokens(config):,} tokens at most"


def _staleness(config: RunConfig) -> Iterator[str]:
    buffer, fleet, batch = config.buffer, config.rollout_fleet, config.algorithm.groups_per_step
    updates = config.algorithm.num_mini_batches
    most_open, places = (buffer.max_lag + 1) * batch, fleet.most_engines * fleet.most_groups_in_flight
    yield f"the learner trains on a token at most {counted(buffer.max_lag, 'learner step')} after it was sampled"
    yield f"which is at most {counted(buffer.max_lag * updates + updates - 1, 'optimizer update')}"
    yield f"at most {most_open} groups are open; the fleet has places for {places}"
    if places > most_open:
        yield f"the fleet can never use {places - most_open} of its places: lower rollout_fleet.groups_in_flight"
    if buffer.max_lag == 0:
        yield "generation and training alternate: they do not overlap with buffer.max_lag=0"
    yield f"weights are published every {counted(config.weights.publish_every, 'step')}; a straggler: {buffer.on_stale}"
    longest = config.rollout_fleet.sampling.max_new_tokens * config.algorithm.samples_per_prompt
    held, room = most_open * longest * _BYTES_PER_TOKEN, buffer.max_stored_bytes * max(1, buffer.num_store_servers)
    fits = "fits" if held <= room else "does not fit; leases wait for room if responses are that long"
    yield f"the buffer holds at most {_amount(held)} of responses: {fits} (buffer.max_stored_bytes)"


def _waits(config: RunConfig) -> Iterator[str]:
    fleet, learner = config.rollout_fleet, config.learner
    yield f"Ray: ray.start_timeout_s={config.ray.start_timeout_s:g}"
    if config.sft.enabled:
        yield (
            f"the warm start, {counted(config.sft.max_steps, 'update')} at most: sft.progress_timeout_s="
            f"{config.sft.progress_timeout_s:g}"
        )
    ranks, samples = sum(learner_pools(config).values()), config.evaluation.num_samples + 1
    yield f"{counted(ranks, 'learner rank')}: learner.start_timeout_s={learner.start_timeout_s:g}"
    yield f"{counted(fleet.fewest_engines, 'engine')}: rollout_fleet.start_timeout_s={fleet.start_timeout_s:g}"
    if config.evaluation.enabled:
        yield f"the held-out prompts, {counted(samples, 'sample')} of each, before and after training"
    yield (
        f"then {counted(config.total_steps, 'step')}: a batch of {counted(config.algorithm.groups_per_step, 'group')}, "
        f"and its update: learner.step_timeout_s={learner.step_timeout_s:g}"
    )
    if config.checkpoint.every_steps:
        yield f"a checkpoint every {counted(config.checkpoint.every_steps, 'step')}, written during training"


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _table(memory: Mapping[str, Mapping[str, int]]) -> list[str]:
    lines = []
    for device, parts in memory.items():
        lines.append(f"{device}: {_amount(sum(parts.values()))}")
        lines += [f"  {part:20} {_amount(size):>12}" for part, size in parts.items()]
    return lines


def _amount(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.2f} MiB"
