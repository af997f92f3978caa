"""The replay buffer's server as a child process: started, watched, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from asyncrl.protocol.errors import DeadlineError, WorkerDiedError
from asyncrl.protocol.logs import log_tail
from buffer.config import BufferConfig


class BufferProcess:
    """The server process. It announces its address on a pipe, and dies with this process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path
        self.address = address

    @classmethod
    async def start(cls, config: BufferConfig, *, groups_per_step: int, log_dir: Path, timeout_s: float) -> BufferProcess:
        """Start the server and wait for its address."""
        raise RuntimeError

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid
