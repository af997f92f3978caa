"""A simulated fleet of engines with different speeds, a simulated learner, and the real buffer service.

An engine's tokens per second for one group do not depend on how many groups it runs. A group that is handed over keeps
its tokens.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from asyncrl.core.types import GroupSummary, WeightOffer
from asyncrl.planner.simulated_buffer import SimulatedBuffer, SimulatedLoop, buffer_options, call_after
from buffer import commands, operations

_CONTROLLER = b"controller"
_GATHER_S = 0.02
_MOST_CUT_S = 0.02
"""Longest time in seconds that an engine needs to stop a group and save its tokens."""
_RESUME_S = 0.05
"""Seconds that an engine needs to compute the KV cache of a group that it continues."""

Speed = Callable[[float], float]
"""Tokens per second of one group, as a function of the time in seconds."""


@dataclass(kw_only=True)
class _Writing:
    """A group that an engine generates."""

    length: int
    num_tokens: float
    version: int
    since: float
    speed: float
    has_ended: bool = False


class SimulatedEngineWorker:
    """A rollout worker. At the time ``now``, its engine writes ``speed(now)`` tokens per second for each group.

    Attributes:
        num_written: Number of tokens that the engine has written.
        num_handed_on: Number of groups that the worker has handed over.
    """

    def __init__(self, fleet: "SimulatedFleet", index: int, speed: Speed, num_places: int) -> None:
        self._fleet, self._env, self._buffer = fleet, fleet.env, fleet.buffer
        self._client = b"engine-%d" % index
        self._speed = speed
        self._num_places = num_places
        self._version = 0
        self._groups: dict[tuple[int, int], _Writing] = {}
        self._asked: int | None = None
        self._is_gathering = False
        self.num_written = 0.0
        self.num_handed_on = 0
        self._buffer.join(self._client, self._revoked, self._hand_on)
        self._follow_weights()
        self._ask()

    def _follow_weights(self) -> None:
        self._buffer.request(self._client, operations.NextOffer(self._version + 1), on_reply=self._load)

    def _load(self, offered: operations.Offered) -> None:
        self._version = offered.offer.version
        if self._asked is not None:
            self._buffer.cancel_lease(self._client, self._asked)
            self._asked = None
        self._follow_weights()
        self._ask()

    def _ask(self) -> None:
        if self._asked is None and not self._is_gathering and len(self._groups) < self._num_places:
            self._is_gathering = True
            call_after(self._env, _GATHER_S, self._request)

    def _request(self) -> None:
        self._is_gathering = False
        wanted = self._num_places - len(self._groups)
        if self._asked is None and wanted > 0:
            asked = commands.LeaseGroups(engine_version=self._version, max_groups=wanted)
            self._asked = self._buffer.request(self._client, asked, on_reply=self._begin)

    def _begin(self, leased: Any) -> None:
        self._asked = None
        for lease in getattr(leased, "leases", ()):
            group_id, attempt, version = *lease.key, lease.engine_version
            written = self._fleet.saved.pop(group_id, 0.0) if lease.num_prefix_frames > 0 else 0.0
            group = _Writing(
                length=self._fleet.length_of(group_id),
                num_tokens=written,
                version=version,
                since=self._env.now + (_RESUME_S if written else 0.0),
                speed=self._speed(self._env.now) / self._fleet.pace_of(group_id),
            )
            self._groups[group_id, attempt] = group
            self._write(group_id, attempt, group)
        self._ask()

    def _write(self, group_id: int, attempt: int, group: _Writing) -> None:
        took_s = group.since - self._env.now + (group.length - group.num_tokens) / group.speed

        def stop() -> None:
            if not group.has_ended:
                group.has_ended = True
                self._put(group_id, attempt, group)

        call_after(self._env, max(0.0, took_s), stop)

    def _count(self, group: _Writing, num_tokens: float) -> None:
        self.num_written += num_tokens - group.num_tokens

    def _put(self, group_id: int, attempt: int, group: _Writing) -> None:
        self._count(group, group.length)
        summary = GroupSummary(
            group_id=group_id,
            attempt=attempt,
            num_prompt_tokens=8,
            response_lengths=(group.length,),
            num_tokens=group.length,
            oldest_version=group.version,
            newest_version=self._version,
            rewards=(0.0,),
        )
        put = commands.Put(summary=summary)
        self._buffer.request(self._client, put, num_bytes=1, on_reply=lambda _: self._leave(group_id, attempt))

    def _leave(self, group_id: int, attempt: int) -> None:
        del self._groups[group_id, attempt]
        self._ask()

    def _revoked(self, group_id: int, attempt: int) -> None:
        raise AssertionError("nothing is revoked here")

    def _hand_on(self, keys: Sequence[tuple[int, int]]) -> None:
        for key in keys:
            if (group := self._groups.get(key)) is not None and not group.has_ended:
                group.has_ended = True
                cut_s = self._fleet.rng.uniform(0.0, _MOST_CUT_S)
                call_after(self._env, cut_s, lambda key=key, group=group: self._save(*key, group))

    def _save(self, group_id: int, attempt: int, group: _Writing) -> None:
        written = max(0.0, self._env.now - group.since) * group.speed
        num_tokens = min(group.length, group.num_tokens + written)
        self._count(group, num_tokens)
        written, named = int(num_tokens), {"group_id": group_id, "attempt": attempt}
        if written:
            progress = commands.Progress(num_tokens=written, oldest_version=group.version, newest_version=self._version)
            save = commands.SavePrefix(**named, progress=progress, longest_response=written)
            self._buffer.request(self._client, save, num_bytes=1)
            self._fleet.saved[group_id] = num_tokens
        self.num_handed_on += 1
        release = commands.Release(**named, num_tokens=written, reason="handed_on")
        self._buffer.request(self._client, release, on_reply=lambda _: self._leave(group_id, attempt))


class SimulatedFleet:
    """Engines with given speeds, and a learner. The learner needs ``step_s`` seconds per step, then publishes weights.

    Args:
        speeds: For each engine, the tokens per second of one group. An entry can be a function of time.
        num_places: Largest number of groups on each engine.
        groups_per_step: Number of groups per learner step.
        max_lag: ``buffer.max_lag``.
        step_s: Seconds per learner step.
        length_of: Number of tokens of a group, by its id.
        pace_of: Factor on the seconds per token of a group, by its id.
        hand_over: ``buffer.hand_over``.
    """

    def __init__(
        self,
        speeds: Sequence[float | Speed],
        *,
        num_places: int = 8,
        groups_per_step: int = 16,
        max_lag: int = 3,
        step_s: float = 0.0,
        length_of: Callable[[int], int] = lambda _: 80,
        pace_of: Callable[[int], float] = lambda _: 1.0,
        hand_over: bool = True,
    ) -> None:
        self.env = simpy.Environment()
        self.rng = random.Random(0)
        self.saved: dict[int, float] = {}
        self.length_of, self.pace_of = length_of, pace_of
        self.tokens_trained = 0
        self._step_s = step_s
        self._groups_per_step = groups_per_step
        self._num_prompts = 0
        self._loop = SimulatedLoop(self.env)
        with self._loop.running():
            options = buffer_options(max_lag=max_lag, queue_size=100_000, hand_over=hand_over)
            self.buffer = SimulatedBuffer(self.env, options, groups_per_step=groups_per_step)
            self._offer(0)
            self._feed(4 * len(speeds) * num_places)
            self.workers = [
                SimulatedEngineWorker(self, index, speed if callable(speed) else lambda _, s=speed: s, num_places)
                for index, speed in enumerate(speeds)
            ]
        self.env.process(self._learn())

    def rate(self, seconds: float, *, warm_up_s: float) -> float:
        """Return the number of tokens trained per second during ``seconds``, after a warm-up of ``warm_up_s``."""
        with self._loop.running():
            self.env.run(until=warm_up_s)
            before = self.tokens_trained
            self.env.run(until=warm_up_s + seconds)
        return (self.tokens_trained - before) / seconds

    def _offer(self, version: int) -> None:
        offer = WeightOffer(version=version, manifest=f"/v{version}", digest="", num_bytes=0)
        self.buffer.request(b"learner", operations.Offer(offer=offer))

    def _feed(self, number: int) -> None:
        groups = tuple(range(self._num_prompts, self._num_prompts + number))
        self._num_prompts += number
        self.buffer.request(_CONTROLLER, commands.Enqueue(groups, (0,) * number))

    def _learn(self) -> Any:
        version = 0
        while True:
            made = self.env.event()

            self.buffer.request(_CONTROLLER, commands.PlanBatch(version), on_reply=made.succeed)
            groups = (yield made).groups
            self._feed(self._groups_per_step)
            yield self.env.timeout(self._step_s)
            self.tokens_trained += sum(group.num_tokens for group in groups)
            version += 1
            self._offer(version)
            self.buffer.request(_CONTROLLER, commands.Commit(version - 1))
