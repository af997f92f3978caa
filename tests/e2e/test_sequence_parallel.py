"""Sequence parallelism through the real workers, on SGLang, with a critic and a reference, and on shared devices."""

import numpy as np
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SP = ["learner.num_ranks=2", "learner.sp_size=2", "evaluation.num_samples=1", "data.eval_max_prompts=16"]


@pytest.mark.parametrize(
    ("overrides", "metrics"),
    [
        pytest.param(["rollout_fleet.engine=sglang"], {"learner.grad_norm"}, id="sglang"),
        pytest.param(
            [
                "experiment=ppo",
                "rollout_fleet.engine=transformers",
                "learner.critic.warmup_steps=1",
                "placement.pools={critic: 2}",
                "placement.critic=critic",
                "placement.reference=critic",
            ],
            {"learner.grad_norm", "learner.critic.value_loss", "learner.reward_kl"},
            id="ppo-in-two-pools",
        ),
        pytest.param(
            [
                "experiment=ppo",
                "rollout_fleet.engine=transformers",
                "rollout_fleet.num_engines=2",
                "learner.critic.warmup_steps=1",
                "learner.lora.rank=4",
                "placement.colocated=true",
            ],
            {"learner.grad_norm", "learner.critic.value_loss", "learner.reward_kl"},
            id="ppo-colocated-with-adapters",
        ),
    ],
)
def test_sequence_parallel_ranks_train_within_the_bound_and_account_for_every_token(start, overrides, metrics):
    run = start(*SP, *overrides, "total_steps=5")
    assert run.finish(timeout_s=400) == 0, run.output
    assert run.survivors() == []
    records = run.records
    assert [record["step"] for record in records] == list(range(5))
    assert metrics <= records[-1].keys()
    assert np.isfinite([records[-1][name] for name in metrics]).all()
    assert records[-1]["learner.grad_norm"] > 0
    assert run.summary["max_lag"]["realised"] <= run.summary["max_lag"]["bound"]
    tokens = run.summary["tokens"]
    assert tokens["trained"] == sum(record["learner.num_tokens"] for record in records)
    assert tokens["generated"] == sum(tokens[part] for part in ("trained", "dropped", "buffered", "in_flight"))
