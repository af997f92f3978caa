"""Compares the memory of ranks and engines with the memory of a GPU, and names options that make a run fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.config import LEARNER_POOL, RunConfig, learner_roles, role_model, role_options
from asyncrl.planner.device_memory import (
    CONTEXT_BYTES,
    GIB,
    MemoryKind,
    ModelSize,
    engine_memory,
    longest_sample,
    paused_rank_bytes,
    rank_memory,
)
from learner.config import ROLE_SECTIONS, SELECTIVE, Device, GradientSync, Resharding
from rollout_fleet.config import EngineDevice, EngineKind

_MIB = 1 << 20
USABLE_SHARE = 0.95
"""Fraction of a GPU's memory that a run may use. torch's allocator also holds bytes that no tensor uses."""
SELECTIVE_SHARE = 0.85
"""By default, ranks keep the activations of attention if a rank then needs at most this fraction of a GPU's memory."""
CARDS = {
    "A10": 23028, "A100": 81920, "A100-40": 40960, "B200": 183359, "H100": 81559, "H20": 97871, "H200": 143771,
    "L4": 23034, "L40S": 46068, "RTX4090": 24564,
}  # fmt: skip
"""The memory that ``nvidia-smi`` shows for a GPU, in MiB, by the GPU's name."""

_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
_MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_key_value_heads": 4,
}
MODELS: Mapping[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3 | dict(zip(_SIZES, (1024, 3072, 28, 16, True), strict=True)),
    "Qwen3-4B": _QWEN3 | dict(zip(_SIZES, (2560, 9728, 36, 32, True), strict=True)),
    "Qwen3-8B": _QWEN3 | dict(zip(_SIZES, (4096, 12288, 36, 32, False), strict=True)),
    "Qwen3-14B": _QWEN3 | dict(zip(_SIZES, (5120, 17408, 40, 40, False), strict=True)),
    "Qwen3-32B": _QWEN3 | dict(zip(_SIZES, (5120, 25600, 64, 64, False), strict=True)),
    "Qwen3-30B-A3B": _QWEN3 | dict(zip(_SIZES, (2048, 6144, 48, 32, False), strict=True)) | _MIXTURE,
    "Qwen2.5-7B": {"model_type": "qwen2", "num_key_value_heads": 4, "vocab_size": 152064}
    | dict(zip(_SIZES, (3584, 18944, 28, 28, False), strict=True)),
}
"""The settings of ``config.json`` that determine the memory, by model name."""


def card_bytes(name: str) -> int:
    """Return the memory of a GPU in bytes; ``name`` is a key of `CARDS`. Raises `ValueError` for another name."""
    if name.upper() not in CARDS:
        raise ValueError(f"the GPU must be one of {', '.join(CARDS)}, got {name!r}")
    return CARDS[name.upper()] * _MIB


def model_size(path: str) -> ModelSize:
    """Return the sizes of a model. ``path`` is the model's folder, or the name of a model in `MODELS`.

    Raises the errors of `ModelSize.of`.
    """
    known = MODELS.get(Path(path).name.removesuffix("-Base"))
    if known is not None and not Path(path).is_dir():
        return ModelSize.from_settings(known, path)
    return ModelSize.of(path)


def policy_size(config: RunConfig) -> ModelSize:
    """Return the sizes of a run's policy model.

    The function also reads the models of the other roles, such as the critic. Raises the errors of `ModelSize.of` for
    each model.
    """
    for role in learner_roles(config):
        model_size(role_model(config, role))
    return model_size(config.model.path)


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """The memory that a run needs on one device of a kind, and the memory that the device has.

    Attributes:
        name: The kind of device: ``learner rank (POOL)`` or ``engine``.
        parts: Bytes by kind of memory.
        card_bytes: Memory of the GPU; 0 if there is no GPU or its memory is unknown.
    """

    name: str
    parts: Mapping[MemoryKind, int]
    card_bytes: int = 0

    @property
    def total(self) -> int:
        """Sum of ``parts``, in bytes."""
        return sum(self.parts.values())

    @property
    def usable(self) -> int:
        """Bytes of the GPU's memory that a run may use.

        A run may use the fraction `USABLE_SHARE` of the memory, or all of it if ``parts`` includes SGLang's reserve.
        """
        has_reserve = MemoryKind.activations_and_graphs in self.parts
        return self.card_bytes if has_reserve else round(self.card_bytes * USABLE_SHARE)

    @property
    def fits(self) -> bool:
        """True if ``total`` is at most ``usable``, or if ``card_bytes`` is 0."""
        return not self.card_bytes or self.total <= self.usable

    def __str__(self) -> str:
        parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in self.parts.items() if size >= GIB / 20)
        return f"{self.name} needs {self.total / GIB:.1f} GiB ({parts})"


