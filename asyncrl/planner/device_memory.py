"""Estimates the memory of each device by part from the options and ``config.json``, before the run starts.

The memory of parameters, gradients and optimizer state follows from the way the learner stores them (docs/learner.md).
Activations and logits are estimates from the tensors that a layer keeps for its backward pass. The KV cache is the
cache of the longest possible samples.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import LEARNER_POOL, RunConfig, learner_pools, learner_roles, model_settings
from learner.config import Device, Dtype, GradientSync, Resharding
from rollout_fleet.config import FLOAT32_NAMES

_FLOAT32_BYTES = 4
_ADAM_STATES = 2
_LOGITS_COPIES = 3
"""Float32 tensors in the shape of a chunk's logits at the same time: logits, log-softmax and gradient."""
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a decoder that determine its memory.

    Attributes:
        num_parameters: Number of all parameters.
        num_layers: Number of decoder layers.
        hidden: Width of the residual stream.
        intermediate: Width of the MLP; for a mixture of experts, the total width of the experts per token.
        query: Query heads × head size.
        key: Key heads × head size.
        vocabulary: Number of tokens in the vocabulary.
        linear_rows: Sum of the input and output widths of all linear layers: the parameters of LoRA adapters of rank 1.
    """

    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    query: int
    key: int
    vocabulary: int
    linear_rows: int

    @classmethod
    def of(cls, path: str) -> ModelSize:
        """Read the sizes from ``config.json``, and the number of parameters from the headers of the weights if present.

        Raises:
            ValueError: ``config.json`` is missing, or it lacks the usual names of a decoder's sizes.
        """
        if not Path(path, "config.json").is_file():
            raise ValueError(f"model.path={path} holds no config.json: the memory of its model cannot be estimated")
        try:
            settings = model_settings(path)
            hidden, num_layers = settings["hidden_size"], settings["num_hidden_layers"]
            heads = settings["num_attention_heads"]
            head_dim = settings.get("head_dim") or hidden // heads
            query, key = heads * head_dim, settings.get("num_key_value_heads", heads) * head_dim
            num_experts = settings.get("num_experts") or settings.get("num_local_experts") or 0
            width = settings.get("moe_intermediate_size") or settings["intermediate_size"]
            visited = settings.get("num_experts_per_tok", 1) if num_experts else 1
            vocabulary = settings["vocab_size"]
        except KeyError as error:
            raise ValueError(
                f"model.path={path}: the memory of its model cannot be estimated, config.json lacks {error}"
            ) from error
        attention = hidden * (2 * query + 2 * key)
        mlp = 3 * hidden * width * max(1, num_experts) + hidden * num_experts
        embeddings = vocabulary * hidden * (1 if settings.get("tie_word_embeddings") else 2)
        counted = _stored_parameters(Path(path))
        linear = num_layers * (4 * hidden + 2 * query + 2 * key + 3 * (hidden + width) * max(1, num_experts))
        return cls(
            num_parameters=counted or num_layers * (attention + mlp + 2 * hidden) + embeddings + hidden,
            num_layers=num_layers,
            hidden=hidden,
            intermediate=width * visited,
            query=query,
            key=key,
            vocabulary=vocabulary,
            linear_rows=linear,
        )


def _stored_parameters(path: Path) -> int:
    """Number of parameters in the headers of a folder's safetensors files; 0 if the folder has none."""
    total = 0
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for length in tensor["shape"]:
                    size *= length
                total += size
    return total


def rank_memory(config: RunConfig, model: ModelSize) -> dict[str, dict[str, int]]:
    """Peak memory of one rank, as learner pool → part → bytes."""
    parts: dict[str, dict[str, int]] = {}
    for role, pool in learner_roles(config).items():
        is_trained = role in ("actor", "critic")
        of_role = _trained(config, model, role, pool) if is_trained else _frozen(config, model, pool)
        found = parts.setdefault(pool, {})
        # The roles of a pool take turns, so they share the memory of activations and logits. The other parts add up.
        for part, size in of_role.items():
            takes_turns = part in ("activations", "logits")
            found[part] = max(found.get(part, 0), size) if takes_turns else found.get(part, 0) + size
    return parts


