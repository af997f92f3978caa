"""The parent of a run, on scripted children: statuses, signals, orphans."""

import signal
import subprocess
import sys
import textwrap
import time

import psutil

PRELUDE = """
import os, signal, subprocess, sys, time
from asyncrl.supervisor import supervise
def work():
{body}
status = supervise(work, stop_timeout_s=1.0)
print("status", status, flush=True)
"""


def start(body):
    script = PRELUDE.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)


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


def test_work_is_told_to_stop_when_its_parent_is_killed():
    run = start(
        """
        print(os.getpid(), flush=True)
        signal.pause()
        """
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
