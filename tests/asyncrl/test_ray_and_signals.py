"""The controller and Ray in one process: a signal is the run's, and a daemon that dies is noticed."""

import subprocess
import sys
import textwrap

import pytest

RUN = """
import asyncio, os, signal, sys, psutil
from asyncrl.cli.compose import compose_run
from asyncrl.run.cluster import ray_cluster
from asyncrl.single_controller import ray_death
async def run():
    loop, seen = asyncio.get_running_loop(), []
    loop.add_signal_handler(signal.SIGTERM, seen.append, "SIGTERM")
    async with ray_cluster(compose_run([])):
        os.kill(os.getpid(), signal.SIGTERM)
        while not seen:
            await asyncio.sleep(0.01)
        print(*seen, flush=True)
        watch = asyncio.ensure_future(ray_death())
        await asyncio.sleep(0.5)
        next(child for child in psutil.Process().children() if child.name() == sys.argv[1]).kill()
        try:
            await watch
        except Exception as error:
            print(type(error).__name__, str(error).splitlines()[0], flush=True)
        os._exit(0)
asyncio.run(run())
"""


@pytest.mark.parametrize("daemon", ["gcs_server", pytest.param("raylet", marks=pytest.mark.slow)])
def test_a_daemon_that_dies_is_named_and_a_signal_is_the_runs_own(daemon):
    command = [sys.executable, "-c", textwrap.dedent(RUN), daemon]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    output, errors = run.communicate(timeout=200)
    assert output.splitlines()[0] == "SIGTERM", errors
    assert "ClusterDiedError Ray's " in output
    assert f"({daemon}, pid " in output
    assert "SIGTERM received" not in errors
