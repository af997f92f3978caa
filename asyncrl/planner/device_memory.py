"""Computes the memory that each device needs, from the options and ``config.json`` of the models.

Most functions return a dict from `MemoryKind` to bytes. docs/gpus.md explains the kinds that `rank_bytes` returns.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from asyncrl.config import (
    LEARNER_POOL,
    RunConfig,
    learner_pools,
    learner_roles,
    longest_sequence,
    role_model,
    role_options,
)
from asyncrl.core.model_config import model_settings
from learner.config import SELECTIVE, Device, Dtype, Resharding, sums_each_micro_batch
from rollout_fleet.config import FLOAT32_NAMES, EngineDevice, EngineKind

GIB = 1 << 30
_MIB = 1 << 20
_FLOAT32_BYTES = 4
CONTEXT_BYTES = 2 * GIB
"""Bytes of a GPU that a rank needs outside torch's allocator: CUDA context, kernels, buffers of NCCL and cuBLAS."""
_PLAIN_HEADS = frozenset({"gemma", "gemma2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe"})
"""Model types that do not normalize queries and keys."""
WEIGHT_CHUNK_TOKENS = 4096
"""Tokens per matrix product for the gradient of the output layer on a GPU, as in ``learner.heads``."""
_WITH_SINKS = frozenset({"deepseek_v4", "gpt_oss", "openai_privacy_filter"})
_ALL_EXPERTS = frozenset({"llama4", "llama4_text"})
"""Mixture-of-experts types that compute every token with every expert in transformers."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
"""Names in ``config.json``, by model family, for four sizes of a mixture of experts: the number of experts, the experts
per token, the shared experts, and the total width of the shared experts."""
_LAYER = re.compile(r"^(?!.*(?:vision|visual)).*\b(?:layers|h)\.(\d+)\.")
"""Matches the name of a parameter of a decoder layer, and captures the layer's index. Vision towers do not match."""
_GRAPH_SIZES = 58
"""Number of CUDA graphs that SGLang captures for prefill. Each graph takes 8 MiB."""


