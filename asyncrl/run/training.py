"""The training of a run: evaluate, train, save the policy, evaluate again, summarise.

A signal stops the training between two steps. `Training` then saves a checkpoint, the policy and the summary.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.config import RunConfig
from asyncrl.core import record
from asyncrl.core.errors import AsyncRLError, WeightsGone, root_cause
from asyncrl.data.prompts import PromptStream
from asyncrl.metrics import (
    Evaluation,
    MetricsWriter,
    StepRecord,
    TerminalView,
    TrainingResult,
    plot_reward,
    summary_document,
    write_json,
)
from asyncrl.profile.command import explain
from asyncrl.profile.report import read_advice
from asyncrl.run.controller import ColocatedController, Controller
from asyncrl.run.evaluator import HeldOutEvaluator, PinnedEngines
from asyncrl.run.learner_restarts import LearnerRestarts
from asyncrl.run.node_folders import NodeFolders
from asyncrl.run.reporting import Watching
from asyncrl.run.resume import Resumed, RunState
from asyncrl.run.run_socket import answered_requests
from asyncrl.samples import NewSamples, sample_line
from buffer import ControlClient
from buffer.keys import add_keys, put_keys, retire_keys

if TYPE_CHECKING:
    from asyncrl.run.fleet_group import FleetGroup
    from asyncrl.run.learner_group import LearnerGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

LATE_S = 60.0
"""If no learner step finishes for this many seconds, the user gets a line that says what the run waits for."""


class Training:
    """Trains with a learner, fleet and buffer that have already started, and writes metrics and summary.

    Args:
        learner: The learner. Its ranks have loaded the weights of the first policy version.
        fleet: The fleet. Its engines serve the first policy version.
        writer: Object that writes the metrics. In a continued run, it already has the records of earlier processes.
        nodes: Object that collects samples and the policy from other nodes.
        resumed: The checkpoint that the run continues from; None for a new run.
        first: The state of the run when the training begins.
        count_restarts: Function that returns the number of restarts of buffer and stores, for the summary.
        all_answer: Function that returns whether buffer, stores and Ray still run. If one of them does not run, a
            training that is stopped saves nothing.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        buffer: ControlClient,
        learner: LearnerGroup,
        fleet: FleetGroup,
        prompts: PromptStream,
        evaluator: HeldOutEvaluator,
        writer: MetricsWriter,
        watching: Watching,
        nodes: NodeFolders,
        view: TerminalView,
        resumed: Resumed | None,
        first: RunState,
        count_restarts: Callable[[], Mapping[str, int]],
        all_answer: Callable[[], bool],
    ) -> None:
        self._config, self._run_dir, self._view = config, run_dir, view
        self._buffer, self._learner, self._fleet, self._nodes = buffer, learner, fleet, nodes
        self._evaluator, self._writer, self._watching = evaluator, writer, watching
        self._count_restarts, self._all_answer = count_restarts, all_answer
        self._samples = NewSamples(run_dir)
        self._collecting: asyncio.Future[None] | None = None
        self._evaluated: int | None = None
        self._stepped_s = 0.0
        self._first_version, self._start_s = first.version, 0.0
        self._controller = (ColocatedController if config.placement.colocated else Controller)(
            config,
            buffer=buffer,
            learner=learner,
            fleet=fleet,
            prompts=prompts,
            on_step=self.step_finished,
            evaluate=self.evaluate,
            resumed=first,
            last=writer.steps[-1] if writer.steps else None,
            earlier=resumed and resumed.earlier,
        )
        self._restarts = LearnerRestarts(
            config, controller=self._controller, learner=learner, prompts=prompts, resumed=resumed, say=view.say
        )

    async def run(self) -> dict[str, Any]:
        """Evaluate, train, and evaluate again. Write the summary into the run's folder, and return the summary."""
        before = await self.evaluate(self._first_version)
        self._start_s = self._view.elapsed_s
        training = asyncio.ensure_future(unless(self._restarts.through(self._train_and_save), [self._fleet.run()]))
        try:
            async with answered_requests(
                self._run_dir, checkpoint=self._controller.checkpoint, keys=self._replace_keys
            ):
                await asyncio.shield(training)  # a signal cancels `run`, but must not cancel the training
            result = await self._controller.account()
            after = await self.evaluate(result.policy_version)
            await self._watching.last_advice()  # compute the advice that the report shows
            overlap = await self.write_report()
        except asyncio.CancelledError:
            if self._all_answer():
                await self.save_after_signal(training, before)
            raise
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
            self._writer.close()
        return self._summarise(result, before, after, overlap)

    async def _replace_keys(self) -> Path:
        """Replace the keys of the buffer's clients on all nodes. Return the folder of the new keys.

        The old keys stay valid until all nodes have the new keys. Raises `ValueError` if there are no keys, and
        `AsyncRLError` if a server does not answer.
        """
        if not self._nodes.keys:
            raise ValueError(
                "this training has no keys, because its buffer binds no port (buffer.keys is empty); only the "
                "user of the training can open its Unix sockets"
            )
        directory = Path(self._nodes.keys)
        keys = add_keys(directory)
        await self._nodes.send_keys()
        await self._buffer.renew_keys()
        put_keys(directory, keys)
        await self._nodes.send_keys()
        retire_keys(directory)
        await self._nodes.send_keys()
        await self._buffer.renew_keys()
        self._view.say(f"the keys in {directory} were replaced; the old keys are refused")
        return directory

    async def _train_and_save(self) -> None:
        """Train, and then save the policy immediately, so that a later fault cannot lose the policy."""
        gc.freeze()  # exclude imported objects from full garbage collections, which would take a second longer
        telling = asyncio.create_task(self.tell_late_steps())
        try:
            await unless(self._controller.train(), [self._learner.death()])
        finally:
            telling.cancel()
        if not self._controller.is_stopped:
            await self._save_policy()

    async def tell_late_steps(self) -> None:
        """If no step finishes for `LATE_S` seconds, say what the run waits for. Repeat this after twice that time."""
        loop = asyncio.get_running_loop()
        self._stepped_s, due_s = loop.time(), LATE_S
        while True:
            late_s = loop.time() - self._stepped_s
            if late_s < due_s / 2:  # a step has finished since the last check
                due_s = LATE_S
            if late_s >= due_s:
                self._view.say(f"no learner step has finished for {late_s:.0f} s: {await self._state()}")
                due_s = 2 * late_s
            await asyncio.sleep(due_s - late_s)

    async def _state(self) -> str:
        try:
            groups = (await self._buffer.stats()).groups
        except AsyncRLError as error:
            return f"the buffer does not answer: {error}"
        evaluated = "" if self._evaluated is None else f"; policy version {self._evaluated} is being evaluated"
        return (
            f"prompt groups: {groups['queued']} queued, {groups['leased']} generating (engines: "
            f"{len(self._fleet.engines())}), {groups['stored']} stored, {groups['planned']} planned; a batch takes "
            f"{self._config.algorithm.groups_per_step}{evaluated}"
        )

    async def _save_policy(self) -> None:
        """Write the policy into a folder, and name the folder ``policy/`` when it is complete."""
        unfinished = self._run_dir / ".policy.partial"
        await self._learner.save_policy(unfinished)
        await self._nodes.fetch(unfinished)
        unfinished.rename(self._run_dir / "policy")

    async def save_after_signal(self, training: Awaitable[None], before: Evaluation | None) -> None:
        """After a signal, finish the queued steps. Then save a checkpoint, the policy and the summary.

        Save the checkpoint only if ``checkpoint.at_stop`` is set, all ranks share the folder of checkpoints, and the
        run has steps left. Save policy and summary only if this process has finished a step.
        """
        timeout_s = self._config.save_timeout_s
        self._controller.stop()
        doing = "finishing the steps under way"
        try:
            async with asyncio.timeout(timeout_s):
                await training
                saves = self._config.checkpoint.at_stop and self._config.shares_checkpoints
                if saves and not self._controller.has_all_steps:
                    doing = "writing the checkpoint"
                    self._view.say(f"saved {await self._controller.save_stopped()}")
                if self._controller.num_steps == 0:
                    return
                doing = "writing policy and summary"
                if not (self._run_dir / "policy").exists():
                    await self._save_policy()
                result = await self._controller.account()
                overlap = await self.write_report()
        except TimeoutError:
            self._view.say(f"{doing} took longer than save_timeout_s={timeout_s:g} after the signal; raise this option")
        except Exception as error:
            logger.exception("%s failed", doing)
            self._view.say(f"{doing} failed: {root_cause(error)}")
        else:
            self._summarise(result, before, None, overlap)

    async def evaluate(self, version: int, pinned: PinnedEngines | None = None) -> Evaluation | None:
        """Evaluate a policy version on the held-out prompts, and record the result.

        If ``pinned`` is given, first wait until engines serve the version, and use only these engines. Returns None if
        evaluations are disabled, or if the version could not be evaluated.
        """
        if not self._config.evaluation.enabled:
            return None
        if pinned is not None:
            with suppress(WeightsGone):  # ignore the error here: `evaluate_pinned` gets the same error, and logs it
                await pinned(())  # wait until engines serve the version
        self._view.say(f"evaluating policy version {version} on the held-out prompts")
        evaluator = self._evaluator
        work = evaluator.evaluate_all(version) if pinned is None else evaluator.evaluate_pinned(version, pinned)
        self._evaluated = version
        try:
            with record.span(record.SpanKind.evaluation, version=version):
                evaluation = await work
        finally:
            self._evaluated = None
        if evaluation is None:
            self._view.say(f"held out, policy version {version}: not evaluated, see logs/controller.log")
            return None
        self._writer.evaluation(evaluation)
        self._watching.evaluation(evaluation)
        await self._nodes.collect()
        return evaluation

    async def write_report(self) -> dict[str, Any] | None:
        """Write the overlap report, and return it for the summary; None if ``profile.enabled`` is false.

        A failure does not end the run.
        """
        if record.current() is None:
            return None
        try:
            report = await asyncio.to_thread(explain, self._run_dir)
        except Exception as error:
            logger.exception("the profile could not be written")
            self._view.say(f"the profile could not be written: {error!r}; see logs/controller.log")
            return None
        for step, figures in dict(report.steps).items():  # if a step was repeated, its last execution counts
            self._writer.profile(step, figures.flat())
        return report.summary()

    def step_finished(self, record: StepRecord) -> None:
        """Record and show a finished learner step."""
        self._stepped_s = asyncio.get_running_loop().time()
        record = self._watching.examine(record)
        self._writer.write(record)
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
        advice = read_advice(self._run_dir)
        own = {"learner": self._restarts.faults.num_restarts, "batches": self._restarts.num_replans}
        summary = summary_document(
            experiment=self._config.experiment,
            seed=self._config.seed,
            total_steps=self._config.total_steps,
            max_lag=self._config.buffer.max_lag,
            result=result,
            before=before,
            after=after,
            evaluations=self._writer.evaluations,
            restarts={**self._count_restarts(), **own},
            wall_s={"total": self._view.elapsed_s, "start": self._start_s},
            overlap=overlap,
            advice=advice and asdict(advice),
        )
        write_json(self._run_dir / "summary.json", summary)
        plot_reward(self._run_dir / "reward.png", self._writer.steps, self._writer.evaluations)
        return summary


async def unless(
    work: Coroutine[Any, Any, T],
    watchers: Sequence[Coroutine[Any, Any, Any]],
    *,
    on_death: Callable[[], None] = lambda: None,
) -> T:
    """Return the result of ``work``. If a watcher fails first, call ``on_death`` and raise the watcher's error.

    ``watchers`` are coroutines that wait for faults. At the end, the function cancels the coroutines that still run.
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
