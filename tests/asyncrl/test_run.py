"""The files of a run that a signal stops."""

import asyncio
import io
import subprocess
import sys

import pytest
from rich.console import Console

from asyncrl.cli.compose import compose_run
from asyncrl.core.errors import WorkerDiedError
from asyncrl.metrics import TerminalView
from asyncrl.run import run
from asyncrl.run.run import Run
from tests.asyncrl.test_controller import make_controller, train


class Learner:
    def __init__(self, error=None, seconds=0.0):
        self.error, self.seconds = error, seconds

    async def save_policy(self, directory):
        directory.mkdir()
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error


async def keep(tmp_path, learner):
    """The messages and the files of a training of three steps that is told to keep its results."""
    controller, buffer, fleet, _ = make_controller(steps=3)
    await train(controller, fleet)
    fleet.tokens_generated = 10 * buffer.version
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=3, console=Console(file=output, width=200))
    run = Run(compose_run(["save_timeout_s=0.2"]), tmp_path, (None, []), None, view, print)
    await run._keep(controller, learner, None, None)
    return output.getvalue(), sorted(path.name for path in tmp_path.iterdir())


async def test_policy_summary_and_plot_are_kept(tmp_path):
    said, found = await keep(tmp_path, Learner())
    assert (said, found) == ("", ["policy", "reward.png", "summary.json"])


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (Learner(seconds=60.0), "took longer than save_timeout_s=0.2; raise it"),
        (Learner(WorkerDiedError("learner rank 0 died")), "could not be written: learner rank 0 died"),
    ],
)
async def test_a_policy_that_cannot_be_written_is_told_and_never_half_there(tmp_path, learner, words):
    said, found = await keep(tmp_path, learner)
    assert words in said
    assert found == [".policy.partial"]


@pytest.mark.parametrize(("save_progress", "hands_over"), [("at_stop", True), ("never", False)])
def test_the_buffer_requests_no_hand_over_where_progress_is_never_saved(tmp_path, save_progress, hands_over):
    view = TerminalView(title="run", total_steps=3, console=Console(file=io.StringIO()))
    config = compose_run([f"rollout_fleet.save_progress={save_progress}"])
    assert Run(config, tmp_path, (None, []), None, view, print)._buffer_options().hand_over is hands_over


async def test_a_profile_that_cannot_be_written_costs_a_line_whatever_was_wrong(tmp_path, monkeypatch):
    def explain(_):
        raise KeyError("lag")

    monkeypatch.setattr(run, "explain", explain)
    monkeypatch.setattr(run.record, "current", object)
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=3, console=Console(file=output, width=200))
    assert await Run(compose_run([]), tmp_path, (None, []), None, view, print)._explain(None) is None
    assert "the profile could not be written: KeyError('lag')" in output.getvalue()


def test_the_controller_loads_no_torch():
    code = "import sys, asyncrl.run.run; sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
