"""The life of a run: prepare, start every part, evaluate, train, evaluate again, save, stop.

A part that dies ends the run: its watcher raises, everything else is cancelled, and what was started is stopped in the
reverse order, whatever happened.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoTokenizer

from asyncrl.buffer_process import buffer_died
from asyncrl.cluster import ray_cluster
from asyncrl.config import RunConfig, check_files
from asyncrl.controller import Controller
from asyncrl.data.prompts import PromptStream, load_eval_prompts
from asyncrl.evaluation import evaluate
from asyncrl.groups import Fleet, Learner, RunPaths
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
from asyncrl.prepare import prepare
from asyncrl.protocol.types import Prompt
from buffer import BufferClient
from buffer.process import BufferProcess

T = TypeVar("T")
logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What is running."""

    server: BufferProcess
    buffer: BufferClient
    learner: Learner
    fleet: Fleet


class Run:
    """One run, in its folder."""

    def __init__(self, config: RunConfig, run_dir: Path, overrides: Sequence[str], view: TerminalView) -> None:
        self._config = config
        self._run_dir = run_dir
        self._overrides = overrides
        self._view = view
        self._records: list[StepRecord] = []
        self._start_s = 0.0

    async def run(self) -> dict[str, Any]:
        """Run to the end; returns the summary, which is also written.

        Raises:
            ValueError: an option or a file is wrong.
            AsyncRLError: a part died, missed a deadline, or the account does not balance.
        """
        config = await self._prepare()
        prompts, held_out = self._read_prompts(config)
        async with AsyncExitStack() as stack:
            parts = await self._start(config, stack)
            work = self._train(config, parts, prompts, held_out)
            result, before, after = await _unless(work, [buffer_died(parts.server)])
            self._view.say("stopping")
        return self._summarise(config, result, before, after)

    async def _prepare(self) -> RunConfig:
        with self._view.waiting_for("model, data and warm start"):
            log_path = self._run_dir / "logs" / "sft.log"
            config = await prepare(self._config, self._overrides, log_path, self._view.say)
        check_files(config)
        return config

    def _read_prompts(self, config: RunConfig) -> tuple[PromptStream, list[Prompt]]:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        prompts = PromptStream(config.data, tokenizer, seed=config.seed)
        if prompts.num_filtered:
            self._view.say(f"left {prompts.num_filtered} prompts out that are longer than data.max_prompt_tokens")
        held_out = load_eval_prompts(config.data, tokenizer) if config.evaluation.enabled else []
        return prompts, held_out

    async def _start(self, config: RunConfig, stack: AsyncExitStack) -> _Parts:
        """Start Ray and the buffer, then the learner and the fleet at the same time; the stack stops them."""
        logs = self._run_dir / "logs"
        paths = RunPaths(
            logs=logs,
            snapshots=await stack.enter_async_context(_snapshot_folder(config, self._run_dir)),
            trajectories=self._run_dir / "trajectories" if config.record_trajectories else None,
        )
        with self._view.waiting_for("buffer"):
            server = stack.enter_context(
                BufferProcess(
                    config.buffer,
                    groups_per_step=config.algorithm.groups_per_step,
                    log_path=logs / "buffer.log",
                    start_timeout_s=config.buffer.request_timeout_s,
                )
            )
        with self._view.waiting_for("Ray"):
            await stack.enter_async_context(ray_cluster(config))
        buffer = BufferClient(server.address, request_timeout_s=config.buffer.request_timeout_s)
        stack.push_async_callback(buffer.close)
        learner, fleet = await asyncio.to_thread(_make_groups, config, server.address, paths)
        stack.push_async_callback(_stop_groups, learner, fleet, config.rollout_fleet.stop_timeout_s + 2)
        learner_words = f"learner ({config.learner.num_ranks} ranks)"
        fleet_words = f"rollout fleet ({config.rollout_fleet.num_engines} {config.rollout_fleet.engine} engines)"
        starting = _together(self._ready(learner_words, learner.init()), self._ready(fleet_words, fleet.start()))
        await _unless(starting, [buffer_died(server)])
        return _Parts(server=server, buffer=buffer, learner=learner, fleet=fleet)

    async def _ready(self, part: str, start: Coroutine[Any, Any, None]) -> None:
        with self._view.waiting_for(part):
            await start

    async def _train(
        self, config: RunConfig, parts: _Parts, prompts: PromptStream, held_out: list[Prompt]
    ) -> tuple[TrainingResult, Evaluation | None, Evaluation | None]:
        before = await self._evaluate(config, parts, held_out, "before", 0)
        self._start_s = self._view.elapsed_s
        writer = MetricsWriter(self._run_dir)
        controller = Controller(
            config,
            buffer=parts.buffer,
            learner=parts.learner,
            fleet=parts.fleet,
            prompts=prompts,
            on_step=lambda record: self._on_step(writer, record),
        )
        try:
            result = await _unless(controller.train(), [parts.fleet.run()])
        finally:
            writer.close()
        after = await self._evaluate(config, parts, held_out, "after", result.policy_version)
        await parts.learner.save_policy(self._run_dir / "policy")
        return result, before, after

    async def _evaluate(
        self, config: RunConfig, parts: _Parts, held_out: list[Prompt], when: str, version: int
    ) -> Evaluation | None:
        if not config.evaluation.enabled:
            return None
        evaluation = await evaluate(parts.fleet, held_out, config, policy_version=version)
        self._view.evaluation(when, evaluation)
        return evaluation

    def _on_step(self, writer: MetricsWriter, record: StepRecord) -> None:
        self._records.append(record)
        writer.write(record)
        self._view.step(record)

    def _summarise(
        self, config: RunConfig, result: TrainingResult, before: Evaluation | None, after: Evaluation | None
    ) -> dict[str, Any]:
        summary = summary_document(
            experiment=config.experiment,
            seed=config.seed,
            max_lag=config.buffer.max_lag,
            result=result,
            before=before,
            after=after,
            wall_s={"total": self._view.elapsed_s, "start": self._start_s},
        )
        write_json(self._run_dir / "summary.json", summary)
        plot_reward(self._run_dir / "reward.png", self._records, before, after)
        self._view.summary(summary, self._run_dir)
        return summary


