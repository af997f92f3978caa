"""Folders of Unix sockets: only the processes of one user may open them, so who connects needs no key.

A Unix socket's path has at most 107 bytes, so the folder is in shared memory or in the temporary folder, and not in
that of a run.
"""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from .config import BufferConfig

_PREFIX = "asyncrl-"
_SCHEME = "ipc://"
_MAX_PATH_BYTES = 107
_LONGEST_NAME = "store-1000000.bulk"


def make_socket_folder() -> str:
    """Make a folder with a random name that only this user may open (mode 0700)."""
    base = tempfile.gettempdir()
    longest = os.path.join(base, f"{_PREFIX}{'x' * 8}", _LONGEST_NAME)
    return tempfile.mkdtemp(prefix=_PREFIX, dir=base if len(os.fsencode(longest)) <= _MAX_PATH_BYTES else "/tmp")


def with_socket_folder(config: BufferConfig) -> tuple[BufferConfig, str]:
    """The options with the folder that their Unix sockets need, and that folder if it was made here, to be removed."""
    if config.host or config.socket_folder:
        return config, ""
    folder = make_socket_folder()
    return replace(config, socket_folder=folder), folder


def remove_socket_folder(folder: str) -> None:
    """Remove a folder and its sockets; nothing happens if it is gone, or the name is empty."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def unix_address(folder: str, name: str) -> str:
    """The address of a server. Example: ``ipc:///tmp/asyncrl-4k2f9a1c/buffer``."""
    return f"{_SCHEME}{folder}/{name}"


def folder_of(address: str) -> str:
    """The folder of a server's Unix socket; empty for the address of a port."""
    return str(Path(address.removeprefix(_SCHEME)).parent) if address.startswith(_SCHEME) else ""


def bulk_address(address: str, port: int) -> str:
    """Where large payloads go, given the address of the control socket; ``port`` is 0 for Unix sockets."""
    return f"{address.rpartition(':')[0]}:{port}" if port else f"{address}.bulk"
