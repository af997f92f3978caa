"""Hostile programs in every kind of sandbox that works on this machine."""

import asyncio
import errno
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.core.errors import SandboxError
from rollout_fleet import sandbox as sandbox_module
from rollout_fleet.sandbox import OTHERS_PROCESSES, EndedBy, Sandbox, SandboxKind, SandboxLimits

SYSTEM_PYTHON = "/usr/bin/python3"
ISOLATING = (SandboxKind.bubblewrap, SandboxKind.namespaces)


def _python_of(kind: SandboxKind) -> str:
    # Without namespaces, root starts the program as another user. This user cannot read the folder of this Python.
    return SYSTEM_PYTHON if kind is SandboxKind.limits and os.path.exists(SYSTEM_PYTHON) else ""


def _sandbox(kind: SandboxKind, **options) -> Sandbox:
    return Sandbox(kind=kind, python=_python_of(kind), **options)


@pytest.fixture(params=list(ISOLATING), scope="module")
def isolating(request):
    """Return a kind of sandbox that hides files and processes. Skips the test if this kind does not work."""
    return _or_skip(request.param)


@pytest.fixture(params=[*ISOLATING, SandboxKind.limits], scope="module")
def kind(request):
    return _or_skip(request.param)


def _or_skip(kind):
    try:
        asyncio.run(_sandbox(kind).start())
    except SandboxError as error:
        pytest.skip(f"this machine has no sandboxes of kind {kind}: {error}")
    return kind


def children_of_this_process():
    return set(psutil.Process().children(recursive=True))


async def run(kind, code, **options):
    result = await _sandbox(kind).run(code, **options)
    assert not [child for child in children_of_this_process() if "sandbox_init" in " ".join(child.cmdline())]
    return result


def test_the_default_sandbox_isolates_and_logs_its_kind(caplog):
    caplog.set_level("INFO", logger="rollout_fleet.sandbox")
    sandbox = Sandbox()
    try:
        kind = asyncio.run(sandbox.start())
    except SandboxError as error:
        pytest.skip(f"this machine cannot isolate: {error}")
    assert kind in ISOLATING
    assert caplog.messages == [f"code of the policy runs in sandboxes of kind {kind}"]
    assert sandbox.kind is kind


async def test_a_program_in_a_sandbox_has_its_input_files_and_a_clean_environment(kind, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    code = "import os, sys, helper; print(sys.stdin.read() + helper.word, *sorted(os.environ)); sys.exit(3)"
    result = await run(kind, code, stdin="in ", files={"helper.py": "word = 'file'", "data/raw": b"\xff"})
    assert result.stdout.startswith("in file HOME LANG")
    assert "KEY" not in result.stdout
    assert (result.exit_status, result.ended_by, result.is_success) == (3, EndedBy.exit, False)
    assert 0 < result.seconds < 20


async def test_a_program_in_a_sandbox_can_be_a_shell_script_that_starts_programs(kind):
    result = await run(kind, "read word; echo $word | tr a-z A-Z; ls | wc -l", stdin="abc\n", language="bash")
    assert result.stdout.split() == ["ABC", "1"], result.stderr
    assert result.is_success


async def test_a_fork_bomb_in_a_sandbox_cannot_exceed_the_process_limit(kind):
    code = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError as error:
    print(count, error.errno)
"""
    result = await run(kind, code, limits=SandboxLimits(processes=12))
    count, error = map(int, result.stdout.split())
    assert error == errno.EAGAIN
    # If the user is not root, the limit includes all other processes of the user, and their number changes.
    if kind is SandboxKind.limits and os.geteuid() != 0:
        assert count <= 11 + OTHERS_PROCESSES
    else:
        assert count == 11
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await run(kind, bomb, limits=SandboxLimits(processes=12, cpu_time_s=1.0))
    assert result.ended_by is EndedBy.cpu_time


async def test_many_threads_in_a_sandbox_count_as_processes(kind):
    code = """
import threading, time
try:
    for count in range(500):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:
    print("refused")
"""
    assert (await run(kind, code, limits=SandboxLimits(processes=8))).stdout == "refused\n"


async def test_the_memory_of_a_sandbox_is_limited_per_process_and_in_total(kind):
    limits = SandboxLimits(memory_bytes=256 << 20)
    result = await run(kind, "x = bytearray(1 << 30)", limits=limits)
    assert "MemoryError" in result.stderr
    assert result.exit_status == 1
    several = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        x = bytearray(b"x" * (100 << 20))
        time.sleep(60)
time.sleep(60)
"""
    result = await run(kind, several, limits=limits)
    assert (result.ended_by, result.exit_status) == (EndedBy.memory, -9)


@pytest.mark.parametrize("name", ["memfd_create", "shmget"])
async def test_a_sandbox_refuses_memory_that_the_limits_do_not_count(kind, name):
    calls = {"memfd_create": "libc.memfd_create(b'x', 0)", "shmget": "libc.shmget(0, 1 << 20, 0o1600)"}
    code = f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); print({calls[name]}, ctypes.get_errno())"
    assert (await run(kind, code)).stdout.split() == ["-1", "1"]


