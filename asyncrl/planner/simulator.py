"""Simulates a run: the real buffer, with simulated engines, a simulated learner and simulated publishes.

    feed ──prompts──▶ buffer.service ──leases──▶ workers ──▶ engines
                           ▲   │                    │
                   commits │   │ plans     puts ◀───┘          offers: learner ─▶ buffer ─▶ workers
                        learner ◀

simpy simulates the clock. The same scenario and seed always give the same outcome.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import numpy as np
import simpy
from simpy.events import ProcessGenerator

from asyncrl.core.errors import AsyncRLError, LeaseExpired, StoreFull
from asyncrl.core.types import GroupSummary, WeightOffer
from asyncrl.planner.scenario import Scenario
from asyncrl.planner.simulated_buffer import SimulatedBuffer, SimulatedLoop, buffer_options, call_after
from asyncrl.planner.simulated_engine import SimulatedEngine, SimulatedGroup, SimulatedHost
from buffer import commands, operations

_CONTROLLER = b"controller"
_LEARNER = b"learner"
_QUEUED_STEPS = 2
"""The prompt queue has prompts for this number of batches and for all engines, so engines do not wait for prompts."""
_SLICES = 8
"""The controller's work for a step runs in this number of slices. Each slice uses the core with fewer jobs."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The result of a simulated run. Step time, rate, lags and waits leave out the warm-up steps.

    The idle shares, ``stored_bytes``, ``dropped`` and ``step_ends`` cover the whole run.

    Attributes:
        tokens_per_s: Trained response tokens per second.
        learner_idle: A dict from each cause of idle time to a fraction of the ranks' time. docs/profiling.md explains
            the causes.
        fleet_idle: A dict from each cause of idle time to a fraction of the capacity of all engines. The capacity is
            the time multiplied by the number of group slots.
        stored_bytes: Largest number of bytes in the buffer.
        dropped: Fraction of the generated tokens that the buffer dropped.
        wait_s: Mean seconds per step that the ranks waited for a batch.
        update_s: Mean seconds per step without the waits and the pauses for publishes. It includes ``plan_s``. The mean
            of the pauses includes the warm-up steps.
        step_ends: Simulated seconds from the start of the run to the end of each step.
    """

    step_s: float
    tokens_per_s: float
    lag_mean: float
    lag_histogram: Mapping[int, float]
    learner_idle: Mapping[str, float]
    fleet_idle: Mapping[str, float]
    stored_bytes: int
    dropped: float
    wait_s: float
    update_s: float
    step_ends: tuple[float, ...] = field(repr=False, default=())


def simulate(scenario: Scenario, *, seed: int = 0) -> SimulatedRun:
    """Simulate a scenario to its last step; return the results of the run. ``seed`` is the seed of all random numbers.

    Raises:
        ReplayBufferError: the scenario cannot run, because the buffer would refuse a request of a real run too. For
            example, a batch does not fit into the buffer.
    """
    return Simulation(scenario, seed=seed).run()


def variation(recorded: Sequence[float], rng: np.random.Generator) -> Callable[[float], float]:
    """Return a function that takes an expected time and returns it multiplied by the next ratio of ``recorded``.

    The first ratio is chosen at random. The next ratios follow in recorded order, and restart after the last one. If
    ``recorded`` is empty, the returned function returns its argument.
    """
    first = int(rng.integers(len(recorded))) + 1 if recorded else 0
    ratios = cycle([*recorded[first:], *recorded[:first]] or [1.0])
    return lambda seconds: seconds * next(ratios)


class SimulatedWorker:
    """A simulated rollout worker. It leases groups from the buffer, and stores the groups that its engine generates."""

    def __init__(self, simulation: Simulation, index: int) -> None:
        scenario = simulation.scenario
        self._simulation, self._scenario, self._env = simulation, scenario, simulation.env
        self._buffer = simulation.buffer
        self._client = b"engine-%d" % index
        self.engine = SimulatedEngine(
            simulation.env,
            scenario.engine,
            on_update=scenario.learner.on_update,
            prompt_tokens=scenario.lengths.prompt_tokens,
            whole_groups=scenario.whole_groups,
            on_finished=self._settle,
            after=None if simulation.host is None else simulation.host.engines.run,
            vary=variation(scenario.engine.variation, simulation.rng),
        )
        self._groups: dict[tuple[int, int], SimulatedGroup] = {}
        self._num_settling = 0
        self._to_settle: deque[SimulatedGroup] = deque()
        self._is_settling = False
        self._asked: int | None = None
        self._is_gathering = False
        self._seen_at = self._paused_s = 0.0
        self.idle: defaultdict[str, float] = defaultdict(float)

    def start(self) -> None:
        """Register with the buffer. Then request leases (rights to generate prompt groups) and the next weights."""
        self._buffer.join(self._client, self._on_revoked, self._on_hand_on if self._scenario.hands_on else None)
        self._report_loaded(0, 0.0)
        self._follow_weights()
        self._ask()

    def account(self) -> None:
        """Add the idle time since the previous call of this method to ``idle``.

        ``idle`` maps a cause to idle seconds, summed over the worker's group slots.
        """
        now = self._env.now
        passed, self._seen_at = now - self._seen_at, now
        if not passed:
            return
        paused_s = self.engine.paused_s() - self._paused_s
        self._paused_s += paused_s
        self.idle["publish_pause"] += paused_s * self._scenario.groups_in_flight
        passed -= paused_s
        num_places = self._scenario.groups_in_flight
        num_free = num_places - (len(self._groups) - self._num_settling)
        self.idle["reward"] += passed * min(self._num_settling, num_free)
        num_free -= min(self._num_settling, num_free)
        if num_free > 0:
            cause = "staleness_gate" if self._buffer.ledger.room.has_room() else "buffer_full"
            self.idle["lease" if self._is_gathering else cause] += passed * num_free

    # Leases

    def _ask(self) -> None:
        if self._asked is None and not self._is_gathering and self._num_free > 0:
            self._is_gathering = True
            if self._scenario.engine.takes_batches:  # wait 0 s, so that the other groups of the batch end first
                call_after(self._env, 0.0, self._gather)
            else:
                self._gather()

    def _gather(self) -> None:
        """Request leases. If some slots are in use, first wait ``ask_s``, because more slots may become free."""

        def request() -> None:
            self.account()
            self._is_gathering = False
            if (num_free := self._num_free) > 0:
                asked = commands.LeaseGroups(engine_version=self.engine.version, max_groups=num_free)
                self._asked = self._buffer.request(self._client, asked, on_reply=self._begin)

        is_idle = len(self._groups) == self._num_settling
        call_after(self._env, 0.0 if is_idle else self._scenario.ask_s, request)

    @property
    def _num_free(self) -> int:
        """Number of free slots. A group that the worker scores or stores uses no slot.

        If the worker scores or stores more than ``groups_in_flight`` groups, each further group uses a slot.
        """
        num_places = self._scenario.groups_in_flight
        return num_places - len(self._groups) + min(self._num_settling, num_places)

    def _begin(self, leased: commands.Leased | operations.NothingYet) -> None:
        self.account()
        self._asked = None
        new = []
        for lease in leased.leases if isinstance(leased, commands.Leased) else ():
            group_id, attempt, version = lease.group_id, lease.attempt, lease.engine_version
            saved = self._simulation.saved.pop(group_id, None)
            if saved is None or lease.num_prefix_frames <= 0:
                saved, version = (next(self._simulation.lengths),) * 2, -1
            lengths, left = saved
            group = SimulatedGroup(
                group_id=group_id, attempt=attempt, lengths=lengths, to_write=left, oldest_version=version
            )
            self._groups[group_id, attempt] = group
            new.append(group)
        self.engine.add(new)
        self._simulation.learner.account()
        self._ask()

    def _on_revoked(self, group_id: int, attempt: int) -> None:
        group = self._groups.get((group_id, attempt))
        if group is None or group.num_left == 0:
            return
        self.account()
        del self._groups[group_id, attempt]
        num_tokens = self.engine.revoke(group)
        release = commands.Release(group_id=group_id, attempt=attempt, num_tokens=num_tokens, reason="revoked")
        self._buffer.request(self._client, release)
        self._ask()

    def _on_hand_on(self, keys: Sequence[tuple[int, int]]) -> None:
        """Stop groups, save their tokens and release their leases. ``keys`` are pairs (group id, attempt).

        Skip groups that the engine has finished, and groups that the worker has already begun to stop.
        """
        for key in keys:
            group = self._groups.get(key)
            if group is not None and group.num_left and group.on_cut is None:
                self.engine.cut(group, partial(self._give_back, group))

    def _give_back(self, group: SimulatedGroup, left: list[int]) -> None:
        if self._groups.get((group.group_id, group.attempt)) is not group:
            return  # do nothing, because the buffer has revoked the group
        self.account()
        group_id, attempt = group.group_id, group.attempt
        num_tokens = sum(group.lengths) - sum(left)

        def released(_: object) -> None:
            self.account()
            self._groups.pop((group.group_id, group.attempt), None)
            self._ask()

        def release(_: object = None) -> None:
            ended = commands.Release(group_id=group_id, attempt=attempt, num_tokens=num_tokens, reason="handed_on")
            self._buffer.request(self._client, ended, on_reply=released)

        if not num_tokens:
            return release()
        self._simulation.saved[group.group_id] = (group.lengths, left)
        oldest = group.oldest_version if group.oldest_version >= 0 else self.engine.version
        progress = commands.Progress(num_tokens=num_tokens, oldest_version=oldest, newest_version=self.engine.version)
        longest = max(group.lengths) - max(left)
        save = commands.SavePrefix(group_id=group_id, attempt=attempt, progress=progress, longest_response=longest)
        num_bytes = max(1, round(num_tokens * self._scenario.bytes_per_token))
        self._buffer.request(self._client, save, num_bytes=num_bytes, on_reply=release, on_refusal=release)

    # Results

    def _settle(self, group: SimulatedGroup) -> None:
        self.account()
        self._num_settling += 1
        if self._simulation.host is None:
            call_after(self._env, self._scenario.settle_s, lambda: self._put(group))
        else:
            self._to_settle.append(group)
            self._settle_next()
        self._ask()

    def _settle_next(self) -> None:
        """Score the next finished group and send it to the buffer. Do nothing if this worker already scores a group.

        Only a simulation in which all engines share a CPU core (``host``) uses this method.
        """
        host = self._simulation.host
        if self._is_settling or not self._to_settle or host is None:
            return
        group, self._is_settling = self._to_settle.popleft(), True

        def settled() -> None:
            self._is_settling = False
            host.other(self._scenario.host.group_s)
            self._put(group)
            self._settle_next()

        host.engines.run(self._scenario.host.settle_s, settled)

    def _put(self, group: SimulatedGroup) -> None:
        num_bytes = round(sum(group.lengths) * self._scenario.bytes_per_token)
        share = self._scenario.equal_rewards
        rewards = (0.0,) if share > 0 and self._simulation.rewards.random() < share else (0.0, 1.0)
        summary = GroupSummary(
            group_id=group.group_id,
            attempt=group.attempt,
            num_prompt_tokens=round(self._scenario.lengths.prompt_tokens),
            response_lengths=tuple(group.lengths),
            num_tokens=sum(group.lengths),
            oldest_version=group.oldest_version,
            newest_version=group.newest_version,
            rewards=rewards,
        )

        def put(_: object = None) -> None:
            done = {"on_reply": lambda _: self._stored(group), "on_refusal": on_refusal}
            self._buffer.request(self._client, commands.Put(summary=summary), num_bytes=num_bytes, **done)

        def on_refusal(error: AsyncRLError) -> None:
            if isinstance(error, StoreFull):  # reserve space; the reply comes when there is space
                reserve = commands.Reserve(group_id=group.group_id, attempt=group.attempt, num_bytes=num_bytes)
                self._buffer.request(self._client, reserve, on_reply=put)
            elif isinstance(error, LeaseExpired):  # the buffer revoked the group while the worker scored it
                self._stored(group)
            else:
                raise error

        put()

    def _stored(self, group: SimulatedGroup) -> None:
        self.account()
        self._num_settling -= 1
        del self._groups[group.group_id, group.attempt]
        self._simulation.stored(group)
        self._ask()

    # Weights

    def _follow_weights(self) -> None:
        self._buffer.request(self._client, operations.NextOffer(self.engine.version + 1), on_reply=self._load)

    def _report_loaded(self, version: int, load_s: float) -> None:
        self._buffer.request(
            self._client, operations.Loaded(version=version, seconds=load_s, engine=self._client.decode())
        )

    def _load(self, offered: operations.Offered) -> None:
        self.account()
        version, load_s = offered.offer.version, self._scenario.learner.load_s

        def on_loaded() -> None:
            self.account()
            self._report_loaded(version, load_s)
            if self._asked is not None:  # cancel the lease request, which names the previous version
                self._buffer.cancel_lease(self._client, self._asked)
                self._asked = None
            self._follow_weights()
            self._ask()

        self.engine.load(version, load_s, on_loaded)


class SimulatedLearner:
    """Simulates the learner ranks, and the loops of the controller that queue prompts and plan batches."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._scenario, self._env = simulation, simulation.scenario, simulation.env
        self._buffer = simulation.buffer
        self._places = simpy.Container(self._env, init=self._scenario.pipeline_steps)
        self._planned = simpy.Store(self._env)
        self._vary = variation(self._scenario.learner.variation, simulation.rng)
        self._published_at = self.paused_s = 0.0
        self._is_waiting = False
        self._cause, self._seen_at = "slow_generation", 0.0
        self.idle: defaultdict[str, float] = defaultdict(float)
        self.steps: list[tuple[float, float, int, list[int]]] = []

    def start(self) -> simpy.Process:
        """Start the loops that plan batches and train on them.

        The returned simpy process ends after the last step. If the learner publishes weights after the last step, the
        process ends after the pause of the ranks for this publish.
        """
        self.feed()
        self._env.process(self._plan())
        return self._env.process(self._train())

    def feed(self) -> None:
        """Fill the prompt queue of the buffer, so that it has prompts for the next batches and for all engines."""
        wanted = _QUEUED_STEPS * self._scenario.groups_per_step + self._simulation.capacity
        missing = wanted - self._buffer.ledger.groups.num_queued
        if missing > 0:
            first = self._simulation.num_prompts
            self._simulation.num_prompts += missing
            self._buffer.request(_CONTROLLER, commands.Enqueue(tuple(range(first, first + missing)), (0,) * missing))

    def account(self) -> None:
        """If the ranks wait for a batch, add the time since the previous call of this method to ``idle``.

        ``idle`` maps a cause to idle seconds of the ranks. The cause ``publish`` includes the pauses for publishes.
        """
        now = self._env.now
        if self._is_waiting:
            self.idle[self._cause] += now - self._seen_at
            self._cause = self._what_is_missing()
        self._seen_at = now

    def _what_is_missing(self) -> str:
        ledger, scenario = self._buffer.ledger, self._scenario
        num_missing = scenario.groups_per_step - ledger.groups.num_stored
        if num_missing <= 0 or num_missing <= ledger.groups.num_leased < self._simulation.capacity / 2:
            return "batch_tail"
        if ledger.groups.num_leased < num_missing:
            return "publish"
        return "slow_generation"

    def _plan(self) -> ProcessGenerator:
        for version in range(self._scenario.num_steps):
            yield self._places.get(1)
            made = self._env.event()

            self._ask_plan(version, made)
            groups = yield made
            self.feed()
            yield self._planned.put(groups)

    def _ask_plan(self, version: int, made: simpy.Event) -> None:
        def on_plan(batch: commands.Batch | operations.NothingYet) -> None:
            if isinstance(batch, operations.NothingYet):  # repeat the request, because filters dropped groups
                self._ask_plan(version, made)
                return
            self._simulation.planned({group.group_id for group in batch.groups})
            made.succeed(batch.groups)

        self._buffer.request(_CONTROLLER, commands.PlanBatch(version), on_reply=on_plan)

    def _train(self) -> ProcessGenerator:
        scenario = self._scenario
        for version in range(scenario.num_steps):
            self._is_waiting, self._seen_at = True, self._env.now
            asked_s, self._cause = self._env.now, self._what_is_missing()
            groups = yield self._planned.get()
            self.account()
            self._is_waiting = False
            waited_s = self._env.now - asked_s
            num_response = sum(group.num_tokens for group in groups)
            num_prompt = scenario.lengths.prompt_tokens * scenario.samples_per_prompt * len(groups)
            tokens_s = scenario.learner.rank_s_per_token * (num_response + num_prompt) / scenario.num_ranks
            yield self._env.timeout(scenario.plan_s)
            update_s = scenario.learner.step_s + tokens_s
            yield self._computed(self._vary(update_s))
            self._buffer.request(_CONTROLLER, commands.Commit(version))
            yield self._places.put(1)
            self.steps.append((self._env.now, waited_s, num_response, [version - g.oldest_version for g in groups]))
            if (version + 1) % scenario.publish_every == 0:
                yield from self._publish(version + 1)

    def _computed(self, work_s: float) -> simpy.Event:
        host = self._simulation.host
        if host is None:
            return self._env.timeout(work_s)
        done = self._env.event()

        def finish() -> None:
            done.succeed()

        host.ranks.run(work_s, finish)
        host.other(self._scenario.host.step_s, num_slices=_SLICES)
        return done

    def _publish(self, version: int) -> ProcessGenerator:
        """Publish a version. The ranks pause until the previous publish is finished and the weights are copied.

        If ``LearnerModel.shares_learner`` is set, the ranks also pause for ``publish_s`` and ``load_s``.
        """
        learner = self._scenario.learner
        began_s = self._env.now
        ready_s = max(0.0, self._published_at - began_s)
        shared_s = learner.publish_s + learner.load_s if learner.shares_learner else 0.0
        self._published_at = began_s + ready_s + learner.copy_s + learner.publish_s
        call_after(self._env, self._published_at - began_s, lambda: self._offer(version))
        if ready_s + learner.copy_s + shared_s:
            yield self._env.timeout(ready_s + learner.copy_s + shared_s)
            if self._simulation.host is not None:
                self._simulation.host.ranks.run(self._scenario.host.publish_s, lambda: None)
            self.idle["publish"] += self._env.now - began_s
            self.paused_s += self._env.now - began_s

    def _offer(self, version: int) -> None:
        self.account()
        offer = WeightOffer(version=version, manifest="", digest="", num_bytes=0)
        self._buffer.request(_LEARNER, operations.Offer(offer=offer))


