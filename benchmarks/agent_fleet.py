"""Compares the turns per second of two agents: one agent runs in the rollout fleet, and a bare agent runs without it.

The fleet has a buffer server, a rollout loop, the endpoint, and a child process that runs the environment. The bare
agent sends token ids directly to the engine. Both agents sample turns of equal length. Between the turns, tools take a
fifth of the episode's time on average. The limits are equal for the fleet and the bare agent: the number of episodes at
a time, and the number of samples that the engine runs at a time.

The scripted engine writes at a fixed pace. With the scripted engine, an asyncio task replaces the learner: the task
consumes each batch immediately and announces the next version. With SGLang, the weights do not change.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from asyncrl.core import record
from asyncrl.core.record import Pool, ProfileConfig
from asyncrl.core.types import Prompt, WeightOffer
from asyncrl.profile import Attribution, Trace
from asyncrl.profile.trace import FOLDER
from benchmarks.agent_environment import RESULT, tool_seconds
from benchmarks.fleet_scripted import LocalWorker
from benchmarks.random_models import save_random_qwen3, save_tokenizer
from benchmarks.saved_weights import describe_model
from buffer import BufferClient, BufferConfig, ControlClient, LearnerClient
from buffer.server import BufferServer
from rollout_fleet.config import EngineDevice, EngineKind, RolloutFleetConfig, SamplingConfig, SGLangConfig
from rollout_fleet.engines.engine import Engine, SampleRequest
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.engines.sglang import SGLangEngine
from rollout_fleet.engines.sglang_server import SGLangServer
from rollout_fleet.episodes.config import EnvironmentConfig
from rollout_fleet.episodes.episode_run import EpisodeRun, PromptTokens
from rollout_fleet.episodes.player import EpisodePlayer

PLACES = 12  # The engine generates this many prompt groups at the same time.
SAMPLES = 4
NUM_TURNS = 6
TOKENS = 20
TOKEN_DELAY_S = 0.05
MAX_LAG = 3
GROUPS_PER_STEP = 12
WARM_UP_S = 10.0
_ASK_EVERY_S = 0.2
_DRAIN_S = 300.0
TOOL_SHARE = 0.2
"""Share of an episode's time that its tools take."""
_PROMPT = np.arange(20, 52, dtype=np.int32)
_VOCABULARY = 300


class _CountingPlayer(EpisodePlayer):
    """A player of episodes that counts turns, prompt tokens, cached prompt tokens and overlapping tools.

    A tool overlaps if it begins while a turn of the same episode runs.
    """

    num_turns = num_held = num_later = 0
    later = PromptTokens()

    async def play(self, prompt: Prompt, run: EpisodeRun, *, sampling: SamplingConfig, index: int) -> None:
        """Play an episode, and add its turns, prompt tokens and tools to the counts."""
        note, take = run.tool, run.take

        def tool(number: int, name: str, is_running: bool) -> None:
            self.num_held += is_running and bool(run.episode.running)
            note(number, name, is_running)

        def taken(request_id: str, output: Any) -> None:
            take(request_id, output)
            self.num_turns += output.finish_reason is not None

        run.tool, run.take = tool, taken  # type: ignore[method-assign]
        await super().play(prompt, run, sampling=sampling, index=index)
        self.num_later += len(run.times.turns) - 1
        self.later = PromptTokens(
            num_tokens=self.later.num_tokens + run.later_prompts.num_tokens,
            num_cached=self.later.num_cached + run.later_prompts.num_cached,
        )


@dataclass(frozen=True, kw_only=True)
class _Round:
    """One measurement of the fleet: turns per second, and the window of time that was measured.

    ``window`` is the pair (start, end), two values of `time.monotonic_ns`.
    """

    turns_per_s: float
    window: tuple[int, int]


