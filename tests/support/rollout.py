"""Helpers for tests of the fleet: a rollout loop with the scripted engine, and a replay buffer in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import numpy as np

from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import GroupSummary, Lease, Prompt
from buffer.commands import Commit, Enqueue, Expire, LeaseGroups, PlanBatch, Progress, Put, Release, Renew, SavePrefix
from buffer.ledger import Ledger
from buffer.rule import StalenessRule
from rollout_fleet.answering import AnsweringParts
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.engines.scripted import Script, ScriptedAnswer, ScriptedEngine, repeat_last_token
from rollout_fleet.episodes.episode_run import Player
from rollout_fleet.loop import RolloutLoop
from rollout_fleet.metrics import FleetCounters
from rollout_fleet.rewards import WeightedRewards
from tests.support.offers import OffersInMemory, bare_offer

VOCABULARY = ["<pad>", "<eos>", "<bos>", *"0123456789", *">+=- r"]
LEASE_S = 60.0
OTHERS = 1_000_000  # first group id of `InMemoryBuffer.advance`
WRITTEN = 14
"""A token that no prompt of `make_prompts` contains."""


class InMemoryBuffer(OffersInMemory):
    """Implements `RolloutBuffer` with the real ledger, without sockets. A test calls `commit`, `revoke` and so on.

    Attributes:
        groups: The groups that were put so far.
        released: A tuple for each release: group id, number of tokens, reason.
        progress: The latest saved progress of each group, by group id.
        leases_asked: A pair for each request for leases: engine version, number of groups.
        num_waiting: Number of requests for leases that the buffer has not answered yet.
        renewals: Number of leases renewed so far.
    """

    def __init__(self, prompts: Sequence[Prompt], *, groups_per_step: int = 1000, max_lag: int = 0) -> None:
        super().__init__()
        self.ledger = Ledger(StalenessRule(max_lag=max_lag, groups_per_step=groups_per_step), lease_s=LEASE_S)
        self.ledger.apply(Enqueue(group_ids=tuple(prompt.group_id for prompt in prompts)))
        self.groups: list[TrajectoryGroup] = []
        self.released: list[tuple[int, int, str]] = []
        self.progress: dict[int, TrajectoryGroup] = {}
        self.renewals = 0
        self.leases_asked: list[tuple[int, int]] = []
        self.num_waiting = 0
        self.closed = False
        self.prompts = {prompt.group_id: prompt for prompt in prompts}
        self._continued: set[tuple[int, int]] = set()
        self._now = 0.0
        self._num_others = 0
        self.count_generated = lambda: 0
        self.hand_on_requests: asyncio.Queue[list[tuple[int, int]]] = asyncio.Queue()
        self._revocations: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    @property
    def held(self) -> set[tuple[int, int]]:
        """The pair (group id, attempt) of every lease."""
        return {(lease.group_id, lease.attempt) for lease in self.ledger.groups.leases.all()}

    @property
    def num_accounted(self) -> int:
        """The number of trained, dropped and buffered tokens, without the tokens of groups from `advance`."""
        account = self.ledger.account
        return (
            account.tokens_trained - self._num_others + sum(account.tokens_dropped.values()) + account.tokens_buffered
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all groups that were put."""
        return sum(group.summary.num_tokens for group in self.groups)

    async def commit(self) -> None:
        """Wait until a batch can be planned, and consume it. The learner's version increases by one."""
        version = self.ledger.learner_version
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: self.ledger.apply(PlanBatch(version=version)).group_ids)
        self.ledger.apply(Commit(version=version))
        await self._notify()

    async def advance(self) -> None:
        """Put a group as another worker would, and make a learner step on it. Needs ``groups_per_step=1``."""
        version = self.ledger.learner_version
        self.ledger.apply(Enqueue(group_ids=(OTHERS + version,)))
        (lease,) = self.ledger.apply(LeaseGroups(engine_version=version, max_groups=1), self._now).leases
        assert lease.group_id == OTHERS + version, "no other prompt may be queued"
        summary = GroupSummary(
            group_id=lease.group_id,
            attempt=0,
            num_prompt_tokens=1,
            response_lengths=(1,),
            num_tokens=1,
            oldest_version=version,
            newest_version=version,
            rewards=(0.0,),
        )
        self.ledger.apply(Put(summary=summary), self._now)
        self._num_others += 1
        await self.commit()

    async def expire(self, group_id: int) -> None:
        """Let the lease of a group expire. The worker is not told."""
        self._now += 2 * LEASE_S
        for lease in self.ledger.groups.leases.all():
            if lease.group_id != group_id:
                self.ledger.apply(Renew(((lease.group_id, lease.attempt),)), self._now)
        self.ledger.apply(Expire(), self._now)
        await self._notify()

    async def revoke(self, group_id: int) -> None:
        """Let the lease of a group expire, and tell the worker."""
        await self.expire(group_id)
        for _, revocation in self.ledger.attempts.drain_revocations():
            self._revocations.put_nowait((revocation.group_id, revocation.attempt))

    async def stored(self, num_groups: int, *, within_s: float = 20.0) -> None:
        """Wait until ``num_groups`` groups were put."""
        async with asyncio.timeout(within_s), self._changed:
            await self._changed.wait_for(lambda: len(self.groups) >= num_groups)

    async def dropped(self, num_groups: int) -> None:
        """Wait until ``num_groups`` groups were dropped."""
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: sum(self.ledger.account.groups_dropped.values()) >= num_groups)

    async def enter(self) -> str:
        return "00"

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        self.leases_asked.append((engine_version, max_groups))
        command = LeaseGroups(engine_version=engine_version, max_groups=max_groups)
        self.num_waiting += 1
        try:
            async with self._changed:  # keep the lock between `apply` and `wait`, to miss no change
                while not (granted := self.ledger.apply(command, self._now).leases):
                    await self._changed.wait()
        finally:
            self.num_waiting -= 1
        self._continued |= {(lease.group_id, lease.attempt) for lease in granted if lease.progress is not None}
        return [
            Lease(
                prompt=self.prompts[lease.group_id],
                attempt=lease.attempt,
                engine_version=lease.engine_version,
                deadline_version=lease.deadline,
            )
            for lease in granted
        ]

    async def renew(self, leases: Sequence[Lease]) -> None:
        self.renewals += len(leases)

    async def put(self, group: TrajectoryGroup, *, num_left_out: int = 0, data_source: str = "") -> None:
        await asyncio.sleep(0)
        self.ledger.apply(Put(summary=group.summary, num_left_out=num_left_out), self._now)
        self.groups.append(group)
        await self._notify()

    async def release(self, lease: Lease, *, num_tokens: int, reason: str, max_failures: int = 0) -> bool:
        group_id, attempt = lease.prompt.group_id, lease.attempt
        self.released.append((group_id, num_tokens, reason))
        release = Release(
            group_id=group_id, attempt=attempt, num_tokens=num_tokens, reason=reason, max_failures=max_failures
        )
        is_dropped = self.ledger.apply(release, self._now).is_dropped
        await self._notify()
        return is_dropped

    def take_progress(self, lease: Lease) -> TrajectoryGroup | None:
        key = lease.prompt.group_id, lease.attempt
        return self.progress[key[0]] if key in self._continued else None

    async def save_progress(self, lease: Lease, group: TrajectoryGroup) -> None:
        await asyncio.sleep(0)
        summary = group.summary
        progress = Progress(
            num_tokens=summary.num_tokens, oldest_version=summary.oldest_version, newest_version=summary.newest_version
        )
        save = SavePrefix(group_id=lease.prompt.group_id, attempt=lease.attempt, progress=progress)
        self.ledger.apply(save, self._now)
        self.progress[lease.prompt.group_id] = group

    async def revocation(self) -> tuple[int, int]:
        return await self._revocations.get()

    async def hand_on_request(self) -> list[tuple[int, int]]:
        return await self.hand_on_requests.get()

    async def close(self) -> None:
        self.closed = True