async def test_a_program_in_a_sandbox_can_fill_only_the_disk_of_its_sandbox(kind):
    before = shutil.disk_usage(tempfile.gettempdir()).used
    code = """
import os
for number in range(1000):
    with open(f"{number}", "wb") as file:
        file.write(os.urandom(1 << 20))
"""
    result = await run(kind, code, limits=SandboxLimits(disk_bytes=8 << 20))
    assert result.ended_by is EndedBy.disk or "No space left" in result.stderr
    assert shutil.disk_usage(tempfile.gettempdir()).used - before < 128 << 20
    result = await run(kind, "for n in range(10**6): open(str(n), 'w').close()", limits=SandboxLimits(files=500))
    assert result.ended_by is EndedBy.disk or "No space left" in result.stderr


async def test_the_system_folders_in_a_sandbox_are_read_only(isolating):
    code = """
import os
for folder in ("/", "/usr", "/usr/lib", "/etc", "/dev", "/run", "/proc", "/proc/sys", os.path.dirname(os.__file__)):
    try:
        open(folder + "/written", "w")
        print("wrote to", folder)
    except OSError:
        pass
for path in ("/dev/shm/asyncrl-test-x", "/tmp/asyncrl-test-x"):
    open(path, "w").write("fine")
os.system("mount -o remount,rw /usr 2>/dev/null && echo remounted")
print("done")
"""
    assert (await run(isolating, code)).stdout == "done\n"
    assert "asyncrl-test-x" not in os.listdir("/tmp")


