"""Fixtures for tests of runs: the quickstart's files, scripted workers, and `asyncio.to_thread` without threads."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from asyncrl.cli.quickstart import make_assets


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Return the quickstart's files: a model with 128 positions, and four rows in each data file."""
    folder = tmp_path_factory.mktemp("quickstart") / "assets"
    return make_assets(folder, seed=0, num_train=4, num_held_out=4, num_demonstrations=4)


@pytest.fixture
def fleet_of(monkeypatch, tmp_path):
    """Return a function that makes a fleet from scripted `Workers`."""
    from tests.support.scripted_workers import fleet_on

    return partial(fleet_on, monkeypatch, tmp_path)


@pytest.fixture
def threads_take_no_time(monkeypatch):
    """Replace `asyncio.to_thread` with a function that makes the call in the caller's thread."""

    async def call(work, *arguments):
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", call)
