"""The scripted engine: answers, delays and failures from a script, for tests of the code around an engine.

It writes one token at a time, so that aborts and weight loads meet half-written responses, as on a real engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.core.errors import EngineError, RequestRefused, WorkerDiedError
from asyncrl.core.types import FinishReason, WeightOffer

from .engine import EngineFailure, EngineLoad, SampleOutput, SampleRequest


@dataclass(frozen=True, kw_only=True)
class ScriptedAnswer:
    """How the engine answers one request.

    Attributes:
        response: Token ids.
        token_delay_s: Pause before each token.
        logprob: Log-prob of every token.
        cut_off: The engine itself aborts the sample after this many tokens; -1 finishes it.
        error: Refuse the request with this message.
        die: The engine dies of this instead of answering.
    """

    response: Sequence[int] = ()
    token_delay_s: float = 0.0
    logprob: float = -1.0
    cut_off: int = -1
    error: str = ""
    die: str = ""


Script = Callable[[SampleRequest, int], ScriptedAnswer]


def repeat_last_token(request: SampleRequest, version: int) -> ScriptedAnswer:
    """Answer with the prompt's last token, once."""
    return ScriptedAnswer(response=[int(request.prompt_ids[-1])])


class ScriptedEngine:
    """Implements `Engine` by a script, called with each request and the version served at its arrival.

    Attributes:
        requests: All requests so far.
        running_at_once: The most requests that ran at the same time.
        num_slots: Samples from which the reported load is full, although all are written; 0 for no limit.
        released: Whether the memory is released now.
        load_delay_s: How long a weight load takes.
        load_error: Fail the next weight load with this message.
    """

    def __init__(self, script: Script = repeat_last_token) -> None:
        self._script = script
        self._version = 0
        self._aborted: set[str] = set()
        self._running: set[str] = set()
        self._written: dict[str, tuple[ScriptedAnswer, Sequence[int]]] = {}
        self._waiting_for_answers: set[asyncio.Queue[Any]] = set()
        self._failure = EngineFailure("the scripted engine", tell=self._tell)
        self.requests: list[SampleRequest] = []
        self.running_at_once = 0
        self.num_slots = 0
        self.released = False
        self.load_delay_s = 0.0
        self.load_error = ""

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
        self._failure.begin()

    async def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[tuple[SampleRequest, SampleOutput]]:
        """See `Engine.generate`."""
        if self.released:
            raise EngineError("requests came while the memory was released")
        self._failure.check()
        self.requests.extend(requests)
        answers: asyncio.Queue[tuple[SampleRequest, SampleOutput] | Exception] = asyncio.Queue()
        self._waiting_for_answers.add(answers)
        tasks = [asyncio.create_task(self._answer(request, answers)) for request in requests]
        running = {request.id: request for request in requests}
        try:
            while running:
                finished = await answers.get()
                if isinstance(finished, Exception):
                    if self.has_failed:
                        for request in running.values():
                            yield request, self._so_far(request)
                    raise finished
                del running[finished[0].id]
                self._written.pop(finished[0].id, None)
                yield finished
        finally:
            self._waiting_for_answers.remove(answers)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for request in requests:
                self._written.pop(request.id, None)

    async def release_memory(self) -> None:
        """See `Engine.release_memory`."""
        if self._running:
            raise EngineError(f"memory was released while {sorted(self._running)} ran")
        self.released = True

    async def load_weights(self, offer: WeightOffer) -> float:
        """See `Engine.load_weights`."""
        started = time.perf_counter()
        self.released = False
        await asyncio.sleep(self.load_delay_s)
        if self.load_error:
            raise self.fail(EngineError(self.load_error))
        self._version = offer.version
        return time.perf_counter() - started

    async def abort(self, request_ids: Collection[str]) -> None:
        """See `Engine.abort`."""
        self._aborted |= self._running.intersection(request_ids)

    def num_written(self, request_ids: Collection[str]) -> int:
        """See `Engine.num_written`."""
        return sum(len(self._written[request_id][1]) for request_id in request_ids if request_id in self._written)

    async def read_load(self) -> EngineLoad:
        """See `Engine.read_load`. Samples beyond ``num_slots`` count as waiting."""
        num_running = min(len(self._running), self.num_slots or len(self._running))
        return EngineLoad(num_running=num_running, num_waiting=len(self._running) - num_running, cache_use=0.0)

    async def wait_failed(self) -> None:
        """See `Engine.wait_failed`."""
        await self._failure.wait()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        self._failure.end()

    def die(self, cause: str) -> Exception:
        """Die now, as a killed server does."""
        return self.fail(WorkerDiedError(f"the scripted engine died: {cause}"))

    def fail(self, error: Exception) -> Exception:
        """Fail now, for good; returns the failure."""
        self._failure.fail(error)
        return error

    def _so_far(self, request: SampleRequest) -> SampleOutput:
        answer, versions = self._written.get(request.id, (ScriptedAnswer(), ()))
        return _output(answer, versions, is_whole=False)

    def _tell(self, error: Exception) -> None:
        for answers in self._waiting_for_answers:
            answers.put_nowait(error)

    async def _answer(self, request: SampleRequest, answers: asyncio.Queue[Any]) -> None:
        """Write a sample and put it, or its error, into ``answers``."""
        answer = self._script(request, self._version)
        self._running.add(request.id)
        self.running_at_once = max(self.running_at_once, len(self._running))
        try:
            answers.put_nowait((request, await self._write(request, answer)))
        except Exception as error:  # noqa: BLE001 - `generate` raises it
            answers.put_nowait(error)
        finally:
            self._running.discard(request.id)
            self._aborted.discard(request.id)

    async def _write(self, request: SampleRequest, answer: ScriptedAnswer) -> SampleOutput:
        """Write the sample token by token; a late token does not delay later ones."""
        versions: list[int] = []
        self._written[request.id] = answer, versions
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in answer.response:
            due += answer.token_delay_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._failure.check()
            if request.id in self._aborted or len(versions) == answer.cut_off:
                break
            versions.append(self._version)
            if len(versions) == 1 and request.on_first_token is not None:
                request.on_first_token()
        if answer.die:
            raise self.die(answer.die)
        if answer.error:
            raise RequestRefused(f"request {request.id}: {answer.error}")
        return _output(answer, versions, is_whole=len(versions) == len(answer.response))


def _output(answer: ScriptedAnswer, versions: Sequence[int], *, is_whole: bool) -> SampleOutput:
    return SampleOutput(
        token_ids=np.asarray(answer.response[: len(versions)], dtype=np.int32),
        logprobs=np.full(len(versions), answer.logprob, dtype=np.float32),
        versions=np.asarray(versions, dtype=np.int32),
        finish_reason=FinishReason.stop if is_whole else None,
    )
