"""The pipes between a rollout worker and a child process that runs a user's code, and the child's temporary files.

A message is a frame: eight bytes with the length of the content (little-endian), then the content.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import struct
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from asyncrl.core.host import end_with_parent, outlive_stop

LENGTH = struct.Struct("<Q")
READY = "ready"
"""The first message of a child: it can take requests now."""
MARK = "ASYNCRL_CHILD"
"""Name of the environment variable that marks a child and all its descendants. `kill_marked` finds them by it."""
_FOLDER = "asyncrl-child-"
_ROUNDS = 20


def open_pipes(parent_pid: int) -> tuple[BinaryIO, BinaryIO]:
    """Prepare this child process, and return a pair: the pipe with the parent's requests, and the pipe for the answers.

    This process is killed when its parent, the process ``parent_pid``, ends. User code gets an empty standard input.
    Output that user code prints goes to the worker's log.
    """
    end_with_parent()
    if os.getppid() != parent_pid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outlive_stop()
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    # Close the pipes in forks of this process. Otherwise the parent would not notice that this process has ended.
    for pipe in (questions.raw, answers.raw):
        os.register_at_fork(after_in_child=pipe.close)
    return questions, answers


def write_frame(stream: BinaryIO, answer: Any) -> None:
    """Write ``answer`` to a pipe: eight bytes of length, then ``answer`` as JSON."""
    frame = json.dumps(answer).encode()
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()


def kill_marked(name: str, value: str, *, spare: Collection[int] = ()) -> int:
    """Kill all processes with the environment variable ``name=value``, and return the number of killed processes.

    Child processes inherit the variable. A process whose id is in ``spare`` is not killed.
    """
    mark = f"{name}={value}".encode()
    killed: set[int] = set()
    for _ in range(_ROUNDS):  # search again, because a process may fork during a search
        found = {
            int(entry.name)
            for entry in Path("/proc").glob("[0-9]*")
            if int(entry.name) not in spare and mark in _environment(entry)
        }
        if not found - killed:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    return len(killed)


class ChildFolder:
    """A folder for a child's temporary files. The name of the folder ends with ``mark``.

    This process holds a lock on the folder until `remove` is called. If this process is killed, the lock is released.
    Then `clear_up_unlocked` in another process removes the folder.
    """

    def __init__(self, mark: str) -> None:
        new = tempfile.mkdtemp(prefix="asyncrl-new-")
        self.path = os.path.join(os.path.dirname(new), _FOLDER + mark)
        # A sandboxed program may run as another user, who must be able to enter the folders inside this folder.
        os.chmod(new, 0o711)
        self._lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # some file systems do not support locks
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        # Lock the folder before renaming it. Other processes remove each unlocked folder that begins with `_FOLDER`.
        os.rename(new, self.path)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    @staticmethod
    def clear_up_unlocked() -> None:
        """Remove the folders of children whose parents were killed. First kill the programs of these children."""
        for folder in Path(tempfile.gettempdir()).glob(_FOLDER + "*"):
            with suppress(OSError):
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    kill_marked(MARK, folder.name.removeprefix(_FOLDER))
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(lock)


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
