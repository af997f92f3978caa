"""Runs the commands and example programs of docs/agents.md, in the folder that docs/your_own_task.md creates."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.training_run import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = (ROOT / "docs" / "agents.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))
PROGRAMS |= dict(re.findall(r"```bash\n# (\S+\.sh):.*?\n(.*?)```", PAGE, flags=re.DOTALL))
COMMANDS = [command for command in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL) if "sorting.yaml" in command]

CLAUDE = f"""#!{sys.executable}
import json, os, sys, urllib.request

body = {{"model": "policy", "max_tokens": 99, "messages": [{{"role": "user", "content": sys.stdin.read()}}]}}
request = urllib.request.Request(
    os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
    json.dumps(body).encode(),
    {{"x-api-key": os.environ["ANTHROPIC_API_KEY"], "content-type": "application/json"}},
)
with urllib.request.urlopen(request) as answer:
    print("".join(block.get("text", "") for block in json.load(answer)["content"]))
"""
"""A stand-in for Claude Code: it sends its input as one message, and writes the answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the programs of docs/agents.md and an untrained model.

    The model is not fine-tuned, because fine-tuning would take a minute.
    """
    folder = tmp_path_factory.mktemp("page") / "my_task"
    shutil.copytree(ROOT / "scripts" / "examples" / "sorting", folder)
    subprocess.run([sys.executable, "make_task.py", "task"], cwd=folder, check=True)
    shutil.copytree(folder / "task" / "model", folder / "warm")
    for name, code in PROGRAMS.items():
        (folder / name).write_text(code)
    (folder / "claude").write_text(CLAUDE)
    (folder / "claude").chmod(0o755)
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.search(r"environment.name=(\S+)", command)[1])
def test_each_command_of_the_agents_page_trains(folder, command):
    environment = os.environ | {"PATH": f"{ROOT / '.venv' / 'bin'}:{folder}:{os.environ['PATH']}"}
    short = "total_steps=2 evaluation.enabled=false algorithm.groups_per_step=4 rollout_fleet.groups_in_flight=4"
    done = subprocess.run(
        f"{command.strip()} {short} output_dir=out",
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "out").glob("*/*/metrics.jsonl")
    records = [json.loads(line) for line in run.read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1]
    assert records[-1]["episode.turns"] >= 1
    assert not any(value for name, value in records[-1].items() if name.startswith("episode.failed_"))
    shutil.rmtree(folder / "out")
