"""Computes the data of each chart of the report from a trace (the record of a run), as dicts and lists for JSON.

``page/charts.js`` draws the charts.

Times are in seconds. Versions and lags are numbers of learner steps.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.core.record import NONE, GroupEvent, LevelName, Pool, SpanKind
from asyncrl.metrics import in_words
from asyncrl.profile.attribution import BUSY, Attribution, PoolTime, Stretch
from asyncrl.profile.trace import Span, StepWindow, Trace
from rollout_fleet.member import NOT_UP, MemberState

Chart = dict[str, Any]

MAX_BINS = 4000
"""Largest number of columns of the timeline."""
_LEAST_WIDTH_NS = 1_000_000
MAX_BARS = 600
"""Largest number of bars in the steps chart. With more steps, each bar shows the mean of several steps."""
MAX_CURVES = 24
MAX_CURVE_POINTS = 64
LAST_SHARE = 0.05
"""Share of a batch's groups that counts as the tail of the batch: the groups that the buffer stored last."""
NUM_LENGTH_BINS = 40
_SECOND = 1_000_000_000
_FIGURES = 4


def timeline(trace: Trace, attribution: Attribution) -> Chart:
    """Return the timeline chart: states of ranks and engines, weight updates, buffer counts and mean lag over time.

    The chart has at most `MAX_BINS` columns of equal width. Time 0 is the start of ``attribution.window``.
    """
    start, end = attribution.window
    count = max(1, min(MAX_BINS, (end - start) // _LEAST_WIDTH_NS))
    edges = np.linspace(start, end, count + 1)
    return {
        "width_s": (end - start) / count / _SECOND,
        "learner": _pool_use(attribution, Pool.learner, edges),
        "fleet": _pool_use(attribution, Pool.fleet, edges),
        "stored": _short(_level_means(trace, LevelName.stored, edges)),
        "in_flight": _short(_level_means(trace, LevelName.leased, edges)),
        "lag": _short(_lag_of_batches(trace, edges)),
        "publishes": [[_seconds(when - start), version] for version, when in _served(trace) if when <= end],
    }


def _pool_use(attribution: Attribution, pool: Pool, edges: np.ndarray) -> Chart:
    shares = _shares(attribution.stretches[pool], edges)
    busy = shares.pop(BUSY, np.zeros(len(edges) - 1))
    capacity = round(attribution.total(pool).capacity / (edges[-1] - edges[0]))
    return {"capacity": capacity, "busy": _short(busy), "idle": {in_words(c): _short(row) for c, row in shares.items()}}


def steps(attribution: Attribution, windows: Sequence[StepWindow]) -> Chart:
    """Return the chart of the learner's time. A bar is one step of ``windows``, or the mean of consecutive steps.

    A bar shows the busy seconds per rank, and the idle seconds per rank for each cause. ``fleet_s`` is the number of
    seconds that engines without idle time would need for the work of the step.
    """
    width = math.ceil(len(windows) / MAX_BARS) or 1
    bars = [slice(first, first + width) for first in range(0, len(windows), width)]
    learner, fleet = (attribution.per_step(pool, windows) for pool in (Pool.learner, Pool.fleet))
    causes = list(dict.fromkeys(cause for time in learner for cause in time.idle))

    def rank_seconds(window: StepWindow, time: PoolTime, part: int) -> float:
        return part / time.capacity * window.duration / _SECOND if time.capacity else 0.0

    def name(bar: slice) -> str:
        first, last = windows[bar][0].version, windows[bar][-1].version
        return str(first) if first == last else f"{first}–{last}"

    def means(pool: Sequence[PoolTime], part: Callable[[PoolTime], int]) -> list[float]:
        values = [rank_seconds(window, time, part(time)) for window, time in zip(windows, pool, strict=True)]
        return [_rounded(statistics.fmean(values[bar])) for bar in bars]

    return {
        "labels": [name(bar) for bar in bars],
        "busy_s": means(learner, lambda time: time.busy),
        "idle_s": {in_words(cause): means(learner, lambda time, of=cause: time.idle.get(of, 0)) for cause in causes},
        "fleet_s": means(fleet, lambda time: time.busy),
    }


def fill(trace: Trace) -> Chart:
    """Return the chart of how batches fill up: one curve per step, for at most `MAX_CURVES` evenly spaced steps.

    The ``points`` of a curve are pairs [seconds, fraction of the batch's groups that the buffer has stored]. The batch
    is complete at 0 seconds; earlier times are negative. ``tail`` is the index of the last point with a fraction of at
    most 95%.
    """
    stored: dict[int, list[int]] = defaultdict(list)
    for life in trace.trained_groups:
        moment = life.time(GroupEvent.stored)
        if moment is not None:
            stored[life.step].append(moment)
    batches = [(step, sorted(stored[step])) for step in sorted(stored)]
    return {"curves": [_fill_curve(step, moments) for step, moments in _spread(batches, MAX_CURVES)]}


def _fill_curve(step: int, moments: Sequence[int]) -> Chart:
    whole, count = moments[-1], len(moments)
    points = [((moment - whole) / _SECOND, (index + 1) / count) for index, moment in enumerate(moments)]
    body = [point for point in points if point[1] <= 1 - LAST_SHARE]
    tail = [point for point in points if point[1] > 1 - LAST_SHARE]
    body = _spread(body, MAX_CURVE_POINTS) or [(points[0][0], 0.0)]
    shown = [*body, *_spread(tail, MAX_CURVE_POINTS)]
    return {"step": step, "points": [[_rounded(x), _rounded(y)] for x, y in shown], "tail": len(body) - 1}


def lag(trace: Trace, *, bound: int) -> Chart:
    """Return the chart of lags: for each lag, the number of trained groups that had this lag.

    A group's lag is the number of learner steps from the group's oldest token to the training. The chart has three
    lists with one number per lag. ``none`` counts the groups with lag 0. The other groups are divided between
    ``before`` and ``in_queue``: ``before`` gets the fraction of the lag that arose before the buffer stored the group,
    and ``in_queue`` gets the rest. ``bound`` is the largest allowed lag.
    """
    lives = trace.trained_groups
    parts = {name: [0.0] * (1 + max([bound, *(life.lag for life in lives)])) for name in ("none", "before", "in_queue")}
    for life in lives:
        parts["none"][life.lag] += life.lag == 0
        parts["before"][life.lag] += life.lag_before_queue / max(1, life.lag)
        parts["in_queue"][life.lag] += life.lag_in_queue / max(1, life.lag)
    return {
        "bound": bound,
        "lags": list(range(len(parts["none"]))),
        **{name: [_rounded(value) for value in values] for name, values in parts.items()},
    }


def lengths(trace: Trace) -> Chart:
    """Return the chart of response lengths in tokens: histograms of the generated, trained and dropped samples.

    A sample is counted only after the buffer has stored its group.
    """
    found: dict[str, list[int]] = {"generated": [], "trained": [], "dropped": []}
    for life in trace.groups.values():
        for stamp in life.stamps:
            if stamp.event == GroupEvent.stored:
                found["generated"] += stamp.details.get("lengths", ())
        last = life.last(GroupEvent.stored)
        kept = last.details.get("lengths", ()) if last is not None else ()
        if life.step >= 0:
            found["trained"] += kept
        elif life.last(GroupEvent.dropped) is not None:
            found["dropped"] += kept
    longest = max(found["generated"], default=0)
    width = max(1, math.ceil((longest + 1) / NUM_LENGTH_BINS))
    edges = list(range(0, longest + 1 + width, width))
    counts = {name: np.histogram(values, bins=edges)[0].tolist() for name, values in found.items()}
    return {"edges": edges, **counts}


def publishes(trace: Trace) -> Chart:
    """Return the chart of weight updates: the stages of an update, and the total time and pause of each version.

    At time 0 the learner begins to copy the weights. The start and end of a stage are medians over all versions. A
    stage on several ranks or engines lasts from the first start to the last end. The total time ends when all engines
    serve the version or a newer version. The pause is the longest pause of an engine.
    """
    began = {span.version: span.start for span in reversed(trace.spans_of(SpanKind.publish_copy))}
    stages: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in trace.spans:
        name = span.cause if span.kind == SpanKind.publish_stage else _STAGES.get(SpanKind(span.kind), "")
        version = _version_of(trace, span) if name else NONE
        if version in began and not span.is_open and span.start >= began[version]:
            stages[name][version].append(span)
    rows = []
    for name, by_version in stages.items():
        starts = [min(span.start for span in spans) - began[version] for version, spans in by_version.items()]
        ends = [max(span.end for span in spans) - began[version] for version, spans in by_version.items()]
        on_learner = any(span.lane.startswith("learner") for spans in by_version.values() for span in spans)
        times = {"start_s": _seconds(statistics.median(starts)), "end_s": _seconds(statistics.median(ends))}
        side, pauses = "learner" if on_learner else "fleet", name in ("pause and load", "re-prefill")
        rows.append({"name": name, "side": side, "pauses": pauses, **times})
    loads = stages.get("pause and load", {})
    longest = {version: max(span.end - span.start for span in spans) for version, spans in loads.items()}
    served = {version: when for version, when in _served(trace) if version in began}
    return {
        "stages": sorted(rows, key=lambda row: (row["start_s"], row["end_s"])),
        "versions": list(served),
        "total_s": [_seconds(when - began[version]) for version, when in served.items()],
        "pause_s": [_seconds(longest.get(version, 0)) for version in served],
    }


_STAGES = {
    SpanKind.publish_copy: "copy",
    SpanKind.stage: "stage on the engine",
    SpanKind.pause: "pause and load",
    SpanKind.re_prefill: "re-prefill",
}


def _version_of(trace: Trace, span: Span) -> int:
    """Return the policy version that a span (an activity) belongs to; -1 if the version is unknown.

    A re-prefill without a recorded version belongs to the same version as the latest pause of the same engine. Any
    other span without a recorded version belongs to the version that its engine serves next.
    """
    if span.version != NONE:
        return span.version
    if span.kind == SpanKind.re_prefill:
        pauses = [pause for pause in trace.spans_of(SpanKind.pause, span.lane) if pause.start <= span.start]
        return _version_of(trace, pauses[-1]) if pauses else NONE
    later = (level.value for level in trace.levels_of(LevelName.version, span.lane) if level.time >= span.start)
    return next(later, NONE)


_ACTIVITIES = {
    SpanKind.released: "device with the learner",
    SpanKind.evaluation: "evaluating",
    SpanKind.pause: "loading weights",
}
_UP = ("starting", "catching_up", "ready")
"""States of a member whose worker is up."""


def _state(trace: Trace, lane: str) -> str:
    """Return the engine's state and its unfinished activities as text. Example: ``ready, loading weights``.

    If the state of the engine's rollout worker is not in `_UP`, return only that state.
    """
    spans = trace.spans_of(SpanKind.member, f"{lane}/worker")
    member = max(spans, key=lambda span: span.start, default=None)
    if member is not None and member.cause not in _UP:
        return in_words(member.cause)
    state = "not recorded" if member is None else in_words(member.cause)
    doing = (text for kind, text in _ACTIVITIES.items() for span in trace.spans_of(kind, lane) if span.is_open)
    return ", ".join([state, *doing])


def members(trace: Trace) -> Chart:
    """Return a table that shows each engine's state at the end of the record.

    The table has column names, and one row of texts per engine.
    """
    finished = Counter(stamp.lane for stamp in trace.stamps if stamp.event == GroupEvent.last_token)
    hosts = {process.name: process.host for process in trace.processes}
    rows = []
    for lane in trace.lanes(Pool.fleet):
        process = next((note.process for note in trace.levels if note.lane == lane), "")
        at_end = {name: trace.level_at(name, lane, trace.end) for name in ("version", "running", "capacity")}
        pauses = [span.end - span.start for span in trace.spans_of(SpanKind.pause, lane) if not span.is_open]
        row = {
            "engine": lane,
            "state": _state(trace, lane),
            "epoch": str(trace.level_at(LevelName.epoch, f"{lane}/worker", trace.end)),
            "policy version": str(at_end["version"]),
            "running / slots": f"{at_end['running']} / {at_end['capacity']}",
            "groups finished": str(finished[lane]),
            "weight updates": str(len(pauses)),
            "median pause": f"{1000 * statistics.median(pauses) / _SECOND:.0f} ms" if pauses else "",
            "host": hosts.get(process, ""),
        }
        rows.append(row)
    return {"columns": list(rows[0]) if rows else [], "rows": [list(row.values()) for row in rows]}


def frontier(predictions: Mapping[str, Any], here: tuple[float, float]) -> Chart:
    """Return the chart of the predicted seconds per step as a function of the mean lag.

    ``predictions`` is the content of ``plan.json``. ``here`` is the measured point: (mean lag, seconds per step).
    """
    return {"curves": predictions["curves"], "here": {"lag": _rounded(here[0]), "step_s": _rounded(here[1])}}


def _served(trace: Trace) -> list[tuple[int, int]]:
    """Return (version, time) pairs. At ``time``, all engines serve ``version`` or a newer one for the first time.

    Pairs with a time before the first step are left out. "All engines" includes an engine from its first version until
    its worker stops or the engine leaves.
    """
    changes = []
    for lane in trace.lanes(Pool.fleet):
        changes += [(level.time, lane, level.value) for level in trace.levels_of(LevelName.version, lane)]
        members = trace.spans_of(SpanKind.member, f"{lane}/worker")
        changes += [(span.start, lane, NONE) for span in members if span.cause in (*NOT_UP, MemberState.left)]
    serves: dict[str, int] = {}
    found: list[tuple[int, int]] = []
    for when, lane, version in sorted(changes):
        serves[lane] = version
        oldest = min((served for served in serves.values() if served != NONE), default=NONE)
        if oldest > (found[-1][0] if found else NONE):
            found.append((oldest, when))
    start, end = trace.window
    return [(version, when) for version, when in found if when >= (start if end > start else trace.start)]


def _shares(stretches: Iterable[Stretch], edges: np.ndarray) -> dict[str, np.ndarray]:
    """Return a dict from each state to an array [bins] float64: the mean fraction of slots in this state per bin.

    A slot is a rank, or an engine's capacity for one sample. The fractions of a bin sum to 1, or to 0 if no period
    of ``stretches`` overlaps the bin.
    """
    by_cause: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for stretch in stretches:
        by_cause[stretch.state].append((stretch.start, stretch.end, stretch.places))
    sums = {cause: overlaps(np.array(rows, dtype=np.float64), edges) for cause, rows in by_cause.items()}
    total = np.sum(list(sums.values()), axis=0) if sums else np.zeros(len(edges) - 1)
    total = np.where(total > 0, total, 1.0)
    return {cause: row / total for cause, row in sums.items()}


def overlaps(rows: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Compute the weighted time of periods in each bin.

    Args:
        rows: [N, 3]. A row has the start, end and weight of a period.
        edges: [bins + 1] ascending.

    Returns:
        [bins] float64: the sum over all rows of the weight times the row's overlap with the bin.
    """
    times = np.concatenate([rows[:, 0], rows[:, 1]])
    slopes = np.concatenate([rows[:, 2], -rows[:, 2]])
    order = np.argsort(times, kind="stable")
    times, height = times[order], np.cumsum(slopes[order])
    area = np.concatenate([[0.0], np.cumsum(height[:-1] * np.diff(times))])
    index = np.clip(np.searchsorted(times, edges, side="right") - 1, 0, len(times) - 1)
    upto = area[index] + height[index] * (edges - times[index])
    upto[edges < times[0]] = 0.0
    return np.diff(upto)


def _level_means(trace: Trace, name: str, edges: np.ndarray) -> np.ndarray:
    """Return an array [bins]: the mean of one of the buffer's counts in each bin.

    ``name`` is the name of the count. Example: ``stored``.
    """
    changes = trace.levels_of(name, "buffer")
    if not changes:
        return np.zeros(len(edges) - 1)
    times = np.array([change.time for change in changes] + [max(edges[-1], changes[-1].time)], dtype=np.float64)
    rows = np.column_stack([times[:-1], times[1:], [change.value for change in changes]])
    return overlaps(rows, edges) / np.diff(edges)


def _lag_of_batches(trace: Trace, edges: np.ndarray) -> np.ndarray:
    """Return an array [bins]: the mean lag of the latest batch whose learner step ended before the end of the bin.

    The value is 0 if no step ended before the end of the bin.
    """
    lags: dict[int, list[int]] = defaultdict(list)
    for life in trace.trained_groups:
        lags[life.step].append(life.lag)
    ends = {step.version: step.end for step in trace.steps if not step.is_open}
    known = [(ends[step], statistics.fmean(values)) for step, values in sorted(lags.items()) if step in ends]
    if not known:
        return np.zeros(len(edges) - 1)
    times, values = np.array(known).T
    index = np.searchsorted(times, edges[1:], side="right") - 1
    return np.where(index >= 0, values[np.clip(index, 0, None)], 0.0)


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most ``count`` evenly spaced items, including the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _short(values: np.ndarray) -> list[float]:
    return [_rounded(value) for value in values.tolist()]


def _seconds(nanoseconds: float) -> float:
    return _rounded(nanoseconds / _SECOND)


def _rounded(value: float) -> float:
    """Round to four decimals, or to four significant digits if the absolute value is below 1.

    Rounding keeps the JSON of the report small.
    """
    return float(f"{value:.{_FIGURES}g}") if abs(value) < 1 else round(value, _FIGURES)
