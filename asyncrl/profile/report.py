"""Builds the report of a run (headline numbers, charts, engines, samples) as a dict and as the page ``report.html``."""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.core.record import Pool
from asyncrl.metrics import (
    RunLimits,
    counted,
    in_words,
    json_object,
    lives_until,
    read_alarms,
    read_json,
    read_options,
)
from asyncrl.profile import charts
from asyncrl.profile.attribution import POOLS, OverlapReport
from asyncrl.profile.episodes import episode_view
from asyncrl.profile.page import render
from asyncrl.profile.trace import FOLDER, Trace, TraceReader
from asyncrl.samples import read_samples
from learner.config import GROUP_ADVANTAGES
from rollout_fleet.engines.engine import Decode, load_decoder

REPORT = "report.html"
_MAX_FILES = 12
_MAX_SAMPLES = 160
_MAX_EPISODES = 12
_QUIET_S = 30.0
_SECOND = 1_000_000_000
_NO_PREDICTIONS = "No predictions yet: python -m asyncrl plan RUN replays the run with other options."
_NO_SAMPLES = "No samples were kept; set rollout_fleet.samples.every_steps to keep some."
_T = TypeVar("_T")


class RunReport:
    """Builds the report of a run's folder as one dict. Later calls read only the new records of the run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._reader = TraceReader(run_dir)
        self._samples = SampleFiles(run_dir)

    def to_json(self) -> bytes:
        """Return the report as JSON. Raises the errors of `document`."""
        return json.dumps(self.document(), allow_nan=False, separators=(",", ":")).encode()

    def document(self, trace: Trace | None = None, overlap: OverlapReport | None = None) -> dict[str, Any]:
        """Return the report as a dict for JSON: everything that the page draws (docs/watching.md).

        If a file of samples, metrics, plans or advice cannot be read, the dict has the reason instead of the content.

        Args:
            trace: The record to show; None to read the record of the run so far.
            overlap: The overlap report of ``trace``; None to compute the overlap report.

        Raises:
            FileNotFoundError: the run recorded nothing.
            ValueError: the record or the configuration is damaged.
        """
        run_dir, trace = self._run_dir, trace or self._reader.read()
        overlap, options = overlap or OverlapReport.of(trace), _options(run_dir)
        largest = max((life.lag for life in trace.trained_groups), default=0)
        bound = options.get("buffer", {}).get("max_lag", largest)
        causes = dict.fromkeys(cause for pool in overlap.run.pools.values() for cause in pool.idle)
        predictions = _or_reason(lambda: read_json(run_dir / "plan.json", "curves")) or _NO_PREDICTIONS
        parts = _charts(trace, overlap, bound, predictions)
        parts["samples"] = _or_reason(lambda: self._samples.newest(_MAX_SAMPLES)) or _NO_SAMPLES
        parts["episodes"] = _or_reason(lambda: self._samples.episodes(_MAX_EPISODES))
        return {
            "run": self._facts(trace, bound, options.get("experiment", "run")),
            "figures": [
                *_figures(overlap, bound, options.get("total_steps", overlap.run.num_steps)),
                *_rewards(_or_reason(lambda: _last_record(run_dir / "metrics.jsonl"))),
            ],
            "alarms": _alarms(run_dir, options, bound),
            "advice": _or_reason(lambda: str(read_advice(run_dir) or "")),
            "causes": [in_words(cause) for cause in causes],
            "members": charts.members(trace),
            "absent": {name: part for name, part in parts.items() if isinstance(part, str)},
            **{name: part for name, part in parts.items() if not isinstance(part, str)},
        }

    def _facts(self, trace: Trace, bound: int, experiment: str) -> dict[str, Any]:
        if (self._run_dir / "summary.json").is_file():
            state = "the run has ended"
        else:
            written = [path.stat().st_mtime for path in (self._run_dir / FOLDER).glob("*.msgpack")]
            is_fresh = time.time() - max(written, default=0.0) < _QUIET_S
            state = "live" if is_fresh else "nothing was recorded for a while"
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(p.wall_ns for p in trace.processes) / _SECOND))
        hosts = {process.host for process in trace.processes}
        ranks, engines = len(trace.lanes(Pool.learner)), len(trace.lanes(Pool.fleet))
        clocks = max((process.error_ns for process in trace.processes), default=0)
        facts = [
            f"began {began}",
            f"{counted(ranks, 'learner rank')} and {counted(engines, 'engine')}",
            counted(len(hosts), "host") if len(hosts) > 1 else "",
            f"buffer.max_lag={bound}",
            f"{trace.num_dropped:,} records lost" if trace.num_dropped else "",
            *_earlier_lives(self._run_dir),
            f"clocks within {clocks / 1e6:.1f} ms" if clocks else "",
        ]
        title = f"{experiment} · {self._run_dir.name}"
        return {"title": title, "facts": " · ".join(filter(None, facts)), "state": state}


def _earlier_lives(run_dir: Path) -> Iterator[str]:
    lives = lives_until(run_dir)
    for number, ((folder, record), (_, after)) in enumerate(pairwise(lives), start=1):
        steps = f"steps {record.first_step} to {after.first_step - 1}"
        ended = time.strftime(" at %Y-%m-%d %H:%M", time.localtime(record.ended_s)) if record.ended_s else ""
        yield f"life {number} of {len(lives)}, {folder.name}: {steps}, {record.end}{ended}"
    if lives and lives[-1][1].resumed:
        yield f"this life begins with step {lives[-1][1].first_step}"


def write_report(run_dir: Path, trace: Trace | None = None, overlap: OverlapReport | None = None) -> Path:
    """Write the report of a run to ``report.html`` in the run's folder, atomically; return the path of the file.

    ``trace`` is the record to show; None to read the record from the folder. ``overlap`` is the overlap report of the
    record; None to compute the overlap report. Raises the errors of `RunReport.document`.
    """
    path = run_dir / REPORT
    partial = path.with_suffix(".html.partial")
    partial.write_text(
        render(RunReport(run_dir).document(trace, overlap), title=f"asyncrl {run_dir.name}"), encoding="utf-8"
    )
    os.replace(partial, path)
    return path


def _charts(trace: Trace, overlap: OverlapReport, bound: int, predictions: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return a dict from the name of each chart to the chart, or to a text that says why the chart is missing."""
    finished = [step for step in trace.steps if not step.is_open]
    if not finished:
        early = "No learner step is finished yet."
        return dict.fromkeys(("timeline", "steps", "fill", "lag", "frontier", "lengths", "publishes"), early)
    fill, lengths, publishes = charts.fill(trace), charts.lengths(trace), charts.publishes(trace)
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


