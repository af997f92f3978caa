"""The report of simulated runs, whose figures are known, and of runs with damaged files."""

import itertools
import json
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from asyncrl.core.record import Pool, Recorder
from asyncrl.metrics import BUSY, read_life
from asyncrl.profile import charts
from asyncrl.profile.attribution import Attribution, LiveUse
from asyncrl.profile.report import RunReport, advice_file, write_report
from asyncrl.profile.trace import FOLDER, Span, Trace
from learner.trajectory_log import SCHEMA
from tests.asyncrl.test_run_lives import make_life
from tests.asyncrl.test_samples import keep
from tests.support.checkpoints import save
from tests.support.traces import record_run, trace_of

NUM_STEPS, GROUPS_PER_STEP = 8, 8


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    record_run(folder, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP, max_lag=2)
    return folder


@pytest.fixture(scope="module")
def document(run_dir):
    return RunReport(run_dir).document()


def until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def columns_of(pool):
    return np.array([pool["busy"], *pool["idle"].values()])


def test_the_shares_of_each_timeline_column_sum_to_one(document):
    for pool, capacity in (("learner", 2), ("fleet", 16)):
        columns = columns_of(document["timeline"][pool])
        assert document["timeline"][pool]["capacity"] == capacity
        assert columns.sum(axis=0) == pytest.approx(np.ones(columns.shape[1]), abs=2e-3)
    assert [version for _, version in document["timeline"]["publishes"]] == list(range(1, NUM_STEPS + 1))[:-1]
    assert max(document["timeline"]["stored"]) > 0


def test_a_bar_has_the_duration_of_its_step(document, run_dir):
    part = document["steps"]
    bars = np.array([part["busy_s"], *part["idle_s"].values()]).sum(axis=0)
    windows = charts.Trace.load(run_dir).steps
    assert part["labels"] == [str(step) for step in range(NUM_STEPS)]
    assert bars == pytest.approx([window.duration / 1e9 for window in windows], abs=2e-3)


def test_a_bar_shows_the_mean_of_several_steps_if_there_are_many(run_dir, monkeypatch):
    monkeypatch.setattr(charts, "MAX_BARS", 3)
    trace = charts.Trace.load(run_dir)
    part = charts.steps(Attribution.of(trace), trace.steps)
    assert part["labels"] == ["0–2", "3–5", "6–7"]
    whole = [sum(window.duration for window in trace.steps[bar]) / 1e9 / n for bar, n in ((slice(3), 3),)]
    assert part["busy_s"][0] + sum(values[0] for values in part["idle_s"].values()) == pytest.approx(whole[0], abs=2e-3)


def test_the_lag_histogram_has_every_trained_group_within_the_bound(document):
    part = document["lag"]
    assert part["lags"] == list(range(part["bound"] + 1))
    total = sum(sum(part[name]) for name in ("none", "before", "in_queue"))
    assert total == pytest.approx(NUM_STEPS * GROUPS_PER_STEP, abs=1e-2)


def test_a_fill_curve_ends_at_the_complete_batch_and_marks_its_tail(document):
    for curve in document["fill"]["curves"]:
        times, shares = zip(*curve["points"], strict=True)
        assert times[-1] == 0.0
        assert shares[-1] == 1.0
        assert list(times) == sorted(times)
        assert shares[curve["tail"]] <= 0.95 < shares[curve["tail"] + 1]


def test_the_publish_chart_has_the_recorded_times_of_the_stages(document):
    rows = {row["name"]: (row["start_s"], row["end_s"]) for row in document["publishes"]["stages"]}
    assert rows["copy"] == (0.0, 0.006)
    assert rows["pause and load"] == (0.026, 0.041)
    assert rows["re-prefill"] == (0.041, 0.046)
    assert set(document["publishes"]["total_s"]) == {0.041}


def test_the_length_histogram_counts_every_sample(document):
    part = document["lengths"]
    assert len(part["edges"]) == len(part["trained"]) + 1
    assert sum(part["trained"]) == 2 * NUM_STEPS * GROUPS_PER_STEP
    assert sum(part["generated"]) >= sum(part["trained"]) + sum(part["dropped"])


def test_the_report_lists_missing_parts_by_name(document):
    assert set(document["absent"]) == {"frontier", "samples"}
    assert "asyncrl plan" in document["absent"]["frontier"]


def test_the_report_of_a_run_before_its_first_step_explains_missing_charts(tmp_path):
    record_run(tmp_path, num_steps=0)
    document = RunReport(tmp_path).document()
    assert document["absent"]["timeline"] == "No learner step is finished yet."
    assert len(document["members"]["rows"]) == 2


def test_the_member_table_shows_states_activities_and_epochs():
    def span(lane, start, kind="member", cause="", is_open=True):
        return Span(lane=lane, kind=kind, start=start, end=99, cause=cause, process="rollout-0", is_open=is_open)

    fleet = [(f"engine-{rank}", "capacity", 0, 8) for rank in range(4)]
    trace = trace_of(fleet=[*fleet, ("engine-1/worker", "epoch", 3, 2), ("engine-2/worker", "epoch", 3, 1)])
    spans = (
        span("engine-0/worker", 0, cause="starting", is_open=False),
        span("engine-0/worker", 5, cause="ready"),
        span("engine-0", 6, kind="pause"),
        span("engine-1/worker", 5, cause="catching_up"),
        span("engine-2/worker", 6, cause="backoff"),
        span("engine-2", 6, kind="pause"),
    )
    rows = charts.members(replace(trace, spans=spans, end=99))["rows"]
    assert [row[:3] for row in rows] == [
        ["engine-0", "ready, loading weights", "0"],
        ["engine-1", "catching up", "2"],
        ["engine-2", "backoff", "1"],
        ["engine-3", "not recorded", "0"],
    ]


def test_a_version_is_published_without_engines_that_join_later_or_have_ended():
    versions = [(0, 0, 0), (1, 0, 0), (0, 20, 1), (1, 25, 1), (0, 40, 2), (2, 60, 2), (0, 70, 3), (2, 80, 3)]
    trace = trace_of(fleet=[(f"engine-{rank}", "version", *change) for rank, *change in versions], steps=(10, 100))
    ended = Span("engine-1/worker", "member", 50, 100, cause="failed", process="controller")
    trace = replace(trace, spans=(*trace.spans, ended))
    assert charts.timeline(trace, Attribution.of(trace))["publishes"] == [[1.5e-08, 1], [4e-08, 2], [7e-08, 3]]


def test_the_report_of_a_resumed_run_says_where_each_life_ended_and_the_next_began(tmp_path):
    first = make_life(tmp_path / "1", steps=12, status=143)
    second = make_life(tmp_path / "2", resumed=save(first / "checkpoints", 12), steps=30)
    third = make_life(tmp_path / "3", resumed=save(second / "checkpoints", 24), steps=31)
    record_run(third)
    facts = RunReport(third).document()["run"]["facts"]
    ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(read_life(first).ended_s))
    assert f"life 1 of 3, 1: steps 0 to 11, stopped at {ended} · " in facts
    assert "life 2 of 3, 2: steps 12 to 23, killed · this life begins with step 24" in facts


def test_the_report_refuses_a_folder_without_a_record(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no record"):
        write_report(tmp_path)


def test_the_report_is_one_file_without_external_links(run_dir):
    page = write_report(run_dir).read_text()
    assert "default-src 'none'" in page
    assert not any(word in page for word in ('src="http', "@import", '<link rel="stylesheet'))
    assert json.loads(page.partition('id="document">')[2].partition("</script>")[0])["run"]["title"].startswith("run")


def test_a_sample_with_a_script_end_tag_stays_text(tmp_path):
    record_run(tmp_path)
    keep(tmp_path, "train", 1, 0.5)
    file = next(tmp_path.glob("samples/*.parquet"))
    rows = pq.read_table(file).to_pylist()
    pq.write_table(pa.Table.from_pylist([rows[0] | {"response": "</script><script>alert(1)</script>"}]), file)
    page = write_report(tmp_path).read_text()
    assert "<script>alert" not in page
    assert RunReport(tmp_path).document()["samples"][0]["response"].startswith("</script>")


def test_trained_samples_show_versions_and_log_prob_differences(tmp_path):
    record_run(tmp_path)
    (tmp_path / "policy").mkdir()
    vocabulary = {letter: place for place, letter in enumerate("abcdefghij")}
    Tokenizer(models.WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "policy" / "tokenizer.json"))
    (tmp_path / "tokens").mkdir()
    row = {
        "group_id": 7, "attempt": 0, "prompt_ids": [5, 6], "response_ids": [7, 8, 9],
        "response_mask": [True, True, False],
        "behavior_logprobs": [-1.0, -2.0, 0.0], "learner_logprobs": [-1.25, -1.5, 0.0], "versions": [3, 4, -1],
        "reward": 1.0, "advantage": 0.5, "lag": 1,
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), tmp_path / "tokens" / "step_00000004_rank0.parquet")
    (sample,) = RunReport(tmp_path).document()["samples"]
    assert [(token["version"], token["difference"]) for token in sample["tokens"]] == [(3, 0.25), (4, -0.5), (-1, None)]
    assert (sample["kind"], sample["oldest_version"], sample["newest_version"]) == ("trained", 3, 4)
    assert ([token["text"] for token in sample["tokens"]], sample["response"]) == (["h", "i", "j"], "hij")


