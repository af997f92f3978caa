"""Trackers: the records in Prometheus, Weights & Biases and MLflow, and the effect of a failed tracker."""

import dataclasses
import importlib.util
import json
import logging
import re
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.metrics import Evaluation, PoolUse, RunUse, TrackedRun, Trackers, check_trackers
from asyncrl.metrics.trackers import PrometheusTracker, split_address
from tests.asyncrl.test_metrics import make_record

ROOT = Path(__file__).resolve().parents[2]
EVALUATION = Evaluation(sampled=0.25, greedy=0.75, num_prompts=16, policy_version=2)


def record(step):
    groups = {"queued": 8, "leased": 5, "stored": 3, "planned": 2, "consumed": 4 * (step + 1), "dropped": 1}
    dropped = {"tokens_dropped_by_reason": {"stale": 7 * step}, "groups_dropped_by_reason": {"equal_rewards": step}}
    return dataclasses.replace(make_record(step), groups=groups, lags={0: 1, 2: 3}, failed_groups=step, **dropped)


def use(scale):
    learner = PoolUse(name="learner", capacity=2, busy_s=3.0 * scale, idle_s={"slow generation": 1.0 * scale})
    fleet = PoolUse(name="fleet", capacity=8, busy_s=12.0 * scale, idle_s={"publish pause": 4.0 * scale})
    return RunUse(learner=learner, fleet=fleet)


def tracked(tmp_path):
    return TrackedRun(
        experiment="sorting",
        folder=tmp_path,
        options={"seed": 3, "buffer": {"max_lag": 2, "filters": []}},
        prometheus_address="127.0.0.1:0",
    )


@pytest.fixture
def prometheus():
    pytest.importorskip("prometheus_client")
    tracker = PrometheusTracker("127.0.0.1:0", "sorting")
    yield tracker
    tracker.close()


def page_of(tracker):
    with urllib.request.urlopen(tracker.place, timeout=5) as answer:
        return dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))


def test_prometheus_shows_current_values_and_totals(prometheus):
    for step in (0, 1):
        prometheus.record(record(step))
        prometheus.record(use(step + 1))
    prometheus.record(EVALUATION)
    shown = page_of(prometheus)
    assert shown['asyncrl_idle_seconds_total{cause="slow generation",pool="learner"}'] == "2.0"
    assert shown['asyncrl_busy_seconds_total{pool="fleet"}'] == "24.0"
    assert shown['asyncrl_capacity{pool="fleet"}'] == "8.0"
    assert shown['asyncrl_groups{state="stored"}'] == "3.0"
    assert shown['asyncrl_lag_bucket{le="1.0"}'] == "2.0"
    assert shown['asyncrl_lag_bucket{le="2.0"}'] == "8.0"
    assert shown["asyncrl_publish_seconds_count"] == "2.0"
    assert shown['asyncrl_tokens_total{kind="generated"}'] == "200.0"
    assert shown['asyncrl_tokens_total{kind="trained"}'] == "4000.0"
    assert shown["asyncrl_failed_groups_total"] == "1.0"
    assert shown['asyncrl_dropped_groups{reason="equal_rewards"}'] == "1.0"
    assert shown['asyncrl_dropped_tokens{reason="stale"}'] == "7.0"
    assert shown['asyncrl_evaluation{decoding="greedy"}'] == "0.75"
    assert shown['asyncrl_policy_version{pool="learner"}'] == "2.0"
    assert shown['asyncrl_step_metric{name="learner.entropy"}'] == "1.25"
    assert shown['asyncrl_run_info{experiment="sorting"}'] == "1.0"


def test_a_falling_total_does_not_decrease_a_counter(prometheus):
    for scale in (2, 1, 3):
        prometheus.record(use(scale))
    assert page_of(prometheus)['asyncrl_busy_seconds_total{pool="learner"}'] == "9.0"


def test_the_counters_of_a_resumed_run_begin_at_zero(prometheus):
    prometheus.go_on(record(8))
    prometheus.go_on(EVALUATION)
    prometheus.record(record(9))
    shown = page_of(prometheus)
    assert shown['asyncrl_tokens_total{kind="generated"}'] == "100.0"
    assert shown["asyncrl_failed_groups_total"] == "1.0"
    assert shown["asyncrl_publish_seconds_count"] == "1.0"


