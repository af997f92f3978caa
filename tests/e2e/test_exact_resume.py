"""A run that was stopped or killed and then resumed ends with the same bits as an uninterrupted run."""

import json
import os
import random
import signal
import time

import pytest

from asyncrl.cli.audit_command import main as audit
from asyncrl.cli.runs_command import main as list_runs
from learner.checkpoint_folder import newest_checkpoint, read_progress
from tests.e2e.run_checks import assert_the_account_closes
from tests.support.training_run import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = 8
OPTIONS = [
    "rollout_fleet.engine=transformers",
    "rollout_fleet.transformers.reproducible=true",
    "buffer.max_lag=0",
    "buffer.order=tests.support.orders_of_mine:by_group",
    "sft.enabled=false",
    "evaluation.enabled=false",
    "algorithm.groups_per_step=4",
    "learner.restarts=0",
    f"rollout_fleet.reward={ROOT / 'tests/support/varied_reward.py'}:share_of_even_digits",
    f"total_steps={STEPS}",
    "ray.start_timeout_s=300",
]
TRAINED = ("reward", "response_length", "learner.loss", "learner.grad_norm")


def trained(run_dir):
    """Return a pair: the metrics `TRAINED` of each step, and the bytes of the policy after the last step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS)), "the metrics must have all steps"
    assert all(line["learner.grad_norm"] > 0 for line in lines), "the policy must change at each step"
    return [[line[name] for name in TRAINED] for line in lines], (run_dir / "policy" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def moments():
    """Return a random generator. It draws how many seconds after a step the test stops or kills the run."""
    seed = int(os.environ.get("ASYNCRL_FAULT_SEED", time.time_ns() % 10**6))
    print(f"ASYNCRL_FAULT_SEED={seed}")  # noqa: T201 - pytest shows it when the test fails
    return random.Random(seed)


def test_resumed_runs_end_with_the_same_bits_as_an_uninterrupted_run(start, moments, capsys, tmp_path):
    straight = start(*OPTIONS, "checkpoint.at_stop=false")
    assert straight.finish(900) == 0, straight.output
    want = trained(straight.run_dir)
    for number, options in ((signal.SIGTERM, []), (signal.SIGKILL, ["checkpoint.every_steps=2"])):
        ended = start(*OPTIONS, *options, output_dir=tmp_path / number.name)
        ended.wait_for_line("step 1/", 900)
        ended.wait_for_step(4)
        begin_s, end_s = (ended.records[step]["time_s"] for step in (1, 3))
        # Wait at most the time of two steps. The run must be stopped before its last step.
        time.sleep(moments.uniform(0.0, end_s - begin_s))
        ended.remember_family()
        if number is signal.SIGTERM:
            ended.process.terminate()
            assert ended.finish(300) == 128 + number, ended.output
        else:
            for pid in [ended.process.pid, *ended.family]:
                os.kill(pid, number)
            ended.process.wait(10)
        checkpoint = newest_checkpoint(ended.run_dir / "checkpoints")
        assert checkpoint is not None
        version = read_progress(checkpoint).version
        assert version >= (4 if number is signal.SIGTERM else 2)
        resumed = start(*OPTIONS, *options, f"checkpoint.resume={checkpoint}", output_dir=tmp_path / number.name)
        assert resumed.finish(900) == 0, resumed.output
        assert trained(resumed.run_dir) == want, f"{number.name} in step {version}"
        assert_the_account_closes(resumed.summary)
        assert audit([str(resumed.run_dir)]) == 0, "each trained token must have its receipts"
        if number is signal.SIGTERM:
            assert resumed.summary["tokens"]["trained"] == straight.summary["tokens"]["trained"]
            dropped = resumed.summary["tokens"]["dropped_by_reason"]
            assert not dropped.keys() - straight.summary["tokens"]["dropped_by_reason"].keys(), "no tokens may be lost"
    assert list_runs([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("(2 lives)") == 2
    assert "killed, " in shown
    assert "stopped, " in shown
