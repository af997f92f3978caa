"""An event loop whose waits take no time, for tests of code that neither threads nor other processes take part in."""

import asyncio
import time

import pytest


@pytest.fixture
async def virtual_time(monkeypatch):
    """Time stands still while anything is to do, and jumps to the next timer when nothing is.

    So a test that waits is fast, and what happens in which order does not depend on how busy the machine is.
    """
    loop = asyncio.get_running_loop()
    now, select = time.monotonic(), loop._selector.select

    def select_or_jump(timeout):
        nonlocal now
        if timeout is None:  # nothing will happen by itself
            return select(None)
        now += timeout
        return select(0)

    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: now)
        patched.setattr(loop._selector, "select", select_or_jump)
        yield
