"""Runs the steps of docs/your_own_task.md in an empty folder."""

import inspect
import os
import re
import shutil
import subprocess

import pytest

from asyncrl.core.registry import Registry
from tests.support.training_run import ROOT

pytestmark = pytest.mark.e2e

PAGE = (ROOT / "docs" / "your_own_task.md").read_text()
EXAMPLE = ROOT / "scripts" / "examples" / "sorting"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_reward_on_the_page_equals_the_reward_in_the_file():
    function = Registry("rollout_fleet.reward").get(f"{EXAMPLE / 'sorting_reward.py'}:leading_numbers")
    code = re.sub(r'    """.*?"""\n', "", inspect.getsource(function), flags=re.DOTALL)
    assert blocks("python")[0] == code


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_page_works_in_an_empty_folder(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "my_task")
    environment = os.environ | {"PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"}
    _, _, *commands = [command.strip() for command in blocks("bash")]  # skip the setup and the copy of the example
    assert [command.split()[:2] for command in commands] == [
        ["python", "make_task.py"],
        ["asyncrl", "sft"],
        ["asyncrl", "train"],
        ["asyncrl", "samples"],
    ]
    outputs = []
    for command in commands:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path / "my_task", env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    before, after = re.search(r"held out, sampled +([\d.]+) -> ([\d.]+)", outputs[2]).groups()
    assert float(after) > float(before) + 0.1
    assert outputs[3].count("── ") == 5
