"""Builds the report of a run: one document of figures, charts, members and samples, and ``report.html`` from it.

The dashboard serves the same document while the run is in progress. The document lists each missing part by name, with
the reason or the option that records it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml

from asyncrl.core.record import Pool
from asyncrl.metrics import counted, in_words, json_object, read_json
from asyncrl.profile import charts
from asyncrl.profile.attribution import OverlapReport
from asyncrl.profile.page import render
from asyncrl.profile.run_advice import read_advice
from asyncrl.profile.trace import Trace, TraceReader
from asyncrl.samples import read_samples
from rollout_fleet.engines.model_files import Decode, load_decoder

REPORT = "report.html"
_MAX_FILES = 12
_MAX_SAMPLES = 160
_QUIET_S = 30.0
_SECOND = 1_000_000_000
_T = TypeVar("_T")


class RunReport:
    """Builds the document of a run's folder; later calls read only the new records.

    Args:
        run_dir: The run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._reader = TraceReader(run_dir)
        self._samples = SampleFiles(run_dir, lambda: _decoder(run_dir, _options(run_dir)))

    def to_json(self) -> bytes:
        """The document as JSON. Raises the errors of `document`."""
        return json.dumps(self.document(), allow_nan=False, separators=(",", ":")).encode()

    def document(self, trace: Trace | None = None, overlap: OverlapReport | None = None) -> dict[str, Any]:
        """Build the document that the page draws (docs/watching.md).

        If another file cannot be read, only its part is missing, and the document holds the reason in its place.

        Args:
            trace: The record to show; None to read the record of the run so far.
            overlap: The figures of ``trace``; None to compute them.

        Raises:
            FileNotFoundError: the run recorded nothing.
            ValueError: the record or the configuration is damaged.
        """
        known: Trace = self._reader.read() if trace is None else trace
        if (self._run_dir / "summary.json").is_file():
            state = "the run has ended"
        else:
            written = [path.stat().st_mtime for path in (self._run_dir / "profile").glob("*.msgpack")]
            is_fresh = time.time() - max(written, default=0.0) < _QUIET_S
            state = "live" if is_fresh else "nothing was recorded for a while"
        return report_document(
            known,
            overlap or OverlapReport.of(known),
            options=_options(self._run_dir),
            record=_or_reason(lambda: _last_record(self._run_dir / "metrics.jsonl")),
            predictions=_or_reason(lambda: read_json(self._run_dir / "plan.json", "curves")),
            advice=_or_reason(lambda: str(read_advice(self._run_dir) or "")),
            samples=_or_reason(lambda: self._samples.newest(_MAX_SAMPLES)),
            name=self._run_dir.name,
            state=state,
        )


def write_report(run_dir: Path, trace: Trace | None = None, overlap: OverlapReport | None = None) -> Path:
    """Write ``report.html`` atomically and return its path. Arguments and errors are those of `RunReport.document`."""
    path = run_dir / REPORT
    partial = path.with_suffix(".html.partial")
    partial.write_text(
        render(RunReport(run_dir).document(trace, overlap), title=f"asyncrl {run_dir.name}"), encoding="utf-8"
    )
    os.replace(partial, path)
    return path


def report_document(
    trace: Trace,
    overlap: OverlapReport,
    *,
    options: Mapping[str, Any],
    record: Mapping[str, Any] | str | None = None,
    predictions: Mapping[str, Any] | str | None = None,
    advice: str = "",
    samples: Sequence[Mapping[str, Any]] | str = (),
    name: str = "run",
    state: str = "",
) -> dict[str, Any]:
    """Build the document from a trace and the other contents of a run's folder.

    If ``record``, ``predictions`` or ``samples`` is a string, it is the reason why this part is missing.

    Args:
        trace: The record of the run.
        overlap: The figures of the trace.
        options: The resolved configuration of the run.
        record: The last line of ``metrics.jsonl``; None if the file has no line yet.
        predictions: The content of ``plan.json``; None if the file does not exist.
        advice: The advice as one line; empty if there is none.
        samples: Rows of sample files (`SampleFiles`).
        name: Name of the run's folder.
        state: Text that tells whether the run is in progress.
    """
    bound = _bound(trace, options)
    causes = dict.fromkeys(cause for pool in overlap.run.pools.values() for cause in pool.idle)
    parts = _charts(trace, overlap, bound, predictions)
    parts["samples"] = samples or "No samples were kept; set rollout_fleet.samples.every_steps to keep some."
    return {
        "run": _facts(trace, bound, options, name=name, state=state),
        "figures": _figures(overlap, bound, options, record),
        "advice": advice,
        "causes": [in_words(cause) for cause in causes],
        "members": charts.members(trace),
        "absent": {name: part for name, part in parts.items() if isinstance(part, str)},
        **{name: part for name, part in parts.items() if not isinstance(part, str)},
    }


