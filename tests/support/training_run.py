"""Starts a training run in a separate process, as a user does, and inspects the run."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from asyncrl.run.run_folder import shared_folder
from tests.support.process_output import ProcessOutput

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 600


def documented_metrics() -> set[str]:
    """Return the names of the metrics in the tables of docs/metrics.md."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    cells = re.findall(r"^\| (`.*?`) \| ", page, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def undocumented(names: Iterable[str]) -> list[str]:
    """Return those names of metrics in ``names`` that docs/metrics.md does not explain.

    A metric of the critic needs no explanation if the page explains the metric of the policy. Metrics of single alarms
    or data sources need no explanation.
    """
    known = documented_metrics()
    known |= {name.replace("learner.", "learner.critic.", 1) for name in known}
    return sorted(name for name in names if name not in known and not name.startswith(("alarm.", "source.")))


FOREIGN_VARIABLES = {
    **{"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"},
    **{"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
    "COLUMNS": "0",
}
"""Variables that batch systems and companies set. They must not change a run, although they name ranks and proxies
that do not exist."""


def words_of(process: psutil.Process) -> str:
    """Return the name and the command line of a process, or an empty string if the process has ended."""
    with suppress(psutil.Error):
        if process.status() != psutil.STATUS_ZOMBIE:
            return process.name() + " " + " ".join(process.cmdline())
    return ""


class RunningTraining(ProcessOutput):
    """A process of ``python -m asyncrl train`` whose output is read line by line.

    ``python_path`` is a folder with additional modules for the run's processes. ``environment`` has additional
    environment variables.
    """

    def __init__(
        self,
        output_dir: Path,
        *overrides: str,
        cwd: Path = ROOT,
        python_path: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.output_dir = output_dir
        self.scratch = Path(tempfile.mkdtemp(prefix="run-"))  # short, because the length of socket paths is limited
        self.family: dict[int, psutil.Process] = {}
        paths = [str(path) for path in (python_path, ROOT) if path is not None]
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "train", f"output_dir={output_dir}", *overrides],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(paths),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(self.scratch),
                "RAY_TMPDIR": "/tmp",
                **FOREIGN_VARIABLES,
                **(environment or {}),
            },
        )
        super().__init__(process)

    def wait_for_line(self, words: str, timeout_s: float = START_TIMEOUT_S) -> str:
        return super().wait_for_line(words, timeout_s)

    @property
    def run_dir(self) -> Path:
        """The run's folder. A run that failed before its start does not have this folder."""
        return Path(next(line for line in self.lines if " writing to " in line).partition(" writing to ")[2])

    @property
    def summary(self) -> dict:
        """The content of ``summary.json``."""
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def records(self) -> list[dict]:
        """The lines of ``metrics.jsonl``, without an incomplete last line."""
        path = self.run_dir / "metrics.jsonl"
        whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def remember_family(self) -> None:
        """Remember all current processes of the run, so that `survivors` can find those that do not end."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.family[child.pid] = child

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of the run, as ``scancel`` and systemd do."""
        self.remember_family()
        for process in [*self.family.values(), self.process]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def pid_of(self, words: str) -> int:
        """Return the pid of the run's first process that has ``words`` in its name.

        The first four words of the command line count as part of the name.
        """
        self.remember_family()
        for child in self.family.values():
            if child.is_running() and words in child.name() + " " + " ".join(child.cmdline()[:4]):
                return child.pid
        raise AssertionError(
            f"no process of the run is called {words!r}: {[c.cmdline() for c in self.family.values()]}"
        )

    def wait_for_process(self, words: str, timeout_s: float = 30.0) -> int:
        """Wait until `pid_of` finds a process with ``words`` in its name. Returns the pid of the process."""
        found: list[int] = []

        def is_there() -> bool:
            with suppress(AssertionError, psutil.Error):
                found.append(self.pid_of(words))
            return bool(found)

        self.wait_until(is_there, f"process that is called {words!r}", timeout_s)
        return found[0]

    def pid_at(self, words: str) -> int:
        """Return the pid of the run's first process that has ``words`` in its name or in its command line."""
        pids = self.pids_at(words)
        assert pids, f"no process of the run has {words!r} in its command line"
        return pids[0]

    def pids_at(self, words: str) -> list[int]:
        """Return the pids of the run's processes that have ``words`` in their name or in their command line."""
        self.remember_family()
        return [child.pid for child in self.family.values() if words in words_of(child)]

    @property
    def num_steps(self) -> int:
        """The number of learner steps so far, without steps that a return to a checkpoint removed."""
        path = self.run_dir / "metrics.jsonl"
        whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
        return json.loads(whole.rpartition("\n")[2])["step"] + 1 if whole else 0

    def survivors(self, timeout_s: float = 5.0) -> list[str]:
        """Return the command lines of the run's processes that have not ended after ``timeout_s`` seconds."""
        _, alive = psutil.wait_procs(list(self.family.values()), timeout=timeout_s)
        return [" ".join(process.cmdline()) or process.name() for process in alive]

    def left_in_shared_memory(self) -> bool:
        """Return whether the run's folder of published weights in shared memory still exists."""
        return shared_folder(self.run_dir).exists()

    def end(self) -> None:
        """Kill the remaining processes of the run, and delete its scratch folder."""
        if self.process.poll() is None:
            self.remember_family()
            self.process.kill()
        for process in self.family.values():
            if process.is_running():
                process.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)
