"""The life of a run: start every part, evaluate, train, evaluate again, save, stop.

A part that dies ends the run: its watcher raises, and everything else is cancelled. At any end of a run, its parts are
stopped in the reverse order of their start. The buffer server and the learner's ranks are restarted up to
``buffer.restarts`` and ``learner.restarts`` times before their death ends the run.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config import RunConfig, keeps_stores_on_hosts, num_buffer_clients, stop_deadlines, with_time_to_read
from asyncrl.core import record
from asyncrl.core.errors import root_cause
from asyncrl.core.host import make_private_folder
from asyncrl.core.lives import keep_up
from asyncrl.core.types import Prompt
from asyncrl.data.prompts import PromptStream
from asyncrl.metrics import (
    Evaluation,
    MetricsWriter,
    StepRecord,
    TerminalView,
    TrainingResult,
    history_folder,
    plot_reward,
    read_history,
    summary_document,
    write_json,
)
from asyncrl.profile.command import explain
from asyncrl.profile.report import read_advice
from asyncrl.run.cluster import finished_in_thread, gpu_of_this_node, ray_cluster, warning_of_open_cluster
from asyncrl.run.controller import ColocatedController, Controller
from asyncrl.run.evaluator import HeldOutEvaluator, PinnedEngines
from asyncrl.run.fleet_group import FleetGroup, served_requests
from asyncrl.run.host_stores import HostStores, ray_actors
from asyncrl.run.learner_group import LearnerGroup
from asyncrl.run.learner_restarts import AnyController, LearnerRestarts
from asyncrl.run.node_folders import NodeFolders, node_folders
from asyncrl.run.reporting import Watching
from asyncrl.run.resume import (
    RepeatedPrompts,
    Resumed,
    RunState,
    begin_buffer_at,
    find_checkpoint,
    take_up,
)
from asyncrl.run.run_folder import SHARED_MEMORY, RunPaths, shared_folder
from asyncrl.run.run_lives import begin_life
from asyncrl.run.run_socket import answered_requests
from asyncrl.samples import NewSamples, sample_line
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
    """One run in its folder."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        prompts: tuple[PromptStream, list[Prompt]],
        warming: WarmStart,
        view: TerminalView,
        on_fault: Callable[[BaseException], None],
    ) -> None:
        """The options must have been checked.

        ``prompts`` are the training prompts and the held-out prompts. ``warming`` makes the first policy. It has
        already begun, unless it may compute on a GPU. The run calls ``on_fault`` before it stops the parts after a
        fault, so that the caller can set a deadline.
        """
        config = with_time_to_read(config)
        self._config = replace(config, profile=replace(config.profile, directory=str(run_dir / "profile")))
        self._run_dir = run_dir
        self._prompts, self._held_out = prompts
        self._warming = warming
        self._view = view
        self._on_fault = on_fault
        self._records: list[StepRecord] = []
        self._evaluations: list[Evaluation] = []
        self._samples = NewSamples(run_dir)
        self._watching = Watching(config, run_dir, view)
        self._start_s = 0.0
        self._resumed: Resumed | None = None
        self._lineage = ""
        self._server: BufferSupervisor | None = None
        self._stores: HostStores | None = None
        self._restarts: LearnerRestarts | None = None
        self._nodes = NodeFolders(run_dir, {}, timeout_s=config.ray.start_timeout_s)
        self._collecting: asyncio.Future[None] | None = None
        self._part_died = False

    async def run(self) -> None:
        """Run to the end and write the summary. Raises `ValueError` for a wrong option or file, and `AsyncRLError`."""
        self._resumed = find_checkpoint(self._config)
        begin_life(self._run_dir, self._resumed and self._resumed.checkpoint)
        prompts = RepeatedPrompts(self._prompts, self._resumed and self._resumed.state)
        if self._resumed is not None:
            self._say_resumed(self._resumed)
        record.start(self._config.profile, process="controller", pool=record.Pool.controller)
        async with AsyncExitStack() as stack:
            stack.callback(record.stop)
            stack.callback(shutil.rmtree, shared_folder(self._run_dir), ignore_errors=True)
            try:
                await stack.enter_async_context(self._watching)
                options = self._buffer_options()
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
                work = self._run_parts(stack, server, prompts)
                watchers = [keep_up(server), ray_death()]
                if options.stores_on is StoresOn.hosts:
                    watchers.append(self._host_stores(stack, options, server.connection).watch())
                summary = await unless(work, watchers, on_death=partial(setattr, self, "_part_died", True))
            except BaseException as fault:
                self._on_fault(fault)
                raise
            self._view.say("stopping")
        self._view.summary(summary, self._run_dir)

    def _say_resumed(self, resumed: Resumed) -> None:
        """Tell the user the step at which the run continues, and the changed options."""
        state = resumed.state
        self._view.say(f"resuming {resumed.checkpoint}: {state.version} steps done")
        if changed := state.changed_options(self._config):
            self._view.say(f"resuming with other options than the checkpoint's: {'; '.join(changed)}")

    def _say_kept(self, resumed: Resumed) -> None:
        """Tell the user what the buffer kept of the earlier lives."""
        if (kept := resumed.earlier) is not None:
            self._view.say(
                f"the buffer goes on with {kept.groups['stored']} stored groups, {kept.groups['queued']} queued prompts"
                f" and {kept.tokens_buffered} tokens; {kept.tokens_dropped.get(RESUME, 0)} tokens that were in flight "
                "at the end of earlier lives are lost"
            )

    def _buffer_options(self) -> BufferConfig:
        """The buffer's options in this run.

        They have a port with keys, or Unix sockets in the run's folder in shared memory.
        """
        options = self._config.buffer
        options = replace(options, epoch=options.epoch or uuid.uuid4().hex[:16])
        if options.host:
            options = replace(options, keys=options.keys or str(self._run_dir / "keys"))
        elif not options.socket_folder and SHARED_MEMORY.is_dir():
            folder = make_private_folder(shared_folder(self._run_dir)) / "sockets"
            options = replace(options, socket_folder=str(folder))
        if keeps_stores_on_hosts(self._config):
            options = replace(options, stores_on=StoresOn.hosts)
        if self._config.rollout_fleet.save_progress is SaveProgress.never:  # then workers do not hand over groups
            options = replace(options, hand_over=False)
        if self._resumed is not None:
            options = begin_buffer_at(options, self._resumed)
        self._lineage = options.lineage or options.epoch
        return options

    def _host_stores(self, stack: AsyncExitStack, options: BufferConfig, buffer: BufferConnection) -> HostStores:
        """Stores on the hosts of rollout workers. A store starts when the first worker of its host does."""
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
        # The server dies with the thread that started it, so the main thread starts it.
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

    async def _run_parts(
        self, stack: AsyncExitStack, server: BufferSupervisor, prompts: RepeatedPrompts
    ) -> dict[str, Any]:
        buffer = ControlClient(server.connection.client())
        stack.push_async_callback(buffer.close)
        if self._resumed is not None:
            self._resumed = await take_up(buffer, self._resumed)
            prompts.repeat_unfinished(await buffer.finished())
            self._say_kept(self._resumed)
        if not self._warming.has_begun:
            await self._warm_up()
        learner, fleet = await self._start_groups(stack, server.connection)
        return await self._train(buffer, learner, fleet, prompts)

    async def _start_groups(self, stack: AsyncExitStack, buffer: BufferConnection) -> tuple[LearnerGroup, FleetGroup]:
        """Start fleet and learner at the same time, during the warm start.

        The stack stops them. Engines need the longest time. They start on ``model.path``, which has the policy's shape.
        The learner then publishes the weights of the warm start or of a checkpoint, and the engines load them like
        later versions. On shared devices the learner starts first and then releases the devices to the engines.
        """
        paths, timeout_s = RunPaths.of(self._config, self._run_dir), self._config.ray.start_timeout_s

        def make(kind: Callable[..., T], config: RunConfig, **parts: Any) -> Awaitable[T]:
            """Make a group in a thread. A cancellation waits for the thread."""
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

        async with asyncio.TaskGroup() as tasks:  # the failure of one start cancels the other
            starting, fleet = tasks.create_task(start_and_publish()), tasks.create_task(self._start_fleet(stack, make))
        return starting.result(), fleet.result()

    async def _start_fleet(self, stack: AsyncExitStack, make: Callable[..., Awaitable[FleetGroup]]) -> FleetGroup:
        fleet = await make(FleetGroup, self._config, say=self._view.say, supply=self._nodes.admit)
        stack.push_async_callback(fleet.stop, stop_deadlines(self._config).fleet_s)
        await stack.enter_async_context(served_requests(fleet, self._config, self._run_dir))
        count, engine = self._config.rollout_fleet.fewest_engines, self._config.rollout_fleet.engine
        with self._view.waiting_for(f"rollout fleet ({count} {engine} engines)"):
            await fleet.start()
        return fleet

    async def _start_learner(self, stack: AsyncExitStack, make: Callable[..., Awaitable[LearnerGroup]]) -> LearnerGroup:
        """Start the ranks during the warm start. Then load the policy or the checkpoint."""
        policy = await asyncio.to_thread(policy_path, self._config)
        if self._config.placement.num_nodes > 1:  # ranks on other nodes may need a copy of the policy
            policy = await self._nodes.bring(await self._warmed(), "start")
        config = replace(self._config, model=replace(self._config.model, path=str(policy)))
        learner = await make(LearnerGroup, config)
        stack.push_async_callback(learner.stop, stop_deadlines(self._config).learner_s)
        await self._warmed()
        with self._view.waiting_for(f"learner ({config.learner.num_ranks} ranks)"):
            await learner.init()
        if self._resumed is not None:
            with self._view.waiting_for("checkpoint"):
                await learner.load(self._resumed.checkpoint)
        return learner

    async def _warm_up(self) -> None:
        """Begin the warm start.

        A warm start on a GPU ends before learner and engines start, because they may need the same GPU.
        """
        if self._config.learner.device is Device.cpu or not needs_fine_tuning(self._config):
            self._warming.begin(self._config)
            return
        async with gpu_of_this_node(self._config) as visible_devices:
            self._warming.begin(self._config, visible_devices)
            await self._warmed()

    async def _warmed(self) -> Path:
        """Wait for the first policy of the training."""
        with nullcontext() if self._warming.is_done else self._view.waiting_for("warm start"):
            return await self._warming.policy()

    @property
    def _state(self) -> RunState:
        """The state in which the run begins."""
        return self._resumed.state if self._resumed is not None else RunState(lineage=self._lineage)

    async def _train(
        self, buffer: ControlClient, learner: LearnerGroup, fleet: FleetGroup, prompts: RepeatedPrompts
    ) -> dict[str, Any]:
        writer = MetricsWriter(self._run_dir)
        if self._resumed is not None:
            await self._go_on(writer, self._resumed)
        evaluator = HeldOutEvaluator(self._config, fleet=fleet, prompts=self._held_out)
        evaluate = partial(self._evaluate, evaluator, writer)
        before = await evaluate(self._state.version)
        self._start_s = self._view.elapsed_s
        kind = ColocatedController if self._config.placement.colocated else Controller
        controller = kind(
            self._config,
            buffer=buffer,
            learner=learner,
            fleet=fleet,
            prompts=prompts,
            on_step=lambda record: self._on_step(writer, record),
            evaluate=evaluate,
            resumed=self._state,
            last=self._records[-1] if self._records else None,
            earlier=self._resumed and self._resumed.earlier,
        )
        self._restarts = LearnerRestarts(
            self._config,
            controller=controller,
            learner=learner,
            prompts=prompts,
            resumed=self._resumed,
            say=self._view.say,
        )

        async def train_and_save() -> None:
            """Save the policy at once, so that a later fault cannot lose it."""
            gc.freeze()  # a garbage collection of all imported objects would pause training for a second
            await unless(controller.train(), [learner.death()])
            if not controller.is_stopped:
                await self._save_policy(learner)

        training = asyncio.ensure_future(unless(self._restarts.through(train_and_save), [fleet.run()]))
        try:
            async with answered_requests(self._run_dir, controller.checkpoint):
                await asyncio.shield(training)  # a signal stops it between two steps
            result = await controller.account()
            after = await evaluate(result.policy_version)
            await self._watching.last_advice()  # the report shows the advice
            overlap = await self._explain(writer)
        except asyncio.CancelledError:
            if not self._part_died:  # after a death the other parts may not answer
                await self._keep(controller, training, learner, writer, before)
            raise
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
            writer.close()
        return self._summarise(result, before, after, overlap)

    async def _go_on(self, writer: MetricsWriter, resumed: Resumed) -> None:
        """Continue the metrics of the earlier lives. Without their files, the metrics begin at the checkpoint."""
        folder = history_folder(resumed.checkpoint, read_progress(resumed.checkpoint).life)
        try:
            history = await asyncio.to_thread(read_history, folder, resumed.state.version)
        except ValueError as error:
            self._view.say(f"the metrics begin at step {resumed.state.version}: {error}")
            return
        writer.go_on(history.steps, history.evaluations)
        self._watching.go_on(history)
        self._records, self._evaluations = [*history.steps], [*history.evaluations]

    async def _save_policy(self, learner: LearnerGroup) -> None:
        """Write ``policy/``; the folder appears when it is complete."""
        unfinished = self._run_dir / ".policy.partial"
        await learner.save_policy(unfinished)
        await self._nodes.fetch(unfinished)
        unfinished.rename(self._run_dir / "policy")

    async def _keep(
        self,
        controller: AnyController,
        training: Awaitable[None],
        learner: LearnerGroup,
        writer: MetricsWriter,
        before: Evaluation | None,
    ) -> None:
        """Finish the steps under way, and write checkpoint, policy and summary of a training that a signal stops.

        Without a new step there is no new policy, and only the checkpoint is written.
        """
        timeout_s = self._config.save_timeout_s
        controller.stop()
        doing = "finishing the steps under way"
        try:
            async with asyncio.timeout(timeout_s):
                await training
                saves = self._config.checkpoint.at_stop and self._config.shares_checkpoints
                if saves and not controller.has_all_steps:
                    doing = "writing the checkpoint"
                    self._view.say(f"saved {await controller.save_stopped()}")
                if controller.num_steps == 0:
                    return
                doing = "writing policy and summary"
                if not (self._run_dir / "policy").exists():
                    await self._save_policy(learner)
                result = await controller.account()
                overlap = await self._explain(writer)
        except TimeoutError:
            self._view.say(f"{doing} took longer than save_timeout_s={timeout_s:g} after the signal; raise it")
        except Exception as error:
            logger.exception("%s failed", doing)
            self._view.say(f"{doing} failed: {root_cause(error)}")
        else:
            self._summarise(result, before, None, overlap)

    async def _evaluate(
        self, evaluator: HeldOutEvaluator, writer: MetricsWriter, version: int, pinned: PinnedEngines | None = None
    ) -> Evaluation | None:
        """Evaluate a version on the engines that are ``pinned`` to it, or on all engines."""
        if not self._config.evaluation.enabled:
            return None
        work = evaluator.evaluate_all(version) if pinned is None else evaluator.evaluate_pinned(version, pinned)
        with record.span(record.SpanKind.evaluation, version=version):
            evaluation = await work
        if evaluation is None:
            self._view.say(f"held out, policy version {version}: not evaluated, see logs/controller.log")
            return None
        self._evaluations.append(evaluation)
        writer.evaluation(evaluation)
        self._watching.evaluation(evaluation)
        await self._nodes.collect()
        return evaluation

    async def _explain(self, writer: MetricsWriter) -> dict[str, Any] | None:
        """Write the overlap report into the run's folder, and return it for the summary; None without a record.

        A failure is reported and does not end the run.
        """
        if record.current() is None:
            return None
        try:
            report = await asyncio.to_thread(explain, self._run_dir)
        except Exception as error:
            logger.exception("the profile could not be written")
            self._view.say(f"the profile could not be written: {error!r}; logs/controller.log says more")
            return None
        for step, figures in dict(report.steps).items():  # for a repeated step, the last execution counts
            writer.profile(step, figures.flat())
        return report.summary()

    def _on_step(self, writer: MetricsWriter, record: StepRecord) -> None:
        if self._records and record.step <= self._records[-1].step:  # the learner returned to a checkpoint
            self._records = [kept for kept in self._records if kept.step < record.step]
            self._evaluations = [kept for kept in self._evaluations if kept.policy_version <= record.step]
        record = self._watching.examine(record)
        self._records.append(record)
        writer.write(record)
        self._watching.step(record)
        kept = self._config.rollout_fleet.samples
        if kept.every_steps and (record.step + 1) % kept.every_steps == 0:
            self._collecting = asyncio.ensure_future(self._nodes.collect())
            for sample in self._samples.extremes(kept.num_shown) if kept.num_shown else ():
                self._view.say(sample_line(sample))

    def _summarise(
        self,
        result: TrainingResult,
        before: Evaluation | None,
        after: Evaluation | None,
        overlap: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Write and return the summary."""
        advice = read_advice(self._run_dir)
        summary = summary_document(
            experiment=self._config.experiment,
            seed=self._config.seed,
            total_steps=self._config.total_steps,
            max_lag=self._config.buffer.max_lag,
            result=result,
            before=before,
            after=after,
            evaluations=self._evaluations,
            restarts={
                "buffer": self._server.num_restarts if self._server else 0,
                "stores": self._stores.num_restarts if self._stores else 0,
                "learner": self._restarts.num_restarts if self._restarts else 0,
                "batches": self._restarts.num_replans if self._restarts else 0,
            },
            wall_s={"total": self._view.elapsed_s, "start": self._start_s},
            overlap=overlap,
            advice=advice and asdict(advice),
        )
        write_json(self._run_dir / "summary.json", summary)
        plot_reward(self._run_dir / "reward.png", self._records, self._evaluations)
        return summary


async def unless(
    work: Coroutine[Any, Any, T],
    watchers: Sequence[Coroutine[Any, Any, Any]],
    *,
    on_death: Callable[[], None] = lambda: None,
) -> T:
    """Return the result of ``work``.

    If a watcher raises, call ``on_death``, cancel ``work``, and raise the watcher's error.
    """
    task = asyncio.ensure_future(work)
    watching = {asyncio.ensure_future(watcher) for watcher in watchers}
    try:
        while not task.done():
            done, _ = await asyncio.wait({task, *watching}, return_when=asyncio.FIRST_COMPLETED)
            for watcher in done & watching:
                if watcher.exception() is not None:
                    on_death()
                watcher.result()
                watching.discard(watcher)
        return task.result()
    finally:
        for left in {task, *watching}:
            left.cancel()
        await asyncio.gather(task, *watching, return_exceptions=True)
