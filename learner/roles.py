"""The learner's roles: actor, critic, reference and reward model.

A role defines a model, what the model computes for other roles, and how it is trained. To add a role, add an entry to
`ROLES`. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.single_controller.dispatch import DataProtoFuture

from .config import AlgorithmConfig, LearnerConfig, OptimizerConfig
from .types import RankBatch, SampleKey

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .fsdp import ParameterTypes
    from .heads import PackedHead
    from .losses import Objective

TokenScores = Mapping[SampleKey, np.ndarray]
"""What a model computes for each token in the loss, by trajectory: [tokens in the loss] float32, one branch (path
through the turns) after the other."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """A role of the learner: which model to load, what the model computes, and how it is trained.

    Attributes:
        name: Name of the role. Example: ``critic``.
        load: Function that builds the model from its path and dtype, such as `learner.pretrained.load_causal_lm`.
        head: Function that wraps the model in a head. It gets the model, the options and the sampling temperature.
        column: Name of the token column that the role computes for other roles. Example: ``values``.
        objective: Function that makes the training objective from the options; None for a frozen role.
        optimizer: Function that returns the options of AdamW and its schedule; None for a frozen role.
        reads: Function that returns the names of the computed columns that a learner step of the role needs.
        measured_steps: Function that returns the number of learner steps at the start of the run that compute the
            role's metrics, but do not train the role.
        adapters: True if the role gets the adapters of ``learner.lora``.
    """

    name: str
    load: Callable[..., PreTrainedModel]
    head: Callable[[PreTrainedModel, LearnerConfig, float], PackedHead]
    column: str
    objective: Callable[[LearnerConfig, AlgorithmConfig], Objective] | None = None
    optimizer: Callable[[LearnerConfig], OptimizerConfig] | None = None
    reads: Callable[[AlgorithmConfig], tuple[str, ...]] = lambda _algorithm: ()
    measured_steps: Callable[[LearnerConfig, AlgorithmConfig], int] = lambda _config, _algorithm: 0
    adapters: bool = False

    def build(self, model_path: str, config: LearnerConfig, types: ParameterTypes, temperature: float) -> PackedHead:
        """Make the role's head, with the model, its adapters and its vision tower. The parameters have no values yet.

        Raises `ValueError` if an option does not suit the model.
        """
        is_adapted = self.adapters and config.lora.rank > 0
        held = types.trained if self.objective is not None and not is_adapted else types.frozen
        pretrained = self.load(model_path, held)
        vision = _vision_tower(pretrained, model_path)
        if is_adapted and vision is not None:
            raise ValueError(
                f"learner.lora.rank must be 0 for a model with images, got {config.lora.rank} for {model_path!r}; "
                "adapters of vision models are not supported"
            )
        if is_adapted:
            _add_adapters(pretrained, config.lora, dtype=types.trained)
        head = self.head(pretrained, config, temperature)
        head.vision = vision
        if config.freeze_vision:
            if vision is None:
                raise ValueError(
                    f"learner.freeze_vision is true, but {model_path!r} has no vision tower; set the option to false"
                )
            vision.freeze()
        return head


def _function(module: str, name: str) -> Callable[..., Any]:
    """Return a function that calls the function ``name`` of ``module``. The first call imports the module and torch."""

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(import_module(f".{module}", __package__), name)(*arguments, **options)

    return call


_load_causal_lm = _function("pretrained", "load_causal_lm")
_add_adapters = _function("lora", "add_adapters")
_vision_tower = _function("vision", "vision_tower")
_new_log_prob_head = _function("heads", "LogProbHead")
_new_value_head = _function("heads", "ValueHead")
_new_reward_head = _function("heads", "RewardHead")
_policy_objective = _function("losses", "policy_objective")
_value_objective = _function("losses", "value_objective")


def _log_prob_head(model: PreTrainedModel, config: LearnerConfig, temperature: float) -> PackedHead:
    return _new_log_prob_head(model, temperature=temperature, chunk_tokens=config.logprob_chunk_tokens)


ACTOR = Role(
    name="actor",
    load=_load_causal_lm,
    head=_log_prob_head,
    column="reference_logprobs",  # with LoRA, the actor computes this column with its adapters off
    objective=lambda _config, algorithm: _policy_objective(algorithm),
    optimizer=lambda config: config.optimizer,
    reads=lambda algorithm: ("values",) * algorithm.needs_critic + ("reference_logprobs",) * algorithm.needs_reference,
    measured_steps=lambda config, algorithm: config.critic.warmup_steps if algorithm.needs_critic else 0,
    adapters=True,
)
CRITIC = Role(
    name="critic",
    load=_function("pretrained", "load_critic"),
    head=lambda model, _config, _temperature: _new_value_head(model),
    column="values",
    objective=lambda config, _algorithm: _value_objective(config.critic.value_clip),
    optimizer=lambda config: config.critic.optimizer,
    reads=lambda algorithm: ("values",) + ("reference_logprobs",) * (algorithm.kl_reward_coef > 0),
)
REFERENCE = Role(name="ref", load=_load_causal_lm, head=_log_prob_head, column="reference_logprobs")
REWARD_MODEL = Role(
    name="rm",
    load=_function("pretrained", "load_reward_model"),
    head=lambda model, _config, _temperature: _new_reward_head(model),
    column="rewards",
)

ROLES = {role.name: role for role in (ACTOR, CRITIC, REFERENCE, REWARD_MODEL)}


def scored_by(column: str, config: LearnerConfig) -> Role:
    """Return the role that computes a column, such as ``values``.

    With LoRA the actor computes the reference's column, with its adapters off.
    """
    if column == REFERENCE.column:
        return ACTOR if config.lora.rank else REFERENCE
    return next(role for role in ROLES.values() if role.column == column)


@dataclass(frozen=True, kw_only=True)
class RemoteScores:
    """The scores that the ranks of a role are computing for a batch.

    Attributes:
        role: Name of the role that computes the scores. Example: ``critic``.
        batches: The role's batches, one per data-parallel rank.
        results: References to the results of the ranks' calls, one per rank. Only the first rank of each
            sequence-parallel (sp) group returns scores.
    """

    role: str
    batches: Sequence[RankBatch]
    results: Sequence[Any]

    def needed_by(self, batches: Sequence[RankBatch]) -> list[DataProtoFuture]:
        """Return one future of scores for each data-parallel rank of another role.

        ``batches`` are the batches of the other role's ranks in the same learner step. The future of a batch waits only
        for the ranks that score the samples of this batch. The future of an empty batch waits for one rank.
        """
        first_sp_ranks = self.results[:: len(self.results) // len(self.batches)]
        scored = [(result, set(batch.sample_keys)) for result, batch in zip(first_sp_ranks, self.batches, strict=True)]
        needed = [[result for result, keys in scored if not keys.isdisjoint(batch.sample_keys)] for batch in batches]
        return [DataProtoFuture.concat(results or [first_sp_ranks[0]]) for results in needed]