async def test_sockets_in_a_sandbox_cannot_connect_to_the_network_or_the_run(kind, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        path = f"/tmp/asyncrl-test-{os.getpid()}.sock"
        unix.bind(path)
        unix.listen()
        os.chmod(path, 0o777)
        try:
            code = f"""
import socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})), (socket.AF_INET, ("8.8.8.8", 53)),
    (socket.AF_INET6, ("::1", {server.getsockname()[1]})), (socket.AF_UNIX, {path!r}), (40, (2, 1)),
):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            one = socket.socket(family, kind)
            one.settimeout(2)
            one.connect(address)
            print("connected to", address)
        except OSError:
            pass
a, b = socket.socketpair()
a.send(b"pairs work")
print(b.recv(100).decode())
"""
            assert (await run(kind, code)).stdout == "pairs work\n"
        finally:
            os.unlink(path)


async def test_a_socket_pair_in_a_sandbox_cannot_send_to_other_sockets(kind):
    """Outside a sandbox, a datagram socket of a socket pair can send to the address of any other socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(f"\0asyncrl-test-{os.getpid()}")
        server.setblocking(False)
        code = f"""
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    try:
        a, b = socket.socketpair(socket.AF_UNIX, kind)
        a.sendto(b"hello", {server.getsockname()!r})
    except OSError:
        print("refused")
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
a.send(b"pairs work")
print(b.recv(100).decode())
"""
        assert (await run(kind, code)).stdout == "refused\nrefused\npairs work\n"
        with pytest.raises(BlockingIOError):
            server.recv(100)


async def test_a_program_in_a_sandbox_cannot_store_data_in_socket_buffers_or_standard_input(kind):
    code = """
import os, socket
try:
    socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
except PermissionError:
    print("no larger buffers")
try:
    os.pwrite(0, b"x" * 1000, 0)
except PermissionError:
    print("no input to write to")
print(os.read(0, 10))
"""
    assert (await run(kind, code, stdin="given")).stdout == "no larger buffers\nno input to write to\nb'given'\n"


async def test_the_files_of_a_run_cannot_be_reached_from_a_sandbox(isolating, tmp_path):
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "server.key_secret").write_text("buffer key")
    os.chmod(tmp_path, 0o755)
    code = f"""
import glob, os
paths = [{str(keys / "server.key_secret")!r}, "/proc/1/root" + {str(keys)!r}, {os.getcwd() + "/pyproject.toml"!r},
         "/proc/{os.getpid()}/environ", "/root/.ssh", "/home", "/var", "/etc/shadow", "/sys", "/proc/1/environ",
         "/proc/1/mem", "/proc/1/cwd/", "/proc/1/fd/0"]
for path in paths:
    try:
        print("found", path, os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(10))
    except OSError:
        pass
    os.symlink(path, "link")
    try:
        print("followed", path, open("link", "rb").read(10))
    except OSError:
        pass
    os.unlink("link")
print("done")
"""
    assert (await run(isolating, code)).stdout == "done\n"


async def test_a_program_in_a_sandbox_cannot_see_or_signal_outside_processes(isolating):
    code = f"""
import os, signal
print(len([name for name in os.listdir("/proc") if name.isdecimal()]))
for pid in [{os.getpid()}, {os.getppid()}, -1]:
    try:
        os.kill(pid, signal.SIGCONT if pid > 0 else 0)
        print("signalled", pid)
    except OSError:
        pass
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGSEGV):
    try:
        os.kill(1, number)
    except OSError:
        pass
import time; time.sleep(0.3)
print("alive")
"""
    result = await run(isolating, code)
    assert result.stdout == "2\nalive\n", result
    assert result.is_success


def test_a_sandbox_of_root_without_namespaces_cannot_signal_other_processes():
    if os.geteuid() != 0:
        pytest.skip("only root can give a program another user id")
    code = f"import os\ntry: os.kill({os.getpid()}, 0)\nexcept OSError: print('no')"
    result = asyncio.run(run(_or_skip(SandboxKind.limits), code))
    assert result.stdout == "no\n"


async def test_file_descriptors_of_the_owner_are_closed_in_a_sandbox(kind):
    with tempfile.TemporaryFile() as secret:
        os.set_inheritable(secret.fileno(), True)
        result = await run(kind, "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))")
    assert result.stdout == "[0, 1, 2, 3]\n"  # listdir itself opens descriptor 3


async def test_a_daemon_that_a_program_started_ends_with_its_sandbox(kind):
    name = f"daemon{os.getpid()}"  # a process name that is unique on this machine
    code = f"""
import ctypes, os, time
ready, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"{name}")
        os.write(tell, b"x")
        for descriptor in (0, 1, 2, ready, tell):
            os.close(descriptor)
        while True:
            time.sleep(0.01)
    os._exit(0)
