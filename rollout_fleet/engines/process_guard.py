"""Runs a server so that nothing of it outlives its owner.

Usage: ``process_guard.py OWNER_PID SCRATCH_DIR COMMAND...``

SGLang's children die with the server only once they have finished importing, so the kernel's parent-death signal on
the server alone leaks them. This process, of the standard library only, gets that signal instead and kills the
server's whole process group; then it removes what the group leaves in SCRATCH_DIR and in shared memory. It waits in
``wait`` and is woken by the server's exit, by SIGHUP from its owner or from the kernel at its owner's death (kill the
server), or by SIGUSR1 (remember what shared memory the server has by now). Nothing is terminated gently: what the
server holds is of no use without its owner, and SGLang looks for a SIGTERM only every five seconds. Guard and server
ignore SIGINT and SIGTERM, which a scheduler sends to every process at once: their owner decides when they end.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = "/dev/shm/"
HANDLED = {signal.SIGHUP, signal.SIGUSR1}
LEFT_TO_OWNER = {signal.SIGINT, signal.SIGTERM}


def signal_at_parent_death(signum: int) -> None:
    """Ask the kernel for ``signum`` when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none is left as a zombie."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


class Guard:
    """One server process group and what it leaves behind."""

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
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the guard ignores it, as caretakers do

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGUSR1:
            self._look_until_not_asked()
            return
        self._shared_memory |= self._mapped_shared_memory()
        self._kill_group()

    def _look_until_not_asked(self) -> None:
        """Remember the shared memory. Signals may come faster than it is found, and must not nest without end."""
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
        """Wait for the server's orphans, which come to this process as their subreaper."""
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()

    def _mapped_shared_memory(self) -> set[int]:
        """Inodes of the shared memory that the group maps now; a semaphore is not mapped under its own name."""
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

    def _remove_shared_memory(self) -> None:
        for entry in os.scandir(SHARED_MEMORY):
            if entry.inode() in self._shared_memory:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    def wait(self) -> int:
        """Wait for the server to end, then clear up after it; returns its exit status as a shell would give it."""
        status = self._server.wait()
        self._shared_memory |= self._mapped_shared_memory()
        self._kill_group()
        self._reap_group()
        self._remove_shared_memory()
        return status if status >= 0 else 128 - status


def main() -> int:
    """Guard the command given on the command line."""
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
