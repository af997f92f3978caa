"""scripts/two_hosts.sh: a run across two hosts that are made of namespaces; how it is stopped: `test_scripts.py`."""

import json

import pytest

from tests.support.two_hosts import left_of, seen_by_hosts, skip_unless_permitted, start_hosts

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4
SHORT = [
    f"total_steps={STEPS}",
    "evaluation.num_samples=1",
    "sft.target_accuracy=0.3",
    "rollout_fleet.samples.every_steps=1",
]


@pytest.fixture
def out():
    with seen_by_hosts() as folder:
        yield folder


@pytest.mark.parametrize("transport", ["collective", "file"])
def test_a_learner_on_one_host_and_engines_on_both_train_and_nothing_is_left(out, transport):
    process, mark = start_hosts(out, "--transport", transport, *SHORT)
    output, _ = process.communicate(timeout=800)
    skip_unless_permitted(process, output)
    assert process.returncode == 0, output
    run = out / transport
    summary = json.loads((run / "summary.json").read_text())
    assert summary["policy_version"] == STEPS
    assert summary["max_lag"]["realised"] <= summary["max_lag"]["bound"]
    assert "nodes that do not share /tmp/asyncrl/quickstart/" in output
    assert {path.name for path in (run / "logs").iterdir()} >= {
        *(f"rollout-{rank}.log" for rank in range(2)),
        *(f"sglang-{rank}.log" for rank in range(2)),
        *(f"store-{number}.log" for number in range(2)),
        "learner-0.log",
        "buffer.log",
    }
    kept = {path.name.rpartition("-")[2] for path in (run / "samples").glob("train-*.parquet")}
    assert kept == {"rollout0.parquet", "rollout1.parquet"}
    assert (run / "policy" / "model.safetensors").is_file()
    assert left_of(mark) == []
    assert sorted(path.name for path in out.iterdir()) == [transport]