@dataclass(kw_only=True)
class _Bench:
    """A fleet of one engine. The bare agent uses the same engine directly."""

    worker: LocalWorker
    player: _CountingPlayer
    control: ControlClient
    learner: LearnerClient
    ask: Callable[[list[int]], Awaitable[list[int]]]
    tool_s: float = 0.0
    num_prompts: int = 0

    async def enqueue(self, number: int) -> None:
        """Put ``number`` new prompts into the buffer's queue."""
        first, self.num_prompts = self.num_prompts, self.num_prompts + number
        options = {"tool_s": self.tool_s}
        await self.control.enqueue(
            [Prompt(group_id=first + n, prompt_ids=_PROMPT, environment_options=options) for n in range(number)]
        )

    async def set_tools(self, seconds: float) -> None:
        """Set the mean duration of a tool so that tools take `TOOL_SHARE` of an episode's time.

        The method first runs a bare agent without tools for ``seconds`` seconds, to measure the time of a turn.
        """
        turn_s = PLACES * SAMPLES / await self.bare_rate(seconds)
        self.tool_s = TOOL_SHARE / (1 - TOOL_SHARE) * turn_s * NUM_TURNS / (NUM_TURNS - 1)

    async def learn(self) -> None:
        """Consume each complete batch, and announce the next version. The task runs until it is cancelled."""
        for version in itertools.count():
            await self.control.plan(version)
            await self.learner.offer(
                WeightOffer(version=version + 1, manifest=f"/v{version + 1}", digest="", num_bytes=0)
            )
            await self.control.commit(version)

    async def feed(self) -> None:
        """Keep `PLACES` prompts in the buffer's queue. The task runs until it is cancelled."""
        while True:
            await self.enqueue(max(0, PLACES - (await self.control.stats()).groups["queued"]))
            await asyncio.sleep(_ASK_EVERY_S)

    async def drained(self) -> None:
        """Wait until the buffer's queue is empty and the engine has finished all groups.

        Raises `TimeoutError` after `_DRAIN_S` seconds.
        """
        async with asyncio.timeout(_DRAIN_S):
            while True:
                groups = (await self.control.stats()).groups
                if not groups["queued"] + groups["leased"]:
                    return
                await asyncio.sleep(_ASK_EVERY_S)

    async def fleet_round(self, seconds: float) -> _Round:
        """Start episodes, and measure for ``seconds`` seconds how many turns per second the fleet makes.

        Then wait until all episodes have ended.
        """
        feeding = asyncio.create_task(self.feed())
        await asyncio.sleep(WARM_UP_S)
        before, began_ns = self.player.num_turns, time.monotonic_ns()
        await asyncio.sleep(seconds)
        num_turns, ended_ns = self.player.num_turns - before, time.monotonic_ns()
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        await self.drained()
        return _Round(turns_per_s=num_turns / (ended_ns - began_ns) * 1e9, window=(began_ns, ended_ns))

    async def bare_rate(self, seconds: float) -> float:
        """Return the turns per second of the bare agent, which sends the same turns directly to the engine."""
        places, num_turns = asyncio.Semaphore(PLACES * SAMPLES), 0

        async def episodes() -> None:
            nonlocal num_turns
            while True:
                ids = _PROMPT.tolist()
                for turn in range(NUM_TURNS):
                    if turn:
                        await asyncio.sleep(tool_seconds(self.tool_s))
                        ids += RESULT
                    async with places:
                        ids += await self.ask(ids)
                    num_turns += 1

        tasks = [asyncio.create_task(episodes()) for _ in range(2 * PLACES * SAMPLES)]
        await asyncio.sleep(min(WARM_UP_S, seconds))
        before, began_s = num_turns, time.perf_counter()
        await asyncio.sleep(seconds)
        rate = (num_turns - before) / (time.perf_counter() - began_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return rate


async def _bench(stack: AsyncExitStack, scratch: Path, engine: EngineKind) -> _Bench:
    shape = {"layers": 2, "hidden": 128, "mlp": 256, "heads": 4, "head_dim": 32, "vocab_size": _VOCABULARY}
    model = save_random_qwen3(scratch / "model", **shape, eos_token_id=1, bos_token_id=2, pad_token_id=0)
    save_tokenizer(Path(model))
    environment = EnvironmentConfig(
        name=f"{Path(__file__).with_name('agent_environment.py')}:ToolUser",
        options={"num_turns": NUM_TURNS},
        processes=1,
    )
    config = RolloutFleetConfig(
        engine=engine,
        groups_in_flight=PLACES,
        reward="environment",
        environment=environment,
        sampling=SamplingConfig(max_new_tokens=TOKENS),
        sglang=SGLangConfig(dtype="float32", max_total_tokens=65536),
    )
    is_scripted = engine is EngineKind.scripted
    server = BufferServer(
        BufferConfig(max_lag=MAX_LAG if is_scripted else 1000, lease_s=60.0, queue_size=100_000),
        groups_per_step=GROUPS_PER_STEP if is_scripted else 1000,
    )
    stack.callback(server.close)
    connection = BufferClient(server.address)
    control, learner = ControlClient(connection), LearnerClient(connection)
    stack.push_async_callback(control.close)
    offer = WeightOffer(version=0, manifest="/v0", digest="", num_bytes=0)
    await learner.offer(offer if is_scripted else describe_model(model).offer(scratch / "manifest.json", 0))
    player = _CountingPlayer(config, model_path=model, max_context=4096)
    stack.push_async_callback(player.close)
    await player.start()

    servers: list[SGLangServer] = []

    def make() -> Engine:
        if is_scripted:
            return ScriptedEngine(
                lambda request, version: ScriptedAnswer(response=[7] * TOKENS, token_delay_s=TOKEN_DELAY_S)
            )
        place: dict[str, Any] = {"model_path": model, "device": EngineDevice.cpu, "rank": 0, "log_dir": str(scratch)}
        servers.append(SGLangServer(config, **place, seed=0, head_dim=shape["head_dim"]))
        return SGLangEngine(config, **place, seed=0, server=servers[-1])

    worker = LocalWorker("engine-0", config, make=make, address=server.address, num_samples=SAMPLES, player=player)
    stack.push_async_callback(worker.close)
    await worker.start()
    ask = await _http(stack, servers[0]) if servers else _direct(worker.engine)
    return _Bench(worker=worker, player=player, control=control, learner=learner, ask=ask)


def _direct(engine: Engine) -> Callable[[list[int]], Awaitable[list[int]]]:
    numbers = itertools.count()

    async def ask(ids: list[int]) -> list[int]:
        request = SampleRequest(
            id=f"bare-{next(numbers)}",
            prompt_ids=np.asarray(ids, dtype=np.int32),
            sampling=SamplingConfig(max_new_tokens=TOKENS),
        )
        (output,) = [output async for _, output in engine.generate([request])]
        return output.token_ids.tolist()

    return ask


async def _http(stack: AsyncExitStack, server: SGLangServer) -> Callable[[list[int]], Awaitable[list[int]]]:
    session = await stack.enter_async_context(aiohttp.ClientSession(server.url, headers=server.headers))
    parameters = {"max_new_tokens": TOKENS, "temperature": 1.0, "skip_special_tokens": False}

    async def ask(ids: list[int]) -> list[int]:
        body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True}
        async with session.post("/generate", json=body) as answer:
            return (await answer.json())["output_ids"]

    return ask


