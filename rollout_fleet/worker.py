"""The rollout worker: one actor with an engine, a connection to the buffer, and the loop between them.

Its methods are asynchronous and overlap: counters are read while `run` rolls out, which takes new weights by itself. An
engine that fails is replaced by `EngineSupervisor`, and `run` goes on.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from asyncrl.core import record
from asyncrl.core.errors import AsyncRLError
from asyncrl.core.ports import RolloutBuffer
from asyncrl.core.process_memory import WORKER_BYTES, keep_freed_memory
from asyncrl.core.record import ProfileConfig
from asyncrl.core.types import AnsweredPrompt, Prompt
from asyncrl.single_controller import Dispatch, Worker, register

from .config import RolloutFleetConfig
from .engine_supervisor import EngineSupervisor
from .engines import make_engine
from .engines.model_files import load_decoder
from .engines.staging import WeightStager
from .evaluation import HeldOutAnswers
from .loop import RolloutLoop
from .metrics import FleetCounters
from .rewards import WeightedRewards
from .sample_log import SampleLog

logger = logging.getLogger(__name__)


class RolloutWorker(Worker):
    """Generates training rollouts on its own engine, whose rank is the worker's; `start` brings everything up.

    ``model_path`` holds the policy of version 0, tokenizer included; ``connect_buffer`` is called in `start`, with the
    name under which the buffer knows the engine; the engine's log goes to ``log_dir``, and decoded samples to
    ``sample_dir``, unless that is empty; images of weights to ``staging_dir``, with ``copy_weights`` those of full
    versions too; ``seed`` is the run's; ``profile`` says what the process records of its time; for the rest see
    `RolloutLoop`. Raises `ValueError` if the engine is not installed, or there is no such model or reward function.
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
        copy_weights: bool = False,
        greedy_baseline: bool = False,
        sample_dir: str = "",
        profile: ProfileConfig | None = None,
    ) -> None:
        super().__init__()
        keep_freed_memory(WORKER_BYTES)
        record.start(profile or ProfileConfig(), process=f"engine-{self.rank}", pool=record.Pool.fleet)
        self._starting = record.span(record.SpanKind.start)
        self._connect_buffer = connect_buffer
        self._rewards = WeightedRewards(config)
        self._decode = load_decoder(model_path)
        make = partial(make_engine, config, model_path=model_path, rank=self.rank, log_dir=log_dir, seed=seed)
        self._supervisor = EngineSupervisor(f"engine-{self.rank}", config, make=make)
        self._stager = WeightStager(
            f"engine-{self.rank}", memory=Path(staging_dir), copies=copy_weights, timeout_s=config.load_timeout_s
        )
        self._samples = None
        if sample_dir:
            self._samples = SampleLog(Path(sample_dir), rank=self.rank, config=config.samples, decode=self._decode)
        self._held_out = HeldOutAnswers(
            engine=self._supervisor.engine,
            rewards=self._rewards,
            decode=self._decode,
            sampling=config.sampling,
            log=self._samples,
        )
        self._buffer: RolloutBuffer | None = None
        self._make_loop = partial(
            RolloutLoop,
            config,
            member=self._supervisor.member,
            rewards=self._rewards,
            decode=self._decode,
            samples_per_prompt=samples_per_prompt,
            greedy_baseline=greedy_baseline,
            samples=self._samples,
        )
        self._loop: RolloutLoop | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def start(self) -> str:
        """Bring up the engine and connect to the buffer; `load_first` comes next. Raises as `Engine.start` does.

        Returns the name that the buffer knows this worker by.
        """
        await asyncio.gather(self._supervisor.start(), self._prepare_samples())
        await self._rewards.start()
        self._buffer = self._connect_buffer(str(self.rank))
        engine, stage = self._supervisor.engine, self._stager.staged
        self._loop = self._make_loop(engine=engine, buffer=self._buffer, stage=stage)
        gc.freeze()  # what was loaded stays: the engine and the event loop would stand still for each look at all of it
        return await self._buffer.enter()

    async def _prepare_samples(self) -> None:
        if self._samples is not None:
            await self._samples.prepare()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def load_first(self) -> None:
        """Wait for what the learner holds when the run begins, and load it; see `RolloutLoop.load_next`."""
        loop = self._started()
        assert self._buffer is not None
        await self._supervisor.load_first(loop, self._buffer)
        self._starting.close()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def run(self) -> FleetCounters:
        """Roll out until `stop`, on one engine after another where they fail; see `RolloutLoop.run`.

        Raises `EngineLost` when the engine is replaced no more.
        """
        loop = self._started()
        while not loop.has_ended:
            engine = await self._supervisor.ready(unless=lambda: loop.is_stopping)
            try:
                await loop.run()
            except Exception as error:
                if not engine.has_failed:
                    raise
                if not isinstance(error, AsyncRLError):
                    logger.exception("rollout worker %d: an error beside the failure of its engine", self.rank)
        return loop.counters()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def next_note(self, num_heard: int) -> tuple[bool, str]:
        """See `EngineSupervisor.next_note`."""
        return await self._supervisor.next_note(num_heard)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def release_device(self) -> None:
        """Let what runs end, and give the device up until the next weights; see `RolloutLoop.release_device`."""
        await self._started().release_device()

    async def answer(self, prompts: Sequence[Prompt], version: int, num_samples: int) -> list[AnsweredPrompt]:
        """Answer held-out prompts with the policy of ``version``; see `HeldOutAnswers.answer`."""
        self._held_out.use(await self._supervisor.ready())
        with record.span(record.SpanKind.evaluation, version=version):
            return await self._held_out.answer(prompts, version=version, num_samples=num_samples)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def counters(self) -> FleetCounters:
        """What this worker has done up to now."""
        return self._started().counters()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def drain(self) -> FleetCounters:
        """End `run`, give all leases back; the engine stays up for `answer`. Returns the final counters."""
        await self._stop_loop(self._started())
        return self._started().counters()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def leave(self) -> FleetCounters | None:
        """Take no more work, hand on what runs with what is written of it, and `stop`; see `RolloutLoop.let_end`."""
        self._supervisor.member.drain(time.monotonic())
        if self._loop is not None:
            await self._loop.let_end()
        return await self.stop()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def stop(self) -> FleetCounters | None:
        """End `run`, give all back, stop the engine; returns the final counters, None if it was never started."""
        try:
            if self._loop is not None:
                await self._stop_loop(self._loop)
        finally:
            await self._supervisor.stop()
            self._stager.close()
            await self._rewards.close()
            if self._buffer is not None:
                await self._buffer.close()
            record.stop()
        return self._loop.counters() if self._loop is not None else None

    async def _stop_loop(self, loop: RolloutLoop) -> None:
        stopping = asyncio.create_task(loop.stop())
        await asyncio.sleep(0)  # it is stopping now
        await self._supervisor.wake()
        await stopping

    def _started(self) -> RolloutLoop:
        if self._loop is None:
            raise AsyncRLError(f"rollout worker {self.rank} is not started; await start() first")
        return self._loop
