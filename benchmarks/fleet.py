"""What the fleet makes of engines of different speeds, and of one that dies: ``python -m benchmarks.fleet``.

Four rollout loops with scripted engines on a real buffer server, in one process. A scripted engine writes each sample
at a fixed pace, so what the fleet reaches against the sum of its engines is a matter of who gets which work, and when.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np

from asyncrl.protocol.errors import AsyncRLError
from asyncrl.protocol.manifest import WeightOffer
from asyncrl.protocol.types import Prompt
from buffer import BufferClient, BufferConfig
from buffer.balance import WorkBalance
from buffer.server import BufferServer
from rollout_fleet.config import EngineKind, RolloutFleetConfig
from rollout_fleet.engine_supervisor import EngineSupervisor
from rollout_fleet.engines.engine import SampleRequest
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.loop import RolloutLoop
from rollout_fleet.rewards import WeightedRewards

GROUPS_PER_STEP = 16
MAX_LAG = 3
PLACES = 8  # per engine; admission leaves twice as many as all four have
SAMPLES = 2
TOKENS = 40
TOKEN_DELAY_S = 0.02
START_S = 1.0
RUN_S = 10.0
WARM_UP_S = 5.0


@dataclass(kw_only=True)
class _FleetRun:
    """Engines on one server, and a learner that takes each batch as soon as it is there."""

    server: BufferServer
    control: BufferClient
    supervisors: list[EngineSupervisor]
    loops: list[RolloutLoop]

    async def learn(self) -> None:
        """Feed, train, publish, until cancelled."""
        version, num_prompts = 0, 0
        while True:
            prompts = [_prompt(number) for number in range(num_prompts, num_prompts + 2 * GROUPS_PER_STEP)]
            num_prompts += len(prompts)
            await self.control.enqueue(prompts)
            for _ in range(2):
                await self.control.plan(version)
                version += 1
                await self.control.offer(_offer(version))
                await self.control.commit(version - 1)

    async def tokens_trained(self) -> int:
        """Up to now."""
        return (await self.control.stats()).tokens_trained


def _prompt(number: int) -> Prompt:
    return Prompt(group_id=number, prompt_ids=np.asarray([5, 6], dtype=np.int32), ground_truth="x")


def _offer(version: int) -> WeightOffer:
    return WeightOffer(version=version, manifest=f"/v{version}", digest="", num_bytes=0)


class _SlowToStart(ScriptedEngine):
    """Takes ``START_S`` to come up."""

    async def start(self) -> None:
        await asyncio.sleep(START_S)
        await super().start()


async def _start(stack: AsyncExitStack, delays_s: Sequence[float]) -> _FleetRun:
    """Bring up one engine per delay between tokens, on a server of their own."""
    config = RolloutFleetConfig(
        engine=EngineKind.scripted, groups_in_flight=PLACES, reward="exact_match", renew_every_s=5.0
    )
    options = BufferConfig(max_lag=MAX_LAG, lease_s=60.0)
    server = BufferServer(options, groups_per_step=GROUPS_PER_STEP)
    stack.callback(server.close)
    control = BufferClient(server.address)
    stack.push_async_callback(control.close)
    await control.offer(_offer(0))
    run = _FleetRun(server=server, control=control, supervisors=[], loops=[])
    for rank, delay_s in enumerate(delays_s):

        def answer(request: SampleRequest, version: int, delay_s: float = delay_s) -> ScriptedAnswer:
            written = len(request.prompt_ids) - 2
            return ScriptedAnswer(response=[7] * (TOKENS - written), token_delay_s=delay_s)

        supervisor = EngineSupervisor(f"engine-{rank}", config, make=lambda answer=answer: _SlowToStart(answer))
        client = BufferClient(server.address)
        stack.push_async_callback(client.close)
        await supervisor.start()
        loop = RolloutLoop(
            config,
            engine=supervisor.engine,
            member=supervisor.member,
            buffer=client,
            rewards=WeightedRewards(config),
            decode=str,
            samples_per_prompt=SAMPLES,
        )
        await supervisor.load_first(loop, client)
        stack.push_async_callback(supervisor.stop)
        stack.push_async_callback(loop.stop)
        running = asyncio.create_task(_keep_running(supervisor, loop))
        stack.callback(running.cancel)
        run.supervisors.append(supervisor)
        run.loops.append(loop)
    learning = asyncio.create_task(run.learn())
    stack.callback(learning.cancel)
    return run


async def _keep_running(supervisor: EngineSupervisor, loop: RolloutLoop) -> None:
    """As `RolloutWorker.run`."""
    while not loop.has_ended:
        engine = await supervisor.ready(unless=lambda: loop.is_stopping)
        try:
            await loop.run()
        except AsyncRLError:
            if not engine.has_failed:
                raise


EQUAL = [TOKEN_DELAY_S] * 4
ONE_SLOW = [*EQUAL[:3], 10 * TOKEN_DELAY_S]


async def share_of_speeds(delays_s: Sequence[float]) -> float:
    """Tokens trained on per second, as a share of the sum of the engines' speeds, each by its delay between tokens."""
    async with AsyncExitStack() as stack:
        run = await _start(stack, delays_s)
        await asyncio.sleep(WARM_UP_S)
        began_s, before = time.perf_counter(), await run.tokens_trained()
        await asyncio.sleep(RUN_S)
        rate = (await run.tokens_trained() - before) / (time.perf_counter() - began_s)
    return rate / sum(PLACES * SAMPLES / delay_s for delay_s in delays_s)


