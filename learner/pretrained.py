"""Loads Hugging Face models with the packed attention: a causal language model, or a classifier with one label.

The critic is a token classifier, the reward model a sequence classifier: transformers' generic head on the family's
backbone, the same for every family, and in the layout of the family's own classifier where transformers has one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from .attention import ATTENTION_NAME

log = logging.getLogger(__name__)

SCORE_HEAD = "score"
"""Attribute of a classifier that holds its linear head."""

_MULTIPLIES_BY_LOGITS_SCALING = frozenset({"hyperclovax"})
"""Types of models whose logits are multiplied by ``logits_scaling``; those of all others are divided by it."""

_ADDS_TOKENS = frozenset({"cpmant"})
"""Types of models whose forward pass puts tokens of its own before a sequence, which a backbone alone does not."""

_RANDOM_WHILE_TRAINING = re.compile(r"drop|pdrop|jitter", re.IGNORECASE)
"""Names of numbers in modules of transformers that say how much is left out, or added as noise, while training."""


def load_causal_lm(model_path: str, dtype: torch.dtype, *, on_meta: bool = False) -> PreTrainedModel:
    """Load a causal language model in Hugging Face layout, in training mode, with parameters of type ``dtype``.

    With ``on_meta`` it is built without its weights, on the meta device, not the CPU; `learner.fsdp.shard_model` fills
    it. Raises `ValueError` if there is no model at the path, or packed training would compute it wrongly.
    """
    _check_path(model_path)
    config = AutoConfig.from_pretrained(model_path)
    if config.model_type in _ADDS_TOKENS:
        raise ValueError(
            f"{model_path!r} is of type {config.model_type}, whose forward pass adds tokens of its own to every "
            "sequence, which the learner does not compute; use another model"
        )
    if on_meta:
        with torch.device("meta"), _refused_by_name(model_path):
            empty = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
        return _deterministic(cast("PreTrainedModel", empty))
    if getattr(config, "output_router_logits", False):
        log.warning(
            "%s sets output_router_logits=true: the learner does not add router_aux_loss_coef=%s times the routers' "
            "balancing loss, which is not a sum over tokens and would depend on how micro-batches split them",
            model_path,
            getattr(config, "router_aux_loss_coef", None),
        )
    with _refused_by_name(model_path):
        model = AutoModelForCausalLM.from_pretrained(
            model_path, config=config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    return _deterministic(_own_storage(cast("PreTrainedModel", model)))


@dataclass(frozen=True, kw_only=True)
class LogitShape:
    """What a family computes from the product z of hidden state and output embedding: c · tanh(scale · z ÷ c).

    Attributes:
        scale: Factor on z; Granite divides by ``logits_scaling``, Cohere multiplies by ``logit_scale``.
        soft_cap: c; None: the logits are scale · z. Gemma 2 has 30 (arXiv 2408.00118, section 2).
    """

    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        """The logits of [..., V] float32 products, which are overwritten."""
        logits = products if self.scale == 1.0 else products.mul_(self.scale)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of the logits by the products, at [..., V] logits."""
        return self.scale if self.soft_cap is None else self.scale * (1 - (logits / self.soft_cap).square())


def logit_shape(config: PreTrainedConfig) -> LogitShape:
    """What a model's configuration says of its logits; the self-test compares it with the model's own."""
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0
    if divisor := getattr(text, "logits_scaling", None):
        scale *= divisor if text.model_type in _MULTIPLIES_BY_LOGITS_SCALING else 1 / divisor
    return LogitShape(scale=float(scale), soft_cap=getattr(text, "final_logit_softcapping", None) or None)


def load_critic(model_path: str, dtype: torch.dtype, *, on_meta: bool = False) -> PreTrainedModel:
    """Load a token classifier with one label, or give a causal language model to start from a head of zeros.

    A new critic then predicts 0 for every state, so its first advantages are the returns themselves. Arguments are
    those of `load_causal_lm`. Raises `ValueError` if there is no model, or one with another number of labels.
    """
    model, missing = _load_classifier(GenericForTokenClassification, model_path, dtype, on_meta)
    if missing:
        log.info("%s lacks %s: the critic starts with zeros there", model_path, sorted(missing))
    for name in missing:
        nn.init.zeros_(model.get_parameter(name))
    return model


