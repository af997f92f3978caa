"""scripts/two_hosts.sh starts a run on two simulated hosts. Each host has its own Linux namespaces."""

import json
import os
import signal
import time

import pytest

from tests.e2e.run_checks import assert_the_account_closes
from tests.support.two_hosts import RunOnTwoHosts, left_of, skip_unless_permitted, start_hosts

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4
SHORT = [
    f"total_steps={STEPS}",
    "evaluation.num_samples=1",
    "sft.target_accuracy=0.3",
    "rollout_fleet.samples.every_steps=1",
]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.mark.parametrize("transport", ["collective", "file"])
def test_a_learner_on_one_host_trains_with_engines_on_two_hosts_and_leaves_nothing_behind(out, transport):
    process, mark = start_hosts(out, "--transport", transport, *SHORT)
    output, _ = process.communicate(timeout=800)
    skip_unless_permitted(process, output)
    assert process.returncode == 0, output
    run = out / transport
    summary = json.loads((run / "summary.json").read_text())
    assert summary["policy_version"] == STEPS
    assert_the_account_closes(summary)
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


@pytest.fixture
def on_two_hosts(out):
    """Return a function that starts a run on two hosts. The fixture ends the run's remaining processes later."""
    runs = []

    def start(*arguments):
        runs.append(RunOnTwoHosts(out, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


FAULTY_STEPS = 400
OUTLIVES = [
    f"total_steps={FAULTY_STEPS}",
    "evaluation.enabled=false",
    "sft.enabled=false",
    "algorithm.groups_per_step=8",
    "checkpoint.every_steps=2",
    "learner.restarts=5",
    "buffer.durability=disk",
    "buffer.directory=/tmp/journal",
]


@pytest.mark.parametrize("transport", ["file", "collective"])
def test_a_run_continues_after_deaths_on_the_other_host_and_a_cut_of_its_link(on_two_hosts, out, transport):
    run = on_two_hosts("--transport", transport, *OUTLIVES, f"checkpoint.directory={out / 'checkpoints'}")
    run.wait_for_line(" step 1/", timeout_s=400)
    for part, back in (("sglang::scheduler", "is back"), ("ray::RolloutWorker", "is back"), ("--store ", "")):
        os.kill(run.pids_on_second(part)[0], signal.SIGKILL)
        began_s = time.monotonic()
        run.goes_on(f"{part} of the other host died", timeout_s=300)
        if back:
            run.wait_for_line(back, timeout_s=300)
            print(f"{part} of the other host is back after {time.monotonic() - began_s:.1f} s")  # noqa: T201
    for pid in run.pids("buffer.server --groups-per-step 8"):
        os.kill(pid, signal.SIGKILL)
    run.goes_on("the buffer died alone", timeout_s=300)
    stores = run.pids("--store ")
    assert len(stores) == 2
    for pid in (*run.pids("buffer.server --groups-per-step 8"), *stores):
        os.kill(pid, signal.SIGKILL)
    run.goes_on("the buffer and both stores died at once", timeout_s=300)
    run.set_link("down")
    time.sleep(10.0)
    run.set_link("up")
    run.goes_on("the link was cut for 10 s", timeout_s=300)
    run.set_link("down")
    began_s = time.monotonic()
    run.wait_for_line("rollout worker 1 waits for a place", timeout_s=300)
    print(f"the other host is given up {time.monotonic() - began_s:.1f} s after its link was cut")  # noqa: T201
    run.goes_on("the link is cut", timeout_s=300)
    assert run.finish(timeout_s=600) == 0, run.output
    summary = json.loads((out / transport / "summary.json").read_text())
    assert_the_account_closes(summary)
    assert summary["policy_version"] == FAULTY_STEPS
    assert summary["restarts"]["buffer"] == 2
    records = [json.loads(line) for line in (out / transport / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(FAULTY_STEPS))
    versions = [record["engine_version"] for record in records]
    assert versions == sorted(versions)
    assert left_of(run.mark) == []