class Simulation:
    """The state of a simulation.

    Attributes:
        capacity: Largest number of groups in flight on all workers.
        host: The core that all engines share, and the core that all ranks share. None if each engine and rank has its
            own device.
        lengths: An iterator over response lengths, with one list for each new group.
        rewards: Random generator. It draws ``lengths``, and decides which groups have equal rewards.
        rng: Random numbers with which `variation` chooses the first of the recorded ratios.
        saved: Unfinished groups that a worker has handed over, by group id. A value is a pair of lists: the final
            number of tokens of each sample, and the missing number of tokens of each unfinished sample.
    """

    def __init__(self, scenario: Scenario, *, seed: int = 0) -> None:
        self.scenario = scenario
        self.env = simpy.Environment()
        self.rewards = np.random.default_rng(seed)
        self.lengths = scenario.lengths.stream(self.rewards, scenario.samples_per_prompt)
        self.rng = np.random.default_rng([seed, 1])
        self.host = SimulatedHost(self.env) if scenario.host.is_shared else None
        self.num_prompts = 0
        self.capacity = scenario.num_engines * scenario.groups_in_flight
        options = buffer_options(
            max_lag=scenario.max_lag,
            max_uses=scenario.max_uses,
            on_stale=scenario.on_stale,
            order=scenario.order,
            max_stored_bytes=scenario.max_stored_bytes,
            queue_size=2 * (_QUEUED_STEPS * scenario.groups_per_step + self.capacity),
            filters=["equal_rewards"] if scenario.equal_rewards else [],
            max_filtered_steps=0,
        )
        self._loop = SimulatedLoop(self.env)
        with self._loop.running():
            self.buffer = SimulatedBuffer(self.env, options, groups_per_step=scenario.groups_per_step)
        self.saved: dict[int, tuple[list[int], list[int]]] = {}
        self._queue: dict[int, int] = {}
        self._most_bytes = 0
        self.learner = SimulatedLearner(self)
        self.workers = [SimulatedWorker(self, index) for index in range(scenario.num_engines)]

    def run(self) -> SimulatedRun:
        """Run the simulation to the last step; return the results of the run."""
        with self._loop.running():
            trained = self.learner.start()
            for worker in self.workers:
                worker.start()
            self.env.run(until=trained)
            for worker in self.workers:
                worker.account()
            return self._outcome()

    def stored(self, group: SimulatedGroup) -> None:
        """Record that the buffer has stored ``group``.

        If the scenario limits the finished groups that wait for a batch (``queue_groups``), drop the oldest
        groups above the limit.
        """

        def bound_queue() -> None:
            while len(self._queue) > self.scenario.queue_groups:
                group_id = next(iter(self._queue))
                self.buffer.lose(group_id, self._queue.pop(group_id))

        self._most_bytes = max(self._most_bytes, sum(self.buffer.ledger.groups.space.stored_bytes))
        if self.scenario.queue_groups:
            self._queue[group.group_id] = group.attempt
            # Call `bound_queue` after 0 s. A batch that is planned now takes its groups before groups are dropped.
            call_after(self.env, 0.0, bound_queue)
        if self.scenario.equal_rewards and self.buffer.ledger.groups.num_queued < self.capacity:
            self.learner.feed()
        self.learner.account()

    def planned(self, group_ids: set[int]) -> None:
        """Record that a batch took the groups ``group_ids``, so these groups no longer wait."""
        for group_id in group_ids & self._queue.keys():
            del self._queue[group_id]

    def _outcome(self) -> SimulatedRun:
        scenario, steps = self.scenario, self.learner.steps
        first = scenario.warm_up_steps
        began_s = steps[first - 1][0] if first else 0.0
        took_s, total_s = steps[-1][0] - began_s, self.env.now
        counted = steps[first:]
        lags = Counter(lag for step in counted for lag in step[3])
        waits_s = sum(step[1] for step in counted) / len(counted)
        step_s = took_s / len(counted)
        places_s = total_s * self.capacity
        fleet_idle: defaultdict[str, float] = defaultdict(float)
        for worker in self.workers:
            fleet_idle["re_prefill"] += worker.engine.prefill_s * scenario.groups_in_flight
            for cause, idle_s in worker.idle.items():
                fleet_idle[cause] += idle_s
        account = self.buffer.ledger.account
        dropped = sum(account.tokens_dropped.values())
        written = dropped + account.tokens_trained + account.tokens_buffered
        return SimulatedRun(
            step_s=step_s,
            tokens_per_s=sum(step[2] for step in counted) / took_s,
            lag_mean=sum(lag * number for lag, number in lags.items()) / lags.total(),
            lag_histogram={lag: lags[lag] / lags.total() for lag in sorted(lags)},
            learner_idle={cause: idle / total_s for cause, idle in sorted(self.learner.idle.items())},
            fleet_idle={cause: idle / places_s for cause, idle in sorted(fleet_idle.items()) if idle > 0},
            stored_bytes=self._most_bytes,
            dropped=dropped / written if written else 0.0,
            wait_s=waits_s,
            update_s=max(0.0, step_s - waits_s - self.learner.paused_s / len(steps)),
            step_ends=tuple(step[0] for step in steps),
        )
