"""The first process of a sandbox: builds the isolation, runs one job under limits, and kills all processes of the job.

Usage: ``sandbox_init.py KIND OWNER_PID REPORT_FD`` with a job in JSON on standard input. KIND is ``namespaces`` (this
script makes the namespaces), ``bubblewrap`` (this script runs inside bubblewrap's namespaces) or ``limits`` (there are
no namespaces). The script writes its report in JSON to REPORT_FD.
"""

import base64
import ctypes
import fcntl
import json
import os
import platform
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 0.05
SCRATCH = "/tmp"
"""Folder of the program's files inside the namespaces, a file system in memory."""
_BASE = "/sys"
"""Folder in which the new root is built.

A mount hides the old content of this folder. The new root needs nothing from this content.
"""

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, SYS_MOUNT_SETATTR = 2, -100, 0x8000, 442
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_ALL_NAMESPACES = 0x7E020000

# The filter refuses the system calls with these ids. Most concern sockets, messages, mounts, namespaces or keys.
# Some refused system calls access memory of other processes, or allocate memory that no limit includes.
_REFUSED = {
    "x86_64": {
        "socket": 41, "setsockopt": 54, "shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "pivot_root": 155,
        "chroot": 161, "mount": 165, "umount2": 166, "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250,
        "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "socket": 198, "setsockopt": 208, "shmget": 194, "semget": 190, "msgget": 186, "ptrace": 117, "pivot_root": 41,
        "chroot": 51, "mount": 40, "umount2": 39, "mq_open": 180, "add_key": 217, "request_key": 218, "keyctl": 219,
        "unshare": 97, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
    },
}  # fmt: skip
# io_uring_*, the new mount calls, pidfd_getfd and memfd_secret have these ids on x86_64 and on aarch64.
_REFUSED_EVERYWHERE = (*range(425, 434), 438, 442, 447)
_CLONE3 = 435
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_SOCK_STREAM, _SOCKET_FLAGS = 1, 0o2004000  # the flags are SOCK_CLOEXEC | SOCK_NONBLOCK
_CLONE = {"x86_64": 56, "aarch64": 220}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_EPERM, _ENOSYS = 1, 38
_ADD_SEALS, _ALL_SEALS = 1033, 1 | 2 | 4 | 8

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> int:
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    try:
        _call(
            "mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()
        )
    except OSError as error:
        where = f"({kind or 'bind'} {source} on {target.removeprefix(_BASE)})"
        raise OSError(error.errno, f"{error.strerror} {where}") from error


