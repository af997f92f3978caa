"""Fixtures of the tests of runs: a fleet of scripted workers, and threads that take no time."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest


@pytest.fixture
def fleet_of(monkeypatch, tmp_path):
    """Return a function that makes a fleet with these `Workers`."""
    from tests.support.scripted_workers import fleet_on

    return partial(fleet_on, monkeypatch, tmp_path)


@pytest.fixture
def threads_take_no_time(monkeypatch):
    """Run the work of `asyncio.to_thread` at once, in the caller's thread."""

    async def call(work, *arguments):
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", call)
