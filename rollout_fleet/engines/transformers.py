"""The in-process engine: transformers' ``generate`` on batches of waiting samples.

One asyncio task takes the waiting samples as a batch and generates them in a thread. New samples wake the task. The
answers of a batch are returned when its longest sample ends. Weights are loaded between two batches.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Cache, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.core.errors import EngineError, WeightsError, WorkerDiedError
from asyncrl.core.image_files import load_processor
from asyncrl.core.images import Image, PixelFormat, PlacedImage, positions_of
from asyncrl.core.types import FinishReason, WeightOffer
from asyncrl.weights.load import AdaptedModules, ComparedWrites, PublishedAdapter, WeightSource, load_from
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SamplingConfig

from .engine import (
    TAIL_TOKENS,
    Answers,
    Decode,
    Engine,
    EngineLoad,
    ModelFacts,
    RunningSample,
    SampleOutput,
    SampleRequest,
    check_output,
    load_decoder,
    mixed_seed,
    read_model_facts,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

_TRIED_LENGTHS = (3, 11, 11)
_TRIED_TOKENS = 4


class StepRecorder:
    """Records the tokens and log-probs of a batch at every step, and ends rows. A row is one sample of the batch.

    - A row ends with one of ``eos_ids``, with its own stop token or stop text, or at its ``max_new_tokens``. An aborted
      row ends at its next token.
    - The model generates a batch in one or more calls of ``generate``. Each call continues the unfinished rows. With
      ``drops_rows``, a call ends when half of its rows have ended.
    - In a row with a seed, the seed and the token's position determine the draw of each token. This does not hold if
      top-p, top-k or min-p truncates the distribution.
    - At temperature 0 (greedy), log-probs are computed at temperature 1.

    ``on_step`` is called after every step. ``decode`` converts tokens to text to find stop texts.
    """

    def __init__(
        self,
        samples: Sequence[RunningSample],
        *,
        eos_ids: Sequence[int],
        drops_rows: bool = False,
        on_step: Callable[[], None] = lambda: None,
        decode: Decode | None = None,
    ) -> None:
        self._samples = samples
        self._decode = decode
        samplings = [sample.request.sampling for sample in samples]
        self._stop_ids = [set(sampling.stop_token_ids) for sampling in samplings]
        self._seeds = {
            row: (sampling.seed, len(samples[row].request.prompt_ids))
            for row, sampling in enumerate(samplings)
            if sampling.seed is not None and sampling.temperature > 0 and not sampling.truncations
        }
        self._max_new_tokens = torch.tensor([sample.request.sampling.max_new_tokens for sample in samples])
        self._eos_ids = torch.tensor(eos_ids, dtype=torch.int64)
        self._temperature = samples[0].request.sampling.temperature or 1.0
        self._drops_rows = drops_rows
        self._on_step = on_step
        self._step_logprobs: Tensor | None = None
        self._token_ids: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._rows = torch.arange(len(samples))
        self._is_left = torch.ones(len(samples), dtype=torch.bool)
        self._is_stopped = torch.zeros(len(samples), dtype=torch.bool)

    @property
    def num_steps(self) -> int:
        """Number of generation steps of this batch so far; each step samples one token per row."""
        return len(self._token_ids)

    def begin_round(self) -> Tensor:
        """Select the rows that have not ended, for the next call of ``generate``.

        Returns [b] int64: the index of each selected row in the previous call. Empty if all rows have ended.
        """
        is_left = self._is_left[self._rows]
        self._rows = self._rows[is_left]
        return is_left.nonzero().squeeze(1)

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Compute the log-probs at the sampling temperature, and store them for `after_sampling`.

        Returns the [b, V] logits. In a row with a seed, this method draws the token, and sets the logits of all other
        tokens to minus infinity.
        """
        scaled = logits.float() if self._temperature == 1.0 else logits.float() / self._temperature
        self._step_logprobs = scaled.log_softmax(-1)
        for place, row in enumerate(self._rows.tolist() if self._seeds else ()):
            if row in self._seeds:
                seed, num_before = self._seeds[row]
                generator = torch.Generator().manual_seed(mixed_seed(seed, num_before + self.num_steps))
                drawn = int(torch.multinomial(self._step_logprobs[place].exp().cpu(), 1, generator=generator))
                logits[place] = -torch.inf
                logits[place, drawn] = 0.0
        return logits

    def after_sampling(self, token_ids: Tensor) -> Tensor:
        """Record the [b, 1] token ids that ``generate`` has just sampled, one per row, and their log-probs.

        Returns [b] bool: True for each row that ``generate`` must stop. If this call of ``generate`` must end, all
        values are True.
        """
        assert self._step_logprobs is not None
        rows, new_ids, num_rows = self._rows, token_ids.squeeze(1).cpu(), len(self._samples)
        self._token_ids.append(new_ids.new_zeros(num_rows).index_copy_(0, rows, new_ids))
        logprobs = self._step_logprobs.gather(1, token_ids).squeeze(1).cpu()
        self._logprobs.append(logprobs.new_zeros(num_rows).index_copy_(0, rows, logprobs))
        self._on_step()
        if self.num_steps == 1:
            for sample in self._samples:
                if sample.request.on_first_token is not None:
                    sample.request.on_first_token()
        was_left = self._is_left[rows]
        is_eos = (torch.isin(new_ids, self._eos_ids) | self._is_at_stop(rows.tolist(), new_ids.tolist())) & was_left
        self._is_stopped[rows] |= is_eos
        samples = [self._samples[row] for row in rows.tolist()]
        for sample, is_writing in zip(samples, was_left.tolist(), strict=True):
            sample.num_tokens += is_writing
        is_aborted = torch.tensor([sample.is_aborted for sample in samples])
        is_left = was_left & ~(is_eos | is_aborted | (self._max_new_tokens[rows] <= self.num_steps))
        self._is_left[rows] = is_left
        if self._drops_rows and 2 * int(is_left.sum()) <= len(rows):
            is_left = torch.zeros_like(is_left)
        return ~is_left.to(token_ids.device)

    def _is_at_stop(self, rows: Sequence[int], new_ids: Sequence[int]) -> Tensor:
        ends = [token in self._stop_ids[row] for row, token in zip(rows, new_ids, strict=True)]
        for place, row in enumerate(rows):
            stop = self._samples[row].request.sampling.stop
            if stop and not ends[place]:
                assert self._decode is not None
                tail = self._token_ids[-max(map(len, stop)) - TAIL_TOKENS :]
                text = self._decode([int(step[row]) for step in tail])
                ends[place] = any(part in text for part in stop)
        return torch.tensor(ends, dtype=torch.bool)

    def outputs(self, version: int) -> list[SampleOutput]:
        """Return one sample per row, in order. Call this when all rows have ended.

        ``version`` is the policy version of every token.
        """
        token_ids = torch.stack(self._token_ids, dim=1).to(torch.int32).numpy()
        logprobs = torch.stack(self._logprobs, dim=1).numpy()
        versions = np.full(self.num_steps, version, dtype=np.int32)
        outputs = []
        for row, sample in enumerate(self._samples):
            length = sample.num_tokens
            is_whole = length == sample.request.sampling.max_new_tokens
            output = SampleOutput(
                token_ids=token_ids[row, :length],
                logprobs=logprobs[row, :length],
                versions=versions[:length],
                finish_reason=FinishReason.stop if self._is_stopped[row] else FinishReason.length if is_whole else None,
            )
            outputs.append(output)
        return outputs


