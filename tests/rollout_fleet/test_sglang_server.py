"""The start, log, death and stop of an SGLang server, with a fake module ``sglang.launch_server``."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap

import psutil
import pytest

from asyncrl.core.errors import DeadlineError, WorkerDiedError
from rollout_fleet.config import EngineDevice, EngineKind, OnUpdate, RolloutFleetConfig, SGLangConfig
from rollout_fleet.engines import sglang_server
from rollout_fleet.engines.sglang_server import SGLangServer

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
    """Yield a function that makes servers. Its argument is the source of the fake module ``sglang.launch_server``.

    The fixture stops the servers after the test.
    """
    servers = []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()

    def make(code, *, device=EngineDevice.cpu, config=None, start_timeout_s=20.0, stop_timeout_s=1.0, head_dim=128):
        code = "import pathlib, sys, time\n" + textwrap.dedent(code)
        (tmp_path / "sglang" / "launch_server.py").write_text(code)
        servers.append(
            SGLangServer(
                RolloutFleetConfig(
                    start_timeout_s=start_timeout_s, stop_timeout_s=stop_timeout_s, sglang=config or SGLangConfig()
                ),
                model_path="/model",
                device=device,
                rank=5,
                log_dir=str(tmp_path / "logs"),
                seed=3,
                head_dim=head_dim,
            )
        )
        return servers[-1]

    yield make
    for server in servers:
        await server.stop()


def launched_by(server):
    (process,) = psutil.Process(server.guard.pid).children()
    return process


async def test_a_server_is_started_when_it_listens_and_a_stop_removes_its_process_and_folder(make_server):
    server = make_server("print('loading', sys.argv[1:])" + textwrap.dedent(COMES_UP))
    await server.start()
    process, scratch = launched_by(server), server.scratch
    assert f"--port {server.url.rpartition(':')[2]}" in " ".join(process.cmdline())
    key = (scratch / "server.yaml").read_text().removeprefix("api-key: ").strip()
    assert server.headers == {"Authorization": f"Bearer {key}"}
    assert key not in " ".join(process.cmdline()), "other users can read command lines"
    assert "loading ['--config'" in server.log_path.read_text()
    await server.stop()
    assert not process.is_running()
    assert not scratch.exists()
    with pytest.raises(WorkerDiedError, match=r"(?s)sglang-5 was stopped. Last lines of .*sglang-5.log:.*Uvicorn"):
        await server.wait_exit()


async def test_a_server_uses_another_port_if_its_port_is_already_in_use(make_server):
    server = make_server(textwrap.dedent(PORT_IS_TAKEN.format(num_taken=1)) + textwrap.dedent(COMES_UP))
    await server.start()
    assert server.log_path.read_text().count("address already in use") == 1
    assert launched_by(server).is_running()


async def test_a_start_fails_after_several_ports_that_are_already_in_use(make_server):
    server = make_server(textwrap.dedent(PORT_IS_TAKEN.format(num_taken=9)))
    with pytest.raises(WorkerDiedError, match=r"(?s)died with exit status 1. Last lines.*address already in use"):
        await server.start()
    assert server.log_path.read_text().count("address already in use") == sglang_server.BIND_ATTEMPTS


async def test_the_error_of_a_dead_server_shows_the_end_of_its_log(make_server):
    server = make_server(COMES_UP)
    await server.start()
    launched_by(server).send_signal(signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"sglang-5 died with exit status 137. Last lines"):
        await asyncio.wait_for(server.wait_exit(), 20)


async def test_a_server_that_starts_too_slowly_is_stopped_and_the_error_names_the_option(make_server):
    server = make_server("print('still loading', flush=True)\ntime.sleep(600)", start_timeout_s=1.0)
    with pytest.raises(DeadlineError, match=r"not up within 1\.0 s; raise rollout_fleet\.start_timeout_s"):
        await server.start()
    assert server.guard.returncode is not None


@pytest.mark.parametrize("is_made", [False, True], ids=["before the guard starts", "after the guard starts"])
async def test_a_server_that_is_stopped_during_its_launch_leaves_no_process_or_folder(
    make_server, monkeypatch, tmp_path, is_made
):
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
    assert server.guard.returncode is not None
    assert not list(tmp_path.glob("asyncrl-*"))


async def test_a_guard_that_hangs_is_killed_and_the_kernel_kills_the_server(make_server):
    server = make_server(COMES_UP, stop_timeout_s=0.1)
    await server.start()
    process, scratch = launched_by(server), server.scratch
    server.guard.send_signal(signal.SIGSTOP)
    await server.stop()
    await asyncio.to_thread(psutil.wait_procs, [process], 10)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert not scratch.exists()


async def test_a_log_line_longer_than_the_stream_buffer_is_logged_completely(make_server):
    server = make_server("print('x' * 200_000)" + textwrap.dedent(COMES_UP))
    await server.start()
    assert server.log_path.read_bytes().startswith(b"x" * 200_000 + b"\n")


async def test_a_server_that_was_never_started_raises_an_error_and_can_be_stopped(make_server):
    server = make_server(COMES_UP)
    await server.stop()
    with pytest.raises(WorkerDiedError, match="sglang-5 was never started"):
        await server.wait_exit()


def option(arguments, name):
    return arguments[arguments.index(name) + 1]


def test_a_server_reports_log_probs_with_temperature_for_any_variable_of_the_shell(make_server, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    assert make_server("").environment(tmp_path)["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "false"


def test_the_command_line_depends_on_device_and_options(make_server, tmp_path):
    config = SGLangConfig(memory_saver=True, tp_size=2, extra_args=["--chunked-prefill-size", "64"])
    on_cpu = make_server("", config=config)
    arguments = on_cpu.arguments(tmp_path)
    assert option(arguments, "--dtype") == "float32"
    assert not {"--enable-memory-saver", "--disable-radix-cache", "--enable-fp32-lm-head"} & set(arguments)
    assert arguments[-2:] == ["--chunked-prefill-size", "64"]
    assert str(sglang_server.CPU_KV_TOKENS) in arguments
    assert on_cpu.environment(tmp_path)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert on_cpu.environment(tmp_path)["TORCHDYNAMO_DISABLE"] == "1", "the path of torch can contain a space"
    on_gpu = make_server("", config=config, device=EngineDevice.cuda)
    arguments = on_gpu.arguments(tmp_path)
    assert option(arguments, "--dtype") == "bfloat16"
    assert {"--enable-memory-saver", "--enable-fp32-lm-head"} <= set(arguments)
    assert not {"--max-total-tokens", "--attention-backend"} & set(arguments)
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu.environment(tmp_path)
    keeping = make_server("", config=SGLangConfig(on_update=OnUpdate.keep))
    assert {"--disable-radix-cache", "--disable-overlap-schedule"} <= set(keeping.arguments(tmp_path))


def test_a_cuda_server_uses_triton_for_head_sizes_that_other_backends_do_not_support(make_server, tmp_path):
    def backend(head_dim, device=EngineDevice.cuda, **options):
        arguments = make_server("", device=device, head_dim=head_dim, **options).arguments(tmp_path)
        return [word for name, word in itertools.pairwise(arguments) if name == "--attention-backend"]

    assert [backend(head_dim) for head_dim in (16, 80, 96)] == [["triton"]] * 3
    assert [backend(head_dim) for head_dim in (64, 128, 256, 0)] == [[]] * 4
    assert backend(16, device=EngineDevice.cpu) == []
    own = SGLangConfig(extra_args=["--attention-backend", "fa3"])
    assert backend(96, config=own)[-1] == "fa3", "the user's option must come last"


@pytest.mark.parametrize("dtype", ["float32", "float"])
def test_the_error_for_float32_on_cuda_names_the_option(make_server, dtype):
    message = "rollout_fleet.sglang.dtype must be auto, bfloat16 or float16 with rollout_fleet.device=cuda, got float"
    with pytest.raises(ValueError, match=message):
        RolloutFleetConfig(device=EngineDevice.cuda, sglang=SGLangConfig(dtype=dtype))
    with pytest.raises(ValueError, match=message):  # this config does not name the device, so the server checks
        make_server("", device=EngineDevice.cuda, config=SGLangConfig(dtype=dtype))
    RolloutFleetConfig(device=EngineDevice.cuda, engine=EngineKind.transformers, sglang=SGLangConfig(dtype=dtype))


@pytest.fixture
def no_caches_named(monkeypatch):
    """Unset all environment variables of compiler caches. torch sets such a variable at its first compilation."""
    for name in sglang_server.COMPILE_CACHES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.long
@pytest.mark.usefixtures("no_caches_named")
def test_a_cuda_server_stores_compiled_kernels_outside_its_scratch_folder(make_server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("QUACK_CACHE_DIR", "/elsewhere")
    scratch = tmp_path / "scratch"
    environment = make_server("", device=EngineDevice.cuda).environment(scratch)
    assert environment["TMPDIR"] == str(scratch)
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "asyncrl" / "compile" / "torchinductor")
    assert environment["QUACK_CACHE_DIR"] == "/elsewhere", "the user's own folder must be used"
    assert (tmp_path / "cache" / "asyncrl" / "compile").stat().st_mode & 0o777 == 0o700
    command = [
        sys.executable,
        "-c",
        "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())",
    ]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.strip() == environment["TORCHINDUCTOR_CACHE_DIR"]


@pytest.mark.usefixtures("no_caches_named")
def test_a_cuda_server_starts_without_a_kernel_folder_and_logs_a_warning(make_server, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    environment = make_server("", device=EngineDevice.cuda).environment(tmp_path)
    assert "TORCHINDUCTOR_CACHE_DIR" not in environment
    assert "set XDG_CACHE_HOME to a writable folder" in caplog.text


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_cuda_server_does_not_inherit_the_allocator_options_of_torch(make_server, tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(name, "expandable_segments:True")
    assert name not in make_server("", device=EngineDevice.cuda).environment(tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),  # the second path is too long for any file system
    [("/dev/full", "/dev/full: [Errno 28] No space left on device"), ("n" * 300, "File name too long")],
)
async def test_a_log_file_that_cannot_be_written_or_created_does_not_block_a_server(
    make_server, caplog, tmp_path, path, words
):
    server = make_server('for _ in range(20_000):\n    print("x" * 100)\n' + textwrap.dedent(COMES_UP))
    server.log_path = tmp_path / path
    await server.start()
    [warning] = [record.message for record in caplog.records if "is left out" in record.message]
    assert words in warning
    assert "Uvicorn running" in server.log_tail()