def _charts(
    trace: Trace, overlap: OverlapReport, bound: int, predictions: Mapping[str, Any] | str | None
) -> dict[str, Any]:
    """Each chart by name, or the reason why the chart is missing."""
    finished = [step for step in trace.steps if not step.is_open]
    if not finished:
        early = "No learner step is finished yet."
        return dict.fromkeys(("timeline", "steps", "fill", "lag", "frontier", "lengths", "publishes"), early)
    fill, lengths, publishes = charts.fill(trace), charts.lengths(trace), charts.publishes(trace)
    predictions = predictions or "No predictions yet: python -m asyncrl plan RUN replays the run with other options."
    here = overlap.run.lag.mean, overlap.run.step_s
    return {
        "timeline": charts.timeline(trace, overlap.attribution),
        "steps": charts.steps(overlap.attribution, finished),
        "fill": fill if fill["curves"] else "The record has no stored group of a trained batch.",
        "lag": charts.lag(trace, bound=bound),
        "frontier": predictions if isinstance(predictions, str) else charts.frontier(predictions, here),
        "lengths": lengths if any(lengths["generated"]) else "The record has no response lengths.",
        "publishes": publishes if publishes["versions"] else "The engines have not served a published version yet.",
    }


def _figures(
    overlap: OverlapReport, bound: int, options: Mapping[str, Any], record: Mapping[str, Any] | str | None
) -> list[dict[str, str]]:
    """The figures at the top of the page: name, value and explanation."""
    run = overlap.run
    figures = [("learner steps", f"{run.num_steps} of {options.get('total_steps', run.num_steps)}", "finished")]
    if run.num_steps:
        ideal = f"the slower pool alone would take {run.ideal_step_s:.3g} s per step"
        figures += [
            ("seconds per step", f"{run.step_s:.3g}", "mean over the finished steps"),
            ("overlap efficiency", f"{run.efficiency:.2f}", ideal),
            ("learner at work", f"{run.pools[Pool.learner].utilisation:.1%}", "share of the ranks' time"),
            ("fleet at work", f"{run.pools[Pool.fleet].utilisation:.1%}", "share of the time of the engines' places"),
            ("mean lag", f"{run.lag.mean:.2f}", f"learner steps; the bound is {bound}"),
        ]
    for pool, time_of in run.pools.items():
        if time_of.idle:
            cause, part = max(time_of.idle.items(), key=itemgetter(1))
            figures.append((f"{pool}: {in_words(cause)}", f"{part / time_of.capacity:.1%}", "what cost it most"))
    if isinstance(record, str):
        figures.append(("reward", "not known", record))
    elif record is not None:
        figures += [
            ("reward", f"{record['reward']:.3f}", f"of the batch of step {record['step']}"),
            ("tokens generated", f"{record['generated_tokens']:,}", "policy tokens, since training began"),
        ]
    return [{"name": name, "value": value, "note": note} for name, value, note in figures]


def _facts(trace: Trace, bound: int, options: Mapping[str, Any], *, name: str, state: str) -> dict[str, Any]:
    experiment = options.get("experiment", "run")
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(p.wall_ns for p in trace.processes) / _SECOND))
    hosts = {process.host for process in trace.processes}
    ranks, engines = len(trace.lanes(Pool.learner)), len(trace.lanes(Pool.fleet))
    facts = [
        f"began {began}",
        f"{counted(ranks, 'learner rank')} and {counted(engines, 'engine')}",
        counted(len(hosts), "host") if len(hosts) > 1 else "",
        f"buffer.max_lag={bound}",
        f"{trace.num_dropped:,} records lost" if trace.num_dropped else "",
    ]
    clocks = max((process.error_ns for process in trace.processes), default=0)
    facts.append(f"clocks within {clocks / 1e6:.1f} ms" if clocks else "")
    return {"title": f"{experiment} · {name}", "facts": " · ".join(filter(None, facts)), "state": state}


def _bound(trace: Trace, options: Mapping[str, Any]) -> int:
    """``buffer.max_lag`` of the run; if the configuration is missing, the largest lag in the trace."""
    known = options.get("buffer", {}).get("max_lag")
    return known if known is not None else max((life.lag for life in charts.trained_groups(trace)), default=0)


def _or_reason(read: Callable[[], _T]) -> _T | str:
    """Call ``read``; if a file cannot be read, return the reason as text for the place of its part."""
    try:
        return read()
    except (OSError, ValueError) as error:
        return str(error)


