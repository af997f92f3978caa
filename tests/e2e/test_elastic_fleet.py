"""Engines join and leave a run during training, and a node of the cluster dies.

With ``ASYNCRL_FAULT_ENGINE=transformers``, all tests use in-process engines, and recompute the log-prob of each token
with the weights of its version.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from tests.e2e.run_checks import (
    assert_every_step_is_made_and_no_version_goes_back,
    assert_every_token_is_accounted_for,
    assert_trained_tokens_have_the_log_prob_of_their_version,
)
from tests.support.ray_cluster import ENVIRONMENT, NODE_OPTIONS
from tests.support.training_run import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

OPTIONS = [
    "rollout_fleet.engine=transformers",
    "learner.keep_snapshots=-1",
    "record_trajectories=true",
    "algorithm.groups_per_step=16",
    "evaluation.enabled=false",
    "sft.enabled=false",
]
JOINED_S = 300
_ASYNCRL = "import sys; from asyncrl.cli import main; sys.exit(main())"


def command(name, run_dir, *arguments):
    """Run ``asyncrl join`` or ``asyncrl leave``. Returns its status and its output."""
    ended = subprocess.run(
        [sys.executable, "-c", _ASYNCRL, name, "--run", str(run_dir), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=JOINED_S,
    )
    return ended.returncode, ended.stdout + ended.stderr


def check_run(run, steps):
    assert run.finish(timeout_s=900) == 0, run.output
    assert_every_step_is_made_and_no_version_goes_back(run, steps)
    assert_every_token_is_accounted_for(run)
    assert_trained_tokens_have_the_log_prob_of_their_version(run, every=97)


def test_one_engine_leaves_and_another_joins_while_the_run_trains(start):
    steps = 600
    run = start(f"total_steps={steps}", "rollout_fleet.num_engines={min: 1, max: 2}", *OPTIONS)
    run.wait_for_line("rollout worker 1 has joined; 2 engines are present")
    run.wait_for_step(3)
    status, words = command("join", run.run_dir)
    assert (status, "allows 2 engines, and 2 are present" in words) == (1, True), words
    assert command("leave", run.run_dir, "0") == (0, "rollout worker 0 has left\n")
    assert command("leave", run.run_dir)[1].startswith("1: serves\n")
    assert command("join", run.run_dir) == (0, "joined: rollout worker 0\n")
    assert command("leave", run.run_dir, "1") == (0, "rollout worker 1 has left\n")
    status, words = command("leave", run.run_dir, "0")
    assert (status, "0 engines would be left" in words) == (1, True), words
    run.remember_family()
    check_run(run, steps)
    assert run.survivors() == []
    status, words = command("join", run.run_dir)
    assert (status, "this run has ended" in words) == (2, True), words


WEIGHTS = {
    "deltas": ["weights.transport=file", "weights.full_every=3"],
    "collective": ["weights.transport=collective", "weights.full_every=3"],
    "adapters": ["learner.lora.rank=4"],
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_engines_join_and_leave_during_all_activities_of_a_run(start, weights):
    engine = os.environ.get("ASYNCRL_FAULT_ENGINE", "sglang")
    run = start(
        "total_steps=100000",
        f"rollout_fleet.engine={engine}",
        "rollout_fleet.num_engines={min: 1, max: 3}",
        "rollout_fleet.restarts=0",
        "algorithm.groups_per_step=8",
        "record_trajectories=true",
        "evaluation.every_steps=2",
        "checkpoint.every_steps=3",
        "sft.enabled=false",
        *weights,
    )
    run.wait_for_line("; 3 engines are present", timeout_s=JOINED_S)
    run.wait_for_step(4)
    for rank in (0, 2):  # let engines leave while the run loads weights and evaluates
        timed(run, "leave", str(rank))
    with ThreadPoolExecutor(2) as both:
        joining = [both.submit(timed, run, "join") for _ in range(2)]
        assert sorted(words.result() for words in joining) == [f"joined: rollout worker {rank}\n" for rank in (0, 3)]
    steps_after(run)
    timed(run, "leave", "0")
    os.kill(run.pid_at("ray::ActorWorker"), signal.SIGKILL)
    run.wait_for_line("the learner starts again from the newest checkpoint")
    assert timed(run, "join") == "joined: rollout worker 0\n"
    steps_after(run)
    for pid in run.pids_at("ray::RolloutWorker"):
        os.kill(pid, signal.SIGKILL)
    run.wait_for_line("no rollout engine is up; training waits")
    assert timed(run, "join").startswith("joined: rollout worker ")
    steps_after(run)
    run.remember_family()
    run.process.terminate()
    assert run.finish(60) == 128 + signal.SIGTERM, run.output
    assert_every_step_is_made_and_no_version_goes_back(run, run.num_steps, is_interrupted=True)
    assert_every_token_is_accounted_for(run)
    assert run.summary["restarts"]["learner"] == 1
    assert run.survivors() == []


def timed(run, name, *arguments):
    """Run ``asyncrl join`` or ``asyncrl leave``, and check its status. Print the duration; return the output."""
    began_s = time.monotonic()
    status, words = command(name, run.run_dir, *arguments)
    assert status == 0, f"{words}\n{run.output}"
    print(f"{name} {' '.join(arguments)} took {time.monotonic() - began_s:.1f} s: {words}", end="")  # noqa: T201
    return words


def steps_after(run):
    run.wait_for_step(run.num_steps + 3, timeout_s=120)


@contextmanager
def cluster():
    """Yield a Ray cluster of one node, on which the run starts. A test adds nodes with one CPU each, for one engine."""
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    nodes = Cluster(initialize_head=True, head_node_args={**node_at("127.0.0.21"), "num_cpus": 2})
    try:
        yield nodes
    finally:
        nodes.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def node_at(address):
    return {"num_cpus": 1, "node_ip_address": address, **NODE_OPTIONS}


def kill_node(node):
    """Kill a node: send SIGKILL to its raylet (Ray's daemon) and to the workers that still run."""
    (raylet,) = [info.process.pid for info in node.all_processes["raylet"]]
    workers = psutil.Process(raylet).children(recursive=True)
    os.kill(raylet, signal.SIGKILL)
    for worker in workers:
        if worker.is_running():
            worker.kill()


def test_an_engine_of_a_dead_node_starts_again_on_the_next_node_that_joins(start, tmp_path):
    steps = 1000
    with cluster() as nodes:
        run = start(
            f"total_steps={steps}",
            "rollout_fleet.num_engines={min: 1, max: 2}",
            f"ray.address={nodes.address}",
            "ray.node_address=127.0.0.21",
            "placement.num_nodes=2",
            "placement.autoscale=true",
            "placement.engines_per_node=1",
            "buffer.host=127.0.0.1",
            "buffer.advertised_host=127.0.0.1",
            "buffer.stores_on=ledger",  # if the killed node had a store, its groups would be lost
            "weights.transport=file",
            f"weights.directory={tmp_path / 'weights'}",
            *OPTIONS,
        )
        run.wait_for_line("rollout worker 1 waits for a place")
        run.wait_for_step(3)
        second = nodes.add_node(**node_at("127.0.0.22"))
        run.wait_for_line("rollout worker 1 has joined; 2 engines are present", timeout_s=JOINED_S)
        run.wait_for_step(run.num_steps + 3)
        kill_node(second)
        run.wait_for_line("rollout worker 1 waits for a place", timeout_s=JOINED_S)
        step = run.num_steps
        run.wait_for_step(step + 20)
        nodes.add_node(**node_at("127.0.0.23"))
        run.wait_for_line("rollout worker 1 is back after", timeout_s=JOINED_S)
        (published,) = (tmp_path / "weights").iterdir()
        (run.run_dir / "snapshots").symlink_to(published)
        check_run(run, steps)
