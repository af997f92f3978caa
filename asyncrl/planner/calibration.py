"""From a recorded run to a scenario: what its engines, its learner and its weight updates can do, and its lengths.

A record says when things happened; a scenario says how long they take when nothing is in their way. So waits are left
out here: the simulation finds its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median

import numpy as np

from asyncrl.config import RunConfig
from asyncrl.core.record import GroupEvent, LevelName, Pool, SpanKind
from asyncrl.planner.advice import Health
from asyncrl.planner.scenario import EngineModel, HostModel, LearnerModel, LengthModel, Scenario, configured
from asyncrl.profile.trace import GroupLife, Span, Stamp, Trace
from learner.config import Device
from rollout_fleet.config import EngineDevice, EngineKind
from rollout_fleet.loop import GATHER_S

MIN_STEPS = 4
"""Recorded steps that a calibration needs at least."""
_NS, _MICROSECONDS = 1e9, 1e6
_WARM_UP_SHARE = 0.1
_SAME_MOMENT_NS = 5_000_000
_MIN_VARIATION = 0.1
_FAILURES = frozenset({"aborted", "reward", "environment", "silent", "expired", "store_lost"})
_COMPUTED = (SpanKind.forward, SpanKind.backward)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A recorded run as a scenario.

    Attributes:
        scenario: What it can do, under its own options.
        step_s: What it took per step.
        lag_mean: Mean lag of what it consumed.
        health: Whether it was sound.
        notes: What the record could not tell, in words.
    """

    scenario: Scenario
    step_s: float
    lag_mean: float
    health: Health
    notes: tuple[str, ...] = ()


def calibrate(trace: Trace, config: RunConfig) -> Calibration:
    """Read a run off its record; steps that were still warming up are left out.

    Raises:
        ValueError: the record has too few steps, or no group that was trained.
    """
    steps = [step for step in trace.steps if not step.is_open]
    first = max(1, round(_WARM_UP_SHARE * len(steps)))
    if len(steps) - first < MIN_STEPS:
        raise ValueError(
            f"a plan needs the record of at least {MIN_STEPS + 1} learner steps, got {len(steps)}; let the run go on, "
            "or plan from a YAML file"
        )
    reading = _Reading(trace, config, first_step=steps[first].version)
    base = configured(Scenario(num_steps=max(60, min(200, len(steps)))), config)
    scenario = replace(
        base,
        lengths=reading.lengths(base.lengths),
        engine=reading.engine(base.engine),
        learner=reading.learner(base.learner),
        bytes_per_token=reading.bytes_per_token(),
        settle_s=reading.settle_s(),
        plan_s=reading.plan_s(),
        ask_s=GATHER_S,
        equal_rewards=reading.equal_rewards(),
    )
    if _shares_host(config):
        scenario = reading.on_host(scenario)
    return Calibration(
        scenario=scenario,
        step_s=(steps[-1].end - steps[first].start) / _NS / (len(steps) - first),
        lag_mean=fmean(life.lag for life in reading.trained),
        health=reading.health(),
        notes=tuple(reading.notes),
    )


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """A batch of an in-process engine.

    Attributes:
        start: When it began, in nanoseconds; ``end``: when its groups were there.
        num_samples: Its rows.
        longest: Tokens of its longest sample.
        token_s: Of a decoding step.
        fixed_s: What it took beside its decoding steps.
    """

    start: int
    end: int
    num_samples: int
    longest: int
    token_s: float
    fixed_s: float

    @property
    def duration_s(self) -> float:
        """From its begin to its end."""
        return (self.end - self.start) / _NS

    @classmethod
    def of(cls, lives: Sequence[GroupLife], start: int, end: int) -> _Batch:
        """The batch of some groups; without their first tokens all of it counts as decoding."""
        stored = [stamp for life in lives if (stamp := life.last(GroupEvent.stored)) is not None]
        longest = max(max(stamp.details["lengths"]) for stamp in stored)
        firsts = [time for life in lives if (time := life.time(GroupEvent.first_token)) is not None]
        token_s = (end - start) / _NS / longest
        if longest > 1 and firsts and start < max(firsts) < end:
            token_s = (end - max(firsts)) / _NS / (longest - 1)
        return cls(
            start=start,
            end=end,
            num_samples=sum(len(stamp.details["lengths"]) for stamp in stored),
            longest=longest,
            token_s=token_s,
            fixed_s=max(0.0, (end - start) / _NS - longest * token_s),
        )


