"""Functions for folders, memory, visible GPUs and stop signals. The module imports neither torch nor ray.

When ``scancel`` or systemd stops a run, all processes of the run get SIGTERM together. So that the processes end in the
right order, only the supervisor (the parent of the run's main process) handles SIGINT and SIGTERM. The main process,
its threads and its child processes, including Ray's daemons, block both signals.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import cache, partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from asyncrl.core.errors import AsyncRLError, DeadlineError

logger = logging.getLogger(__name__)

FOLDER_MODE = 0o700
FILE_MODE = 0o600
WORKER_BYTES = 256 << 20
"""Bytes of freed memory that processes with large arrays or tensors keep (argument of `keep_freed_memory`)."""

NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Environment variables that hide all GPUs from a process."""
_GROUP_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
_MAX_SOCKET_PATH_BYTES = 107
_LONGEST_RAY_SOCKET = "ray/session_2026-11-27_08-06-02_081673_4194304/sockets/plasma_store.1"
_DRIVER_TIMEOUT_S = 30.0
_NVIDIA_DEVICE = Path("/dev/nvidiactl")
STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
REPLACED = ".replaced"
"""End of the name that `replace_folder` gives to an earlier folder until the function deletes this folder."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # values from glibc's malloc.h
_PR_SET_PDEATHSIG = 1


class NotPrivate(AsyncRLError):
    """A folder is not private: another user could create files or links in it."""


def make_private_folder(folder: Path) -> Path:
    """Create a folder and its missing parent folders, so that only this user can open them. Return ``folder``.

    Raises:
        NotPrivate: the path is a link or a file, belongs to another user, or is writable by other users.
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
    """Check that ``folder`` is a folder (not a link) of this user, and that other users cannot write to it.

    Raises:
        NotPrivate: one of these conditions is false.
    """
    found = os.lstat(folder)
    is_folder = stat.S_ISDIR(found.st_mode)
    if not is_folder or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        kind = "a folder" if is_folder else "a link" if stat.S_ISLNK(found.st_mode) else "a file"
        raise NotPrivate(
            f"{folder} must be a folder that only user {os.geteuid()} may write to, got {kind} of user {found.st_uid} "
            f"with mode {stat.S_IMODE(found.st_mode):o}; remove {folder}, because the run does not trust its contents"
        )


def socket_base(longest: str) -> str:
    """Return the temporary folder for Unix sockets, or ``/tmp`` if paths in the temporary folder would be too long.

    ``longest`` is the longest path of a socket, relative to the folder. Linux limits the whole path to 107 bytes.
    """
    base = tempfile.gettempdir()
    return base if len(os.fsencode(os.path.join(base, longest))) <= _MAX_SOCKET_PATH_BYTES else "/tmp"


def open_private(path: Path, flags: int) -> int:
    """Open a file with ``os.open`` and return the file descriptor. Refuse a link. A new file has mode 0600."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def is_bare_name(name: object) -> bool:
    """Return whether ``name`` is a file name without separators. The names ``""``, ``.`` and ``..`` give False."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def keep_freed_memory(num_bytes: int) -> None:
    """Make glibc keep freed memory for later allocations instead of returning it to the kernel.

    Otherwise, a process that allocates the same tensors in every step waits for zeroed pages in every step.

    Args:
        num_bytes: Largest number of freed bytes that glibc keeps at the end of each heap, in 0..2**31 - 1.
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
    """Ask the Linux kernel to kill this process as soon as the parent process ends."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("the kernel refused PR_SET_PDEATHSIG; this process may outlive its parent")
    if os.getppid() != parent:
        os._exit(1)


def own_python() -> dict[str, str]:
    """Return the ``runtime_env`` (a dict) that makes Ray start workers with this Python interpreter.

    Ray does not quote the interpreter's path, so workers do not start if the path contains a space. The result holds
    the quoted path, or is empty if the path needs no quotes.
    """
    quoted = shlex.quote(sys.executable)
    return {} if quoted == sys.executable else {"py_executable": quoted}


