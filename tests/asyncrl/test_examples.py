"""The example scripts in examples/, run for a few steps."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.cli.quickstart import with_quickstart_assets
from examples.one_step import one_step
from examples.ppo_single_controller import OPTIONS, PPOTrainer
from tests.support.ray_cluster import ENVIRONMENT

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="SGLang is not installed"),
]


@pytest.fixture(scope="module")
def trained(cluster, tmp_path_factory):
    """Yield the PPO example's trainer after two steps, and the metrics of both steps. The policy had no warm start.

    As in the example, four ranks form a mesh of dp x sp = 2 x 2.
    """
    folder = tmp_path_factory.mktemp("ppo")
    options = ["total_steps=2", "algorithm.groups_per_step=4", "algorithm.samples_per_prompt=2"]
    run = with_quickstart_assets(compose_run([*OPTIONS, *options, f"output_dir={folder}"]))
    trainer, steps = PPOTrainer(run, run.model.path, str(folder), lambda _, text: float(len(text) % 3)), []
    try:
        trainer.fit(lambda step, metrics: steps.append(metrics))
        yield trainer, steps
    finally:
        trainer.stop()


def test_the_ppo_example_makes_its_steps_with_finite_metrics(trained):
    _, steps = trained
    assert len(steps) == 3
    for metrics in steps[:2]:
        assert metrics["actor/grad_norm"] > 0
        assert metrics["critic/grad_norm"] > 0
        assert all(math.isfinite(value) for value in metrics.values())


def test_the_engines_of_the_ppo_example_sample_from_the_trained_weights(trained):
    trainer, _ = trained
    batch = trainer.generated(trainer.held_out[:8], do_sample=True)
    trainer.on_all("trainer_mode")
    own = trainer.groups["actor_rollout"].compute_log_prob(batch).batch["old_log_probs"]
    start = trainer.groups["ref"].compute_ref_log_prob(batch).batch["ref_log_prob"]
    np.testing.assert_allclose(batch.batch["rollout_log_probs"], own, atol=1e-3)
    assert not np.allclose(batch.batch["rollout_log_probs"], start, atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_ppo_example_raises_the_greedy_reward_of_the_quickstart_in_eight_steps(tmp_path):
    """In the run that docs/architecture.md quotes, the reward rose from 0.55 to 0.84."""
    ended = subprocess.run(
        [sys.executable, "-m", "examples.ppo_single_controller", "total_steps=8", f"output_dir={tmp_path}"],
        cwd=Path(__file__).parents[2],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    rewards = [float(value) for value in re.findall(r"^step \d+: .*'greedy_reward': ([\d.]+)", ended.stdout, re.M)]
    assert len(rewards) == 9
    assert rewards[-1] > rewards[0] + 0.15, rewards


async def test_the_one_step_example_serves_the_trained_weights(tmp_path):
    metrics, engine, ledger = await one_step(str(tmp_path))
    assert metrics["grad_norm"] > 0
    assert engine.version == ledger.learner_version == 1