def _trained(config: RunConfig, model: ModelSize, role: str, pool: str) -> dict[str, int]:
    learner = config.learner
    rank = learner.lora.rank if role == "actor" else 0
    num_trained = rank * model.linear_rows if rank else model.num_parameters
    shards = _shards(config, pool)
    is_kept_on_host = learner.offload_policy
    # A rank gathers the layer that computes and prefetches the next one.
    two_layers = 2 * (model.num_parameters - model.vocabulary * model.hidden) // max(1, model.num_layers)
    gathered = model.num_parameters if learner.resharding is Resharding.update else two_layers
    whole = learner.gradient_sync is GradientSync.update
    parts = {
        "parameters": 0 if is_kept_on_host else _FLOAT32_BYTES * num_trained // shards,
        "frozen parameters": _frozen_bytes(config) * model.num_parameters // shards if rank else 0,
        "gathered parameters": _compute_bytes(config) * gathered if shards > 1 or _compute_bytes(config) == 2 else 0,
        "gradients": _FLOAT32_BYTES * num_trained // (1 if whole else shards),
        "optimizer": 0 if is_kept_on_host else _ADAM_STATES * _FLOAT32_BYTES * num_trained // shards,
    }
    return {name: size for name, size in {**parts, **_working(config, model)}.items() if size}


def _frozen(config: RunConfig, model: ModelSize, pool: str) -> dict[str, int]:
    return {
        "frozen parameters": _frozen_bytes(config) * model.num_parameters // _shards(config, pool),
        "logits": _working(config, model)["logits"],
    }


def _working(config: RunConfig, model: ModelSize) -> dict[str, int]:
    """Memory of the forward and backward pass of a full micro-batch. The token budget is per rank."""
    learner = config.learner
    longest = config.data.max_prompt_tokens + config.rollout_fleet.sampling.max_new_tokens
    in_step = config.algorithm.groups_per_step * config.algorithm.samples_per_prompt * longest
    tokens, size = min(learner.max_tokens_per_micro_batch, -(-in_step // learner.num_ranks)), _compute_bytes(config)
    kept = 5 * model.hidden + 2 * model.query + 2 * model.key + 3 * model.intermediate
    layers = kept + model.num_layers * model.hidden if learner.activation_checkpointing else model.num_layers * kept
    logits = _LOGITS_COPIES * learner.logprob_chunk_tokens * model.vocabulary * _FLOAT32_BYTES
    return {"activations": size * tokens * layers, "logits": logits}


def engine_memory(config: RunConfig, model: ModelSize) -> dict[str, int]:
    """Memory of one device of an engine, as part → bytes.

    ``kv cache`` is the cache for the full length of all samples that one worker may run, limited to
    ``rollout_fleet.sglang.max_total_tokens``.
    """
    fleet = config.rollout_fleet
    size = _FLOAT32_BYTES if fleet.sglang.dtype_on(fleet.device) in FLOAT32_NAMES else 2
    num_devices = fleet.sglang.tp_size
    return {
        "weights": size * model.num_parameters // num_devices,
        "kv cache": kv_tokens(config) * 2 * model.num_layers * model.key * size // num_devices,
    }


def kv_tokens(config: RunConfig) -> int:
    """Largest number of KV cache tokens that one engine can use."""
    fleet = config.rollout_fleet
    num_samples = fleet.most_groups_in_flight * config.algorithm.samples_per_prompt
    longest = config.data.max_prompt_tokens + fleet.sampling.max_new_tokens
    wanted = min(num_samples, fleet.sglang.max_running_requests) * longest
    return min(wanted, fleet.sglang.max_total_tokens) if fleet.sglang.max_total_tokens else wanted


def _shards(config: RunConfig, pool: str) -> int:
    size = learner_pools(config)[pool]
    return config.learner.fsdp_size if pool == LEARNER_POOL and config.learner.fsdp_size > 0 else size


def _compute_bytes(config: RunConfig) -> int:
    return _bytes_of(config.learner.dtype, config.learner.device)


def _frozen_bytes(config: RunConfig) -> int:
    dtype = config.learner.frozen_dtype
    return _compute_bytes(config) if dtype is Dtype.auto else _bytes_of(dtype, config.learner.device)


def _bytes_of(dtype: Dtype, device: Device) -> int:
    is_half = dtype is Dtype.bfloat16 or (dtype is Dtype.auto and device is Device.cuda)
    return 2 if is_half else _FLOAT32_BYTES