def _last_record(path: Path) -> dict[str, Any] | None:
    """The last complete line of ``metrics.jsonl``; None if there is none yet. Raises the errors of `json_object`."""
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []
    if not lines:
        return None
    return json_object(lines[-1], f"line {len(lines)} of {path}", "step", "reward", "generated_tokens")


def _options(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration of the run; empty if the file does not exist."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        return {}
    try:
        options = yaml.safe_load(path.read_text(errors="replace"))
        got = f"{options!r:.80}"
    except yaml.YAMLError as error:
        options, got = None, " ".join(str(error).split())
    if not isinstance(options, dict) or not all(isinstance(options.get(n, {}), dict) for n in ("buffer", "model")):
        raise ValueError(f"{path} must hold the options of the run as YAML, got {got}; restore it from a copy")
    return options


class SampleFiles:
    """Reads the newest samples of a run for the page. Sample files never change, so each file is read once.

    Args:
        run_dir: The run's folder, with ``samples/`` of `rollout_fleet.sample_log` and ``tokens/`` of
            `learner.trajectory_log`.
        load_decode: Returns the function that turns token ids into text. `SampleFiles` calls it at the first file of
            tokens. If it returns None because the tokenizer is missing, `SampleFiles` leaves the tokens out.
    """

    def __init__(self, run_dir: Path, load_decode: Callable[[], Decode | None]) -> None:
        self._run_dir = run_dir
        self._load_decode = load_decode
        self._read: dict[Path, list[dict[str, Any]]] = {}

    def newest(self, count: int) -> list[dict[str, Any]]:
        """At most ``count`` samples from the newest files of each kind."""
        kinds: dict[str, list[Path]] = defaultdict(list)
        for path in sorted(self._run_dir.glob("samples/*-v*.parquet"), reverse=True):
            kinds[path.name.partition("-")[0]].append(path)
        kinds["tokens"] = sorted(self._run_dir.glob("tokens/*.parquet"), reverse=True)
        present = [files for files in kinds.values() if files]
        kept = [path for files in present for path in files[: max(1, _MAX_FILES // len(present))]]
        self._read = {path: self._read[path] if path in self._read else self._samples_of(path) for path in kept}
        share = max(1, count // max(1, len(kept)))
        return [sample for path in kept for sample in self._read[path][:share]]

    def _samples_of(self, path: Path) -> list[dict[str, Any]]:
        rows = read_samples([path])
        if path.parent.name != "tokens":
            return [_sample(row) for row in rows]
        decode = self._decode
        return [] if decode is None else [_trained_sample(row, path, decode) for row in rows]

    @cached_property
    def _decode(self) -> Decode | None:
        return self._load_decode()


_SAMPLE_FIELDS = (
    "kind", "group_id", "prompt", "response", "ground_truth", "num_tokens", "finish_reason", "oldest_version",
    "newest_version",
)  # fmt: skip


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in _SAMPLE_FIELDS} | {"reward": _finite(row["reward"]) or 0.0}


def _trained_sample(row: Mapping[str, Any], path: Path, decode: Decode) -> dict[str, Any]:
    """A sample with its tokens: each has a policy version and the engine's log-prob minus the learner's."""
    own = row["learner_logprobs"]
    names = ("response_ids", "versions", "response_mask", "behavior_logprobs")
    columns = zip(*(row[name] for name in names), own, strict=True)
    tokens = [
        {
            "text": decode([token]),
            "version": version,
            "difference": _finite(engine - learner) if in_loss else None,
        }
        for token, version, in_loss, engine, learner in columns
    ]
    versions = [token["version"] for token in tokens if token["version"] >= 0] or [-1]
    return {
        "kind": "trained",
        "group_id": row["group_id"],
        "prompt": decode(row["prompt_ids"]),
        "response": "".join(token["text"] for token in tokens),
        "ground_truth": "",
        "reward": _finite(row["reward"]) or 0.0,
        "num_tokens": len(tokens),
        "finish_reason": f"in step {int(path.stem.split('_')[1])}",
        "oldest_version": min(versions),
        "newest_version": max(versions),
        "tokens": tokens,
    }


def _decoder(run_dir: Path, options: Mapping[str, Any]) -> Decode | None:
    """The decoder of the policy that the run wrote, or of its initial model; None if neither has a tokenizer."""
    folders = (run_dir / "policy", Path(options.get("model", {}).get("path", "") or run_dir / "policy"))
    found = next((folder for folder in folders if any(folder.glob("tokenizer*"))), None)
    return None if found is None else load_decoder(str(found), special_tokens=True)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 5)
