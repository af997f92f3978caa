"""Starts, watches and stops one SGLang server, which runs under `process_guard`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from pathlib import Path
from typing import NoReturn

from asyncrl.core.errors import WorkerDiedError
from asyncrl.core.host import socket_base
from asyncrl.core.image_files import is_vision_model
from asyncrl.core.stacks import missed
from rollout_fleet.config import EngineDevice, OnUpdate, RolloutFleetConfig

from .engine import cancel
from .process_guard import without_secrets
from .server_hooks import IMAGES_VARIABLE, ORDER_VARIABLE, PLUGIN, WEIGHT_LOADER, write_plugin

logger = logging.getLogger(__name__)

READY_LINE = "Uvicorn running on"
BIND_FAILURE = "address already in use"
BIND_ATTEMPTS = 3
TAIL_LINES = 40
SERVER_KEEP_ALIVE_S = 60  # the server closes an idle connection after this many seconds; SGLang's default is 5
CPU_KV_TOKENS = 32768
COMMON_HEAD_DIMS = (64, 128, 256)
"""Head sizes that all attention backends of SGLang support."""
COMPILE_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention_cute_dsl",
    "QUACK_CACHE_DIR": "quack",
}
"""Cache folders of compilers, by environment variable. Without the variable, the compiler's cache is in TMPDIR."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
GUARD = Path(__file__).with_name("process_guard.py")
_LONGEST_SOCKET = "asyncrl-xxxxxxxx/tmpxxxxxxxx_64"
_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "[%(asctime)s %(process)d %(levelname)s] %(message)s"}},
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stdout"}},
    "root": {"level": "WARNING", "handlers": ["out"]},
    # Hide three harmless tracebacks: SGLang calls its own HTTP server before this server accepts connections.
    "loggers": {"sglang.srt.entrypoints.http_server": {"level": "ERROR"}},
}


