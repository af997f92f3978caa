"""A process that has imported what others need, which are forked from it: they are there at once.

Importing torch and transformers takes seconds of a core in each process. Where a run has a Ray cluster of its own on
CPUs, a fork server does it once, while Ray starts. Whoever starts a process of the run calls its *proxy* in place of
Python, which takes a few milliseconds::

    raylet, or the run ── starts ──▶ proxy ── arguments, environment, files ──▶ fork server ── forks ──▶ process
                                       ▲                                            │
                                       └────────────── how it ended ────────────────┘

A proxy lives as long as its process. When it is killed, so is the process; the death of the server ends both. The
process has the proxy's CPUs, limits, niceness and place in the order of the kernel's out-of-memory killer, which
whoever starts a process sets for the one that it knows. It is in a session of its own: a terminal's Ctrl-C reaches the
run alone, which stops it.

The server has one thread: a lock that another one holds would stay locked in what is forked. With more than one after
its imports it ends, and says so in its log; proxies then run Python themselves. CUDA does not survive a fork once it is
in use, so a run on GPUs has no fork server; nor has one in a cluster that it joined, whose nodes may be other hosts.

The server waits for a proxy, for the end of a process, and for its owner, whose end closes its standard input; then it
serves nobody any more, and ends with its last process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from asyncrl.cli.fork_proxy import BEGUN, LENGTH, STATUS, address_of

PROXY = Path(__file__).with_name("fork_proxy.py")
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of who has connected."""
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS, resource.RLIMIT_NPROC)
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment under which numpy, torch and pyarrow start no threads when they are imported."""


class ForkServer:
    """A fork server that this process owns, and how it is called.

    Attributes:
        command: In place of ``python`` in front of arguments.
        process: The server's own.
    """

    def __init__(self, modules: Sequence[str], *, environment: Mapping[str, str], log_path: Path) -> None:
        """Start it; it imports ``modules`` under ``environment``, which the processes that it is for have too."""
        name = f"asyncrl-fork-{secrets.token_hex(8)}"
        self.command: tuple[str, ...] = (sys.executable, "-I", "-S", str(PROXY), name)
        with log_path.open("ab") as log, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address_of(name))
            listener.listen()  # who comes during the imports waits for their end
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.cli.fork_server", str(listener.fileno()), *modules],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[listener.fileno()],
                env={**environment, **_ONE_THREAD},
            )

    def stop(self) -> None:
        """Stop accepting proxies. The server exits when its last child exits; this call does not wait for that."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGUSR1)  # ends it during its imports; it ignores this later
        self.process.stdin.close()


@dataclass(frozen=True, kw_only=True)
class ForkedCommand:
    """What a proxy stands in for.

    Attributes:
        arguments: What follows ``python`` on its command line: a file, or ``-m`` and a module, and their arguments.
        environment: Its environment.
        directory: Its working directory.
        files: Descriptors here of its standard input, output and error.
    """

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    files: tuple[int, ...]

    @classmethod
    def receive(cls, proxy: socket.socket) -> ForkedCommand:
        """Read one from its proxy. Raises `EOFError` if that has ended meanwhile."""
        header, files, _, _ = socket.recv_fds(proxy, LENGTH.size, 3)
        if len(header) < LENGTH.size:
            raise EOFError("a proxy ended before it had sent its command")
        text = bytearray()
        (length,) = LENGTH.unpack(header)
        while len(text) < length:
            if not (part := proxy.recv(length - len(text))):
                raise EOFError("a proxy ended before it had sent its command")
            text += part
        return cls(**json.loads(text), files=tuple(files))

    def become(self) -> None:
        """Make this process, just forked, what ``python ARGUMENTS...`` would be when it begins to run them."""
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment)
        for target, file in enumerate(self.files):
            os.dup2(file, target)
            os.close(file)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        tempfile.tempdir = None  # the server's; this one's environment may name another
        if numpy := sys.modules.get("numpy"):  # its state would be the same in all that are forked
            numpy.random.seed()

    def run(self) -> None:
        """Run the arguments, to their end."""
        first, *rest = self.arguments
        name = rest[0] if first == "-m" else Path(first).name
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())  # its command line remains the server's
        if first == "-m":
            sys.argv, sys.path[0] = rest, self.directory
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = self.arguments, str(Path(first).parent)
            runpy.run_path(first, run_name="__main__")


