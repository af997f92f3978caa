"""Which processes of a run end at a stop signal (SIGTERM or SIGINT), and which continue."""

import subprocess
import sys
import textwrap

import pytest

LEFT = """
import os, signal, subprocess, sys, threading
from multiprocessing import get_context
from asyncrl.core.host import keep_stop_blocked, leave_stop_to_owner, outlive_stop
"""
SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def output_of(body: str) -> list[str]:
    script = LEFT + f"SLEEPER = {SLEEPER!r}\n" + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_process_and_its_children_ignore_stop_signals_after_leave_stop_to_owner(number):
    assert output_of(f"""
        leave_stop_to_owner()
        get_context("spawn").Lock()  # starts Python's resource tracker, which unblocks the signals
        os.kill(os.getpid(), signal.{number})
        child = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE)
        child.stdout.readline()
        child.send_signal(signal.{number})
        try:
            child.wait(1)
        except subprocess.TimeoutExpired:
            print("both live")
        child.kill()
    """) == ["both", "live"]


def test_a_process_that_inherits_no_blocked_stop_signal_still_obeys_stop_signals():
    assert output_of("""
        keep_stop_blocked()
        print(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    """) == ["0"]


def test_a_reward_process_ignores_sigterm_and_can_end_its_children_with_it():
    assert output_of("""
        leave_stop_to_owner()
        outlive_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        child = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE)
        child.stdout.readline()
        child.terminate()
        print(child.wait(20))
        forked = os.fork()
        if forked == 0:
            signal.pause()
        os.kill(forked, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
    """) == ["-15", "-15"]
