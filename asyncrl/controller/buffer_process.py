"""Watches the replay buffer's server, a child process, for its death."""

from __future__ import annotations

import asyncio
import os
from typing import NoReturn

from asyncrl.protocol.errors import WorkerDiedError
from buffer.process import BufferProcess


async def buffer_died(server: BufferProcess) -> NoReturn:
    """Wait for the server to end; woken by the kernel through a pid file descriptor.

    Raises:
        WorkerDiedError: it ended; the message ends with its log.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    descriptor = os.pidfd_open(server.process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    raise WorkerDiedError(
        f"the buffer server (pid {server.process.pid}) died with status {server.process.poll()}; its log ends:\n"
        f"{server.log_tail()}"
    )
