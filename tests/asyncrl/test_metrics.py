import dataclasses
import errno
import io
import json

import pytest
from rich.console import Console
from rich.text import Text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl.core.types import AnsweredPrompt, TokenAccount
from asyncrl.metrics import (
    BUSY,
    Evaluation,
    MetricsWriter,
    PoolUse,
    RunUse,
    StepRecord,
    TerminalView,
    TrainingResult,
    evaluation_of,
    plot_reward,
    summary_document,
    terminal,
    write_json,
)
from asyncrl.metrics.run_records import DiskError
from asyncrl.metrics.terminal import sparkline


def make_record(step, reward=0.25):
    return StepRecord(
        step=step,
        time_s=0.5 * (step + 1),
        reward=reward,
        reward_std=0.5,
        equal_reward_groups=0.5,
        truncated_samples=0.0,
        samples_per_group=3.5,
        response_length=7.5,
        lag_mean=1.0,
        lag_max=2,
        generated_tokens=100 * (step + 1),
        rollout_tokens_per_s=4000.0,
        learner_tokens_per_s=20000.0,
        buffer_groups=3,
        leased_groups=5,
        engine_version=step,
        plan_wait_s=0.01,
        update_s=0.1,
        publish_s=0.02,
        learner={"loss": -0.5, "entropy": 1.25, "behavior_kl": 0.0125, "grad_norm": 0.75},
        metrics={"reward.format": 0.125},
        episodes={"unknown_keys": 0, "lost_answers": 3},
    )


def make_result():
    return TrainingResult(
        policy_version=4,
        train_wall_s=10.0,
        tokens=TokenAccount(generated=10, trained=6, dropped=2, buffered=1, in_flight=1),
        max_lag_realised=2,
        lag_histogram={0: 1, 2: 3},
        tokens_dropped={"drained": 2},
        groups_failed={"reward": 2},
        samples_per_group=3.5,
    )


def test_a_step_is_one_line_of_json_and_tensorboard_events(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(make_record(0))
    writer.write(make_record(1))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert (lines[0]["learner.loss"], lines[0]["reward.format"]) == (-0.5, 0.125)
    assert any((tmp_path / "tensorboard").iterdir())


def test_after_a_return_to_a_checkpoint_metrics_hold_each_step_once(tmp_path):
    writer = MetricsWriter(tmp_path)

    def evaluate(version):
        writer.evaluation(Evaluation(sampled=0.25, greedy=0.75, num_prompts=256, policy_version=version))

    evaluate(0)
    for step in range(4):
        writer.write(make_record(step, reward=0.25))
    for version in (2, 3):
        evaluate(version)
    for step in (2, 3, 4):
        writer.write(make_record(step, reward=0.5))
    writer.close()

    def lines_of(name, *keys):
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return [tuple(line[key] for key in keys) for line in lines]

    assert lines_of("metrics.jsonl", "step", "reward") == [(0, 0.25), (1, 0.25), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert lines_of("metrics.lost.jsonl", "step", "reward") == [(2, 0.25), (3, 0.25)]
    assert lines_of("evaluations.jsonl", "policy_version") == [(0,), (2,)]
    assert lines_of("evaluations.lost.jsonl", "policy_version") == [(3,)]


def test_an_evaluation_is_one_line_of_json_and_a_point_at_its_version(tmp_path):
    writer = MetricsWriter(tmp_path)
    for version in (0, 20):
        writer.evaluation(Evaluation(sampled=0.25, greedy=0.75, num_prompts=256, policy_version=version))
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["policy_version"], line["greedy"]) for line in lines] == [(0, 0.75), (20, 0.75)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in events.Scalars("evaluation/sampled")] == [(0, 0.25), (20, 0.25)]


def test_all_files_get_estimates_with_intervals_per_data_source(tmp_path):
    evaluation = evaluation_of(
        [
            AnsweredPrompt(group_id=0, data_source="math", sampled=(1.0, 0.0, 0.0, 0.0), greedy=1.0),
            AnsweredPrompt(group_id=1, data_source="code", sampled=(1.0, 1.0, 1.0, 1.0), greedy=0.0),
        ],
        policy_version=3,
        num_prompts=2,
        pass_reward=1.0,
        incomplete={},
        took_s=1.0,
    )
    writer = MetricsWriter(tmp_path)
    writer.evaluation(evaluation)
    writer.close()
    line = json.loads((tmp_path / "evaluations.jsonl").read_text())
    assert line["estimates"]["pass@2"]["mean"] == 0.75
    assert line["by_source"]["math"]["pass@2"]["mean"] == 0.5
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    names = set(events.Tags()["scalars"])
    assert {"evaluation/math/pass@4", "evaluation/pass@2/low", "evaluation/code/greedy/high"} <= names
    plot_reward(tmp_path / "reward.png", [make_record(0)], [evaluation])


def test_the_summary_has_all_documented_numbers(tmp_path):
    before = Evaluation(sampled=0.25, greedy=0.75, num_prompts=256, policy_version=0)
    after = Evaluation(sampled=0.95, greedy=1.0, num_prompts=256, policy_version=4)
    document = summary_document(
        experiment="quickstart",
        seed=0,
        total_steps=4,
        max_lag=2,
        result=make_result(),
        before=before,
        after=after,
        wall_s={"total": 30.0, "start": 15.0},
    )
    write_json(tmp_path / "summary.json", document)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval"]["before"]["sampled"] == 0.25
    assert summary["eval"]["after"]["greedy"] == 1.0
    assert summary["max_lag"] == {"bound": 2, "realised": 2, "before_resume": 0, "histogram": {"0": 1, "2": 3}}
    assert summary["tokens"]["generated"] == 10
    assert (summary["groups_failed"], summary["samples_per_group"]) == ({"reward": 2}, 3.5)
    assert summary["overlap"] is None
    assert (summary["policy_version"], summary["wall_s"], summary["train_wall_s"]) == (4, 30.0, 10.0)


