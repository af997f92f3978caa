"""What is simulated: engines, learner, weight updates and response lengths, as numbers. From a YAML file or a run.

Times are in seconds, lengths in tokens. A scenario says what a system *can* do; what it *did*, with which waits, is
what `asyncrl.planner.simulator` finds out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import RunConfig
from buffer.config import OnStale
from rollout_fleet.config import EngineKind, OnUpdate, SaveProgress

_MOST_TOKENS, _MOST_SPREAD, _MOST_LAG, _MOST_BYTES = 1e9, 10.0, 10_000, 2**62
"""Beyond these, and a million of anything else, a simulation would not end or not fit into its numbers."""


@dataclass(frozen=True, kw_only=True)
class LengthModel:
    """Response lengths, in tokens: those of recorded groups, or a log-normal distribution cut at the limit.

    Attributes:
        recorded: Response lengths of recorded groups, one list per group; drawn whole, so that a hard prompt stays
            long in all of its samples. Empty: the distribution below.
        mean_tokens: Mean length before the cut.
        spread: Standard deviation of a length's logarithm, over the samples of one prompt. Example: 0.6.
        prompt_spread: The same of what all samples of a prompt share.
        max_tokens: No response is longer.
        prompt_tokens: Tokens of a prompt.
    """

    recorded: list[list[int]] = field(default_factory=list)
    mean_tokens: float = 512.0
    spread: float = 0.5
    prompt_spread: float = 0.3
    max_tokens: int = 32768
    prompt_tokens: float = 0.0

    def __post_init__(self) -> None:
        for name, low in (("mean_tokens", 1.0), ("max_tokens", 1.0), ("prompt_tokens", 0.0)):
            _check(f"lengths.{name}", getattr(self, name), low, _MOST_TOKENS)
        for name in ("spread", "prompt_spread"):
            _check(f"lengths.{name}", getattr(self, name), 0.0, _MOST_SPREAD)
        for lengths in self.recorded:
            if not lengths:
                raise ValueError("lengths.recorded must hold groups of lengths, got an empty one; leave it out")
            for length in lengths:
                _check("lengths.recorded", length, 1, _MOST_TOKENS)

    def draw(self, rng: np.random.Generator, num_groups: int, num_samples: int) -> np.ndarray:
        """[num_groups, num_samples] int64 lengths; recorded groups are drawn with replacement."""
        if self.recorded:
            chosen = rng.integers(len(self.recorded), size=num_groups)
            return np.stack([np.resize(self.recorded[index], num_samples) for index in chosen]).astype(np.int64)
        variance = self.spread**2 + self.prompt_spread**2
        middle = math.log(self.mean_tokens) - variance / 2
        of_prompt = self.prompt_spread * rng.standard_normal((num_groups, 1))
        logarithms = middle + of_prompt + self.spread * rng.standard_normal((num_groups, num_samples))
        return np.clip(np.rint(np.exp(logarithms)), 1, self.max_tokens).astype(np.int64)

    def resampled(self, rng: np.random.Generator) -> LengthModel:
        """The same number of recorded groups, drawn with replacement; a distribution stays as it is."""
        if not self.recorded:
            return self
        chosen = rng.integers(len(self.recorded), size=len(self.recorded))
        return replace(self, recorded=[self.recorded[index] for index in chosen])


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """One engine: how fast it writes, by how many samples it writes at once.

    Attributes:
        step_s: Time of one decoding step (a token of every running sample) beyond what its samples add.
        step_s_per_sample: What each running sample adds to it.
        prefill_s_per_token: Time to compute the KV cache of one token, during which nothing is written.
        max_running: Samples decoded at once; the others wait in the engine, first come first.
        takes_batches: The engine writes one batch to its end before the next (the in-process engine); else a sample
            begins as soon as there is room.
        batch_s: Time of a batch beside its decoding steps.
        variation: Recorded batches' times over what their lengths say, in their order; batches vary as they did. Empty:
            they do not.
    """

    step_s: float = 0.02
    step_s_per_sample: float = 0.0
    prefill_s_per_token: float = 0.0
    max_running: int = 256
    takes_batches: bool = False
    batch_s: float = 0.0
    variation: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("step_s", "step_s_per_sample", "prefill_s_per_token", "batch_s"):
            _check(f"engine.{name}", getattr(self, name), 0.0)
        for times in self.variation:
            _check("engine.variation", times, 0.0)
        if self.step_s + self.step_s_per_sample <= 0:
            raise ValueError("engine.step_s + engine.step_s_per_sample must be > 0, got 0; a token takes some time")
        _check("engine.max_running", self.max_running, 1)


@dataclass(frozen=True, kw_only=True)
class LearnerModel:
    """The learner: the time of a step, and that of a publish.

    Attributes:
        step_s: Time of a step beyond what its tokens take.
        rank_s_per_token: Rank-seconds for one token, prompts included; more ranks share the tokens.
        copy_s: The ranks stand still for a copy of the weights.
        publish_s: From that copy until an engine can load the version, while everything goes on.
        load_s: An engine stands still to load it.
        on_update: What an engine does with the KV cache of running samples then.
        shares_learner: The ranks stand still for all of ``publish_s`` and ``load_s`` too, as where one collective moves
            the weights.
        variation: Recorded steps' times over what their tokens say, in their order; steps vary as they did.
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
        for name in ("step_s", "rank_s_per_token", "copy_s", "publish_s", "load_s"):
            _check(f"learner.{name}", getattr(self, name), 0.0)
        for times in self.variation:
            _check("learner.variation", times, 0.0)
        if self.step_s + self.rank_s_per_token <= 0:
            raise ValueError("learner.step_s + learner.rank_s_per_token must be > 0, got 0; a step takes some time")


