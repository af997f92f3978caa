"""Measures the rollout fleet with engines of different speeds, with samples of two lengths, and with a dying engine.

Four rollout loops with scripted engines use a real buffer server. A scripted engine writes each sample at a fixed pace.
So the fleet's throughput, divided by the sum of its engines' speeds, depends only on the assignment of work. The
engines write few tokens per second, so this process has little work and does not limit the throughput. As a check,
`share_of_speeds` also returns the share of the time in which this process is busy.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from asyncrl.core.errors import EngineLost
from asyncrl.core.lives import keep_up
from asyncrl.core.types import Prompt, WeightOffer
from buffer import BufferClient, BufferConfig, ControlClient, LearnerClient, WorkerClient
from buffer.commands import Granted
from buffer.server import BufferServer
from rollout_fleet.answering import AnsweringParts
from rollout_fleet.config import EngineKind, RolloutFleetConfig
from rollout_fleet.engines.engine import Engine, SampleOutput, SampleRequest
from rollout_fleet.engines.scripted import Script, ScriptedAnswer, ScriptedEngine
from rollout_fleet.episodes.episode_run import Player
from rollout_fleet.loop import RolloutLoop
from rollout_fleet.member import Member, member_faults
from rollout_fleet.metrics import FleetCounters
from rollout_fleet.rewards import WeightedRewards

GROUPS_PER_STEP = 16
MAX_LAG = 3
PLACES = 8  # An engine generates this many prompt groups at the same time. The buffer admits 64 groups for 4 engines.
SAMPLES = 2
TOKENS = 80
TOKEN_DELAY_S = 0.01
START_S = 1.0
RUN_S = 15.0
WARM_UP_S = 5.0
SHORT, LONG = 40, 400
OCCUPANCY_GROUPS = 160


@dataclass(kw_only=True)
class _FleetRun:
    """A test system: engines that use one buffer server, and a learner that takes each complete batch immediately."""

    server: BufferServer
    control: ControlClient
    learner: LearnerClient
    workers: list[LocalWorker]

    async def learn(self) -> None:
        """Queue prompts, consume batches and announce new versions. The task runs until it is cancelled.

        The queue always has more prompts than the buffer admits.
        """
        num_prompts = 2 * (MAX_LAG + 1) * GROUPS_PER_STEP
        await self.control.enqueue([_prompt(number) for number in range(num_prompts)])
        for version in itertools.count():
            await self.control.plan(version)
            await self.control.enqueue([_prompt(num_prompts + number) for number in range(GROUPS_PER_STEP)])
            num_prompts += GROUPS_PER_STEP
            await self.learner.offer(_offer(version + 1))
            await self.control.commit(version)

    async def tokens_trained(self) -> int:
        """Return the number of tokens that the learner has trained on so far."""
        return (await self.control.stats()).tokens_trained


def _prompt(number: int) -> Prompt:
    return Prompt(group_id=number, prompt_ids=np.asarray([number, 6], dtype=np.int32), ground_truth="x")


def _offer(version: int) -> WeightOffer:
    return WeightOffer(version=version, manifest=f"/v{version}", digest="", num_bytes=0)


class _SlowToStart(ScriptedEngine):
    """A scripted engine that takes `START_S` seconds to start."""

    async def start(self) -> None:
        await asyncio.sleep(START_S)
        await super().start()


class _Meter:
    """Integral of an engine's number of running samples over time, from the first sample to the latest `mark`."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._since = self._passed_s = 0.0
        self._num_running = 0
        self.occupied_s = self.lasted_s = 0.0

    def change(self, by: int) -> None:
        """Add ``by`` to the number of running samples."""
        now = time.perf_counter()
        if self._began is None:
            self._began = self._since = now
        self._pass_time(now)
        self._num_running += by

    def mark(self, now: float) -> None:
        """Extend the integral until ``now``, a value of `time.perf_counter`."""
        if self._began is not None:
            self._pass_time(now)
            self.occupied_s, self.lasted_s = self._passed_s, now - self._began

    def _pass_time(self, now: float) -> None:
        self._passed_s += self._num_running * (now - self._since)
        self._since = now


