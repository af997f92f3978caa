"""Folders and files that no other user of a host can open, replace, or put a link into."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from asyncrl.core.errors import AsyncRLError

FOLDER_MODE = 0o700
FILE_MODE = 0o600


class NotPrivate(AsyncRLError):
    """A folder in which another user could place files or links."""


def make_private_folder(folder: Path) -> Path:
    """Make a folder that only this user may open, or take one that is so already; returns it.

    Missing parents are made in the same way. Raises `NotPrivate` if there is a link, a file, or a folder that other
    users may write to or that belongs to another user.
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
    """Raise `NotPrivate` unless this is a folder, not a link to one, and only its user, this one, may write to it."""
    found = os.lstat(folder)
    is_folder = stat.S_ISDIR(found.st_mode)
    if not is_folder or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        kind = "a folder" if is_folder else "a link" if stat.S_ISLNK(found.st_mode) else "a file"
        raise NotPrivate(
            f"{folder} must be a folder that only user {os.geteuid()} may write to, got {kind} of user {found.st_uid} "
            f"with mode {stat.S_IMODE(found.st_mode):o}; remove it, nothing of it is used"
        )


def open_private(path: Path, flags: int) -> int:
    """Open a file for its owner alone (mode 0600), and through no link; returns the descriptor."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def is_bare_name(name: object) -> bool:
    """Whether a name stays in its folder: no separators, and not ``.`` or ``..``."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
