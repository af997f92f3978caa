"""Starts scripts/two_hosts.sh. The script makes two hosts from namespaces, and runs a training on them."""

import json
import os
import subprocess
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.process_output import ProcessOutput
from tests.support.training_run import ROOT, words_of

SCRIPT = ROOT / "scripts" / "two_hosts.sh"
SECOND_ADDRESS = "10.77.0.2"


def start_hosts(out: Path, *arguments: str, script: Path = SCRIPT) -> tuple[subprocess.Popen, str]:
    """Start the script. Returns its process, and the value of MARK that all processes of the script inherit."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        ["bash", str(script), *arguments],
        cwd=script.parents[1],
        env=os.environ | {"OUT": str(out), "MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, mark


def skip_unless_permitted(process: subprocess.Popen, output: str) -> None:
    """Skip the test if the script has reported that this machine does not permit namespaces."""
    if process.returncode == 3:
        pytest.skip(output.strip().splitlines()[-1])


def left_of(mark: str, grace_s: float = 0.0) -> list[psutil.Process]:
    """Return the processes that still run after ``grace_s`` seconds and whose environment variable MARK is ``mark``."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return psutil.wait_procs(found, timeout=grace_s)[1] if grace_s else found


class RunOnTwoHosts(ProcessOutput):
    """Runs scripts/two_hosts.sh, reads its output, and finds the processes of its hosts."""

    def __init__(self, out: Path, *arguments: str) -> None:
        process, self.mark = start_hosts(out, *arguments)
        super().__init__(process)

    def _check_end(self) -> None:
        skip_unless_permitted(self.process, self.output)

    @property
    def num_steps(self) -> int:
        """The number of learner steps, without lost steps. Read from the run's folder in /tmp of the first host."""
        first = next(one.pid for one in left_of(self.mark) if "gcs_server" in one.name())
        paths = list(Path(f"/proc/{first}/root/tmp/asyncrl/quickstart").glob("*/metrics.jsonl"))
        whole, _, _ = (paths[0].read_text() if paths else "").rpartition("\n")
        return json.loads(whole.splitlines()[-1])["step"] + 1 if whole else 0

    def pids(self, words: str) -> list[int]:
        """Return the pids of the processes of both hosts that have ``words`` in their name or command line."""
        return [one.pid for one in left_of(self.mark) if words in words_of(one)]

    def pids_on_second(self, words: str) -> list[int]:
        """Return the pids of the second host's processes that have ``words`` in their name or command line."""
        ours = left_of(self.mark)
        (raylet,) = [one for one in ours if one.name() == "raylet" and SECOND_ADDRESS in words_of(one)]
        host = _host_of(raylet)
        return [one.pid for one in ours if words in words_of(one) and _host_of(one) == host]

    def set_link(self, state: str) -> None:
        """Set the network interface of the second host to ``state``: ``up`` or ``down``."""
        inside = self.pids_on_second("raylet")[0]
        command = ["nsenter", "--target", str(inside), "--net", "ip", "link", "set", "eth0", state]
        subprocess.run(command, check=True, timeout=10)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        for process in left_of(self.mark):
            with suppress(psutil.Error):
                process.kill()


def _host_of(process: psutil.Process) -> str:
    """Return the UTS namespace of a process. Each of the two hosts has its own UTS namespace."""
    with suppress(OSError):
        return os.readlink(f"/proc/{process.pid}/ns/uts")
    return ""
