"""The report of a run: one document of figures, charts, members and samples, and ``report.html`` made of it.

The dashboard serves the same document while the run goes on. What a run did not record is absent by name, with what
would bring it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from asyncrl.protocol.record import Pool
from asyncrl.samples import read_samples
from rollout_fleet.engines.model_files import Decode, load_decoder

from . import charts
from .page import render
from .trace import Trace, TraceReader

REPORT = "report.html"
_MAX_FILES = 12
_MAX_SAMPLES = 160
_QUIET_S = 30.0
_SECOND = 1_000_000_000


class RunReport:
    """Makes the document of a run's folder; again and again while it goes on, reading only what is new.

    Args:
        run_dir: Folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._reader = TraceReader(run_dir)
        self._samples = SampleFiles(run_dir, lambda: _decoder(run_dir, _options(run_dir)))

    def to_json(self) -> bytes:
        """The document as JSON. Raises as `document`."""
        return json.dumps(self.document(), allow_nan=False, separators=(",", ":")).encode()

    def document(self) -> dict[str, Any]:
        """What the page draws; see docs/profiling.md.

        Raises:
            FileNotFoundError: the run recorded nothing.
        """
        trace: Trace = self._reader.read()
        options, summary = _options(self._run_dir), _read_json(self._run_dir / "summary.json")
        is_running = summary is None and self._is_fresh()
        return report_document(
            trace,
            options=options,
            records=read_lines(self._run_dir / "metrics.jsonl"),
            predictions=_read_json(self._run_dir / "plan.json"),
            samples=self._samples.newest(_MAX_SAMPLES),
            name=self._run_dir.name,
            is_running=is_running,
        )

    def _is_fresh(self) -> bool:
        """Whether a process of the run noted something of late."""
        written = [path.stat().st_mtime for path in (self._run_dir / "profile").glob("*.msgpack")]
        return time.time() - max(written, default=0.0) < _QUIET_S


def write_report(run_dir: Path) -> Path:
    """Write ``report.html``, whole or not at all, and return its path. Raises as `RunReport.document`."""
    path = run_dir / REPORT
    partial = path.with_suffix(".html.partial")
    partial.write_text(render(RunReport(run_dir).document(), title=f"asyncrl {run_dir.name}"), encoding="utf-8")
    os.replace(partial, path)
    return path


def report_document(
    trace: Trace,
    *,
    options: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]] = (),
    predictions: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    name: str = "run",
    is_running: bool = False,
) -> dict[str, Any]:
    """The document of a trace and of what else a run's folder holds.

    Args:
        trace: What the run recorded.
        options: Its resolved configuration.
        records: Lines of ``metrics.jsonl``.
        predictions: ``plan.json``; None where nothing was predicted.
        samples: Rows of sample files; see `SampleFiles`.
        name: Of the run's folder.
        is_running: Whether it still goes on.
    """
    attribution = attribute(trace)
    causes = list(dict.fromkeys(cause for use in (attribution.learner, attribution.fleet) for cause in use.idle))
    document: dict[str, Any] = {
        "run": _facts(trace, options, name, is_running),
        "figures": _figures(trace, attribution, options, records),
        "advice": _advice(predictions),
        "causes": causes,
        "members": charts.members(trace),
        "samples": list(samples),
        "absent": {},
    }
    parts = _charts(trace, attribution, options, predictions)
    for part, (chart, reason) in parts.items():
        if reason:
            document["absent"][part] = reason
        else:
            document[part] = chart
    if not samples:
        document["absent"]["samples"] = "No samples were kept; rollout_fleet.samples.every_steps keeps some."
    return document


def _facts(trace: Trace, options: Mapping[str, Any], name: str, is_running: bool) -> dict[str, Any]:
    experiment = options.get("experiment", "run")
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(p.wall_ns for p in trace.processes) / _SECOND))
    hosts = {process.host for process in trace.processes}
    facts = [
        f"began {began}",
        f"{len(trace.lanes(Pool.learner))} learner ranks and {len(trace.lanes(Pool.fleet))} engines",
        f"{len(hosts)} hosts" if len(hosts) > 1 else "",
        f"buffer.max_lag={_bound(trace, options)}",
        f"{trace.num_dropped:,} records lost" if trace.num_dropped else "",
    ]
    clocks = max((process.error_ns for process in trace.processes), default=0)
    facts.append(f"clocks within {clocks / 1e6:.1f} ms" if clocks else "")
    return {"title": f"{experiment} · {name}", "facts": " · ".join(filter(None, facts)), "running": is_running}


def _bound(trace: Trace, options: Mapping[str, Any]) -> int:
    """``buffer.max_lag``; of a run without its configuration, the largest lag that it had."""
    known = options.get("buffer", {}).get("max_lag")
    lags = [charts.lag_parts(trace, life) for life in trace.groups.values()] if known is None else []
    return known if known is not None else max((sum(parts) for parts in lags if parts), default=0)


def _advice(predictions: Mapping[str, Any] | None) -> str:
    return ""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a ``jsonl`` file; none where there is no file."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def _options(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.yaml"
    return yaml.safe_load(path.read_text()) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


class SampleFiles:
    """The newest samples of a run, as the page shows them; files are written once, so each is read once.

    Args:
        run_dir: With ``samples/`` of `rollout_fleet.sample_log`, and ``tokens/`` of `learner.trajectory_log`.
        load_decode: Returns what turns token ids into text; called once there are tokens. None where there is no
            tokenizer any more: tokens are left out then.
    """

    def __init__(self, run_dir: Path, load_decode: Callable[[], Decode | None]) -> None:
        self._run_dir = run_dir
        self._load_decode = load_decode
        self._read: dict[Path, list[dict[str, Any]]] = {}

    def newest(self, count: int) -> list[dict[str, Any]]:
        """At most ``count`` samples, those of the newest files of each kind."""
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
    """A row of the learner's, token by token: the policy version, and the engine's log-prob minus the learner's."""
    own = row["learner_logprobs"]
    columns = zip(row["response_ids"], row["versions"], row["response_mask"], row["behavior_logprobs"], own, strict=True)
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
    """The decoder of the policy that the run wrote, or else started from; None where neither is there."""
    folders = (run_dir / "policy", Path(options.get("model", {}).get("path", "") or run_dir / "policy"))
    found = next((folder for folder in folders if any(folder.glob("tokenizer*"))), None)
    return None if found is None else load_decoder(str(found), special_tokens=True)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 5)
