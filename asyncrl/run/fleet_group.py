"""The rollout fleet, with the controller's interface to the fleet (`ColocatedFleetPort`).

The members of the fleet are rollout workers, one per engine.
Members of an elastic fleet can join and leave. An elastic fleet begins with ``rollout_fleet.num_engines.min`` members.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from asyncrl.config import WORKER_ENV, RunConfig, episode_context
from asyncrl.core.errors import AsyncRLError, EngineLost, MembershipRefused
from asyncrl.core.ports import FleetCounts
from asyncrl.core.remote import raised_in_worker
from asyncrl.core.types import AnsweredPrompt, Prompt
from asyncrl.run.cluster import EnginePlaces
from asyncrl.run.fleet_member import FleetMember, MemberParts
from asyncrl.run.run_folder import RunPaths
from asyncrl.single_controller import RayClassWithInitArgs, RayResourcePool
from asyncrl.single_controller.resource_pool import current_node
from asyncrl.weights.staging import LINKS
from buffer import BufferConnection, BufferRole, ControlClient, WorkerClient
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.engines.engine import cancel, engine_seed
from rollout_fleet.member import MemberState
from rollout_fleet.membership import (
    NAMESPACE,
    Action,
    FleetAnswer,
    FleetDesk,
    FleetRequest,
    Presence,
    Roster,
    write_address,
)
from rollout_fleet.metrics import FleetCounters
from rollout_fleet.worker import RolloutWorker

logger = logging.getLogger(__name__)


class FleetGroup:
    """The rollout fleet. It starts its members (rollout workers), watches them, and lets members join and leave."""

    def __init__(
        self,
        config: RunConfig,
        *,
        buffer: BufferConnection,
        paths: RunPaths,
        say: Callable[[str], None],
        supply: Callable[[str], Awaitable[str]],
        version: int = 0,
        pool: RayResourcePool | None = None,
    ) -> None:
        """Start the first workers on the reserved devices of ``pool``. If ``pool`` is None, reserve devices for them.

        `start` then starts the workers' engines. ``supply`` is a function that copies a worker's files to the node with
        a given id, and returns the model's path there. ``version`` is the learner's policy version at the start.
        """
        fleet = config.rollout_fleet
        self._config = config
        self._links = paths.snapshots / LINKS
        self._control = ControlClient(buffer.client())
        self._say = say
        worker = _worker_class(config, buffer, paths, version)
        self._places = EnginePlaces(config, worker=worker, logs=paths.logs, pool=pool)
        self._may_use_devices = asyncio.Event()
        self._may_use_devices.set()
        self._parts = MemberParts(
            places=self._places,
            bury=self._control.bury,
            supply=supply,
            version=version,
            on_change=self._note_change,
            may_use_devices=self._may_use_devices,
            say=say,
        )
        most = fleet.most_engines if fleet.is_elastic else None
        self._roster = Roster(fewest=fleet.fewest_engines, most=most, needed=fleet.min_engines)
        self._members = {rank: FleetMember(rank, config, self._parts) for rank in self._roster.ranks}
        self._departed: list[FleetCounters] = []
        self._coming: dict[int, asyncio.Task[str]] = {}
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._arrivals: asyncio.Queue[FleetMember] = asyncio.Queue()
        self._has_started = False
        self._is_idle = False
        self._is_closing = False
        self._patience: asyncio.TimerHandle | None = None
        self._given_up = asyncio.Event()

    async def start(self) -> None:
        """Start the first engines, and load the first published weights.

        An elastic fleet also begins to start more engines. Raises `DeadlineError` if an engine starts too slowly, or
        `WorkerDiedError` with the log of a dead worker. An engine that fails during this call is not restarted,
        because a wrong configuration is the most likely cause.
        """
        first = list(self._members.values())
        if self._roster.num_free:
            self._bring_up(self._roster.join(self._roster.num_free), waits=self._config.placement.autoscale)
        await asyncio.gather(*(member.start() for member in first))
        await asyncio.gather(*(member.load_first() for member in first))
        for member in first:
            self._arrivals.put_nowait(member)
        self._has_started = True

    async def run(self) -> None:
        """Generate rollouts on all engines until `drain` is called.

        Raises:
            EngineLost: no engine was up for ``rollout_fleet.no_engine_timeout_s``, or fewer than
                ``rollout_fleet.min_engines`` are left. If too few are left, an elastic fleet first waits
                ``rollout_fleet.no_engine_timeout_s`` for more engines.
            AsyncRLError: a worker raised an error of `asyncrl.run.fleet_member.RUN_ERRORS`.
        """
        running: dict[asyncio.Future[None], FleetMember] = {}
        arriving = asyncio.create_task(self._arrivals.get())
        giving_up = asyncio.create_task(self._given_up.wait())
        try:
            while True:
                waiting = {*running, arriving, giving_up}
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if giving_up in done:
                    waited_s = self._config.rollout_fleet.no_engine_timeout_s
                    raise self._too_few(
                        f"Training waited rollout_fleet.no_engine_timeout_s={waited_s:g} s for engines; read in the "
                        "logs why engines failed, raise the option, or let other engines join in time"
                    )
                if arriving in done:
                    member = arriving.result()
                    running[asyncio.ensure_future(member.run())] = member
                    arriving = asyncio.create_task(self._arrivals.get())
                for run in done & running.keys():
                    await self._take_out(running.pop(run), run)
                has_more = arriving.done() or not self._arrivals.empty()
                waits = self._config.rollout_fleet.is_elastic and not self._is_closing
                if not (running or has_more or waits):
                    return
        finally:
            await cancel([*running, arriving, giving_up])

    async def _take_out(self, member: FleetMember, run: asyncio.Future[None]) -> None:
        try:
            run.result()
        except EngineLost as error:
            num_left, wanted = len(self._left), self._config.rollout_fleet.min_engines
            is_elastic = self._config.rollout_fleet.is_elastic
            if num_left < wanted and not is_elastic:
                raise self._too_few(str(error)) from error
            headline = str(error).splitlines()[0]
            self._say(f"the run continues with {num_left} of {len(self._members)} rollout engines: {headline}")
            if num_left < wanted:
                self._say(f"rollout_fleet.min_engines is {wanted}: add engines with asyncrl join")
            if is_elastic:
                await asyncio.to_thread(self._places.close, member.rank)
                self._forget(member)

    def _too_few(self, reason: str) -> EngineLost:
        return EngineLost(
            f"{len(self._left)} of {len(self._members)} rollout engines are left, rollout_fleet.min_engines is "
            f"{self._config.rollout_fleet.min_engines}. {reason}"
        )

    def _note_change(self) -> None:
        """Show a message when the last engine has gone down, and when an engine is up again.

        Also start or stop the timer that ends the run if the fleet has too few engines for too long. The timer does
        not run while learner ranks use the engines' devices.
        """
        if not self._has_started:
            return
        is_idle = not any(member.is_serving for member in self._members.values())
        if is_idle != self._is_idle and (self._left or not is_idle):
            self._say("no rollout engine is up; training waits" if is_idle else "training continues")
        self._is_idle = is_idle
        fleet = self._config.rollout_fleet
        is_short = is_idle or (fleet.is_elastic and len(self._left) < fleet.min_engines)
        if self._is_closing or not is_short or not self._may_use_devices.is_set():
            self._be_patient(None)
        elif self._patience is None:
            self._be_patient(fleet.no_engine_timeout_s)

    def _be_patient(self, seconds: float | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        give_up = self._given_up.set
        self._patience = None if seconds is None else asyncio.get_running_loop().call_later(seconds, give_up)

    @property
    def _left(self) -> list[FleetMember]:
        """The members that have joined, are not leaving, and have not failed."""
        away = self._coming.keys() | self._leaving.keys()
        members = (member for rank, member in self._members.items() if rank not in away)
        return [member for member in members if member.member.state is not MemberState.failed]

    # Joining and leaving

    async def join(self, num_engines: int, *, node: str = "") -> str:
        """Add engines to the running fleet. Wait until the engines serve, and return a message for the user.

        Args:
            num_engines: Number of new engines.
            node: Id of the engines' node; empty for any node.

        Raises:
            MembershipRefused: the fleet would be too large, an engine failed to start, or the run is not training now.
        """
        self._check_open()
        ranks = self._roster.join(num_engines, in_kept_places=not node)
        coming = self._bring_up(ranks, waits=self._config.placement.autoscale, node=node)
        await asyncio.wait(coming)  # a client that disconnects cancels only this wait; the engines still join
        ended = await asyncio.gather(*coming, return_exceptions=True)
        failures = [str(raised_in_worker(end)) for end in ended if isinstance(end, BaseException)]
        joined = ", ".join(str(rank) for rank, end in zip(ranks, ended, strict=True) if isinstance(end, str))
        if failures:
            raise MembershipRefused(
                f"{len(failures)} of {num_engines} engines did not join: "
                f"{failures[0] or 'cancelled by asyncrl leave or by the end of training'}"
                + (f" (rollout workers that joined: {joined})" if joined else "")
            )
        return f"joined: rollout worker {joined}"

    def _bring_up(self, ranks: Sequence[int], *, waits: bool, node: str = "") -> list[asyncio.Task[str]]:
        """Start members in the background, one task per member.

        If ``waits`` is true, the members wait for free CPUs and GPUs without a deadline.
        """
        tasks = []
        for rank in ranks:
            member = self._members[rank] = FleetMember(rank, self._config, self._parts)
            limits = {} if waits else {"place_timeout_s": self._config.ray.start_timeout_s}
            task = self._coming[rank] = asyncio.create_task(self._come(member, member.join(node=node, **limits)))
            # `_come` has reported the task's error. Read the error here, because asyncio logs errors that are not read.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            tasks.append(task)
        return tasks

    async def _come(self, member: FleetMember, joining: Awaitable[str]) -> str:
        try:
            node = await joining
        except BaseException as error:
            self._forget(member)
            if isinstance(error, Exception):
                logger.warning("%s did not join: %s", member.member.name, error)
                self._say(f"{member.member.name} did not join: {str(raised_in_worker(error)).splitlines()[0]}")
            raise
        del self._coming[member.rank]
        self._roster.arrived(member.rank)
        self._arrivals.put_nowait(member)
        self._say(f"{member.member.name} has joined; {len(self._left)} engines are present")
        self._note_change()
        return node

    def _forget(self, member: FleetMember) -> None:
        self._departed.append(member.total)
        self._coming.pop(member.rank, None)
        self._leaving.pop(member.rank, None)
        del self._members[member.rank]
        self._roster.gone(member.rank)
        self._note_change()

    async def leave(self, rank: int) -> str:
        """Remove a member (a rollout worker) from the running fleet.

        The member gives its running groups back to the buffer, and ends. The method waits until the member has ended,
        and returns a message for the user.

        Raises:
            MembershipRefused: the member does not exist, too few members would remain, or the run is not training now.
        """
        self._check_open()
        self._roster.leave(rank)
        member = self._members[rank]
        if rank in self._coming:
            self._coming[rank].cancel()
            await asyncio.wait([self._coming[rank]])
            return f"{member.member.name} does not join"
        self._say(f"{member.member.name} is leaving")

        async def let_go() -> None:
            await member.leave()
            self._forget(member)
            self._say(f"{member.member.name} has left; {len(self._left)} engines are present")

        self._leaving[rank] = asyncio.create_task(let_go())
        await asyncio.shield(self._leaving[rank])  # if the client disconnects, the member still leaves
        return f"{member.member.name} has left"

    def _check_open(self) -> None:
        if not self._has_started:
            raise MembershipRefused("the run is starting; repeat the command when the first engines are ready")
        if self._is_closing:
            raise MembershipRefused("the run is ending; start another run")

    def describe(self) -> str:
        """Return a text for the user: one line per member with its state, then the number of engines that can join."""
        lines = [f"{rank}: {self._describe(member)}" for rank, member in sorted(self._members.items())]
        size = self._config.rollout_fleet.num_engines
        return "\n".join([*lines, f"rollout_fleet.num_engines={size}: {self._roster.num_free} more engines can join"])

    def _describe(self, member: FleetMember) -> str:
        presence = self._roster.presence_of(member.rank)
        state = "serves" if member.is_serving else str(member.member.state)
        return state if presence is Presence.present else f"{presence}, {state}"

    # The interface for the controller (`ColocatedFleetPort`)

    async def release_device(self, incarnation: int | None = None) -> None:
        """Wait until running groups have finished. Then free the GPU memory of all engines.

        No engine starts before the next call of `take_device`. ``incarnation`` is the number of restarts of the
        learner so far. If ``incarnation`` is not None, the engines refuse weights of earlier incarnations from now on.
        """
        self._may_use_devices.clear()
        self._note_change()
        await asyncio.gather(*(member.release_device(incarnation) for member in self._members.values()))

    def take_device(self) -> None:
        """Let engines use the devices again. Call this after the learner has moved its tensors off the devices."""
        self._may_use_devices.set()
        self._note_change()

    async def counters(self) -> FleetCounts:
        """Return the counters of the fleet since its start. The counters include engines that have left."""
        departed, members = list(self._departed), list(self._members.values())
        counters = await asyncio.gather(*(member.counters() for member in members))
        by_engine = {str(member.rank): own.tokens_generated for member, own in zip(members, counters, strict=True)}
        return replace(_total([*departed, *counters]), tokens_by_engine=by_engine)

    async def drain(self) -> FleetCounts:
        """Abort running groups, and return the final counters of the fleet.

        Also release the leases (the workers' rights to generate the groups), cancel the joins in progress, and wait
        until leaving members have left.
        """
        self._is_closing = True
        self._note_change()
        await cancel(self._coming.values())
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)
        departed, members = list(self._departed), list(self._members.values())
        return _total([*departed, *await asyncio.gather(*(member.drain() for member in members))])

    def engines(self) -> list[str]:
        """Return the names of the engines that are in the fleet now. A name is the engine's rank as text.

        The list leaves out an engine if it has not served yet, is leaving, has left or has failed. It also leaves out
        an engine whose restart waits for free resources.
        """
        return [str(rank) for rank, member in sorted(self._members.items()) if member.is_there]

    async def answer(
        self, engine: str, prompts: Sequence[Prompt], *, version: int, num_samples: int
    ) -> list[AnsweredPrompt]:
        """Sample and score answers to held-out prompts, on one engine that serves policy version ``version``.

        Returns one object per prompt. Prompts whose answers have tokens of other versions are left out. Raises
        `AsyncRLError` if the engine is lost or serves another version.
        """
        member = self._members.get(int(engine))
        if member is None:
            raise EngineLost(f"rollout worker {engine} has left")
        return await member.answer(prompts, version=version, num_samples=num_samples)

    async def stop(self, timeout_s: float) -> None:
        """Ask engines and workers to stop, and kill them after ``timeout_s`` seconds.

        Then remove the engines' hard links to the files of weights.
        """
        self._is_closing = True
        self._be_patient(None)
        for task in self._leaving.values():
            task.cancel()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    stopping = [member.stop() for rank, member in self._members.items() if rank not in self._coming]
                    await asyncio.gather(cancel(self._coming.values()), *stopping, return_exceptions=True)
        finally:
            await asyncio.to_thread(self._places.shutdown)
            await self._control.close()
            shutil.rmtree(self._links, ignore_errors=True)


async def answered(fleet: FleetGroup, request: FleetRequest, config: RunConfig) -> FleetAnswer:
    """Carry out a request of ``asyncrl join`` or ``asyncrl leave``, and return the answer for the command.

    If the request fails, this function does not raise. Instead, the answer contains the text of the error.
    """
    try:
        if request.action is Action.describe:
            return FleetAnswer(words=fleet.describe())
        if request.action is Action.leave:
            return FleetAnswer(words=await fleet.leave(request.member))
        node = await asyncio.to_thread(_node_id, config, request.node) if request.node else ""
        return FleetAnswer(words=await fleet.join(request.num_engines, node=node))
    except AsyncRLError as error:
        return FleetAnswer(words=str(raised_in_worker(error)), is_refused=True)
    except Exception as error:
        logger.exception("the request could not be served: %s", request)
        return FleetAnswer(words=f"{error!r}; the run's logs/controller.log has the traceback", is_refused=True)


def _node_id(config: RunConfig, address: str) -> str:
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if address not in nodes:
        raise MembershipRefused(
            f"--node must be the address of a node of the run's Ray cluster ({', '.join(sorted(nodes))}), got "
            f"{address}; start Ray on your node first: ray start --address HEAD"
        )
    if config.placement.num_nodes == 1 and nodes[address] != current_node():
        raise MembershipRefused(
            f"--node {address} must be the run's only node, because placement.num_nodes=1; start a run with more nodes"
        )
    return nodes[address]


@asynccontextmanager
async def served_requests(fleet: FleetGroup, config: RunConfig, run_dir: Path) -> AsyncIterator[None]:
    """Answer join and leave requests while the ``async with`` block runs. For a fleet of fixed size, do nothing."""
    if not config.rollout_fleet.is_elastic:
        yield
        return
    context = ray.get_runtime_context()
    node_address = ray.util.get_node_ip_address() if config.ray.address else "127.0.0.1"
    write_address(run_dir, address=context.gcs_address, node_address=config.ray.node_address or node_address)
    serving = asyncio.create_task(_serve(fleet, config, str(run_dir)))
    try:
        yield
    finally:
        await cancel((serving,))


async def _serve(fleet: FleetGroup, config: RunConfig, name: str) -> None:
    """Answer the requests that a `FleetDesk` actor receives. The actor wakes this loop for each request.

    If the actor dies, a new actor replaces it, and the pending requests fail.
    """

    async def answer(desk: Any, number: int, request: FleetRequest) -> None:
        await desk.answer.remote(number, await answered(fleet, request, config))

    while True:
        options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "runtime_env": {"env_vars": WORKER_ENV}}
        desk: Any = ray.remote(FleetDesk).options(**options).remote()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    number, request = await desk.next_request.remote()
                    logger.info("asked to %s", request)
                    tasks.create_task(answer(desk, number, request))
        except* RayActorError as died:
            logger.warning("the actor for join and leave requests died and is replaced: %s", died.exceptions[0])


def _worker_class(config: RunConfig, buffer: BufferConnection, paths: RunPaths, version: int) -> RayClassWithInitArgs:
    return RayClassWithInitArgs(
        ray.remote(RolloutWorker),
        fleet_options(config),
        model_path=config.model.path,
        samples_per_prompt=config.algorithm.samples_per_prompt,
        connect_buffer=partial(client_on_this_node, buffer.for_role(BufferRole.rollout)),
        log_dir=str(paths.logs),
        staging_dir=str(paths.staging),
        copy_weights=config.weights.copies,
        seed=config.seed,
        engine_seed=engine_seed(config.seed, version, 0),
        greedy_baseline=config.algorithm.greedy_baseline,
        episode_context=episode_context(config),
        sample_dir=str(paths.samples),
        profile=config.profile,
    )


def client_on_this_node(buffer: BufferConnection, name: str) -> WorkerClient:
    """Return a client of the buffer for a rollout worker. The client puts groups into the store of this node."""
    return WorkerClient(buffer.client(host=ray.get_runtime_context().get_node_id()), name=name)


def fleet_options(config: RunConfig) -> RolloutFleetConfig:
    """Return the options of the fleet, with some engine options set according to other options of the run.

    Engines that share devices with the learner get ``memory_saver``, so that they can release the devices. If prompts
    have environments, engines get ``tokenizer``, so that they can detect stop texts.
    """
    fleet = config.rollout_fleet
    own = {"memory_saver": True} if config.placement.colocated else {}
    own |= {"tokenizer": True} if episode_context(config) else {}
    return replace(fleet, sglang=replace(fleet.sglang, **own))


def _total(workers: Sequence[FleetCounters]) -> FleetCounts:
    total = FleetCounters.total(workers)
    return FleetCounts(
        tokens_generated=total.tokens_generated,
        tokens_in_flight=total.tokens_in_flight,
        groups_failed=total.groups_failed,
        episodes=total.episodes,
    )
