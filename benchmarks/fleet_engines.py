"""Measures the fleet on real SGLang servers: its speed against a bare client, and its recovery from a killed server.

The bare client is an HTTP client that calls the servers directly. There are two servers on the CPU, each pinned to a
core. The benchmark measures the fleet and the bare client alternately. Both sample the same prompts with the same
options and the same number of concurrent requests. The fleet has two supervised rollout loops in this process, and a
buffer server in its own process. The bare client sends one request per group, and only counts the tokens of the
answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from asyncrl.core.types import Prompt
from benchmarks.fleet_scripted import LocalWorker
from benchmarks.random_models import save_random_qwen3
from benchmarks.saved_weights import describe_model
from buffer import BufferClient, BufferConfig, BufferProcess, ControlClient, LearnerClient
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SamplingConfig, SGLangConfig
from rollout_fleet.engines.sglang import STREAM_INTERVAL, SGLangEngine
from rollout_fleet.engines.sglang_server import GUARD

logger = logging.getLogger(__name__)

NUM_ENGINES = 2
PLACES = 8  # An engine generates this many prompt groups at the same time.
SAMPLES = 2
NEW_TOKENS = 256
SHORT_TOKENS = 64
"""Response length in fleets with a killed server.

Responses are short, because the other server recomputes the tokens that were already sampled.
"""
GROUPS_PER_ROUND = 64
NUM_ROUNDS = 5
NUM_KILLS = 4
USUAL_S = 10.0
"""Seconds in which the usual rate of the surviving engine is measured, before each kill and after each recovery."""
SPREAD_S = 4.0  # Time to enqueue the first prompts; also the duration of each pause before and after a kill.
_VOCABULARY = 1000


def save_model(directory: Path) -> str:
    """Save a random Qwen3 with 4 layers and 5 million parameters; return the path of its folder.

    The model rarely ends a response before the length limit.
    """
    ids = {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
    shape = {"layers": 4, "hidden": 256, "mlp": 768, "heads": 4, "head_dim": 64, "vocab_size": _VOCABULARY}
    return save_random_qwen3(directory, **shape, **ids)


class _PinnedEngine(SGLangEngine):
    """An engine whose SGLang server is pinned to one CPU core."""

    _starting = asyncio.Lock()

    def __init__(self, *arguments: Any, core: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.server = self.server
        self._core = core
        self.num_heard = 0

    async def start(self) -> None:
        """Start the engine, and pin the engine's server process to one CPU core.

        A new server process inherits the pinned core of its parent. So this method pins the parent, the benchmark's
        process, to the core for half a second. In this time the server process starts.
        """
        async with self._starting:
            everywhere = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {self._core})
            starting = asyncio.create_task(super().start())
            await asyncio.sleep(0.5)
            os.sched_setaffinity(0, everywhere)
        await starting

    def _take(self, event: Any, samples: Any) -> Any:
        """Count tokens when they arrive. A measurement is too short to count only the tokens of finished samples."""
        self.num_heard += len(event.get("output_ids", ()))
        return super()._take(event, samples)


@dataclass(kw_only=True)
class _Fleet:
    """A fleet of two workers, and a client of the buffer server. Each worker has an SGLang server."""

    client: ControlClient
    workers: list[LocalWorker]
    num_prompts: int = 0

    async def roll_out(self, number: int) -> float:
        """Generate ``number`` groups, and wait until all groups are stored; return the tokens per second."""
        tokens, stored = self.tokens, self.stored
        began_s = time.perf_counter()
        await self.enqueue(number)
        while self.stored < stored + number:  # noqa: ASYNC110 - the loop polls a counter
            await asyncio.sleep(0.01)
        return (self.tokens - tokens) / (time.perf_counter() - began_s)

    async def enqueue(self, number: int) -> None:
        """Put ``number`` new prompts into the buffer's queue."""
        prompts = [
            Prompt(group_id=self.num_prompts + index, prompt_ids=ids) for index, ids in enumerate(prompts_of(number))
        ]
        self.num_prompts += number
        await self.client.enqueue(prompts)

    @property
    def tokens(self) -> int:
        """Number of tokens that the engines have generated so far."""
        return sum(worker.counters.tokens_generated for worker in self.workers)

    @property
    def stored(self) -> int:
        """Number of groups that the workers have finished and stored so far."""
        return sum(worker.counters.groups_finished for worker in self.workers)


