"""Both pools on the same devices, taking turns, as a user starts them."""

import pytest

pytestmark = pytest.mark.e2e

OPTIONS = [
    "placement.colocated=true",
    "sft.enabled=false",
    "evaluation.num_samples=1",
    "data.eval_max_prompts=16",
    "algorithm.groups_per_step=8",
]


@pytest.mark.parametrize(
    ("engine", "max_lag"),
    [
        ("transformers", 2),
        pytest.param("transformers", 0, marks=pytest.mark.slow),
        pytest.param("sglang", 1, marks=pytest.mark.slow),
    ],
)
def test_colocated_pools_train_within_the_bound_and_offload_at_every_turn(start, engine, max_lag):
    run = start(
        *OPTIONS,
        f"rollout_fleet.engine={engine}",
        f"buffer.max_lag={max_lag}",
        "learner.offload_at_transition_only=true",
        "total_steps=5",
        "checkpoint.every_steps=2",
    )
    assert run.finish(300) == 0, run.output
    assert run.summary["policy_version"] == 5
    assert run.summary["max_lag"]["realised"] <= max_lag
    records = run.records
    assert [record["step"] for record in records] == list(range(5))
    for record in records:
        assert record["learner.rollout_device_bytes_before"] > 4 * 70_000  # the quickstart's weights
        assert record["learner.rollout_device_bytes_after"] == 0
        assert record["learner.trainer_device_bytes_after"] == record["learner.rollout_device_bytes_before"]
        assert record["engine_version"] == record["step"] + 1
    tokens = run.summary["tokens"]
    assert tokens["generated"] == sum(tokens[name] for name in ("trained", "dropped", "buffered", "in_flight"))
    assert sorted(path.name for path in (run.run_dir / "checkpoints").iterdir()) == ["v00000004", "v00000005"]