def _figures(overlap: OverlapReport, bound: int, total_steps: int) -> Iterator[dict[str, str]]:
    run = overlap.run
    yield _figure("learner steps", f"{run.num_steps} of {total_steps}", "finished")
    if run.num_steps:
        ideal = f"the slower pool alone would take {run.ideal_step_s:.3g} s per step"
        learner, fleet = (run.pools[pool].utilisation for pool in POOLS)
        yield _figure("seconds per step", f"{run.step_s:.3g}", "mean over the finished steps")
        yield _figure("overlap efficiency", f"{run.efficiency:.2f}", ideal)
        yield _figure("learner at work", f"{learner:.1%}", "share of the ranks' time")
        yield _figure("fleet at work", f"{fleet:.1%}", "share of the time of the engines' sample slots")
        yield _figure("mean lag", f"{run.lag.mean:.2f}", f"learner steps; the bound is {bound}")
    for pool, time_of in run.pools.items():
        if time_of.idle:
            cause, part = max(time_of.idle.items(), key=itemgetter(1))
            yield _figure(f"{pool}: {in_words(cause)}", f"{part / time_of.capacity:.1%}", "what cost it most")


def _rewards(record: Mapping[str, Any] | str | None) -> Iterator[dict[str, str]]:
    """Yield headline numbers of the report from ``record``, the latest metrics record.

    If ``record`` is a text, the text says why the record cannot be read. The report then shows the reward as "not
    known", with the text.
    """
    if isinstance(record, str):
        yield _figure("reward", "not known", record)
    elif record is not None:
        yield _figure("reward", f"{record['reward']:.3f}", f"of the batch of step {record['step']}")
        if reused := record.get("reused_groups"):
            yield _figure(
                "groups trained again", str(reused), f"of the batch of step {record['step']} (buffer.max_uses)"
            )
        yield _figure("tokens generated", f"{record['generated_tokens']:,}", "policy tokens, since training began")