async def _unless(work: Coroutine[Any, Any, T], watchers: Sequence[Coroutine[Any, Any, Any]]) -> T:
    """Return what ``work`` returns; a watcher that raises first cancels it and is raised instead.

    A watcher that ends without an error is no longer watched.
    """
    task = asyncio.ensure_future(work)
    watching = {asyncio.ensure_future(watcher) for watcher in watchers}
    try:
        while not task.done():
            done, _ = await asyncio.wait({task, *watching}, return_when=asyncio.FIRST_COMPLETED)
            for watcher in done & watching:
                watcher.result()
                watching.discard(watcher)
        return task.result()
    finally:
        for left in {task, *watching}:
            left.cancel()
        await asyncio.gather(task, *watching, return_exceptions=True)


async def _together(*starts: Coroutine[Any, Any, None]) -> None:
    """Await all; the first failure cancels the others."""
    async with asyncio.TaskGroup() as tasks:
        for start in starts:
            tasks.create_task(start)


def _make_groups(config: RunConfig, address: str, paths: RunPaths) -> tuple[Learner, Fleet]:
    return (
        Learner(config, buffer_address=address, paths=paths),
        Fleet(config, buffer_address=address, paths=paths),
    )


async def _stop_groups(learner: Learner, fleet: Fleet, timeout_s: float) -> None:
    await asyncio.gather(fleet.stop(timeout_s), learner.stop(timeout_s), return_exceptions=True)


@asynccontextmanager
async def _snapshot_folder(config: RunConfig, run_dir: Path) -> AsyncIterator[Path]:
    """Where weights are published: in the run's folder where all are kept, else in memory, removed at the end."""
    if config.learner.keep_snapshots == -1 or not _SHARED_MEMORY.is_dir():
        folder = run_dir / "snapshots"
        folder.mkdir()
        yield folder
        return
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-", dir=_SHARED_MEMORY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