async def fleet_figures(scratch: Path, *, quick: bool) -> dict[str, float | None]:
    """Measure the scripted engine. If ``quick`` is false, also measure SGLang. Return the figures by name.

    If ``quick`` is true, the figures of SGLang are None.
    """
    rounds, seconds = (2, 10.0) if quick else (5, 20.0)
    figures: dict[str, float | None] = {**await _measure(scratch / "scripted", EngineKind.scripted, rounds, seconds)}
    figures["scripted_vs_bare_agent"] = figures.pop("episodes_vs_bare_agent")
    on_sglang = {} if quick else await _measure(scratch / "sglang", EngineKind.sglang, rounds, seconds)
    figures["episodes_vs_bare_agent"] = on_sglang.get("episodes_vs_bare_agent")
    figures["sglang_turns_per_s"] = on_sglang.get("turns_per_s")
    figures["sglang_overlap"] = on_sglang.get("tools_overlap")
    figures["prefix_hit_rate"] = on_sglang.get("prefix_hit_rate")
    return figures


async def _measure(scratch: Path, engine: EngineKind, num_rounds: int, seconds: float) -> dict[str, float]:
    """Measure the turns per second of the fleet and of the bare agent, which calls the engine directly.

    The benchmark measures the fleet and the bare agent alternately, so a slow machine affects both. Return the figures
    by name.
    """
    record.start(ProfileConfig(directory=str(scratch / FOLDER)), process="engine-0", pool=Pool.fleet)
    async with AsyncExitStack() as stack:
        stack.callback(record.stop)
        bench = await _bench(stack, scratch, engine)
        await bench.set_tools(seconds)
        if engine is EngineKind.scripted:
            learning = asyncio.create_task(bench.learn())
            stack.callback(learning.cancel)
        bare, fleet = [], []
        for _ in range(num_rounds):
            bare.append(await bench.bare_rate(seconds))
            fleet.append(await bench.fleet_round(seconds))
        lags = (await bench.control.stats()).lag_histogram
    player, trace = bench.player, Trace.load(scratch)
    uses = [Attribution.of(trace, one.window).total(Pool.fleet) for one in fleet]
    capacity, idle = sum(use.capacity for use in uses), sum((Counter(use.idle) for use in uses), Counter[str]())
    turns_per_s = statistics.median(one.turns_per_s for one in fleet)
    could_hit = player.later.num_tokens - player.num_later * len(RESULT)
    return {
        "episodes_vs_bare_agent": turns_per_s / statistics.median(bare),
        "turns_per_s": turns_per_s,
        "slots_held_by_tools": float(player.num_held),
        "tools_overlap": statistics.median(use.utilisation for use in uses),
        **{f"idle_{cause}": part / capacity for cause, part in idle.items()},
        "lag_max": float(max(lags, default=0)),
        **({"prefix_hit_rate": player.later.num_cached / could_hit} if could_hit > 0 else {}),
    }
