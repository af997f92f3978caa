"""Builds Hugging Face models with the packed attention: a causal language model, or a classifier with one label.

The critic is a token classifier, and the reward model is a sequence classifier. Both consist of the model family's
backbone and transformers' generic classifier head.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from asyncrl.core.image_files import VISION_FAMILIES

from .attention import ATTENTION_NAME
from .fsdp import is_first_rank, local_tensor
from .weight_files import fill_weights, stored_weights

log = logging.getLogger(__name__)

SCORE_HEAD = "score"

_MULTIPLIES_BY_LOGITS_SCALING = frozenset({"hyperclovax"})
"""Model types that multiply logits by ``logits_scaling``. All other types divide logits by ``logits_scaling``."""

_ADDS_TOKENS = frozenset({"cpmant"})
"""Model types with a forward pass that adds tokens before a sequence. The learner refuses these models, because it runs
only the backbone, which does not add the tokens."""

_RANDOM_WHILE_TRAINING = re.compile(r"drop|pdrop|jitter", re.IGNORECASE)
"""Names of module attributes in transformers that hold dropout rates or noise levels."""


def load_causal_lm(model_path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the causal language model of a folder in Hugging Face layout, on the meta device and in training mode.

    The parameters have the type ``dtype``, or float32 if the model family keeps them in float32. They have no values.
    Raises `ValueError` if there is no model at the path, or if packed training does not support the model.
    """
    config = _config_of(model_path)
    if config.model_type in _ADDS_TOKENS:
        raise ValueError(
            f"{model_path!r} is of type {config.model_type}, whose forward pass adds tokens to each "
            "sequence; the learner does not support this; use another model"
        )
    if getattr(config, "output_router_logits", False) and is_first_rank():
        log.warning(
            "%s sets output_router_logits=true: the learner does not add router_aux_loss_coef=%s times the routers' "
            "balancing loss, which is not a sum over tokens and would depend on how micro-batches split them",
            model_path,
            getattr(config, "router_aux_loss_coef", None),
        )
    with torch.device("meta"), _refused_by_name(model_path):
        if config.model_type in VISION_FAMILIES:
            kernels: Any = {"text_config": ATTENTION_NAME, "vision_config": "sdpa"}
            model: Any = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation=kernels)
        else:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    if Path(model_path, "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_path)
    return _prepared(model, dtype)


def parameter_sizes(model_path: str) -> dict[str, int]:
    """Return the number of values in each parameter of a folder's causal language model, by parameter name.

    This does not read the weights. Raises the errors of `load_causal_lm`.
    """
    model = load_causal_lm(model_path, torch.bfloat16)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


@dataclass(frozen=True, kw_only=True)
class LogitShape:
    """Computes the logit from z, the product of a hidden state and an output embedding: c · tanh(scale · z / c).

    Attributes:
        scale: Factor on z: 1 / ``logits_scaling`` for Granite, ``logit_scale`` for Cohere.
        soft_cap: c, such as 30 in Gemma 2 (arXiv 2408.00118, section 2). None means that the logits are scale · z.
    """

    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        """Compute logits from ``products`` [..., V] float32, the products of hidden states and output embeddings.

        The logits overwrite ``products``.
        """
        logits = products if self.scale == 1.0 else products.mul_(self.scale)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of each logit [..., V] with respect to z, the product of hidden state and embedding."""
        return self.scale if self.soft_cap is None else self.scale * (1 - (logits / self.soft_cap).square())


def logit_shape(config: PreTrainedConfig) -> LogitShape:
    """Return the scale and soft cap of the logits in a model's configuration."""
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0
    if divisor := getattr(text, "logits_scaling", None):
        scale *= divisor if text.model_type in _MULTIPLIES_BY_LOGITS_SCALING else 1 / divisor
    return LogitShape(scale=float(scale), soft_cap=getattr(text, "final_logit_softcapping", None) or None)


def load_critic(model_path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build a token classifier with one label, in training mode, on the meta device (weights without values).

    The path may hold a causal language model. Raises `ValueError` if there is no model, or if a stored classifier does
    not have one label.
    """
    return _load_classifier(GenericForTokenClassification, model_path, dtype)


def load_reward_model(model_path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build a sequence classifier with one label, in training mode, on the meta device (weights without values).

    `fill_pretrained` later reads the values of the weights. Raises `ValueError` if there is no model, if the head's
    weights are missing, or if the head does not have one label.
    """
    stored, score = stored_weights(model_path), f"{SCORE_HEAD}.weight"
    if stored and score not in stored:
        raise ValueError(
            f"reward model path must hold a trained sequence classifier, got {model_path!r} without {[score]}; "
            "train one with AutoModelForSequenceClassification(num_labels=1)"
        )
    return _load_classifier(GenericForSequenceClassification, model_path, dtype)


def _load_classifier(head: type, model_path: str, dtype: torch.dtype) -> PreTrainedModel:
    config = _config_of(model_path, num_labels=1)
    if config.model_type in VISION_FAMILIES:
        raise ValueError(
            f"a critic or reward model must be a text model, got {config.model_type} at {model_path!r}; use another "
            "model, or an advantage without a critic"
        )
    score = stored_weights(model_path).get(f"{SCORE_HEAD}.weight")
    if score is not None and score.shape[0] != 1:
        raise ValueError(
            f"a critic or reward model must have one label, got {score.shape[0]} at {model_path!r}; use another model"
        )
    classifier = _classifier_class(head, config, model_path)
    with torch.device("meta"), _refused_by_name(model_path):
        return _prepared(classifier._from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME), dtype)


def fill_pretrained(model: PreTrainedModel, model_path: str) -> None:
    """Read this rank's shards of the weights in a folder into an allocated model.

    The score head of a new critic is zero, so the critic's first advantages equal the returns. Raises `ValueError` if
    another weight is missing.
    """
    missing = fill_weights(model, model_path)
    new_head = {name for name in missing if name.startswith(f"{SCORE_HEAD}.")}
    if strange := missing - new_head:
        raise ValueError(
            f"{model_path!r} lacks {sorted(strange)}, which {type(model).__name__} needs; use another model"
        )
    for name in new_head:
        nn.init.zeros_(local_tensor(model.get_parameter(name).detach()))
    if new_head and is_first_rank():
        log.info("%s does not have %s: the critic starts with zeros for them", model_path, sorted(new_head))


def _classifier_class(head: type, config: PreTrainedConfig, model_path: str) -> Any:
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
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise ValueError(
            f"the learner cannot train {model_path!r}: its attention does not go through transformers' "
            "AttentionInterface, so packed sequences would affect each other; use another model family"
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


def _config_of(model_path: str, **options: Any) -> PreTrainedConfig:
    if not (Path(model_path) / "config.json").is_file():
        raise ValueError(f"model path must hold a Hugging Face model, got {model_path!r} without a config.json")
    config = AutoConfig.from_pretrained(model_path, **options)
    if getattr(config, "quantization_config", None):
        raise ValueError(
            f"{model_path!r} holds quantized weights, which the learner cannot train; load it with "
            "AutoModelForCausalLM.from_pretrained(path, dtype='bfloat16') and a quantization_config with "
            "dequantize=True, save it with save_pretrained, and use that folder"
        )
    return config


def _prepared(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert to float32 the parameters that the model family keeps in float32, and switch off all randomness."""
    kept = [re.compile(name.replace("*", ".*")) for name in model._get_dtype_plan(dtype)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(pattern.search(name) for pattern in kept):
            tensor.data = tensor.data.float()
    return _deterministic(model)


def _deterministic(model: PreTrainedModel) -> PreTrainedModel:
    """Put the model in training mode and switch off its dropout and noise.

    The loss compares log-probs of training with log-probs of sampling, so both need the same policy. The model's
    configuration and files do not change.
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
    if found and is_first_rank():
        log.info("off while training, so that the policy equals the sampling policy: %s", found)
    return model
