"""The scripted engine: answers, delays and failures from a script, for tests of everything around an engine.

It writes one token at a time, so that an abort or a weight load finds responses half written, as on a real engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.protocol.errors import EngineError, WorkerDiedError
from asyncrl.protocol.types import FinishReason, WeightSnapshot
from rollout_fleet.types import GenerationRequest, GroupOutput, SampleOutput


@dataclass(frozen=True, kw_only=True)
class ScriptedAnswer:
    """How the engine answers one request.

    Attributes:
        responses: Token ids of each sample.
        token_delay_s: Pause before each token of the group.
        logprob: Log-prob of every token.
        error: Refuse the request with this message.
        die: The engine dies of this instead of answering.
    """

    responses: Sequence[Sequence[int]] = ()
    token_delay_s: float = 0.0
    logprob: float = -1.0
    error: str = ""
    die: str = ""


Script = Callable[[GenerationRequest, int], ScriptedAnswer]


def repeat_last_token(request: GenerationRequest, version: int) -> ScriptedAnswer:
    """Answer every sample with the prompt's last token, once."""
    return ScriptedAnswer(responses=[[int(request.prompt_ids[-1])]] * request.num_samples)


class ScriptedEngine:
    """Implements `Engine` by a script."""

    def __init__(self, script: Script = repeat_last_token, *, load_delay_s: float = 0.0) -> None:
        """Take the script.

        Args:
            script: Called with each request and the version served when it arrives.
            load_delay_s: How long a weight load takes.
        """
        self._script = script
        self._load_delay_s = load_delay_s
        self._version = 0
        self._aborted: set[str] = set()
        self._running: set[str] = set()
        self._death: asyncio.Future[None] | None = None
        self.requests: list[GenerationRequest] = []
        self.running_at_once = 0
        self.released = False

    @property
    def version(self) -> int:
        """See `Engine.version`."""
        return self._version

    async def start(self) -> None:
        """See `Engine.start`."""
        self._death = asyncio.get_running_loop().create_future()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GroupOutput]:
        """See `Engine.generate`."""
        if self.released:
            raise EngineError("requests came while the memory was released")
        for request in requests:
            if request.prefixes:
                raise EngineError(f"request {request.rid} has prefixes, which no script continues")
        self.requests.extend(requests)
        tasks = [asyncio.create_task(self._answer(request)) for request in requests]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def release_memory(self) -> None:
        """See `Engine.release_memory`."""
        if self._running:
            raise EngineError(f"memory was released while {sorted(self._running)} ran")
        self.released = True

    async def load_weights(self, snapshot: WeightSnapshot) -> float:
        """See `Engine.load_weights`."""
        started = time.perf_counter()
        self.released = False
        await asyncio.sleep(self._load_delay_s)
        self._version = snapshot.version
        return time.perf_counter() - started

    async def abort(self, rid: str) -> None:
        """See `Engine.abort`."""
        if rid in self._running:
            self._aborted.add(rid)

    async def wait_failed(self) -> None:
        """See `Engine.wait_failed`."""
        if self._death is None:
            raise WorkerDiedError("the scripted engine was never started")
        await asyncio.shield(self._death)

    async def stop(self) -> None:
        """See `Engine.stop`."""
        if self._death is not None:
            self._death.cancel()

    def die(self, cause: str) -> WorkerDiedError:
        """Die now, as a killed server would."""
        death = WorkerDiedError(f"the scripted engine died: {cause}")
        if self._death is not None and not self._death.done():
            self._death.set_exception(death)
            self._death.exception()
        return death

    async def _answer(self, request: GenerationRequest) -> GroupOutput:
        answer = self._script(request, self._version)
        self._running.add(request.rid)
        self.running_at_once = max(self.running_at_once, len(self._running))
        try:
            return await self._write(request, answer)
        finally:
            self._running.discard(request.rid)
            self._aborted.discard(request.rid)

    async def _write(self, request: GenerationRequest, answer: ScriptedAnswer) -> GroupOutput:
        """Write the samples side by side, a token each at a time."""
        versions: list[int] = []
        for _ in range(max((len(response) for response in answer.responses), default=0)):
            await asyncio.sleep(answer.token_delay_s)
            if request.rid in self._aborted:
                break
            versions.append(self._version)
        if answer.die:
            raise self.die(answer.die)
        if answer.error:
            raise EngineError(f"request {request.rid}: {answer.error}")
        samples = tuple(_sample(response, versions, answer.logprob) for response in answer.responses)
        return GroupOutput(rid=request.rid, samples=samples)


def _sample(response: Sequence[int], versions: Sequence[int], logprob: float) -> SampleOutput:
    """Return ``response`` as far as it was written; one version for each written token."""
    written = list(response[: len(versions)])
    return SampleOutput(
        token_ids=np.asarray(written, dtype=np.int32),
        logprobs=np.full(len(written), logprob, dtype=np.float32),
        versions=np.asarray(versions[: len(written)], dtype=np.int32),
        finish_reason=FinishReason.stop if len(written) == len(response) else None,
    )
