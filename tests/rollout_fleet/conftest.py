"""Fixtures of the fleet's tests: a tiny model, prompts, and a replay buffer in memory."""

from __future__ import annotations

import pytest

from asyncrl.core import record
from asyncrl.core.record import Pool, ProfileConfig
from asyncrl.profile.trace import Trace
from tests.support.rollout import InMemoryBuffer, make_prompts


@pytest.fixture(name="make_prompts")
def make_prompts_fixture():
    return make_prompts


@pytest.fixture
def make_buffer():
    """Return a function that makes an `InMemoryBuffer` with ``num_prompts`` prompts."""

    def make(num_prompts: int = 8, **options: int) -> InMemoryBuffer:
        return InMemoryBuffer(make_prompts(num_prompts), **options)

    return make


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a random Qwen3 of 75k parameters with a character tokenizer."""
    from tests.support.engine_probes import write_model

    return write_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture
def recorded(tmp_path):
    """Record events of this process as ``engine-0``. Yields a function that stops recording and returns the trace."""
    record.start(ProfileConfig(directory=str(tmp_path / "profile")), process="engine-0", pool=Pool.fleet)

    def load() -> Trace:
        record.stop()
        return Trace.load(tmp_path)

    yield load
    record.stop()