class SGLangServer:
    """One SGLang server with all its processes. After `start`, the server can be called at `url` with `headers`.

    The server's log is ``<name>-<rank>.log``.

    Args:
        head_dim: Size of an attention head; 0 if heads differ in size.
        fp32_head: Whether the output layer computes in float32. None: on a GPU only.
    """

    def __init__(
        self,
        config: RolloutFleetConfig,
        *,
        model_path: str,
        device: EngineDevice,
        rank: int,
        log_dir: str,
        seed: int,
        head_dim: int = 0,
        fp32_head: bool | None = None,
        name: str = "sglang",
    ) -> None:
        self.name = f"{name}-{rank}"
        self.log_path = Path(log_dir) / f"{self.name}.log"
        self._fleet, self._config = config, config.sglang
        self._model_path = model_path
        self._device = device
        self._head_dim = head_dim
        self._has_fp32_head = device is EngineDevice.cuda if fp32_head is None else fp32_head
        self._dtype = config.sglang.dtype_on(device)
        self._seed = seed
        self._port = 0
        self._api_key = secrets.token_hex(24)  # use a hexadecimal key, because the key must not begin with a dash
        self._guard: Process | None = None
        self.scratch: Path | None = None
        self._log_task: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._ready = asyncio.Event()
        self._stopping = False
        self._launching = asyncio.Lock()

    @property
    def url(self) -> str:
        """The server's URL, without a path. Example: ``"http://127.0.0.1:40213"``."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def guard(self) -> Process | None:
        """The process that started the server, cleans up after it and ends with it (`process_guard`).

        None before `start`.
        """
        return self._guard

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers with the server's API key. Every request needs them."""
        return {"Authorization": f"Bearer {self._api_key}"}

    @property
    def saves_memory(self) -> bool:
        """Whether the server can free its GPU memory while it is paused, and allocate the memory again later."""
        return self._config.memory_saver and self._device is EngineDevice.cuda

    @property
    def weight_order(self) -> Path:
        """Path of the file that tells the server which weights to load. The caller writes it before each load.

        `server_hooks.load` reads this file, and writes its reports to the same folder.
        """
        assert self.scratch is not None
        return self.scratch / "weights.json"

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks (GPUs, or processes on a CPU) that run the server's model."""
        return self._config.tp_size

    async def start(self) -> None:
        """Start the server and wait until it accepts connections.

        If another process takes the server's port, this method tries another port. Raises `DeadlineError` after
        ``start_timeout_s``, and `WorkerDiedError` if the server's process ends.
        """
        try:
            async with asyncio.timeout(self._fleet.start_timeout_s):
                for attempt in range(1, BIND_ATTEMPTS + 1):
                    async with self._launching:
                        if self._stopping:
                            raise self._death()
                        await self._launch()
                    if await self._came_up():
                        return
                    if not any(BIND_FAILURE in line for line in self._tail) or attempt == BIND_ATTEMPTS:
                        raise self._death()
                    logger.warning("%s: port %d was taken by another process; trying another", self.name, self._port)
        except TimeoutError:
            error = missed(
                f"{self.name} was not up within {self._fleet.start_timeout_s} s; raise rollout_fleet.start_timeout_s "
                "if the model is large",
                f". {self.log_tail()}",
            )
            await self.stop()
            raise error from None

    async def wait_exit(self) -> NoReturn:
        """Wait for the server to exit. Then raise `WorkerDiedError`."""
        if self._guard is None or self._log_task is None:
            raise WorkerDiedError(f"{self.name} was never started")
        await self._guard.wait()
        await asyncio.wait([self._log_task], timeout=1.0)
        raise self._death()

    async def stop(self) -> None:
        """Kill the server with all its processes, and wait until its memory and temporary files are removed."""
        self._stopping = True
        async with self._launching:  # wait until a running launch has ended
            guard = self._guard
        if guard is None:
            return
        if guard.returncode is None:
            guard.send_signal(signal.SIGHUP)
            try:
                async with asyncio.timeout(self._fleet.server_stop_timeout_s):
                    await guard.wait()
            except TimeoutError:
                logger.error(
                    "%s: its guard did not exit; killing the guard, and with it the kernel kills the server", self.name
                )
                guard.kill()
                await guard.wait()
        if self.scratch is not None:  # the guard process may have died before it removed the server's scratch folder
            shutil.rmtree(self.scratch, ignore_errors=True)
        if self._log_task is not None:
            await asyncio.wait([self._log_task], timeout=1.0)
            self._log_task.cancel()

    async def _launch(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._ready.clear()
        self._tail.clear()
        self.scratch = scratch = Path(tempfile.mkdtemp(prefix="asyncrl-", dir=socket_base(_LONGEST_SOCKET)))
        (scratch / "logging.json").write_text(json.dumps(_LOGGING))
        (scratch / "server.yaml").write_text(f"api-key: {self._api_key}\n")
        on_cpu = self._device is EngineDevice.cpu
        has_kernels = not on_cpu or importlib.util.find_spec("sgl_kernel") is not None
        write_plugin(scratch / "plugins", has_kernels=has_kernels)
        command = [sys.executable, "-m", "sglang.launch_server", *self.arguments(scratch)]
        guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(scratch)]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        logger.info("%s: starting on port %d, log in %s", self.name, self._port, self.log_path)
        try:
            self._guard = await asyncio.create_subprocess_exec(
                *guard,
                *command,
                env=self.environment(scratch),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,  # the guard must survive when Ray kills the process group of a dead worker
            )
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        self._log_task = asyncio.create_task(self._keep_log(self._guard))

    async def _came_up(self) -> bool:
        assert self._guard is not None
        tasks = ready, ended = asyncio.create_task(self._ready.wait()), asyncio.create_task(self.wait_exit())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and self._guard.returncode is None:
                return True
            await asyncio.wait([ended])
            return False
        finally:
            await cancel(tasks)

    async def _keep_log(self, guard: Process) -> None:
        """Copy the server's output to its log file until the output ends.

        Output that cannot be written is dropped, because an unread pipe would block the server.
        """
        assert guard.stdout is not None
        log, lost = None, ""
        with contextlib.ExitStack() as opened:
            while chunk := await _read_line(guard.stdout):
                try:
                    log = log or (None if lost else opened.enter_context(self.log_path.open("ab", buffering=0)))
                    if log is not None:
                        log.write(chunk)
                except OSError as error:
                    if not lost:
                        logger.warning("%s: output is left out of %s: %s", self.name, self.log_path, error)
                    lost = str(error)
                line = chunk.decode(errors="replace").rstrip()
                self._tail.append(line)
                if not self._ready.is_set() and guard.returncode is None:
                    # Make the guard record the server's shared-memory files now, while the server runs.
                    # After the server's death, the guard could not find the server's shared-memory files.
                    with contextlib.suppress(ProcessLookupError):
                        guard.send_signal(signal.SIGUSR1)
                if READY_LINE in line:
                    self._ready.set()

    def arguments(self, scratch: Path) -> list[str]:
        """Return the command-line arguments of ``sglang.launch_server`` as a list of words.

        ``scratch`` is the server's folder for temporary files.
        """
        config, on_cpu = self._config, self._device is EngineDevice.cpu
        arguments = {
            "--config": str(scratch / "server.yaml"),
            "--model-path": self._model_path,
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--device": self._device.value,
            "--dtype": self._dtype,
            "--tp-size": str(config.tp_size),
            "--max-running-requests": str(config.max_running_requests),
            "--random-seed": str(self._seed),
            "--weight-version": "0",
            "--log-level": "warning",
            "--log-level-http": "info",
            "--uvicorn-access-log-exclude-prefixes": "/",
            "--custom-weight-loader": WEIGHT_LOADER,
        }
        if config.max_total_tokens or on_cpu:
            arguments["--max-total-tokens"] = str(config.max_total_tokens or CPU_KV_TOKENS)
        # Skip SGLang's own warm-up: it requests no log-probs, and uses token ids that a small vocabulary lacks.
        flags = ["--skip-server-warmup", "--sleep-on-idle", "--incremental-streaming-output"]
        if not self._fleet.needs_server_tokenizer:
            flags.append("--skip-tokenizer-init")
        if self._has_fp32_head:  # with bfloat16 logits, log-probs have errors of up to 0.06 nats
            flags.append("--enable-fp32-lm-head")
        if not on_cpu and self._head_dim and self._head_dim not in COMMON_HEAD_DIMS:
            arguments["--attention-backend"] = "triton"
        if self.saves_memory:
            flags.append("--enable-memory-saver")
        if config.on_update is OnUpdate.keep:
            # Disable the prefix cache: it cannot be flushed while requests run, so it would serve KV of old weights.
            # Disable overlapped scheduling, which labels the last tokens before an update with the new version.
            flags += ["--disable-radix-cache", "--disable-overlap-schedule"]
        return [*(word for pair in arguments.items() for word in pair), *flags, *config.extra_args]

    def environment(self, scratch: Path) -> dict[str, str]:
        """Return all environment variables of the server, by name. Only the secrets in ``pass_secrets`` are kept.

        ``scratch`` is the server's folder for temporary files.
        """
        environment = {
            **without_secrets(self._fleet.pass_secrets),
            "TMPDIR": str(scratch),
            "SGLANG_LOGGING_CONFIG_PATH": str(scratch / "logging.json"),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",  # makes SGLang return log-probs at the sampling temperature
            "PYTHONUNBUFFERED": "1",
            "TQDM_DISABLE": "1",
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEP_ALIVE_S),
            ORDER_VARIABLE: str(scratch / "weights.json"),
            # Let the ranks meet through a file. SGLang's default is a TCPStore, which answers clients of any host.
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous",
            # SGLang uses the next two values in the names of its shared-memory segments
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
        }
        if others := os.environ.get("SGLANG_PLUGINS"):
            environment["SGLANG_PLUGINS"] = f"{others},{PLUGIN}"
        if is_vision_model(self._model_path):
            environment[IMAGES_VARIABLE] = "1"
        if self._device is EngineDevice.cuda:
            environment |= self._compile_caches()
            # Remove allocator options: expandable segments break the memory saver, and CUDA IPC cannot share them.
            for name in ALLOCATOR_VARIABLES:
                environment.pop(name, None)
        if self._device is EngineDevice.cpu:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            environment.setdefault("OMP_NUM_THREADS", "1")
            # Disable torch.compile: on a CPU it needs a C++ compiler, and fails if the path of torch has a space.
            environment.setdefault("TORCHDYNAMO_DISABLE", "1")
            if self._config.tp_size > 1:
                cores = sorted(os.sched_getaffinity(0))
                of_ranks = (cores[rank % len(cores)] for rank in range(self._config.tp_size))
                environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, of_ranks))
        imported = [str(scratch / "plugins"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(imported).strip(os.pathsep)
        return environment

    def _compile_caches(self) -> dict[str, str]:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "asyncrl", "compile")
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            logger.warning(
                "%s: no folder for compiled kernels (%s), so each server compiles again; set XDG_CACHE_HOME to a "
                "writable folder",
                self.name,
                error,
            )
            return {}
        return {name: str(home / folder) for name, folder in COMPILE_CACHES.items() if name not in os.environ}

    def _death(self) -> WorkerDiedError:
        status = self._guard.returncode if self._guard is not None else None
        how = "was stopped" if self._stopping else f"died with exit status {status}"
        return WorkerDiedError(f"{self.name} {how}. {self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines of the server's output as one text, with the path of the log, for error messages."""
        return f"Last lines of {self.log_path}:\n" + "\n".join(self._tail)


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Read one line, or the beginning of a very long line. Returns ``b""`` at the end of the stream."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)
