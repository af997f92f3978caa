"""The shell scripts in scripts/ that users start."""

import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from tests.support.training_run import ROOT
from tests.support.two_hosts import SCRIPT, left_of, skip_unless_permitted, start_hosts


@pytest.mark.timeout(300)
def test_paths_are_relative_to_the_users_directory(tmp_path):
    (tmp_path / "own.py").write_text("def loss(inputs, config): ...\n")
    command = ["bash", str(ROOT / "scripts" / "run_async.sh"), "--print-config", "algorithm.loss=own.py:loss"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert shown.returncode == 0, shown.stderr
    assert yaml.safe_load(shown.stdout)["algorithm"]["loss"] == f"{tmp_path / 'own.py'}:loss"


RAY = """#!/bin/sh
echo Ray runtime started.
exec sleep 600
"""
TRAINING = """#!/bin/sh
trap 'echo told to stop; exit 143' TERM
mkdir -p /tmp/asyncrl/quickstart/2030-01-01
hostname > /tmp/asyncrl/quickstart/2030-01-01/host.txt
getent hosts host-1
echo training
[ "$MODE" = ends ] || sleep 600 & wait $!
"""


@pytest.fixture(params=["in the temporary folder", "in the repository"])
def hosts(request, tmp_path):
    """Yield a pair: the script in a copied repository with fake Ray and fake training, and a folder for results."""
    with ExitStack() as stack:
        folder = tmp_path
        if request.param == "in the repository":
            (ROOT / "outputs").mkdir(exist_ok=True)
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="two_hosts-", dir=ROOT / "outputs")))
        programs = {"scripts/setup.sh": "", ".venv/bin/ray": RAY, ".venv/bin/asyncrl": TRAINING}
        for name, text in programs.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        shutil.copy(SCRIPT, folder / "scripts")
        yield folder / "scripts" / SCRIPT.name, folder / "out"


@pytest.mark.timeout(120)
def test_two_hosts_reach_each_other_have_separate_tmp_folders_and_end_with_the_run(hosts, monkeypatch):
    monkeypatch.setenv("MODE", "ends")
    script, out = hosts
    process, mark = start_hosts(out, script=script)
    output, _ = process.communicate(timeout=100)
    skip_unless_permitted(process, output)
    assert process.returncode == 0, output
    assert "10.77.0.2       host-1" in output
    assert sorted(path.name for path in out.iterdir()) == ["collective", "file"]
    assert (out / "file" / "host.txt").read_text() == "host-0\n"
    assert left_of(mark) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_run_on_two_hosts_and_leaves_no_process(hosts, number, status):
    script, out = hosts
    process, mark = start_hosts(out, script=script)
    output = ""
    while "training\n" not in output and (line := process.stdout.readline()):
        output += line
    process.send_signal(number)
    output += process.communicate(timeout=100)[0]
    skip_unless_permitted(process, output)
    assert process.returncode == status, output
    # After SIGKILL has ended the script, the kernel needs some time to end the script's child processes.
    assert left_of(mark, grace_s=10.0 if number is signal.SIGKILL else 0.0) == []
    if number is not signal.SIGKILL:
        assert "told to stop" in output
        assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
