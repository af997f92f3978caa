"""The program of ``asyncrl check-gpu``: its report, and the checks of learner and engine with tiny models."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest

from asyncrl.gpu_check import program
from asyncrl.gpu_check.program import Check, Result, State, results_of
from asyncrl.gpu_check.tasks import TOY, Setup, TaskFailed, run_task
from tests.support.ranks import run_on_ranks


@pytest.fixture
def setup(tmp_path):
    return Setup(device="cpu", num_gpus=1, sizes=TOY, model="", folder=str(tmp_path), timeout_s=120.0)


def right(name):
    return Result(name=name, state=State.passed)


def test_a_check_that_raises_gives_a_failed_result_after_its_earlier_results(setup):
    def run(_):
        yield right("first")
        raise TaskFailed("no such kernel")

    first, second = results_of(Check(name="two", run=run), setup)
    assert (first.name, first.state) == ("first", State.passed)
    assert (second.name, second.state) == ("two", State.failed)
    assert "no such kernel" in second.line()


def test_a_check_with_a_missing_package_is_skipped_and_names_the_package(setup):
    check = Check(name="serving", run=lambda _: iter([right("engine")]), needs=("no_such_package",))
    (result,) = results_of(check, setup)
    assert result.state is State.skipped
    assert "no_such_package" in result.line()


@pytest.mark.parametrize(
    ("num_gpus", "meshes"),
    [(1, {(1, 1)}), (2, {(1, 1), (2, 1), (2, 2)}), (8, {(1, 1), (8, 1), (8, 2), (8, 4)}), (3, {(1, 1), (3, 1)})],
)
def test_variants_cover_each_mesh_that_the_gpus_allow(setup, num_gpus, meshes):
    rows = program.variants_of(replace(setup, device="cuda", num_gpus=num_gpus))
    assert {row[:2] for row in rows} == meshes
    assert rows[0] == (1, 1, False, False)
    assert (1, 1, True, True) in rows


@pytest.mark.parametrize(
    ("cards", "layers"),
    [
        (["NVIDIA H100 80GB HBM3, 81559 MiB, 580.65, 9.0"], 4),
        (["NVIDIA H100 80GB HBM3, 81559 MiB, 580.65, 9.0", "NVIDIA A100-PCIE-40GB, 40960 MiB, 580.65, 8.0"], 2),
        (["NVIDIA L4, 23034 MiB, 580.65, 8.9"], 1),
        ([], 1),
    ],
)
def test_the_smallest_card_determines_the_size_of_the_models(cards, layers):
    assert program.layers_on(cards) == layers


def test_the_error_of_a_failed_task_has_the_end_of_its_log(setup):
    with pytest.raises(TaskFailed, match=r"exit status 1; the end of .*(?s:.*)no_such_tasks"):
        list(run_task(setup, "no_such_tasks:offload"))


def test_the_error_of_a_late_task_names_the_option_of_its_deadline(setup):
    with pytest.raises(TaskFailed, match="--timeout-s"):
        list(run_task(replace(setup, timeout_s=0.2), "learner_tasks:models", experts=False))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--only", "kernel"], "kernels, log_probs"), (["--device", "cuda"], "--device cpu")],
)
def test_wrong_arguments_are_refused_with_the_choices(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(program, "visible_gpus", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["check-gpu", *arguments])
    assert program.main() == 2
    assert words in capsys.readouterr().err


def measured(setup, name, options):
    """Run the task ``name`` of the GPU check. Returns the list of its measurements."""
    module, _, function = name.partition(":")
    return list(getattr(import_module(f"asyncrl.gpu_check.{module}"), function)(setup, **options))


@pytest.mark.long
@pytest.mark.parametrize("name", ["log_probs", "training", "offload", "checkpoint"])
def test_the_checks_of_the_learner_pass_at_toy_size(setup, monkeypatch, name):
    """The tasks of the check run in forks of one process that has imported torch.

    The real check starts a new process for each task.
    """

    def run_task(setup, task, *, num_ranks=1, **options):
        yield from run_on_ranks(num_ranks, measured, setup, task, options)[0]

    monkeypatch.setattr(program, "run_task", run_task)
    (check,) = [check for check in program.CHECKS if check.name == name]
    results = list(results_of(check, setup))
    assert [result.line() for result in results if result.state is not State.passed] == []
    assert len(results) == (4 if name == "training" else 1)


@pytest.mark.long
def test_the_program_prints_its_results_and_writes_a_report(tmp_path):
    found = check(tmp_path, "--only", "stack,kernels")
    assert {result["state"] for result in found.values()} == {"PASS"}
    assert found.keys() == {"packages", "/dev/shm", "open files", "kernel selection"}
    assert found["kernel selection"]["figures"] == {"selected": "sdpa"}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_learner_engines_and_runs_pass_the_check_at_toy_size(tmp_path):
    """This test is slow.

    `tests/rollout_fleet/test_sglang_engine.py` has faster tests of the same properties of an engine.
    """
    found = check(tmp_path, "--gpus", "2", "--only", "log_probs,training,offload,checkpoint,serving,runs")
    assert {result["state"] for result in found.values()} == {"PASS"}
    with_head, without_head = (found["output layer"]["figures"][head] for head in ("float32", "bfloat16"))
    assert 0 < with_head["mean"] < 0.03
    assert without_head["num_tokens"] > 100
    assert found["weights over folder tp=1"]["figures"]["versions_per_sample"] > 1
    assert found["release and resume tp=1"]["figures"]["cycles"] == 10
    assert "WeightsError" in found["damaged byte tp=1"]["number"]
    assert "train mixture ranks=1 sp=1 recompute" in found
    assert {"quickstart", "quickstart-colocated", "quickstart-engine-killed"} <= found.keys()


def check(folder, *arguments):
    """Run ``asyncrl check-gpu`` on the CPU. Returns its results by name."""
    command = [sys.executable, "-m", "asyncrl", "check-gpu", "--device", "cpu", "--output", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads((folder / "check.json").read_text())
    found = {result["name"]: result for result in report["results"]}
    assert done.returncode == 0, done.stdout
    assert all(name in done.stdout for name in found)
    return found
