"""Measures what agents cost: calls of their HTTP endpoint, turns in the fleet, and trees of turns in the learner.

Run as ``python -m benchmarks.agents``.

``endpoint_ms``: the time of a call minus the duration of its turn, as the median over calls. 64 episodes run at the
    same time, and each episode makes one call at a time. A client in a separate process sends the growing conversation
    of each episode: a question, tool calls and their results, over eight turns. Each turn takes a random time from 0.3
    to 0.9 s, so calls arrive at different times, as with a real engine. As in a rollout worker, the event loop is
    uvloop, because Ray runs asynchronous actors on uvloop. Garbage collections skip the objects that were loaded at the
    start (``gc.freeze``). The client measures the time of a call, so the figure includes the client's own time.
    ``bare_ms`` is the same figure for an aiohttp server that only waits and answers.
    ``endpoint_cpu_ms`` is the endpoint's CPU time per call. Its inverse is an upper bound on the rate of calls.

``tree_vs_linear_tokens``: tokens that the learner computes for the trees of a search agent, divided by the tokens of
    all branches. ``tree_vs_turns_tokens`` divides by the tokens of all turns, each with its whole context.
    ``tree_vs_distinct_tokens`` divides by the tokens of the trees, each counted once.

The other figures are those of `benchmarks.agent_fleet`:

- ``episodes_vs_bare_agent``: turns per second of the fleet, divided by the turns per second of a bare agent on SGLang.
- ``scripted_vs_bare_agent``: the same ratio on the scripted engine.
- ``slots_held_by_tools``: number of tools that began while a turn of their episode occupied a slot of the engine.
  A slot is the capacity for one sample.
- ``tools_overlap``: busy share of the engine's slots while tools take a fifth of the episodes' time.
- ``idle_CAUSE``: share of the slots that was idle for this cause.
- ``sglang_overlap``: busy share on SGLang.
- ``prefix_hit_rate``: tokens from SGLang's cache, divided by the tokens that the cache could contain.

``--quick`` measures the endpoint once instead of three times, and leaves out SGLang.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop
from aiohttp import web

from asyncrl.core.images import PlacedImage
from asyncrl.core.types import FinishReason, Prompt
from benchmarks.agent_fleet import MAX_LAG, fleet_figures
from benchmarks.agent_trees import search_groups, tree_tokens
from benchmarks.random_models import save_tokenizer
from benchmarks.report import Target, print_report
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.engine import SampleOutput
from rollout_fleet.episodes import ChatRenderer, Endpoint, Episode, EpisodeBudget, Session, load_renderer
from rollout_fleet.episodes.config import RendererConfig

NUM_CONCURRENT = 64
NUM_TURNS = 8
NUM_EPISODES = 4  # The benchmark plays NUM_EPISODES × NUM_CONCURRENT episodes.
QUESTION = {"role": "user", "content": "How warm is it in each of these cities? " + "Rome, Oslo, Lima, Cairo. " * 8}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
RESULT = "It is 21 degrees, with some clouds and little wind from the south-west. " * 8
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
TARGETS = {
    "endpoint_ms": Target(at_most=3.0),
    "episodes_vs_bare_agent": Target(at_least=0.9),
    "scripted_vs_bare_agent": Target(at_least=0.9),
    "slots_held_by_tools": Target(at_most=0.0),
    "tools_overlap": Target(at_least=0.9),
    "lag_max": Target(at_most=float(MAX_LAG)),
    "prefix_hit_rate": Target(at_least=0.9),
    "tree_vs_linear_tokens": Target(at_most=0.7),
    "tree_vs_distinct_tokens": Target(at_most=1.0),
}


def turn_s(seed: int) -> float:
    """Return the duration of a turn in seconds, computed from the request's seed. The client uses the same function."""
    return 0.3 + seed / 1e6


class TimedTurns:
    """A policy that samples the same tool call in each turn. `turn_s` gives the duration of a turn."""

    def __init__(self, prompt_ids: np.ndarray, call: Sequence[int]) -> None:
        budget = EpisodeBudget(max_turns=1 << 20, max_tokens=1 << 30, max_context=1 << 30)
        self.episode = Episode("0-0-0", prompt_ids, budget)
        self._call = np.asarray(call, dtype=np.int32)

    async def sample(
        self,
        parent: int,
        new_tokens: Sequence[int],
        sampling: SamplingConfig,
        images: tuple[PlacedImage, ...] = (),
    ) -> int:
        """Wait for the duration of a turn, then add the fixed tool call to the episode; return the turn's index."""
        turn = self.episode.sample(parent, new_tokens, sampling, images=images)
        (request,) = self.episode.next_requests()
        await asyncio.sleep(turn_s(sampling.seed or 0))
        size = len(self._call)
        output = SampleOutput(
            token_ids=self._call,
            logprobs=np.full(size, -0.1, dtype=np.float32),
            versions=np.zeros(size, dtype=np.int32),
            finish_reason=FinishReason.stop,
        )
        self.episode.take(request.id, output)
        return turn

    def give(self, parent: int, tokens: Sequence[int]) -> int:
        """Append given tokens to the episode, and return the index of the turn."""
        return self.episode.give(parent, tokens)