def test_the_live_use_equals_the_attribution_of_the_whole_run(run_dir):
    use = LiveUse(run_dir).read()
    attribution = Attribution.of(charts.Trace.load(run_dir))
    for pool, mine in ((Pool.learner, use.learner), (Pool.fleet, use.fleet)):
        whole = attribution.total(pool)
        assert mine.utilisation == pytest.approx(whole.utilisation)
        assert mine.idle_s == pytest.approx({cause: time / 1e9 for cause, time in whole.idle.items()})
        assert sum(mine.recent.values()) == pytest.approx(1.0)
        assert mine.recent[BUSY] > 0
    assert (use.learner.capacity, use.fleet.capacity) == (2, 16)


def test_the_report_includes_records_that_were_added_later(tmp_path):
    live = LiveUse(tmp_path)
    with pytest.raises(FileNotFoundError):
        live.read()
    record_run(tmp_path, num_steps=2)
    first = live.read()
    assert first is not None
    assert live.read() == first


spans = st.tuples(st.integers(0, 100), st.integers(1, 30), st.integers(1, 4)).map(lambda s: (s[0], s[0] + s[1], s[2]))


@given(st.lists(spans, min_size=1, max_size=12), st.integers(1, 9))
def test_the_span_times_of_all_columns_sum_to_the_time_in_the_window(rows, count):
    edges = np.linspace(20, 80, count + 1)
    expected = [
        sum(places * max(0.0, min(end, right) - max(start, left)) for start, end, places in rows)
        for left, right in itertools.pairwise(edges)
    ]
    assert charts.overlaps(np.array(rows, dtype=float), edges) == pytest.approx(expected, abs=1e-6)


def test_a_pause_without_a_version_belongs_to_the_next_served_version(run_dir):
    trace = charts.Trace.load(run_dir)
    nameless = [replace(span, version=-1) if span.kind in ("pause", "re_prefill") else span for span in trace.spans]
    named, found = charts.publishes(trace), charts.publishes(replace(trace, spans=tuple(nameless)))
    assert found["stages"] == named["stages"]
    assert found["pause_s"] == named["pause_s"] == [0.015] * NUM_STEPS


def test_a_re_prefill_before_its_version_record_belongs_to_the_previous_pause(run_dir):
    trace = charts.Trace.load(run_dir)
    nameless = tuple(replace(span, version=-1) if span.kind == "re_prefill" else span for span in trace.spans)
    late = tuple(replace(level, time=level.time + 1_000) for level in trace.levels)
    found = charts.publishes(replace(trace, spans=nameless, levels=late))
    assert found["stages"] == charts.publishes(trace)["stages"]


def test_the_report_uses_singular_and_plural_of_rank_and_engine(run_dir, document):
    ranks, engines = (len(charts.Trace.load(run_dir).lanes(pool)) for pool in (Pool.learner, Pool.fleet))
    expected = f"{ranks} learner rank{'s' * (ranks > 1)} and {engines} engine{'s' * (engines > 1)}"
    assert expected in document["run"]["facts"].split(" · ")


