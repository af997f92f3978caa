"""A Hugging Face classifier with one label as the learner sees it: a number at chosen tokens of packed sequences.

The critic is a token classifier, whose number is the value of the state before a token; the reward model is a sequence
classifier, whose number at the last token is the score of the whole sequence.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from .attention import ATTENTION_NAME
from .model import PackedModel, at_places
from .packing import MicroBatch

log = logging.getLogger(__name__)

_HEAD = "score"


class ScoreModel(PackedModel):
    """Computes the head's number at chosen places of a micro-batch, in float32.

    The head is applied to the last hidden states as they are: a dropout that the classifier has before it is left out,
    since values and returns must come from one function.
    """

    def forward(self, batch: MicroBatch, places: Tensor) -> Tensor:
        """Scores.

        Args:
            batch: N packed tokens on the model's device.
            places: [M] int64 in 0..N-1, packed tokens whose state is scored; the same on all sp ranks.

        Returns:
            [M] float32.
        """
        head = cast("nn.Linear", getattr(self.pretrained, _HEAD))

        def scores(hidden: Tensor, _index: Tensor | slice) -> tuple[Tensor]:
            return (F.linear(hidden, head.weight, head.bias).squeeze(-1).float(),)

        return at_places(self.hidden_states(batch), places, scores)[0]


def load_critic(model_path: str, dtype: torch.dtype, *, on_meta: bool = False) -> ScoreModel:
    """Load a token classifier with one label; a model without such a head gets one of zeros.

    A new critic then says 0 for every state, so that its first advantages are the returns themselves.

    Args:
        model_path: Directory in Hugging Face layout: a classifier, or a causal language model to start from.
        dtype: Type of the parameters.
        on_meta: Build the model without its weights, on the meta device; `learner.fsdp.shard_model` fills it.

    Raises:
        ValueError: there is no model at the path, or it has another number of labels.
    """
    model, missing = _load(AutoModelForTokenClassification, model_path, dtype, on_meta)
    head = cast("nn.Linear", getattr(model, _HEAD))
    if missing:
        log.info("%s has no value head: the critic starts with one of zeros", model_path)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    return ScoreModel(model)


def load_reward_model(model_path: str, dtype: torch.dtype, *, on_meta: bool = False) -> ScoreModel:
    """Load a sequence classifier with one label.

    Args:
        model_path: Directory in Hugging Face layout.
        dtype: Type of the parameters.
        on_meta: Build the model without its weights, on the meta device; `learner.fsdp.shard_model` fills it.

    Raises:
        ValueError: there is no model at the path, it has another number of labels, or its head is missing.
    """
    model, missing = _load(AutoModelForSequenceClassification, model_path, dtype, on_meta)
    if missing:
        raise ValueError(
            f"reward model path must hold a trained sequence classifier, got {model_path!r} without {sorted(missing)}; "
            "train one with AutoModelForSequenceClassification(num_labels=1)"
        )
    return ScoreModel(model)


def _load(auto_class: Any, model_path: str, dtype: torch.dtype, on_meta: bool) -> tuple[PreTrainedModel, set[str]]:
    """The classifier on the CPU, and the names of the head's parameters that the path does not have."""
    if not (Path(model_path) / "config.json").is_file():
        raise ValueError(f"model path must hold a Hugging Face model, got {model_path!r} without a config.json")
    if on_meta:
        config = AutoConfig.from_pretrained(model_path, num_labels=1)
        with torch.device("meta"):
            return auto_class.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME).train(), set()
    try:
        model, found = auto_class.from_pretrained(
            model_path, num_labels=1, dtype=dtype, attn_implementation=ATTENTION_NAME, output_loading_info=True
        )
    except RuntimeError as error:  # transformers refuses a head of another shape
        raise ValueError(f"a critic or reward model must have one label, got another at {model_path!r}") from error
    missing = {name for name in found["missing_keys"] if name.startswith(_HEAD)}
    strange = set(found["missing_keys"]) - missing
    if strange or not isinstance(getattr(model, _HEAD, None), nn.Linear):
        raise ValueError(
            f"{model_path!r} lacks {sorted(strange) or _HEAD}: {type(model).__name__} is no backbone with a linear "
            f"{_HEAD!r} head, which the learner needs"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # loaded weights are views of the file: they cannot be resized
    return model.train(), missing