os.wait()
os.read(ready, 1)
print("left")
"""
    result = await run(kind, code)
    assert result.stdout == "left\n"
    assert result.is_success
    assert not [one for one in psutil.process_iter(["name"]) if one.info["name"] == name]


def _is_in(process, word):
    try:
        return process.cmdline()[-1:] == [word]
    except psutil.Error:
        return False


async def test_a_sandbox_ends_when_its_output_exceeds_the_limit(kind):
    limits = SandboxLimits(output_bytes=10_000)
    result = await run(kind, "while True: print('x' * 1000)", limits=limits)
    assert result.ended_by is EndedBy.output
    assert (len(result.stdout) + len(result.stderr), result.exit_status) == (10_000, -9)
    whole = await run(kind, "print('x' * 9_999)", limits=limits)
    assert (len(whole.stdout), whole.ended_by) == (10_000, EndedBy.exit)


async def test_a_program_in_a_sandbox_that_closes_its_output_and_hangs_ends_at_the_time_limit(kind):
    code = "import os, time; os.write(1, b'first'); os.close(1); os.close(2); time.sleep(600)"
    result = await run(kind, code, limits=SandboxLimits(wall_time_s=1.0))
    assert (result.stdout, result.ended_by, result.exit_status) == ("first", EndedBy.wall_time, -9)
    assert 1.0 <= result.seconds < 30


async def test_the_processor_time_of_a_sandbox_counts_all_its_processes(kind):
    code = "import os\nos.fork(); os.fork()\nwhile True: pass"
    result = await run(kind, code, limits=SandboxLimits(cpu_time_s=1.0))
    assert result.ended_by is EndedBy.cpu_time
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    result = await run(kind, stubborn, limits=SandboxLimits(cpu_time_s=1.0))
    assert result.ended_by is EndedBy.cpu_time


async def test_the_result_of_a_sandbox_has_the_signal_that_killed_the_program(kind):
    result = await run(kind, "import os; os.kill(os.getpid(), 11)")
    assert (result.exit_status, result.ended_by) == (-11, EndedBy.signal)


async def test_invalid_unicode_in_code_or_output_does_not_break_a_sandbox(kind):
    result = await run(kind, "print('\ud800')\0")
    assert result.exit_status == 1
    assert (await run(kind, "import os; os.write(1, b'\\xff')")).stdout == "\ufffd"


async def test_sandboxes_run_in_parallel_and_each_has_its_own_process_limit(kind):
    code = """
import os, time
pids = [os.fork() for _ in range(1)]
for _ in range(5):
    if 0 in pids: break
    pids.append(os.fork())
time.sleep(0.2)
"""
    sandbox = _sandbox(kind)
    results = await asyncio.gather(*(sandbox.run(code, limits=SandboxLimits(processes=8)) for _ in range(8)))
    if kind is SandboxKind.limits and os.geteuid() != 0:
        return  # one limit holds for all programs of the user, so some can fail
    assert [(result.exit_status, result.stderr) for result in results] == [(0, "")] * 8


async def test_a_cancelled_sandbox_leaves_no_process(kind):
    before = children_of_this_process()
    running = asyncio.create_task(_sandbox(kind).run("import time; time.sleep(600)"))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        if any(_is_in(one, "main.py") for one in children_of_this_process()):
            break
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert children_of_this_process() <= before


OWNER = """
import asyncio, sys
from rollout_fleet.sandbox import Sandbox
asyncio.run(Sandbox(kind=sys.argv[1], python=sys.argv[2]).run("import time; time.sleep(600)  # " + "o" * 10))
"""


def test_a_sandbox_ends_when_its_owner_is_killed(kind):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, kind, _python_of(kind)])
    process = psutil.Process(owner.pid)
    deadline = time.monotonic() + 60
    programs = []
    while not programs and time.monotonic() < deadline:
        time.sleep(0.05)
        programs = [one for one in process.children(recursive=True) if _is_in(one, "main.py")]
    everyone = process.children(recursive=True)
    assert programs
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(everyone, timeout=30)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


AS_ANOTHER_USER = '''
import asyncio, importlib.util, os, sys
spec = importlib.util.spec_from_file_location("sandbox", sys.argv[1])
sandbox = importlib.util.module_from_spec(spec)
sys.modules["sandbox"] = sandbox
spec.loader.exec_module(sandbox)
fork = """
import os, time
count = 0
try:
    while os.fork():
        count += 1
    time.sleep(9)
except OSError:
    print(f"{os.getuid()}-{count}")
