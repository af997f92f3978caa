"""The engine port: what a rollout worker and its inference engine say to each other, and the checks of every answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from asyncrl.protocol.errors import EngineError
from asyncrl.protocol.types import FinishReason, WeightSnapshot
from rollout_fleet.config import SamplingConfig

LOGPROB_ROUNDING = 1e-4


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

    async def load_weights(self, snapshot: WeightSnapshot) -> float:
        """Serve ``snapshot`` from the next token on; running requests go on under it where the engine can.

        Returns:
            Seconds for which generation stood still.

        Raises:
            EngineError: the engine refused the weights, or holds others than were published. It has failed.
            DeadlineError: the load took longer than ``load_timeout_s``. The engine has failed.
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