class _Reading:
    """What the record of a run says from ``first_step`` on."""

    def __init__(self, trace: Trace, config: RunConfig, *, first_step: int) -> None:
        self._trace = trace
        self._config = config
        self._first_step = first_step
        steps = [step for step in trace.steps if step.version >= first_step and not step.is_open]
        self._start = steps[0].start
        self._seconds_per_step = (steps[-1].end - self._start) / _NS / len(steps)
        self.notes: list[str] = []
        if not self.trained:
            raise ValueError("the record names no group that was trained; was it cut short by profile.max_file_bytes?")

    @cached_property
    def trained(self) -> list[GroupLife]:
        """The groups that the steps consumed."""
        return [life for life in self._trace.groups.values() if life.step >= self._first_step]

    @cached_property
    def _written(self) -> list[Stamp]:
        """The stamps of finished groups, those that filters dropped among them."""
        stamps = (stamp for stamp in self._trace.stamps if stamp.time >= self._start)
        return [stamp for stamp in stamps if stamp.details.get("lengths")]

    def _during(self, kind: str, lane: str | None = None) -> list[Span]:
        return [s for s in self._trace.spans_of(kind, lane) if s.start >= self._start and not s.is_open]

    def _mean_s(self, kind: str) -> float:
        """Mean duration of a kind of span; 0 where there is none."""
        return fmean(_seconds(span) for span in spans) if (spans := self._during(kind)) else 0.0

    def lengths(self, base: LengthModel) -> LengthModel:
        """The lengths of every finished group, at least a token each."""
        groups = [[max(1, length) for length in stamp.details["lengths"]] for stamp in self._written]
        prompt_tokens = fmean(stamp.details["prompt_tokens"] for stamp in self._written)
        return replace(base, recorded=groups, prompt_tokens=prompt_tokens)

    def bytes_per_token(self) -> float:
        """Bytes of a stored token."""
        stored = [stamp for stamp in self._written if stamp.event == GroupEvent.stored]
        num_tokens = sum(stamp.details["tokens"] for stamp in stored)
        return sum(stamp.details["bytes"] for stamp in stored) / max(1, num_tokens)

    def equal_rewards(self) -> float:
        """Share of finished groups that the filter of equal rewards dropped."""
        dropped = sum(stamp.details.get("reason") == "equal_rewards" for stamp in self._written)
        return min(0.99, dropped / len(self._written))

    def settle_s(self) -> float:
        """From a group's last token to its storing."""
        return _mean_gap_s(self.trained, GroupEvent.last_token, GroupEvent.stored)

    def health(self) -> Health:
        """What was broken: failed attempts, engines that are down now, records lost."""
        failed = sum(stamp.details.get("reason") in _FAILURES for stamp in self._trace.stamps)
        down = sum(span.is_open for span in self._trace.spans_of(SpanKind.down))
        return Health(num_errors=failed, num_fenced=down, num_dropped=self._trace.num_dropped)

    # The host

    def on_host(self, scenario: Scenario) -> Scenario:
        """The scenario on the cores of one host, by what its processes noted of their time and of the processors'.

        What ran on the engines' core at the same time is taken to have shared it equally, as it does in the simulation.
        """
        num_steps, num_groups = len(self._updates), len(self.trained)
        rank_s = self._cpu_s(Pool.learner) / max(1, len(self._trace.lanes(Pool.learner)))
        if not rank_s:
            self.notes.append("no processor time was recorded: engines and ranks share no cores in the simulation")
            return scenario
        loads = [(s.start, s.end) for s in self._during(SpanKind.pause)]
        batches = [(batch.start, batch.end) for batch in self._batches]
        load_s, settle_s, batch_s = fair_shares(loads, self._settles(), batches)
        waited_s = sum(batch.duration_s for batch in self._batches) - batch_s
        engine, learner = scenario.engine, scenario.learner
        used = min(1.0, rank_s / self._step_s)  # of its core; the other processes had the rest
        return replace(
            scenario,
            settle_s=0.0,
            engine=replace(engine, batch_s=max(0.0, engine.batch_s - waited_s / max(1, len(batches)))),
            learner=replace(
                learner,
                step_s=learner.step_s * used,
                rank_s_per_token=learner.rank_s_per_token * used,
                load_s=load_s / max(1, len(loads)),
            ),
            host=HostModel(
                is_shared=True,
                settle_s=settle_s / num_groups,
                publish_s=max(0.0, rank_s - self._step_s) * scenario.publish_every,
                group_s=self._cpu_s(Pool.buffer) * num_steps / num_groups,
                step_s=self._cpu_s(Pool.controller),
            ),
        )

    def _settles(self) -> list[tuple[int, int]]:
        """When the event loop of each engine's worker had groups to settle: one after another, so one thing to do."""
        spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for life in self.trained:
            first, stored = life.last(GroupEvent.last_token), life.time(GroupEvent.stored)
            if first is not None and stored is not None and stored > first.time:
                spans[first.lane].append((first.time, stored))
        return [span for lane in spans.values() for span in united(lane)]

    def _cpu_s(self, pool: str) -> float:
        """Processor seconds per step of the processes of a pool; 0 where none were noted."""
        total_s = 0.0
        for lane in {level.lane for level in self._trace.levels if level.name == LevelName.cpu}:
            levels = [level for level in self._trace.levels_of(LevelName.cpu, lane) if level.time >= self._start]
            is_own = any(process.pool == pool for process in self._trace.processes_of(lane))
            if is_own and len(levels) > 1:
                used_s = (levels[-1].value - levels[0].value) / _MICROSECONDS
                total_s += used_s / ((levels[-1].time - levels[0].time) / _NS)
        return total_s * self._seconds_per_step

    # The learner

    @cached_property
    def _step_s(self) -> float:
        """Seconds for which a step's update takes the ranks."""
        return fmean(_wall_s(spans) for spans in self._updates.values())

    @cached_property
    def _updates(self) -> dict[int, list[Span]]:
        """The ranks' updates, by step."""
        updates: dict[int, list[Span]] = defaultdict(list)
        for span in self._during(SpanKind.update):
            updates[span.step].append(span)
        return updates

    def learner(self, base: LearnerModel) -> LearnerModel:
        """A step's fixed part, and what its tokens take: the forward and backward passes."""
        if not self._updates:
            raise ValueError("the record holds no learner update; was profile.enabled set on every rank?")
        step_s = self._step_s
        num_ranks = len(self._trace.lanes(Pool.learner)) or 1
        computed = [span for kind in _COMPUTED for span in self._during(kind)]
        computed_s = sum(map(_seconds, computed)) / num_ranks / len(self._updates)
        tokens_per_step = sum(self._tokens.values()) / len(self._updates)
        if not computed:
            self.notes.append("no forward or backward pass was recorded: a step takes the same time on any ranks")
        return replace(
            base,
            step_s=max(1e-6, step_s - computed_s),
            rank_s_per_token=computed_s * num_ranks / max(1.0, tokens_per_step),
            copy_s=self._mean_s(SpanKind.publish_copy),
            publish_s=self._mean_s(SpanKind.publish) + self._mean_s(SpanKind.stage),
            load_s=self._mean_s(SpanKind.pause),
            variation=self._step_variation(max(1e-6, step_s - computed_s), computed_s / max(1.0, tokens_per_step)),
        )

    def _step_variation(self, step_s: float, s_per_token: float) -> list[float]:
        """The updates' times over what their tokens say."""
        took_s = {step: _wall_s(spans) for step, spans in sorted(self._updates.items())}
        return _ratios([(took, step_s + s_per_token * self._tokens[step]) for step, took in took_s.items()])

    @cached_property
    def _tokens(self) -> Counter[int]:
        """Tokens of each step, prompts included."""
        tokens: Counter[int] = Counter()
        for life in self.trained:
            if (stamp := life.last(GroupEvent.stored)) is not None:
                details = stamp.details
                tokens[life.step] += details["tokens"] + details["prompt_tokens"] * len(details["lengths"])
        return tokens

    def plan_s(self) -> float:
        """From a batch that is there, with the ranks free, to the begin of its update."""
        planned = {life.step: life.time(GroupEvent.planned) for life in self.trained}
        free_at = {span.version: span.end for span in self._during(SpanKind.publish_copy)}
        gaps = []
        for step, spans in self._updates.items():
            ready = max(planned.get(step) or 0, free_at.get(step, 0))
            before = self._updates.get(step - 1)
            ready = max(ready, max(span.end for span in before) if before else 0)
            gaps.append(max(0, min(span.start for span in spans) - ready) / _NS)
        return median(gaps) if gaps else 0.0

    # The engines

    def engine(self, base: EngineModel) -> EngineModel:
        """Speed against concurrency, from how long groups took; and the price of a weight update."""
        batch_s, variation = 0.0, list[float]()
        if base.takes_batches:
            batches = self._batches
            batch_s = fmean(batch.fixed_s for batch in batches) if batches else 0.0
            times, loads = [batch.token_s for batch in batches], [float(batch.num_samples) for batch in batches]
        else:
            times, loads = self._decodings()
        if not times:
            raise ValueError("the record holds no group from its first token to its last: no engine's speed is known")
        step_s, per_sample = _line(loads, times)
        if base.takes_batches:
            variation = _ratios(
                [(b.duration_s, batch_s + b.longest * (step_s + per_sample * b.num_samples)) for b in self._batches]
            )
        if per_sample == 0:
            self.notes.append(
                f"every engine ran about {fmean(loads):.0f} samples at once: its speed at other loads is not known, "
                "and is taken to be the same"
            )
        return replace(
            base,
            step_s=step_s,
            step_s_per_sample=per_sample,
            prefill_s_per_token=self._prefill_s_per_token(),
            batch_s=batch_s,
            variation=variation,
        )

    def _decodings(self) -> tuple[list[float], list[float]]:
        """Seconds per decoding step while each group ran, and the samples that its engine ran meanwhile."""
        times, loads = [], []
        for life in self.trained:
            first, last = life.last(GroupEvent.first_token), life.last(GroupEvent.last_token)
            stored = life.last(GroupEvent.stored)
            if first is None or last is None or stored is None or last.time <= first.time:
                continue
            stood = sum(
                _overlap(span, first.time, last.time)
                for kind in (SpanKind.pause, SpanKind.re_prefill)
                for span in self._trace.spans_of(kind, last.lane)
            )
            num_steps = max(stored.details["lengths"]) - 1
            if num_steps > 0:
                times.append((last.time - first.time - stood) / _NS / num_steps)
                loads.append(self._mean_level(LevelName.running, last.lane, first.time, last.time))
        return times, loads

    @cached_property
    def _batches(self) -> list[_Batch]:
        """The batches of an in-process engine.

        A batch begins with the last lease that it takes, or when the engine is free; its groups end in one moment.
        """
        ends: dict[str, list[tuple[int, GroupLife]]] = defaultdict(list)
        for life in self.trained:
            last = life.last(GroupEvent.last_token)
            if last is not None and life.time(GroupEvent.lease) is not None and life.last(GroupEvent.stored):
                ends[last.lane].append((last.time, life))
        batches = []
        for lane, groups in ends.items():
            free_at = 0
            for batch in _by_moment(sorted(groups, key=lambda group: group[0])):
                end, lives = batch[0][0], [life for _, life in batch]
                pauses = [s.end for s in self._trace.spans_of(SpanKind.pause, lane) if free_at <= s.end < end]
                start = max([free_at, *pauses, *(life.time(GroupEvent.lease) or 0 for life in lives)])
                free_at = batch[-1][0]
                if start < end:
                    batches.append(_Batch.of(lives, start, end))
        return batches

    def _mean_level(self, name: str, lane: str, start: int, end: int) -> float:
        changes = self._trace.levels_of(name, lane)
        index = bisect_right(changes, start, key=lambda change: change.time)
        value = changes[index - 1].value if index else 0
        total, since = 0, start
        for change in changes[index:]:
            if change.time >= end:
                break
            total += value * (change.time - since)
            value, since = change.value, change.time
        return (total + value * (end - since)) / (end - start)

    def _prefill_s_per_token(self) -> float:
        """From what it took to compute KV caches again after an update, of half of what running samples will write."""
        spans = self._during(SpanKind.re_prefill)
        if not spans:
            return 0.0
        written = fmean(fmean(stamp.details["lengths"]) for stamp in self._written) / 2
        prompt = fmean(stamp.details["prompt_tokens"] for stamp in self._written)
        running = fmean(self._trace.level_at(LevelName.running, span.lane, span.start) for span in spans)
        return fmean(map(_seconds, spans)) / max(1.0, running * (written + prompt))