"""
async def main():
    for kind in ("bubblewrap", "namespaces", "limits"):
        one = sandbox.Sandbox(kind=kind)
        try:
            await one.start()
        except sandbox.SandboxError as error:
            print(kind, "refused", error)
            continue
        results = await asyncio.gather(*(one.run(fork, limits=sandbox.SandboxLimits(processes=6)) for _ in range(4)))
        print(kind, *(result.stdout.strip() or result for result in results if kind != "limits"))
asyncio.run(main())
'''


def test_sandboxes_of_an_ordinary_user_also_isolate():
    if os.geteuid() != 0:
        pytest.skip("this user is not root, so other tests cover this case")
    source = Path(sandbox_module.__file__)
    environment = {"PATH": os.defpath, "PYTHONPATH": str(source.parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    as_user = {"user": 54321, "group": 54321, "extra_groups": [], "env": environment, "cwd": "/"}
    command = [SYSTEM_PYTHON, "-c", "import ctypes, sys; assert sys.version_info >= (3, 11); open(sys.argv[1])"]
    try:
        subprocess.run([*command, str(source)], **as_user, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"another user has no Python 3.11 that can read this checkout: {error}")
    command = [SYSTEM_PYTHON, "-c", AS_ANOTHER_USER, str(source)]
    lines = subprocess.run(command, **as_user, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[2:] == ["limits"]
    for line in lines[:2]:
        assert line.split()[1] == "refused" or line.split()[1:] == ["1000-5"] * 4, lines


async def test_a_machine_without_isolation_is_refused_and_the_error_names_the_weaker_kind(monkeypatch):
    monkeypatch.setattr(sandbox_module, "_INIT", "/nowhere/sandbox_init.py")
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    with pytest.raises(SandboxError) as failure:
        await Sandbox().run("print(1)")
    for part in (
        "bubblewrap: bwrap is not installed",
        "namespaces: a sandbox of kind namespaces failed",
        "kind=limits",
    ):
        assert part in str(failure.value)
    monkeypatch.setattr(sandbox_module.platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxError, match=r"the processor must be one of .*'aarch64'.*, got riscv64"):
        await Sandbox().start()


def test_a_kind_of_sandbox_is_refused_if_its_probe_can_read_files_of_the_machine(monkeypatch, isolating):
    entries = sandbox_module._root_entries
    hole = ("ro-bind", tempfile.gettempdir() + "-hole", tempfile.gettempdir())
    monkeypatch.setattr(sandbox_module, "_root_entries", lambda python: [*entries(python), hole])
    probe = sandbox_module._PROBE.replace("open({path!r})", f"open({hole[1]!r} + {{path!r}}.removeprefix({hole[2]!r}))")
    monkeypatch.setattr(sandbox_module, "_PROBE", probe)
    with pytest.raises(SandboxError, match=r"can read files of this machine"):
        asyncio.run(Sandbox(kind=isolating).start())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"language": "cobol"}, "language must be one of .*bash.*python.*, got 'cobol'"),
        ({"files": {"../x": ""}}, r"relative paths without \.\., got '\.\./x'"),
        ({"files": {"/etc/x": ""}}, "relative paths"),
    ],
)
async def test_a_sandbox_refuses_invalid_calls(options, words):
    with pytest.raises(ValueError, match=words):
        await Sandbox().run("", **options)


def test_a_sandbox_refuses_invalid_options():
    with pytest.raises(ValueError, match=r"must be one of .*'bubblewrap'.*, got 'chroot'"):
        Sandbox(kind="chroot")
    with pytest.raises(ValueError, match="memory_bytes of a sandbox must be > 0, got 0"):
        SandboxLimits(memory_bytes=0)
    with pytest.raises(ValueError, match=r"cpu_time_s .*must be finite, got inf"):
        SandboxLimits(cpu_time_s=math.inf)
    with pytest.raises(ValueError, match="must be a Python interpreter, got /bin/nothing"):
        asyncio.run(Sandbox(python="/bin/nothing").start())
