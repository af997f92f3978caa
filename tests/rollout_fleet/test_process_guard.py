"""The process guard of a server. A fake server has a parent and a child process in one process group."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from rollout_fleet.engines.sglang_server import GUARD

SERVER = """
    import mmap, os, signal, sys, time
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(sys.argv[1] + ".draft", "w+b") as file:
        file.truncate(4096)
        memory = mmap.mmap(file.fileno(), 4096)
    os.link(sys.argv[1] + ".draft", sys.argv[1])
    os.unlink(sys.argv[1] + ".draft")
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, f"child {os.getpid()}\\n".encode())
        time.sleep(600)
    os.write(1, f"server {os.getpid()}\\n".encode())
    time.sleep(0.3 if "brief" in sys.argv else 600)
    os._exit(7)
"""
OWNER = """
    import subprocess, sys, time, os
    command = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), *sys.argv[2:]]
    os.write(1, f"guard {subprocess.Popen(command).pid}\\n".encode())
    time.sleep(600)
"""


class Started:
    """A process guard with its fake server, and the files and processes that the server can leave behind."""

    def __init__(self, tmp_path: Path, *words: str, owner: bool = False) -> None:
        self.shared_memory = Path(f"/dev/shm/asyncrl-test-{os.getpid()}-{tmp_path.name}")
        self.scratch = tmp_path / "scratch"
        self.scratch.mkdir()
        (self.scratch / "file").touch()
        server = [sys.executable, "-c", textwrap.dedent(SERVER), str(self.shared_memory), *words]
        if owner:
            command = [sys.executable, "-c", textwrap.dedent(OWNER), str(GUARD)]
        else:
            command = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid())]
        self.process = subprocess.Popen([*command, str(self.scratch), *server], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().split() for _ in range(3 if owner else 2)]
        self.pids = {name.decode(): int(pid) for name, pid in lines}
        assert self.shared_memory.exists()

    def nothing_is_left(self) -> bool:
        processes = []
        for pid in self.pids.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
        psutil.wait_procs(processes, timeout=10)
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        return not alive and not self.scratch.exists() and not self.shared_memory.exists()

    def end(self) -> None:
        self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.wait(10)
        self.shared_memory.unlink(missing_ok=True)


@pytest.fixture
def start(tmp_path):
    started = []

    def make(*words, **options):
        started.append(Started(tmp_path, *words, **options))
        return started[-1]

    yield make
    for one in started:
        one.end()


def test_the_death_of_the_owner_kills_the_whole_process_group_and_removes_its_files(start):
    started = start("stubborn", owner=True)
    os.kill(started.process.pid, signal.SIGKILL)
    assert started.nothing_is_left()


def test_a_stopped_server_leaves_no_processes_or_files(start):
    started = start("stubborn")
    started.process.send_signal(signal.SIGUSR1)
    for name in ("child", "server"):
        os.kill(started.pids[name], signal.SIGSTOP)
    started.process.send_signal(signal.SIGHUP)
    assert started.process.wait(10) == 128 + signal.SIGKILL
    assert started.nothing_is_left()


@pytest.mark.parametrize("words", [(), ("stubborn",)], ids=["a normal server", "a server that ignores SIGTERM"])
def test_a_killed_server_leaves_no_child_process(start, words):
    started = start(*words)
    started.process.send_signal(signal.SIGHUP)
    assert started.process.wait(10) == 128 + signal.SIGKILL
    assert not any(psutil.pid_exists(pid) for pid in started.pids.values()), (
        "no process may exist, not even as a zombie"
    )
    assert started.nothing_is_left()


def test_the_guard_exits_with_the_exit_status_of_the_server(start):
    started = start("brief")
    assert started.process.wait(10) == 7
    assert started.nothing_is_left() or not started.shared_memory.exists()


def test_the_guard_removes_the_shared_memory_of_a_killed_server(start):
    started = start()
    started.process.send_signal(signal.SIGUSR1)
    asyncio.run(asyncio.sleep(0.3))
    for name in ("child", "server"):
        os.kill(started.pids[name], signal.SIGKILL)
    assert started.process.wait(10) == 128 + signal.SIGKILL
    assert started.nothing_is_left()


def test_the_guard_survives_many_output_signals_in_a_row(start):
    started = start()
    for _ in range(2_500):
        os.kill(started.process.pid, signal.SIGUSR1)
        time.sleep(0.0002)
    started.process.send_signal(signal.SIGHUP)
    assert started.process.wait(30) == 128 + signal.SIGKILL
    assert started.nothing_is_left()


def test_a_guard_whose_owner_is_dead_starts_no_server_and_removes_the_scratch_folder(tmp_path):
    mark, scratch = tmp_path / "mark", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-I", "-S", str(GUARD), "1", str(scratch), "touch", str(mark)]
    assert subprocess.run(command, timeout=10).returncode == 1
    assert not mark.exists()
    assert not scratch.exists()
