"""Runs with sequence-parallel ranks in two pools, or with pools that share devices."""

import numpy as np
import pytest

from learner.checkpoint_folder import named_checkpoints
from tests.e2e.run_checks import assert_the_account_closes

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

FAST = [
    "rollout_fleet.engine=transformers",
    "algorithm.groups_per_step=8",
    "evaluation.num_samples=1",
    "data.eval_max_prompts=16",
    "sft.enabled=false",
    "total_steps=5",
]
SP_PPO = ["experiment=ppo", "learner.num_ranks=2", "learner.sp_size=2", "learner.critic.warmup_steps=1"]


def finished(start, *overrides):
    run = start(*FAST, *overrides)
    assert run.finish(timeout_s=400) == 0, run.output
    assert [record["step"] for record in run.records] == list(range(5))
    assert_the_account_closes(run.summary)
    assert run.summary["tokens"]["trained"] == sum(record["learner.num_tokens"] for record in run.records)
    return run


@pytest.mark.parametrize(
    ("engine", "max_lag", "tp_size"),
    [("transformers", 2, 1), ("transformers", 0, 1), ("sglang", 1, 1), ("sglang", 1, 2)],
)
def test_colocated_pools_train_within_the_lag_bound_and_offload_in_every_step(start, engine, max_lag, tp_size):
    run = finished(
        start,
        "placement.colocated=true",
        f"rollout_fleet.engine={engine}",
        f"rollout_fleet.sglang.tp_size={tp_size}",
        f"learner.num_ranks={tp_size}",
        f"buffer.max_lag={max_lag}",
        "learner.offload_at_transition_only=true",
        "checkpoint.every_steps=2",
    )
    assert run.summary["policy_version"] == 5
    for record in run.records:
        # The quickstart's weights have more than 70,000 float32 values.
        assert record["learner.rollout_device_bytes_before"] > 4 * 70_000 / tp_size
        assert record["learner.rollout_device_bytes_after"] == 0
        assert record["learner.trainer_device_bytes_after"] == record["learner.rollout_device_bytes_before"]
        assert record["engine_version"] == record["step"] + 1
    assert [path.name for path in named_checkpoints(run.run_dir / "checkpoints")] == ["v00000004", "v00000005"]


PPO = ["experiment=ppo", "learner.critic.warmup_steps=1"]
TWO = ["learner.num_ranks=2", "rollout_fleet.num_engines=2"]
ADAPTERS = ["learner.lora.rank=4", "algorithm.kl_coef=0.01"]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([*PPO, *TWO, "learner.reference.sp_size=2"], id="fused-ppo"),
        pytest.param([*PPO, "rollout_fleet.engine=sglang"], id="fused-ppo-sglang"),
        pytest.param(ADAPTERS[1:], id="reference"),
        pytest.param(["algorithm.advantage=gae"], id="critic"),
        pytest.param(ADAPTERS, id="adapters"),
        pytest.param([*PPO, *ADAPTERS, *TWO], id="adapters-and-critic"),
        pytest.param(
            [*ADAPTERS, "rollout_fleet.engine=sglang", "weights.adapters=false"],
            id="merged-adapters-sglang",
        ),
        pytest.param([*PPO, "placement.pools={values: 1}", "placement.critic=values"], id="separate-critic"),
    ],
)
def test_every_role_releases_the_device_to_a_colocated_engine_in_every_step(start, overrides):
    entropy = "algorithm.entropy_coef=0.1"  # only this term trains the policy, which gets no rewards
    run = finished(start, *overrides, "placement.colocated=true", "learner.offload_at_transition_only=true", entropy)
    assert run.survivors() == []
    has_critic = "learner.critic.value_loss" in run.records[-1]
    assert has_critic == (PPO[0] in overrides or "algorithm.advantage=gae" in overrides)
    shared = ["learner."] + ["learner.critic."] * (has_critic and "placement.critic=values" not in overrides)
    for record in run.records:
        assert record["engine_version"] == record["step"] + 1
        for role in shared:
            assert record[f"{role}rollout_device_bytes_after"] == 0
            assert record[f"{role}trainer_device_bytes_after"] > 0
    if set(ADAPTERS) & set(overrides):
        assert run.records[-1]["learner.reference_kl"] > 0
    assert run.records[-1]["learner.grad_norm"] > 0


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ["placement.pools={critic: 2}", "placement.critic=critic", "placement.reference=critic"], id="two-pools"
        ),
        pytest.param(
            ["rollout_fleet.num_engines=2", "learner.lora.rank=4", "placement.colocated=true"],
            id="colocated-with-adapters",
        ),
    ],
)
def test_sequence_parallel_ppo_trains_within_the_lag_bound_and_accounts_for_every_token(start, overrides):
    run = finished(start, *SP_PPO, *overrides)
    assert run.survivors() == []
    last = run.records[-1]
    assert np.isfinite([last[f"learner.{name}"] for name in ("critic.value_loss", "reward_kl")]).all()
    assert last["learner.grad_norm"] > 0
