"""A dead daemon of Ray is reported as what it is, at once; a driver of its own each, because it does not survive."""

import subprocess
import sys
import textwrap

import pytest

DRIVER = textwrap.dedent("""
    import asyncio, os, signal, sys, time
    import psutil, ray
    from asyncrl.protocol.errors import ClusterDiedError
    from asyncrl.single_controller import ray_death

    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20)

    async def watch():
        watching = asyncio.create_task(ray_death())
        done, _ = await asyncio.wait([watching], timeout=1.0)
        assert not done, watching
        (daemon,) = [p for p in psutil.Process().children() if p.name() == sys.argv[1]]
        began = time.monotonic()
        daemon.send_signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(watching, 10)
        except ClusterDiedError as error:
            print(f"pid {daemon.pid}" in str(error), time.monotonic() - began, error, flush=True)
        os._exit(0)

    asyncio.run(watch())
""")


@pytest.mark.parametrize(("daemon", "what"), [("raylet", "node manager"), ("gcs_server", "control service")])
def test_a_dead_daemon_of_ray_is_named_within_seconds(daemon, what):
    driver = subprocess.run([sys.executable, "-c", DRIVER, daemon], capture_output=True, text=True, timeout=200)
    first, _, log = driver.stdout.strip().partition("\n")
    assert driver.returncode == 0, driver.stderr
    names_pid, seconds, message = first.split(maxsplit=2)
    assert names_pid == "True"
    assert float(seconds) < 5
    assert message.startswith(f"Ray's {what} ({daemon}, pid ")
    assert f"{daemon}.out:" in message
    assert log
