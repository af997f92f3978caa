"""Derives a scenario (the speeds, lengths and options that the simulator needs) from the record of a run.

The times of a scenario do not include waits, because the simulator computes the waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from asyncrl.config import RunConfig
from asyncrl.core.record import GroupEvent, LevelName, Pool, SpanKind
from asyncrl.planner.scenario import EngineModel, HostModel, LearnerModel, LengthModel, Scenario, configured
from asyncrl.profile.trace import GroupLife, Span, Stamp, Trace
from learner.config import Device
from rollout_fleet.config import EngineDevice, EngineKind
from rollout_fleet.loop import GATHER_S

MIN_STEPS = 4
"""`calibrate` needs a record with at least this number of learner steps after the warm-up."""
_NS, _MICROSECONDS = 1e9, 1e6
_WARM_UP_SHARE = 0.1
_SAME_MOMENT_NS = 5_000_000
_MIN_VARIATION = 0.1
_FAILURES = frozenset({"aborted", "reward", "environment", "silent", "expired", "store_lost"})
_COMPUTED = (SpanKind.forward, SpanKind.backward)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The scenario of a recorded run, and measurements for a comparison with its simulation.

    Attributes:
        scenario: The speeds and lengths of the run, with the options of the run.
        num_faults: Number of failures: failed attempts to generate a group, lost records, and engines that are down at
            the end.
        notes: Sentences about values that the record does not contain.
    """

    scenario: Scenario
    step_s: float
    lag_mean: float
    num_faults: int
    notes: tuple[str, ...] = ()


