"""The interface between a rollout worker and its inference engine, and the code that all engines share."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from asyncrl.core import record
from asyncrl.core.errors import AsyncRLError, DeadlineError, EngineError, RequestRefused
from asyncrl.core.image_files import VISION_FAMILIES, is_vision_model, placeholder_ids
from asyncrl.core.images import PlacedImage
from asyncrl.core.model_config import model_settings
from asyncrl.core.record import SpanKind
from asyncrl.core.stacks import missed
from asyncrl.core.trajectory import Turn
from asyncrl.core.types import FinishReason, WeightOffer
from asyncrl.weights.carriers import SLOWEST_LOAD, load_limit_s
from rollout_fleet.config import SamplingConfig

LOGPROB_ROUNDING = 1e-4
PROBE_SHARE = 0.25  # the probe of a silent engine may last for this fraction of `silence_timeout_s`
MAX_SILENT_PERIODS = 3
STREAM_END_S = 1.0  # an HTTP stream must end within this number of seconds after its last sample
TAIL_TOKENS = 8
"""To find a stop text of c characters, the newest c + `TAIL_TOKENS` tokens are decoded.

More than c tokens are needed because a character may consist of several tokens.
"""
T = TypeVar("T")
Decode = Callable[[Sequence[int]], str]
"""A function that converts token ids to text."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One response for the engine to sample.

    To continue an unfinished response, send a request with the response's tokens so far at the end of the prompt.

    Attributes:
        id: Must be unique among the engine's running requests, and must not contain ``/``. Example: ``"4711-0-3-0"``.
        prompt_ids: [P] int32 token ids.
        sampling: Sampling options. The returned log-probs are computed at the temperature of these options.
        on_first_token: Function that is called when the first token arrives, on any thread.
        images: The images of the prompt, in the order of their placeholder tokens.
        num_written: Number of tokens at the end of the prompt that belong to the unfinished response.
    """

    id: str
    prompt_ids: np.ndarray
    sampling: SamplingConfig
    on_first_token: Callable[[], None] | None = None
    images: tuple[PlacedImage, ...] = ()
    num_written: int = 0

    @property
    def prompt_key(self) -> bytes:
        """Key that is equal for two requests if and only if their prompt tokens and images are the same."""
        return b"".join([self.prompt_ids.tobytes(), *(placed.image.digest.encode() for placed in self.images)])


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutput:
    """One sampled response of R tokens, including the end-of-sequence token if it was sampled.

    Attributes:
        token_ids: [R] int32.
        logprobs: [R] float32, log-probs at the sampling temperature, without the effect of top-p and top-k.
        versions: [R] int32, policy version of each token.
        finish_reason: Why the response ended; None if the request was aborted. Then R may be 0.
        num_cached: Number of prompt tokens that the engine took from its cache; None if the engine does not report it.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None
    num_cached: int | None = None

    def turn(self, parent: int) -> Turn:
        """Convert the response to a `Turn`, so that the caller can add it to a rollout of several turns.

        ``parent`` is the index of the turn that the response follows; 0 is the prompt.
        """
        return Turn(
            token_ids=self.token_ids,
            parent=parent,
            sampled=True,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=self.finish_reason,
        )