def test_a_truncated_sample_file_is_named_in_place_of_the_samples_only(tmp_path):
    record_run(tmp_path)
    (tmp_path / "tokens").mkdir()
    torn = tmp_path / "tokens" / "step_00000004_rank0.parquet"
    torn.write_bytes(b"PAR1")
    document = RunReport(tmp_path).document()
    assert set(document["absent"]) == {"frontier", "samples"}
    assert f"{torn} must be a whole parquet file" in document["absent"]["samples"]
    assert "delete it" in document["absent"]["samples"]


def test_a_truncated_tokenizer_is_named_in_place_of_the_samples(tmp_path):
    record_run(tmp_path)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "tokenizer.json").write_text("{")
    (tmp_path / "tokens").mkdir()
    pq.write_table(SCHEMA.empty_table(), tmp_path / "tokens" / "step_00000004_rank0.parquet")
    assert f"{tmp_path}/policy/tokenizer.json" in RunReport(tmp_path).document()["absent"]["samples"]


DAMAGED = ["", '{"a": ', "null", "{}", "[]"]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_plan_is_named_in_place_of_the_frontier(tmp_path, text):
    record_run(tmp_path)
    (tmp_path / "plan.json").write_text(text)
    absent = RunReport(tmp_path).document()["absent"]
    assert absent["frontier"].startswith(f"{tmp_path}/plan.json must hold a JSON object with curves, got ")
    assert set(absent) == {"frontier", "samples"}


@pytest.mark.parametrize("text", [*DAMAGED, '{"advice": {}}', '{"advice": 3}'])
def test_damaged_advice_is_named_in_place_of_the_advice(tmp_path, text):
    record_run(tmp_path)
    advice_file(tmp_path).write_text(text)
    document = RunReport(tmp_path).document()
    assert document["advice"].startswith(f"{tmp_path}/advice.json must hold ")
    assert "timeline" in document


@pytest.mark.parametrize("line", ['{"step": 0}', '{"step": ', "null"])
def test_a_damaged_last_line_of_metrics_is_named_among_the_figures(tmp_path, line):
    record_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    document = RunReport(tmp_path).document()
    (reward,) = (figure for figure in document["figures"] if figure["name"] == "reward")
    assert reward["value"] == "not known"
    assert reward["note"].startswith(f"line 1 of {tmp_path}/metrics.jsonl must hold a JSON object with step, reward")


def test_the_report_ignores_an_incomplete_last_line_of_metrics(tmp_path):
    record_run(tmp_path)
    whole = {"step": 3, "reward": 0.5, "generated_tokens": 1200}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(whole) + '\n{"step": 4, "rew')
    figures = {figure["name"]: figure["value"] for figure in RunReport(tmp_path).document()["figures"]}
    assert (figures["reward"], figures["tokens generated"]) == ("0.500", "1,200")


def test_a_truncated_summary_still_means_that_the_run_has_ended(tmp_path):
    record_run(tmp_path)
    (tmp_path / "summary.json").write_text("")
    assert RunReport(tmp_path).document()["run"]["state"] == "the run has ended"


@pytest.mark.parametrize("text", ["", '{"a": ', "buffer:\n", "model: 3\n", "- 1\n"])
def test_the_report_refuses_a_damaged_configuration_and_names_it(tmp_path, text):
    record_run(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/config\.yaml must hold the options of the run.*restore the file"
    ) as got:
        write_report(tmp_path)
    assert "\n" not in str(got.value)


def test_the_live_use_includes_the_time_between_steps(tmp_path):
    now = second = 1_000_000_000
    controller = Recorder(tmp_path / FOLDER, process="controller", pool=Pool.controller, clock=lambda: now)
    learner = Recorder(tmp_path / FOLDER, process="learner-0", pool=Pool.learner, clock=lambda: now)
    learner.span("update", lane="learner-0").close()
    until(lambda: all(path.stat().st_size for path in (tmp_path / FOLDER).glob("*.msgpack")))
    live = LiveUse(tmp_path)
    for step in range(3):
        span = controller.span("step", step=step, lane="controller")
        now += second
        span.close()
        now += 1000
        until(lambda num=step + 1: sum(not one.is_open for one in Trace.load(tmp_path).steps) == num)
        use = live.read()
    for recording in (controller, learner):
        recording.close()
    assert use.learner.busy_s + sum(use.learner.idle_s.values()) == pytest.approx(3.000002, abs=1e-9)