@dataclass(frozen=True, kw_only=True)
class HostModel:
    """What the processors of a host do, where engines and ranks compute on them and on no device of their own.

    All engines share one core, and all ranks another; each core is shared equally by what runs on it. The other
    processes take whichever core has less to do.

    Attributes:
        is_shared: Whether that is so; else nothing below counts. Only with engines that take batches.
        settle_s: Processor time of an engine's process for each finished group, in the place of ``Scenario.settle_s``.
        publish_s: Processor time of a rank's process for each version, after its copy.
        group_s: Processor time of the other processes for each group: buffer and rewards.
        step_s: Processor time of the other processes for each step: the controller.
    """

    is_shared: bool = False
    settle_s: float = 0.0
    publish_s: float = 0.0
    group_s: float = 0.0
    step_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("settle_s", "publish_s", "group_s", "step_s"):
            _check(f"host.{name}", getattr(self, name), 0.0)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that is simulated.

    Attributes:
        num_engines: Engines.
        devices_per_engine: Devices of one engine; ``rollout_fleet.sglang.tp_size``.
        num_ranks: Learner ranks, one device each.
        ranks_at_once: Other numbers of ranks must be multiples of it, as ``learner.sp_size`` and ``fsdp_size`` ask.
        groups_in_flight: Prompt groups that one engine generates at a time; as many again may be scored and stored.
        groups_per_step: B.
        samples_per_prompt: G.
        max_lag: η.
        on_stale: See `buffer.config.BufferConfig`.
        order: See there.
        publish_every: Learner steps between two published versions.
        max_stored_bytes: Bytes that the buffer may hold.
        bytes_per_token: Bytes of a stored token: id, log-prob, version, masks.
        settle_s: From a group's last token to its storing: reward, encoding, network.
        ask_s: From a free place to the request for a lease, while other places are taken.
        plan_s: From a batch that is complete to the start of the step: plan, fetch, scores of a reference.
        pipeline_steps: Batches planned and not yet consumed, at most; asyncrl has 2.
        equal_rewards: Share of groups that ``buffer.filters=[equal_rewards]`` drops, where that is set; 0 elsewhere.
        queue_groups: Finished groups that may wait for a batch, at least as many as a batch has; the one stored first
            gives way to one more. 0 has no such bound: asyncrl drops none, other systems do.
        num_steps: Learner steps to simulate.
        warm_up_steps: First steps that no figure counts.
        hands_on: Running groups are handed on where the buffer asks for it: ``rollout_fleet.save_progress`` is not
            ``never``.
        whole_groups: Simulate a group by its longest sample, which takes the room of its mean: for very large fleets.
        lengths: Response lengths.
        engine: One engine.
        learner: The learner.
        host: The processors that they share, if they do.
    """

    num_engines: int = 1
    devices_per_engine: int = 1
    num_ranks: int = 1
    ranks_at_once: int = 1
    groups_in_flight: int = 32
    groups_per_step: int = 32
    samples_per_prompt: int = 8
    max_lag: int = 2
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
        """Devices of engines and ranks together."""
        return self.num_engines * self.devices_per_engine + self.num_ranks

    def __post_init__(self) -> None:
        at_least_one = (
            *("num_engines", "devices_per_engine", "num_ranks", "ranks_at_once", "groups_in_flight", "groups_per_step"),
            *("samples_per_prompt", "publish_every", "pipeline_steps", "num_steps"),
        )
        for name in at_least_one:
            _check(name, getattr(self, name), 1)
        _check("max_stored_bytes", self.max_stored_bytes, 1, _MOST_BYTES)
        _check("max_lag", self.max_lag, 0, _MOST_LAG)
        for name in ("bytes_per_token", "settle_s", "ask_s", "plan_s", "queue_groups", "warm_up_steps"):
            _check(name, getattr(self, name), 0)
        if 0 < self.queue_groups < self.groups_per_step:
            raise ValueError(
                f"queue_groups must be 0 or at least groups_per_step={self.groups_per_step}, got {self.queue_groups}: "
                "no batch would ever be whole"
            )
        if not 0 <= self.equal_rewards < 1:
            raise ValueError(f"equal_rewards must be in [0, 1), got {self.equal_rewards}; 1 keeps no group")
        if self.host.is_shared and not self.engine.takes_batches:
            raise ValueError(
                "host.is_shared needs engine.takes_batches=true: other engines on a core are not simulated"
            )
        if self.warm_up_steps >= self.num_steps:
            raise ValueError(
                f"warm_up_steps must be below num_steps={self.num_steps}, got {self.warm_up_steps}; simulate more steps"
            )
        if self.publish_every > self.max_lag + 1:
            raise ValueError(
                f"publish_every must be at most max_lag + 1 = {self.max_lag + 1}, got {self.publish_every}: the "
                "learner would wait for rollouts under weights that are not published"
            )

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain values; what was recorded of lengths and variation by its number alone."""
        values = asdict(self)
        for part, name in (("lengths", "recorded"), ("engine", "variation"), ("learner", "variation")):
            values[part][name] = len(values[part][name])
        return values


