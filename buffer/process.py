"""The buffer server as a child process: start it, learn its address, stop it."""

import json
import os
import select
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, NoReturn, Self

from asyncrl.protocol.errors import DeadlineError, WorkerDiedError
from asyncrl.protocol.record import ProfileConfig
from asyncrl.protocol.remote import last_lines, process_end

from .client import BufferConnection
from .config import BufferConfig
from .keys import ensure_keys


class BufferProcess:
    """A running buffer server, or the store server of number ``store``.

    ``log_path`` takes its log; None leaves it on this process's stderr. ``waits=False`` returns before it announced
    itself and leaves that to `read_address`. ``profile`` says what it records of itself. Raises `DeadlineError` if it
    did not announce itself in time, `WorkerDiedError` if it ended instead.

    Attributes:
        address: Where it listens; empty until it was read.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        groups_per_step: int,
        log_path: Path | None,
        start_timeout_s: float = 30.0,
        store: int | None = None,
        waits: bool = True,
        profile: ProfileConfig | None = None,
    ) -> None:
        self.address = ""
        self._log_path = log_path
        self._start_timeout_s = start_timeout_s
        if config.keys:
            config = replace(config, keys=str(Path(config.keys).resolve()))
            ensure_keys(Path(config.keys))
        self._config = config
        command = [sys.executable, "-m", "buffer.server", "--groups-per-step", str(groups_per_step)]
        command += ["--config", json.dumps(asdict(config))]
        if store is not None:
            command += ["--store", str(store)]
        if profile is not None:
            command += ["--profile", json.dumps(asdict(profile))]
        with log_path.open("ab") if log_path is not None else nullcontext() as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)
        if waits:
            self.read_address()

    def read_address(self) -> None:
        """Wait until the server announces itself; one that does not is ended.

        Raises `DeadlineError` if it did not in time, `WorkerDiedError` if it ended instead.
        """
        try:
            self.address = self._read_line(self._start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def _read_line(self, timeout_s: float) -> str:
        stdout: IO[bytes] | None = self.process.stdout
        assert stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise DeadlineError(f"the buffer server did not announce its address within {timeout_s:.1f} s")
            chunk = os.read(stdout.fileno(), 4096)
            if not chunk:
                raise WorkerDiedError(f"the buffer server ended before it was up; its log ends:\n{self.log_tail()}")
            line += chunk
        return line.decode().strip()

    @property
    def connection(self) -> BufferConnection:
        """How to reach it."""
        return BufferConnection(
            address=self.address,
            request_timeout_s=self._config.request_timeout_s,
            keys=self._config.keys,
            epoch=self._config.epoch,
        )

    async def death(self) -> NoReturn:
        """Wait for the server to end. Raises `WorkerDiedError` if it ended; the message ends with its log."""
        await process_end(self.process.pid)
        status = self.process.poll()
        raise WorkerDiedError(
            f"the buffer server (pid {self.process.pid}) died with status {status}; its log ends:\n{self.log_tail()}"
        )

    def log_tail(self) -> str:
        """The last lines of its log."""
        if self._log_path is None:
            return "(on stderr)"
        return last_lines(str(self._log_path))

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the server: SIGTERM, then SIGKILL after ``timeout_s``."""
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