def test_the_reward_plot_works_with_a_single_step(tmp_path):
    plot_reward(tmp_path / "reward.png", [make_record(0)], [])
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_terminal_the_view_writes_plain_lines():
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=2, console=Console(file=output, width=200))
    with view:
        with view.waiting_for("buffer"):
            pass
        view.step(make_record(0))
        view.step(make_record(1))
    text = output.getvalue()
    assert "waiting for buffer" in text
    assert "buffer: ready" in text
    assert "step 1/2" in text
    # The fleet's rate is the average over both steps (100 tokens in 0.5 s), not the 4,000 tokens/s of the last step.
    assert "step 2/2  reward 0.250  lag 1.00 (max 2)  rollout 200 tok/s  learner 20,000 tok/s" in text
    assert "entropy 1.25  kl 0.0125  gradient 0.75  buffer 3 stored, 5 generating  left 0:00" in text
    assert "\x1b" not in text


class GoneOutput(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_continues_after_the_reader_of_its_output_exits(is_terminal, monkeypatch, caplog):
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout", GoneOutput())
    view = TerminalView(title="run", total_steps=2)
    with view, view.waiting_for("buffer"):
        view.step(make_record(0))
        view.say("more")
    assert caplog.text.count("the terminal cannot be written: Broken pipe; the run goes on without it") == 1


def test_the_remaining_time_of_a_resumed_run_uses_its_own_steps(monkeypatch):
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=220, console=Console(file=output, width=250))
    with view:
        for step in (99, 100, 219):
            view.step(dataclasses.replace(make_record(step), time_s=2.0 * (step - 98)))
    assert [line.rpartition(" ")[2] for line in output.getvalue().splitlines()] == ["4:00", "3:58", "0:00"]


def test_a_return_to_the_first_shown_step_shows_the_remaining_time():
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=20, console=Console(file=output, width=250))
    for place, step in enumerate((0, 1, 2, 0)):
        view.step(dataclasses.replace(make_record(step), time_s=2.0 * (place + 1)))
    assert output.getvalue().splitlines()[-1].endswith("left 0:38")


def test_the_live_view_shows_the_step_and_awaited_parts():
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=2, console=Console(file=output, width=160, force_terminal=True))
    with view.waiting_for("rollout fleet"), view:
        view.step(make_record(0))
    text = output.getvalue()
    assert "waiting for rollout fleet" in text
    assert "1/2" in text


@pytest.mark.parametrize("width", [40, 80])
def test_the_live_view_shows_whole_names_and_values_on_a_narrow_terminal(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    view = TerminalView(title="run", total_steps=20, console=console)
    view.step(make_record(0))
    view.use(make_use())
    console.print(view.render())
    lines = console.file.getvalue().splitlines()
    assert set(lines[1]) <= set("│ ━╸╺"), "the progress bar must have its own line"
    for shown in ("step 1/20", "reward 0.250", "lag 1.00 (max 2)", "gradient 0.75", "buffer 3 stored, 5 generating"):
        assert any(shown in line for line in lines), shown


def test_a_resumed_run_reports_its_lag_separately_from_the_earlier_lag(tmp_path):
    result = dataclasses.replace(make_result(), max_lag_realised=0, max_lag_before=4)
    summary = summary_document(
        experiment="run",
        seed=0,
        total_steps=2,
        max_lag=0,
        result=result,
        before=None,
        after=None,
        wall_s={"total": 1.0, "start": 0.5},
        overlap={"step_s": 0.5, "ideal_step_s": 0.4, "utilisation": {"learner": 0.75, "fleet": 0.5}},
    )
    output = io.StringIO()
    TerminalView(title="run", total_steps=2, console=Console(file=output, width=200)).summary(summary, tmp_path)
    assert "lag       at most 0 of 0 learner steps (4 before resuming)" in output.getvalue()
    assert "failed    attempts at a prompt group: 2 by reward" in output.getvalue()
    words = "busy      learner 75%, fleet 50%; 0.500 s per step, 0.400 s for the slower pool alone; why: "
    assert words in output.getvalue()


def test_metrics_on_a_full_disk_raise_an_error_with_process_and_path(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    with pytest.raises(DiskError, match=r"the controller cannot write .*metrics\.jsonl: No space left on device"):
        writer.write(make_record(0))
    writer.close()


def make_use():
    learner = PoolUse(
        name="learner",
        capacity=2,
        busy_s=9.0,
        idle_s={"slow_generation": 3.0},
        recent={BUSY: 0.75, "slow_generation": 0.25},
    )
    fleet = PoolUse(name="fleet", capacity=8, busy_s=1.0, idle_s={}, recent={BUSY: 1.0})
    return RunUse(learner=learner, fleet=fleet)


def test_the_live_view_shows_the_use_of_pools_with_the_largest_idle_cause():
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=2, console=Console(file=output, width=160, force_terminal=True))
    with view:
        view.use(make_use())
        for step in (0, 1):
            view.step(make_record(step))
    text = Text.from_ansi(output.getvalue()).plain
    assert "slow generation 25%" in text
    assert "75%" in text
    assert "100%" in text
    assert "██" in text


def test_without_a_terminal_the_line_of_a_step_has_the_use_of_pools():
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=2, console=Console(file=output, width=250))
    with view:
        view.use(make_use())
        view.step(make_record(0))
    assert "learner at work 75% (slow generation 25%)  fleet at work 100%" in output.getvalue()


def test_a_sparkline_is_scaled_to_its_largest_value():
    assert sparkline([0, 1, 2]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""
