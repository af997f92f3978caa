"""Converts a trace to the Chrome trace event format (``trace.json``) for https://ui.perfetto.dev and chrome://tracing.

For each prompt group, an arrow leads from the lease of the group to the step that trained on the group. Times are
microseconds since the first record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asyncrl.core.record import NONE, GroupEvent, LevelName, Pool, SpanKind, torch_trace_name
from asyncrl.profile.trace import BUFFER_LANE, CONTROLLER_LANE, GroupLife, Span, Trace

_POOLS = {pool.value: number for number, pool in enumerate((Pool.learner, Pool.fleet, Pool.buffer, Pool.controller), 1)}
_COUNTERS = (LevelName.stored, LevelName.leased, LevelName.planned, LevelName.budget, LevelName.version)
_ENGINE_COUNTERS = (
    *(LevelName.running, LevelName.tail, LevelName.settling, LevelName.tool, LevelName.environment, LevelName.parked),
)


def trace_events(trace: Trace, *, torch_traces: Iterable[str] = ()) -> dict[str, Any]:
    """Convert the record of a run to a dict in the Chrome trace event format, for ``trace.json``.

    Args:
        trace: The record of the run.
        torch_traces: File names of the torch profiler's traces (option ``profile.torch_steps``). The events of the
            learner's updates contain these names.
    """
    events = _Events(trace, frozenset(torch_traces))
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [*events.names(), *events.spans(), *events.groups(), *events.counters(), *events.lags()],
    }


class _Events:
    def __init__(self, trace: Trace, torch_traces: frozenset[str]) -> None:
        self._trace = trace
        self._torch_traces = torch_traces
        self._pools = {process.name: process.pool for process in trace.processes}
        lanes = {(self._pools[note.process], note.lane) for notes in (trace.spans, trace.levels) for note in notes}
        lanes |= {(self._pools[stamp.process], stamp.lane) for stamp in trace.stamps}
        self._threads = {lane: number for number, lane in enumerate(sorted(lanes), 1)}

    def names(self) -> Iterator[dict[str, Any]]:
        for pool, number in _POOLS.items():
            yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": pool}}
            yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}
        for (pool, lane), number in self._threads.items():
            yield {"ph": "M", "pid": _POOLS[pool], "tid": number, "name": "thread_name", "args": {"name": lane}}

    def spans(self) -> Iterator[dict[str, Any]]:
        """Yield trace events for the spans (activities) of all processes.

        Spans that may overlap in a row of the timeline, such as rewards and evaluations, become asynchronous events.
        """
        for number, span in enumerate(self._trace.spans):
            about = {"version": span.version, "step": span.step, "group": span.group}
            args: dict[str, Any] = {name: value for name, value in about.items() if value != NONE}
            args |= {"cause": span.cause} if span.cause else {}
            args |= {"is_open": True} if span.is_open else {}
            torch_trace = torch_trace_name(span.step, span.cause, span.lane.rpartition("-")[2])
            args |= {"torch_trace": torch_trace} if torch_trace in self._torch_traces else {}
            place = self._place(span.process, span.lane)
            if "/" in span.lane or span.lane == CONTROLLER_LANE or span.kind == SpanKind.evaluation:
                place |= {"cat": span.kind, "id": number, "name": span.kind}
                yield {**place, "ph": "b", "ts": self._us(span.start), "args": args}
                yield {**place, "ph": "e", "ts": self._us(span.end)}
            else:
                times = {"ts": self._us(span.start), "dur": (span.end - span.start) / 1000}
                yield {**place, "ph": "X", "name": span.kind, **times, "args": args}

    def groups(self) -> Iterator[dict[str, Any]]:
        """Yield trace events for each group that a step trained on.

        For each group, Perfetto shows a bar from the lease to the last token, and an arrow from the lease to the
        learner's update.
        """
        updates = {span.step: span for span in reversed(self._trace.spans_of("update"))}
        for group in (use for life in self._trace.groups.values() for use in life.uses()):
            update = updates.get(group.step)
            if update is not None:
                yield from self._arrow(group, update)

    def counters(self) -> Iterator[dict[str, Any]]:
        for level in self._trace.levels:
            is_buffer = level.lane == BUFFER_LANE and level.name in _COUNTERS
            if is_buffer or level.name in _ENGINE_COUNTERS:
                name = level.name if is_buffer else f"{level.lane} {level.name}"
                place = {"pid": _POOLS[self._pools[level.process]], "ph": "C", "name": name}
                yield {**place, "ts": self._us(level.time), "args": {level.name: level.value}}

    def lags(self) -> Iterator[dict[str, Any]]:
        lags: dict[int, list[int]] = defaultdict(list)
        for group in self._trace.trained_groups:
            lags[group.step].append(group.lag)
        for step in self._trace.steps:
            if found := lags.get(step.version):
                place = {"pid": _POOLS[Pool.controller], "ph": "C", "name": "lag"}
                yield {**place, "ts": self._us(step.end), "args": {"lag": sum(found) / len(found)}}

    def _arrow(self, group: GroupLife, update: Span) -> Iterator[dict[str, Any]]:
        stamps = [stamp for event in GroupEvent if (stamp := group.last(event)) is not None]
        places: Mapping[str, Any] = {"cat": "group", "name": f"group {group.group}", "id": group.group}
        engine = next((stamp for stamp in stamps if stamp.event == GroupEvent.last_token), stamps[0])
        begin = {**places, **self._place(engine.process, engine.lane)}
        lease = group.time(GroupEvent.lease) or stamps[0].time
        last = max(engine.time, lease)
        args = {stamp.event: self._us(stamp.time) for stamp in stamps} | {"lag": group.lag}
        yield {**begin, "ph": "b", "ts": self._us(lease), "args": args}
        yield {**begin, "ph": "e", "ts": self._us(last)}
        yield {**begin, "ph": "s", "ts": self._us(lease)}
        yield {**places, **self._place(update.process, update.lane), "ph": "f", "bp": "e", "ts": self._us(update.start)}

    def _place(self, process: str, lane: str) -> dict[str, Any]:
        pool = self._pools[process]
        return {"pid": _POOLS[pool], "tid": self._threads[pool, lane]}

    def _us(self, time: int) -> float:
        return (time - self._trace.start) / 1000
