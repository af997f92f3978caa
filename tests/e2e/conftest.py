"""Fixtures that start whole training runs as a user does, and end the runs when the test ends."""

import pytest

from tests.support.training_run import RunningTraining


@pytest.fixture
def start(tmp_path):
    """Return a function that starts ``python -m asyncrl train`` with the given overrides in a separate process.

    The fixture ends the process later.
    """
    running = []

    def start(*overrides, output_dir=tmp_path, **options):
        running.append(RunningTraining(output_dir, *overrides, **options))
        return running[-1]

    yield start
    for run in running:
        run.end()
