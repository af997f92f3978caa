"""Virtual time: waiting in the event loop takes no real time. For tests without threads or other processes."""

import asyncio
import time

import pytest


@pytest.fixture
async def virtual_time(monkeypatch):
    """Replace real time by virtual time. If every task waits, virtual time jumps to the next timer.

    So the order of events does not depend on the machine's load.
    """
    loop = asyncio.get_running_loop()
    now, select = time.monotonic(), loop._selector.select

    def select_or_jump(timeout):
        nonlocal now
        if timeout is None:  # no timer is set, so wait for real events
            return select(None)
        now += timeout
        return select(0)

    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: now)
        patched.setattr(loop._selector, "select", select_or_jump)
        yield