def _ratios(times: Sequence[tuple[float, float]]) -> list[float]:
    """What things took over what was expected of them, by pairs of both; their mean is 1."""
    ratios = [took_s / max(expected_s, 1e-9) for took_s, expected_s in times]
    mean = fmean(ratios) if ratios else 1.0
    return [ratio / mean for ratio in ratios]


def fair_shares(*kinds: Sequence[tuple[int, int]]) -> list[float]:
    """Seconds of one core that each kind of activity had, where all that is under way shares the core equally.

    Each kind is a list of (start, end) in nanoseconds. Example: one from 0 to 2 s and one of another kind from 1 to 2 s
    had 1.5 s and 0.5 s.
    """
    changes = sorted(
        change
        for kind, spans in enumerate(kinds)
        for start, end in spans
        for change in ((start, kind, 1), (end, kind, -1))
    )
    shares, running, before = [0.0] * len(kinds), [0] * len(kinds), 0
    for time, kind, change in changes:
        if total := sum(running):
            for other, number in enumerate(running):
                shares[other] += (time - before) / _NS * number / total
        running[kind] += change
        before = time
    return shares


def united(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans without their overlaps. Example: 0 to 2 and 1 to 3 are 0 to 3."""
    united: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((start, end))
    return united


def _shares_host(config: RunConfig) -> bool:
    """Whether engines and ranks compute on the processors of one host."""
    fleet = config.rollout_fleet
    is_in_process = fleet.engine is EngineKind.transformers and fleet.device is not EngineDevice.cuda
    return is_in_process and config.learner.device is Device.cpu and config.placement.num_nodes == 1


def _seconds(span: Span) -> float:
    return (span.end - span.start) / _NS


def _wall_s(spans: Sequence[Span]) -> float:
    return (max(span.end for span in spans) - min(span.start for span in spans)) / _NS


def _overlap(span: Span, start: int, end: int) -> int:
    return max(0, min(end, span.end) - max(start, span.start))


def _mean_gap_s(lives: Iterable[GroupLife], first: str, second: str) -> float:
    times = ((life.time(first), life.time(second)) for life in lives)
    gaps = [max(0, end - start) / _NS for start, end in times if start is not None and end is not None]
    return fmean(gaps) if gaps else 0.0


def _by_moment(groups: Sequence[tuple[int, GroupLife]]) -> list[list[tuple[int, GroupLife]]]:
    """Groups that ended in one moment, by the time of their ends."""
    batches: list[list[tuple[int, GroupLife]]] = []
    for group in groups:
        if batches and group[0] - batches[-1][-1][0] < _SAME_MOMENT_NS:
            batches[-1].append(group)
        else:
            batches.append([group])
    return batches


def _line(loads: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of times over loads, neither negative; a slope of 0 where the loads hardly differ."""
    x, y = np.asarray(loads), np.asarray(times)
    if len(x) < 3 or x.std() < _MIN_VARIATION * x.mean():
        return float(y.mean()), 0.0
    slope, intercept = np.polyfit(x, y, 1)
    if slope <= 0:
        return float(y.mean()), 0.0
    return (float(intercept), float(slope)) if intercept > 0 else (1e-9, float((x @ y) / (x @ x)))
