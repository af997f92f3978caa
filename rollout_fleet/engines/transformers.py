"""The in-process engine: transformers' own ``generate`` on batches of whatever groups are waiting.

One task takes waiting groups, up to a budget of rows, and generates them in one thread, so that the event loop stays
free; it is woken when groups arrive. Weights are swapped between two batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from asyncrl.protocol.errors import DeadlineError, EngineError, WorkerDiedError
from asyncrl.protocol.types import WeightSnapshot
from rollout_fleet.config import Device, RolloutFleetConfig
from rollout_fleet.types import GenerationRequest, GroupOutput

from .base import check_output, check_prompt
from .model_files import read_model_facts
from .transformers_model import AbortFlags, GenerationModel

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class _Waiting:
    """A group that waits for, or is in, a batch."""

    request: GenerationRequest
    output: asyncio.Future[GroupOutput]
    flags: AbortFlags = field(default_factory=AbortFlags)


class TransformersEngine:
    """Implements `Engine` in this process."""

    def __init__(self, config: RolloutFleetConfig, *, model_path: str, device: Device, rank: int, seed: int) -> None:
        """Take the configuration; `start` loads the model."""
        self._config = config
        self._name = f"transformers-{rank}"
        self._facts = read_model_facts(model_path)
        self._model = GenerationModel(
            model_path, facts=self._facts, dtype=config.transformers.dtype, device=device.value, seed=seed
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        self._waiting: list[_Waiting] = []
        self._groups: dict[str, _Waiting] = {}
        self._arrived = asyncio.Event()
        self._idle_model = asyncio.Lock()
        self._runner: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] | None = None
        self._version = 0

    @property
    def version(self) -> int:
        """See `Engine.version`."""
        return self._version

    async def start(self) -> None:
        """See `Engine.start`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await loop.run_in_executor(self._thread, self._model.load)
        except TimeoutError:
            raise DeadlineError(
                f"{self._name} did not load its model within rollout_fleet.start_timeout_s = "
                f"{self._config.start_timeout_s} s"
            ) from None
        self._failed = loop.create_future()
        self._runner = asyncio.create_task(self._run_batches())
        logger.info("%s: up", self._name)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GroupOutput]:
        """See `Engine.generate`."""
        if self._runner is None or self._runner.done():
            raise EngineError(f"{self._name} is not running; start it before it generates")
        if not requests:
            return
        for request in requests:
            check_prompt(request, self._facts.vocab_size)
        groups = [_Waiting(request=request, output=asyncio.get_running_loop().create_future()) for request in requests]
        self._groups.update({group.request.rid: group for group in groups})
        self._waiting.extend(groups)
        self._arrived.set()
        try:
            async with asyncio.timeout(self._config.generate_timeout_s):
                for finished in asyncio.as_completed([group.output for group in groups]):
                    yield await finished
        except TimeoutError:
            raise DeadlineError(
                f"{self._name} did not answer within rollout_fleet.generate_timeout_s = "
                f"{self._config.generate_timeout_s} s"
            ) from None
        finally:
            for group in groups:
                group.flags.set()
                if self._groups.get(group.request.rid) is group:
                    del self._groups[group.request.rid]

    async def release_memory(self) -> None:
        """See `Engine.release_memory`. The weights are given up, not kept: the next ones replace them anyway."""
        if self._groups:
            raise EngineError(f"{self._name} cannot release its memory while it generates {len(self._groups)} groups")
        async with self._idle_model:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._model.release)
        logger.info("%s: released its weights", self._name)

    async def load_weights(self, snapshot: WeightSnapshot) -> float:
        """See `Engine.load_weights`."""
        try:
            async with asyncio.timeout(self._config.load_timeout_s), self._idle_model:
                started = time.perf_counter()
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self._model.load_weights, snapshot)
                self._version = snapshot.version
                return time.perf_counter() - started
        except TimeoutError:
            raise DeadlineError(
                f"{self._name} did not load policy version {snapshot.version} from {snapshot.path} within "
                f"rollout_fleet.load_timeout_s = {self._config.load_timeout_s} s; the batch before it may be long"
            ) from None

    async def abort(self, rid: str) -> None:
        """See `Engine.abort`."""
        if rid in self._groups:
            self._groups[rid].flags.set()

    async def wait_failed(self) -> None:
        """See `Engine.wait_failed`."""
        if self._failed is None:
            raise WorkerDiedError(f"{self._name} was never started")
        await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        for group in self._groups.values():
            group.flags.set()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner], timeout=self._config.stop_timeout_s)
        if self._failed is not None:
            self._failed.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run_batches(self) -> None:
        """Generate waiting groups, batch after batch."""
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
                        [group.request for group in batch],
                        [group.flags for group in batch],
                        version,
                    )
                except Exception as error:  # noqa: BLE001 - whatever generate raises is the engine's death
                    self._die(error, batch)
                    return
            for group, output in zip(batch, outputs, strict=True):
                self._resolve(group, output, version)

    def _next_batch(self) -> list[_Waiting]:
        """Take the longest-waiting groups that are sampled alike, up to the budget of rows, but one at least."""
        sampling = self._waiting[0].request.sampling
        batch: list[_Waiting] = []
        num_rows = 0
        for group in self._waiting:
            if group.request.sampling != sampling:
                continue
            num_rows += group.request.num_samples
            if batch and num_rows > self._config.transformers.max_rows:
                break
            batch.append(group)
        self._waiting = [group for group in self._waiting if group not in batch]
        if not self._waiting:
            self._arrived.clear()
        return batch

    def _resolve(self, group: _Waiting, output: GroupOutput, version: int) -> None:
        if group.output.done():
            return
        try:
            check_output(output, group.request, vocab_size=self._facts.vocab_size, published={version})
        except EngineError as error:
            group.output.set_exception(error)
        else:
            group.output.set_result(output)

    def _die(self, error: Exception, batch: Sequence[_Waiting]) -> None:
        assert self._failed is not None
        death = WorkerDiedError(f"{self._name} failed while generating {len(batch)} groups: {error!r}")
        death.__cause__ = error
        self._failed.set_exception(death)
        self._failed.exception()
        for group in [*batch, *self._waiting]:
            if not group.output.done():
                group.output.set_exception(death)
                group.output.exception()