def _metered(script: Script, meter: _Meter) -> _SlowToStart:
    """Make an engine that reports the start and end of each sample to a meter."""

    class Metered(_SlowToStart):
        async def _write(self, sample: Any) -> SampleOutput:
            meter.change(1)
            try:
                return await super()._write(sample)
            finally:
                meter.change(-1)

    return Metered(script)


async def _start(
    stack: AsyncExitStack,
    delays_s: Sequence[float],
    *,
    groups_per_step: int = GROUPS_PER_STEP,
    length: Callable[[int], int] = lambda _: TOKENS,
    meters: list[_Meter] | None = None,
    hand_over: bool = True,
) -> _FleetRun:
    """Start a buffer server, and one engine per value of ``delays_s`` (seconds between two tokens)."""
    config = RolloutFleetConfig(
        engine=EngineKind.scripted, groups_in_flight=PLACES, reward="exact_match", renew_every_s=5.0
    )
    options = BufferConfig(max_lag=MAX_LAG, lease_s=60.0, hand_over=hand_over)
    server = BufferServer(options, groups_per_step=groups_per_step)
    stack.callback(server.close)
    connection = BufferClient(server.address)
    control = ControlClient(connection)
    stack.push_async_callback(control.close)
    learner = LearnerClient(connection)
    await learner.offer(_offer(0))
    run = _FleetRun(server=server, control=control, learner=learner, workers=[])
    for rank, delay_s in enumerate(delays_s):

        def answer(request: SampleRequest, version: int, delay_s: float = delay_s) -> ScriptedAnswer:
            written = len(request.prompt_ids) - 2
            return ScriptedAnswer(response=[7] * (length(int(request.prompt_ids[0])) - written), token_delay_s=delay_s)

        if meters is not None:
            meters.append(_Meter())

        def make(answer: Script = answer, rank: int = rank) -> ScriptedEngine:
            return _SlowToStart(answer) if meters is None else _metered(answer, meters[rank])

        worker = LocalWorker(f"engine-{rank}", config, make=make, address=server.address, num_samples=SAMPLES)
        stack.push_async_callback(worker.close)
        await worker.start()
        run.workers.append(worker)
    return run


