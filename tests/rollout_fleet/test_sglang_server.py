"""The server's launch, log, death and stop, on a pretended ``sglang.launch_server``."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest

from asyncrl.protocol.errors import DeadlineError, WorkerDiedError
from rollout_fleet.config import EngineDevice, OnUpdate, SGLangConfig
from rollout_fleet.engines import sglang_server
from rollout_fleet.engines.sglang_server import SGLangServer

pytestmark = pytest.mark.timeout(60)
COMES_UP = """
    print("Uvicorn running on http://127.0.0.1", flush=True)
    time.sleep(600)
"""
PORT_IS_TAKEN = """
    mark = pathlib.Path(__file__).with_name("mark")
    attempts = mark.read_text() if mark.exists() else ""
    mark.write_text(attempts + "x")
    if len(attempts) < {num_taken}:
        sys.exit("[Errno 98] error while attempting to bind: address already in use")
"""


@pytest.fixture
async def make_server(tmp_path, monkeypatch):
    """Returns a maker of servers that run this code, stopped at the end."""
    servers = []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()

    def make(code, *, device=EngineDevice.cpu, config=None, start_timeout_s=20.0, stop_timeout_s=1.0):
        code = "import pathlib, sys, time\n" + textwrap.dedent(code)
        (tmp_path / "sglang" / "launch_server.py").write_text(code)
        servers.append(
            SGLangServer(
                config or SGLangConfig(),
                model_path="/model",
                device=device,
                name="sglang-5",
                log_dir=str(tmp_path / "logs"),
                seed=3,
                start_timeout_s=start_timeout_s,
                stop_timeout_s=stop_timeout_s,
            )
        )
        return servers[-1]

    yield make
    for server in servers:
        await server.stop()


def launched_by(server):
    (process,) = psutil.Process(server._guard.pid).children()
    return process


async def test_a_server_is_up_once_it_listens_and_leaves_nothing_when_stopped(make_server):
    server = make_server("print('loading', sys.argv[1:])" + textwrap.dedent(COMES_UP))
    await server.start()
    process, scratch = launched_by(server), server._scratch
    assert f"--port {server.url.rpartition(':')[2]}" in " ".join(process.cmdline())
    key = (scratch / "server.yaml").read_text().removeprefix("api-key: ").strip()
    assert server.headers == {"Authorization": f"Bearer {key}"}
    assert key not in " ".join(process.cmdline()), "other users of the machine see command lines"
    assert "loading ['--config'" in server.log_path.read_text()
    await server.stop()
    assert not process.is_running()
    assert not scratch.exists()
    with pytest.raises(WorkerDiedError, match=r"(?s)sglang-5 was stopped. Last lines of .*sglang-5.log:.*Uvicorn"):
        await server.wait_exit()


async def test_a_port_that_was_taken_meanwhile_is_replaced_by_another(make_server):
    server = make_server(textwrap.dedent(PORT_IS_TAKEN.format(num_taken=1)) + textwrap.dedent(COMES_UP))
    await server.start()
    assert server.log_path.read_text().count("address already in use") == 1
    assert launched_by(server).is_running()


async def test_ports_that_are_taken_again_and_again_end_the_start(make_server):
    server = make_server(textwrap.dedent(PORT_IS_TAKEN.format(num_taken=9)))
    with pytest.raises(WorkerDiedError, match=r"(?s)died with exit status 1. Last lines.*address already in use"):
        await server.start()
    assert server.log_path.read_text().count("address already in use") == sglang_server.BIND_ATTEMPTS


async def test_a_death_is_noticed_and_shown_with_the_end_of_the_log(make_server):
    server = make_server(COMES_UP)
    await server.start()
    launched_by(server).send_signal(signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"sglang-5 died with exit status 137. Last lines"):
        await asyncio.wait_for(server.wait_exit(), 20)


async def test_a_start_that_takes_too_long_is_stopped_and_named(make_server):
    server = make_server("print('still loading', flush=True)\ntime.sleep(600)", start_timeout_s=1.0)
    with pytest.raises(
        DeadlineError, match=r"was not up within 1.0 s; raise rollout_fleet.start_timeout_s if the model"
    ):
        await server.start()
    assert server._guard.returncode is not None


@pytest.mark.parametrize("is_made", [False, True], ids=["before its guard is made", "after"])
async def test_a_server_stopped_while_it_is_launched_leaves_nothing(make_server, monkeypatch, tmp_path, is_made):
    async def create(*command, **options):
        guard = await make_guard(*command, **options) if is_made else None
        launching.set()
        await asyncio.sleep(0.1)
        return guard or await make_guard(*command, **options)

    launching, make_guard = asyncio.Event(), asyncio.create_subprocess_exec
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    server = make_server("time.sleep(600)")
    start = asyncio.create_task(server.start())
    await launching.wait()
    await server.stop()
    with pytest.raises(WorkerDiedError, match="sglang-5 was stopped"):
        await start
    assert server._guard.returncode is not None
    assert not list(tmp_path.glob("asyncrl-*"))


async def test_a_guard_that_stands_still_is_killed_and_the_kernel_kills_the_server(make_server):
    server = make_server(COMES_UP, stop_timeout_s=0.1)
    await server.start()
    process, scratch = launched_by(server), server._scratch
    server._guard.send_signal(signal.SIGSTOP)
    await server.stop()
    await asyncio.to_thread(psutil.wait_procs, [process], 10)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert not scratch.exists()


async def test_a_line_longer_than_the_streams_buffer_is_logged_whole(make_server):
    server = make_server("print('x' * 200_000)" + textwrap.dedent(COMES_UP))
    await server.start()
    assert server.log_path.read_bytes().startswith(b"x" * 200_000 + b"\n")


async def test_a_server_that_was_never_started_says_so_and_stops_cleanly(make_server):
    server = make_server(COMES_UP)
    await server.stop()
    with pytest.raises(WorkerDiedError, match="sglang-5 was never started"):
        await server.wait_exit()


def test_the_command_line_follows_device_and_options(make_server, tmp_path):
    config = SGLangConfig(memory_saver=True, tp_size=2, extra_args=["--chunked-prefill-size", "64"])
    on_cpu = make_server("", config=config)
    assert on_cpu.dtype == "float32"
    assert not {"--enable-memory-saver", "--disable-radix-cache"} & set(on_cpu._arguments(tmp_path))
    assert on_cpu._arguments(tmp_path)[-2:] == ["--chunked-prefill-size", "64"]
    assert str(sglang_server.CPU_KV_TOKENS) in on_cpu._arguments(tmp_path)
    assert on_cpu._environment(tmp_path)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    on_gpu = make_server("", config=config, device=EngineDevice.cuda)
    assert on_gpu.dtype == "auto"
    assert "--enable-memory-saver" in on_gpu._arguments(tmp_path)
    assert "--max-total-tokens" not in on_gpu._arguments(tmp_path)
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu._environment(tmp_path)
    keeping = make_server("", config=SGLangConfig(on_update=OnUpdate.keep))
    assert {"--disable-radix-cache", "--disable-overlap-schedule"} <= set(keeping._arguments(tmp_path))


async def test_a_full_disk_under_its_log_does_not_block_a_server(make_server, caplog):
    server = make_server('for _ in range(20_000):\n    print("x" * 100)\n' + textwrap.dedent(COMES_UP))
    server.log_path = Path("/dev/full")
    await server.start()
    [warning] = [record.message for record in caplog.records if "is left out" in record.message]
    assert "/dev/full: [Errno 28] No space left on device" in warning
    assert "Uvicorn running" in server.log_tail()
