"""An engine for tests. Its answers, delays and failures come from a script."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.core.errors import EngineError, RequestRefused, WorkerDiedError
from asyncrl.core.types import FinishReason, WeightOffer
from rollout_fleet.config import SamplingConfig

from .engine import Answers, Engine, EngineLoad, RunningSample, SampleOutput, SampleRequest


@dataclass(frozen=True, kw_only=True)
class ScriptedAnswer:
    """The script of one answer.

    Attributes:
        response: Token ids of the answer.
        token_delay_s: Pause before each token, in seconds.
        logprob: Log-prob of every token.
        cut_off: Number of tokens after which the engine aborts the answer; -1 lets the answer finish.
        error: If not empty, the engine refuses the request with this message.
        die: If not empty, the engine fails with this message instead of an answer.
    """

    response: Sequence[int] = ()
    token_delay_s: float = 0.0
    logprob: float = -1.0
    cut_off: int = -1
    error: str = ""
    die: str = ""


Script = Callable[[SampleRequest, int], ScriptedAnswer]


def repeat_last_token(request: SampleRequest, version: int) -> ScriptedAnswer:
    """Answer each request with one token: the last token of its prompt. ``version`` is not used."""
    return ScriptedAnswer(response=[int(request.prompt_ids[-1])])


class _ScriptedSample(RunningSample):
    def __init__(self, request: SampleRequest, version: int = 0) -> None:
        super().__init__(request, version)
        self.answer = ScriptedAnswer()
        self.versions: list[int] = []

    def so_far(self, finish_reason: FinishReason | None = None) -> SampleOutput:
        return SampleOutput(
            token_ids=np.asarray(self.answer.response[: self.num_tokens], dtype=np.int32),
            logprobs=np.full(self.num_tokens, self.answer.logprob, dtype=np.float32),
            versions=np.asarray(self.versions, dtype=np.int32),
            finish_reason=finish_reason,
        )


class ScriptedEngine(Engine):
    """An engine that gets each answer from a script, a function of the request and the policy version.

    A response ends at a stop token or stop text of its request. ``decode`` converts tokens to text to find stop texts.

    Attributes:
        requests: All requests that the engine has got so far.
        running_at_once: Largest number of requests that ran at the same time.
        num_slots: `read_load` reports running samples above this number as waiting. 0: no limit.
        released: Whether `release_memory` was called since the last weight load.
        load_delay_s: Seconds that a weight load takes.
        load_error: If not empty, weight loads fail with this message.
    """

    sample_type = _ScriptedSample

    def __init__(
        self, script: Script = repeat_last_token, *, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        super().__init__("the scripted engine", vocab_size=1 << 31, silence_timeout_s=math.inf)
        self._script = script
        self._decode = decode
        self.requests: list[SampleRequest] = []
        self.running_at_once = 0
        self.num_slots = 0
        self.released = False
        self.load_delay_s = 0.0
        self.load_error = ""

    async def start(self) -> None:
        """Mark the engine as running (`Engine.start`)."""
        self._come_up()

    async def release_memory(self) -> None:
        """Set `released` to true until the next `load_weights`. Raises `EngineError` if requests run."""
        if self._running:
            raise EngineError(f"the memory was released while the requests {sorted(self._running)} ran")
        self.released = True

    async def load_weights(self, offer: WeightOffer) -> float:
        """Wait for ``load_delay_s`` seconds, then serve the offered version. Returns the duration in seconds.

        If ``load_error`` is not empty, the engine fails, and an `EngineError` with this text is raised.
        """
        started = time.perf_counter()
        self.released = False
        await asyncio.sleep(self.load_delay_s)
        if self.load_error:
            raise self.fail(EngineError(self.load_error))
        self._version = offer.version
        self._verified.add(offer.version)
        return time.perf_counter() - started

    async def read_load(self) -> EngineLoad:
        """Report at most ``num_slots`` of the running requests as running, and the other requests as waiting."""
        num_running = min(len(self._running), self.num_slots or len(self._running))
        return EngineLoad(num_running=num_running, num_waiting=len(self._running) - num_running, cache_use=0.0)

    async def stop(self) -> None:
        """Stop the engine (`Engine.stop`)."""
        self._go_down()

    def die(self, cause: str) -> Exception:
        """Make the engine fail now, like a killed server. Returns the failure, a `WorkerDiedError` with ``cause``."""
        return self.fail(WorkerDiedError(f"the scripted engine died: {cause}"))

    def _begin(self, samples: Sequence[_ScriptedSample], answers: Answers) -> list[asyncio.Task[None]]:
        if self.released:
            raise EngineError("requests arrived while the memory was released")
        self.requests += [sample.request for sample in samples]
        self.running_at_once = max(self.running_at_once, len(self._running))
        return [asyncio.create_task(self._answer(sample, answers)) for sample in samples]

    async def _answer(self, sample: _ScriptedSample, answers: Answers) -> None:
        try:
            answer = self._script(sample.request, self._version)
            sample.answer = replace(answer, response=self._until_stop(answer.response, sample.request))
            answers.put_nowait([(sample.request, await self._write(sample))])
        except Exception as error:  # noqa: BLE001 - `generate` raises the error
            answers.put_nowait(error)

    def _check_sampling(self, sampling: SamplingConfig) -> None:
        super()._check_sampling(sampling)
        if sampling.stop and self._decode is None:
            raise RequestRefused(f"{self._name} needs `decode` for stop texts, got stop={list(sampling.stop)}")

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """Return a function that decodes token ids to text with special tokens (`Engine.decoder`)."""
        assert self._decode is not None, "`_check_sampling` refuses stop texts otherwise"
        return self._decode

    def _until_stop(self, response: Sequence[int], request: SampleRequest) -> Sequence[int]:
        sampling = request.sampling
        for length, token in enumerate(response, start=1):
            text = self._decode(response[:length]) if sampling.stop and self._decode else ""
            if token in sampling.stop_token_ids or any(stop in text for stop in sampling.stop):
                return response[:length]
        return response

    async def _write(self, sample: _ScriptedSample) -> SampleOutput:
        """Write the sample token by token. A late token does not delay the later tokens."""
        answer, loop = sample.answer, asyncio.get_running_loop()
        due = loop.time()
        for _ in answer.response:
            due += answer.token_delay_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            self._check_up()
            if sample.is_aborted or sample.num_tokens == answer.cut_off:
                break
            sample.versions.append(self._version)
            sample.num_tokens += 1
            if sample.num_tokens == 1 and sample.request.on_first_token is not None:
                sample.request.on_first_token()
        if answer.die:
            raise self.die(answer.die)
        if answer.error:
            raise RequestRefused(f"request {sample.request.id}: {answer.error}")
        return sample.so_far(FinishReason.stop if sample.num_tokens == len(answer.response) else None)
