"""A dead daemon of Ray is reported as what it is, at once; by a driver of its own, because it does not survive."""

import subprocess
import sys
import textwrap

DRIVER = textwrap.dedent("""
    import asyncio, os, signal
    import psutil, ray
    from asyncrl.core.errors import ClusterDiedError
    from asyncrl.single_controller import ray_death

    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 * 2**20)

    async def death_of(name):
        watching = asyncio.create_task(ray_death())
        done, _ = await asyncio.wait([watching], timeout=0.5)
        assert not done, watching
        (daemon,) = [p for p in psutil.Process().children() if p.name() == name]
        daemon.send_signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(watching, 30)
        except ClusterDiedError as error:
            assert f"({name}, pid {daemon.pid}) died" in str(error)
            print(error, flush=True)

    async def main():
        await death_of("raylet")
        await death_of("gcs_server")
        os._exit(0)

    asyncio.run(main())
""")


def test_a_dead_daemon_of_ray_is_named_within_seconds():
    driver = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=200)
    assert driver.returncode == 0, driver.stderr
    told = [line for line in driver.stdout.splitlines() if line.startswith("Ray's ")]
    assert [line.split(" (")[0] for line in told] == ["Ray's node manager", "Ray's control service"]
    assert told[0].endswith("raylet.out:")
    assert told[1].endswith("gcs_server.out:")
