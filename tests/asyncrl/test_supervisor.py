"""The parent of a run, on scripted children: statuses, signals, orphans."""

import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

PRELUDE = """
import os, signal, subprocess, sys, time
from asyncrl.cli.supervisor import supervise
def work():
{body}
status = supervise(work, stop_timeout_s=1.0)
print("status", status, flush=True)
"""


def start(body, before=()):
    script = PRELUDE.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    command = [*before, sys.executable, "-c", script]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where the tests run under nohup
    )


def test_the_status_of_the_work_is_returned():
    run = start("return 7")
    assert run.communicate(timeout=30)[0] == "status 7\n"


def test_a_signal_reaches_the_work_once_and_the_parent_waits_for_it():
    run = start(
        """
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        print("ready", flush=True)
        while not seen:
            signal.pause()
        time.sleep(0.2)
        return 10 + len(seen)
        """
    )
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=30)[0] == "status 11\n"


@pytest.mark.parametrize(("before", "status"), [((), "status -15\n"), (("nohup",), "status 0\n")])
def test_a_hangup_of_the_terminal_ends_the_work_except_under_nohup(before, status):
    run = start(
        """
        print("ready", flush=True)
        time.sleep(2)
        return 0
        """,
        before,
    )
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGHUP)
    assert run.communicate(timeout=30)[0] == status


def test_orphans_of_killed_work_are_ended():
    run = start(
        """
        sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)
        print(sleeper.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    orphan = psutil.Process(int(run.stdout.readline()))
    assert run.communicate(timeout=30)[0] == "status -9\n"
    psutil.wait_procs([orphan], timeout=5)
    assert not orphan.is_running()


@pytest.mark.parametrize("before", [(), ("nohup",)])
def test_work_is_told_to_stop_when_its_parent_is_killed(before):
    run = start(
        """
        print(os.getpid(), flush=True)
        signal.pause()
        """,
        before,
    )
    worker = psutil.Process(int(run.stdout.readline()))
    began_s = time.monotonic()
    run.kill()
    gone, _ = psutil.wait_procs([worker], timeout=10)
    assert gone, f"still there after {time.monotonic() - began_s:.1f} s"


def test_work_that_does_not_stop_in_time_is_killed():
    run = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        while True:
            signal.pause()
        """
    )
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGTERM)
    assert run.communicate(timeout=10)[0] == "status -9\n"