def test_grafana_uses_only_exported_metrics(prometheus):
    prometheus.record(record(0))
    prometheus.record(use(1))
    prometheus.record(EVALUATION)
    exported = {name.partition("{")[0] for name in page_of(prometheus)}
    dashboard = json.loads((ROOT / "configs" / "grafana.json").read_text())
    drawn = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for expression in drawn for name in re.findall(r"asyncrl_\w+", expression)}
    assert named <= exported
    assert {
        "asyncrl_idle_seconds_total",
        "asyncrl_groups",
        "asyncrl_lag_bucket",
        "asyncrl_publish_seconds_sum",
    } <= named


def test_a_used_prometheus_address_is_refused(prometheus, tmp_path):
    taken = dataclasses.replace(tracked(tmp_path), prometheus_address=f"127.0.0.1:{prometheus.port}")
    with pytest.raises(ValueError, match=r"tracker=prometheus cannot be opened: prometheus_address=127\.0\.0\.1:\d+"):
        Trackers.open(["prometheus"], taken)


@pytest.mark.parametrize("address", ["9464", "localhost", "localhost:", "localhost:99999", ""])
def test_an_invalid_prometheus_address_is_refused(address):
    with pytest.raises(ValueError, match="prometheus_address must be HOST:PORT"):
        split_address(address, "prometheus_address")


def test_unknown_trackers_and_missing_packages_are_refused_by_name(monkeypatch):
    with pytest.raises(ValueError, match=r"tracker must be a list .*\['wandb', .*\], got 'tensor'"):
        check_trackers(["tensor"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tracker=mlflow needs the package mlflow.*pip install 'asyncrl\[mlflow\]'"):
        check_trackers(["mlflow"])


def test_a_failing_tracker_logs_a_warning_and_the_others_continue(caplog):
    seen = []

    def fail(*_):
        raise ConnectionError("no route")

    broken = SimpleNamespace(record=fail, close=fail)
    works = SimpleNamespace(record=seen.append, close=lambda: seen.append("closed"))
    trackers = Trackers({"broken": broken, "works": works})
    with caplog.at_level(logging.WARNING):
        trackers.record(record(0))
        trackers.record(EVALUATION)
        trackers.record(use(1))
        trackers.close()
    assert trackers.num_failed == {"broken": 4, "works": 0}
    assert "tracker broken failed (4 failures so far): no route" in caplog.text
    assert seen == [record(0), EVALUATION, use(1), "closed"]


def test_mlflow_records_options_steps_and_evaluations(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    trackers = Trackers.open(["mlflow"], tracked(tmp_path))
    trackers.record(record(0))
    trackers.record(dataclasses.replace(record(1), reward=float("nan")))
    trackers.record(EVALUATION)
    trackers.record(use(1))
    trackers.close()
    assert trackers.num_failed == {"mlflow": 0}
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("sorting")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params == {"seed": "3", "buffer.max_lag": "2", "buffer.filters": "[]"}
    assert run.data.metrics["learner/loss"] == -0.5
    assert run.data.metrics["use/fleet/publish pause"] == 0.25
    assert [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "reward")] == [(0, 0.25)]
    assert [point.step for point in client.get_metric_history(run.info.run_id, "evaluation/greedy")] == [2]


def test_wandb_records_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = Trackers.open(["wandb"], tracked(tmp_path))
    assert trackers.lines[0].startswith("tracker wandb: offline, in ")
    trackers.record(record(0))
    trackers.record(EVALUATION)
    trackers.record(use(1))
    trackers.close()
    assert trackers.num_failed == {"wandb": 0}
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged = written.read_bytes()
    assert all(name in logged for name in (b"learner/loss", b"evaluation/greedy", b"use/fleet/busy"))


def test_the_url_of_an_ipv6_address_has_its_host_in_brackets():
    pytest.importorskip("prometheus_client")
    tracker = PrometheusTracker("[::1]:0", "sorting")
    try:
        assert tracker.place == f"http://[::1]:{tracker.port}/metrics"
        assert page_of(tracker)
    finally:
        tracker.close()
