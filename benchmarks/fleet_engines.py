"""The fleet on real SGLang servers: its tokens per second against a bare client, and a server that is killed.

Two servers on the CPU, each pinned to a core. Both sides sample the same prompts with the same options and as many at
once, in turns. The fleet is two rollout loops under their supervisors in this process, and a buffer server in one of
its own; the bare client posts one group per request and keeps nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from asyncrl.protocol.manifest import describe_model
from asyncrl.protocol.types import Prompt
from benchmarks.fleet_scripted import running_loop
from benchmarks.random_models import save_random_qwen3
from buffer import BufferClient, BufferConfig, BufferProcess
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SamplingConfig, SGLangConfig
from rollout_fleet.engine_supervisor import EngineSupervisor
from rollout_fleet.engines.sglang import STREAM_INTERVAL, SGLangEngine
from rollout_fleet.engines.sglang_server import GUARD, SGLangServer
from rollout_fleet.loop import RolloutLoop

logger = logging.getLogger(__name__)

NUM_ENGINES = 2
PLACES = 8  # per engine
SAMPLES = 2
NEW_TOKENS = 256
GROUPS_PER_ROUND = 64
NUM_ROUNDS = 5
NUM_KILLS = 3
USUAL_S = 8.0
_VOCABULARY = 1000


def save_model(directory: Path) -> str:
    """A random Qwen3 of 4 layers and 5 million parameters, which seldom ends a response by itself."""
    ids = {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
    shape = {"layers": 4, "hidden": 256, "mlp": 768, "heads": 4, "head_dim": 64, "vocab_size": _VOCABULARY}
    return save_random_qwen3(directory, **shape, **ids)


class _PinnedEngine(SGLangEngine):
    """An engine whose server runs on one core."""

    _starting = asyncio.Lock()

    def __init__(self, *arguments: Any, core: int, server: SGLangServer, **options: Any) -> None:
        super().__init__(*arguments, server=server, **options)
        self.server = server
        self._core = core
        self.num_heard = 0

    async def start(self) -> None:
        """See `Engine.start`. What is started while this process is pinned stays where it is."""
        async with self._starting:
            everywhere = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {self._core})
            starting = asyncio.create_task(super().start())
            await asyncio.sleep(0.5)
            os.sched_setaffinity(0, everywhere)
        await starting

    def _take(self, event: Any, requests: Any, samples: Any) -> Any:
        """Count tokens as they come: samples end too seldom for a rate over seconds."""
        self.num_heard += len(event.get("output_ids", ()))
        return super()._take(event, requests, samples)


@dataclass(kw_only=True)
class _Fleet:
    """Two loops on two servers, and the buffer."""

    client: BufferClient
    supervisors: list[EngineSupervisor]
    loops: list[RolloutLoop]
    start_s: float
    num_prompts: int = 0

    async def roll_out(self, number: int) -> float:
        """Roll groups out; returns the tokens per second until the last is stored."""
        tokens, stored = self.tokens, self.stored
        began_s = time.perf_counter()
        await self.enqueue(number)
        while self.stored < stored + number:  # noqa: ASYNC110 - measured from outside
            await asyncio.sleep(0.01)
        return (self.tokens - tokens) / (time.perf_counter() - began_s)

    async def enqueue(self, number: int) -> None:
        """Queue prompts."""
        prompts = [
            Prompt(group_id=self.num_prompts + index, prompt_ids=ids) for index, ids in enumerate(prompts_of(number))
        ]
        self.num_prompts += number
        await self.client.enqueue(prompts)

    @property
    def tokens(self) -> int:
        """Tokens that the engines have answered with."""
        return sum(loop.counters().tokens_generated for loop in self.loops)

    @property
    def stored(self) -> int:
        """Groups that are stored."""
        return sum(loop.counters().groups_finished for loop in self.loops)


def prompts_of(number: int) -> Iterator[np.ndarray]:
    """The same prompts for both sides."""
    rng = np.random.default_rng(0)
    return iter(rng.integers(3, _VOCABULARY, (number, 16), np.int32))


def measure_engines() -> dict[str, float]:
    """The figures of real servers."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="asyncrl-bench-") as folder:
        return asyncio.run(_measure(Path(folder)))


async def _measure(scratch: Path) -> dict[str, float]:
    async with AsyncExitStack() as stack:
        fleet = await _start(stack, scratch)
        rates: dict[str, list[float]] = {"fleet": [], "bare": []}
        for turn in range(NUM_ROUNDS + 1):
            sides = ["fleet", "bare"] if turn % 2 else ["bare", "fleet"]
            for side in sides:
                rate = await (fleet.roll_out(GROUPS_PER_ROUND) if side == "fleet" else _bare(fleet, GROUPS_PER_ROUND))
                if turn:  # the first is a warm-up
                    rates[side].append(rate)
                    logger.info("%s: %.0f tokens/s", side, rate)
        paired = [fleet_rate / bare for fleet_rate, bare in zip(rates["fleet"], rates["bare"], strict=True)]
        figures = {
            "fleet_vs_bare_client": statistics.median(paired),
            "fleet_tokens_per_s": statistics.median(rates["fleet"]),
        }
        await fleet.enqueue(NUM_KILLS * 20 * GROUPS_PER_ROUND)
        kills = [await _recovery(fleet) for _ in range(NUM_KILLS)]
        return figures | {name: statistics.median(kill[name] for kill in kills) for name in kills[0]}