def calibrate(trace: Trace, config: RunConfig) -> Calibration:
    """Derive a scenario from the record ``trace`` of a run with the options ``config``.

    The first tenth of the learner steps, at least one step, is left out as warm-up.

    Raises:
        ValueError: the record has too few steps, no trained group, no update of the learner, or no group with times of
            the first and the last token.
    """
    steps = [step for step in trace.steps if not step.is_open]
    first = max(1, round(_WARM_UP_SHARE * len(steps)))
    if len(steps) - first < MIN_STEPS:
        raise ValueError(
            f"asyncrl plan needs the record of at least {MIN_STEPS + 1} learner steps, got {len(steps)}; wait for more "
            "steps of the run, or pass a scenario as a YAML file"
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
    fleet = config.rollout_fleet
    is_in_process = fleet.engine is EngineKind.transformers and fleet.device is not EngineDevice.cuda
    if is_in_process and config.learner.device is Device.cpu and config.placement.num_nodes == 1:
        scenario = reading.on_host(scenario)  # simulate the CPU cores that engines and ranks share
    return Calibration(
        scenario=scenario,
        step_s=(steps[-1].end - steps[first].start) / _NS / (len(steps) - first),
        lag_mean=fmean(life.lag for life in reading.trained),
        num_faults=reading.num_faults(),
        notes=tuple(reading.notes),
    )


@dataclass(frozen=True)
class _Batch:
    """A batch of samples that an in-process engine generated together. ``start`` and ``end`` are in nanoseconds.

    ``longest`` is the longest response, in tokens. ``token_s`` is the time of a decoding step, in seconds.
    """

    start: int
    end: int
    num_samples: int
    longest: int
    token_s: float

    @property
    def duration_s(self) -> float:
        return (self.end - self.start) / _NS

    @property
    def fixed_s(self) -> float:
        """The time of the batch without the time of its decoding steps, in seconds; at least 0."""
        return max(0.0, self.duration_s - self.longest * self.token_s)

    @classmethod
    def of(cls, lives: Sequence[GroupLife], start: int, end: int) -> _Batch:
        lengths = [stamp.details["lengths"] for life in lives if (stamp := life.last(GroupEvent.stored)) is not None]
        longest = max(map(max, lengths))
        firsts = [time for life in lives if (time := life.time(GroupEvent.first_token)) is not None]
        token_s = (end - start) / _NS / longest
        if longest > 1 and firsts and start < max(firsts) < end:
            token_s = (end - max(firsts)) / _NS / (longest - 1)
        return cls(start, end, sum(map(len, lengths)), longest, token_s)


class _Reading:
    def __init__(self, trace: Trace, config: RunConfig, *, first_step: int) -> None:
        self._trace = trace
        self._config = config
        self._first_step = first_step
        steps = [step for step in trace.steps if step.version >= first_step and not step.is_open]
        self._start = steps[0].start
        self._seconds_per_step = (steps[-1].end - self._start) / _NS / len(steps)
        self.notes: list[str] = []
        if not self.trained:
            raise ValueError("the record has no trained group; if its files are full, raise profile.max_file_bytes")

    @cached_property
    def trained(self) -> list[GroupLife]:
        """A list of the groups that each step trained on, with the recorded events of each group.

        Warm-up steps are left out.
        """
        return [use for use in self._trace.trained_groups if use.step >= self._first_step]

    @cached_property
    def _written(self) -> list[Stamp]:
        """For each finished group, the recorded event that has the group's response lengths.

        Some of these groups were not stored: a filter of the buffer dropped them, or their policy version was too old.
        """
        stamps = (stamp for stamp in self._trace.stamps if stamp.time >= self._start)
        return [stamp for stamp in stamps if stamp.details.get("lengths")]

    def _during(self, kind: str, lane: str | None = None) -> list[Span]:
        return [s for s in self._trace.spans_of(kind, lane) if s.start >= self._start and not s.is_open]

    def _mean_s(self, kind: str) -> float:
        return fmean(_seconds(span) for span in spans) if (spans := self._during(kind)) else 0.0

    def lengths(self, base: LengthModel) -> LengthModel:
        """Return a copy of ``base`` with the response lengths of all finished groups, in tokens.

        An empty response counts as one token. The copy also has the mean length of the prompts.
        """
        groups = [[max(1, length) for length in stamp.details["lengths"]] for stamp in self._written]
        prompt_tokens = fmean(stamp.details["prompt_tokens"] for stamp in self._written)
        return replace(base, recorded=groups, prompt_tokens=prompt_tokens)

    def bytes_per_token(self) -> float:
        """Return how many bytes the buffer stored per response token, as a mean over all stored tokens."""
        stored = [stamp for stamp in self._written if stamp.event == GroupEvent.stored]
        num_tokens = sum(stamp.details["tokens"] for stamp in stored)
        return sum(stamp.details["bytes"] for stamp in stored) / max(1, num_tokens)

    def equal_rewards(self) -> float:
        """Return the fraction of finished groups that the buffer's filter ``equal_rewards`` dropped.

        The fraction is at most 0.99, because `Scenario` does not allow the fraction 1.
        """
        dropped = sum(stamp.details.get("reason") == "equal_rewards" for stamp in self._written)
        return min(0.99, dropped / len(self._written))

    def settle_s(self) -> float:
        """Return the mean seconds from a group's last token until the buffer stored the group."""
        times = ((life.time(GroupEvent.last_token), life.time(GroupEvent.stored)) for life in self.trained)
        gaps = [max(0, end - start) / _NS for start, end in times if start is not None and end is not None]
        return fmean(gaps) if gaps else 0.0

    def num_faults(self) -> int:
        failed = sum(stamp.details.get("reason") in _FAILURES for stamp in self._trace.stamps)
        return failed + sum(span.is_open for span in self._trace.spans_of(SpanKind.down)) + self._trace.num_dropped

    # The host

    def on_host(self, scenario: Scenario) -> Scenario:
        """Return a copy of ``scenario`` in which all engines share one CPU core, and all ranks share another core.

        The recorded CPU times of the processes give the work on each core. Activities that overlap on the engines' core
        are assumed to share the core equally. If the record has no CPU times, return ``scenario`` and add a note.
        """
        num_steps, num_groups = len(self._updates), len(self.trained)
        rank_s = self._cpu_s(Pool.learner) / max(1, len(self._trace.lanes(Pool.learner)))
        if not rank_s:
            self.notes.append("the record has no CPU times: engines and ranks do not share cores in the simulation")
            return scenario
        loads = [(s.start, s.end) for s in self._during(SpanKind.pause)]
        batches = [(batch.start, batch.end) for batch in self._batches]
        settles: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for life in self.trained:
            last, stored = life.last(GroupEvent.last_token), life.time(GroupEvent.stored)
            if last is not None and stored is not None and stored > last.time:
                settles[last.lane].append((last.time, stored))
        # An interval lasts from the last token of a group until the group is stored.
        # Join overlapping intervals of the same worker, because a worker scores and stores one group at a time.
        settled = [span for lane in settles.values() for span in united(lane)]
        load_s, settle_s, batch_s = fair_shares(loads, settled, batches)
        waited_s = sum(batch.duration_s for batch in self._batches) - batch_s
        engine, learner = scenario.engine, scenario.learner
        used = min(1.0, rank_s / self._step_s)  # compute the fraction of the update time in which a rank uses its CPU
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

    def _cpu_s(self, pool: str) -> float:
        """Return the CPU seconds per step that all processes of a pool use together."""
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
        """Mean wall time of the update of a learner step, in seconds."""
        return fmean(_wall_s(spans) for spans in self._updates.values())

    @cached_property
    def _updates(self) -> dict[int, list[Span]]:
        updates: dict[int, list[Span]] = defaultdict(list)
        for span in self._during(SpanKind.update):
            updates[span.step].append(span)
        return updates

    def learner(self, base: LearnerModel) -> LearnerModel:
        """Return a copy of ``base`` with the recorded times of a learner step and of a weight transfer to the engines.

        Raises:
            ValueError: the record has no update of the learner.
        """
        if not self._updates:
            raise ValueError("the record has no learner update; set profile.enabled=true on every rank")
        step_s = self._step_s
        num_ranks = len(self._trace.lanes(Pool.learner)) or 1
        computed = [span for kind in _COMPUTED for span in self._during(kind)]
        computed_s = sum(map(_seconds, computed)) / num_ranks / len(self._updates)
        tokens_per_step = sum(self._tokens.values()) / len(self._updates)
        if not computed:
            self.notes.append(
                "the record has no forward or backward pass: the number of ranks does not change the time of a step"
            )
        fixed_s, s_per_token = max(1e-6, step_s - computed_s), computed_s / max(1.0, tokens_per_step)
        took_s = {step: _wall_s(spans) for step, spans in sorted(self._updates.items())}
        return replace(
            base,
            step_s=fixed_s,
            rank_s_per_token=computed_s * num_ranks / max(1.0, tokens_per_step),
            copy_s=self._mean_s(SpanKind.publish_copy),
            publish_s=self._mean_s(SpanKind.publish) + self._mean_s(SpanKind.stage),
            load_s=self._mean_s(SpanKind.pause),
            variation=_ratios([(took, fixed_s + s_per_token * self._tokens[step]) for step, took in took_s.items()]),
        )

    @cached_property
    def _tokens(self) -> Counter[int]:
        """The number of tokens that each learner step trained on, including prompt tokens, by step."""
        tokens: Counter[int] = Counter()
        for life in self.trained:
            if (stamp := life.last(GroupEvent.stored)) is not None:
                details = stamp.details
                tokens[life.step] += details["tokens"] + details["prompt_tokens"] * len(details["lengths"])
        return tokens

    def plan_s(self) -> float:
        """Return the median seconds from the moment when an update could begin until the update begins.

        An update could begin once three things are done: the batch is chosen, the previous update has ended, and the
        ranks have copied the previous weights.
        """
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
        """Return a copy of ``base`` with the recorded times of an engine: decoding, prefill, and fixed time of a batch.

        Raises:
            ValueError: the record has no group with times of the first and the last token.
        """
        batch_s, variation = 0.0, list[float]()
        if base.takes_batches:
            batches = self._batches
            batch_s = fmean(batch.fixed_s for batch in batches) if batches else 0.0
            times, loads = [batch.token_s for batch in batches], [float(batch.num_samples) for batch in batches]
        else:
            times, loads = self._decodings()
        if not times:
            raise ValueError(
                "the record has no group with its first and last token, so the speed of the engines is unknown; wait "
                "for more steps of the run, or pass asyncrl plan a scenario as a YAML file"
            )
        step_s, per_sample = _line(loads, times)
        if base.takes_batches:
            variation = _ratios(
                [(b.duration_s, batch_s + b.longest * (step_s + per_sample * b.num_samples)) for b in self._batches]
            )
        if per_sample == 0:
            self.notes.append(
                f"every engine ran about {fmean(loads):.0f} samples at a time: the plan assumes the same speed for "
                "other numbers of samples"
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
        """Return a pair of lists with one value per group.

        The first list has the seconds per decoding step, and the second list the mean number of samples on the engine.
        """
        times, loads = [], []
        for life in self.trained:
            first, last = life.last(GroupEvent.first_token), life.last(GroupEvent.last_token)
            stored = life.last(GroupEvent.stored)
            if first is None or last is None or stored is None or last.time <= first.time:
                continue
            paused_ns = sum(
                max(0, min(last.time, span.end) - max(first.time, span.start))
                for kind in (SpanKind.pause, SpanKind.re_prefill)
                for span in self._trace.spans_of(kind, last.lane)
            )
            num_steps = max(stored.details["lengths"]) - 1
            if num_steps > 0:
                times.append((last.time - first.time - paused_ns) / _NS / num_steps)
                levels = self._trace.levels_of(LevelName.running, last.lane)
                begin, end = (bisect_right(levels, at, key=lambda x: x.time) for at in (first.time, last.time - 1))
                moments = pairwise([first.time, *(level.time for level in levels[begin:end]), last.time])
                values = [levels[begin - 1].value if begin else 0, *(level.value for level in levels[begin:end])]
                total = sum(value * (after - at) for value, (at, after) in zip(values, moments, strict=True))
                loads.append(total / (last.time - first.time))
        return times, loads

    @cached_property
    def _batches(self) -> list[_Batch]:
        """The batches of the in-process engines.

        A batch begins as soon as all its groups are leased and the engine is free.
        """
        ends: dict[str, list[tuple[int, GroupLife]]] = defaultdict(list)
        for life in self.trained:
            last = life.last(GroupEvent.last_token)
            if last is not None and life.time(GroupEvent.lease) is not None and life.last(GroupEvent.stored):
                ends[last.lane].append((last.time, life))
        batches = []
        for lane, groups in ends.items():
            free_at = 0
            groups.sort(key=lambda group: group[0])
            gaps = [at for at in range(1, len(groups)) if groups[at][0] - groups[at - 1][0] >= _SAME_MOMENT_NS]
            for batch in (groups[first:last] for first, last in pairwise([0, *gaps, len(groups)])):
                end, lives = batch[0][0], [life for _, life in batch]
                pauses = [s.end for s in self._trace.spans_of(SpanKind.pause, lane) if free_at <= s.end < end]
                start = max([free_at, *pauses, *(life.time(GroupEvent.lease) or 0 for life in lives)])
                free_at = batch[-1][0]
                if start < end:
                    batches.append(_Batch.of(lives, start, end))
        return batches

    def _prefill_s_per_token(self) -> float:
        """Return the seconds to recompute the KV cache of one token after a weight update.

        The record does not have the lengths of unfinished responses at an update. So the method assumes that the KV
        cache of each running sample has the prompt and half of a response of mean length. The result is 0 if the record
        has no recomputation.
        """
        spans = self._during(SpanKind.re_prefill)
        if not spans:
            return 0.0
        written = fmean(fmean(stamp.details["lengths"]) for stamp in self._written) / 2
        prompt = fmean(stamp.details["prompt_tokens"] for stamp in self._written)
        running = fmean(self._trace.level_at(LevelName.running, span.lane, span.start) for span in spans)
        return fmean(map(_seconds, spans)) / max(1.0, running * (written + prompt))


def _ratios(times: Sequence[tuple[float, float]]) -> list[float]:
    """Return the ratio measured / expected of each pair of ``times``, divided by the mean of all ratios."""
    ratios = [took_s / max(expected_s, 1e-9) for took_s, expected_s in times]
    mean = fmean(ratios) if ratios else 1.0
    return [ratio / mean for ratio in ratios]


def fair_shares(*kinds: Sequence[tuple[int, int]]) -> list[float]:
    """Return how many seconds one CPU core spends on each kind of activity, in the order of the arguments.

    At any time, all running activities share the core equally. Each argument has the activities of one kind, as pairs
    (start, end) in nanoseconds. Example: an activity from 0 to 2 s and an activity of another kind from 1 to 2 s get
    1.5 s and 0.5 s.
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
    """Join (start, end) intervals that overlap or touch; return the joined intervals, sorted.

    Example: (0, 2) and (1, 3) become (0, 3).
    """
    united: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((start, end))
    return united


def _seconds(span: Span) -> float:
    return (span.end - span.start) / _NS


def _wall_s(spans: Sequence[Span]) -> float:
    return (max(span.end for span in spans) - min(span.start for span in spans)) / _NS


def _line(loads: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Fit a line to ``times`` as a function of ``loads``, and return a pair: intercept and slope, both >= 0.

    If the loads are nearly equal, the slope is 0.
    """
    x, y = np.asarray(loads), np.asarray(times)
    if len(x) < 3 or x.std() < _MIN_VARIATION * x.mean():
        return float(y.mean()), 0.0
    slope, intercept = np.polyfit(x, y, 1)
    if slope <= 0:
        return float(y.mean()), 0.0
    return (float(intercept), float(slope)) if intercept > 0 else (1e-9, float((x @ y) / (x @ x)))
