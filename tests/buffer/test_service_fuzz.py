"""The real buffer service with its journal under random events: crashes, late messages, deaths of workers and so on."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.types import BufferStats, GroupSummary
from asyncrl.run.reporting import balanced_account
from buffer import BufferConfig, commands, journal, operations
from buffer.checkpoint_parts import CheckpointRequests
from buffer.config import OnStale
from buffer.encoding import Message, prompt_frames
from buffer.records import Operation
from rollout_fleet.metrics import FleetCounters
from tests.support.buffer_groups import prompt
from tests.support.mortal_buffer import ManualClock, MortalServer, MortalWrites, kind_of

CONTROLLER = b"controller"
LEASE_S = 10.0
STEP_S = 0.4
"""Largest step of the clock in seconds. The service treats a longer step as a stall of its event loop."""
MAX_GROUP_BYTES = 60
NUM_EVENTS = 300
HELD = "StoreFull"
"""The reply after which a worker keeps its lease and repeats its request later."""
ENDED = ("ok", "LeaseExpired", "VersionTooOld", "UnknownGroup")
"""The replies after which a worker forgets its lease."""


@dataclass(kw_only=True, eq=False)
class HeldGroup:
    """A lease of a worker, and the tokens that the worker writes under the lease.

    Attributes:
        num_inherited: Tokens of the prefix that the attempt continues.
        num_own: Tokens that the worker wrote.
        oldest: Version of the group's oldest token, or of the lease if the group has no token yet.
        newest: Version of the group's newest token.
        continued: Whether the worker continues the prefix of the lease.
        is_finished: Whether the group was put. A finished group gets no further tokens.
    """

    group_id: int
    attempt: int
    engine_version: int
    num_inherited: int = 0
    num_own: int = 0
    oldest: int = 0
    newest: int = 0
    continued: bool = True
    is_finished: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.group_id, self.attempt

    @property
    def num_tokens(self) -> int:
        return self.num_inherited + self.num_own

    def write(self, num_tokens: int, version: int) -> None:
        self.oldest = min(self.oldest, version) if self.num_tokens else version
        self.newest = version
        self.num_own += num_tokens


@dataclass(kw_only=True, eq=False)
class WorkerModel:
    """A rollout worker: its engine's version, its leases, and the number of tokens that it has generated."""

    name: bytes
    version: int
    incarnation: int
    groups: dict[tuple[int, int], HeldGroup] = field(default_factory=dict)
    num_generated: int = 0
    asking: int = 0
    is_dead: bool = False