async def _start(stack: AsyncExitStack, scratch: Path) -> _Fleet:
    model_path = save_model(scratch / "model")
    config = RolloutFleetConfig(
        groups_in_flight=PLACES,
        sampling=SamplingConfig(max_new_tokens=NEW_TOKENS),
        sglang=SGLangConfig(dtype="float32", max_total_tokens=16384),
    )
    process = BufferProcess(
        BufferConfig(max_lag=1, queue_size=100_000), groups_per_step=4096, log_path=Path(os.devnull)
    )
    stack.enter_context(process)
    client = BufferClient(process.address)
    stack.push_async_callback(client.close)
    await client.offer(describe_model(model_path).offer(scratch / "manifest.json", 0))
    cores = sorted(os.sched_getaffinity(0))

    def make(rank: int) -> _PinnedEngine:
        server = SGLangServer(
            config.sglang,
            model_path=model_path,
            device=EngineDevice.cpu,
            name=f"sglang-{rank}",
            log_dir=str(scratch),
            seed=rank,
            start_timeout_s=config.start_timeout_s,
            stop_timeout_s=config.stop_timeout_s,
        )
        return _PinnedEngine(
            config,
            model_path=model_path,
            device=EngineDevice.cpu,
            rank=rank,
            log_dir=str(scratch),
            seed=rank,
            core=cores[rank % len(cores)],
            server=server,
        )

    supervisors = [
        EngineSupervisor(f"engine-{rank}", config, make=lambda rank=rank: make(rank)) for rank in range(NUM_ENGINES)
    ]
    for supervisor in supervisors:
        stack.push_async_callback(supervisor.stop)
    began_s = time.perf_counter()
    await asyncio.gather(*(supervisor.start() for supervisor in supervisors))
    start_s = time.perf_counter() - began_s
    loops = [
        await running_loop(stack, config, supervisor, process.address, num_samples=SAMPLES)
        for supervisor in supervisors
    ]
    return _Fleet(client=client, supervisors=supervisors, loops=loops, start_s=start_s)


async def _bare(fleet: _Fleet, number: int) -> float:
    """Tokens per second of a client that posts groups, as many at once, to the same servers."""
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
        for supervisor in fleet.supervisors:
            engine = supervisor.engine
            assert isinstance(engine, _PinnedEngine)
            session = aiohttp.ClientSession(engine.server.url, headers=engine.server.headers)
            sessions.append(await stack.enter_async_context(session))
        began_s = time.perf_counter()
        await asyncio.gather(*(post(session) for session in sessions for _ in range(PLACES)))
        return num_tokens / (time.perf_counter() - began_s)


async def _recovery(fleet: _Fleet) -> dict[str, float]:
    """One server is killed: how long until its engine serves again, what is lost, and how the other does meanwhile."""
    struck, survivor = fleet.supervisors[0], fleet.supervisors[1].engine
    assert isinstance(survivor, _PinnedEngine)
    epoch = struck.member.epoch
    lost = await _lost(fleet)
    await asyncio.sleep(USUAL_S / 2)
    usual = await _rate(survivor, lambda: False, at_most_s=USUAL_S)
    engine = struck.engine
    assert isinstance(engine, _PinnedEngine)
    num_running = len(engine._running)
    port = engine.server.url.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if {"sglang.launch_server", "--port", port} <= set(words) and str(GUARD) not in words:
            process.kill()
    died_s = time.perf_counter()
    rate = await _rate(survivor, lambda: struck.member.epoch > epoch and struck.member.may_lease, at_most_s=200.0)
    took_s = time.perf_counter() - died_s
    figures = {
        "recovery_vs_engine_start": took_s / fleet.start_s,
        "survivors_during_recovery": rate / usual,
        "tokens_lost_per_kill": (await _lost(fleet) - lost) / (STREAM_INTERVAL * max(1, num_running)),
    }
    logger.info("killed: %s", figures)
    return figures


async def _lost(fleet: _Fleet) -> int:
    """Tokens that the account dropped for the sake of an engine."""
    dropped = (await fleet.client.stats()).tokens_dropped
    return dropped.get("engine_failed", 0) + dropped.get("lost", 0)


async def _rate(engine: _PinnedEngine, until: Callable[[], bool], *, at_most_s: float) -> float:
    """Tokens per second of an engine until something has happened, or for so long."""
    began_s, before = time.perf_counter(), engine.num_heard
    while not until() and time.perf_counter() - began_s < at_most_s:  # noqa: ASYNC110 - measured from outside
        await asyncio.sleep(0.01)
    return (engine.num_heard - before) / (time.perf_counter() - began_s)
