"""The rollout worker: an actor with an inference engine, a connection to the replay buffer, and the rollout loop.

If the engine fails, the worker saves its unfinished prompt groups and gives them back to the buffer. Then `run` and
`wait_failed` raise an error, and the run's controller starts another worker.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from asyncrl.core import record
from asyncrl.core.errors import AsyncRLError, EngineError, EngineLost
from asyncrl.core.host import WORKER_BYTES, keep_freed_memory
from asyncrl.core.ports import RolloutBuffer
from asyncrl.core.record import ProfileConfig
from asyncrl.core.types import AnsweredPrompt, Prompt
from asyncrl.single_controller import Dispatch, Worker, register
from asyncrl.weights.staging import WeightStager

from .answering import AnsweringParts
from .config import RolloutFleetConfig
from .engines.engine import cancel
from .evaluation import HeldOutAnswers
from .loop import RolloutLoop
from .metrics import FleetCounters

logger = logging.getLogger(__name__)


class RolloutWorker(Worker):
    """Generates training rollouts on its own engine. The methods are asynchronous and may overlap.

    Args:
        model_path: Folder of the initial policy (version 0), with its tokenizer.
        samples_per_prompt: Group size G.
        connect_buffer: Function that `start` calls with the worker's rank. It returns the connection to the buffer.
        copy_weights: Copy full weight versions to ``staging_dir``. Otherwise full versions are linked, and only
            deltas (changes since an earlier version) are copied.
        greedy_baseline: Sample one more response per prompt greedily. The learner does not train on it.
        episode_context: Largest number of tokens on a path of an episode; 0 if no prompt has an environment.
        sample_dir: Folder in which samples are saved as text; empty to save none.

    Raises:
        ValueError: the engine is not installed, or the model or a reward function does not exist.
    """

    def __init__(
        self,
        config: RolloutFleetConfig,
        *,
        model_path: str,
        samples_per_prompt: int,
        connect_buffer: Callable[[str], RolloutBuffer],
        log_dir: str,
        staging_dir: str,
        seed: int,
        engine_seed: int,
        copy_weights: bool = False,
        greedy_baseline: bool = False,
        episode_context: int = 0,
        sample_dir: str = "",
        profile: ProfileConfig | None = None,
    ) -> None:
        super().__init__()
        keep_freed_memory(WORKER_BYTES)
        self._name = f"engine-{self.rank}"
        record.start(profile or ProfileConfig(), process=self._name, pool=record.Pool.fleet)
        self._starting = record.span(record.SpanKind.start)
        self._connect_buffer = connect_buffer
        paths = {"model_path": model_path, "log_dir": log_dir, "sample_dir": sample_dir}
        self._parts = AnsweringParts.of(
            config, rank=self.rank, seed=engine_seed, episode_context=episode_context, **paths
        )
        self._engine = self._parts.engine
        self._down = record.NO_SPAN
        self._stager = WeightStager(
            self._name, memory=Path(staging_dir), copies=copy_weights, timeout_s=config.load_timeout_s
        )
        self._held_out = HeldOutAnswers(self._parts, sampling=config.sampling_for)
        self._answering: set[asyncio.Task[list[AnsweredPrompt]]] = set()
        self._make_loop = partial(
            RolloutLoop,
            config,
            self._parts,
            name=self._name,
            samples_per_prompt=samples_per_prompt,
            greedy_baseline=greedy_baseline,
            seed=seed if config.transformers.reproducible else None,
            stage=self._stager.staged,
        )
        self._buffer: RolloutBuffer | None = None
        self._loop: RolloutLoop | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def start(self) -> str:
        """Start the engine and connect to the replay buffer. Returns the worker's name in the buffer.

        Call `load_first` next. Raises the errors of `Engine.start`.
        """
        await self._parts.start()
        self._buffer = self._connect_buffer(str(self.rank))
        self._loop = self._make_loop(buffer=self._buffer)
        gc.freeze()  # exclude all objects loaded so far from garbage collections, so that they stay short
        return await self._buffer.enter()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def load_first(self) -> None:
        """Wait until the learner has published weights, and load them into the engine.

        Raises the errors of `RolloutLoop.load_next`, or the failure of the engine.
        """
        await self._engine.unless_failed(self._started().load_next(-1))
        self._starting.close()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def run(self) -> FleetCounters:
        """Generate, score and store prompt groups until `drain` or `stop` is called. Returns the final counters.

        Raises `EngineLost` if the engine has failed, and the errors of `RolloutLoop.run`.
        """
        loop = self._started()
        try:
            return await loop.run()
        except Exception as error:
            if not self._engine.has_failed:
                raise
            if not isinstance(error, AsyncRLError):
                logger.exception("rollout worker %d: an error in addition to the failure of its engine", self.rank)
            raise EngineLost(str(error)) from error

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def wait_failed(self) -> NoReturn:
        """Wait until the engine has failed and this worker's groups are given back to the replay buffer.

        Then raises `EngineLost` with the cause of the failure.
        """
        try:
            await self._engine.wait_failed()
        except Exception as error:
            self._down = record.span(record.SpanKind.down, cause=type(error).__name__)
            if self._buffer is not None:
                try:
                    await self._buffer.fenced()  # tell the buffer to stop waiting for this engine's weight load
                except Exception as report:  # noqa: BLE001 - if the buffer is dead, another part of the run notices it
                    logger.warning("the buffer was not told that %s has failed: %s", self._name, report)
            if self._loop is not None:
                await self._loop.wait_ended()
            raise EngineLost(str(error)) from error
        raise EngineLost(f"{self._name} has ended")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def release_device(self, incarnation: int | None = None) -> None:
        """Wait until the running groups have finished, then free the engine's memory on the device for the learner.

        Running calls of `answer` end with an `EngineError`. A call still runs only if the run got a signal or a
        learner rank died. In both cases the evaluation has already ended, and its answers are not needed.

        If a new learner has replaced a dead learner, ``incarnation`` is the number of restarts of the learner. Then
        weights of earlier learners are refused (`RolloutLoop.release_device`).
        """
        await cancel(self._answering)
        await self._started().release_device(incarnation)

    async def answer(self, prompts: Sequence[Prompt], version: int, num_samples: int) -> list[AnsweredPrompt]:
        """Sample ``num_samples`` answers and one greedy answer to each held-out prompt, and score them.

        ``version`` is the policy version to evaluate. Returns one entry with rewards per answered prompt
        (`HeldOutAnswers.answer`).
        """
        with record.span(record.SpanKind.evaluation, version=version):
            work = self._held_out.answer(prompts, version=version, num_samples=num_samples)
            answering = asyncio.create_task(work)
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)
            try:
                return await answering
            except asyncio.CancelledError:
                raise EngineError(
                    f"{self._name} released its device before the end of the evaluation of policy version {version}"
                ) from None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def counters(self) -> FleetCounters:
        """Return this worker's counters of tokens, groups and seconds up to now."""
        return self._started().counters()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def drain(self) -> FleetCounters:
        """End `run`, give all groups of this worker back to the replay buffer, and return the final counters.

        The engine stays up, so `answer` still works.
        """
        return await self._started().stop()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def leave(self) -> FleetCounters | None:
        """Take no more prompt groups, then stop the worker (`stop`), because its engine leaves the run.

        With ``save_progress=never``, running groups first get up to ``drain_timeout_s`` to finish. Returns the final
        counters; None if the worker was never started.
        """
        if self._loop is not None:
            await self._loop.let_end()
        return await self.stop()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def stop(self) -> FleetCounters | None:
        """End `run`, give all groups of this worker back to the replay buffer, and stop the engine.

        Returns the final counters; None if the worker was never started.
        """
        try:
            if self._loop is not None:
                await self._loop.stop()
        finally:
            try:
                await self._parts.close()
            except Exception:
                logger.exception("%s was not stopped; its processes end with this one", self._name)
            self._stager.close()
            if self._buffer is not None:
                await self._buffer.close()
            self._down.close()
            record.stop()
        return self._loop.counters() if self._loop is not None else None

    def _started(self) -> RolloutLoop:
        if self._loop is None:
            raise AsyncRLError(f"rollout worker {self.rank} is not started; await start() first")
        return self._loop