NOTHING = SampleOutput(
    token_ids=np.empty(0, dtype=np.int32),
    logprobs=np.empty(0, dtype=np.float32),
    versions=np.empty(0, dtype=np.int32),
    finish_reason=None,
)
"""The output of a request that was aborted before its first token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """The load that an engine reports.

    Attributes:
        num_running: Samples that are being decoded.
        num_waiting: Samples that wait for room in the engine.
        cache_use: Fraction of the KV cache used by running samples, 0.0 to 1.0. Example: 0.83.
    """

    num_running: int
    num_waiting: int
    cache_use: float


class RunningSample:
    """A running request of an engine.

    Attributes:
        version: Policy version that the engine served when the request arrived.
        num_tokens: Number of tokens sampled so far.
        is_aborted: Whether the request was aborted. The sample then ends with the next token. The generating thread
            reads this field.
    """

    def __init__(self, request: SampleRequest, version: int = 0) -> None:
        self.request = request
        self.version = version
        self.num_tokens = 0
        self.is_aborted = False

    def so_far(self) -> SampleOutput:
        """Return an unfinished sample with those tokens sampled so far whose policy version is already known.

        If the engine fails, all other tokens of the sample are lost. This base class returns no tokens.
        """
        return NOTHING


Answers = asyncio.Queue[list[tuple[SampleRequest, SampleOutput]] | Exception]
"""A queue of the answers to one call of `Engine.generate`. An exception in the queue ends the call."""


class Engine(ABC):
    """An inference engine that serves one policy version at a time.

    One request is one sample. The engine fails in these cases:

    - It dies, or is silent while requests run.
    - It sends an answer that `check_output` refuses.
    - It cannot load and verify weights.

    A failed engine stays failed: every later call raises its first error.

    A subclass calls `_come_up` when the engine can generate, and `_go_down` when the engine is stopped.

    Args:
        name: Name of the engine in messages.
        silence_timeout_s: Seconds in which a running engine must produce a token or answer a probe (`SilenceWatch`).
        log_tail: Function that returns the end of the engine's log, for messages.
        image_token_id: Id of the placeholder token of images; None if the model takes no images.

    Attributes:
        silence: Watches the engine while requests run.
    """

    sample_type: ClassVar[type[RunningSample]] = RunningSample

    def __init__(
        self,
        name: str,
        *,
        vocab_size: int,
        silence_timeout_s: float,
        log_tail: Callable[[], str] = str,
        image_token_id: int | None = None,
    ) -> None:
        self._name = name
        self._image_token_id = image_token_id
        self._vocab_size = vocab_size
        self._log_tail = log_tail
        self.silence = SilenceWatch(name, timeout_s=silence_timeout_s, probe=self._probe)
        self._version = 0
        self._verified = {0}
        self._running: dict[str, RunningSample] = {}
        self._told: set[Answers] = set()
        self._failure: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Policy version of the engine's weights. Each sampled token is labeled with this version."""
        return self._version

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary. Token ids are below this number."""
        return self._vocab_size

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed for good. Answers that arrive after the failure are ignored."""
        return self._failure is not None and self._failure.done() and not self._failure.cancelled()

    @abstractmethod
    async def start(self) -> None:
        """Start the engine with the run's initial weights (version 0), and wait until it can generate.

        Raises `DeadlineError` if the engine cannot generate within ``start_timeout_s``. Raises `WorkerDiedError` with
        the end of the engine's log if the engine's process exits.
        """

    async def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[tuple[SampleRequest, SampleOutput]]:
        """Sample one response per request. Yields (request, response) pairs as the responses end, in any order.

        The response of an aborted request is unfinished: its finish reason is None. If the engine fails, all running
        requests are first yielded as aborted, with the tokens of `RunningSample.so_far`. Then the failure is raised.

        Raises:
            DeadlineError: the engine was silent for too long (`SilenceWatch`).
            WorkerDiedError: the engine died.
            EngineError: `check_output` refused an answer.
            RequestRefused: a request is wrong. The engine has not failed.
        """
        self._check_up()
        for request in {id(request.prompt_ids): request for request in requests}.values():  # each array once
            check_prompt(request, self._vocab_size, self._image_token_id)
        for sampling in {request.sampling for request in requests}:
            self._check_sampling(sampling)
        answers: Answers = asyncio.Queue()
        running = {request.id: self.sample_type(request, self._version) for request in requests}
        self._running |= running
        self._told.add(answers)
        tasks: Sequence[asyncio.Task[None]] = ()
        try:
            with self.silence.running(len(requests)):
                tasks = self._begin(list(running.values()), answers)
                while running:
                    finished = await answers.get()
                    if isinstance(finished, Exception):
                        if self.has_failed:
                            for sample in running.values():
                                yield sample.request, self._kept(sample.request, self._so_far(sample))
                        raise finished
                    for request, output in finished:
                        del running[request.id]
                        self._running.pop(request.id, None)
                        yield request, self._kept(request, output)
            if tasks:
                # Wait for the ends of the HTTP streams. Only then can their connections be reused.
                await asyncio.wait(tasks, timeout=STREAM_END_S)
        finally:
            for request_id, sample in running.items():
                sample.is_aborted = True
                self._running.pop(request_id, None)
            self._told.remove(answers)
            await cancel(tasks)

    def _check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise `RequestRefused` for an unsupported option. By default, a JSON schema is not supported."""
        if sampling.json_schema:
            raise RequestRefused(
                f"{self._name} has no constrained decoding for a JSON schema; use rollout_fleet.engine=sglang, or ask "
                "for JSON in a message"
            )

    @abstractmethod
    def _begin(self, samples: Sequence[Any], answers: Answers) -> Sequence[asyncio.Task[None]]:
        """Begin to sample, and put the results into ``answers``.

        Returns the tasks that sample, if the engine starts any. The caller cancels tasks that still run when the call
        of `generate` ends.
        """

    def _so_far(self, sample: RunningSample) -> SampleOutput:
        output = sample.so_far()
        try:
            check_output(output, sample.request, vocab_size=self._vocab_size, loaded_versions=self._verified)
        except EngineError as error:
            logger.warning("%s: the tokens of a sample are dropped: %s", self._name, error)
            return NOTHING
        return output

    def decoder(self) -> Decode:
        """Return a function that decodes token ids to text with special tokens. Only stop texts need this function."""
        raise NotImplementedError(f"{self._name} must define `decoder` to support stop texts")

    def _kept(self, request: SampleRequest, output: SampleOutput) -> SampleOutput:
        """Return ``output``, the engine's answer to ``request``, without the tokens that must be dropped.

        An aborted sample with a JSON schema loses all tokens, because no request can continue its JSON text.

        After an abort, ``request`` continues a response: its prompt ends with the tokens sampled before the abort. A
        stop text may begin in these tokens and end in ``output``. The engine does not find this stop text, because the
        engine searches only ``output``. So this method cuts ``output`` at the stop text.
        """
        if output.finish_reason is None and request.sampling.json_schema:
            return NOTHING
        if not (request.sampling.stop and request.num_written):
            return output
        num_tail = max(map(len, request.sampling.stop)) + TAIL_TOKENS
        written = request.prompt_ids[-min(request.num_written, num_tail) :].tolist()
        decode, new_ids = self.decoder(), output.token_ids[:num_tail].tolist()

        def is_at_stop(length: int) -> bool:
            text = decode([*written, *new_ids[:length]])
            return any(stop in text for stop in request.sampling.stop)

        if not is_at_stop(len(new_ids)):
            return output
        length = next(length for length in range(len(new_ids) + 1) if is_at_stop(length))
        return _first_tokens(output, length) if length else output

    @abstractmethod
    async def load_weights(self, offer: WeightOffer) -> float:
        """Load the weights that ``offer`` names, and return for how many seconds generation was paused.

        ``offer`` says where the weights of one policy version are. Running requests may continue with the new weights.
        After an error the engine has failed.

        Raises:
            EngineError: the engine refuses the weights, or its weights differ from the published weights.
            DeadlineError: the load takes longer than ``load_timeout_s`` plus one second per 100 MB. The wait for
                running requests does not count.
        """

    @abstractmethod
    async def release_memory(self) -> None:
        """Free the engine's memory on the device, so that the learner can use it.

        The engine cannot generate until the next `load_weights`, which allocates the memory again.

        Raises `EngineError` if the engine refuses or is generating, and `DeadlineError` after ``load_timeout_s``.
        """

    async def abort(self, request_ids: Collection[str]) -> None:
        """Abort the running requests with these ids. `generate` then yields them with the tokens sampled so far.

        Ids that belong to no running request are ignored.
        """
        for request_id in self._running.keys() & request_ids:
            self._running[request_id].is_aborted = True

    def num_written(self, request_ids: Collection[str]) -> int:
        """Return the total number of tokens sampled so far for the running requests with these ids.

        Other ids are ignored.
        """
        return sum(self._running[request_id].num_tokens for request_id in self._running.keys() & request_ids)

    @abstractmethod
    async def read_load(self) -> EngineLoad:
        """Return how many samples run and wait in the engine, and how full its KV cache is.

        Raises `EngineError` if the engine does not report these numbers or cannot be reached.
        """

    async def wait_failed(self) -> None:
        """Wait until the engine fails, and raise the exception that made it fail."""
        if self._failure is None:
            raise EngineError(f"{self._name} was never started")
        await asyncio.shield(self._failure)

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` and return its result. If the engine fails first, cancel ``work`` and raise the failure."""
        doing, failing = asyncio.create_task(work), asyncio.create_task(self.wait_failed())
        try:
            await asyncio.wait({doing, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                self._check_up()
            return await doing
        finally:
            await cancel((doing, failing))

    def fail(self, error: Exception) -> Exception:
        """Mark the engine as failed by ``error``, and return ``error``.

        All running calls raise ``error``. If the engine has already failed or stopped, this method changes nothing.
        """
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()
            for sample in self._running.values():
                sample.is_aborted = True
            for answers in self._told:
                answers.put_nowait(error)
        return error

    @abstractmethod
    async def stop(self) -> None:
        """Stop the engine, and free its process, port and memory. May be called at any time, and more than once."""

    def _come_up(self, *failures: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Mark the engine as running, and begin to watch for its failures.

        Each of ``failures`` is a function that waits for one kind of failure and then raises an exception. The first
        exception makes the engine fail.
        """
        self._failure = asyncio.get_running_loop().create_future()
        if failures:
            self._watching = asyncio.create_task(self._watch(failures))

    def _go_down(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._failure is not None:
            self._failure.cancel()

    def _check_up(self) -> None:
        if self._failure is None or self._failure.cancelled():
            raise EngineError(f"{self._name} is not running; await start() first")
        if self._failure.done():
            self._failure.result()

    async def _watch(self, failures: Sequence[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
        watches = [asyncio.create_task(failure()) for failure in failures]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            error = done.pop().exception()
            if isinstance(error, DeadlineError) and (log := self._log_tail()):
                error = type(error)(f"{error}. {log}")
            if not isinstance(error, Exception):
                error = EngineError(f"{self._name} stopped being watched: {error!r}")
            self.fail(error)
        finally:
            await cancel(watches)

    async def _probe(self) -> None:
        """Ask the engine for a sign that it works, and wait for this sign. This base class waits forever."""
        await asyncio.Event().wait()

    @asynccontextmanager
    async def _deadline(
        self, what: str, timeout_s: float, option: str, *, num_bytes: int = 0, spent_s: float = 0.0
    ) -> AsyncIterator[None]:
        """Raise `DeadlineError` if the body of the ``async with`` statement takes too long.

        The limit in seconds is ``timeout_s`` plus the time to load ``num_bytes``, minus the seconds ``spent_s`` that
        have already passed. The error names the operation ``what`` (example: ``load its model``) and the option of
        ``rollout_fleet`` that sets ``timeout_s``.
        """
        seconds = load_limit_s(timeout_s, num_bytes)
        try:
            async with asyncio.timeout(seconds - spent_s):
                yield
        except TimeoutError:
            limit = f"rollout_fleet.{option} = {timeout_s:g} s"
            if num_bytes > SLOWEST_LOAD:
                limit += f" and {seconds - timeout_s:.0f} s for {num_bytes / 1e6:.0f} MB"
            raise missed(f"{self._name} did not {what} within {limit}", f". {self._log_tail()}".rstrip()) from None

    @asynccontextmanager
    async def _loading(self, offer: WeightOffer, timeout_s: float) -> AsyncIterator[None]:
        """Set a deadline for the body of the ``async with`` statement, which loads the weights of ``offer``.

        If the body raises an error, is cancelled or misses the deadline, the engine fails.
        """
        what = f"load policy version {offer.version}"
        try:
            what_from = f"{what} from {offer.manifest}"
            async with self._deadline(what_from, timeout_s, "load_timeout_s", num_bytes=offer.num_bytes):
                yield
        except Exception as error:
            self.fail(error)
            raise
        except asyncio.CancelledError:
            self.fail(EngineError(f"{self._name} has failed, because its call to {what} was cancelled"))
            raise


def _first_tokens(output: SampleOutput, length: int) -> SampleOutput:
    """Return the first ``length`` tokens of a sample, with the finish reason ``stop``."""
    return replace(
        output,
        token_ids=output.token_ids[:length],
        logprobs=output.logprobs[:length],
        versions=output.versions[:length],
        finish_reason=FinishReason.stop,
    )


async def cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Properties of a model, read from its folder in Hugging Face layout.

    Attributes:
        vocab_size: Rows of the embedding; token ids are below this number.
        eos_ids: Ids of the tokens that end a response. For a model with images, also the placeholders of images and
            videos, because no engine could continue a response after a sampled placeholder.
        pad_id: Id of the padding token. If the model has none: the first of ``eos_ids``, or 0.
        head_dim: Size of an attention head; 0 if heads differ in size.
        image_token_id: Id of the placeholder token of images; None if the learner does not train this model on images.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    pad_id: int
    head_dim: int
    image_token_id: int | None = None


def read_model_facts(model_path: str) -> ModelFacts:
    """Read the vocabulary size, special tokens and head size of a model from its configuration files.

    Raises `ValueError` if the folder ``model_path`` has no model in Hugging Face layout.
    """
    config_file = Path(model_path) / "config.json"
    if not config_file.is_file():
        raise ValueError(f"model path must hold a config.json in Hugging Face layout, got {model_path!r}")
    config = model_settings(model_path)
    generation_file = Path(model_path) / "generation_config.json"
    generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    if not isinstance(config.get("vocab_size"), int):
        raise ValueError(f"{config_file} must name an integer vocab_size, got {config.get('vocab_size')!r}")

    def ids_of(name: str) -> tuple[int, ...]:
        value = generation.get(name, config.get(name))
        return () if value is None else tuple(value) if isinstance(value, list) else (value,)

    eos_ids = ids_of("eos_token_id")
    pad_id = (*ids_of("pad_token_id"), *eos_ids, 0)[0]
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)
    if config.get("v_head_dim") or config.get("kv_lora_rank"):
        head_dim = 0
    placeholders = placeholder_ids(model_path) if is_vision_model(model_path) else ()
    return ModelFacts(
        vocab_size=config["vocab_size"],
        eos_ids=(*eos_ids, *placeholders),
        pad_id=pad_id,
        head_dim=head_dim,
        image_token_id=placeholders[0] if placeholders else None,
    )


def load_decoder(model_path: str, *, special_tokens: bool = False) -> Decode:
    """Load the tokenizer of the model folder ``model_path``, and return a function that decodes token ids to text.

    With ``special_tokens``, the text includes special tokens. Raises `ValueError` with the file's name if
    ``tokenizer.json`` is damaged.
    """
    tokenizer_file = Path(model_path) / "tokenizer.json"
    if tokenizer_file.is_file():
        from tokenizers import Tokenizer

        try:
            fast = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library `tokenizers` raises only plain `Exception`
            raise ValueError(
                f"{tokenizer_file} must be a tokenizer, got {error}; restore the file from a copy"
            ) from error
        return lambda token_ids: fast.decode(list(token_ids), skip_special_tokens=not special_tokens)
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(model_path)
    return lambda token_ids: slow.decode(list(token_ids), skip_special_tokens=not special_tokens)


def check_prompt(request: SampleRequest, vocab_size: int, image_token_id: int | None = None) -> None:
    """Check that a request's prompt cannot crash an engine, and raise `RequestRefused` if it could.

    The prompt must have a token, and all ids must be below ``vocab_size``. Exactly the positions of the request's
    images must hold the image placeholder ``image_token_id``; None means that the model takes no images.
    """
    if len(request.prompt_ids) == 0:
        raise RequestRefused(f"request {request.id} has an empty prompt; a prompt needs at least one token")
    if not _in_vocabulary(request.prompt_ids, vocab_size):
        raise RequestRefused(
            f"request {request.id}: prompt token ids must be in 0..{vocab_size - 1}, got {_range(request.prompt_ids)}; "
            "the prompts were tokenized with another model's tokenizer"
        )
    if image_token_id is not None or request.images:
        _check_images(request, image_token_id)


def _check_images(request: SampleRequest, image_token_id: int | None) -> None:
    if image_token_id is None:
        raise RequestRefused(
            f"request {request.id} has {len(request.images)} images, but the learner does not train this model on "
            f"images; use a model of the families {', '.join(VISION_FAMILIES)}"
        )
    is_placeholder = request.prompt_ids == image_token_id
    is_image = np.zeros(len(request.prompt_ids), dtype=bool)
    for placed in request.images:
        is_image[placed.offset : placed.end] = True
    if not np.array_equal(is_placeholder, is_image) or is_placeholder[-1]:
        odd = np.flatnonzero(is_placeholder != is_image)
        raise RequestRefused(
            f"request {request.id}: each image placeholder (token {image_token_id}) in the prompt must belong to one "
            f"of the {len(request.images)} images, and must not end the prompt; placeholders and images differ at "
            f"positions {odd.tolist()[:8]}. A turn in which the policy sampled a placeholder cannot be continued"
        )


def mixed_seed(*parts: int) -> int:
    """Return a 64-bit random seed that depends on all given numbers. Similar numbers give unrelated seeds."""
    return int(np.random.SeedSequence([part % 2**64 for part in parts]).generate_state(1, np.uint64)[0])


def engine_seed(seed: int, version: int, epoch: int) -> int:
    """Return a random seed below 2^31 for one start of an engine.

    ``seed`` is the seed of the run, ``version`` the policy version at the start of the run, and ``epoch`` the number of
    failures of this worker so far. A restarted engine has another ``epoch``, so it draws other random numbers.
    """
    return mixed_seed(seed, version, epoch) >> 33


def check_output(
    output: SampleOutput, request: SampleRequest, *, vocab_size: int, loaded_versions: Collection[int]
) -> None:
    """Check an engine's answer to ``request``. Raises `EngineError` if one of these conditions does not hold.

    - Token ids, log-probs and versions have the same length, and a finished response has a token.
    - Ids are below ``vocab_size``, and log-probs are finite numbers <= 0 (with a tolerance for rounding).
    - The policy version of each token is in ``loaded_versions``, the versions that the engine has loaded and verified.
    """
    where = f"request {request.id}"
    lengths = (len(output.token_ids), len(output.logprobs), len(output.versions))
    if len(set(lengths)) != 1:
        raise EngineError(f"{where}: token ids, log-probs and versions must agree in length, got {lengths}")
    if lengths[0] == 0:
        if output.finish_reason is not None:
            raise EngineError(f"{where}: the engine finished the response ({output.finish_reason}) without a token")
        return
    if not _in_vocabulary(output.token_ids, vocab_size):
        raise EngineError(f"{where}: sampled ids must be in 0..{vocab_size - 1}, got {_range(output.token_ids)}")
    # The minimum and the maximum are NaN if a log-prob is NaN, so the check below also finds NaN.
    smallest, largest = (float(find.reduce(output.logprobs)) for find in (np.minimum, np.maximum))
    if not -np.inf < smallest <= largest <= LOGPROB_ROUNDING:
        raise EngineError(f"{where}: log-probs must be finite numbers <= 0, got {smallest} to {largest}")
    unknown = set(output.versions.tolist()).difference(loaded_versions)
    if unknown:
        raise EngineError(
            f"{where}: the engine reports policy versions {sorted(unknown)}, which it never loaded and verified"
        )


def _in_vocabulary(token_ids: np.ndarray, vocab_size: int) -> bool:
    """Return whether all ids are in the vocabulary. The cast to uint32 turns negative ids into very large ids."""
    if token_ids.dtype == np.int32:
        return int(np.maximum.reduce(token_ids.view(np.uint32))) < vocab_size
    return int(token_ids.min()) >= 0 and int(token_ids.max()) < vocab_size


def _range(token_ids: np.ndarray) -> str:
    return f"{token_ids.min()}..{token_ids.max()}"


class SilenceWatch:
    """Detects an engine that has stopped producing tokens.

    The engine is silent if *no* running request gets a token. After three quarters of ``timeout_s`` seconds of silence,
    the watch calls ``probe``, which asks whether the engine still works. The engine has failed in three cases: the
    probe raises an error, the probe does not return before ``timeout_s`` ends, or three periods of ``timeout_s`` in a
    row are silent. ``name`` is for messages.
    """

    def __init__(self, name: str, *, timeout_s: float, probe: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self.timeout_s = timeout_s
        self._probe = probe
        self._num_running = 0
        self._is_paused = False
        self._heard_s = time.monotonic()
        self._listening = asyncio.Event()
        self._re_prefill = record.NO_SPAN

    def token(self) -> None:
        """Record that the engine has just produced a token. May be called from any thread."""
        self._heard_s = time.monotonic()
        self._re_prefill.close()

    @contextmanager
    def running(self, num_requests: int) -> Iterator[None]:
        """Record that ``num_requests`` requests run inside the ``with`` block.

        While requests are running, `wait` raises an error if the engine produces no token for too long.
        """
        self._change(num_requests, is_paused=self._is_paused)
        try:
            yield
        finally:
            self._change(-num_requests, is_paused=self._is_paused)

    @contextmanager
    def paused(self, *, recomputes: bool = False) -> Iterator[Callable[[], None]]:
        """Do not treat silence (no new tokens) as an error inside the ``with`` block, which pauses generation.

        Yields a function. The block must call the function when generation has stopped. The run's profile shows the
        pause from this call to the end of the block. ``recomputes`` says whether the engine computes the KV cache of
        running samples again after the pause.
        """
        pause = record.NO_SPAN

        def stands_still() -> None:
            nonlocal pause
            pause = record.span(SpanKind.pause)

        self._change(0, is_paused=True)
        try:
            yield stands_still
        finally:
            pause.close()
            self._change(0, is_paused=False)
        if recomputes and self._num_running:
            self._re_prefill = record.span(SpanKind.re_prefill)

    async def wait(self) -> NoReturn:
        """Wait until the engine has been silent for too long while requests ran. Then raise `DeadlineError`."""
        num_silent_periods = 0
        while True:
            await self._listening.wait()
            heard_s = self._heard_s
            left_s = heard_s + (1 - PROBE_SHARE) * self.timeout_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
                num_silent_periods = num_silent_periods if heard_s == self._heard_s else 0
                continue
            error = await self._probe_error()
            if heard_s != self._heard_s or not self._listening.is_set():
                num_silent_periods = 0
                continue
            num_silent_periods += 1
            if error is not None or num_silent_periods == MAX_SILENT_PERIODS:
                raise self._failure(error, num_silent_periods)
            logger.warning("%s: no token for %g s, but it answers a probe", self._name, self.timeout_s)
            self.token()

    async def _probe_error(self) -> str | None:
        try:
            async with asyncio.timeout(PROBE_SHARE * self.timeout_s):
                await self._probe()
        except TimeoutError:
            return f"it did not answer a probe within {PROBE_SHARE * self.timeout_s:g} s"
        except AsyncRLError as error:
            return f"the probe failed: {error}"
        return None

    def _failure(self, error: str | None, num_periods: int) -> DeadlineError:
        error = error or f"it answered {num_periods} probes, but produced no token"
        return missed(
            f"{self._name} produced no token of its {self._num_running} running requests within "
            f"rollout_fleet.silence_timeout_s = {self.timeout_s:g} s, and {error}"
        )

    def _change(self, num_requests: int, *, is_paused: bool) -> None:
        was_listening = self._listening.is_set()
        self._num_running += num_requests
        self._is_paused = is_paused
        if self._num_running and not is_paused:
            if not was_listening:
                self.token()
            self._listening.set()
        else:
            self._listening.clear()
            self._re_prefill.close()