def device_uses(config: RunConfig, model: ModelSize, card: int = 0) -> list[DeviceUse]:
    """Return the memory that a run needs on each kind of device: one entry per learner pool, then one for an engine.

    ``model`` has the sizes of the policy. ``card`` is the memory of a GPU in bytes; 0 if it is unknown.
    """
    learner, is_shared = config.learner, config.placement.colocated
    on_card = card if learner.device is Device.cuda else 0
    engines_on_card = card if config.rollout_fleet.device is EngineDevice.cuda else 0
    uses = []
    for pool, parts in rank_memory(config, model, card_bytes=on_card).items():
        shares = is_shared and on_card and pool == LEARNER_POOL
        paused_engine = {MemoryKind.paused_engine: CONTEXT_BYTES} if shares else {}
        uses.append(DeviceUse(name=f"learner rank ({pool})", parts={**parts, **paused_engine}, card_bytes=on_card))
    paused_rank = {MemoryKind.paused_rank: paused_rank_bytes(config, model, card_bytes=on_card)} if is_shared else {}
    left = max(1, engines_on_card - sum(paused_rank.values())) if engines_on_card else 0
    engine = {**engine_memory(config, model, card_bytes=left), **paused_rank}
    return [*uses, DeviceUse(name="engine", parts=engine, card_bytes=engines_on_card)]


def check_memory_of_devices(config: RunConfig, model: ModelSize, card: int) -> None:
    """Check that the ranks and engines of a run fit on GPUs with ``card`` bytes of memory.

    Raises:
        ValueError: a rank or an engine does not fit. The message has the needed memory by kind, and options that make
            the run fit.
    """
    misfits = [use for use in device_uses(config, model, card) if not use.fits]
    if not misfits:
        return
    worst = "; ".join(f"{use}, expected at most {use.usable / GIB:.1f}" for use in misfits)
    options = " ".join(f"{name}={str(value).lower()}" for name, value in remedies_of(config, model, card).items())
    remedy = f"set {options}" if options else "use GPUs with more memory, or a smaller model"
    raise ValueError(f"the run does not fit on GPUs of {card / GIB:.1f} GiB: {worst}; {remedy}")


def with_recomputation(config: RunConfig, card: int) -> RunConfig:
    """Return a copy of ``config`` with ``learner.activation_checkpointing=selective`` if the ranks have enough memory.

    Memory is enough if each rank then needs at most `SELECTIVE_SHARE` of a GPU. Otherwise, or if the option is already
    set, return ``config``. ``card`` is the memory of a GPU in bytes; 0 if it is unknown.
    """
    if config.learner.activation_checkpointing is not None or config.learner.device is not Device.cuda or not card:
        return config
    selective = with_options(config, {"learner.activation_checkpointing": SELECTIVE})
    try:
        *ranks, _ = device_uses(selective, policy_size(config), card)
    except ValueError:
        return config
    return selective if all(use.total <= SELECTIVE_SHARE * card for use in ranks) else config


def remedies_of(config: RunConfig, model: ModelSize, card: int) -> dict[str, Any]:
    """Return options that make a run fit on GPUs with ``card`` bytes, as a dict from dotted option name to new value.

    Options that slow the run down least are tried first. The dict is empty if no combination of options suffices.
    """
    needed: dict[str, Any] = {}
    for name, value in _remedies(config):
        with_it = {**needed, name: value}
        excess = _excess(with_options(config, with_it), model, card)
        if excess < _excess(with_options(config, needed), model, card):
            needed = with_it
        if not excess:
            break
    else:
        return {}
    for name in list(needed):  # leave out an option that later options made unnecessary
        without = {other: value for other, value in needed.items() if other != name}
        if not _excess(with_options(config, without), model, card):
            needed = without
    changed = with_options(config, needed)
    num_engines = changed.learner.num_ranks // changed.rollout_fleet.sglang.tp_size
    if config.placement.colocated and num_engines != config.rollout_fleet.num_engines:
        needed["rollout_fleet.num_engines"] = num_engines  # the engines must use the same devices as the ranks
    return needed


def _excess(config: RunConfig, model: ModelSize, card: int) -> int:
    return sum(max(0, use.total - use.usable) for use in device_uses(config, model, card) if use.card_bytes)


