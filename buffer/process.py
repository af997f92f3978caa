"""Runs the buffer server as a child process: starts it, reads its address, restarts it, and stops it."""

import asyncio
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, NoReturn, Self

from asyncrl.core.errors import DeadlineError, ReplayBufferError, WorkerDiedError
from asyncrl.core.lives import Faults, keep_up
from asyncrl.core.record import ProfileConfig
from asyncrl.core.remote import last_lines, process_end
from asyncrl.core.stacks import missed

from .client import ClientSocket
from .config import BufferConfig, Durability
from .keys import BufferRole, client_keys, ensure_keys
from .operations import Hello
from .role_clients import BufferConnection
from .sockets import folder_of, remove_socket_folder, with_socket_folder

logger = logging.getLogger(__name__)

_PROBES_PER_DEADLINE = 6
_RESTART_PAUSE_S = 0.2
_PAYLOADS_LOST = "; its payloads are lost; buffer.durability=disk would keep them"
_LEDGER_LOST = "; with buffer.durability=disk it would be restarted with its contents"


class BufferProcess:
    """A running buffer server, or store server number ``store``.

    Args:
        log_path: Log of the server; None for this process's stderr.
        waits: Whether the constructor waits until the server announces its address. If not, call `read_address` later.
        profile: Options of the profile that the server records.

    Raises:
        DeadlineError: The server did not announce its address in time.
        WorkerDiedError: The server ended before it announced its address.

    Attributes:
        address: Address of the server; empty until it was read.
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
        self._is_store = store is not None
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
        """Wait until the server announces its address. If the address does not come, stop the server.

        Raises:
            DeadlineError: The address did not come in time.
            WorkerDiedError: The server ended before it announced its address.
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
                raise missed(f"the buffer server did not announce its address within {timeout_s:.1f} s")
            chunk = os.read(stdout.fileno(), 4096)
            if not chunk:
                raise WorkerDiedError(f"the buffer server ended during its start; its log ends:\n{self.log_tail()}")
            line += chunk
        return line.decode().strip()

    @property
    def connection(self) -> BufferConnection:
        """The data that a client needs to connect to the server: address, folder of keys, and name of the run."""
        return BufferConnection(
            address=self.address,
            request_timeout_s=self._config.request_timeout_s,
            keys=self._config.keys,
            epoch=self._config.epoch,
        )

    async def end(self, *, notices_silence: bool, role: BufferRole) -> str:
        """Wait until the server has ended. Return a text that says how the server ended.

        If ``notices_silence`` is true, send requests with the key of ``role``, and kill a server that does not answer.
        The method kills such a server within two thirds of the clients' deadline, so a restarted server can still
        answer the clients.
        """
        waiting = {asyncio.ensure_future(process_end(self.process.pid))}
        if notices_silence:
            waiting.add(asyncio.ensure_future(self._silence(role)))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        status = self.process.poll()
        self.kill()
        if status is None:
            limit_s = self._config.request_timeout_s / 2
            return f"answered nothing for {limit_s:.1f} s (half of buffer.request_timeout_s) and was killed"
        return f"died with status {status}"

    async def _silence(self, role: BufferRole) -> None:
        timeout_s = self._config.request_timeout_s
        keys = client_keys(Path(self._config.keys), role) if self._config.keys else None
        if keys is not None and self._is_store:
            keys = keys.for_stores()
        link = ClientSocket(self.address, timeout_s=timeout_s / 2, keys=keys)
        try:
            while True:
                await asyncio.sleep(timeout_s / _PROBES_PER_DEADLINE)
                with suppress(ReplayBufferError):  # a server that answers with an error is not silent
                    await link.call(Hello())
        except DeadlineError:
            return
        finally:
            link.close()

    def log_tail(self) -> str:
        """Return the last lines of the server's log."""
        if self._log_path is None:
            return "(on stderr)"
        return last_lines(str(self._log_path))

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop the server with SIGUSR1, because a run's server blocks SIGTERM. Kill the server after ``timeout_s``."""
        self.process.send_signal(signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if not self._config.socket_folder:  # a killed server cannot remove the folder that the server made
            remove_socket_folder(folder_of(self.address))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class BufferSupervisor:
    """A buffer server or a store server that `keep_up` restarts, at most ``buffer.restarts`` times.

    A restarted server keeps its address and continues its journal. Its clients reconnect and repeat unacknowledged
    requests. Without a journal, a buffer server is not restarted, and a restarted store server is empty.

    Make this object on a thread that ends after the server. When the thread that started the server ends, the kernel
    kills the server.

    Args:
        config: Options of the server. Arguments that are not described here are those of `BufferProcess`.
        role: Role whose key the supervisor uses when it checks whether the server answers.
        on_restart: Called with one line of text for each restart.

    Attributes:
        connection: Address and keys of the server, set by `read_address`. They stay valid after a restart.
        faults: Decides whether the server restarts, and counts the restarts so far.
    """

    connection: BufferConnection

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
        role: BufferRole = BufferRole.controller,
        on_restart: Callable[[str], None] = logger.warning,
    ) -> None:
        config, self._own_folder = with_socket_folder(config)
        self._config = config
        self._store = store
        self._role = role
        self._on_restart = on_restart
        self._is_kept = config.durability is Durability.disk
        self._may_restart = self._is_kept or store is not None
        self.faults = Faults(config.restarts, backoff_s=_RESTART_PAUSE_S, longest_backoff_s=_RESTART_PAUSE_S)
        self._options = {"log_path": log_path, "start_timeout_s": start_timeout_s, "store": store, "profile": profile}
        self._groups_per_step = groups_per_step
        self._server = self._launch()
        if waits:
            self.read_address()

    def read_address(self) -> str:
        """Wait until the server announces its address, and return the address.

        Raises:
            DeadlineError: The address did not come in time.
            WorkerDiedError: The server ended before it announced its address.
        """
        self._server.read_address()
        self.connection = self._server.connection
        # Keep the port, because a restarted store server without a journal does not know its earlier port.
        if self._store is not None and self._config.host:
            self._config = replace(self._config, port=int(self._server.address.rpartition(":")[2]))
        return self._server.address

    def _launch(self) -> BufferProcess:
        return BufferProcess(self._config, groups_per_step=self._groups_per_step, waits=False, **self._options)

    async def begin(self) -> None:
        """Start a new server at the old address, and wait until it announces this address."""
        self._server = self._launch()
        await asyncio.to_thread(self._server.read_address)
        took_s = time.monotonic() - self._died_s
        self._on_restart(
            f"{self._how}; it was started again at {self.connection.address} within {took_s:.1f} s (restart "
            f"{self.faults.num_restarts} of buffer.restarts={self._config.restarts})"
        )

    async def watch(self) -> NoReturn:
        """Wait until the server dies or hangs. Then raise `WorkerDiedError`."""
        server, name = self._server, "the buffer server" if self._store is None else f"store server {self._store}"
        how = await server.end(notices_silence=self._may_restart, role=self._role)
        lost = _LEDGER_LOST if self._store is None else _PAYLOADS_LOST
        self._how = f"{name} (pid {server.process.pid}) {how}" + ("" if self._is_kept else lost)
        self._died_s = time.monotonic()
        self._death = WorkerDiedError(f"{self._how}; its log ends:\n{server.log_tail()}")
        raise self._death

    async def end(self, fault: Exception) -> float:
        """Decide whether to restart the server after ``fault``. Return the seconds to wait before the restart.

        Raises ``fault`` if this server must not be restarted. Raises `WorkerDiedError` after the last allowed restart.
        """
        if not self._may_restart:
            raise fault
        num_before = self.faults.num_restarts
        if (pause_s := self.faults.add(time.monotonic())) is None:
            raise WorkerDiedError(f"buffer.restarts={self._config.restarts} are used up: {self._death}")
        if fault is self._death:
            return 0.0
        logger.error("restart %d failed: %r", num_before, fault)
        return pause_s

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()
        remove_socket_folder(self._own_folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class StoreServers:
    """Runs ``num_store_servers`` store servers (processes that hold the trajectories) on the ledger server's host.

    Create this object while an asyncio event loop runs. A store server that dies or hangs is restarted at its address,
    up to ``buffer.restarts`` times. ``on_lost`` is called when a server cannot be restarted. The index in ``addresses``
    is the ledger's store number.

    Raises `AsyncRLError` if a server does not start.
    """

    def __init__(
        self, config: BufferConfig, *, groups_per_step: int, on_lost: Callable[[WorkerDiedError], None]
    ) -> None:
        self._on_lost = on_lost
        self._servers: list[BufferSupervisor] = []
        self._watches: list[asyncio.Task[None]] = []
        own = store_config(config)
        try:
            for number in range(config.num_store_servers):
                server = BufferSupervisor(
                    own,
                    groups_per_step=groups_per_step,
                    log_path=None,
                    store=number,
                    waits=False,
                )
                self._servers.append(server)
            self.addresses = [server.read_address() for server in self._servers]
        except BaseException:
            self.close()
            raise
        self._watches = [asyncio.get_running_loop().create_task(self._watch(server)) for server in self._servers]

    def close(self) -> None:
        """Stop the servers."""
        for watch in self._watches:
            watch.cancel()
        for server in self._servers:
            server.stop()

    async def _watch(self, server: BufferSupervisor) -> None:
        try:
            await keep_up(server)
        except Exception as error:  # noqa: BLE001 - any error means that this store is lost
            self._on_lost(WorkerDiedError(str(error)))


def store_config(config: BufferConfig) -> BufferConfig:
    """Return the options of a store server, made from the options ``config`` of the whole buffer.

    A store server begins empty if its journal belongs to another epoch (name of the run).
    """
    own = replace(config, port=0, bulk_port=0, num_store_servers=0)
    if config.durability is Durability.memory:  # with durability=disk, the server reads the epoch from its journal
        own = replace(own, epoch=config.epoch or uuid.uuid4().hex[:16])
    return own