class MemoryKind(StrEnum):
    """A use of a device's memory. The value is a label for the user.

    The first kinds, up to ``gradients_in_transit``, are for learner ranks. The kinds from ``weights`` to
    ``activations_and_graphs`` are for engines. The last two kinds are for a paused process on a shared device.
    """

    cuda_context = "CUDA context"
    parameters = "parameters"
    frozen_parameters = "frozen parameters"
    optimizer = "optimizer"
    gradients = "gradients"
    gathered_root_unit = "gathered root unit"
    gathered_layers = "gathered layers"
    activations = "activations"
    output_layer = "output layer"
    gradients_in_transit = "gradients in transit"
    weights = "weights"
    kv_cache = "kv cache"
    activations_and_graphs = "activations and graphs"
    paused_engine = "paused engine"
    paused_rank = "paused rank"


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a decoder that determine its memory.

    Attributes:
        layers: Number of parameters of each decoder layer.
        hidden: Width of the residual stream.
        intermediate: Width of the MLP. For a mixture of experts: total width of the experts per token, including shared
            experts.
        query: Number of query heads times head size.
        key: Number of key heads times head size.
        cached: Values per token in the KV caches of all layers together.
        cache_heads: Largest number of devices that can divide a KV cache; 1 for latent attention.
        linear_rows: Sum of the input and output widths of all linear layers. Adapters of rank 1 have this number of
            parameters.
        is_tied: True if the output layer shares its weight with the input embedding.
        num_experts: Number of experts per layer; 0 for a dense model.
        experts_per_token: Number of experts that compute a token; 0 for a dense model.
        expert_width: Width of one expert; 0 for a dense model.
        norms_heads: True if queries and keys are normalized, as in Qwen3.
        has_sinks: True if attention has sinks. Then ``activation_checkpointing=selective`` also recomputes attention.
    """

    num_parameters: int
    layers: tuple[int, ...]
    hidden: int
    intermediate: int
    query: int
    key: int
    cached: int
    cache_heads: int
    vocabulary: int
    linear_rows: int
    is_tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    norms_heads: bool = True
    has_sinks: bool = False

    @property
    def root(self) -> int:
        """Number of parameters outside the decoder layers: embeddings, output layer, last norm.

        FSDP gathers these parameters together.
        """
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2) + self.hidden

    @classmethod
    def of(cls, path: str) -> ModelSize:
        """Read the sizes of the model in the folder ``path``.

        The method reads widths from ``config.json``, and counts parameters in the headers of the safetensors files.
        Without safetensors files, the method loads torch and builds the model on the meta device.

        Raises:
            ValueError: ``config.json`` is missing or lacks the usual key of a size, or the learner does not support the
                model.
        """
        if not Path(path, "config.json").is_file():
            raise ValueError(f"{path} has no config.json, so the memory of its model cannot be estimated")
        stored: dict[str, int] = {}
        for file in Path(path).glob("*.safetensors"):
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            stored |= {name: math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
        if not stored:
            from learner.pretrained import parameter_sizes

            stored = parameter_sizes(path)
        return cls.from_settings(model_settings(path), path, stored=stored)

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, Any], name: str, *, stored: Mapping[str, int] | None = None
    ) -> ModelSize:
        """Compute the sizes of a model from ``settings``, the content of its ``config.json``.

        ``stored`` maps the name of each parameter to its number of values. These numbers replace the computed numbers.

        Raises:
            ValueError: ``settings`` lacks the usual key of a size, such as ``hidden_size``. The message has ``name``.
        """
        try:
            hidden, num_layers, vocabulary = (
                settings[size] for size in ("hidden_size", "num_hidden_layers", "vocab_size")
            )
            attention, mixture = _attention_sizes(settings), _mixture_sizes(settings)
        except KeyError as error:
            raise ValueError(
                f"{name}: config.json lacks {error}, so the memory of the model cannot be estimated"
            ) from error
        is_tied = bool(settings.get("tie_word_embeddings"))
        query, key, num_experts = attention["query"], attention["key"], mixture["num_experts"]
        width = settings.get("moe_intermediate_size") or settings["intermediate_size"]
        per_layer = hidden * (2 * query + 2 * key + 2 + 3 * width * max(1, num_experts) + num_experts)
        root = vocabulary * hidden * (1 if is_tied else 2) + hidden
        num_parameters = sum((stored or {}).values()) or num_layers * per_layer + root
        average = max(0, num_parameters - root) // num_layers
        rows = 4 * hidden + 2 * query + 2 * key + 3 * (hidden + width) * max(1, num_experts)
        return cls(
            num_parameters=num_parameters,
            layers=_layers_of(stored or {}, num_layers) or (average,) * num_layers,
            hidden=hidden,
            vocabulary=vocabulary,
            linear_rows=num_layers * rows,
            is_tied=is_tied,
            norms_heads=settings.get("model_type") not in _PLAIN_HEADS,
            has_sinks=settings.get("model_type") in _WITH_SINKS,
            **attention,
            **mixture,
        )


def _layers_of(stored: Mapping[str, int], num_layers: int) -> tuple[int, ...]:
    """Return how many values the parameters of each decoder layer have; an empty tuple if ``stored`` lacks a layer."""
    sizes = [0] * num_layers
    for name, size in stored.items():
        match = _LAYER.search(name)
        if match and int(match[1]) < num_layers:  # ignore extra layers, which are for multi-token prediction
            sizes[int(match[1])] += size
    return tuple(sizes) if all(sizes) else ()


def _attention_sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the attributes ``query``, ``key``, ``cached`` and ``cache_heads`` of `ModelSize` as a dict.

    Raises `KeyError` if ``settings``, the content of ``config.json``, lacks a size that has no default.
    """
    heads = settings["num_attention_heads"]
    head_dim = settings.get("head_dim") or settings["hidden_size"] // heads
    cache_heads = settings.get("num_key_value_heads") or heads
    query, key = heads * head_dim, cache_heads * head_dim
    cached = 2 * key
    if rank := settings.get("kv_lora_rank"):  # use the sizes of latent attention (arXiv 2405.04434, section 2.1)
        rotated, plain = settings["qk_rope_head_dim"], settings["qk_nope_head_dim"]
        query = key = heads * max(rotated + plain, settings["v_head_dim"])
        cached, cache_heads = rank + rotated, 1
    kinds = settings.get("layer_types") or ["attention"] * settings["num_hidden_layers"]
    num_caching = sum("attention" in kind and not kind.startswith("linear") for kind in kinds)
    return {"query": query, "key": key, "cached": cached * num_caching, "cache_heads": cache_heads}