def load_reward_model(model_path: str, dtype: torch.dtype, *, on_meta: bool = False) -> PreTrainedModel:
    """As `load_causal_lm`, a sequence classifier with one label; `ValueError` if its head is missing."""
    model, missing = _load_classifier(GenericForSequenceClassification, model_path, dtype, on_meta)
    if missing:
        raise ValueError(
            f"reward model path must hold a trained sequence classifier, got {model_path!r} without {sorted(missing)}; "
            "train one with AutoModelForSequenceClassification(num_labels=1)"
        )
    return model


def _load_classifier(
    head: type, model_path: str, dtype: torch.dtype, on_meta: bool
) -> tuple[PreTrainedModel, set[str]]:
    """The classifier, and the names of the head's parameters that the path does not have."""
    _check_path(model_path)
    config = AutoConfig.from_pretrained(model_path, num_labels=1)
    classifier, options = _classifier_class(head, config, model_path), {"attn_implementation": ATTENTION_NAME}
    with _refused_by_name(model_path):
        if on_meta:
            with torch.device("meta"):
                return _deterministic(classifier._from_config(config, dtype=dtype, **options)), set()
        try:
            model, found = classifier.from_pretrained(
                model_path, config=config, dtype=dtype, output_loading_info=True, **options
            )
        except RuntimeError as error:  # transformers refuses a head of another shape
            raise ValueError(f"a critic or reward model must have one label, got another at {model_path!r}") from error
    missing = {name for name in found["missing_keys"] if name.startswith(SCORE_HEAD)}
    if strange := set(found["missing_keys"]) - missing:
        raise ValueError(
            f"{model_path!r} lacks {sorted(strange)}, which a {classifier.__name__} has; use another model"
        )
    return _deterministic(_own_storage(model)), missing


def _classifier_class(head: type, config: PreTrainedConfig, model_path: str) -> Any:
    """A generic head of transformers on the family's backbone, whose weights keep their names."""
    mapping: Any = AutoModel._model_mapping
    if type(config) not in mapping:
        raise ValueError(_no_such_model(config, model_path))
    backbone = mapping[type(config)]
    family = next(base for base in backbone.__mro__[1:] if issubclass(base, PreTrainedModel))
    name = backbone.__name__.removesuffix("Model") + head.__name__.removeprefix("Generic")
    own = {"base_model_prefix": backbone.base_model_prefix, "config_class": type(config)}
    return type(name, (head, family), own)


@contextmanager
def _refused_by_name(model_path: str) -> Iterator[None]:
    """Inside, what transformers raises about families that it cannot load as asked becomes a message with a remedy."""
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise ValueError(
            f"the learner cannot train {model_path!r}: its attention does not go through transformers' "
            "AttentionInterface, so it cannot keep packed sequences apart; use another model family"
        ) from error
    except ValueError as error:
        if not str(error).startswith("Unrecognized configuration class"):
            raise
        raise ValueError(_no_such_model(AutoConfig.from_pretrained(model_path), model_path)) from error


def _no_such_model(config: PreTrainedConfig, model_path: str) -> str:
    return (
        f"transformers has no model with the head that this role needs for the model type {config.model_type!r} of "
        f"{model_path!r}; use another model family for this role"
    )


def _check_path(model_path: str) -> None:
    if not (Path(model_path) / "config.json").is_file():
        raise ValueError(f"model path must hold a Hugging Face model, got {model_path!r} without a config.json")


def _own_storage(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the parameters: loaded weights are views of the file and cannot be resized."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _deterministic(model: PreTrainedModel) -> PreTrainedModel:
    """The model in training mode, with its dropout and noise off; what was on is logged.

    The ratio of policy-gradient losses is of the policy that sampled, and critic and reward model are asked in the same
    way: what is left out at random would make each micro-batch another model. Configuration and files stay as they are.
    """
    found: dict[str, float] = {}
    for module in model.train().modules():
        for name, value in list(vars(module).items()):
            named = f"{type(module).__name__}.{name}"
            if isinstance(module, _DropoutNd) and name == "p":
                named = type(module).__name__
            elif not _RANDOM_WHILE_TRAINING.search(name) or isinstance(value, bool) or not isinstance(value, float):
                continue
            if value > 0:
                found[named] = value
                setattr(module, name, 0.0)
    if found and model.device.type != "meta":  # the first rank says it
        log.info("off while training, so that the policy stays the one that sampled: %s", found)
    return model