class GenerationModel:
    """Holds the model and its weights, and generates batches. Call `load` first.

    Args:
        dtype: Name of a torch dtype, or ``auto`` for the dtype of the stored model.
        device: ``cpu`` or ``cuda``.
        seed: Seeds torch in this process.
        reproducible: Sample every answer from its own seed, one row at a time (`TransformersConfig`).
        on_step: Function that the generating thread calls after every token of a batch.
    """

    def __init__(
        self,
        model_path: str,
        *,
        facts: ModelFacts,
        dtype: str,
        device: str,
        seed: int,
        reproducible: bool = False,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._model_path = model_path
        self._facts = facts
        self._dtype = dtype
        self._device = device
        self._seed = seed
        self._reproducible = reproducible
        self._on_step = on_step
        self.model: Any = None
        self._pixel_format: PixelFormat | None = None
        self._decode: Decode | None = None
        self._may_pad, self._cuts_cache = True, False
        self.eos_ids: tuple[int, ...] = ()  # set after `_check_logprobs`, in which no token may end a row
        self._held: dict[str, Tensor] = {}
        self._released: dict[torch.nn.Parameter, torch.Size] = {}
        self._adapted = AdaptedModules()
        self._frozen = ""  # digest of the loaded LoRA adapter's base weights; empty if no adapter is loaded

    def load(self) -> None:
        """Read the model from its folder onto the device, and test whether it generates correctly.

        Raises `EngineError` if generated log-probs differ from those of a forward pass.
        """
        torch.manual_seed(self._seed)
        kind: Any = AutoModelForCausalLM
        if self._facts.image_token_id is not None:
            kind, self._pixel_format = AutoModelForImageTextToText, PixelFormat.of(load_processor(self._model_path))
        model: Any = kind.from_pretrained(self._model_path, dtype=self._dtype)
        # Use an empty config. Otherwise the model's own config would set each option that a call does not set.
        model.generation_config = GenerationConfig()
        self.model = model.to(self._device).eval().requires_grad_(False)
        self._check_logprobs()
        self.eos_ids = self._facts.eos_ids

    def release(self) -> None:
        """Free the device memory of the model's parameters. `load_weights` allocates this memory again."""
        for parameter in self.model.parameters():
            self._released.setdefault(parameter, parameter.shape)
            parameter.data = parameter.data.new_empty(0)
        self._held.clear()
        self._adapted.remove()
        self._frozen = ""
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def load_weights(self, offer: WeightOffer, *, timeout_s: float) -> None:
        """Load the weights of a policy version into the model, and verify that each tensor arrived unchanged.

        If the version is a LoRA adapter, its frozen base weights are loaded only once. The adapter is not merged into
        the base weights.

        Args:
            offer: Says where the weights are.
            timeout_s: Seconds to wait for weights that learner ranks send (`RolloutFleetConfig.load_timeout_s`).

        Raises:
            WeightsError: tensors are missing, unknown, of another shape, or differ from the published digests.
            DeadlineError: the weights from the learner ranks did not arrive.
        """
        adapter = PublishedAdapter(offer) if offer.kind == "adapter" else None
        if adapter is None or adapter.base.digest != self._frozen:
            self._frozen = ""
            self._adapted.remove()
            base = offer if adapter is None else adapter.base
            load_from(base, torch.device(self._device), partial(self._load_full, base.version), timeout_s=timeout_s)
        if adapter is not None:
            self._frozen = adapter.base.digest
            self._adapted.load(adapter, offer.version, self._linear_layers())

    def _linear_layers(self) -> dict[str, torch.nn.Module]:
        layers = {
            (module.weight.data_ptr(), module.weight.shape): module
            for module in self.model.modules()
            if isinstance(module, torch.nn.Linear)
        }
        held = {name: layers.get((tensor.data_ptr(), tensor.shape)) for name, tensor in self._checkpoint().items()}
        return {name: module for name, module in held.items() if module is not None}

    def _checkpoint(self) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint, which may fuse or split the model's tensors."""
        if not self._held:
            self._held = revert_weight_conversion(self.model, self._weights())
        return self._held

    def _weights(self) -> dict[str, Tensor]:
        """Return all parameters, and the buffers that a checkpoint stores, such as a router's correction biases."""
        stored = self.model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in stored}
        return dict(self.model.named_parameters()) | buffers

    def _load_full(self, version: int, weights: WeightSource) -> None:
        while self._released:
            parameter, shape = self._released.popitem()
            parameter.data = parameter.data.new_empty(shape)
        stored = {tensor.name: tensor.shape for tensor in weights.manifest.tensors}
        held = self._checkpoint()
        where = weights.manifest.directory
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        if stored.keys() - tied != held.keys() - tied:
            odd = sorted((stored.keys() - tied) ^ (held.keys() - tied))
            raise WeightsError(f"{where} and the model differ in {len(odd)} tensor names, first {odd[0]}")
        for name in held.keys() & stored.keys():
            if tuple(held[name].shape) != stored[name]:
                raise WeightsError(f"{where}: {name} must be {tuple(held[name].shape)}, got {stored[name]}")
        with ComparedWrites(self._weights(), weights) as writes:
            for name, tensor in weights.tensors():
                if name in held:
                    held[name].data.copy_(tensor)
        writes.check(version)

    @torch.inference_mode()
    def generate(self, samples: Sequence[RunningSample], version: int) -> list[SampleOutput]:
        """Generate a response for each sample, and return the responses in the same order.

        All samples must have the same temperature, top-p, top-k and min-p. ``version`` becomes the policy version of
        every token. The responses depend on which requests share a batch, even with a fixed seed of the engine. If
        padding changes the model's log-probs, only prompts of equal length share a batch.
        """
        outputs: dict[int, SampleOutput] = {}
        for rows in self._batches([sample.request for sample in samples]):
            outputs.update(zip(rows, self._generate_batch([samples[row] for row in rows], version), strict=True))
        return [outputs[row] for row in range(len(samples))]

    def _batches(self, requests: Sequence[SampleRequest]) -> Iterator[list[int]]:
        """Yield the batches. Each batch is a list of indices into ``requests``.

        ``generate`` may compute the rows of ended samples until the longest response ends. Therefore each prompt in
        the batch, plus the batch's longest response, must not exceed the model's largest number of positions.
        """
        if self._reproducible:
            yield from ([row] for row in range(len(requests)))
            return
        left: dict[int, list[int]] = defaultdict(list)
        for row, request in enumerate(requests):
            left[0 if self._may_pad else len(request.prompt_ids)].append(row)
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or math.inf
        for rows in left.values():
            while rows:
                longest = max(requests[row].sampling.max_new_tokens for row in rows)
                fit = [row for row in rows if len(requests[row].prompt_ids) + longest <= limit]
                yield fit or rows
                rows = [row for row in rows if row not in fit] if fit else []

    def _generate_batch(self, samples: Sequence[RunningSample], version: int) -> list[SampleOutput]:
        sampling = samples[0].request.sampling
        longest = max(sample.request.sampling.max_new_tokens for sample in samples)
        requests = [sample.request for sample in samples]
        has_stops = any(sample.request.sampling.stop for sample in samples)
        recorder = StepRecorder(
            samples,
            eos_ids=self.eos_ids,
            drops_rows=self._cuts_cache,
            on_step=self._on_step,
            decode=self.decoder() if has_stops else None,
        )
        ids, mask = self._left_padded([request.prompt_ids for request in requests])
        cache, left = self._shared_prefill(requests), torch.arange(len(requests))
        while len(rows := recorder.begin_round()):
            if recorder.num_steps:
                assert cache is not None
                rows = rows.to(self._device)
                mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
                ids, mask, left = ids[rows], mask[rows], left[rows.cpu()]
                cache.batch_select_indices(rows)
            written = self.model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                **self._seen([requests[row] for row in left.tolist()], mask, is_first=cache is None),
                generation_config=self._generation_config(sampling, longest - recorder.num_steps),
                logits_processor=[recorder],
                stopping_criteria=[lambda ids, _, **__: recorder.after_sampling(ids[:, -1:])],
            )
            ids, cache = written.sequences, written.past_key_values
        return recorder.outputs(version)

    def _seen(self, requests: Sequence[SampleRequest], mask: Tensor, *, is_first: bool) -> dict[str, Tensor]:
        """Return extra model arguments for a batch with images: positions [4, b, T], and the pixels if ``is_first``.

        The first position is the token's index in its row. The other three come from `positions_of`. Without these
        positions, transformers would compute positions itself, and would store one offset per row in the model
        (``rope_deltas``). Such offsets do not fit a batch from which rows have been dropped.
        """
        images = [placed.image for request in requests for placed in request.images]
        if not images or self._pixel_format is None:
            return {}
        positions = torch.zeros(4, *mask.shape, dtype=torch.int64)
        positions[0] = (mask.cpu().cumsum(-1) - 1).clamp(min=0)
        for row, request in enumerate(requests):
            num_tokens = int(mask[row].sum())
            of_row, _ = positions_of(0, num_tokens, request.images)
            positions[1:, row, mask.shape[1] - num_tokens :] = torch.from_numpy(of_row.T.astype(np.int64))
        seen = {"position_ids": positions.to(self._device)}
        return seen | (self._pixels(images) if is_first else {})

    def _pixels(self, images: Sequence[Image]) -> dict[str, Tensor]:
        assert self._pixel_format is not None
        pixels = torch.from_numpy(np.concatenate([image.pixels for image in images])).to(self._device)
        grids = torch.tensor([image.grid for image in images], device=self._device)
        return {"pixel_values": self._pixel_format.features(pixels), "image_grid_thw": grids}

    def decoder(self) -> Decode:
        """Return the function that decodes token ids to text, with special tokens."""
        if self._decode is None:
            self._decode = load_decoder(self._model_path, special_tokens=True)
        return self._decode

    @torch.inference_mode()
    def _check_logprobs(self) -> None:
        """Compare the log-probs of generated tokens with those of a forward pass.

        If the log-probs of a batch of padded prompts differ, disable padding and compare again. Raises `EngineError` if
        the log-probs still differ.

        Then compare with two optimizations: equal prompts share one prefill, and rows of ended samples leave the batch.
        Both optimizations are enabled if the log-probs agree.
        """
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, self._facts.vocab_size, length) for length in _TRIED_LENGTHS]
        requests = [_greedy(prompt, _TRIED_TOKENS, *self._tried_image(prompt, rng)) for prompt in prompts]
        name = type(self.model).__name__
        if "chunked_attention" in (getattr(self.model.config, "layer_types", None) or ()):
            self._may_pad = False  # with padding, tokens would be in other attention chunks
        bound = 1e-3 if self.model.dtype == torch.float32 else 0.1
        try:
            difference = self._difference(requests)
            if difference > bound and self._may_pad:
                logger.warning(
                    "%s: log-probs of padded prompts differ by %.3g; prompts of each length get their own batch",
                    name,
                    difference,
                )
                self._may_pad = False
                difference = self._difference(requests)
            if difference <= bound and not self._reproducible and self._can_cut_cache(requests[0]):
                self._cuts_cache = True
                twice = [
                    _greedy(request.prompt_ids, 1 + row % _TRIED_TOKENS, *request.images)
                    for row, request in enumerate(2 * requests)
                ]
                if (cut := self._difference(twice)) > bound:
                    logger.warning(
                        "%s: log-probs differ by %.3g if rows of its cache are moved; they are not moved", name, cut
                    )
                    self._cuts_cache = False
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise EngineError(
                f"transformers cannot generate with {name}: {error!r}; use another engine, or another model"
            ) from error
        if difference > bound:
            raise EngineError(
                f"log-probs of tokens that {name} generates must be within {bound} of the log-probs of a forward pass, "
                f"got a difference of {difference:.3g}: transformers' generate does not keep the state of this model "
                "from one token to the next; use another engine or model"
            )

    def _tried_image(self, prompt: np.ndarray, rng: np.random.Generator) -> tuple[PlacedImage, ...]:
        token, form = self._facts.image_token_id, self._pixel_format
        if token is None or form is None:
            return ()
        prompt[prompt == token] = token + 1
        grid = (1, form.merge_size, 3 * form.merge_size)
        pixels = rng.integers(0, 256, (grid[1] * grid[2], form.pixels_per_patch), dtype=np.uint8)
        digest = str(len(prompt)) + str(prompt[-1])
        placed = PlacedImage(image=Image(pixels=pixels, grid=grid, merge_size=form.merge_size, digest=digest), offset=2)
        if placed.end >= len(prompt):
            return ()
        prompt[placed.offset : placed.end] = token
        return (placed,)

    def _difference(self, requests: Sequence[SampleRequest]) -> float:
        largest = 0.0
        outputs = self.generate([RunningSample(request) for request in requests], 0)
        for request, output in zip(requests, outputs, strict=True):
            tokens = torch.from_numpy(output.token_ids).to(self._device, torch.int64)
            prompt = torch.from_numpy(request.prompt_ids).to(self._device)
            whole, seen = torch.cat([prompt, tokens])[None], {}
            if request.images:  # compare only the tokens before a sampled image placeholder, because it has no pixels
                is_placeholder = tokens == self._facts.image_token_id
                tokens = tokens[: int(is_placeholder.int().argmax()) if is_placeholder.any() else None]
                whole = torch.cat([prompt, tokens])[None]
                seen = self._pixels([placed.image for placed in request.images])
                seen["mm_token_type_ids"] = (whole == self._facts.image_token_id).int()
            logits = self.model(whole, **seen).logits[0, len(prompt) - 1 : -1]
            expected = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu()
            found = torch.from_numpy(output.logprobs[: len(tokens)])
            largest = max([largest, *(expected - found).abs().tolist()])
        return largest

    def _can_cut_cache(self, request: SampleRequest) -> bool:
        """Return whether the model's cache has only keys and values. Rows of such a cache can be dropped and copied."""
        ids, mask = self._left_padded([request.prompt_ids])
        config = self._generation_config(request.sampling, 1)
        cache = self.model.generate(ids, attention_mask=mask, generation_config=config).past_key_values
        return (
            isinstance(cache, DynamicCache)
            and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)
            and cache.is_initialized
        )

    def _left_padded(self, prompts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Return a pair of [B, P] int64 tensors, padded on the left: the token ids, and the attention mask."""
        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), self._facts.pad_id, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        return torch.from_numpy(ids).to(self._device), torch.from_numpy(mask).to(self._device)

    def _shared_prefill(self, requests: Sequence[SampleRequest]) -> Cache | None:
        """Compute the KV cache of the prompts of B requests, without the last token of each prompt.

        Equal prompts are computed once. Returns None if sharing saves little, or if the cache cannot be copied.
        """
        rows = {request.prompt_key: request for request in requests}
        shortest = min(len(request.prompt_ids) for request in requests)
        if not self._cuts_cache or 2 * len(rows) > len(requests) or shortest == 1:
            return None
        distinct = {key: place for place, key in enumerate(rows)}
        ids, mask = self._left_padded([request.prompt_ids for request in rows.values()])
        ids, mask = ids[:, :-1], mask[:, :-1]
        cache = self.model.generate(
            ids,
            attention_mask=mask,
            generation_config=self._generation_config(SamplingConfig(temperature=0.0), 1),
            **self._seen(list(rows.values()), mask, is_first=True),
        ).past_key_values
        cache.batch_select_indices(
            torch.tensor([distinct[request.prompt_key] for request in requests]).to(self._device)
        )
        return cache

    def _generation_config(self, sampling: SamplingConfig, max_new_tokens: int) -> GenerationConfig:
        greedy = sampling.temperature == 0
        options: dict[str, Any] = {} if greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if not greedy:
            options["top_k"] = 0 if sampling.top_k == -1 else sampling.top_k
            options["min_p"] = sampling.min_p or None
        return GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=max_new_tokens,
            pad_token_id=self._facts.pad_id,
            use_cache=not self._reproducible,
            return_dict_in_generate=True,
            **options,
        )


def distribution(sampling: SamplingConfig) -> tuple[float, ...]:
    """Return (temperature, top-p, top-k, min-p). Only samples with the same four values may share a batch."""
    return (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)


def _greedy(prompt: np.ndarray, max_new_tokens: int, *images: PlacedImage) -> SampleRequest:
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=max_new_tokens)
    return SampleRequest(id="", prompt_ids=prompt, sampling=sampling, images=images)


class _PendingSample(RunningSample):
    answers: Answers


class TransformersEngine(Engine):
    """An engine that generates in this process. `start` loads the model.

    Attributes:
        model: The model with its weights; it generates the batches.
    """

    sample_type = _PendingSample

    def __init__(
        self, config: RolloutFleetConfig, *, model_path: str, device: EngineDevice, rank: int, seed: int
    ) -> None:
        facts = read_model_facts(model_path)
        super().__init__(
            f"transformers-{rank}",
            vocab_size=facts.vocab_size,
            silence_timeout_s=config.silence_timeout_s,
            image_token_id=facts.image_token_id,
        )
        self._config = config
        self.model = GenerationModel(
            model_path,
            facts=facts,
            dtype=config.transformers.dtype,
            device=device.value,
            seed=seed,
            reproducible=config.transformers.reproducible,
            on_step=self.silence.token,
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self._name)
        self._waiting: list[_PendingSample] = []
        self._arrived = asyncio.Event()
        self._idle_model = asyncio.Lock()

    async def start(self) -> None:
        """Load the model from its folder, and begin to wait for requests (`Engine.start`)."""
        async with self._deadline("load its model", self._config.start_timeout_s, "start_timeout_s"):
            await self._in_thread(self.model.load)
        self._come_up(self._run_batches, self.silence.wait)
        logger.info("%s: up", self._name)

    async def release_memory(self) -> None:
        """Free the weights' memory on the device (`Engine.release_memory`). The next weight load allocates it again."""
        if self._running:
            raise EngineError(f"{self._name} cannot release its memory while it generates {len(self._running)} samples")
        async with self._idle_model:
            await self._in_thread(self.model.release)
        logger.info("%s: released its weights", self._name)

    async def load_weights(self, offer: WeightOffer) -> float:
        """Wait for the end of the running batch, then load and verify weights (`Engine.load_weights`).

        The wait has no deadline. The wait ends if the engine fails, for example because the engine is silent.
        """
        self._check_up()
        return await self.unless_failed(self._load_when_idle(offer))

    async def _load_when_idle(self, offer: WeightOffer) -> float:
        async with self._idle_model:
            started = time.perf_counter()
            with self.silence.paused() as stands_still:
                stands_still()
                async with self._loading(offer, self._config.load_timeout_s):
                    load = partial(self.model.load_weights, offer, timeout_s=self._config.load_timeout_s)
                    await self._in_thread(load)
            self._version = offer.version
            return time.perf_counter() - started

    async def read_load(self) -> EngineLoad:
        """Raise `EngineError`: this engine does not report how many samples run and wait (`Engine.read_load`)."""
        raise EngineError(
            "the in-process engine does not report its load; set rollout_fleet.groups_in_flight to a number"
        )

    async def stop(self) -> None:
        """Abort all running requests and end the generating thread (`Engine.stop`)."""
        await self.abort(self._running.keys())
        self._go_down()
        if self._watching is not None:
            await asyncio.wait([self._watching], timeout=self._config.stop_timeout_s)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def decoder(self) -> Decode:
        """Return a function that decodes token ids to text with special tokens (`Engine.decoder`)."""
        return self.model.decoder()

    def _in_thread(self, call: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _begin(self, samples: Sequence[_PendingSample], answers: Answers) -> tuple[()]:
        for sample in samples:
            sample.answers = answers
        self._waiting += samples
        if samples:
            self._arrived.set()
        return ()

    async def _run_batches(self) -> None:
        while True:
            await self._arrived.wait()
            async with self._idle_model:
                batch = self._next_batch()
                version = self._version
                try:
                    outputs = await self._in_thread(self.model.generate, batch, version)
                except Exception as error:
                    raise WorkerDiedError(
                        f"{self._name} failed while generating {len(batch)} samples: {error!r}"
                    ) from error
            for sample, output in zip(batch, outputs, strict=True):
                try:
                    check_output(output, sample.request, vocab_size=self._vocab_size, loaded_versions={version})
                except EngineError as error:
                    sample.answers.put_nowait(error)
                else:
                    sample.answers.put_nowait([(sample.request, output)])

    def _next_batch(self) -> list[_PendingSample]:
        kind = distribution(self._waiting[0].request.sampling)
        batch: list[_PendingSample] = []
        for sample in self._waiting:
            if distribution(sample.request.sampling) == kind:
                batch.append(sample)
            if len(batch) == self._config.transformers.max_rows:
                break
        taken = set(map(id, batch))
        self._waiting = [sample for sample in self._waiting if id(sample) not in taken]
        if not self._waiting:
            self._arrived.clear()
        return batch
