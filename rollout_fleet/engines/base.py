"""The engine port: what a rollout worker needs of an inference engine, and the checks every answer passes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Protocol

import numpy as np

from asyncrl.protocol.errors import EngineError
from asyncrl.protocol.types import WeightSnapshot
from rollout_fleet.types import GenerationRequest, GroupOutput

LOGPROB_ROUNDING = 1e-4


class Engine(Protocol):
    """An inference engine that serves one policy version at a time. All waits are bounded by the fleet's config."""

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

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[GroupOutput]:
        """Sample the prompt groups; yields each group's answer when all of its samples are finished or aborted.

        Raises:
            EngineError: a request was refused, or an answer broke the contract.
            DeadlineError: an answer did not come in time.
            WorkerDiedError: the engine died.
        """
        ...

    async def load_weights(self, snapshot: WeightSnapshot) -> float:
        """Serve ``snapshot`` from the next token on; running requests go on under it where the engine can.

        Returns:
            Seconds for which generation stood still.

        Raises:
            EngineError: the engine refused the weights or holds others than published.
            DeadlineError: it took longer than ``load_timeout_s``.
        """
        ...

    async def release_memory(self) -> None:
        """Give the device up to whoever shares it; nothing may be running. The next `load_weights` takes it back.

        Raises:
            EngineError: the engine refused, or is generating.
            DeadlineError: it took longer than ``load_timeout_s``.
        """
        ...

    async def abort(self, rid: str) -> None:
        """Cut a running request off; its answer arrives as aborted. Unknown ids are ignored."""
        ...

    async def wait_failed(self) -> None:
        """Wait for the engine to die; never returns.

        Raises:
            WorkerDiedError: it died; the message ends with the last lines of its log.
        """
        ...

    async def stop(self) -> None:
        """Stop the engine and free its process, port and memory. May be called at any time, more than once."""
        ...


def check_prompt(request: GenerationRequest, vocab_size: int) -> None:
    """Refuse what would kill an engine, or what it would not do.

    Raises:
        EngineError: the prompt is empty or holds a token id outside the vocabulary, or the request has prefixes.
    """
    if request.prefixes:
        raise EngineError(
            f"request {request.rid} has prefixes, which only a ContinuingEngine around this one continues"
        )
    if len(request.prompt_ids) == 0:
        raise EngineError(f"request {request.rid} has an empty prompt; a prompt needs at least one token")
    low, high = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"request {request.rid}: prompt token ids must be in 0..{vocab_size - 1}, got {low}..{high}; "
            "the prompts were tokenized with another model's tokenizer"
        )


def check_output(
    output: GroupOutput, request: GenerationRequest, *, vocab_size: int, published: Collection[int]
) -> None:
    """Refuse an answer that breaks the engine's contract.

    Raises:
        EngineError: the number of samples is wrong, lengths disagree, a finished response is empty, an id is outside
            the vocabulary, a log-prob is no number <= 0, or a version was never published to the engine.
    """
    where = f"request {request.rid}"
    if len(output.samples) != request.num_samples:
        raise EngineError(f"{where} asked for {request.num_samples} samples, got {len(output.samples)}")
    for sample in output.samples:
        lengths = (len(sample.token_ids), len(sample.logprobs), len(sample.versions))
        if len(set(lengths)) != 1:
            raise EngineError(f"{where}: token ids, log-probs and versions must agree in length, got {lengths}")
        if lengths[0] == 0 and sample.finish_reason is not None:
            raise EngineError(f"{where}: the engine finished ({sample.finish_reason}) without a single token")
    if output.num_tokens == 0:
        return
    ids = np.concatenate([sample.token_ids for sample in output.samples])
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise EngineError(f"{where}: sampled ids must be in 0..{vocab_size - 1}, got {ids.min()}..{ids.max()}")
    logprobs = np.concatenate([sample.logprobs for sample in output.samples])
    if not np.all(logprobs <= LOGPROB_ROUNDING):
        raise EngineError(f"{where}: log-probs must be numbers <= 0, got a largest of {logprobs.max()}")
    versions = np.concatenate([sample.versions for sample in output.samples])
    unknown = set(versions.tolist()).difference(published)
    if unknown:
        raise EngineError(f"{where}: the engine reports policy versions {sorted(unknown)}, never published to it")
