"""Helpers for tests of real engines. They make requests and weight offers, and recompute log-probs."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from asyncrl.core.types import FinishReason, WeightOffer
from asyncrl.weights.manifest import read_manifest
from benchmarks.saved_weights import describe_model
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.engine import SampleOutput, SampleRequest
from tests.support.rollout import VOCABULARY

EOS_ID = VOCABULARY.index("<eos>")


def write_model(directory: Path, *, seed: int) -> str:
    """Save a random Qwen3 of 75k parameters with a character tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    characters = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=EOS_ID,
        bos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)


_NUMBERS = itertools.count()


def requests_of(num_prompts: int, num_samples: int = 4, name: str = "", **sampling: Any) -> list[SampleRequest]:
    """Return ``num_samples`` requests for each of ``num_prompts`` prompts. The prompts have 2, 3, ... tokens.

    As in a run, no id is used twice. A server that notices a closed stream late would otherwise abort a new request
    with the same id.
    """
    name = f"{name}{next(_NUMBERS)}"
    options = SamplingConfig(**{"max_new_tokens": 12, **sampling})
    return [
        SampleRequest(
            id=f"{name}-{prompt}-{sample}",
            prompt_ids=np.asarray([3 + (prompt + position) % 10 for position in range(2 + prompt)], dtype=np.int32),
            sampling=options,
        )
        for prompt in range(num_prompts)
        for sample in range(num_samples)
    ]


def folder_of(offer: WeightOffer) -> str:
    """Return the folder of an offer's files. The offer's manifest names it."""
    return read_manifest(offer).directory


class RunningServer:
    """A wrapper for a running server. An engine that uses the wrapper cannot start or stop the server."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    async def start(self) -> None:
        """Do nothing, because the server runs already."""

    async def stop(self) -> None:
        """Do nothing, because the server must keep running."""


def server_processes(engine: Any) -> list[psutil.Process]:
    """Return all processes of an engine's SGLang server. The first process is the one that the engine launched."""
    return psutil.Process(engine.server.guard.pid).children(recursive=True)


async def until_writing(engine: Any) -> None:
    """Wait until the engine has sampled one more token of its running requests."""
    loop, first, token = asyncio.get_running_loop(), asyncio.Event(), engine.silence.token
    engine.silence.token = lambda: (loop.call_soon_threadsafe(first.set), token())
    await asyncio.wait_for(first.wait(), 60)
    engine.silence.token = token


async def answer(engine: Any, requests: Sequence[SampleRequest]) -> list[SampleOutput]:
    """Return the engine's answers, in the order of the requests."""
    outputs = {request.id: output async for request, output in engine.generate(requests)}
    return [outputs[request.id] for request in requests]


def assert_ends(samples: Sequence[SampleOutput], *, least: int, longest: int = 12) -> None:
    """Check that the samples with finish reason ``stop``, and no others, end with the end-of-sequence token.

    More than ``least`` samples must have the reason ``stop``, and more than ``least`` the reason ``length``. Samples
    that did not stop must have ``longest`` tokens.
    """
    reasons = Counter(sample.finish_reason for sample in samples)
    assert min(reasons[FinishReason.stop], reasons[FinishReason.length]) > least
    for sample in samples:
        assert EOS_ID not in sample.token_ids[:-1]
        assert (sample.token_ids[-1] == EOS_ID) == (sample.finish_reason is FinishReason.stop)
        assert len(sample.token_ids) == longest or sample.finish_reason is FinishReason.stop


@torch.inference_mode()
def forward_logprobs(path: str, request: SampleRequest, sample: SampleOutput) -> np.ndarray:
    """Compute the [R] log-probs of the sampled tokens with transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    ids = torch.tensor([[*request.prompt_ids.tolist(), *sample.token_ids.tolist()]])
    logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / (request.sampling.temperature or 1.0)
    return logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids, dtype=torch.int64)[:, None])[:, 0].numpy()


@torch.inference_mode()
def forward_by_versions(
    model_of: Callable[[int], Any], request: SampleRequest, sample: SampleOutput, *, keeps: bool = False
) -> np.ndarray:
    """Return [R] log-probs of the sampled tokens, each computed with the weights of the token's version.

    With ``keeps``, KV cache entries of earlier versions are used, as in an engine that keeps its cache when it loads
    weights.
    """
    ids = torch.tensor([[*request.prompt_ids.tolist(), *sample.token_ids.tolist()]])
    starts = [0, *(np.flatnonzero(np.diff(sample.versions)) + 1).tolist()]
    num_prompt, num_cached, kv_cache, parts = len(request.prompt_ids), 0, DynamicCache(), []
    for start, end in zip(starts, [*starts[1:], len(sample.token_ids)], strict=True):
        if not keeps:
            num_cached, kv_cache = 0, DynamicCache()
        fed, sampled = ids[:, num_cached : num_prompt + end - 1], ids[0, num_prompt + start : num_prompt + end]
        logits = model_of(int(sample.versions[start]))(fed, past_key_values=kv_cache).logits[0, start - end :]
        logprobs = (logits.float() / (request.sampling.temperature or 1.0)).log_softmax(-1)
        parts.append(logprobs.gather(1, sampled[:, None])[:, 0].numpy())
        num_cached = num_prompt + end - 1
    return np.concatenate(parts)


async def assert_continues(engine: Any, model_path: str, atol: float) -> None:
    """Check that the engine continues greedy samples correctly.

    Request samples. Then request them again with their first two tokens as part of the prompt. The other tokens must
    be the same.
    """
    requests = requests_of(3, temperature=0.0)
    whole = await answer(engine, requests)
    begun = [
        replace(
            request,
            id=f"continued-{request.id}",
            prompt_ids=np.concatenate([request.prompt_ids, output.token_ids[:2]]),
            sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - 2),
        )
        for request, output in zip(requests, whole, strict=True)
    ]
    for request, before, after in zip(begun, whole, await answer(engine, begun), strict=True):
        assert after.token_ids.tolist() == before.token_ids[2:].tolist()
        assert after.finish_reason is before.finish_reason
        np.testing.assert_allclose(after.logprobs, forward_logprobs(model_path, request, after), atol=atol)


def publish_weights(
    model_path: str, directory: str | Path, version: int, scale: float = 1.0, *, alter: Any = None, change: Any = None
) -> WeightOffer:
    """Return an offer of the model's tensors, multiplied by ``scale`` and changed by the function ``alter``.

    The function ``change`` changes the tensors on disk after their digests were computed for the manifest.
    """
    target = Path(directory) / f"v{version}"
    shutil.copytree(model_path, target)
    tensors = {name: tensor * scale for name, tensor in load_file(target / "model.safetensors").items()}
    tensors = tensors if alter is None else alter(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    offer = describe_model(str(target)).offer(target / "manifest.json", version)
    if change is not None:
        save_file(change(tensors), target / "model.safetensors", metadata={"format": "pt"})
    return offer
