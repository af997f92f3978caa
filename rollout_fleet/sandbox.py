"""Sandboxes for code that the policy wrote.

A program cannot open sockets, and has its own scratch folder and limits. Each program has its own sandbox. All
processes of a sandbox end when the program ends, or when the owner of the sandbox ends. The kinds of sandboxes are:

- ``bubblewrap``: ``bwrap`` isolates the program by namespaces, and makes the system read-only. Some machines allow only
  ``bwrap`` to make user namespaces.
- ``namespaces``: `rollout_fleet.sandbox_init` makes the same namespaces.
- ``limits``: there are no namespaces. The program runs as the user that runs asyncrl, so it can read and write this
  user's files and signal this user's processes. If asyncrl runs as root, the program gets an unused user id.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from asyncrl.core.errors import SandboxError

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Seconds that a sandbox may take to start and to end, in addition to the wall time of its program."""
_INIT = str(Path(__file__).with_name("sandbox_init.py"))
_INIT_INSIDE = "/run/sandbox_init.py"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "passwd", "group")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_MACHINES = ("x86_64", "aarch64")
_KERNEL_COUNTS_PER_NAMESPACE = (5, 14)


class SandboxKind(StrEnum):
    """The kind of isolation. ``auto`` is the first of ``bubblewrap`` and ``namespaces`` that works."""

    auto = "auto"
    bubblewrap = "bubblewrap"
    namespaces = "namespaces"
    limits = "limits"


class EndedBy(StrEnum):
    """The reason why a program ended: it exited, a signal killed it, or it exceeded a limit."""

    exit = "exit"
    signal = "signal"
    wall_time = "wall_time"
    cpu_time = "cpu_time"
    memory = "memory"
    disk = "disk"
    output = "output"


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """The limits of one program, including all processes that the program starts.

    A program that exceeds a limit gets an error from the system (memory, processes, disk), or is killed.

    Attributes:
        wall_time_s: Seconds from the program's start to its end.
        cpu_time_s: Seconds of processor time of all processes together.
        memory_bytes: Address space of each process, and resident memory of all processes.
        processes: Number of processes and threads that run at the same time.
        disk_bytes: Size of the program's scratch folder, which is in memory.
        files: Number of files and folders in the scratch folder.
        output_bytes: Number of bytes of standard output and standard error together.
    """

    wall_time_s: float = 20.0
    cpu_time_s: float = 10.0
    memory_bytes: int = 1 << 30
    processes: int = 32
    disk_bytes: int = 64 << 20
    files: int = 4096
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                wanted = "finite" if value == math.inf else "> 0"
                raise ValueError(f"{name} of a sandbox must be {wanted}, got {value}; leave it out for the default")


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """The result of a program.

    Attributes:
        exit_status: Exit status of the program, or the negative number of the signal that ended it. -9 if it exceeded a
            limit.
        stdout: Standard output, decoded as UTF-8. Invalid bytes are replaced.
        stderr: Standard error, in the same form. Both streams together have at most `SandboxLimits.output_bytes` bytes.
        seconds: Seconds from the start to the end of the program.
        ended_by: Cause of the program's end.
    """

    exit_status: int
    stdout: str
    stderr: str
    seconds: float
    ended_by: EndedBy

    @property
    def is_success(self) -> bool:
        """Whether the program exited with status 0."""
        return self.ended_by is EndedBy.exit and self.exit_status == 0


