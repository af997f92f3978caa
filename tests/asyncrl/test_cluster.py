"""How the controller waits for worker groups, and notices that Ray's own daemons died."""

import asyncio
import subprocess
import sys
import textwrap

import pytest
import ray

from asyncrl.controller.cluster import GroupLogs, within
from asyncrl.protocol.errors import DeadlineError
from asyncrl.single_controller.results import PendingResults


def test_a_worker_that_does_not_answer_is_named_with_its_log(cluster, tmp_path):
    @ray.remote(num_cpus=0)
    def answer(seconds):
        import time

        time.sleep(seconds)
        return seconds

    (tmp_path / "rollout-1.log").write_text("last words")
    logs = GroupLogs(part="rollout worker", name="rollout", folder=tmp_path)

    async def wait():
        pending = PendingResults([answer.remote(0), answer.remote(600)])
        await asyncio.to_thread(ray.get, pending[0])
        try:
            await within(pending, 0.2, "the fleet's counters", "buffer.request_timeout_s", logs)
        finally:
            ray.cancel(pending[1], force=True)

    with pytest.raises(DeadlineError) as caught:
        asyncio.run(wait())
    message = str(caught.value)
    assert "waited 0.2 s (buffer.request_timeout_s) for the fleet's counters" in message
    assert "rollout worker 1 did not answer" in message
    assert message.endswith("last words")


RUN = """
import asyncio, os, signal, sys, psutil
from asyncrl.cli.compose import compose_run
from asyncrl.controller.cluster import ray_cluster, ray_died
async def run():
    loop, seen = asyncio.get_running_loop(), []
    loop.add_signal_handler(signal.SIGTERM, seen.append, "SIGTERM")
    async with ray_cluster(compose_run([])):
        os.kill(os.getpid(), signal.SIGTERM)
        while not seen:
            await asyncio.sleep(0.01)
        print(*seen, flush=True)
        watch = asyncio.ensure_future(ray_died())
        await asyncio.sleep(0)
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
    assert f"WorkerDiedError Ray's {daemon} (pid " in output
    assert "SIGTERM received" not in errors