class Life:
    """A buffer service with a learner and workers, which act at random. The seed decides all events."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.clock = ManualClock(lambda: self.now)
        self.size, self.max_lag = rng.randint(1, 4), rng.randint(0, 3)
        num_open = (self.max_lag + 1) * self.size
        self.max_uses = rng.randint(1, min(3, self.max_lag + 1))
        self.config = BufferConfig(
            max_lag=self.max_lag,
            max_uses=self.max_uses,
            on_stale=rng.choice([*OnStale]),
            order=rng.choice(["fifo", "earliest_deadline", "freshest_first", "shortest_first"]),
            lease_s=LEASE_S,
            queue_size=rng.choice([4, 64]),
            heartbeat_s=rng.choice([1.0, 100.0]),
            max_stored_bytes=MAX_GROUP_BYTES * rng.choice([self.size + 1, num_open + 1, 1000]),
            max_prompt_bytes=rng.choice([1000, 100_000]),
            max_worker_deaths=rng.choice([0, 1, 3]),
            filters=rng.choice([[], ["equal_rewards"]]),
            request_timeout_s=10_000.0,
        )
        self.server = MortalServer(self.config, directory, groups_per_step=self.size, clock=self.clock)
        self.next_request = self.num_workers = self.num_prompts = self.incarnation = 0
        self.version = 0
        self.workers: list[WorkerModel] = []
        self.ended_generated = 0
        self.written: dict[tuple[int, int], HeldGroup] = {}
        self.planned: dict[int, list[tuple[int, int]]] = {}
        self.trained: dict[int, list[tuple[int, int]]] = {}
        self.lost: set[tuple[int, int]] = set()
        self.checkpoints = [0]
        self.planning = 0
        self.sent: list[tuple[bytes, Message]] = []
        self.counts: Counter[str] = Counter()

    # Messages

    def send(self, client: bytes, operation: Operation, payload: Sequence[Any] = ()) -> int:
        """Send a request, and return its number."""
        self.next_request += 1
        request = Message(request_id=self.next_request, body=operation, payload=payload)
        self.sent.append((client, request))
        self.server.send(client, request)
        return request.request_id

    def ask(self, client: bytes, operation: Operation, payload: Sequence[Any] = ()) -> Message:
        """Send a request, and return its immediate reply. The reply may be an error."""
        number = self.send(client, operation, payload)
        return self.server.replies.pop((client, number))

    def control(self, operation: Operation) -> Any:
        reply = self.ask(CONTROLLER, operation)
        assert kind_of(reply) == "ok", reply
        return reply.body

    def stats(self) -> BufferStats:
        return self.control(operations.Stats()).stats

    # Events

    def a_worker_enters(self) -> None:
        if len(self.living()) >= 4:
            return
        self.num_workers += 1
        name = b"worker %d" % self.num_workers
        worker = WorkerModel(name=name, version=self.version, incarnation=self.incarnation)
        self.workers.append(worker)
        assert kind_of(self.ask(name, operations.Hello(produces=True))) == "ok"

    def living(self) -> list[WorkerModel]:
        return [worker for worker in self.workers if not worker.is_dead]

    def any_living(self) -> WorkerModel | None:
        return self.rng.choice(self.living()) if self.living() else None

    def prompts_come(self) -> None:
        number = self.rng.randint(1, 8)
        ids = [*range(self.num_prompts, self.num_prompts + number)]
        self.enqueue(ids)
        self.num_prompts += number

    def enqueue(self, ids: list[int]) -> None:
        """Queue prompts. Prompts that do not fit into the queue are sent again when the faults stop."""
        frames = [prompt_frames(prompt(group_id)) for group_id in ids]
        enqueue = commands.Enqueue(tuple(ids), tuple(map(len, frames)))
        self.send(CONTROLLER, enqueue, [part for parts in frames for part in parts])

    def an_engine_loads(self) -> None:
        """Let an engine load a newer version.

        A worker that waits for a lease cancels its request before the engine loads the version.
        """
        if (worker := self.any_living()) is not None:
            self.withdraw(worker)
            worker.version, worker.incarnation = self.version, self.incarnation

    def withdraw(self, worker: WorkerModel) -> None:
        if worker.asking:
            assert kind_of(self.ask(worker.name, operations.Cancel(worker.asking))) == "ok"
            self.server.forget(worker.name)
            worker.asking = 0

    def a_worker_asks(self) -> None:
        worker = self.any_living()
        if worker is None or worker.asking:
            return
        self.request_leases(worker, self.rng.randint(1, 4))

    def request_leases(self, worker: WorkerModel, number: int) -> None:
        asked = commands.LeaseGroups(engine_version=worker.version, max_groups=number, incarnation=worker.incarnation)
        worker.asking = self.send(worker.name, asked)

    def take_grants(self) -> None:
        """Read the answers to the workers' requests for leases."""
        for worker in self.living():
            reply = self.server.replies.pop((worker.name, worker.asking), None)
            if reply is None:
                continue
            worker.asking = 0
            assert kind_of(reply) == "ok", reply
            frames = iter(reply.payload)
            for lease in getattr(reply.body, "leases", ()):
                (group_id, attempt), version = lease.key, lease.engine_version
                assert lease.deadline == version + self.max_lag
                for _ in range(lease.num_prompt_frames):
                    next(frames)
                group = HeldGroup(group_id=group_id, attempt=attempt, engine_version=version, oldest=version)
                group.continued = lease.num_prefix_frames >= 0
                if lease.num_prefix_frames > 0:
                    num_tokens, oldest, newest = map(int, bytes(next(frames)).split())
                    assert oldest >= version
                    group.continued = self.rng.random() < 0.8
                    if group.continued:
                        group.num_inherited, group.oldest, group.newest = num_tokens, oldest, newest
                assert group.key not in self.written, "no attempt may be leased twice"
                worker.groups[group.key] = self.written[group.key] = group

    def a_worker_writes(self) -> None:
        worker = self.any_living()
        if worker is None or not worker.groups:
            return
        group, number = self.rng.choice([*worker.groups.values()]), self.rng.randint(1, 20)
        if not group.is_finished:
            group.write(number, worker.version)
            worker.num_generated += number

    def any_group(self) -> tuple[WorkerModel, HeldGroup] | None:
        worker = self.any_living()
        if worker is None or not worker.groups:
            return None
        return worker, self.rng.choice([*worker.groups.values()])

    def a_group_is_finished(self) -> None:
        if (found := self.any_group()) is not None:
            self.put(*found)

    def put(self, worker: WorkerModel, group: HeldGroup) -> None:
        if not group.num_tokens:
            group.write(1, worker.version)
            worker.num_generated += 1
        group.is_finished = True
        rewards = (0.0, self.rng.choice([0.0, 1.0]) if self.config.filters else 1.0)
        summary = GroupSummary(
            group_id=group.group_id,
            attempt=group.attempt,
            num_prompt_tokens=3,
            response_lengths=(group.num_tokens, 0),
            num_tokens=group.num_tokens,
            oldest_version=group.oldest,
            newest_version=group.newest,
            rewards=rewards,
        )
        payload = [b"t" * self.rng.randint(10, MAX_GROUP_BYTES)]
        self.report(
            worker, group, self.ask(worker.name, commands.Put(summary=summary, continued=group.continued), payload)
        )

    def report(self, worker: WorkerModel, group: HeldGroup, reply: Message) -> None:
        """Process the reply to a put or a release. If the reply is not `HELD`, the worker forgets the lease."""
        kind = kind_of(reply)
        self.counts[kind] += 1
        if kind != HELD:
            assert kind in ENDED or self.is_of_a_lost_learner(group), reply
            worker.groups.pop(group.key, None)

    def is_of_a_lost_learner(self, group: HeldGroup) -> bool:
        return group.newest > self.version

    def progress_is_saved(self) -> None:
        if (found := self.any_group()) is None or not found[1].num_tokens:
            return
        worker, group = found
        progress = commands.Progress(
            num_tokens=group.num_tokens, oldest_version=group.oldest, newest_version=group.newest
        )
        save = commands.SavePrefix(
            group_id=group.group_id, attempt=group.attempt, progress=progress, continued=group.continued
        )
        reply = self.ask(worker.name, save, [b"%d %d %d" % (group.num_tokens, group.oldest, group.newest)])
        # a successful save replaces the prefix of the earlier attempt
        group.continued = group.continued or kind_of(reply) == "ok"

    def a_lease_is_released(self) -> None:
        if (found := self.any_group()) is not None:
            self.release(*found, max_failures=self.rng.choice([0, 0, 2]))

    def release(self, worker: WorkerModel, group: HeldGroup, *, max_failures: int = 0) -> None:
        release = commands.Release(
            group_id=group.group_id,
            attempt=group.attempt,
            num_tokens=group.num_tokens,
            reason="aborted",
            continued=group.continued,
            max_failures=max_failures,
        )
        self.report(worker, group, self.ask(worker.name, release))

    def leases_are_renewed(self) -> None:
        if (worker := self.any_living()) is not None and worker.groups:
            self.ask(worker.name, commands.Renew(tuple(worker.groups)))

    def a_worker_beats(self) -> None:
        if (worker := self.any_living()) is not None:
            self.ask(worker.name, operations.Beat(generated=worker.num_generated))

    def time_passes(self) -> None:
        self.advance(self.rng.choice([1.0, 5.0, 15.0]))

    def advance(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP_S) + 1):
            self.now += STEP_S
            self.clock.time()
        self.server.pass_time()

    def a_worker_dies(self) -> None:
        if (worker := self.any_living()) is not None:
            worker.is_dead = True
            self.server.forget(worker.name)

    def a_worker_is_buried(self) -> None:
        """Declare a worker dead some time after its death. Late copies of its messages can arrive even after that."""
        if dead := [worker for worker in self.workers if worker.is_dead]:
            self.bury(self.rng.choice(dead), self.rng.choice([0, 1]))

    def bury(self, worker: WorkerModel, share: float) -> None:
        """Declare a worker dead. The controller knows only the fraction ``share`` of the tokens that it generated."""
        known = int(worker.num_generated * share)
        for _ in range(self.rng.randint(1, 2)):
            number = self.control(operations.Bury(worker.name.hex(), known)).value
            known = 0
        assert number <= worker.num_generated
        assert share < 1 or number == worker.num_generated
        self.ended_generated += number
        self.workers.remove(worker)

    def a_batch_is_asked_for(self) -> None:
        if not self.planning and len(self.planned) < 2:
            self.planning = self.send(CONTROLLER, commands.PlanBatch(self.version + len(self.planned)))

    def take_plan(self) -> None:
        """Read the answer to the controller's request for a batch. Check that no lag exceeds ``max_lag``."""
        reply = self.server.replies.pop((CONTROLLER, self.planning), None)
        if reply is None:
            return
        self.planning = 0
        assert kind_of(reply) == "ok", reply
        if not isinstance(reply.body, commands.Batch):
            return
        version = self.version + len(self.planned)
        self.planned[version] = [(group.group_id, group.attempt) for group in reply.body.groups]
        assert len({*self.planned[version]}) == self.size
        for key in self.planned[version]:
            assert 0 <= version - self.written[key].oldest <= self.max_lag, "the lag exceeds the bound"
            assert key not in self.lost, "a group with tokens of a lost version was planned"
            uses = [key for keys in self.trained.values() for key in keys].count(key)
            assert uses < self.max_uses
            assert uses == next(group.num_uses for group in reply.body.groups if group.group_id == key[0])
        assert {*self.planned[version]}.isdisjoint(self.planned.get(version - 1, ()))

    def a_step_is_made(self) -> None:
        if self.version not in self.planned:
            return
        ids = tuple(group_id for group_id, _ in self.planned[self.version])
        assert len(self.control(operations.Fetch(ids, read=self.next_request)).counts) == self.size
        if self.rng.random() < 0.4:
            self.checkpoints.append(self.version + 1)
            key = f"checkpoint {self.next_request}"
            self.send(CONTROLLER, commands.Checkpoint(folder="/unused/v00000001", version=self.version + 1, key=key))
        self.control(commands.Commit(self.version))
        self.trained[self.version] = self.planned.pop(self.version)
        self.version += 1

    def tokens_trained(self, *, is_reuse: bool = False) -> int:
        """Count the tokens of trained groups. With ``is_reuse``, count them once per further use of the group."""
        uses = Counter(key for keys in self.trained.values() for key in keys)
        return sum(self.written[key].num_tokens * (uses[key] - 1 if is_reuse else 1) for key in uses)

    def the_learner_goes_back(self) -> None:
        version = self.rng.choice(self.checkpoints[-2:])
        self.checkpoints = [known for known in self.checkpoints if known <= version]
        self.incarnation += 1
        self.control(commands.Rewind(version=version, incarnation=self.incarnation))
        for key, group in self.written.items():
            if group.newest > version:
                self.lost.add(key)
        if self.planning:
            self.server.forget(CONTROLLER)
            self.planning = 0
        self.version, self.planned = version, {}
        self.trained = {step: keys for step, keys in self.trained.items() if step < version}
        self.enqueue([*range(self.num_prompts)])

    def batches_are_lost(self) -> None:
        """Report that ranks did not find some groups of a batch. This batch and all later batches are planned again."""
        if not self.planned or self.planning:
            return
        first = self.rng.choice([*self.planned])
        lost = self.rng.sample(self.planned[first], self.rng.randint(1, self.size))
        self.control(commands.LoseGroups(group_ids=tuple(group_id for group_id, _ in lost)))
        self.planned = {version: keys for version, keys in self.planned.items() if version < first}

    def a_late_copy_comes(self) -> None:
        """Deliver a late copy of a recent message of a worker, or of the controller's last message."""
        of_workers = [(client, request) for client, request in self.sent[-80:] if client != CONTROLLER]
        of_controller = [(client, request) for client, request in self.sent[-80:] if client == CONTROLLER][-1:]
        if copies := of_workers + of_controller:
            self.server.deliver(*self.rng.choice(copies))

    def the_server_is_killed(self) -> None:
        self.server.kill()

    # The whole run

    async def run(self) -> None:
        for _ in range(self.size * 3):
            self.prompts_come()
        self.a_worker_enters()
        for event in self.events():
            event()
            self.take_grants()
            if self.planning:
                self.take_plan()
            await asyncio.sleep(0)
        self.settle()
        for _ in range(2):
            self.must_make_a_step()
        self.close()

    def events(self) -> Iterator[Any]:
        often = [self.a_worker_asks, self.a_worker_asks, self.a_worker_writes, self.an_engine_loads]
        often += [self.a_group_is_finished] * 4 + [self.a_batch_is_asked_for, self.a_step_is_made]
        now_and_then = [self.prompts_come, self.progress_is_saved, self.a_lease_is_released, self.a_worker_enters]
        now_and_then += [self.leases_are_renewed, self.a_worker_beats, self.a_late_copy_comes]
        seldom = [self.time_passes, self.a_worker_dies, self.a_worker_is_buried, self.the_server_is_killed]
        seldom += [self.batches_are_lost, self.the_learner_goes_back]
        for _ in range(NUM_EVENTS):
            yield self.rng.choice(self.rng.choices([often, now_and_then, seldom], weights=[12, 3, 1])[0])

    def settle(self) -> None:
        """Declare the dead workers dead. Let living workers release their groups, and let other leases expire."""
        for worker in [worker for worker in self.workers if worker.is_dead]:
            self.bury(worker, 0.5)
        self.a_worker_enters()
        for worker in self.living():
            worker.version, worker.incarnation = self.version, self.incarnation
            for group in [*worker.groups.values()]:
                self.release(worker, group)
        self.advance(2 * LEASE_S)
        self.advance(2 * LEASE_S)

    def must_make_a_step(self) -> None:
        """Let all workers serve the learner's version, queue prompts, and check that a batch can then be planned."""
        for _ in range(60):
            if not self.stats().groups["queued"]:
                self.prompts_come()
            self.a_batch_is_asked_for()
            for worker in self.living():
                self.withdraw(worker)
                worker.version, worker.incarnation = self.version, self.incarnation
                self.request_leases(worker, 2)
            self.take_grants()
            for worker in self.living():
                for group in [*worker.groups.values()]:
                    self.put(worker, group)
            self.advance(1.0)
            self.take_plan()
            if self.version in self.planned:
                self.a_step_is_made()
                return
        described = self.control(operations.Inspect()).values
        raise AssertionError(f"no batch {self.version} was made: {self.config}, {described}")

    def close(self) -> None:
        """End all workers, some of them with leases, and check that the account balances."""
        for worker in self.living():
            self.withdraw(worker)
            for group in [*worker.groups.values()]:
                if self.rng.random() < 0.7:
                    self.release(worker, group)
            if worker.groups:
                self.bury(worker, 1)
            else:
                self.ended_generated += worker.num_generated
        stats = self.stats()
        balanced_account(stats, FleetCounters(tokens_generated=self.ended_generated))
        assert stats.tokens_trained == self.tokens_trained()
        assert stats.tokens_reused == self.tokens_trained(is_reuse=True)
        self.counts["uses after the first"] = stats.groups_reused
        assert len({group_id for keys in self.trained.values() for group_id, _ in keys}) == stats.groups["consumed"]
        assert stats.learner_version == self.version
        assert max(stats.lag_histogram, default=0) <= self.max_lag
        self.server.close()