def _alarms(run_dir: Path, options: Mapping[str, Any], bound: int) -> list[dict[str, Any]]:
    algorithm = options.get("algorithm", {})
    advantages = [algorithm.get("advantage", "grpo"), *algorithm.get("advantage_by_source", {}).values()]
    limits = RunLimits(
        total_steps=options.get("total_steps", 0),
        max_lag=bound,
        compares_groups=GROUP_ADVANTAGES.issuperset(advantages),
    )
    found = _or_reason(lambda: read_alarms(run_dir, limits))
    if isinstance(found, str):
        return [{"text": found, "lasts": True}]
    return [{"text": str(alarm), "lasts": alarm.last_step is None} for alarm in reversed(found.history)]


def _figure(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _or_reason(read: Callable[[], _T]) -> _T | str:
    try:
        return read()
    except (OSError, ValueError) as error:
        return str(error)


def _last_record(path: Path) -> dict[str, Any] | None:
    """Return the last complete line of ``metrics.jsonl``; None if no line is complete or the file is missing.

    Raises the errors of `json_object`.
    """
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []
    if not lines:
        return None
    return json_object(lines[-1], f"line {len(lines)} of {path}", "step", "reward", "generated_tokens")


def _options(run_dir: Path) -> dict[str, Any]:
    """Return the options of the run; empty if there is no ``config.yaml``. Raises the errors of `read_options`."""
    is_written = (run_dir / "config.yaml").is_file()
    return read_options(run_dir, "algorithm.advantage", "buffer.max_lag", "model.path") if is_written else {}


class SampleFiles:
    """Reads the newest samples of a run for the report. Sample files do not change, so each file is read once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read: dict[Path, list[dict[str, Any]]] = {}
        self._episodes: tuple[Path | None, list[dict[str, Any]]] = (None, [])

    def newest(self, count: int) -> list[dict[str, Any]]:
        """Return at most ``count`` samples from the newest files of each kind, as dicts for JSON.

        Files in ``samples/`` with the same prefix, such as ``train``, are one kind. All files in ``tokens/`` are also
        one kind.
        """
        kinds: dict[str, list[Path]] = defaultdict(list)
        for path in sorted(self._run_dir.glob("samples/*-v*.parquet"), reverse=True):
            kinds[path.name.partition("-")[0]].append(path)
        kinds["tokens"] = sorted(self._run_dir.glob("tokens/*.parquet"), reverse=True)
        present = [files for files in kinds.values() if files]
        kept = [path for files in present for path in files[: max(1, _MAX_FILES // len(present))]]
        before, self._read = self._read, {}
        for path in kept:
            rows = () if path in before else read_samples([path])
            if path.parent.name != "tokens":
                samples = [{name: row[name] for name in _SAMPLE_FIELDS} | _reward(row) for row in rows]
            else:
                decode = self._decode
                samples = [] if decode is None else [_trained_sample(row, path, decode) for row in rows]
            self._read[path] = before.get(path, samples)
        share = max(1, count // max(1, len(kept)))
        return [sample for path in kept for sample in self._read[path][:share]]

    def episodes(self, count: int) -> list[dict[str, Any]]:
        """Return at most ``count`` episodes of the newest file of training samples, as dicts from `episode_view`.

        If the file has more episodes, half of the returned episodes have the lowest rewards, and half the highest.
        """
        newest = max(self._run_dir.glob("samples/train-v*.parquet"), default=None)
        if newest is None:
            return []
        if self._episodes[0] != newest:
            rows = [row for row in read_samples([newest]) if row.get("episode")]
            rows.sort(key=lambda row: row["reward"])
            chosen = rows if len(rows) <= count else [*rows[: count - count // 2], *rows[-(count // 2) :]]
            self._episodes = newest, [episode_view(row, json.loads(row["episode"])) for row in chosen]
        return self._episodes[1]

    @cached_property
    def _decode(self) -> Decode | None:
        """Function that decodes token ids; None if neither the run's policy nor the initial model has a tokenizer."""
        policy = self._run_dir / "policy"
        initial = _options(self._run_dir).get("model", {}).get("path", "")
        folders = (policy, Path(initial or policy))
        found = next((folder for folder in folders if any(folder.glob("tokenizer*"))), None)
        return None if found is None else load_decoder(str(found), special_tokens=True)


_SAMPLE_FIELDS = (
    "kind", "group_id", "prompt", "response", "ground_truth", "num_tokens", "finish_reason", "oldest_version",
    "newest_version",
)  # fmt: skip


def _trained_sample(row: Mapping[str, Any], path: Path, decode: Decode) -> dict[str, Any]:
    """Describe a trained sample and each of its tokens, as a dict for the page of the report.

    A token has its policy version, and the difference: the engine's log-prob minus the learner's log-prob of the token.
    """
    names = ("response_ids", "versions", "response_mask", "behavior_logprobs", "learner_logprobs")
    tokens = [
        {
            "text": decode([token]),
            "version": version,
            "difference": _finite(engine - learner) if in_loss else None,
        }
        for token, version, in_loss, engine, learner in zip(*(row[name] for name in names), strict=True)
    ]
    versions = [token["version"] for token in tokens if token["version"] >= 0] or [-1]
    return {
        "kind": "trained",
        "group_id": row["group_id"],
        "prompt": decode(row["prompt_ids"]),
        "response": "".join(token["text"] for token in tokens),
        "ground_truth": "",
        **_reward(row),
        "num_tokens": len(tokens),
        "finish_reason": f"in step {int(path.stem.split('_')[1])}",
        "oldest_version": min(versions),
        "newest_version": max(versions),
        "tokens": tokens,
    }


def _reward(row: Mapping[str, Any]) -> dict[str, float]:
    return {"reward": _finite(row["reward"]) or 0.0}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 5)