def forget_process_group(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Remove the environment variables that torchrun sets, such as ``RANK``. Return the names of the removed variables.

    With these variables, the processes of a run would try to join torchrun's process group.
    """
    found = [name for name in environment if name in _GROUP_VARIABLES or name.startswith("TORCHELASTIC_")]
    for name in found:
        del environment[name]
    return found


def ray_folder() -> str:
    """Return the path of the parent folder of Ray's session folders on this host.

    The folder is ``ray`` in ``RAY_TMPDIR``. Without ``RAY_TMPDIR``, it is ``ray`` in the system's temporary folder. If
    paths of sockets there would be too long, it is ``ray`` in ``/tmp``.
    """
    return os.path.join(os.environ.get("RAY_TMPDIR") or socket_base(_LONGEST_RAY_SOCKET), "ray")


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that CUDA shows to a process with these environment variables; 0 without a driver.

    The first invalid entry of ``CUDA_VISIBLE_DEVICES`` hides itself and all entries after it, as in CUDA.

    Raises:
        DeadlineError: the NVIDIA driver does not answer.
        ValueError: there are GPUs, and nvidia-smi cannot list them.
    """
    return len(_visible_uuids(environment))


def gpu_memory_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the total memory, in bytes, of the smallest GPU that CUDA shows to a process with this environment.

    Returns 0 if there is no GPU, if one of the GPUs is a MIG instance, or if the driver does not report the memory.
    Raises the errors of `visible_gpus`.
    """
    uuids, tool = _visible_uuids(environment), shutil.which("nvidia-smi")
    if tool is None or not uuids:
        return 0
    listed = _answer(tool, "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits")
    rows = (line.partition(",") for line in listed)
    mib = {uuid.strip(): int(size) for uuid, _, size in rows if size.strip().isdecimal()}
    return min(mib.get(uuid, 0) for uuid in uuids) << 20


def _visible_uuids(environment: Mapping[str, str]) -> list[str]:
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    tool = shutil.which("nvidia-smi")
    listed = _listed_uuids(tool) if tool is not None else []
    if not listed and _NVIDIA_DEVICE.exists():
        said = f"says {' '.join(_answer(tool, '-L')) or 'nothing'!r}" if tool is not None else "is not on PATH"
        raise ValueError(
            f"this machine has NVIDIA GPUs ({_NVIDIA_DEVICE} exists), but nvidia-smi, which must list them, {said}; "
            "repair the driver, or start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility; to run without "
            "GPUs, set CUDA_VISIBLE_DEVICES to an empty string"
        )
    return _visible(listed, environment)


def _visible(listed: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the visible GPUs."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return listed
    found = []
    for entry in map(str.strip, chosen.split(",")):
        if entry.isdecimal() and int(entry) < len(listed):
            found.append(listed[int(entry)])
        elif entry.startswith("MIG-") and listed:  # nvidia-smi -L lists MIG instances below their GPU
            found.append(entry)
        elif entry.startswith("GPU-") and any(uuid.startswith(entry) for uuid in listed):
            found.append(next(uuid for uuid in listed if uuid.startswith(entry)))
        else:
            break
    return found


@cache
def _listed_uuids(tool: str) -> list[str]:
    lines = [line for line in _answer(tool, "-L") if line.startswith("GPU ")]
    return [line.rpartition("UUID: ")[2].rstrip(")") for line in lines]


@cache
def _answer(tool: str, *arguments: str) -> list[str]:
    """Return the output lines of nvidia-smi."""
    process = subprocess.Popen([tool, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        listed, _ = process.communicate(timeout=_DRIVER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # do not wait for the killed process, because it cannot end while it hangs in the driver
        raise DeadlineError(
            f"{tool} {' '.join(arguments)} must list the GPUs of this machine within {_DRIVER_TIMEOUT_S:g} s, got no "
            "answer: the NVIDIA driver hangs; reset the GPUs or restart the machine, or run on another machine"
        ) from None
    return listed.splitlines()


def leave_stop_to_owner() -> None:
    """Block SIGINT and SIGTERM in this thread, and in threads and processes that this thread starts later.

    So only the supervisor, the owner of the run, handles a stop signal. The function first starts Python's resource
    tracker, because a later start of the tracker would unblock both signals (Python < 3.13).
    """
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def keep_stop_blocked() -> None:
    """Keep SIGINT and SIGTERM blocked if this process has inherited a blocked SIGTERM; otherwise do nothing.

    The function calls `leave_stop_to_owner`, because Python's resource tracker would unblock both signals if it started
    later.
    """
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        leave_stop_to_owner()


def release_resource_tracker() -> None:
    """Close this process's connection to Python's resource tracker.

    The tracker cleans up and exits as soon as no other process has a connection to the tracker.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
        tracker._fd = None


def outlive_stop() -> None:
    """Ignore SIGTERM in this process, but not in its child processes: SIGTERM and SIGINT still end them.

    The function does not use a signal mask, because child processes would inherit the mask. Call the function in the
    main thread, before other threads start.
    """
    term = {signal.SIGTERM}
    let_through = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, term)

    def obey() -> None:
        if signal.getsignal(signal.SIGTERM) is _ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_through()

    signal.signal(signal.SIGTERM, _ignore)  # use a handler, because child processes would inherit SIG_IGN
    hold_back = partial(signal.pthread_sigmask, signal.SIG_BLOCK, term)
    os.register_at_fork(before=hold_back, after_in_child=obey, after_in_parent=let_through)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _ignore(*_: object) -> None:
    pass


def files_below(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each file in a folder and its subfolders, with its `os.lstat` result. Links are not followed.

    Files that another process removes during the iteration are left out.
    """
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            with suppress(FileNotFoundError, NotADirectoryError):
                yield path, path.lstat()


def replace_folder(partial: Path, final: Path) -> None:
    """Rename the complete folder ``partial`` to ``final``, durably. Delete an earlier folder with the name ``final``.

    The earlier folder is first renamed to ``.NAME.replaced``, and is deleted last. So at least one complete folder
    remains after a crash. If another process renames the earlier folder back to ``final``, this function renames it
    again.
    """
    flush_to_disk(partial)
    replaced = final.with_name(f".{final.name}{REPLACED}")
    shutil.rmtree(replaced, ignore_errors=True)
    is_placed = False
    while not is_placed:
        with suppress(FileNotFoundError):
            final.rename(replaced)
        try:
            partial.rename(final)
            is_placed = True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    flush_to_disk(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def flush_to_disk(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