class _Server:
    """The loop of the server; `next_command` returns in each process that is forked."""

    def __init__(self, listener: socket.socket, owner: IO[bytes]) -> None:
        self._listener = listener
        self._owner = owner
        self._proxies: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        for waited_for in (listener, owner):
            self._selector.register(waited_for, selectors.EVENT_READ)

    def next_command(self) -> ForkedCommand | None:
        """Serve; the command to run, in a process that was forked for it, and None at the end of the server itself."""
        has_owner = True
        while has_owner or self._proxies:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    if (command := self._accept()) is not None:
                        return command
                elif key.fileobj is self._owner:
                    has_owner = False
                    self._selector.unregister(self._owner)
                    self._selector.unregister(self._listener)
                    self._listener.close()
                elif isinstance(key.fileobj, int):
                    self._reap(key.fileobj, key.data)
                elif key.data in self._proxies:  # not one whose process has ended just before
                    self._selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)  # not reaped yet, so the id is no other's
        return None

    def _accept(self) -> ForkedCommand | None:
        """Fork a process for a proxy; its command, in that process."""
        proxy, _ = self._listener.accept()
        try:
            proxy_pid = _checked_pid(proxy)
            command = ForkedCommand.receive(proxy)
        except (OSError, EOFError) as error:
            sys.stderr.write(f"no process for a proxy: {error!r}\n")
            proxy.close()
            return None
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._leave(server_pid)
            proxy.close()
            with suppress(OSError, ValueError):  # it may have ended, of which the server knows
                _take_after(proxy_pid)
            return command
        for file in command.files:
            os.close(file)
        self._proxies[pid] = proxy
        self._selector.register(proxy, selectors.EVENT_READ, pid)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        _tell(proxy, BEGUN)
        return None

    def _leave(self, server_pid: int) -> None:
        """Close, in a forked process, what is the server's, and end with the server."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server_pid:  # it has ended before it could be said
            os._exit(1)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            elif isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _reap(self, descriptor: int, pid: int) -> None:
        """Tell the proxy of a process how that has ended."""
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with self._proxies.pop(pid) as proxy, suppress(KeyError):
            _tell(proxy, STATUS.pack(os.waitstatus_to_exitcode(status)))
            self._selector.unregister(proxy)  # unless it has ended before its process


def _checked_pid(proxy: socket.socket) -> int:
    """The process that has connected. Raises `PermissionError` for another user's, who may run nothing here."""
    pid, user, _ = _CREDENTIALS.unpack(proxy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"user {user} asked, expected {os.geteuid()}")
    return pid


def _take_after(pid: int) -> None:
    """Give this process what the kernel holds of another one's, which the environment does not say."""
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    for kind in _LIMITS:
        resource.setrlimit(kind, resource.prlimit(pid, kind))
    Path("/proc/self/oom_score_adj").write_text(Path(f"/proc/{pid}/oom_score_adj").read_text())
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))


def _tell(proxy: socket.socket, word: bytes) -> None:
    with suppress(ConnectionError):  # it has ended: the next turn of the loop sees that
        proxy.sendall(word)


def main() -> None:
    """Import, then serve; in a process that is forked, run what it is for."""
    descriptor, *modules = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    for module in modules:
        importlib.import_module(module)
    if "ray" in sys.modules:
        sys.exit(f"{modules} import Ray, which has read its environment for good: no worker can be forked from here")
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"{num_threads} threads run after importing {modules}, expected 1: nothing can be forked from here")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    gc.freeze()  # what is there is never looked at again, and so stays shared
    command = _Server(listener, sys.stdin.buffer).next_command()
    if command is not None:
        command.become()
        command.run()


if __name__ == "__main__":
    main()