# Advice


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change of options that the planner recommends, and the predicted effect of the change.

    Attributes:
        change: Hydra overrides. Example: ``buffer.max_lag=1``.
        why: A sentence that names the present bottleneck of the run.
        interval: 5th and 95th percentile of ``predicted_step_s`` over resampled response lengths.
    """

    change: str
    why: str
    predicted_step_s: float
    interval: tuple[float, float]
    predicted_lag: float

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{self.change}: {self.predicted_step_s:.3g} s per step ({low:.3g} to {high:.3g}) "
            f"at mean lag {self.predicted_lag:.1f}; {self.why}"
        )


def advice_file(run_dir: Path) -> Path:
    """Return the path of ``advice.json``, the file with the newest advice on a run.

    The file is JSON. Its key ``advice`` has an object with the fields of `Advice`, or null.
    """
    return run_dir / "advice.json"


def read_advice(run_dir: Path) -> Advice | None:
    """Return the newest advice on a run; None if there is no advice or the planner has not searched yet.

    Raises:
        ValueError: ``advice.json`` is damaged. The message names the file.
    """
    path = advice_file(run_dir)
    document = read_json(path, "advice")
    if document is None or document["advice"] is None:
        return None
    try:
        low, high = document["advice"]["interval"]
        return Advice(**{**document["advice"], "interval": (low, high)})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must hold an object with the fields of the class Advice under the key 'advice', got "
            f"{document['advice']!r}; run asyncrl plan to write the file again, or delete the file"
        ) from error