def _remedies(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield pairs (option, new value) that reduce memory. The first options cost the least time.

    If a role sets its own value for an option, yield the role's option too.
    """
    for name, value in _remedies_of_all_roles(config):
        yield name, value
        section, _, option = name.rpartition(".")
        names = {config.learner.option_name(role, option) for role in learner_roles(config)}
        yield from ((own, value) for own in sorted(names - {name}) if section == "learner")


def _remedies_of_all_roles(config: RunConfig) -> Iterator[tuple[str, Any]]:
    learner, tp_size = config.learner, config.rollout_fleet.sglang.tp_size
    yield "learner.gradient_sync", GradientSync.micro_batch
    yield "learner.activation_checkpointing", True
    yield "learner.resharding", Resharding.layer
    if config.placement.colocated:
        yield "learner.offload_at_transition_only", True
    own = [role_options(config, role) for role in learner_roles(config)]
    budget = max(options.max_tokens_per_micro_batch for options in own)
    longest = -(-longest_sample(config) // min(options.sp_size for options in own))
    while (budget := budget // 2) >= longest:
        yield "learner.max_tokens_per_micro_batch", budget
    yield "learner.logprob_chunk_tokens", min(256, learner.logprob_chunk_tokens)
    sizes = (size for size in (2, 4, 8) if size > tp_size)
    is_shared = config.placement.colocated
    yield from ((_TP_SIZE, size) for size in sizes if not (is_shared and learner.num_ranks % size))
    yield from (("learner.num_ranks", learner.num_ranks * factor) for factor in (2, 4, 8, 16))
    yield "learner.offload_policy", True


def with_options(config: RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """Return a copy of ``config`` with new values; ``options`` maps dotted option names to these values."""
    learner, fleet = config.learner, config.rollout_fleet
    for name, value in options.items():
        section, _, last = name.rpartition(".")
        if section == "learner":
            learner = replace(learner, **{last: value})
        elif section.startswith("learner."):
            role = section.removeprefix("learner.")
            learner = replace(learner, **{role: replace(getattr(learner, role), **{last: value})})
        elif section == "rollout_fleet":
            fleet = replace(fleet, **{last: value})
        else:
            fleet = replace(fleet, sglang=replace(fleet.sglang, **{last: value}))
    return replace(config, learner=learner, rollout_fleet=fleet)


# Layouts


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A division of GPUs between learner ranks and engines that fits into the memory of the GPUs.

    Attributes:
        sp_size: Number of ranks that compute one sequence together. Each of these ranks has a part of the sequence.
        num_engines: Number of engines. They use the GPUs that the ranks do not use.
        tp_size: Number of GPUs per engine.
        budget: Largest ``learner.max_tokens_per_micro_batch`` that fits, in tokens.
    """

    num_ranks: int
    sp_size: int
    num_engines: int
    tp_size: int
    budget: int
    rank: DeviceUse
    engine: DeviceUse


def layouts_that_fit(config: RunConfig, model: ModelSize, card: int, num_gpus: int) -> list[Layout]:
    """Return layouts, divisions of GPUs between ranks and engines, that fit into the memory of the GPUs.

    ``num_gpus`` is the number of GPUs, and ``card`` the memory of each GPU in bytes. For each number of ranks and each
    ``sp_size``, the list has at most one layout: the layout with the largest token budget. Budgets are powers of two
    from 1,024 to 131,072. The ``sp_size`` ranks of a sequence must together hold the longest sample. All roles run on
    the same ranks.
    """
    fleet, learner = config.rollout_fleet, config.learner
    own = [learner.own_options(role) for role in learner_roles(config)]
    sizes_of_roles = [options.get(name, 1) for options in own for name in ("sp_size", "fsdp_size")]
    on_cuda = replace(
        config,
        learner=replace(
            learner, device=Device.cuda, num_ranks=math.lcm(*map(abs, sizes_of_roles)), sp_size=1, fsdp_size=-1
        ),
        rollout_fleet=replace(fleet, device=EngineDevice.cuda, engine=EngineKind.sglang),
        placement=replace(config.placement, pools={}, **dict.fromkeys(ROLE_SECTIONS.values(), LEARNER_POOL)),
        # Choose a number of groups so large that each micro-batch is full.
        algorithm=replace(config.algorithm, groups_per_step=1 << 20),
    )
    tp_sizes = [size for size in (1, 2, 4, 8) if num_gpus > size and not model.key % size]
    engines = ((size, device_uses(with_options(on_cuda, {_TP_SIZE: size}), model, card)[-1]) for size in tp_sizes)
    tp_size, engine = next(((size, use) for size, use in engines if use.fits), (0, None))
    if engine is None:
        return []
    found = []
    for num_ranks in (count for count in range(1, num_gpus) if not (num_gpus - count) % tp_size):
        if any(num_ranks % size for size in sizes_of_roles):
            continue
        for sp_size in (size for size in (1, 2, 4, 8) if not num_ranks % size and not model.query % size):
            for budget in (1 << power for power in range(17, 9, -1)):
                asked = {"num_ranks": num_ranks, "sp_size": sp_size, "max_tokens_per_micro_batch": budget}
                options = {f"learner.{name}": value for name, value in asked.items()}
                divided = with_options(on_cuda, {**options, _TP_SIZE: tp_size})
                rank = device_uses(divided, model, card)[0]
                if rank.fits and _holds_longest_sample(divided):
                    num_engines = (num_gpus - num_ranks) // tp_size
                    sizes = {"num_ranks": num_ranks, "sp_size": sp_size, "num_engines": num_engines, "tp_size": tp_size}
                    found.append(Layout(**sizes, budget=budget, rank=rank, engine=engine))
                    break
    return found


def _holds_longest_sample(config: RunConfig) -> bool:
    each = [role_options(config, role) for role in learner_roles(config)]
    return min(one.max_tokens_per_micro_batch * one.sp_size for one in each) >= longest_sample(config)


_TP_SIZE = "rollout_fleet.sglang.tp_size"
