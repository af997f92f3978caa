"""A rollout loop on the scripted engine and a replay buffer in memory, for tests of the fleet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from asyncrl.protocol.errors import LeaseExpired
from asyncrl.protocol.trajectory import TrajectoryGroup
from asyncrl.protocol.types import Lease, Prompt, WeightSnapshot
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.engines.scripted import Script, ScriptedAnswer, ScriptedEngine, repeat_last_token
from rollout_fleet.loop import RolloutLoop
from rollout_fleet.metrics import FleetCounters
from rollout_fleet.rewards.processes import RewardProcesses

VOCABULARY = ["<pad>", "<eos>", "<bos>", *"0123456789", *">+=- r"]
WRITTEN = 14
"""A token that no prompt of `make_prompts` holds."""


class InMemoryBuffer:
    """Implements `RolloutBuffer`; tests commit steps and revoke leases by hand."""

    def __init__(self, prompts: Sequence[Prompt], *, groups_per_step: int = 1000, max_lag: int = 0) -> None:
        self.queue = deque(prompts)
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.learner_version = 0
        self.outstanding = 0
        self.held: dict[tuple[int, int], Lease] = {}
        self.attempts: dict[int, int] = {}
        self.groups: list[TrajectoryGroup] = []
        self.released: list[tuple[int, int, str]] = []
        self.tokens_dropped = 0
        self.progress: dict[int, TrajectoryGroup] = {}
        self.renewals = 0
        self.leases_asked: list[tuple[int, int]] = []
        self.closed = False
        self._changed = asyncio.Event()
        self._revocations: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._stored = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def commit(self) -> None:
        """The learner consumes a batch: it is one version further."""
        self.learner_version += 1
        self.outstanding -= self.groups_per_step
        self.notify()

    def revoke(self, group_id: int) -> None:
        attempt = self.attempts[group_id]
        del self.held[group_id, attempt]
        self._revocations.put_nowait((group_id, attempt))

    def _admits(self, version: int) -> bool:
        slack = (self.max_lag + 1 - (self.learner_version - version)) * self.groups_per_step
        return bool(self.queue) and self.outstanding < slack

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        self.leases_asked.append((engine_version, max_groups))
        while not self._admits(engine_version):
            await self._changed.wait()
        leases = []
        while len(leases) < max_groups and self._admits(engine_version):
            prompt = self.queue.popleft()
            attempt = self.attempts[prompt.group_id] = self.attempts.get(prompt.group_id, -1) + 1
            deadline = engine_version + self.max_lag
            lease = Lease(prompt=prompt, attempt=attempt, engine_version=engine_version, deadline_version=deadline)
            self.held[prompt.group_id, attempt] = lease
            self.outstanding += 1
            leases.append(lease)
        return leases

    async def renew(self, leases: Sequence[Lease]) -> None:
        self.renewals += len(leases)

    async def put(self, group: TrajectoryGroup) -> None:
        await asyncio.sleep(0)
        if self.held.pop((group.group_id, group.attempt), None) is None:
            self.tokens_dropped += group.summary.num_tokens
            raise LeaseExpired(f"group {group.group_id} attempt {group.attempt} is no longer held")
        self.groups.append(group)
        self._stored.set()
        self._stored = asyncio.Event()

    async def release(self, lease: Lease, *, num_tokens: int, reason: str) -> None:
        self.released.append((lease.prompt.group_id, num_tokens, reason))
        self.tokens_dropped += num_tokens
        self.outstanding -= 1
        self.held.pop((lease.prompt.group_id, lease.attempt), None)
        self.queue.append(lease.prompt)

    def take_progress(self, lease: Lease) -> TrajectoryGroup | None:
        return self.progress.pop(lease.prompt.group_id, None)

    async def save_progress(self, lease: Lease, group: TrajectoryGroup) -> None:
        await asyncio.sleep(0)
        if (lease.prompt.group_id, lease.attempt) not in self.held:
            raise LeaseExpired(f"group {lease.prompt.group_id} attempt {lease.attempt} is no longer held")
        self.progress[lease.prompt.group_id] = group

    async def revocation(self) -> tuple[int, int]:
        return await self._revocations.get()

    async def close(self) -> None:
        self.closed = True

    async def stored(self, num_groups: int) -> None:
        """Wait until this many groups are stored."""
        async with asyncio.timeout(20):
            while len(self.groups) < num_groups:
                await self._stored.wait()

    @property
    def num_tokens(self) -> int:
        return sum(group.summary.num_tokens for group in self.groups)


def make_prompts(num_prompts: int) -> list[Prompt]:
    """Prompts of different lengths: digits and ``>``; the ground truth is the last digit."""
    prompts = []
    for index in range(num_prompts):
        digits = [(index + position) % 10 for position in range(3 + index % 4)]
        ids = np.asarray([VOCABULARY.index(str(digit)) for digit in digits], dtype=np.int32)
        prompts.append(Prompt(group_id=index, prompt_ids=ids, ground_truth=str(digits[-1]), data_source="last_digit"))
    return prompts


def writes(num_tokens: int, token_delay_s: float = 0.01) -> Script:
    """A script whose responses have ``num_tokens`` tokens when they are finished, begun or continued."""

    def script(request: Any, version: int) -> ScriptedAnswer:
        num_left = num_tokens - int(np.count_nonzero(request.prompt_ids == WRITTEN))
        assert request.sampling.max_new_tokens >= num_left
        return ScriptedAnswer(response=[WRITTEN] * num_left, token_delay_s=token_delay_s)

    return script


def digits(token_ids: Sequence[int]) -> str:
    return "".join(str(token - 3) for token in token_ids if 3 <= token <= 12)


@asynccontextmanager
async def running_loop(
    buffer: Any,
    script: Script = repeat_last_token,
    *,
    samples_per_prompt: int = 2,
    reward: str = "exact_match",
    greedy_baseline: bool = False,
    version: int = 0,
    **options: Any,
) -> AsyncIterator[tuple[RolloutLoop, ScriptedEngine, asyncio.Task[FleetCounters]]]:
    """A loop on a scripted engine, running; stopped at the end."""
    engine = ScriptedEngine(script)
    await engine.start()
    await engine.load_weights(WeightSnapshot(version=version, path=""))
    loop = RolloutLoop(
        RolloutFleetConfig(**options),
        engine=engine,
        buffer=buffer,
        rewards=RewardProcesses(reward, num_processes=1, timeout_s=5.0),
        decode=digits,
        samples_per_prompt=samples_per_prompt,
        greedy_baseline=greedy_baseline,
    )
    run = asyncio.create_task(loop.run())
    try:
        yield loop, engine, run
    finally:
        await loop.stop()
        await asyncio.gather(run, return_exceptions=True)
        await engine.stop()