def make_prompts(num_prompts: int) -> list[Prompt]:
    """Return prompts of different lengths. Each prompt is a row of digits, and its ground truth is the last digit."""
    prompts = []
    for index in range(num_prompts):
        digits = [(index + position) % 10 for position in range(3 + index % 4)]
        ids = np.asarray([VOCABULARY.index(str(digit)) for digit in digits], dtype=np.int32)
        prompts.append(Prompt(group_id=index, prompt_ids=ids, ground_truth=str(digits[-1]), data_source="last_digit"))
    return prompts


async def update(loop: RolloutLoop, buffer: InMemoryBuffer) -> None:
    """Make a learner step, and let the worker load the new version."""
    await buffer.advance()
    await loop.load_weights(bare_offer(buffer.ledger.learner_version))


def writes(num_tokens: int, token_delay_s: float = 0.01) -> Script:
    """Return a script for the engine. A response has ``num_tokens`` tokens, including the prefix that it continues."""

    def script(request: Any, version: int) -> ScriptedAnswer:
        num_left = num_tokens - int(np.count_nonzero(request.prompt_ids == WRITTEN))
        assert request.sampling.max_new_tokens >= num_left
        return ScriptedAnswer(response=[WRITTEN] * num_left, token_delay_s=token_delay_s)

    return script


def digits(token_ids: Sequence[int]) -> str:
    return "".join(str(token - 3) for token in token_ids if 3 <= token <= 12)


def make_loop(
    buffer: Any,
    engine: ScriptedEngine,
    *,
    samples_per_prompt: int = 2,
    reward: str = "exact_match",
    greedy_baseline: bool = False,
    player: Player | None = None,
    stage: Any = nullcontext,
    images: Any = None,
    **options: Any,
) -> RolloutLoop:
    """Return a rollout loop that does not run yet. The loop can lease groups after a call of its `load_weights`."""
    return RolloutLoop(
        RolloutFleetConfig(**options),
        AnsweringParts(
            engine=engine,
            rewards=WeightedRewards(RolloutFleetConfig(reward=reward, reward_timeout_s=5.0)),
            decode=digits,
            player=player,
            images=images,
        ),
        name="engine-0",
        buffer=buffer,
        samples_per_prompt=samples_per_prompt,
        greedy_baseline=greedy_baseline,
        stage=stage,
    )


@asynccontextmanager
async def running_loop(
    buffer: Any,
    script: Script = repeat_last_token,
    *,
    version: int = 0,
    **options: Any,
) -> AsyncIterator[tuple[RolloutLoop, ScriptedEngine, asyncio.Task[FleetCounters]]]:
    """Yield a tuple: a running rollout loop, the loop's engine, the loop's task. ``options`` are for `make_loop`."""
    engine = ScriptedEngine(script)
    await engine.start()
    loop = make_loop(buffer, engine, **options)
    await loop.load_weights(bare_offer(version))
    run = asyncio.create_task(loop.run())
    try:
        yield loop, engine, run
    finally:
        await loop.stop()
        await asyncio.gather(run, return_exceptions=True)
        await engine.stop()
