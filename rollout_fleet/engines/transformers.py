"""The in-process engine: transformers' own ``generate`` on batches of waiting samples.

One task takes waiting samples, up to a budget of rows, and generates them in a thread, so that the event loop stays
free. New samples wake the task. A batch is answered when its longest sample ends; rows that end earlier are dropped
from the computation. Weights are swapped between two batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from asyncrl.core.errors import DeadlineError, EngineError, WorkerDiedError
from asyncrl.core.types import WeightOffer
from rollout_fleet.config import EngineDevice, RolloutFleetConfig

from .engine import EngineFailure, EngineLoad, SampleOutput, SampleRequest, SilenceWatch, check_output, check_prompt
from .model_files import read_model_facts
from .transformers_model import AbortFlag, GenerationModel

logger = logging.getLogger(__name__)

_Answers = asyncio.Queue[tuple[SampleRequest, SampleOutput] | Exception]


@dataclass(eq=False, kw_only=True, slots=True)
class PendingSample:
    """A sample that waits for a batch or is in one; its answer or failure is put into ``answers`` once."""

    request: SampleRequest
    answers: _Answers
    flag: AbortFlag = field(default_factory=AbortFlag)
    is_answered: bool = False

    def answer(self, outcome: tuple[SampleRequest, SampleOutput] | Exception) -> None:
        """Answer the sample, unless it was answered before."""
        if not self.is_answered:
            self.is_answered = True
            self.answers.put_nowait(outcome)


class TransformersEngine:
    """Implements `Engine` in this process; `start` loads the model."""

    def __init__(
        self, config: RolloutFleetConfig, *, model_path: str, device: EngineDevice, rank: int, seed: int
    ) -> None:
        self._config = config
        self._name = f"transformers-{rank}"
        self._facts = read_model_facts(model_path)
        self._silence = SilenceWatch(self._name, timeout_s=config.silence_timeout_s, probe=self._probe)
        self._model = GenerationModel(
            model_path,
            facts=self._facts,
            dtype=config.transformers.dtype,
            device=device.value,
            seed=seed,
            on_step=self._silence.token,
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        self._waiting: list[PendingSample] = []
        self._pending: dict[str, PendingSample] = {}
        self._arrived = asyncio.Event()
        self._idle_model = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure = EngineFailure(self._name, tell=self._tell)
        self._version = 0

    @property
    def version(self) -> int:
        """See `Engine.version`."""
        return self._version

    @property
    def has_failed(self) -> bool:
        """See `Engine.has_failed`."""
        return self._failure.has_come

    async def start(self) -> None:
        """See `Engine.start`."""
        async with self._failure.deadline("load its model", self._config.start_timeout_s, "start_timeout_s"):
            await asyncio.get_running_loop().run_in_executor(self._thread, self._model.load)
        self._failure.begin()
        self._tasks = [asyncio.create_task(self._run_batches()), asyncio.create_task(self._watch_silence())]
        logger.info("%s: up", self._name)

    async def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[tuple[SampleRequest, SampleOutput]]:
        """See `Engine.generate`."""
        self._failure.check()
        if not requests:
            return
        for request in {id(request.prompt_ids): request for request in requests}.values():
            check_prompt(request, self._facts.vocab_size)
        answers: _Answers = asyncio.Queue()
        samples = [PendingSample(request=request, answers=answers) for request in requests]
        self._pending.update({sample.request.id: sample for sample in samples})
        self._waiting.extend(samples)
        self._arrived.set()
        try:
            with self._silence.running(len(samples)):
                for _ in samples:
                    answer = await answers.get()
                    if isinstance(answer, Exception):
                        raise answer
                    yield answer
        finally:
            for sample in samples:
                sample.flag.is_set = True
                if self._pending.get(sample.request.id) is sample:
                    del self._pending[sample.request.id]

    async def release_memory(self) -> None:
        """See `Engine.release_memory`. The weights are dropped: the next ones replace them."""
        if self._pending:
            raise EngineError(f"{self._name} cannot release its memory while it generates {len(self._pending)} samples")
        async with self._idle_model:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._model.release)
        logger.info("%s: released its weights", self._name)

    async def load_weights(self, offer: WeightOffer) -> float:
        """See `Engine.load_weights`. Waits for the running batch; the watch for silence bounds that batch."""
        self._failure.check()
        return await self._failure.unless_failed(self._load_when_idle(offer))

    async def _load_when_idle(self, offer: WeightOffer) -> float:
        async with self._idle_model:
            started = time.perf_counter()
            with self._silence.paused() as stands_still:
                stands_still()
                async with self._failure.if_load_fails(offer, self._config.load_timeout_s):
                    loop = asyncio.get_running_loop()
                    load = partial(self._model.load_weights, offer, timeout_s=self._config.load_timeout_s)
                    await loop.run_in_executor(self._thread, load)
            self._version = offer.version
            return time.perf_counter() - started

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `Engine.abort`."""
        for request_id in request_ids:
            if request_id in self._pending:
                self._pending[request_id].flag.is_set = True

    def num_written(self, request_ids: Collection[str]) -> int:
        """See `Engine.num_written`."""
        return sum(self._pending[request_id].flag.num_tokens for request_id in self._pending.keys() & request_ids)

    async def read_load(self) -> EngineLoad:
        """See `Engine.read_load`."""
        raise EngineError("the in-process engine reports no load; set rollout_fleet.groups_in_flight to a number")

    async def wait_failed(self) -> None:
        """See `Engine.wait_failed`."""
        await self._failure.wait()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        for sample in self._pending.values():
            sample.flag.is_set = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._config.stop_timeout_s)
        self._failure.end()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run_batches(self) -> None:
        """Generate waiting samples, batch after batch."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            async with self._idle_model:
                batch = self._next_batch()
                version = self._version
                try:
                    outputs = await loop.run_in_executor(
                        self._thread,
                        self._model.generate,
                        [sample.request for sample in batch],
                        [sample.flag for sample in batch],
                        version,
                    )
                except Exception as error:  # noqa: BLE001 - any error of generate is the engine's failure
                    death = WorkerDiedError(f"{self._name} failed while generating {len(batch)} samples: {error!r}")
                    death.__cause__ = error
                    self._failure.fail(death)
                    return
            for sample, output in zip(batch, outputs, strict=True):
                self._resolve(sample, output, version)

    def _next_batch(self) -> list[PendingSample]:
        """Take the samples that have waited longest and may share a batch, up to the budget of rows."""
        sampling = self._waiting[0].request.sampling
        batch: list[PendingSample] = []
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

    def _resolve(self, sample: PendingSample, output: SampleOutput, version: int) -> None:
        if sample.is_answered:
            return
        try:
            check_output(output, sample.request, vocab_size=self._facts.vocab_size, loaded_versions={version})
        except EngineError as error:
            sample.answer(error)
        else:
            sample.answer((sample.request, output))

    # Failure

    async def _watch_silence(self) -> None:
        try:
            await self._silence.wait()
        except DeadlineError as error:
            self._failure.fail(error)

    async def _probe(self) -> None:
        """Never returns: a thread in a model step cannot answer."""
        await asyncio.Event().wait()

    def _tell(self, error: Exception) -> None:
        for sample in self._pending.values():
            sample.flag.is_set = True
            sample.answer(error)
