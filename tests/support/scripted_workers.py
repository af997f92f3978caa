"""Scripted rollout workers of a real `FleetGroup`, for tests in virtual time without Ray."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.config import RunConfig
from asyncrl.core.errors import WorkerDiedError
from asyncrl.run import fleet_group
from asyncrl.run.fleet_group import FleetGroup
from asyncrl.run.run_folder import RunPaths
from asyncrl.single_controller import RayClassWithInitArgs
from rollout_fleet.metrics import FleetMeter


class Workers:
    """Replaces all workers and their resources. A call takes ``takes_s`` s, or 60 s if ``hangs`` and it is `counters`.

    Attributes:
        deaths: A future per rank. It gets the error when the worker dies.
        replaced: The ranks of replaced workers, in the order of their replacements.
        full: An event while no node has room for a worker, otherwise None. A test sets the event when there is room.
        closed: Ranks of the workers whose resources were released.
        made_with: Arguments of the latest worker, without its seed.
        engine_seeds: Seeds of the engines, in the order of their starts.
        calls: The pair (rank, method) of every call except calls of `counters`.
        keeps_leases: Ranks of the workers that cannot release all leases when they end.
        run_errors: The error that `run` raises, by rank.
    """

    def __init__(self, takes_s=0.5, hangs=False):
        self.takes_s = takes_s
        self.hangs = hangs
        self.deaths = {}
        self.replaced = []
        self.calls = []
        self.run_errors = {}
        self.awake_s = {}
        self.said = []
        self.full = None
        self.closed = []
        self.supplied = []
        self.made_with = {}
        self.engine_seeds = []
        self.lives = {}
        self.keeps_leases = set()

    def execute_rank_async(self, rank, method, *arguments):
        if method != "counters":
            self.calls.append((rank, method))
        return self._unless_dead(self.death_of(rank), self._when_awake(rank, getattr(self, method)(rank, *arguments)))

    def death_of(self, rank):
        return self.deaths.setdefault(rank, asyncio.get_running_loop().create_future())

    def die(self, rank, error):
        self.death_of(rank).set_exception(error)
        self.death_of(rank).exception()  # mark the error as retrieved

    def stand_still(self, rank, seconds):
        """Pause a worker for ``seconds``, like SIGSTOP and SIGCONT. After the pause, it answers the pending calls."""
        self.awake_s[rank] = time.monotonic() + seconds

    def fill(self):
        self.full = asyncio.Event()

    async def node_of(self, rank, wanted=""):
        if self.full is not None:
            await self.full.wait()
        return wanted or f"node-{rank}"

    def replace_worker(self, rank, engine_seed, **made_with):
        self.replaced.append(rank)
        self.deaths.pop(rank, None)
        self.lives.pop(rank, None)
        self.awake_s.pop(rank, None)
        self.hangs = False
        self.made_with = made_with
        self.engine_seeds.append(engine_seed)

    def close(self, rank):
        self.closed.append(rank)
        if not self.death_of(rank).done():
            self.die(rank, WorkerDiedError(f"rank {rank} was killed"))

    async def _unless_dead(self, death, work):
        task = asyncio.ensure_future(work)
        await asyncio.wait({death, task}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            task.cancel()
            raise death.exception()
        return task.result()

    async def _when_awake(self, rank, work):
        result = await work
        await asyncio.sleep(self.awake_s.get(rank, 0.0) - time.monotonic())
        return result

    async def answer(self, rank, prompts, version, num_samples):
        await asyncio.sleep(self.takes_s)
        return [(prompt, version, num_samples) for prompt in prompts]

    async def run(self, rank):
        left = self.lives.setdefault(rank, asyncio.Event())
        await asyncio.wait({asyncio.ensure_future(left.wait())}, timeout=self.takes_s)
        if error := self.run_errors.pop(rank, None):
            raise error
        return FleetMeter().counters()

    async def release_device(self, rank, incarnation):
        await asyncio.sleep(self.takes_s)

    async def start(self, rank):
        return f"worker-{rank}-{self.replaced.count(rank)}"

    async def load_first(self, rank):
        await asyncio.sleep(self.takes_s)

    async def wait_failed(self, rank):
        await asyncio.Event().wait()

    async def leave(self, rank):
        await asyncio.sleep(1.0)
        self.lives[rank].set()
        return await self.counters(rank, is_final=True)

    def shutdown(self):
        pass

    async def drain(self, rank):
        return await self.counters(rank, is_final=True)

    async def stop(self, rank):
        return await self.counters(rank, is_final=True)

    async def counters(self, rank, is_final=False):
        await asyncio.sleep(60 if self.hangs else 0)
        meter = FleetMeter()
        meter.add(tokens_generated=100, tokens_in_flight=40, groups_finished=1, groups_failed=Counter(reward=1))
        if is_final and rank not in self.keeps_leases:
            meter.add(tokens_in_flight=-40, groups_released=1)
        if rank == 0:
            meter.add(groups_failed=Counter(aborted=1))
        return meter.counters()


class Graves:
    """Replaces the controller's buffer client. For each dead worker, the buffer reports 70 lost tokens.

    Attributes:
        error: The error that `bury` raises, or None.
    """

    def __init__(self):
        self.error = None
        self.buried = []
        self.known = []

    async def bury(self, worker, num_generated=0):
        if self.error is not None:
            raise self.error
        self.buried.append(worker)
        self.known.append(num_generated)
        return 70

    async def close(self):
        pass


def fleet_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: Workers, *options: str, version: int = 0
) -> FleetGroup:
    """Return a fleet of the scripted workers ``workers``. The run begins at version ``version``.

    ``buffer.request_timeout_s`` is 0.1 if ``options`` does not set it.
    """

    def places(config: RunConfig, *, worker: RayClassWithInitArgs, **_: Any) -> Workers:
        workers.engine_seeds.append(worker.kwargs["engine_seed"])
        return workers

    monkeypatch.setattr(fleet_group, "EnginePlaces", places)
    monkeypatch.setattr(fleet_group, "ControlClient", lambda client: client)

    async def supply(node_id: str) -> str:
        workers.supplied.append(node_id)
        return f"/models/of/{node_id}"

    workers.graves = Graves()
    role = SimpleNamespace(client=None)
    connection: Any = SimpleNamespace(for_role=lambda _: role, client=lambda: workers.graves)
    folders = dict.fromkeys(("logs", "snapshots", "staging", "samples", "tokens", "checkpoints"), tmp_path)
    paths = RunPaths(**folders, trajectories=None)
    short = ["buffer.request_timeout_s=0.1", "rollout_fleet.load_timeout_s=0.1", "ray.start_timeout_s=10"]
    config, pool, said = compose_run([*short, *options]), SimpleNamespace(), workers.said.append
    return FleetGroup(config, buffer=connection, paths=paths, pool=pool, say=said, supply=supply, version=version)
