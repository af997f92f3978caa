"""The Ray cluster of a run: failed starts, stops during a start, dead processes, and clients without Ray's token."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.core.errors import ClusterDiedError, WorkerDiedError
from asyncrl.run import cluster, run
from asyncrl.run.cluster import warning_of_open_cluster


@pytest.mark.parametrize(
    ("overrides", "where"), [([], "on this machine"), (["ray.address=10.0.0.1:6379"], "at ray.address=10.0.0.1:6379")]
)
async def test_a_failed_start_of_ray_is_an_error_with_address_and_cause(monkeypatch, overrides, where):
    def fail(**options):
        raise Exception("The current node timed out during startup.")

    stopped = []
    monkeypatch.setattr(cluster.ray, "init", fail)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: stopped.append(True))
    with pytest.raises(ClusterDiedError, match=rf"^Ray {where} .*The current node timed out"):
        async with cluster.ray_cluster(compose_run(overrides)):
            pass
    assert stopped


async def test_a_stop_during_the_start_of_ray_waits_for_the_start_and_then_shuts_ray_down(monkeypatch):
    """If a process shuts Ray down while Ray starts, Ray ends the whole process with an exit status of Ray."""
    starting, may_end, events = threading.Event(), threading.Event(), []

    def start(**options):
        starting.set()
        may_end.wait(30)
        events.append("up")

    async def enter():
        async with cluster.ray_cluster(compose_run([])):
            raise AssertionError("the start must be cancelled before the cluster is ready")

    monkeypatch.setattr(cluster.ray, "init", start)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: events.append("shut down"))
    entering = asyncio.create_task(enter())
    await asyncio.to_thread(starting.wait)
    entering.cancel()
    done, _ = await asyncio.wait([entering], timeout=0.1)
    assert not done
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert events == ["up", "shut down"]


async def test_the_death_of_a_part_cancels_the_work_and_raises_the_parts_error():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def watch():
        await begun.wait()
        raise WorkerDiedError("the buffer server died")

    with pytest.raises(WorkerDiedError, match="the buffer server died"):
        await run.unless(work(), [watch()])
    assert ended.is_set()


DAEMON_DIES = """
import asyncio, os, pathlib, signal, sys, psutil
from asyncrl.cli.compose import compose_run
from asyncrl.run.cluster import ray_cluster
from asyncrl.single_controller import ray_death
async def run():
    loop, told = asyncio.get_running_loop(), []
    loop.add_signal_handler(signal.SIGTERM, told.append, "SIGTERM")
    async with ray_cluster(compose_run([])):
        os.kill(os.getpid(), signal.SIGTERM)
        while not told:
            await asyncio.sleep(0.01)
        for name in ("raylet", "gcs_server"):
            watch = asyncio.ensure_future(ray_death())
            done, _ = await asyncio.wait([watch], timeout=0.5)
            assert not done, watch
            (daemon,) = [child for child in psutil.Process().children() if child.name() == name]
            daemon.kill()
            try:
                await asyncio.wait_for(watch, 30)
            except Exception as error:
                line = str(error).splitlines()[0].replace(str(daemon.pid), "PID")
                told.append(f"{type(error).__name__} {line}")
        pathlib.Path(sys.argv[1]).write_text("\\n".join(told))  # Ray prints into this process's output
        os._exit(0)
asyncio.run(run())
"""


@pytest.mark.long
def test_dead_ray_daemons_are_named_and_the_run_handles_its_own_signals(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(DAEMON_DIES), str(tmp_path / "told")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    output, errors = run.communicate(timeout=200)
    assert run.returncode == 0, output + errors
    signalled, raylet, control = (tmp_path / "told").read_text().splitlines()
    assert signalled == "SIGTERM"
    assert raylet.startswith("ClusterDiedError Ray's node manager (raylet, pid PID) died")
    assert raylet.endswith("raylet.out:")
    assert control.startswith("ClusterDiedError Ray's control service (gcs_server, pid PID) died")
    assert control.endswith("gcs_server.out:")
    assert "SIGTERM received" not in errors


TOKENS = """
import asyncio, os, subprocess, sys
from asyncrl.run import protect_own_cluster
protect_own_cluster()
from asyncrl.cli.compose import compose_run
from asyncrl.run.cluster import ray_cluster
import ray
CONNECT = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(ray.cluster_resources()['CPU'])"
async def run():
    async with ray_cluster(compose_run([])):
        address = ray.get_runtime_context().gcs_address
        for token in (os.environ["RAY_AUTH_TOKEN"], "0" * 64):
            command = [sys.executable, "-c", CONNECT, address]
            environment = os.environ | {"RAY_AUTH_TOKEN": token, "RAY_NUM_REDIS_GET_RETRIES": "2"}
            done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, timeout=100)
            print(done.returncode == 0, flush=True)
asyncio.run(run())
"""


@pytest.mark.long
def test_the_token_of_a_runs_own_cluster_is_not_in_the_home_folder(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    stranger = home / ".ray"
    stranger.write_text("no folder can be made here")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TOKENS)],
        env=environment | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stdout.split() == ["True", "False"], done.stderr
    assert [path.name for path in home.iterdir()] == [".ray"]


@pytest.mark.parametrize(
    ("mode", "overrides", "is_warned"),
    [
        ("", ["ray.address=auto", "placement.num_nodes=2"], True),
        ("disabled", ["ray.address=auto", "placement.num_nodes=2"], True),
        ("token", ["ray.address=auto", "placement.num_nodes=2"], False),
        ("", ["ray.address=auto"], False),
        ("", [], False),
    ],
)
def test_a_joined_cluster_of_several_nodes_without_a_token_gets_a_warning(monkeypatch, mode, overrides, is_warned):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    warning = warning_of_open_cluster(compose_run(overrides))
    assert ("RAY_AUTH_TOKEN" in warning) == is_warned


SPACE = """
import asyncio, sys
from asyncrl.run import protect_own_cluster
protect_own_cluster()
from asyncrl.cli.compose import compose_run
from asyncrl.run.cluster import ray_cluster
import ray

@ray.remote(num_cpus=0, runtime_env={"env_vars": {"OWN": "1"}})
class Echo:
    def python(self):
        return sys.executable

async def run():
    async with ray_cluster(compose_run([])):
        print(await asyncio.wait_for(Echo.remote().python.remote(), 60))
asyncio.run(run())
"""


@pytest.mark.long
def test_workers_start_with_a_space_in_the_path_of_python_and_a_long_temporary_path(tmp_path):
    (temporary := tmp_path / f"job.{'1234567890' * 9}").mkdir()
    (tmp_path / "a folder; with (odd) signs").symlink_to(sys.prefix)
    python = str(tmp_path / "a folder; with (odd) signs" / "bin" / "python")
    environment = os.environ | {"TMPDIR": str(temporary)}
    command = [python, "-c", SPACE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout.strip() == python, done.stderr