def _mixture_sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    width = settings.get("moe_intermediate_size") or settings["intermediate_size"]
    num_experts = _first_of(settings, _EXPERTS)
    if not num_experts:
        return {"num_experts": 0, "experts_per_token": 0, "expert_width": 0, "intermediate": width}
    chosen = num_experts if settings.get("model_type") in _ALL_EXPERTS else _first_of(settings, _CHOSEN) or 1
    shared = _first_of(settings, _SHARED_WIDTH) or _first_of(settings, _SHARED) * width
    sizes = {"num_experts": num_experts, "experts_per_token": chosen, "expert_width": width}
    return sizes | {"intermediate": width * chosen + shared}


def _first_of(settings: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((settings[name] for name in names if settings.get(name)), 0)


# Learner ranks


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """The options of a learner rank that determine its memory.

    Attributes:
        num_shards: Number of ranks among which FSDP divides one copy of the parameters.
        tokens: Tokens of a micro-batch on this rank.
        checkpointing: True if the backward pass recomputes the activations of the layers.
        keeps_attention: True if the backward pass recomputes no attention (``activation_checkpointing=selective``).
        whole_gradients: True if each rank keeps unsharded float32 gradients until the optimizer update
            (``gradient_sync=update``).
        compute_bytes: Bytes of one value in the forward and backward pass: 2 in bfloat16, 4 in float32.
        chunk_tokens: Number of tokens with logits in memory at the same time.
        keeps_gathered: True if gathered parameters stay in memory from the first to the last micro-batch
            (``resharding=update``).
        lora_rank: Rank of the adapters; 0 trains all parameters.
        has_entropy_bonus: True if the loss includes the entropy of the policy.
        offloaded: True if parameters, gradients and optimizer state stay in host memory (``offload_policy``).
    """

    num_shards: int
    tokens: int
    checkpointing: bool = True
    keeps_attention: bool = False
    whole_gradients: bool = False
    compute_bytes: int = 2
    frozen_bytes: int = 2
    chunk_tokens: int = 1024
    keeps_gathered: bool = False
    lora_rank: int = 0
    has_entropy_bonus: bool = False
    offloaded: bool = False

    @property
    def gathers(self) -> bool:
        """True if FSDP computes with copies of the parameters instead of the stored parameters.

        False if a rank holds all parameters, computes in float32 and does not offload.
        """
        return self.num_shards > 1 or self.compute_bytes != _FLOAT32_BYTES or self.offloaded


def rank_bytes(model: ModelSize, setup: RankSetup) -> dict[MemoryKind, int]:
    """Return the peak memory that torch allocates on a rank that trains a model, as a dict from kind to bytes.

    The memory of the first kinds, from ``parameters`` to ``gathered root unit``, stays in use during the whole update.
    The memory of the other kinds is temporary and changes during the backward pass. For these kinds, the dict has the
    bytes at the moment when their sum is largest. Kinds of 0 bytes are left out.
    """
    model = _padded(model, setup.num_shards)
    size, shards, gathers = setup.compute_bytes, setup.num_shards, int(setup.gathers)
    trained = setup.lora_rank * model.linear_rows or model.num_parameters
    on_device = _FLOAT32_BYTES * trained // shards * (not setup.offloaded)
    trains_all = not setup.lora_rank  # with adapters, the model's own parameters have no gradients
    head = model.vocabulary * model.hidden * trains_all
    gathered = model.num_parameters if setup.keeps_gathered else model.root
    held = {
        MemoryKind.parameters: on_device,
        MemoryKind.frozen_parameters: setup.frozen_bytes * model.num_parameters // shards if setup.lora_rank else 0,
        MemoryKind.optimizer: 2 * on_device,
        MemoryKind.gradients: _FLOAT32_BYTES * trained if setup.whole_gradients else on_device,
        MemoryKind.gathered_root_unit: gathers * size * gathered,
    }
    largest = max(_moments(model, setup, head), key=lambda moment: sum(moment.values()))
    return {name: number for name, number in {**held, **largest}.items() if number}


def _moments(model: ModelSize, setup: RankSetup, head: int) -> list[dict[MemoryKind, int]]:
    """Return the temporary memory at each moment of the backward pass, as dicts from kind to bytes."""
    size, gathers, trains_all = setup.compute_bytes, int(setup.gathers), not setup.lora_rank
    gathers_layers = 0 if setup.keeps_gathered else gathers * size
    reduced = gathers * (not setup.whole_gradients) * _FLOAT32_BYTES
    # The backward pass recomputes one layer at a time.
    whole_layer = _layer_per_token(model, size)
    keeps_attention = setup.checkpointing and setup.keeps_attention and not model.has_sinks
    attention = size * 2 * (model.query + model.key) if keeps_attention else 0
    in_each = size * model.hidden + attention if setup.checkpointing else whole_layer
    kept = setup.tokens * len(model.layers) * in_each
    saved = attention if setup.checkpointing else whole_layer
    in_layer = _layer_per_token(model, size, in_backward=True) - saved
    in_experts = whole_layer + 3 * size * model.hidden * model.experts_per_token - saved
    last_norm = setup.tokens * (size + 2 * _FLOAT32_BYTES) * model.hidden  # include the input of the last norm
    at_head = {
        MemoryKind.gathered_layers: gathers_layers * max(model.layers),
        MemoryKind.activations: kept + last_norm,
        MemoryKind.output_layer: _output_layer(model, setup, head),
    }
    # At the end of the backward pass, FSDP has freed the gathered root unit, but `rank_bytes` includes this unit.
    at_end = {MemoryKind.gradients_in_transit: reduced * model.root * trains_all}
    moments = [at_head, at_end]
    units = {*zip(model.layers, (0, *model.layers[:-1]), (*model.layers[1:], 0), strict=True)}
    # Compute the memory at two moments per layer: before and after the gradients of the layer are allocated.
    # ``has_gradients`` is True for the moment after the gradients of the layer are allocated.
    for (layer, below, above), has_gradients in product(units, (False, True)):
        own = size * gathers * layer * has_gradients
        layer_moment = {
            MemoryKind.gathered_layers: gathers_layers * (layer + below),
            MemoryKind.activations: kept + setup.tokens * (in_layer if has_gradients else in_experts),
            MemoryKind.gradients_in_transit: size * head * gathers + (own + reduced * above) * trains_all,
        }
        moments.append(layer_moment)
    return moments


def _output_layer(model: ModelSize, setup: RankSetup, head: int) -> int:
    """Return the bytes of logits and gradients in the backward pass of the output layer.

    ``head`` is the number of trained parameters of the output layer.
    """
    chunk, of_logits = setup.chunk_tokens * model.vocabulary, 10 if setup.has_entropy_bonus else 6
    if head and setup.compute_bytes == 2 and setup.chunk_tokens < WEIGHT_CHUNK_TOKENS:
        # One matrix product computes the weight gradient of several chunks from the logit gradients of these chunks.
        joined = 2 * min(setup.tokens, WEIGHT_CHUNK_TOKENS) * model.vocabulary
        return _FLOAT32_BYTES * head + joined + max(2 * head, of_logits * chunk)
    return max(8 * chunk, _FLOAT32_BYTES * head + max(_FLOAT32_BYTES * head + 6 * chunk, of_logits * chunk))


def _padded(model: ModelSize, num_shards: int) -> ModelSize:
    """Return the model's sizes, including the padding that FSDP adds.

    FSDP pads the number of experts of a layer to a multiple of the number of shards. It adds no padding if it can shard
    another dimension (`learner.fsdp.shard_dimension`).
    """
    divides = not any(size % num_shards for size in (model.hidden, model.expert_width))
    if not model.num_experts or divides:
        return model
    factor = -(-model.num_experts // num_shards) * num_shards / model.num_experts
    layers = tuple(round(factor * size) for size in model.layers)
    return replace(model, layers=layers, num_parameters=model.num_parameters - sum(model.layers) + sum(layers))


def _layer_per_token(model: ModelSize, size: int, *, in_backward: bool = False) -> int:
    """Return the bytes per token that one layer keeps for the backward pass.

    If ``in_backward`` is true, add the gradients of the layer's widest module.

    - A norm keeps its input once in float32 and twice in the dtype of the computation.
    - The MLP keeps gate, activation, up projection and their product.
    - A mixture of experts also keeps the input and the output of each expert.
    - Attention keeps queries, keys, values and its output once. If the model normalizes queries and keys, attention
      keeps two more copies of queries and keys: one in float32, and one from before the rotary embedding.
    """
    norm = _FLOAT32_BYTES + 2 * size
    heads = model.query + model.key
    attention = (norm + size if model.norms_heads else 2 * size) * heads
    mlp = 4 * size * model.intermediate + 2 * size * model.hidden * model.experts_per_token
    if in_backward:
        # The widest module is the MLP or a norm.
        mlp = max(mlp + 2 * size * model.intermediate, 4 * _FLOAT32_BYTES * model.hidden)
    return 2 * norm * model.hidden + attention + mlp


def rank_setup(config: RunConfig, role: str, model: ModelSize, *, card_bytes: int = 0) -> RankSetup:
    """Return the options that determine the memory of a learner rank with the role ``role``, such as ``actor``.

    ``model`` has the sizes of the role's model. ``card_bytes`` is the memory of the GPU; 0 if it is unknown.
    If the memory is unknown, ``gradient_sync=auto`` is treated as ``update``.
    """
    learner = role_options(config, role)
    on_cuda, lora_rank = learner.device is Device.cuda, learner.lora.rank if role == "actor" else 0
    half = 2 if learner.dtype is Dtype.bfloat16 or (learner.dtype is Dtype.auto and on_cuda) else _FLOAT32_BYTES
    frozen = {Dtype.auto: half, Dtype.bfloat16: 2, Dtype.float32: _FLOAT32_BYTES}[learner.frozen_dtype]
    trained = lora_rank * model.linear_rows or model.num_parameters
    in_step = config.algorithm.groups_per_step * config.algorithm.samples_per_prompt * longest_sample(config)
    return RankSetup(
        num_shards=learner.fsdp_size if learner.fsdp_size > 0 else learner.num_ranks,
        tokens=min(learner.max_tokens_per_micro_batch, -(-in_step // learner.num_ranks)),
        checkpointing=on_cuda if learner.activation_checkpointing is None else bool(learner.activation_checkpointing),
        keeps_attention=learner.activation_checkpointing == SELECTIVE,
        whole_gradients=not sums_each_micro_batch(learner.gradient_sync, trained, card_bytes if on_cuda else 0),
        compute_bytes=half,
        frozen_bytes=frozen,
        chunk_tokens=learner.logprob_chunk_tokens,
        keeps_gathered=learner.resharding is Resharding.update,
        lora_rank=lora_rank,
        has_entropy_bonus=config.algorithm.entropy_coef > 0,
        offloaded=learner.offload_policy,
    )


def rank_memory(config: RunConfig, model: ModelSize, *, card_bytes: int = 0) -> dict[str, dict[MemoryKind, int]]:
    """Return the peak memory of one rank of each learner pool (a set of devices that serves some roles).

    The result is a dict from the pool's name to a dict from the kind of memory to bytes. The roles of a pool compute
    one after another, so the result is for the role that needs most. ``model`` has the sizes of the policy.
    """
    context = {MemoryKind.cuda_context: CONTEXT_BYTES} if config.learner.device is Device.cuda else {}
    pools: dict[str, dict[MemoryKind, int]] = {}
    for pool in learner_pools(config):
        uses = _role_uses(config, pool, model, card_bytes)
        turns = []
        for role, parts in uses.items():
            turns.append(Counter(context) + Counter(parts))
            for other in (other for other in uses if other != role):
                turns[-1].update(_kept(config, other, uses[other]))
        pools[pool] = dict(max(turns, key=Counter.total))
    return pools


def paused_rank_bytes(config: RunConfig, model: ModelSize, *, card_bytes: int = 0) -> int:
    """Return how many bytes a rank of the pool ``learner`` keeps on its device while an engine uses the same device."""
    uses = _role_uses(config, LEARNER_POOL, model, card_bytes)
    kept = sum(sum(_kept(config, role, parts, is_paused=True).values()) for role, parts in uses.items())
    return kept + (CONTEXT_BYTES if config.learner.device is Device.cuda else 0)


def _role_uses(config: RunConfig, pool: str, model: ModelSize, card_bytes: int) -> dict[str, dict[MemoryKind, int]]:
    """Return the peak memory of each role of a pool, as if the role did not share its devices with other roles."""
    uses = {}
    for role in (role for role, its_pool in learner_roles(config).items() if its_pool == pool):
        path = role_model(config, role)
        size = model if path == config.model.path else ModelSize.of(path)
        setup = rank_setup(config, role, size, card_bytes=card_bytes)
        uses[role] = rank_bytes(size, setup) if role in ("actor", "critic") else frozen_bytes(size, setup)
    return uses


def _kept(
    config: RunConfig, role: str, parts: Mapping[MemoryKind, int], *, is_paused: bool = False
) -> dict[MemoryKind, int]:
    options = role_options(config, role)
    keeps_model, keeps_optimizer = not options.param_offload, not options.optimizer_offload
    moves = is_paused and options.offload_at_transition_only and keeps_model and keeps_optimizer
    stays = {
        MemoryKind.parameters: keeps_model,
        MemoryKind.frozen_parameters: keeps_model,
        MemoryKind.optimizer: keeps_optimizer,
    }
    return {kind: size for kind, size in parts.items() if stays.get(kind) and not moves}


def frozen_bytes(model: ModelSize, setup: RankSetup) -> dict[MemoryKind, int]:
    """Return the peak memory of a rank with a frozen model, as a dict from kind of memory to bytes.

    A frozen model, such as the reference model, has only a forward pass.
    """
    model = _padded(model, setup.num_shards)
    size = setup.compute_bytes
    gathers = int(setup.num_shards > 1 or setup.frozen_bytes != size or setup.offloaded)
    gathered = model.num_parameters if setup.keeps_gathered else model.root
    two_layers = 0 if setup.keeps_gathered else max(map(sum, pairwise((0, *model.layers))))
    stored = 0 if setup.offloaded else setup.frozen_bytes * model.num_parameters // setup.num_shards
    parts = {
        MemoryKind.frozen_parameters: stored,
        MemoryKind.gathered_root_unit: gathers * size * gathered,
        MemoryKind.gathered_layers: gathers * size * two_layers,
        MemoryKind.activations: setup.tokens * (_layer_per_token(model, size) + size * model.hidden),
        MemoryKind.output_layer: 8 * setup.chunk_tokens * model.vocabulary,
    }
    return {kind: number for kind, number in parts.items() if number}


# Engines


def engine_memory(config: RunConfig, model: ModelSize, *, card_bytes: int = 0) -> dict[MemoryKind, int]:
    """Return the memory of one device of an engine, as a dict from kind of memory to bytes.

    The ``kv cache`` has room for all samples that the engine may run at the same time, at full length. The option
    ``rollout_fleet.sglang.max_total_tokens`` limits the cache, and so does SGLang's memory fraction on a GPU.
    """
    fleet = config.rollout_fleet
    size = _FLOAT32_BYTES if fleet.sglang.dtype_on(fleet.device) in FLOAT32_NAMES else 2
    devices = fleet.sglang.tp_size
    # SGLang's `--enable-fp32-lm-head` needs no float32 copy of the output layer's weight.
    weights = size * model.num_parameters // devices
    per_token = size * model.cached // min(devices, model.cache_heads)
    cache = kv_tokens(config) * per_token
    if fleet.engine is not EngineKind.sglang or fleet.device is not EngineDevice.cuda or not card_bytes:
        return {MemoryKind.weights: weights, MemoryKind.kv_cache: cache}
    reserved = engine_reserve(card_bytes, devices, fleet.sglang.extra_args)
    room = max(card_bytes - reserved - weights, 0)
    least = longest_sample(config) * per_token
    return {
        MemoryKind.weights: weights,
        MemoryKind.kv_cache: max(least, min(cache, room)),
        MemoryKind.activations_and_graphs: reserved,
    }


def engine_reserve(card_bytes: int, tp_size: int, extra_args: Sequence[str] = ()) -> int:
    """Return the number of bytes that SGLang reserves on a GPU for activations and CUDA graphs.

    The GPU has ``card_bytes`` bytes. The formula comes from SGLang 0.5.21 (``arg_groups/memory_hook.py``).
    ``extra_args`` are further arguments of SGLang. If they contain ``--mem-fraction-static``, the formula is not used:
    SGLang then reserves the bytes of the GPU that are outside of this fraction.
    """
    words = [word for argument in extra_args for word in argument.split("=", 1)]
    if "--mem-fraction-static" in words:
        return round(card_bytes * (1 - float(words[words.index("--mem-fraction-static") + 1])))
    mib = card_bytes / _MIB
    sizes = (
        (20, 2048, 8, 8),
        (35, 4096, 48, 160),
        (60, 4096, 32, 160),
        (160, 8192, 256, 512),
        (math.inf, 16384, 512, 512),
    )
    _, chunk, samples, samples_tp4 = next(row for row in sizes if mib < row[0] * 1024)
    samples = samples if tp_size < 4 else samples_tp4
    reserved = 512 + 1.5 * chunk + tp_size / 8 * 1024 + 2 * samples + 8 * _GRAPH_SIZES
    return round(max(reserved, 10 * 1024 if mib > 60 * 1024 else 0) * _MIB)


def longest_sample(config: RunConfig) -> int:
    """Return the number of tokens of the longest possible sample: prompt and response."""
    return longest_sequence(config)


def kv_tokens(config: RunConfig) -> int:
    """Return the largest number of tokens that the KV cache of one engine must have room for."""
    fleet = config.rollout_fleet
    num_samples = fleet.most_groups_in_flight * config.algorithm.samples_per_prompt
    wanted = min(num_samples, fleet.sglang.max_running_requests) * longest_sample(config)
    return min(wanted, fleet.sglang.max_total_tokens) if fleet.sglang.max_total_tokens else wanted
