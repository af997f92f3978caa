"""Loads Hugging Face models with the packed attention: a causal language model, or a classifier with one label.

The critic is a token classifier, and the reward model is a sequence classifier. Both use transformers' generic head on
the family's backbone. Their files are compatible with the family's own classifier in transformers, if there is one.
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
"""Name of a classifier's linear head."""

_MULTIPLIES_BY_LOGITS_SCALING = frozenset({"hyperclovax"})
"""Model types that multiply logits by ``logits_scaling``; all others divide by it."""

_ADDS_TOKENS = frozenset({"cpmant"})
"""Model types whose forward pass adds tokens before a sequence. The backbone alone does not add them."""

_RANDOM_WHILE_TRAINING = re.compile(r"drop|pdrop|jitter", re.IGNORECASE)
"""Names of module attributes in transformers that set dropout rates or noise levels for training."""


def load_causal_lm(model_path: str, dtype: torch.dtype, *, on_meta: bool = False) -> PreTrainedModel:
    """Load a causal language model in Hugging Face layout, in training mode, with parameters of type ``dtype``.

    With ``on_meta`` the model is on the meta device without weights; `learner.fsdp.shard_model` fills it. Raises
    `ValueError` if there is no model at the path, or if packed training does not support the model.
    """
    _check_path(model_path)
    config = AutoConfig.from_pretrained(model_path)
    if config.model_type in _ADDS_TOKENS:
        raise ValueError(
            f"{model_path!r} is of type {config.model_type}, whose forward pass adds tokens of its own to each "
            "sequence; the learner does not support this; use another model"
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
    """A family's logits as a function of z, the product of hidden state and embedding: c · tanh(scale · z ÷ c).

    Attributes:
        scale: Factor on z; Granite divides by ``logits_scaling``, Cohere multiplies by ``logit_scale``.
        soft_cap: c; None: the logits are scale · z. Gemma 2 has 30 (arXiv 2408.00118, section 2).
    """

    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        """Compute the logits from [..., V] float32 products, in place."""
        logits = products if self.scale == 1.0 else products.mul_(self.scale)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of the logits with respect to the products, at [..., V] logits."""
        return self.scale if self.soft_cap is None else self.scale * (1 - (logits / self.soft_cap).square())


def logit_shape(config: PreTrainedConfig) -> LogitShape:
    """Read the shape of the logits from a model's configuration; the self-test checks it."""
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0
    if divisor := getattr(text, "logits_scaling", None):
        scale *= divisor if text.model_type in _MULTIPLIES_BY_LOGITS_SCALING else 1 / divisor
    return LogitShape(scale=float(scale), soft_cap=getattr(text, "final_logit_softcapping", None) or None)


def load_critic(model_path: str, dtype: torch.dtype, *, on_meta: bool = False) -> PreTrainedModel:
    """Load a token classifier with one label, or a causal language model, which gets a head of zeros.

    A new critic predicts 0 for each state, so its first advantages equal the returns. The arguments are the same as for
    `load_causal_lm`. Raises `ValueError` if there is no model, or if the model has another number of labels.
    """
    model, missing = _load_classifier(GenericForTokenClassification, model_path, dtype, on_meta)
    if missing:
        log.info("%s does not have %s: the critic starts with zeros for them", model_path, sorted(missing))
    for name in missing:
        nn.init.zeros_(model.get_parameter(name))
    return model


def load_reward_model(model_path: str, dtype: torch.dtype, *, on_meta: bool = False) -> PreTrainedModel:
    """Load a sequence classifier with one label, as in `load_causal_lm`. `ValueError` if its head is missing."""
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
    """Load a classifier. Also returns the names of the head's parameters that are missing at the path."""
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
    """Create a class with transformers' generic head on the family's backbone. The weights keep their names."""
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
    """Convert transformers' errors about unsupported families to messages with a remedy, inside the context."""
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
    """Put the model in training mode and switch off its dropout and noise; the log names what was on.

    The ratio of policy-gradient losses needs the same policy as at sampling. Dropout would make a different model per
    micro-batch. The same applies to critic and reward model. Configuration and files do not change.
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
    if found and model.device.type != "meta":  # rank 0 logs it
        log.info("off while training, so that the policy equals the sampling policy: %s", found)
    return model
