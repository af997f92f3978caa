"""One run from start to stop: starts buffer, Ray, learner and fleet, trains, and stops them in reverse order.

The buffer is restarted at most ``buffer.restarts`` times, and the learner's ranks at most ``learner.restarts`` times.
If one of them dies once more, the run ends.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config import RunConfig, keeps_stores_on_hosts, num_buffer_clients, stop_deadlines, with_time_to_read
from asyncrl.core import record
from asyncrl.core.host import make_private_folder
from asyncrl.core.lives import keep_up
from asyncrl.core.types import Prompt
from asyncrl.data.prompts import PromptStream
from asyncrl.metrics import (
    MetricsWriter,
    TerminalView,
    history_folder,
    read_history,
)
from asyncrl.run.cluster import finished_in_thread, gpu_of_this_node, ray_cluster, warning_of_open_cluster
from asyncrl.run.evaluator import HeldOutEvaluator
from asyncrl.run.fleet_group import FleetGroup, served_requests
from asyncrl.run.host_stores import HostStores, ray_actors
from asyncrl.run.learner_group import LearnerGroup
from asyncrl.run.node_folders import NodeFolders, node_folders
from asyncrl.run.reporting import Watching
from asyncrl.run.resume import Resumed, RunState, begin_buffer_at, find_checkpoint, take_up
from asyncrl.run.run_folder import SHARED_MEMORY, RunPaths, shared_folder
from asyncrl.run.run_lives import begin_life, record_policy
from asyncrl.run.training import Training, unless
from asyncrl.sft.warm_start import WarmStart, needs_fine_tuning, policy_path
from asyncrl.single_controller import ray_death
from buffer import BufferConfig, BufferConnection, BufferSupervisor, ControlClient, StoresOn
from buffer.account import RESUME
from learner.checkpoint_folder import read_progress
from learner.config import Device
from rollout_fleet.config import SaveProgress

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Run:
    """One ``asyncrl train`` process, which starts or continues a run. The process has its own folder."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        prompts: tuple[PromptStream, list[Prompt]],
        warming: WarmStart,
        view: TerminalView,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        """Store the options, which the caller has checked.

        ``prompts`` are the training prompts and the held-out prompts. ``warming`` is the warm start, which makes the
        first policy. If the caller has not begun the warm start, `run` begins it. After a fault, `run` calls
        ``on_fault`` and then stops the learner, the fleet and the buffer.
        """
        config = with_time_to_read(config)
        self._config = replace(config, profile=replace(config.profile, directory=str(run_dir / "profile")))
        self._run_dir = run_dir
        self._prompts, self._held_out = prompts
        self._warming = warming
        self._view = view
        self._on_fault = on_fault
        self._watching = Watching(config, run_dir, view)
        self._resumed: Resumed | None = None
        self._lineage = ""
        self._server: BufferSupervisor | None = None
        self._stores: HostStores | None = None
        self._nodes = NodeFolders(run_dir, {}, timeout_s=config.ray.start_timeout_s)
        self._part_died = False

    async def run(self) -> None:
        """Start buffer, Ray, learner and fleet, train, stop them, and show the summary.

        Raises `ValueError` for a wrong option or file, and `AsyncRLError` for a failure of a process. Errors of a task
        group are in an `ExceptionGroup`.
        """
        self._resumed = find_checkpoint(self._config)
        begin_life(self._run_dir, self._resumed and self._resumed.checkpoint)
        if self._resumed is not None:
            state = self._resumed.state
            self._prompts.restore(state.prompts)
            self._view.say(f"resuming {self._resumed.checkpoint}: {state.version} steps done")
            if changed := state.changed_options(self._config):
                self._view.say(f"resuming with other options than the checkpoint's: {'; '.join(changed)}")
        record.start(self._config.profile, process="controller", pool=record.Pool.controller)
        async with AsyncExitStack() as stack:
            stack.callback(record.stop)
            stack.callback(shutil.rmtree, shared_folder(self._run_dir), ignore_errors=True)
            try:
                await stack.enter_async_context(self._watching)
                options = self.buffer_options()
                server = self._start_buffer(stack, options)
                with self._view.waiting_for("Ray"):
                    self._config = await stack.enter_async_context(ray_cluster(self._config, self._view.say))
                if warning := warning_of_open_cluster(self._config):
                    self._view.say(warning)
                folders = node_folders(self._config, self._run_dir, self._view.say)
                self._nodes = await stack.enter_async_context(folders)
                several = self._config.placement.num_nodes > 1
                with self._view.waiting_for("the nodes' models and keys") if several else nullcontext():
                    resumes, keys = self._resumed is not None, server.connection.keys
                    self._config = await self._nodes.supply(self._config, keys=keys, resumes=resumes)
                work = self._run_parts(stack, server)
                watchers = [keep_up(server), ray_death()]
                if options.stores_on is StoresOn.hosts:
                    watchers.append(self._host_stores(stack, options, server.connection).watch())
                summary = await unless(work, watchers, on_death=partial(setattr, self, "_part_died", True))
            except BaseException as fault:
                self._on_fault(fault)
                await self._warming.stop()  # stop the warm start first, because it would make the other stops slower
                raise
            self._view.say("stopping")
        self._view.summary(summary, self._run_dir)

    def buffer_options(self) -> BufferConfig:
        """Return the buffer's options. With a port, they include access keys; without a port, Unix sockets."""
        options = self._config.buffer
        options = replace(options, epoch=options.epoch or uuid.uuid4().hex[:16])
        if options.host:
            options = replace(options, keys=options.keys or str(self._run_dir / "keys"))
        elif not options.socket_folder and SHARED_MEMORY.is_dir():
            folder = make_private_folder(shared_folder(self._run_dir)) / "sockets"
            options = replace(options, socket_folder=str(folder))
        if keeps_stores_on_hosts(self._config):
            options = replace(options, stores_on=StoresOn.hosts)
        # Another worker can take over a running group only if the group's first tokens are saved.
        if self._config.rollout_fleet.save_progress is SaveProgress.never:
            options = replace(options, hand_over=False)
        if self._resumed is not None:
            options = begin_buffer_at(options, self._resumed)
        self._lineage = options.lineage or options.epoch
        return options

    def _host_stores(self, stack: AsyncExitStack, options: BufferConfig, buffer: BufferConnection) -> HostStores:
        if options.directory:
            options = replace(options, directory=str(Path(options.directory).absolute()))
        timeout_s = options.request_timeout_s
        make = ray_actors(
            options,
            num_clients=num_buffer_clients(self._config),
            start_timeout_s=timeout_s,
            log_dir=self._run_dir / "logs",
            profile=self._config.profile,
        )
        self._stores = HostStores(
            ControlClient(buffer.client()),
            make=make,
            start_timeout_s=timeout_s + self._config.ray.start_timeout_s,
            restarts=options.restarts,
            say=self._view.say,
        )
        stack.push_async_callback(self._stores.stop)
        return self._stores

    def _start_buffer(self, stack: AsyncExitStack, options: BufferConfig) -> BufferSupervisor:
        # Start the buffer's server in the main thread. Linux kills the server when the thread that started it ends.
        with self._view.waiting_for("buffer"):
            server = stack.enter_context(
                BufferSupervisor(
                    options,
                    groups_per_step=self._config.algorithm.groups_per_step,
                    log_path=self._run_dir / "logs" / "buffer.log",
                    start_timeout_s=self._config.buffer.request_timeout_s,
                    on_restart=self._view.say,
                    profile=self._config.profile,
                )
            )
        self._server = server
        keys = f" --keys {server.connection.keys}" if server.connection.keys else ""
        self._view.say(f"to look into the buffer: python -m buffer.inspect {server.connection.address}{keys}")
        return server

    async def _run_parts(self, stack: AsyncExitStack, server: BufferSupervisor) -> dict[str, Any]:
        buffer = ControlClient(server.connection.client())
        stack.push_async_callback(buffer.close)
        if self._resumed is not None:
            self._resumed = await take_up(buffer, self._resumed)
            self._prompts.repeat_unfinished(await buffer.finished())
            if (kept := self._resumed.earlier) is not None:
                self._view.say(
                    f"the buffer continues with {kept.groups['stored']} stored groups, {kept.groups['queued']} queued "
                    f"prompts and {kept.tokens_buffered} tokens; {kept.tokens_dropped.get(RESUME, 0)} tokens that were "
                    "in flight at the end of earlier lives are lost"
                )
        if not self._warming.has_begun:
            await self._warm_up()
        learner, fleet = await self._start_groups(stack, server.connection)
        return await self._train(buffer, learner, fleet)

    async def _start_groups(self, stack: AsyncExitStack, buffer: BufferConnection) -> tuple[LearnerGroup, FleetGroup]:
        """Start fleet and learner at the same time, while the warm start still runs.

        Engines take the longest to start, so they first load the weights of ``model.path``. Later they load the weights
        that the learner publishes. If fleet and learner share devices, the learner starts before the fleet.
        """
        paths, timeout_s = RunPaths.of(self._config, self._run_dir), self._config.ray.start_timeout_s

        def make(kind: Callable[..., T], config: RunConfig, **parts: Any) -> Awaitable[T]:
            return finished_in_thread(partial(kind, config, buffer=buffer, paths=paths, **parts), timeout_s)

        if self._config.placement.colocated:
            learner = await self._start_learner(stack, make)
            await learner.rollout_mode(self._state.version)
            return learner, await self._start_fleet(stack, partial(make, pool=learner.pool))

        async def start_and_publish() -> LearnerGroup:
            learner = await self._start_learner(stack, make)
            await learner.publish(self._state.version)
            await learner.finish_publish()
            return learner

        async with asyncio.TaskGroup() as tasks:  # if the start of learner or fleet fails, this cancels the other start
            starting, fleet = tasks.create_task(start_and_publish()), tasks.create_task(self._start_fleet(stack, make))
        return starting.result(), fleet.result()

    async def _start_fleet(self, stack: AsyncExitStack, make: Callable[..., Awaitable[FleetGroup]]) -> FleetGroup:
        parts = {"say": self._view.say, "supply": self._nodes.admit, "version": self._state.version}
        fleet = await make(FleetGroup, self._config, **parts)
        stack.push_async_callback(fleet.stop, stop_deadlines(self._config).fleet_s)
        await stack.enter_async_context(served_requests(fleet, self._config, self._run_dir))
        count, engine = self._config.rollout_fleet.fewest_engines, self._config.rollout_fleet.engine
        with self._view.waiting_for(f"rollout fleet ({count} {engine} engines)"):
            await fleet.start()
        return fleet

    async def _start_learner(self, stack: AsyncExitStack, make: Callable[..., Awaitable[LearnerGroup]]) -> LearnerGroup:
        policy = await asyncio.to_thread(policy_path, self._config)
        if self._config.placement.num_nodes > 1:  # copy the policy to nodes that do not see the controller's folder
            policy = await self._nodes.bring(await self._warmed(), "start")
        config = replace(self._config, model=replace(self._config.model, path=str(policy)))
        learner = await make(LearnerGroup, config)
        stack.push_async_callback(learner.stop, stop_deadlines(self._config).learner_s)
        initial = await self._warmed()
        if self._resumed is None:
            await asyncio.to_thread(record_policy, self._run_dir, initial)
        with self._view.waiting_for(f"learner ({config.learner.num_ranks} ranks)"):
            await learner.init()
        if self._resumed is not None:
            with self._view.waiting_for("checkpoint"):
                await learner.load(self._resumed.checkpoint)
        return learner

    async def _warm_up(self) -> None:
        """Begin the warm start. If it uses a GPU, wait for its end, because learner or engines may need this GPU."""
        if self._config.learner.device is Device.cpu or not needs_fine_tuning(self._config):
            self._warming.begin(self._config)
            return
        async with gpu_of_this_node(self._config) as visible_devices:
            self._warming.begin(self._config, visible_devices)
            await self._warmed()

    async def _warmed(self) -> Path:
        with nullcontext() if self._warming.is_done else self._view.waiting_for("warm start"):
            return await self._warming.policy()

    @property
    def _state(self) -> RunState:
        return self._resumed.state if self._resumed is not None else RunState(lineage=self._lineage)

    async def _train(self, buffer: ControlClient, learner: LearnerGroup, fleet: FleetGroup) -> dict[str, Any]:
        writer = MetricsWriter(self._run_dir)
        if self._resumed is not None:
            await self._go_on(writer, self._resumed)
        training = Training(
            self._config,
            self._run_dir,
            buffer=buffer,
            learner=learner,
            fleet=fleet,
            prompts=self._prompts,
            evaluator=HeldOutEvaluator(self._config, fleet=fleet, prompts=self._held_out),
            writer=writer,
            watching=self._watching,
            nodes=self._nodes,
            view=self._view,
            resumed=self._resumed,
            first=self._state,
            count_restarts=lambda: {
                "buffer": self._server.faults.num_restarts if self._server else 0,
                "stores": self._stores.num_restarts if self._stores else 0,
            },
            all_answer=lambda: not self._part_died,
        )
        return await training.run()

    async def _go_on(self, writer: MetricsWriter, resumed: Resumed) -> None:
        """Continue the metrics of the run's earlier processes. If their files are missing, begin at the checkpoint."""
        folder = history_folder(resumed.checkpoint, read_progress(resumed.checkpoint).life)
        try:
            history = await asyncio.to_thread(read_history, folder, resumed.state.version)
        except ValueError as error:
            self._view.say(f"the metrics begin at step {resumed.state.version}: {error}")
            return
        known = {record.step for record in history.steps}
        if lost := sorted({*range(min(known, default=0), resumed.state.version)} - known):
            self._view.say(f"the metrics lack the steps {lost}: their life was killed before it wrote them")
        writer.go_on(history.steps, history.evaluations)
        self._watching.go_on(history)
