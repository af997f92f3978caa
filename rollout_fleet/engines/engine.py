"""The engine port: what a rollout worker and its inference engine say to each other, and the checks of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from asyncrl.protocol.errors import DeadlineError, EngineError
from asyncrl.protocol.types import FinishReason
from asyncrl.protocol.weights import WeightOffer
from rollout_fleet.config import SamplingConfig

LOGPROB_ROUNDING = 1e-4
SLOWEST_LOAD = 1e8  # bytes per second of a load, on top of which its deadline stands
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One response for the engine to sample.

    A response that was begun before, by another worker or before a weight update, is continued by an ordinary request:
    its prompt ends with the tokens written so far.

    Attributes:
        id: Unique among the engine's running requests; holds no ``/``. Example: ``"4711-0-3-0"``.
        prompt_ids: [P] int32 token ids.
        sampling: How to sample; behaviour log-probs are taken under its temperature.
    """

    id: str
    prompt_ids: np.ndarray
    sampling: SamplingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutput:
    """One sampled response of R tokens; the end-of-sequence token, where sampled, is its last.

    Attributes:
        token_ids: [R] int32.
        logprobs: [R] float32, log-prob under the sampling temperature, before top-p and top-k.
        versions: [R] int32, policy version that the engine reported for each token.
        finish_reason: None when the sample was aborted; then R may be 0.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None


class Engine(Protocol):
    """An inference engine that serves one policy version at a time.

    The unit is a sample. Requests that are given together may travel together, but each answer is yielded as soon as
    its sample is finished. An engine fails once and for good: by its death, by silence while requests run, or because
    weights could not be loaded and verified. From then on every call raises its failure.
    """

    @property
    def version(self) -> int:
        """Policy version that newly sampled tokens carry."""
        ...

    async def start(self) -> None:
        """Bring the engine up on the weights of version 0; returns when it can generate.

        Raises:
            DeadlineError: it was not up in time.
            WorkerDiedError: it ended while starting; the message ends with its log.
        """
        ...

    def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[tuple[SampleRequest, SampleOutput]]:
        """Sample responses; yields each request with its answer when the sample is finished or aborted, in any order.

        Raises:
            EngineError: a request was refused, or an answer broke the contract.
            DeadlineError: no running request received a token within ``silence_timeout_s``.
            WorkerDiedError: the engine died.
        """
        ...

    async def load_weights(self, offer: WeightOffer) -> float:
        """Serve the offered weights from the next token on; running requests go on under them where the engine can.

        Returns:
            Seconds for which generation stood still.

        Raises:
            EngineError: the engine refused the weights, or holds others than were published. It has failed.
            DeadlineError: the load took longer than ``load_timeout_s`` and a second per 100 MB, not counting what it
                waited for running requests. The engine has failed.
        """
        ...

    async def release_memory(self) -> None:
        """Give the device up to whoever shares it; nothing may be running. The next `load_weights` takes it back.

        Raises:
            EngineError: the engine refused, or is generating.
            DeadlineError: it took longer than ``load_timeout_s``.
        """
        ...

    async def abort(self, request_ids: Collection[str]) -> None:
        """Cut running requests off; their answers arrive as aborted. Unknown ids are ignored."""
        ...

    async def wait_failed(self) -> None:
        """Wait for the engine to fail; never returns.

        Raises:
            AsyncRLError: its failure; the message ends with the last lines of its log where it has one.
        """
        ...

    async def stop(self) -> None:
        """Stop the engine and free its process, port and memory. May be called at any time, more than once."""
        ...


class EngineFailure:
    """The failure of an engine: the first one, which all who wait for it or ask something later are given."""

    def __init__(self, name: str, *, tell: Callable[[Exception], None], log_tail: Callable[[], str] = str) -> None:
        """Begin with an engine that is not started.

        Args:
            name: The engine, for messages.
            tell: Hands the failure to those who wait for answers.
            log_tail: Returns the end of the engine's log, for messages.
        """
        self._name = name
        self._tell = tell
        self._log_tail = log_tail
        self._future: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """The engine is started."""
        self._future = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """The engine is stopped."""
        if self._future is not None:
            self._future.cancel()

    @property
    def has_come(self) -> bool:
        """Whether the engine has failed."""
        return self._future is not None and self._future.done()

    def fail(self, error: Exception) -> None:
        """Fail for good, unless the engine has failed or was stopped before."""
        assert self._future is not None
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks it as retrieved; not everyone waits for it
            self._tell(error)

    def check(self) -> None:
        """Raise the failure, if there is one, or that the engine does not run."""
        if self._future is None or self._future.cancelled():
            raise EngineError(f"{self._name} is not running; start it before it is asked anything")
        if self._future.done():
            self._future.result()

    async def wait(self) -> None:
        """See `Engine.wait_failed`."""
        if self._future is None:
            raise EngineError(f"{self._name} was never started")
        await asyncio.shield(self._future)

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns; a failure of the engine cancels it and is raised instead."""
        doing, failing = asyncio.create_task(work), asyncio.create_task(self.wait())
        try:
            await asyncio.wait({doing, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self.check()
            return await doing
        finally:
            for task in (doing, failing):
                task.cancel()
            await asyncio.gather(doing, failing, return_exceptions=True)

    @asynccontextmanager
    async def deadline(self, what: str, timeout_s: float, option: str, *, num_bytes: int = 0) -> AsyncIterator[None]:
        """Bound the block; a message says that the engine did not do ``what`` in time, and ends with its log.

        Raises:
            DeadlineError: the block took longer than ``timeout_s``, which ``rollout_fleet.<option>`` sets, and the time
                that ``num_bytes`` may take.
        """
        seconds = timeout_s + num_bytes / SLOWEST_LOAD
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            limit = f"rollout_fleet.{option} = {timeout_s:g} s"
            if num_bytes > SLOWEST_LOAD:
                limit += f" and {seconds - timeout_s:.0f} s for {num_bytes / 1e6:.0f} MB"
            raise DeadlineError(f"{self._name} did not {what} within {limit}. {self._log_tail()}".rstrip()) from None

    @asynccontextmanager
    async def if_load_fails(self, offer: WeightOffer, timeout_s: float) -> AsyncIterator[None]:
        """Load weights inside the block; whatever ends it early is the engine's failure.

        The block may take ``timeout_s`` and a second per 100 MB of weights.
        """
        what = f"load policy version {offer.version}"
        try:
            what_from = f"{what} from {offer.manifest}"
            async with self.deadline(what_from, timeout_s, "load_timeout_s", num_bytes=offer.num_bytes):
                yield
        except Exception as error:
            self.fail(error)
            raise
        except asyncio.CancelledError:
            self.fail(EngineError(f"{self._name} was told to {what}, and the load was cancelled"))
            raise


def check_prompt(request: SampleRequest, vocab_size: int) -> None:
    """Refuse a prompt that would kill an engine.

    Raises:
        EngineError: the prompt is empty, or holds a token id outside the vocabulary.
    """
    if len(request.prompt_ids) == 0:
        raise EngineError(f"request {request.id} has an empty prompt; a prompt needs at least one token")
    low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"request {request.id}: prompt token ids must be in 0..{vocab_size - 1}, got {low}..{high}; "
            "the prompts were tokenized with another model's tokenizer"
        )


def check_output(
    output: SampleOutput, request: SampleRequest, *, vocab_size: int, loaded_versions: Collection[int]
) -> None:
    """Refuse an answer that breaks the engine's contract.

    Args:
        output: The answer.
        request: What was asked.
        vocab_size: Token ids are below it.
        loaded_versions: Versions that the engine has loaded and verified.

    Raises:
        EngineError: lengths disagree, a finished response is empty, an id is outside the vocabulary, a log-prob is not
            a number <= 0, or a token names a version that was never loaded and verified.
    """
    where = f"request {request.id}"
    lengths = (len(output.token_ids), len(output.logprobs), len(output.versions))
    if len(set(lengths)) != 1:
        raise EngineError(f"{where}: token ids, log-probs and versions must agree in length, got {lengths}")
    if lengths[0] == 0:
        if output.finish_reason is not None:
            raise EngineError(f"{where}: the engine finished ({output.finish_reason}) without a single token")
        return
    low, high = int(output.token_ids.min()), int(output.token_ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(f"{where}: sampled ids must be in 0..{vocab_size - 1}, got {low}..{high}")
    if not (output.logprobs <= LOGPROB_ROUNDING).all():
        raise EngineError(f"{where}: log-probs must be numbers <= 0, got a largest of {output.logprobs.max()}")
    unknown = set(output.versions.tolist()).difference(loaded_versions)
    if unknown:
        raise EngineError(
            f"{where}: the engine reports policy versions {sorted(unknown)}, which it never loaded and verified"
        )
