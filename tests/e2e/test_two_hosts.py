"""scripts/two_hosts.sh: a run across two hosts that are made of namespaces."""

import json
import shutil
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from tests.support.training_run import ROOT

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
    """A folder that both hosts see, so not in /tmp."""
    (ROOT / "outputs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="two_hosts-", dir=ROOT / "outputs"))
    yield folder
    shutil.rmtree(folder)


def start(out, *arguments):
    command = ["bash", str(ROOT / "scripts" / "two_hosts.sh"), *arguments]
    environment = {
        "OUT": str(out),
        "NEED_SGLANG": "1",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "MARK": uuid.uuid4().hex,
    }
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return process, environment["MARK"]


def skip_unless_permitted(status, output):
    if status == 3:
        pytest.skip(output.strip().splitlines()[-1])


def left_of(mark):
    """Processes of this machine that the script started, by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK") == mark:
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("transport", ["collective", "file"])
def test_a_learner_on_one_host_and_engines_on_both_train_and_nothing_is_left(out, transport):
    process, mark = start(out, "--transport", transport, *SHORT)
    output, _ = process.communicate(timeout=800)
    skip_unless_permitted(process.returncode, output)
    assert process.returncode == 0, output
    run = out / transport
    summary = json.loads((run / "summary.json").read_text())
    assert summary["policy_version"] == STEPS
    assert summary["max_lag"]["realised"] <= summary["max_lag"]["bound"]
    assert "nodes that do not share /tmp/asyncrl/quickstart/" in output
    assert {path.name for path in (run / "logs").iterdir()} >= {
        *(f"rollout-{rank}.log" for rank in range(2)),
        *(f"sglang-{rank}.log" for rank in range(2)),
        "learner-0.log",
        "buffer.log",
    }
    kept = {path.name.rpartition("-")[2] for path in (run / "samples").glob("*.parquet")}
    assert kept == {"rollout0.parquet", "rollout1.parquet"}
    assert (run / "policy" / "model.safetensors").is_file()
    assert left_of(mark) == []
    assert sorted(path.name for path in out.iterdir()) == [transport]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_stopped_leaves_no_host_behind(out, number):
    process, mark = start(out, "--transport", "collective", *SHORT)
    output = ""
    for line in process.stdout:
        output += line
        if "waiting for" in line or "preflight" in line or "writing to" in line:
            process.send_signal(number)
            break
    output += process.communicate(timeout=120)[0]
    skip_unless_permitted(process.returncode, output)
    assert process.returncode == 128 + number, output
    assert left_of(mark) == []
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