async def endpoint_ms(renderer: ChatRenderer) -> dict[str, float]:
    """Measure the time of a call to the endpoint, minus the duration of its turn, with 64 concurrent calls.

    Returns:
        Milliseconds by name: the median (``endpoint_ms``) and the 99th percentile (``endpoint_p99_ms``), the CPU time
        of the endpoint per call (``endpoint_cpu_ms``), and the median of a server that only waits for the duration of
        the turn (``bare_ms``).
    """
    prompt_ids = np.asarray(renderer.render([QUESTION], [TOOL]), dtype=np.int32)
    call = renderer.tokenizer.encode(CALL + "<|end|>")
    prompt = Prompt(group_id=0, prompt_ids=prompt_ids)
    endpoint = Endpoint()
    await endpoint.start()
    accesses = [
        endpoint.open(Session(TimedTurns(prompt_ids, call), renderer, sampling=SamplingConfig(), prompt=prompt))
        for _ in range(NUM_CONCURRENT * NUM_EPISODES)
    ]
    began_s = time.process_time()
    latencies = await _in_client([(access.base_url, access.api_key) for access in accesses])
    cpu_s = time.process_time() - began_s
    await endpoint.close()
    bare = await _bare_latencies()
    return {
        "endpoint_ms": 1e3 * statistics.median(latencies),
        "endpoint_p99_ms": 1e3 * float(np.percentile(latencies, 99)),
        "endpoint_cpu_ms": 1e3 * cpu_s / len(latencies),
        "bare_ms": 1e3 * statistics.median(bare),
    }


async def _bare_latencies() -> list[float]:
    """Return one value per call of a bare server: the seconds of the call, minus the duration of its turn.

    The bare server only waits for the duration of the turn, and then answers.
    """
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    call = {"id": "call_1_0", "type": "function", "function": function}
    body = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call]}}]}

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(turn_s((await request.json())["seed"]))
        return web.json_response(body)

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    latencies = await _in_client([(url, "none")] * (NUM_CONCURRENT * NUM_EPISODES))
    await runner.cleanup()
    return latencies


async def _in_client(accesses: Sequence[tuple[str, str]]) -> list[float]:
    """Play all episodes in a separate process. Return one value per call: its seconds, minus the turn's duration."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, _play_all, accesses)


def _play_all(accesses: Sequence[tuple[str, str]]) -> list[float]:
    return uvloop.run(_play(accesses))


async def _play(accesses: Sequence[tuple[str, str]]) -> list[float]:
    places, latencies = asyncio.Semaphore(NUM_CONCURRENT), []

    async def episode(http: aiohttp.ClientSession, url: str, key: str) -> None:
        async with places:
            await asyncio.sleep(random.random())
            messages: list[Mapping[str, Any]] = [QUESTION]
            for _ in range(NUM_TURNS):
                seed = random.randrange(600_000)
                body = {"model": "policy", "messages": messages, "tools": [TOOL], "seed": seed}
                data = json.dumps(body).encode()
                began_s = time.perf_counter()
                async with http.post(f"{url}/chat/completions", data=data, headers={"x-api-key": key}) as response:
                    content = await response.read()
                latencies.append(time.perf_counter() - began_s - turn_s(seed))
                response.raise_for_status()
                message = json.loads(content)["choices"][0]["message"]
                (call,) = message["tool_calls"]
                messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
        for url, key in accesses:
            group.create_task(episode(http, url, key))
    return latencies


def tree_vs_linear_tokens() -> dict[str, float]:
    """Count the tokens that the learner packs for the trees of a search agent. Return three ratios by name.

    In this packing, branches share their common tokens. Each ratio divides the packed tokens by another number: the
    tokens of all branches, the tokens of all turns with their contexts, or the distinct tokens of the trees. Every
    packing needs at least the distinct tokens.
    """
    count = tree_tokens(search_groups())
    figures = {"linear": "branches", "turns": "turns", "distinct": "distinct"}
    return {f"tree_vs_{name}_tokens": count["shared"] / count[what] for name, what in figures.items()}


def main() -> None:
    """Measure everything. Print a table, then the figures as JSON. Exit with 0 if every target is met, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the scripted engine only, and fewer repetitions")
    options = parser.parse_args()
    figures: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        renderer = load_renderer(save_tokenizer(Path(folder)), RendererConfig())
        gc.freeze()
        rounds = [uvloop.run(endpoint_ms(renderer)) for _ in range(1 if options.quick else 3)]
        figures |= {name: statistics.median(of_round[name] for of_round in rounds) for name in rounds[0]}
        figures |= uvloop.run(fleet_figures(Path(folder), quick=options.quick))
    figures |= tree_vs_linear_tokens()
    is_met = print_report(
        "agents", {}, figures, TARGETS, baseline="the same agent on the engine directly, and the turn's own seconds"
    )
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