async def recovery() -> dict[str, float]:
    """One of four engines dies: how long until it serves again, what is lost, and how the others do meanwhile."""
    async with AsyncExitStack() as stack:
        run = await _start(stack, EQUAL)
        await asyncio.sleep(WARM_UP_S)
        struck = run.supervisors[0]
        epoch = struck.member.epoch
        others = run.loops[1:]
        before = sum(loop.counters().tokens_generated for loop in others)
        died_s = time.perf_counter()
        struck.engine.die("killed by the benchmark")  # type: ignore[attr-defined]
        while struck.member.epoch == epoch or not struck.member.may_lease:  # noqa: ASYNC110 - measured from outside
            await asyncio.sleep(0.005)
        took_s = time.perf_counter() - died_s
        rate = (sum(loop.counters().tokens_generated for loop in others) - before) / took_s
        await asyncio.sleep(1.0)
        began_s, before = time.perf_counter(), sum(loop.counters().tokens_generated for loop in others)
        await asyncio.sleep(RUN_S / 2)
        usual = (sum(loop.counters().tokens_generated for loop in others) - before) / (time.perf_counter() - began_s)
        dropped = (await run.control.stats()).tokens_dropped
    return {
        "recovery_vs_engine_start": took_s / START_S,
        "survivors_during_recovery": rate / usual,
        "tokens_lost_per_kill": float(dropped.get("engine_failed", 0) + dropped.get("lost", 0)),
    }


def main() -> None:
    """Print a table, then the figures as JSON."""
    figures = {
        "slow_engine_share": asyncio.run(share_of_speeds(ONE_SLOW)),
        "equal_engines_share": asyncio.run(share_of_speeds(EQUAL)),
    }
    with patch.object(WorkBalance, "delay_s", lambda *_: 0.0), patch.object(WorkBalance, "hand_on", lambda *_: None):
        baseline = {"slow_engine_share": asyncio.run(share_of_speeds(ONE_SLOW))}
    figures |= asyncio.run(recovery())
    for name, value in figures.items():
        print(f"{name:28} {value:8.3f}" + (f"   by turns {baseline[name]:.3f}" if name in baseline else ""))
    print(json.dumps({"figures": figures, "baseline": baseline}))


if __name__ == "__main__":
    main()