class Sandbox:
    """Runs any number of programs at the same time, each in its own sandbox.

    Args:
        kind: Kind of isolation. ``auto`` never selects ``limits``, the weakest kind.
        python: Python interpreter with the packages that the programs may import; by default the current interpreter.
        limits: Limits of a program if the call of `run` has no limits.
    """

    def __init__(
        self, *, kind: SandboxKind | str = SandboxKind.auto, python: str = "", limits: SandboxLimits | None = None
    ) -> None:
        if kind not in list(SandboxKind):
            raise ValueError(f"the kind of a sandbox must be one of {[str(one) for one in SandboxKind]}, got {kind!r}")
        self.kind = SandboxKind(kind)
        self._limits = limits or SandboxLimits()
        self._python = os.path.abspath(python or sys.executable)
        self._root: list[tuple[str, str, str]] = []
        self._languages = {
            "python": ("main.py", [self._python, "-B", "main.py"]),
            "bash": ("main.sh", ["/bin/bash", "main.sh"]),
        }
        self._starting = asyncio.Lock()
        self._is_started = False

    async def start(self) -> SandboxKind:
        """Choose the first kind of isolation that confines a hostile test program, and return this kind.

        `run` calls this method if needed.

        Raises:
            SandboxError: no kind that isolates a program works on this machine. The message has the reasons.
            ValueError: the interpreter does not exist.
        """
        async with self._starting:
            if self._is_started:
                return self.kind
            self._root = await asyncio.to_thread(_root_entries, self._python)
            isolating = [SandboxKind.bubblewrap, SandboxKind.namespaces]
            reasons: list[str] = []
            for kind in isolating if self.kind is SandboxKind.auto else [self.kind]:
                reason = await self._why_not(kind)
                if not reason:
                    self.kind, self._is_started = kind, True
                    weak = "; it does not hide files and processes" if kind is SandboxKind.limits else ""
                    logger.info("code of the policy runs in sandboxes of kind %s%s", kind, weak)
                    return kind
                reasons.append(f"{kind}: {reason}")
        raise SandboxError(
            f"this machine must isolate code that the policy wrote, got {'; '.join(reasons)}; allow user namespaces "
            "(Docker: --cap-add SYS_ADMIN --security-opt apparmor=unconfined; Ubuntu 24: sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0), install bubblewrap, or accept the weaker kind=limits"
        )

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        language: str = "python",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a program in a new sandbox, wait for its end, and return how it ended and what it printed.

        Args:
            code: Source code of the program.
            stdin: Standard input of the program.
            files: Contents of further files in the program's working directory, by relative path. The directory is
                removed at the end.
            language: ``python`` or ``bash``.
            limits: Limits of the program; by default those of the `Sandbox`.

        Raises:
            SandboxError: as in `start`, or if the sandbox itself failed.
            ValueError: the language is unknown, or a path is not relative.
        """
        if language not in self._languages:
            raise ValueError(f"language must be one of {sorted(self._languages)}, got {language!r}")
        for name in files or {}:
            if os.path.isabs(name) or ".." in Path(name).parts or not name:
                raise ValueError(f"files of a sandbox must have relative paths without .., got {name!r}; rename it")
        await self.start()
        return await self._run(self.kind, code, stdin, files or {}, language, limits or self._limits)

    async def _run(
        self,
        kind: SandboxKind,
        code: str,
        stdin: str,
        files: Mapping[str, str | bytes],
        language: str,
        limits: SandboxLimits,
    ) -> SandboxResult:
        main_file, command = self._languages[language]
        uid = _unused_uid()
        scratch = tempfile.mkdtemp(prefix="asyncrl-sandbox-") if kind is SandboxKind.limits else "/tmp"
        job = {
            "command": command,
            "environment": _environment(self._python, scratch),
            "files": {name: _encoded(content) for name, content in {**files, main_file: code}.items()},
            "stdin": _encoded(stdin),
            "limits": asdict(limits),
            "processes": limits.processes + _num_own_threads(kind, uid),
            "uid": uid,
            "scratch": scratch,
            "root": self._root,
        }
        try:
            if kind is SandboxKind.limits and uid is not None:
                os.chown(scratch, uid, uid)
            return await self._run_job(kind, json.dumps(job).encode(), limits)
        finally:
            if kind is SandboxKind.limits:
                await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    async def _run_job(self, kind: SandboxKind, job: bytes, limits: SandboxLimits) -> SandboxResult:
        started = time.monotonic()
        report_fd, told_fd = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command(kind, told_fd, limits),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                pass_fds=(told_fd,),
                env={"PATH": os.defpath},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            os.close(report_fd)
            raise SandboxError(f"a sandbox of kind {kind} did not start: {error}") from error
        finally:
            os.close(told_fd)
        output = _Output(process, limits.output_bytes)
        try:
            ended_by = await output.wait(job, limits.wall_time_s + GRACE_S)
            if ended_by is not None:
                await _kill(kind, process)
            await output.rest()
            with os.fdopen(os.dup(report_fd), "rb") as stream:
                report = json.loads(stream.read() or b"{}")
        finally:
            os.close(report_fd)
            if process.returncode is None:
                await asyncio.shield(_kill(kind, process))
        stdout, stderr = output.texts()
        if "failure" in report or (ended_by is None and not report):
            reason = report.get("failure") or stderr.strip() or f"its first process ended with {process.returncode}"
            raise SandboxError(f"a sandbox of kind {kind} failed: {reason}")
        status = report.get("status")
        return SandboxResult(
            exit_status=-signal.SIGKILL if status is None else status,
            stdout=stdout,
            stderr=stderr,
            seconds=report.get("seconds", time.monotonic() - started),
            ended_by=ended_by or EndedBy(report["ended_by"]),
        )

    def _command(self, kind: SandboxKind, report_fd: int, limits: SandboxLimits) -> list[str]:
        arguments = [str(kind), str(os.getpid()), str(report_fd)]
        if kind is not SandboxKind.bubblewrap:
            return [sys.executable, "-I", "-S", _INIT, *arguments]
        command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"]
        command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        if _unused_uid() is None:
            command += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
        for entry, target, source in [*self._root, ("ro-bind", _INIT_INSIDE, _INIT)]:
            # Mode 755 lets the program enter the folders if asyncrl is root and the program runs as another user.
            for folder in reversed(Path(target).parents[:-1]):
                command += ["--perms", "755", "--dir", str(folder)]
            command += [f"--{entry}", source, target]
        command += ["--proc", "/proc", "--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"]
        return [*command, "--remount-ro", "/", self._python, "-I", "-S", _INIT_INSIDE, *arguments]

    async def _why_not(self, kind: SandboxKind) -> str:
        if platform.machine() not in _MACHINES:
            return f"the processor must be one of {list(_MACHINES)}, got {platform.machine()}"
        if kind is SandboxKind.bubblewrap and shutil.which("bwrap") is None:
            return "bwrap is not installed"
        with tempfile.NamedTemporaryFile(prefix="asyncrl-probe-") as canary:
            canary.write(b"canary")
            canary.flush()
            os.chmod(canary.name, 0o644)
            limits = SandboxLimits(processes=8)
            most = limits.processes + (OTHERS_PROCESSES if kind is SandboxKind.limits else 0)
            code = _PROBE.format(path=canary.name, hides=kind is not SandboxKind.limits, forks=most + 1)
            try:
                result = await self._run(kind, code, "", {}, "python", limits)
            except SandboxError as error:
                return str(error)
        if result.is_success:
            return ""
        return result.stdout.strip() or result.stderr.strip()[-300:] or f"the probe ended by {result.ended_by}"


class _Output:
    def __init__(self, process: Process, limit: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._left = limit
        self._is_over = asyncio.Event()
        self._parts: tuple[list[bytes], list[bytes]] = ([], [])
        streams = (process.stdout, process.stderr)
        self._reading = [
            asyncio.create_task(self._read(stream, parts)) for stream, parts in zip(streams, self._parts, strict=True)
        ]

    async def wait(self, job: bytes, timeout_s: float) -> EndedBy | None:
        """Send the job to the sandbox's process, and wait until the process ends or exceeds a limit.

        The limits are the time ``timeout_s`` and the size of the output. Returns None if the process ended within the
        limits. Otherwise returns the limit that was exceeded. The caller must then kill the process.
        """
        waiting = [asyncio.create_task(one) for one in (self._work(job), self._is_over.wait())]
        try:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if self._is_over.is_set():
            return EndedBy.output
        return EndedBy.wall_time if self._process.returncode is None else None

    async def rest(self) -> None:
        _, open_streams = await asyncio.wait(self._reading, timeout=GRACE_S)
        for task in open_streams:
            task.cancel()

    def texts(self) -> tuple[str, str]:
        stdout, stderr = (b"".join(parts).decode(errors="replace") for parts in self._parts)
        return stdout, stderr

    async def _work(self, job: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.write(job)
            await self._process.stdin.drain()
            self._process.stdin.close()
        await self._process.wait()
        # Closing standard input fails if the process ended early. Await the close, or Python < 3.11.4 logs this error.
        with suppress(ConnectionError):
            await self._process.stdin.wait_closed()

    async def _read(self, stream: asyncio.StreamReader, parts: list[bytes]) -> None:
        while chunk := await stream.read(1 << 16):
            if len(chunk) > self._left:
                self._is_over.set()
            parts.append(chunk[: self._left])
            self._left -= len(parts[-1])


async def _kill(kind: SandboxKind, process: Process) -> None:
    """Kill all processes of a sandbox. Without namespaces, the sandbox's first process kills the other processes."""
    with suppress(ProcessLookupError):
        if kind is SandboxKind.limits:
            process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _encoded(content: str | bytes) -> str:
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return base64.b64encode(data).decode()