def prompts_of(number: int) -> Iterator[np.ndarray]:
    """Yield the token ids of ``number`` random prompts, each [16] int32. Every call yields the same prompts."""
    rng = np.random.default_rng(0)
    return iter(rng.integers(3, _VOCABULARY, (number, 16), np.int32))


def measure_engines() -> dict[str, float]:
    """Compare the fleet with a client that calls the SGLang servers directly. Then kill servers and measure recoveries.

    Return the figures by name.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="asyncrl-bench-") as folder:
        return asyncio.run(_measure(Path(folder)))


async def _measure(scratch: Path) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        fleet = await _make_fleet(stack, scratch / "rates", NEW_TOKENS)
        await asyncio.gather(*(worker.start() for worker in fleet.workers))
        figures = await _rates(fleet)
    kills = _Kills()
    for turn in range(NUM_KILLS):
        async with AsyncExitStack() as stack:
            await kills.strike(await _make_fleet(stack, scratch / f"kill-{turn}", SHORT_TOKENS))
    return figures | kills.figures()


async def _rates(fleet: _Fleet) -> dict[str, float]:
    """Alternate measurements of the fleet with measurements of a bare client. Return the figures by name.

    The bare client calls the servers directly.
    """
    rates: dict[str, list[float]] = {"fleet": [], "bare": []}
    for turn in range(NUM_ROUNDS + 1):
        sides = ["fleet", "bare"] if turn % 2 else ["bare", "fleet"]
        for side in sides:
            rate = await (fleet.roll_out(GROUPS_PER_ROUND) if side == "fleet" else _bare(fleet, GROUPS_PER_ROUND))
            if turn:  # Do not record the first repetition, which is a warm-up.
                rates[side].append(rate)
                logger.info("%s: %.0f tokens/s", side, rate)
    paired = [fleet_rate / bare for fleet_rate, bare in zip(rates["fleet"], rates["bare"], strict=True)]
    return {
        "fleet_vs_bare_client": statistics.median(paired),
        "fleet_tokens_per_s": statistics.median(rates["fleet"]),
    }


async def _make_fleet(stack: AsyncExitStack, scratch: Path, new_tokens: int) -> _Fleet:
    model_path = save_model(scratch / "model")
    config = RolloutFleetConfig(
        groups_in_flight=PLACES,
        sampling=SamplingConfig(max_new_tokens=new_tokens),
        sglang=SGLangConfig(dtype="float32", max_total_tokens=16384),
    )
    process = BufferProcess(
        BufferConfig(max_lag=1, queue_size=100_000), groups_per_step=4096, log_path=Path(os.devnull)
    )
    stack.enter_context(process)
    connection = BufferClient(process.address)
    client = ControlClient(connection)
    stack.push_async_callback(client.close)
    await LearnerClient(connection).offer(describe_model(model_path).offer(scratch / "manifest.json", 0))
    cores = sorted(os.sched_getaffinity(0))

    def make(rank: int) -> _PinnedEngine:
        return _PinnedEngine(
            config,
            model_path=model_path,
            device=EngineDevice.cpu,
            rank=rank,
            log_dir=str(scratch),
            seed=rank,
            core=cores[rank % len(cores)],
        )

    workers = [
        LocalWorker(
            f"engine-{rank}", config, make=lambda rank=rank: make(rank), address=process.address, num_samples=SAMPLES
        )
        for rank in range(NUM_ENGINES)
    ]
    for worker in workers:
        stack.push_async_callback(worker.close)
    return _Fleet(client=client, workers=workers)


async def _bare(fleet: _Fleet, number: int) -> float:
    """Return the tokens per second of an HTTP client that calls the SGLang servers directly, without the fleet."""
    waiting = list(prompts_of(number))
    num_tokens = 0

    async def post(session: aiohttp.ClientSession) -> None:
        nonlocal num_tokens
        while waiting:
            body = {
                "input_ids": [waiting.pop().tolist()] * SAMPLES,
                "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "skip_special_tokens": False},
                "return_logprob": True,
            }
            async with session.post("/generate", json=body) as answer:
                num_tokens += sum(len(sample["output_ids"]) for sample in await answer.json())

    async with AsyncExitStack() as stack:
        sessions = []
        for worker in fleet.workers:
            engine = _engine(worker)
            session = aiohttp.ClientSession(engine.server.url, headers=engine.server.headers)
            sessions.append(await stack.enter_async_context(session))
        began_s = time.perf_counter()
        await asyncio.gather(*(post(session) for session in sessions for _ in range(PLACES)))
        return num_tokens / (time.perf_counter() - began_s)


@dataclass
class _Heard:
    """How many tokens an engine sent during some measurements, and how many seconds these measurements took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second over all measurements."""
        return self.tokens / self.seconds

    async def listen(self, engine: _PinnedEngine, event: Awaitable[object]) -> float:
        """Count the tokens that ``engine`` sends until the awaitable ``event`` is done.

        Return how many seconds ``event`` took.
        """
        began_s, before = time.perf_counter(), engine.num_heard
        await event
        took_s = time.perf_counter() - began_s
        self.tokens += engine.num_heard - before
        self.seconds += took_s
        return took_s


class _Kills:
    """Kills one of the two engine servers in each of several fleets.

    Measures how long the recovery takes, how many tokens are lost, and how fast the surviving engine generates tokens.

    The speed of a CPU core changes by a fifth within minutes. So the time of each recovery is divided by the time
    that the same engine needed for its first start. The other engine works during the start and the recovery. A
    sample's tokens arrive in chunks of `STREAM_INTERVAL`, so only a few dozen chunks arrive in ten seconds. So the rate
    of the surviving engine is measured over all recoveries together. For comparison, this rate is also measured over
    all first starts, and over all periods before and after the recoveries.
    """

    def __init__(self) -> None:
        self._beside_start, self._usual, self._beside_recovery = _Heard(), _Heard(), _Heard()
        self._vs_start: list[float] = []
        self._lost: list[float] = []

    async def strike(self, fleet: _Fleet) -> None:
        """Start both engines one after the other. While both engines work, kill the server of the second engine.

        Add the measured times, rates and lost tokens to the figures.
        """
        struck, other = fleet.workers
        await other.start()
        survivor = _engine(other)
        for _ in range(NUM_ENGINES * PLACES):  # Enqueue prompts one by one, so that samples end at different times.
            await fleet.enqueue(1)
            await asyncio.sleep(SPREAD_S / (NUM_ENGINES * PLACES))
        await fleet.enqueue(40 * GROUPS_PER_ROUND)
        start_s = await self._beside_start.listen(survivor, struck.start())
        await asyncio.sleep(SPREAD_S)
        await self._usual.listen(survivor, asyncio.sleep(USUAL_S))
        lost, num_running = await _lost(fleet), len(_engine(struck)._running)
        took_s = await self._beside_recovery.listen(survivor, _kill_and_wait(struck))
        self._vs_start.append(took_s / start_s)
        self._lost.append((await _lost(fleet) - lost) / (STREAM_INTERVAL * max(1, num_running)))
        await asyncio.sleep(SPREAD_S)
        await self._usual.listen(survivor, asyncio.sleep(USUAL_S))
        logger.info("started in %.1f s, served again after %.1f s", start_s, took_s)

    def figures(self) -> dict[str, float]:
        """Return the figures by name: ratios of times and rates over all kills, and the largest loss in one kill.

        The loss of a kill is the number of lost tokens per running sample, divided by `STREAM_INTERVAL`.
        """
        return {
            "recovery_vs_engine_start": statistics.median(self._vs_start),
            "survivors_during_recovery": self._beside_recovery.rate / self._usual.rate,
            "survivors_during_start": self._beside_start.rate / self._usual.rate,
            "tokens_lost_per_kill": max(self._lost),
        }


def _engine(worker: LocalWorker) -> _PinnedEngine:
    assert isinstance(worker.engine, _PinnedEngine)
    return worker.engine


async def _kill_and_wait(worker: LocalWorker) -> None:
    """Kill the SGLang server of a worker, but not the process that guards the server.

    Then wait until the worker has a new engine that serves requests.
    """
    member = worker.member
    epoch, port = member.epoch, _engine(worker).server.url.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if {"sglang.launch_server", "--port", port} <= set(words) and str(GUARD) not in words:
            process.kill()
    async with asyncio.timeout(200):
        while member.epoch == epoch or not member.is_serving:  # noqa: ASYNC110 - the loop polls the worker's state
            await asyncio.sleep(0.01)


async def _lost(fleet: _Fleet) -> int:
    """Return the number of tokens that the buffer dropped because an engine failed or was lost."""
    dropped = (await fleet.client.stats()).tokens_dropped
    return dropped.get("engine_failed", 0) + dropped.get("lost", 0)