def enter_namespaces(*, user: bool) -> None:
    """Move this process into new Linux namespaces: mounts, network, IPC and host name.

    Later child processes also get a new process-id namespace. With ``user``, this process also gets a new user
    namespace, which a process without root's rights needs.
    """
    uid, gid = os.geteuid(), os.getegid()
    kinds = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    _call("unshare", kinds | (CLONE_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")


def build_root(entries: list[list[str]], limits: dict[str, Any], owner: int) -> None:
    """Replace the root of the file system. The new root has read-only system folders, ``/proc`` and a scratch folder.

    Args:
        entries: The folders, devices and links of the new root, as (kind, path in the new root, source). The source is
            a path in the old root, or the target of a link.
        limits: Limits of the program; ``disk_bytes`` and ``files`` bound the scratch folder.
        owner: User id that owns the scratch folder.
    """
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", _BASE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for kind, target, source in entries:
        inside = Path(_BASE + target)
        inside.parent.mkdir(parents=True, exist_ok=True)
        if kind == "symlink":
            inside.symlink_to(source)
            continue
        if Path(source).is_dir():
            inside.mkdir(exist_ok=True)
        else:
            inside.touch()
        _mount(source, str(inside), None, MS_BIND | MS_REC)
    for folder in ("/proc", SCRATCH):
        Path(_BASE + folder).mkdir()
    attributes = struct.pack("4Q", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    where = (SYS_MOUNT_SETATTR, AT_FDCWD, _BASE.encode(), AT_RECURSIVE)
    _call("syscall", *where, attributes, ctypes.c_size_t(len(attributes)))
    _mount("proc", _BASE + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    own = f"mode=700,uid={owner},gid={owner},size={limits['disk_bytes']},nr_inodes={limits['files'] + 16}"
    _mount("tmpfs", _BASE + SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, own)
    os.chdir(_BASE)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def refuse_system_calls() -> None:
    """Install a seccomp filter: the kernel then refuses some system calls of this process and its children.

    The filter refuses calls that make sockets, namespaces or mounts. It also refuses calls such as ``memfd_create``,
    because the memory limit does not include the memory that they allocate.
    """
    machine = platform.machine()

    def step(code: int, if_true: int, if_false: int, value: int) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    load, equal, at_least, any_bit, without, end = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x00050000 | _EPERM, 0x00050000 | _ENOSYS
    numbers = sorted({*_REFUSED[machine].values(), *_REFUSED_EVERYWHERE})
    steps = [
        step(load, 0, 0, 4),
        step(equal, 1, 0, _AUDIT_ARCH[machine]),
        step(end, 0, 0, kill),
        step(load, 0, 0, 0),
        step(at_least, 0, 1, 0x40000000),  # refuses system calls of the x32 interface on x86_64
        step(end, 0, 0, unknown),
        step(equal, 0, 1, _CLONE3),  # clone3's flags cannot be checked; after ENOSYS, the C library calls clone
        step(end, 0, 0, unknown),
        *(part for number in numbers for part in (step(equal, 0, 1, number), step(end, 0, 0, refuse))),
        # socketpair: allow only streams, because a datagram socket can send to any other socket
        step(equal, 0, 4, _SOCKETPAIR[machine]),
        step(load, 0, 0, 24),
        step(without, 0, 0, 0xFFFFFFFF ^ _SOCKET_FLAGS),
        step(equal, 1, 0, _SOCK_STREAM),
        step(end, 0, 0, refuse),
        step(load, 0, 0, 0),
        step(equal, 0, 3, _CLONE[machine]),
        step(load, 0, 0, 16),
        step(any_bit, 0, 1, _ALL_NAMESPACES),
        step(end, 0, 0, refuse),
        step(end, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", PR_SET_SECCOMP, 2, program, 0, 0)


class Program:
    """Runs the program of one job until it ends or exceeds a limit."""

    def __init__(self, job: dict[str, Any], *, is_alone: bool) -> None:
        self._job = job
        self._limits: dict[str, Any] = job["limits"]
        self._is_alone = is_alone  # true if all other processes in this process-id namespace belong to the program
        self._pid = -1
        self._status: int | None = None
        self._ended_by = ""
        self.failure = ""

    def run(self) -> dict[str, Any]:
        """Start the program, wait for its end or an exceeded limit, and return a report as a dict.

        The report has ``status``, ``ended_by`` and ``seconds``, or only ``failure`` if the program did not start.
        """
        signals = {signal.SIGCHLD, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        started = time.monotonic()
        self._start()
        if self.failure:
            return {"failure": self.failure}
        while self._status is None and not self._ended_by:
            arrived = signal.sigtimedwait(signals, POLL_S)
            self._reap()
            if arrived is not None and arrived.si_signo == signal.SIGTERM:
                self._ended_by = "wall_time"
            elif self._status is None:
                self._ended_by = self._exceeded(time.monotonic() - started)
        seconds = time.monotonic() - started
        if not self._is_alone:
            self._kill_others()
        return {"status": self._status, "ended_by": self._ended_by or self._own_end(), "seconds": seconds}

    def _start(self) -> None:
        told, tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._become()
            except BaseException as error:  # noqa: BLE001 - the parent reports the error
                os.write(tell, f"{type(error).__name__}: {error}".encode()[:4000])
            finally:
                os._exit(126)
        os.close(tell)
        with os.fdopen(told, "rb") as stream:
            self.failure = stream.read().decode(errors="replace")

    def _become(self) -> None:
        job, limits, scratch = self._job, self._limits, Path(self._job["scratch"])
        _call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # without this call, the write to oom_score_adj below would fail
        given = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(given, base64.b64decode(job["stdin"]))
        os.lseek(given, 0, os.SEEK_SET)
        # Seal standard input. Otherwise the program could write to it, and so use memory outside the limits.
        fcntl.fcntl(given, _ADD_SEALS, _ALL_SEALS)
        os.dup2(given, 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        Path("/proc/self/oom_score_adj").write_text("1000")
        if job["uid"] is not None:
            os.setgroups([])
            os.setresgid(job["uid"], job["uid"], job["uid"])
            os.setresuid(job["uid"], job["uid"], job["uid"])
        os.umask(0o077)
        os.chdir(scratch)
        for name, content in job["files"].items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(base64.b64decode(content))
        cpu_s = max(1, int(limits["cpu_time_s"] + 0.999))
        for name, soft, hard in (
            ("AS", limits["memory_bytes"], limits["memory_bytes"]),
            ("NPROC", job["processes"], job["processes"]),
            ("FSIZE", limits["disk_bytes"], limits["disk_bytes"]),
            ("CPU", cpu_s, cpu_s + 1),
            ("NOFILE", 128, 128),
            ("CORE", 0, 0),
            ("MEMLOCK", 0, 0),
            ("MSGQUEUE", 0, 0),
        ):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}", 12), (soft, hard))  # 12 is RLIMIT_MSGQUEUE
        refuse_system_calls()
        os.execve(job["command"][0], job["command"], job["environment"])

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._status = os.waitstatus_to_exitcode(status)

    def _own_end(self) -> str:
        if self._status == -signal.SIGXCPU:
            return "cpu_time"
        if self._status == -signal.SIGXFSZ:
            return "disk"
        return "signal" if self._status is not None and self._status < 0 else "exit"

    def _exceeded(self, seconds: float) -> str:
        limits = self._limits
        done = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s, memory = done.ru_utime + done.ru_stime, 0
        tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        for pid in self._others():
            try:
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            cpu_s += sum(map(int, fields[11:15])) / tick
            memory += int(fields[21]) * page
        scratch_bytes, num_files = self._scratch_use()
        if seconds > limits["wall_time_s"]:
            return "wall_time"
        if cpu_s > limits["cpu_time_s"]:
            return "cpu_time"
        if memory > limits["memory_bytes"]:
            return "memory"
        return "disk" if scratch_bytes > limits["disk_bytes"] or num_files > limits["files"] else ""

    def _others(self) -> list[int]:
        everyone = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        if self._is_alone:
            return [pid for pid in everyone if pid != 1]
        children: dict[int, list[int]] = {}
        for pid in everyone:
            try:
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(pid)
        found = [os.getpid()]
        for pid in found:
            found += children.get(pid, ())
        return found[1:]

    def _scratch_use(self) -> tuple[int, int]:
        if self._is_alone:
            use = os.statvfs(self._job["scratch"])
            # Report 0 bytes, because the size of the scratch file system is already limited to ``disk_bytes``.
            return 0, use.f_files - use.f_ffree
        num_bytes = num_files = 0
        for folder, folders, files in os.walk(self._job["scratch"]):
            num_files += len(folders) + len(files)
            for name in files:
                try:
                    num_bytes += os.lstat(os.path.join(folder, name)).st_blocks * 512
                except OSError:
                    continue
        return num_bytes, num_files

    def _kill_others(self) -> None:
        """Kill all descendants. Daemons are included, because this process becomes their parent (subreaper)."""
        while pids := self._others():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._reap()


def _run_inside(job: dict[str, Any], report_fd: int, *, is_alone: bool) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program must not be able to read this process through /proc
    report = Program(job, is_alone=is_alone).run()
    os.write(report_fd, json.dumps(report).encode())


def _run_in_namespaces(job: dict[str, Any], report_fd: int) -> None:
    enter_namespaces(user=job["uid"] is None)
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        build_root(job["root"], job["limits"], 1000 if job["uid"] is None else job["uid"])
        _run_inside(job, report_fd, is_alone=True)
    except BaseException as error:  # noqa: BLE001 - `Sandbox` reads the report and raises a SandboxError
        os.write(report_fd, json.dumps({"failure": str(error)}).encode())
    finally:
        os._exit(0)


def main() -> None:
    """Read a job from standard input, run its program in the sandbox, and write a report on the program's end."""
    kind, owner_pid, report_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        os.set_inheritable(report_fd, False)
        os.umask(0o022)
        if kind != "bubblewrap":
            at_death = signal.SIGTERM if kind == "limits" else signal.SIGKILL
            _call("prctl", PR_SET_PDEATHSIG, at_death, 0, 0, 0)
            if os.getppid() != owner_pid:
                return
        job = json.loads(sys.stdin.buffer.read())
        if kind == "namespaces":
            _run_in_namespaces(job, report_fd)
        else:
            _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            _run_inside(job, report_fd, is_alone=kind == "bubblewrap")
    except Exception as error:  # noqa: BLE001 - `Sandbox` reads the report and raises a SandboxError
        os.write(report_fd, json.dumps({"failure": str(error)}).encode())


if __name__ == "__main__":
    main()