def _environment(python: str, scratch: str) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = f"{os.path.dirname(python)}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1", **threads}


def _unused_uid() -> int | None:
    """Return a random high user id if this process is root and may use at least 65,536 user ids, otherwise None.

    The program gets this user id, because the kernel does not limit the number of root's processes.
    """
    if os.geteuid() != 0:
        return None
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(ranges, key=lambda one: one[2])
    if count < 1 << 16:
        return None
    last = min(first + count, 1 << 31) - 2
    return random.SystemRandom().randint((first + last) // 2, last)


def _num_own_threads(kind: SandboxKind, uid: int | None) -> int:
    if uid is not None:
        return 0
    kernel = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    if kind is not SandboxKind.limits and kernel >= _KERNEL_COUNTS_PER_NAMESPACE:
        return 2 if kind is SandboxKind.namespaces else 1
    count = 2  # the sandbox's first process, and the thread of asyncrl that waits for the end of this process
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            count += len(os.listdir(entry / "task")) if entry.stat().st_uid == os.geteuid() else 0
    return count


def _root_entries(python: str) -> list[tuple[str, str, str]]:
    entries: list[tuple[str, str, str]] = []
    for path in _SYSTEM:
        if os.path.islink(path):
            entries.append(("symlink", path, os.readlink(path)))
        elif os.path.isdir(path):
            entries.append(("ro-bind", path, path))
    for path in (f"/etc/{name}" for name in _SETTINGS):
        if os.path.exists(path):
            entries.append(("ro-bind", path, os.path.realpath(path)))
    for path in _interpreter_folders(python):
        if not any(path == known or path.startswith(f"{known}/") for kind, known, _ in entries if kind == "ro-bind"):
            entries.append(("ro-bind", path, path))
    entries += [("dev-bind", f"/dev/{name}", f"/dev/{name}") for name in _DEVICES]
    entries += [("symlink", f"/dev/{name}", target) for name, target in {**_LINKS, "shm": "/tmp"}.items()]
    return entries


def _interpreter_folders(python: str) -> list[str]:
    ask = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
    try:
        asked = subprocess.run(
            [python, "-I", "-c", ask], stdin=DEVNULL, capture_output=True, text=True, timeout=GRACE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"python of a sandbox must be a Python interpreter, got {python}: {error}; check the path"
        ) from error
    folders = asked.stdout.split("\n")[:2]
    place = python
    while os.path.islink(place):
        folders.append(os.path.dirname(os.path.dirname(place)))
        place = os.path.normpath(os.path.join(os.path.dirname(place), os.readlink(place)))
    folders.append(os.path.dirname(os.path.dirname(place)))
    return sorted({folder for folder in folders if folder not in ("/", "/usr")}, key=len)


OTHERS_PROCESSES = 256
"""Number of further processes that the test program of `Sandbox.start` tries to start with the kind ``limits``.

With this kind, the kernel counts all processes of the user, and some of these may end during the test.
"""

_PROBE = """\
import os, socket, sys
problems = []
def must_fail(what, attempt):
    try:
        attempt()
    except OSError:
        return
    problems.append("a program can " + what)
must_fail("open a socket", lambda: socket.socket())
must_fail("make namespaces", lambda: os.unshare(0x10000000) if hasattr(os, "unshare") else open("/none"))
must_fail("write to /usr", lambda: open("/usr/.asyncrl-probe", "w"))
if {hides}:
    must_fail("read files of this machine", lambda: open({path!r}))
    if len([name for name in os.listdir("/proc") if name.isdecimal()]) > 3:
        problems.append("a program can see other processes")
def fork_on():
    for _ in range({forks}):
        if os.fork() == 0:
            os.read(held, 1)
            os._exit(0)
held, _ = os.pipe()
must_fail("start any number of processes", fork_on)
open("scratch", "w").write("x")
print("; ".join(problems))
sys.stdout.flush()
os._exit(bool(problems))
"""
