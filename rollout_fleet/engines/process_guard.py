"""Removes secrets from environment variables. If this file runs as a script, it is the guard of an inference server.

The guard starts the server, and ends it when the server's owner (the process that started the guard) ends.

Usage of the guard: ``process_guard.py OWNER_PID SCRATCH_DIR COMMAND...``

The guard waits for the exit of the server. SIGHUP from the owner, or from the kernel when the owner dies, makes the
guard kill the server's process group. Then the guard removes SCRATCH_DIR and the process group's files of shared memory
in /dev/shm. The guard can find these files only while the processes run. So SIGUSR1 makes it find and remember the
current files. Guard and server ignore SIGINT and SIGTERM, because a scheduler sends these signals to all processes.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = "/dev/shm/"
HANDLED = {signal.SIGHUP, signal.SIGUSR1}
LEFT_TO_OWNER = {signal.SIGINT, signal.SIGTERM}
_SECRET = re.compile(
    r"AWS_.*|SSH_AUTH_SOCK|(.*_)?(TOKENS?|KEYS?|APIKEY|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_(ID|FILE|PATH))?",
    re.IGNORECASE,
)
_SETTING = re.compile(r"-?\d{0,9}|true|false|yes|no|on|off", re.IGNORECASE)


def is_secret(name: str, value: str = "...") -> bool:
    """Return whether the name of an environment variable looks like the name of a secret. Example: ``HF_TOKEN``.

    A variable ``*_TOKEN`` or ``*_TOKENS`` is not a secret if its value is a number or a switch such as ``true``.
    """
    is_setting = name.upper().endswith(("TOKEN", "TOKENS")) and _SETTING.fullmatch(value) is not None
    return _SECRET.fullmatch(name) is not None and not is_setting


def without_secrets(passed: Collection[str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a copy of the variables ``environment`` without secrets. Secrets whose names are in ``passed`` are kept.

    `is_secret` decides which variables are secrets.

    The removal protects only against accidents, because a process can read the environment of other processes of the
    same user.
    """
    return {name: value for name, value in environment.items() if name in passed or not is_secret(name, value)}


def signal_at_parent_death(signum: int) -> None:
    """Ask the kernel to send the signal ``signum`` to this process when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants, so that this process can wait for them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


class Guard:
    """Runs a server in its own process group.

    When the server's main process ends, the guard kills the other processes of the process group. It also removes the
    shared-memory files of all these processes.
    """

    def __init__(self, command: list[str]) -> None:
        self._shared_memory: set[int] = set()
        self._is_looking = self._is_asked = False
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        self._server = subprocess.Popen(command, start_new_session=True, preexec_fn=self._prepare_server)
        for signum in HANDLED:
            signal.signal(signum, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    @staticmethod
    def _prepare_server() -> None:
        signal_at_parent_death(signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_OWNER)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGUSR1:
            self._look_until_not_asked()
            return
        self._shared_memory |= self._mapped_shared_memory()
        self._kill_group()

    def _look_until_not_asked(self) -> None:
        """Find and record the files of shared memory that the processes of the server's process group have mapped.

        If another SIGUSR1 arrives during the search, search again.
        """
        if self._is_looking:
            self._is_asked = True
            return
        self._is_looking = self._is_asked = True
        while self._is_asked:
            self._is_asked = False
            self._shared_memory |= self._mapped_shared_memory()
        self._is_looking = False

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)

    @staticmethod
    def _reap_group() -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()

    def _mapped_shared_memory(self) -> set[int]:
        """Return the inode numbers of the files of shared memory that the server's process group has mapped.

        File names do not identify the files, because the C library renames the file of a semaphore after mapping it.
        """
        inodes = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) != self._server.pid:
                    continue
                for line in (entry / "maps").read_text().splitlines():
                    fields = line.split(maxsplit=5)
                    if fields[-1].startswith(SHARED_MEMORY):
                        inodes.add(int(fields[4]))
        return inodes

    def wait(self) -> int:
        """Wait until the server's main process ends. Then kill the other processes of the server's process group.

        Also removes the files of shared memory of this process group. Returns the server's exit status, or 128 plus the
        number of the signal if a signal ended the server.
        """
        status = self._server.wait()
        self._shared_memory |= self._mapped_shared_memory()
        self._kill_group()
        self._reap_group()
        for entry in os.scandir(SHARED_MEMORY):
            if entry.inode() in self._shared_memory:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
        return status if status >= 0 else 128 - status


def main() -> int:
    """Run the server's command from ``sys.argv``, and clean up after the server. Returns the server's exit status."""
    owner_pid, scratch_dir, *command = sys.argv[1:]
    for signum in LEFT_TO_OWNER:
        signal.signal(signum, signal.SIG_IGN)
    signal_at_parent_death(signal.SIGHUP)
    adopt_orphans()
    try:
        if os.getppid() != int(owner_pid):
            return 1
        return Guard(command).wait()
    finally:
        shutil.rmtree(scratch_dir, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