def load_spec(path: Path) -> Scenario:
    """Read a scenario from a YAML file; what it leaves out has its default.

    Raises:
        ValueError: there is no such file or no YAML in it, or an option is unknown, of the wrong type or out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise ValueError(f"there is no run and no scenario at {path}; name a run's folder, or a YAML file")
    try:
        schema = OmegaConf.structured(Scenario)
        for node in (schema, schema.lengths, schema.engine, schema.learner, schema.host):
            OmegaConf.set_readonly(node, False)  # it maps a frozen dataclass to a read-only node
        scenario = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.load(path)))
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} is no scenario: {' '.join(str(error).split())}") from error
    assert isinstance(scenario, Scenario)
    return scenario


def configured(scenario: Scenario, config: RunConfig) -> Scenario:
    """The scenario under a run's options: what the configuration says itself, and no measurement."""
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
        ranks_at_once=math.lcm(config.learner.sp_size, max(1, config.learner.fsdp_size)),
        groups_in_flight=fleet.most_groups_in_flight,
        groups_per_step=config.algorithm.groups_per_step,
        samples_per_prompt=config.algorithm.samples_per_prompt,
        max_lag=buffer.max_lag,
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
"""What a plan may change of a scenario, and the option that does it in a run."""


def overrides(changed: Scenario, base: Scenario) -> list[str]:
    """Hydra overrides that take a run like ``base`` to one like ``changed``. Example: ``["buffer.max_lag=1"]``."""
    names: Sequence[str] = [name for name in OVERRIDES if getattr(changed, name) != getattr(base, name)]
    return [f"{OVERRIDES[name]}={getattr(changed, name)}" for name in names]


def _check(name: str, value: float, low: float, high: float = 1e6) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low:g} to {high:g}, got {value}")
