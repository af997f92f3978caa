"""Scenarios for the simulator: speeds of engines and learner, response lengths and options.

Times are in seconds. They do not include waits, which the simulator computes. Lengths are in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import LEARNER_POOL, RunConfig, learner_roles, role_options
from buffer.config import OnStale
from rollout_fleet.config import EngineKind, OnUpdate, SaveProgress

_MOST_TOKENS, _MOST_SPREAD, _MOST_LAG, _MOST_BYTES = 1e9, 10.0, 10_000, 2**62
"""Largest token count, spread, lag and number of bytes in a scenario. All other numbers are at most a million."""

_DRAWN_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class LengthModel:
    """Response lengths in tokens: recorded lengths, or a log-normal distribution.

    Attributes:
        recorded: Response lengths of recorded groups, one list per group. The simulator draws whole groups, because
            samples of one prompt have similar lengths. An empty list selects the distribution.
        mean_tokens: Mean of the distribution before the limit ``max_tokens`` applies.
        spread: Standard deviation of the logarithm of the lengths within one prompt. Example: 0.6.
        prompt_spread: Standard deviation of the logarithm of the mean length per prompt.
    """

    recorded: list[list[int]] = field(default_factory=list)
    mean_tokens: float = 512.0
    spread: float = 0.5
    prompt_spread: float = 0.3
    max_tokens: int = 32768
    prompt_tokens: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "lengths.", 1.0, "mean_tokens", "max_tokens", high=_MOST_TOKENS)
        _check(self, "lengths.", 0.0, "prompt_tokens", high=_MOST_TOKENS)
        _check(self, "lengths.", 0.0, "spread", "prompt_spread", high=_MOST_SPREAD)
        _check(self, "lengths.", 1, "recorded", high=_MOST_TOKENS)
        if not all(self.recorded):
            raise ValueError("lengths.recorded must hold groups of lengths, got an empty group; leave this group out")

    def draw(self, rng: np.random.Generator, num_groups: int, num_samples: int) -> np.ndarray:
        """Draw response lengths in tokens, [num_groups, num_samples] int64.

        If there are recorded groups, the result consists of recorded groups, drawn with replacement.
        """
        if self.recorded:
            chosen = rng.integers(len(self.recorded), size=num_groups)
            return np.stack([np.resize(self.recorded[index], num_samples) for index in chosen]).astype(np.int64)
        variance = self.spread**2 + self.prompt_spread**2
        middle = math.log(self.mean_tokens) - variance / 2
        of_prompt = self.prompt_spread * rng.standard_normal((num_groups, 1))
        logarithms = middle + of_prompt + self.spread * rng.standard_normal((num_groups, num_samples))
        return np.clip(np.rint(np.exp(logarithms)), 1, self.max_tokens).astype(np.int64)

    def stream(self, rng: np.random.Generator, num_samples: int) -> Iterator[list[int]]:
        """Yield a list of ``num_samples`` response lengths for each new group. The generator never ends."""
        while True:
            yield from self.draw(rng, _DRAWN_AT_ONCE, num_samples).tolist()

    def resampled(self, rng: np.random.Generator) -> LengthModel:
        """Return a copy with the same number of recorded groups, drawn with replacement from the recorded groups.

        Without recorded groups, return this object.
        """
        if not self.recorded:
            return self
        chosen = rng.integers(len(self.recorded), size=len(self.recorded))
        return replace(self, recorded=[self.recorded[index] for index in chosen])


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """The speed of one engine.

    Attributes:
        step_s: Fixed time of one decoding step.
        step_s_per_sample: Time that each running sample adds to a decoding step.
        prefill_s_per_token: Time to compute the KV cache of one token. The engine does not decode during this time.
        max_running: Largest number of running samples. Other samples wait in order of arrival.
        takes_batches: True if the engine finishes a batch before it starts the next one, as the in-process engine does.
            If False, a sample starts as soon as the engine has room.
        batch_s: Time of a batch without its decoding steps.
        variation: For each recorded batch, the recorded time divided by the expected time. The simulated times vary in
            the same way.
    """

    step_s: float = 0.02
    step_s_per_sample: float = 0.0
    prefill_s_per_token: float = 0.0
    max_running: int = 256
    takes_batches: bool = False
    batch_s: float = 0.0
    variation: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check(self, "engine.", 0.0, "step_s", "step_s_per_sample", "prefill_s_per_token", "batch_s", "variation")
        _check(self, "engine.", 1, "max_running")
        if self.step_s + self.step_s_per_sample <= 0:
            raise ValueError(
                "engine.step_s + engine.step_s_per_sample must be > 0, got 0; set engine.step_s to the seconds of a "
                "decoding step"
            )


@dataclass(frozen=True, kw_only=True)
class LearnerModel:
    """The times of a learner step and of a publish.

    Attributes:
        step_s: Fixed time of a step, in addition to the time of its tokens.
        rank_s_per_token: Time that one rank needs for one token of a prompt or response. The ranks share the tokens.
        copy_s: Pause of the ranks to copy the weights of a new version.
        publish_s: Time from the end of the copy until engines can load the version. Training and generation continue.
        load_s: Pause of an engine to load the version.
        on_update: What an engine does with the KV cache of running samples after an update.
        shares_learner: True if the ranks also pause for ``publish_s`` and ``load_s``.
        variation: For each recorded step, the recorded time divided by the expected time. The simulated times vary in
            the same way.
    """

    step_s: float = 1.0
    rank_s_per_token: float = 0.0
    copy_s: float = 0.0
    publish_s: float = 0.0
    load_s: float = 0.0
    on_update: OnUpdate = OnUpdate.recompute
    shares_learner: bool = False
    variation: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check(self, "learner.", 0.0, "step_s", "rank_s_per_token", "copy_s", "publish_s", "load_s", "variation")
        if self.step_s + self.rank_s_per_token <= 0:
            raise ValueError(
                "learner.step_s + learner.rank_s_per_token must be > 0, got 0; set learner.step_s to the seconds of a "
                "learner step"
            )


@dataclass(frozen=True, kw_only=True)
class HostModel:
    """The CPU cores of a host, if engines and ranks compute on the CPU.

    All engines share one core, and all ranks share another core. The other processes, such as the buffer, use the
    core that runs fewer jobs.

    Attributes:
        is_shared: True if engines and ranks compute on these cores; requires ``engine.takes_batches``. If False, the
            other fields have no effect.
        settle_s: CPU time of an engine's process to score and store a group; it replaces ``Scenario.settle_s``.
        publish_s: CPU time of a rank's process per published version, after the rank has copied the weights.
        group_s: CPU time of the other processes per group, such as the buffer.
        step_s: CPU time of the other processes per step, such as the controller.
    """

    is_shared: bool = False
    settle_s: float = 0.0
    publish_s: float = 0.0
    group_s: float = 0.0
    step_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "host.", 0.0, "settle_s", "publish_s", "group_s", "step_s")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The system that the simulator runs: engines, learner, buffer options and response lengths.

    Attributes:
        devices_per_engine: ``rollout_fleet.sglang.tp_size``.
        num_ranks: Number of learner ranks, with one device each.
        ranks_at_once: The number of ranks must be a multiple of this number, which follows from ``learner.sp_size`` and
            ``learner.fsdp_size``.
        groups_in_flight: Prompt groups that one engine generates at a time. The worker may also score and store up to
            this number of finished groups.
        groups_per_step: Prompt groups per batch.
        samples_per_prompt: Samples per prompt group.
        publish_every: Learner steps between two published versions.
        bytes_per_token: Bytes per stored token: id, log-prob, version, masks.
        settle_s: Time from a group's last token until the buffer has stored the group: reward, encoding, network.
        ask_s: Time from the moment when a group slot becomes free until the worker requests a new group. If all slots
            are free, the worker requests immediately.
        plan_s: Time from the moment when a batch is complete until its learner step begins: the plan, the
            fetch and the forward pass of the reference model.
        pipeline_steps: Largest number of planned batches that the learner has not consumed; 2 in a real run.
        equal_rewards: Share of groups that ``buffer.filters=[equal_rewards]`` drops; 0 without this filter.
        queue_groups: Largest number of finished groups that wait for a batch, at least ``groups_per_step``. Above it,
            the buffer drops the oldest group and requeues its prompt. 0 means no limit, as in a real run.
        warm_up_steps: Number of steps at the start of the run that do not count in the step time, the rate, the lags
            and the waits.
        hands_on: True if workers save running groups if the buffer asks, so that other workers continue the groups.
            False for ``rollout_fleet.save_progress=never``.
        whole_groups: Simulate only the longest sample of a group. Its load on the engine is the mean load of the whole
            group. This is faster for large fleets.
    """

    num_engines: int = 1
    devices_per_engine: int = 1
    num_ranks: int = 1
    ranks_at_once: int = 1
    groups_in_flight: int = 32
    groups_per_step: int = 32
    samples_per_prompt: int = 8
    max_lag: int = 2
    max_uses: int = 1
    on_stale: OnStale = OnStale.wait
    order: str = "earliest_deadline"
    publish_every: int = 1
    max_stored_bytes: int = 2 * 1024**3
    bytes_per_token: float = 14.0
    settle_s: float = 0.0
    ask_s: float = 0.02
    plan_s: float = 0.0
    pipeline_steps: int = 2
    equal_rewards: float = 0.0
    queue_groups: int = 0
    num_steps: int = 60
    warm_up_steps: int = 10
    hands_on: bool = True
    whole_groups: bool = False
    lengths: LengthModel = field(default_factory=LengthModel)
    engine: EngineModel = field(default_factory=EngineModel)
    learner: LearnerModel = field(default_factory=LearnerModel)
    host: HostModel = field(default_factory=HostModel)

    @property
    def num_devices(self) -> int:
        """Number of devices that all engines and learner ranks use together."""
        return self.num_engines * self.devices_per_engine + self.num_ranks

    def __post_init__(self) -> None:
        _check(self, "", 1, "num_engines", "devices_per_engine", "num_ranks", "ranks_at_once", "groups_in_flight")
        _check(self, "", 1, "groups_per_step", "samples_per_prompt", "publish_every", "pipeline_steps", "num_steps")
        _check(self, "", 0, "max_lag", high=_MOST_LAG)
        _check(self, "", 1, "max_uses", high=self.max_lag + 1)
        _check(self, "", 1, "max_stored_bytes", high=_MOST_BYTES)
        _check(self, "", 0, "bytes_per_token", "settle_s", "ask_s", "plan_s", "queue_groups", "warm_up_steps")
        if 0 < self.queue_groups < self.groups_per_step:
            raise ValueError(
                f"queue_groups must be 0 or at least groups_per_step={self.groups_per_step}, got {self.queue_groups}: "
                "with fewer groups a batch could never be complete"
            )
        if not 0 <= self.equal_rewards < 1:
            raise ValueError(f"equal_rewards must be in [0, 1), got {self.equal_rewards}; 1 would drop every group")
        if self.host.is_shared and not self.engine.takes_batches:
            raise ValueError(
                "host.is_shared needs engine.takes_batches=true: the simulator can share a core only among engines "
                "that take batches; otherwise set host.is_shared=false"
            )
        if self.warm_up_steps >= self.num_steps:
            raise ValueError(
                f"warm_up_steps must be below num_steps={self.num_steps}, got {self.warm_up_steps}; raise num_steps"
            )
        if self.publish_every > self.max_lag + 1:
            raise ValueError(
                f"publish_every must be at most max_lag + 1 = {self.max_lag + 1}, got {self.publish_every}: the "
                "learner would wait forever for rollouts of a version that is never published"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the scenario as nested dicts for JSON. A recorded list is replaced by its number of entries."""
        values = asdict(self)
        for part, name in (("lengths", "recorded"), ("engine", "variation"), ("learner", "variation")):
            values[part][name] = len(values[part][name])
        return values


def load_spec(path: Path) -> Scenario:
    """Read a scenario from a YAML file; missing options keep their defaults.

    Raises:
        ValueError: the file is missing or not YAML, or an option is unknown, has the wrong type or is out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise ValueError(f"{path} is neither a run's folder nor a scenario file; pass a run's folder or a YAML file")
    try:
        schema = OmegaConf.structured(Scenario)
        for node in (schema, schema.lengths, schema.engine, schema.learner, schema.host):
            OmegaConf.set_readonly(node, False)  # OmegaConf makes nodes of frozen dataclasses read-only
        given = OmegaConf.load(path)
        if not given:
            raise ValueError(f"{path} is empty; write the options of a scenario into it, such as num_engines: 8")
        scenario = OmegaConf.to_object(OmegaConf.merge(schema, given))
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} is not a scenario: {' '.join(str(error).split())}") from error
    assert isinstance(scenario, Scenario)
    return scenario


