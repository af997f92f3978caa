"""An event loop whose waits take no time, for tests of code without threads and other processes."""

import asyncio
import time

import pytest


@pytest.fixture
async def virtual_time(monkeypatch):
    """Let time advance only when no task has work. Then time jumps to the next timer.

    A test that waits is fast, and the order of events does not depend on the machine's load.
    """
    loop = asyncio.get_running_loop()
    now, select = time.monotonic(), loop._selector.select

    def select_or_jump(timeout):
        nonlocal now
        if timeout is None:  # there is no timer to jump to
            return select(None)
        now += timeout
        return select(0)

    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: now)
        patched.setattr(loop._selector, "select", select_or_jump)
        yield