def live(seed: int, directory: Path) -> Life:
    """Run the random events of one seed. The server also dies during writes that the seed chooses."""
    rng = random.Random(seed + 1_000_000)
    kills = [(rng.randint(1, 40), rng.choice([0, 1, 16, 31, 32])) for _ in range(rng.randint(0, 6))]
    directory.mkdir()

    async def run() -> Life:
        life = Life(seed, directory)
        await life.run()
        return life

    async def no_files(*_: Any) -> operations.Checkpointed:
        return operations.Checkpointed()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointRequests, "_write", no_files)
        patch.setattr(journal, "write_all", MortalWrites(kills))
        patch.setattr(journal, "_COMPACT_BYTES", rng.choice([2_000, 16 * 1024**2]))
        try:
            return asyncio.run(run())
        except Exception as error:
            error.add_note(f"life {seed}; run it alone with ASYNCRL_FUZZ_LIFE={seed}")
            raise


def check_lives(seeds: range, tmp_path: Path) -> None:
    if "ASYNCRL_FUZZ_LIFE" in os.environ:
        seeds = range(int(os.environ["ASYNCRL_FUZZ_LIFE"]), int(os.environ["ASYNCRL_FUZZ_LIFE"]) + 1)
    totals: Counter[str] = Counter()
    for seed in seeds:
        life = live(seed, tmp_path / str(seed))
        totals.update(life.counts, kills=life.server.num_kills, rewinds=life.incarnation, steps=life.version)
    seldom = min(totals[name] for name in ("kills", "rewinds", "steps", "LeaseExpired", "uses after the first"))
    assert len(seeds) == 1 or seldom > len(seeds), f"too few events per life: {totals}"


@pytest.mark.long
def test_the_account_balances_and_training_continues_in_hundreds_of_random_lives(tmp_path: Path):
    check_lives(range(220), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_account_balances_and_training_continues_in_thousands_of_random_lives(tmp_path: Path):
    check_lives(range(1000, 5000), tmp_path)