def configured(scenario: Scenario, config: RunConfig) -> Scenario:
    """Return a copy of ``scenario`` with the options of the run ``config``.

    Values that are not options of a run, such as the time of a step, stay unchanged.
    """
    fleet, buffer = config.rollout_fleet, config.buffer
    engine = replace(
        scenario.engine,
        takes_batches=fleet.engine is EngineKind.transformers,
        max_running=(
            fleet.sglang.max_running_requests if fleet.engine is EngineKind.sglang else fleet.transformers.max_rows
        ),
    )
    return replace(
        scenario,
        num_engines=fleet.most_engines,
        devices_per_engine=fleet.sglang.tp_size,
        num_ranks=config.learner.num_ranks,
        ranks_at_once=math.lcm(
            *(
                size
                for role, pool in learner_roles(config).items()
                if pool == LEARNER_POOL and (own := role_options(config, role))
                for size in (own.sp_size, max(1, own.fsdp_size))
            )
        ),
        groups_in_flight=fleet.most_groups_in_flight,
        groups_per_step=config.algorithm.groups_per_step,
        samples_per_prompt=config.algorithm.samples_per_prompt,
        max_lag=buffer.max_lag,
        max_uses=buffer.max_uses,
        on_stale=buffer.on_stale,
        order=buffer.order,
        publish_every=config.weights.publish_every,
        max_stored_bytes=buffer.max_stored_bytes,
        hands_on=fleet.save_progress is not SaveProgress.never,
        engine=engine,
        learner=replace(scenario.learner, on_update=fleet.sglang.on_update),
        lengths=replace(scenario.lengths, max_tokens=fleet.sampling.max_new_tokens),
    )


OVERRIDES: Mapping[str, str] = {
    "num_engines": "rollout_fleet.num_engines",
    "num_ranks": "learner.num_ranks",
    "groups_in_flight": "rollout_fleet.groups_in_flight",
    "groups_per_step": "algorithm.groups_per_step",
    "max_lag": "buffer.max_lag",
    "on_stale": "buffer.on_stale",
    "publish_every": "weights.publish_every",
}
"""Fields of a scenario that a plan may change, each with its option of a run."""


def overrides(changed: Scenario, base: Scenario) -> list[str]:
    """Return the options in which ``changed`` differs from ``base``, as Hydra overrides.

    Example: ``["buffer.max_lag=1"]``.
    """
    values = ((option, getattr(changed, name), getattr(base, name)) for name, option in OVERRIDES.items())
    return [f"{option}={new}" for option, new, old in values if new != old]


def _check(part: object, prefix: str, low: float, *names: str, high: float = 1e6) -> None:
    for name in names:
        values = getattr(part, name)
        for each in values if isinstance(values, list) else [values]:
            for value in each if isinstance(each, list) else [each]:
                if not low <= value <= high:
                    raise ValueError(f"{prefix}{name} must be from {low:g} to {high:g}, got {value}")
