"""Who may connect to the Ray cluster of a run."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.run.cluster import warning_of_open_cluster

RUN = """
import asyncio, os, subprocess, sys
from asyncrl.run import protect_own_cluster
protect_own_cluster()
from asyncrl.cli.compose import compose_run
from asyncrl.run.cluster import ray_cluster
import ray
CONNECT = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(ray.cluster_resources()['CPU'])"
async def run():
    async with ray_cluster(compose_run([])):
        address = ray.get_runtime_context().gcs_address
        for token in (os.environ["RAY_AUTH_TOKEN"], "0" * 64):
            command = [sys.executable, "-c", CONNECT, address]
            environment = os.environ | {"RAY_AUTH_TOKEN": token, "RAY_NUM_REDIS_GET_RETRIES": "2"}
            done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, timeout=100)
            print(done.returncode == 0, flush=True)
asyncio.run(run())
"""


def test_a_cluster_of_a_runs_own_has_a_token_that_is_not_in_the_home_folder(tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    stranger = home / ".ray"
    stranger.write_text("no folder can be made here")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN)],
        env=environment | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stdout.split() == ["True", "False"], done.stderr
    assert [path.name for path in home.iterdir()] == [".ray"]


@pytest.mark.parametrize(
    ("mode", "overrides", "is_warned"),
    [
        ("", ["ray.address=auto", "placement.num_nodes=2"], True),
        ("disabled", ["ray.address=auto", "placement.num_nodes=2"], True),
        ("token", ["ray.address=auto", "placement.num_nodes=2"], False),
        ("", ["ray.address=auto"], False),
        ("", [], False),
    ],
)
def test_a_joined_cluster_of_several_nodes_without_a_token_gets_a_warning(monkeypatch, mode, overrides, is_warned):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    warning = warning_of_open_cluster(compose_run(overrides))
    assert ("RAY_AUTH_TOKEN" in warning) == is_warned
