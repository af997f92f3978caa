"""The in-process engine: transformers' own ``generate`` on batches of waiting samples.

One task takes waiting samples, up to a budget of rows, and generates them in a thread, so that the event loop stays
free. New samples wake the task. A batch is answered when its longest sample ends; rows that end earlier are dropped
from the computation. Weights are swapped between two batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from asyncrl.core.errors import EngineError, WorkerDiedError
from asyncrl.core.types import WeightOffer
from rollout_fleet.config import EngineDevice, RolloutFleetConfig

from .engine import Answers, Engine, EngineLoad, RunningSample, check_output, read_model_facts
from .transformers_model import GenerationModel

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _PendingSample(RunningSample):
    """A sample that waits for a batch or is in one."""

    answers: Answers


class TransformersEngine(Engine):
    """An engine in this process; `start` loads the model."""

    sample_type = _PendingSample

    def __init__(
        self, config: RolloutFleetConfig, *, model_path: str, device: EngineDevice, rank: int, seed: int
    ) -> None:
        facts = read_model_facts(model_path)
        super().__init__(
            f"transformers-{rank}", vocab_size=facts.vocab_size, silence_timeout_s=config.silence_timeout_s
        )
        self._config = config
        self._model = GenerationModel(
            model_path,
            facts=facts,
            dtype=config.transformers.dtype,
            device=device.value,
            seed=seed,
            on_step=self._silence.token,
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        self._waiting: list[_PendingSample] = []
        self._arrived = asyncio.Event()
        self._idle_model = asyncio.Lock()

    async def start(self) -> None:
        """See `Engine.start`."""
        async with self._deadline("load its model", self._config.start_timeout_s, "start_timeout_s"):
            await self._in_thread(self._model.load)
        self._come_up(self._run_batches, self._silence.wait)
        logger.info("%s: up", self._name)

    async def release_memory(self) -> None:
        """See `Engine.release_memory`. The weights are dropped: the next ones replace them."""
        if self._running:
            raise EngineError(f"{self._name} cannot release its memory while it generates {len(self._running)} samples")
        async with self._idle_model:
            await self._in_thread(self._model.release)
        logger.info("%s: released its weights", self._name)

    async def load_weights(self, offer: WeightOffer) -> float:
        """See `Engine.load_weights`. Waits for the running batch; the watch for silence bounds that batch."""
        self._check_up()
        return await self.unless_failed(self._load_when_idle(offer))

    async def _load_when_idle(self, offer: WeightOffer) -> float:
        async with self._idle_model:
            started = time.perf_counter()
            with self._silence.paused() as stands_still:
                stands_still()
                async with self._loading(offer, self._config.load_timeout_s):
                    load = partial(self._model.load_weights, offer, timeout_s=self._config.load_timeout_s)
                    await self._in_thread(load)
            self._version = offer.version
            return time.perf_counter() - started

    async def read_load(self) -> EngineLoad:
        """See `Engine.read_load`."""
        raise EngineError("the in-process engine reports no load; set rollout_fleet.groups_in_flight to a number")

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await self.abort(self._running.keys())
        self._go_down()
        if self._watching is not None:
            await asyncio.wait([self._watching], timeout=self._config.stop_timeout_s)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _in_thread(self, call: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _begin(self, samples: Sequence[_PendingSample], answers: Answers) -> tuple[()]:
        for sample in samples:
            sample.answers = answers
        self._waiting += samples
        if samples:
            self._arrived.set()
        return ()

    async def _run_batches(self) -> None:
        """Generate waiting samples, batch after batch."""
        while True:
            await self._arrived.wait()
            async with self._idle_model:
                batch = self._next_batch()
                version = self._version
                try:
                    outputs = await self._in_thread(self._model.generate, batch, version)
                except Exception as error:
                    raise WorkerDiedError(
                        f"{self._name} failed while generating {len(batch)} samples: {error!r}"
                    ) from error
            for sample, output in zip(batch, outputs, strict=True):
                try:
                    check_output(output, sample.request, vocab_size=self._vocab_size, loaded_versions={version})
                except EngineError as error:
                    sample.answers.put_nowait(error)
                else:
                    sample.answers.put_nowait([(sample.request, output)])

    def _next_batch(self) -> list[_PendingSample]:
        """Take the samples that have waited longest and may share a batch, up to the budget of rows."""
        sampling = self._waiting[0].request.sampling
        batch: list[_PendingSample] = []
        for sample in self._waiting:
            own = sample.request.sampling
            if own is sampling or own == replace(sampling, max_new_tokens=own.max_new_tokens):
                batch.append(sample)
            if len(batch) == self._config.transformers.max_rows:
                break
        taken = set(map(id, batch))
        self._waiting = [sample for sample in self._waiting if id(sample) not in taken]
        if not self._waiting:
            self._arrived.clear()
        return batch
