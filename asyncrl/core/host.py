"""What a process of a run needs of its host: folders that no other user can write to, and freed memory that it keeps.

Imports neither torch nor ray.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import stat
from contextlib import suppress
from pathlib import Path

from asyncrl.core.errors import AsyncRLError

logger = logging.getLogger(__name__)

FOLDER_MODE = 0o700
FILE_MODE = 0o600
WORKER_BYTES = 256 << 20
"""Freed bytes that a computing process keeps: more than one step of a small model needs, and little for any host."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # as in malloc.h
_PR_SET_PDEATHSIG = 1


class NotPrivate(AsyncRLError):
    """Another user could create files or links in this folder."""


def make_private_folder(folder: Path) -> Path:
    """Create a folder, and missing parents, that only this user can open; return the folder.

    An existing folder of this user is kept. Raises `NotPrivate` if the path is a link or a file, belongs to another
    user, or is writable by other users.
    """
    if not folder.parent.exists():
        make_private_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir(mode=FOLDER_MODE)
    check_owned(folder)
    if folder.lstat().st_mode & 0o077:
        folder.chmod(FOLDER_MODE)
    return folder


def check_owned(folder: Path) -> None:
    """Raise `NotPrivate` unless the path is a folder, not a link, that belongs to this user and only they can write."""
    found = os.lstat(folder)
    is_folder = stat.S_ISDIR(found.st_mode)
    if not is_folder or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        kind = "a folder" if is_folder else "a link" if stat.S_ISLNK(found.st_mode) else "a file"
        raise NotPrivate(
            f"{folder} must be a folder that only user {os.geteuid()} may write to, got {kind} of user {found.st_uid} "
            f"with mode {stat.S_IMODE(found.st_mode):o}; remove it, the run does not use its contents"
        )


def open_private(path: Path, flags: int) -> int:
    """Open a file with mode 0600 without following links; return the descriptor."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def is_bare_name(name: object) -> bool:
    """Whether a file name stays in its folder: it has no separators and is not ``.`` or ``..``."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def keep_freed_memory(num_bytes: int) -> None:
    """Make glibc keep freed memory for later allocations instead of returning it to the kernel.

    The kernel zeroes each new page at its first access. A process that allocates the same tensors or frames in every
    step pays for this in every step: a tenth of the processor time of a small model's update, and a third of the time
    to receive a frame.

    Args:
        num_bytes: Most bytes to keep at the end of each heap, in 0..2**31 - 1. A block of 32 MiB or more is always
            returned at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    options = {
        "M_TRIM_THRESHOLD": (_M_TRIM_THRESHOLD, num_bytes),
        "M_TOP_PAD": (_M_TOP_PAD, 64 << 20),
        "M_MMAP_THRESHOLD": (_M_MMAP_THRESHOLD, 32 << 20),
    }
    for name, (option, value) in options.items():
        if mallopt is None or not mallopt(option, value):
            logger.info("the C library does not support %s; freed memory returns to the kernel", name)


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux)."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("the kernel refused PR_SET_PDEATHSIG; this process may outlive its parent")
    if os.getppid() != parent:
        os._exit(1)