class LocalWorker:
    """A rollout worker (a rollout loop and its engine) in this process. `keep_up` replaces an engine that fails."""

    def __init__(
        self,
        name: str,
        config: RolloutFleetConfig,
        *,
        make: Callable[[], Engine],
        address: str,
        num_samples: int,
        player: Player | None = None,
    ) -> None:
        self.member = Member(name, member_faults(config))
        self.engine = make()
        self._config = config
        self._make = make
        self._address = address
        self._num_samples = num_samples
        self._player = player
        self._before: list[FleetCounters] = []
        self._loop: RolloutLoop | None = None
        self._client: WorkerClient | None = None
        self._running: asyncio.Task[FleetCounters] | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def counters(self) -> FleetCounters:
        """Counters of this worker, such as generated tokens, summed over all engines since the worker's start."""
        now = [] if self._loop is None else [self._loop.counters()]
        return FleetCounters.total([*self._before, *now])

    async def start(self) -> None:
        """Start the first engine. From then on, replace each engine that fails."""
        await self._come_up()
        self._keeping = asyncio.create_task(keep_up(self))

    async def begin(self) -> None:
        """Start a new engine in place of the failed engine."""
        self.member.restart()
        self.engine = self._make()
        await self._come_up()

    async def _come_up(self) -> None:
        await self.engine.start()
        self.member.started(self.member.epoch)
        self._client = WorkerClient(BufferClient(self._address))
        self._loop = RolloutLoop(
            self._config,
            AnsweringParts(engine=self.engine, rewards=WeightedRewards(self._config), decode=str, player=self._player),
            name=self.member.name,
            buffer=self._client,
            samples_per_prompt=self._num_samples,
        )
        await self._loop.load_next(-1)
        self.member.verified(self.member.epoch)
        self._running = asyncio.create_task(self._loop.run())

    async def watch(self) -> NoReturn:
        """Wait until the rollout loop ends because the engine has failed. Then raise `EngineLost`."""
        assert self._running is not None
        await self._running
        raise EngineLost(f"{self.member.name} has ended")

    async def end(self, fault: Exception) -> float:
        """Stop the engine and its loop; return the seconds to wait before the next start.

        If the engine must not start again, raise ``fault``.
        """
        self.member.fault(self.member.epoch, time.monotonic())
        await self._stop()
        if (pause_s := self.member.stopped()) is None:
            raise fault
        return pause_s

    async def close(self) -> None:
        """Stop the rollout loop and the engine, and close the buffer's client."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._stop()

    async def _stop(self) -> None:
        if self._loop is not None:
            await self._loop.stop()
            self._before.append(self._loop.counters())
            self._loop = None
        await self.engine.stop()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        if self._client is not None:
            await self._client.close()


EQUAL = [TOKEN_DELAY_S] * 4
ONE_SLOW = [*EQUAL[:3], 10 * TOKEN_DELAY_S]


async def share_of_speeds(delays_s: Sequence[float], *, hand_over: bool = True) -> tuple[float, float]:
    """Measure the throughput of engines with different speeds. ``delays_s`` has each engine's seconds between tokens.

    If ``hand_over`` is true, a slow engine may hand running groups over to another engine.

    Returns:
        A pair: the trained tokens per second divided by the sum of the engines' speeds, and the share of the time in
        which this process is busy.
    """
    async with AsyncExitStack() as stack:
        run = await _start(stack, delays_s, hand_over=hand_over)
        learning = asyncio.create_task(run.learn())
        stack.callback(learning.cancel)
        await asyncio.sleep(WARM_UP_S)
        began_s, worked_s, before = time.perf_counter(), time.process_time(), await run.tokens_trained()
        await asyncio.sleep(RUN_S)
        took_s = time.perf_counter() - began_s
        rate = (await run.tokens_trained() - before) / took_s
        busy = (time.process_time() - worked_s) / took_s
    return rate / sum(PLACES * SAMPLES / delay_s for delay_s in delays_s), busy


async def occupancy() -> float:
    """Return the mean share (0 to 1) of the engines' slots that are occupied, until the last group begins.

    A slot is the capacity for one sample. One group in four is ten times longer than the other groups. All samples of a
    group have the same length, so a slot is empty only while a group is scored, stored and leased. The measurement ends
    when the last group gets its first lease. After that, engines would hand over running groups to other engines.
    """

    def length(prompt_id: int) -> int:
        return LONG if prompt_id % 4 == 0 else SHORT

    meters: list[_Meter] = []
    async with AsyncExitStack() as stack:
        run = await _start(stack, EQUAL, groups_per_step=OCCUPANCY_GROUPS, length=length, meters=meters)
        ledger = run.server.service.ledger

        def note(command: object, outcome: object) -> None:
            if isinstance(outcome, Granted) and any(lease.attempt == 0 for lease in outcome.leases):
                for meter in meters:
                    meter.mark(time.perf_counter())

        ledger.on_applied = note
        await run.control.enqueue([_prompt(number) for number in range(OCCUPANCY_GROUPS)])
        while ledger.groups.num_queued or ledger.groups.num_leased:  # noqa: ASYNC110 - the loop polls the ledger
            await asyncio.sleep(0.1)
    return sum(meter.occupied_s for meter in meters) / sum(meter.lasted_s * PLACES * SAMPLES for meter in meters)


async def recovery() -> dict[str, float]:
    """Kill one of four engines.

    Returns:
        Two figures by name: the time until a new engine replaces the killed engine, divided by the start time of an
        engine; and the number of generated tokens that were dropped.
    """
    async with AsyncExitStack() as stack:
        run = await _start(stack, EQUAL)
        learning = asyncio.create_task(run.learn())
        stack.callback(learning.cancel)
        await asyncio.sleep(WARM_UP_S)
        struck = run.workers[0]
        epoch = struck.member.epoch
        died_s = time.perf_counter()
        struck.engine.die("killed by the benchmark")  # type: ignore[attr-defined]
        while struck.member.epoch == epoch or not struck.member.is_serving:  # noqa: ASYNC110 - the loop polls a state
            await asyncio.sleep(0.005)
        took_s = time.perf_counter() - died_s
        dropped = (await run.control.stats()).tokens_dropped
    return {
        "recovery_vs_engine_start": took_s / START_S,
        "tokens_dropped_per_kill": float(dropped.get("engine_failed", 0) + dropped.get("lost", 0)),
    }
