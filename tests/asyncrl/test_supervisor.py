"""The supervisor of a run with scripted children: exit statuses, signals and orphans."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

PRELUDE = """
import os, signal, subprocess, sys, time
from asyncrl.cli import supervisor
from asyncrl.cli.supervisor import supervise
supervisor._KILL_AFTER_S = 0.2
def work():
{body}
status = supervise(work, stop_timeout_s=1.0)
print("status", status.status, "own" if status.own else "late" if status.late else "other", flush=True)
"""


def start(body, before=(), after="", environment=None, **constants):
    script = PRELUDE.format(body=textwrap.indent(textwrap.dedent(body), "    ")) + after
    constants = "".join(f"supervisor.{name} = {value}\n" for name, value in constants.items())
    command = [*before, sys.executable, "-c", script.replace("def work", f"{constants}def work", 1)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # undoes the effect of nohup on SIGHUP
    )


def test_the_status_of_the_work_is_returned():
    run = start("return 7")
    assert run.communicate(timeout=30)[0] == "status 7 own\n"


def test_a_signal_reaches_the_work_once_and_the_parent_waits_for_it():
    run = start(
        """
        seen = []
        signal.signal(supervisor.STOPS[signal.SIGINT], lambda *_: seen.append(1))
        print("ready", flush=True)
        while not seen:
            signal.pause()
        time.sleep(0.2)
        return 10 + len(seen)
        """
    )
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=30)[0] == "status 11 own\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_every_process_reaches_the_work_once_and_does_not_end_its_children(number):
    run = start(
        """
        seen = []
        for stop in supervisor.STOPS.values():
            signal.signal(stop, lambda *_: seen.append(1))
        child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        print("ready", flush=True)
        while not seen:
            signal.pause()
        time.sleep(0.4)
        child.stdin.close()
        return 10 * len(seen) + child.wait(20)
        """
    )
    assert run.stdout.readline() == "ready\n"
    for process in (*psutil.Process(run.pid).children(recursive=True), run):
        process.send_signal(number)
    time.sleep(0.1)
    run.send_signal(number)  # a sweep forwards a signal to its run, so the run gets the signal twice
    assert run.communicate(timeout=30)[0] == "status 11 own\n"


def test_signals_in_quick_succession_become_a_second_stop_after_half_a_second():
    run = start(
        """
        seen = []
        signal.signal(supervisor.STOPS[signal.SIGINT], lambda *_: seen.append(1))
        print("ready", flush=True)
        while len(seen) < 2:
            signal.pause()
        return 10 + len(seen)
        """
    )
    assert run.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 10
    while run.poll() is None and time.monotonic() < deadline:
        run.send_signal(signal.SIGINT)
        time.sleep(0.1)
    run.kill()
    assert run.communicate(timeout=30)[0] == "status 12 own\n"


@pytest.mark.parametrize(("before", "status"), [((), "status 143 own\n"), (("nohup",), "status 0 own\n")])
def test_a_hangup_of_the_terminal_ends_the_work_except_under_nohup(before, status):
    run = start(
        """
        print("ready", flush=True)
        sys.stdin.readline()
        return 0
        """,
        before,
    )
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGHUP)
    if not before:  # the child process has no signal handler yet, so the signal ends it
        run.wait(60)
    assert run.communicate("go on\n", timeout=60)[0] == status


def test_orphans_of_killed_work_are_ended():
    run = start(
        """
        sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)
        print(sleeper.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    orphan = psutil.Process(int(run.stdout.readline()))
    assert run.communicate(timeout=30)[0] == "status -9 other\n"
    psutil.wait_procs([orphan], timeout=60)
    assert not orphan.is_running()


@pytest.mark.long
@pytest.mark.parametrize("before", [(), ("nohup",)])
def test_work_stops_when_its_parent_is_killed(before):
    run = start(
        """
        print(os.getpid(), flush=True)
        signal.pause()
        """,
        before,
    )
    worker = psutil.Process(int(run.stdout.readline()))
    run.kill()
    gone, _ = psutil.wait_procs([worker], timeout=60)
    assert gone


def test_work_that_does_not_stop_in_time_is_killed():
    run = start(
        """
        signal.signal(supervisor.STOPS[signal.SIGTERM], signal.SIG_IGN)
        print("ready", flush=True)
        while True:
            signal.pause()
        """
    )
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGTERM)
    assert run.communicate(timeout=60)[0] == "status -9 late\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_work_has_handlers_stops_it_with_the_signals_status(number):
    run = start(
        """
        print("ready", flush=True)
        time.sleep(30)
        """
    )
    assert run.stdout.readline() == "ready\n"
    run.send_signal(number)
    assert run.communicate(timeout=30)[0] == f"status {128 + number} own\n"


def test_the_reported_fault_is_known_when_the_work_is_killed():
    run = start(
        """
        from asyncrl.cli.supervisor import report_fault
        report_fault("the raylet died")
        os._exit(1)  # as Ray does
        """,
        after="print(status.fault, flush=True)",
    )
    assert run.communicate(timeout=30)[0] == "status 1 other\nthe raylet died\n"


def test_semaphores_of_killed_work_are_cleaned_up():
    run = start(
        """
        import multiprocessing
        from multiprocessing import resource_tracker
        locks = [multiprocessing.get_context("spawn").Lock() for _ in range(5)]
        print(*("sem." + lock._semlock.name.strip("/") for lock in locks), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    semaphores = run.stdout.readline().split()
    assert len(semaphores) == 5
    assert run.communicate(timeout=30)[0] == "status -9 other\n"
    assert not [name for name in semaphores if Path("/dev/shm", name).exists()]


def test_files_of_child_processes_of_killed_work_are_removed(tmp_path):
    run = start(
        """
        from rollout_fleet.child_pipes import ChildFolder
        folder = ChildFolder("mark")
        open(folder.path + "/file", "w").close()
        print(os.listdir(os.path.dirname(folder.path)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        environment={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert run.stdout.readline() == "['asyncrl-child-mark']\n"
    assert run.communicate(timeout=30)[0] == "status -9 other\n"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.long
@pytest.mark.parametrize(("ignored", "grace_s", "is_last"), [(signal.SIGUSR2, 60, False), (signal.SIGINT, 1, True)])
def test_processes_that_ignore_interrupts_are_killed_last(ignored, grace_s, is_last):
    orphan = (
        f"import signal; signal.signal(signal.{ignored.name}, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    )
    run = start(
        f"""
        orphan = subprocess.Popen(
            [sys.executable, "-c", {orphan!r}, "engines/process_guard.py"], stdout=subprocess.PIPE
        )
        orphan.stdout.readline()
        print("ready", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        ORPHAN_GRACE_S=grace_s,
    )
    assert run.stdout.readline() == "ready\n"
    began_s = time.monotonic()
    assert run.communicate(timeout=90)[0] == "status -9 other\n"
    assert (time.monotonic() - began_s > grace_s) == is_last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_command_is_loaded_is_reported_in_one_line(number):
    script = (
        "import os, sys, types; sys.modules['slow'] = types.ModuleType('slow')\n"
        "from asyncrl import cli\n"
        "cli._COMMANDS['train'] = ('slow', '')\n"
        f"cli.import_module = lambda name: os.kill(os.getpid(), {int(number)})\n"
        "cli.main(['train'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + number
    assert done.stderr == f"stopped by {number.name} before anything was started\n"
