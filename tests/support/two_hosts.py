"""scripts/two_hosts.sh as tests start it."""

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.training_run import ROOT

SCRIPT = ROOT / "scripts" / "two_hosts.sh"


@contextmanager
def seen_by_hosts() -> Iterator[Path]:
    """A new folder that both hosts see, so not in /tmp."""
    (ROOT / "outputs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="two_hosts-", dir=ROOT / "outputs"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def start_hosts(out: Path, *arguments: str, script: Path = SCRIPT) -> tuple[subprocess.Popen, str]:
    """Start the script; returns it, and a mark in the environment of all that it starts."""
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
    """Skip the test where the script has said that hosts cannot be made."""
    if process.returncode == 3:
        pytest.skip(output.strip().splitlines()[-1])


def left_of(mark: str, grace_s: float = 0.0) -> list[psutil.Process]:
    """The processes with this mark that are there, or still there after a while."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return psutil.wait_procs(found, timeout=grace_s)[1] if grace_s else found
