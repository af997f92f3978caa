"""A user's own loss and advantage from a folder of their own, through the command line into Ray's workers."""

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OWN = """
from beside import SCALE
from learner.losses import LossTerms
from learner.losses import LOSSES
from learner.advantages import TokenAdvantages, returns_to_go, token_level


@LOSSES.register("my_name")
def scaled(inputs, config):
    per_token = -SCALE * inputs.columns["advantages"] * inputs.log_probs
    return LossTerms(per_token=per_token, metrics={"advantage_seen": inputs.columns["advantages"]})


@token_level
def sevens(batch, config, total):
    returns = returns_to_go(batch.rewards, batch.lengths, gamma=config.gamma)
    return TokenAdvantages(advantages=0 * returns + 7, returns=returns)
"""
FAST = [
    "rollout_fleet.engine=transformers",
    "sft.enabled=false",
    "evaluation.enabled=false",
    "algorithm.groups_per_step=4",
    "algorithm.samples_per_prompt=2",
]


@pytest.fixture
def own_folder(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "beside.py").write_text("SCALE = 0.5\n")
    return folder


def test_a_users_own_functions_are_trained_with(start, own_folder, tmp_path):
    names = ["algorithm.loss=own.py:my_name", "algorithm.advantage=own.py:sevens", "algorithm.num_mini_batches=2"]
    run = start("total_steps=2", *FAST, *names, output_dir=tmp_path / "out", cwd=own_folder)
    assert run.finish(timeout_s=240) == 0, run.output
    assert [record["learner.advantage_seen"] for record in run.records] == pytest.approx([7.0, 7.0])
    for record in run.records:
        assert 0 < record["learner.effective_sample_size"] <= 1.0 + 1e-6
        assert record["learner.behavior_kl"] >= -1e-6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.loss=own.py:missing", "own.py has no 'missing', only"),
        pytest.param("algorithm.advantage=absent.py:f", "there is no file", marks=pytest.mark.slow),
        pytest.param(
            "algorithm.loss=ppo",
            "algorithm.loss must be one of ['cispo', 'gspo', 'ppo_clip', 'reinforce']",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_name_fails_before_any_process_starts(start, own_folder, tmp_path, override, message):
    run = start(override, output_dir=tmp_path / "out", cwd=own_folder)
    assert run.finish(timeout_s=120) in (1, 2)
    assert message in run.lines[-1]
    assert "waiting for learner" not in run.output
    assert "warm start" not in run.output


def test_a_prompt_that_is_too_long_fails_before_the_warm_start(start, own_folder, tmp_path):
    run = start("data.max_prompt_tokens=6", output_dir=tmp_path / "out", cwd=own_folder)
    assert run.finish(timeout_s=120) == 1
    assert "data.max_prompt_tokens = 6" in run.lines[-1] + run.output
    assert not (run.run_dir / "logs" / "sft.log").exists()
    assert "warm start" not in run.output
