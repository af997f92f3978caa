"""Options of supervised fine-tuning: the only home of their defaults."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class StopMetric(StrEnum):
    """What ends fine-tuning early: accuracy on ``data.eval_files``, or the loss of held-back demonstrations."""

    accuracy = "accuracy"
    val_loss = "val_loss"


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised fine-tuning (``python -m asyncrl.sft``), also run before training where ``enabled``.

    Attributes:
        enabled: Fine-tune ``model.path`` first, and train the result.
        train_files: Parquet or jsonl files with a prompt and a response column.
        val_files: Demonstrations of the same form for the validation loss.
        val_rows: Without ``val_files``: the last rows of ``train_files``, held back for the validation loss.
        prompt_key: Column of the prompt: a string, or with ``chat_template`` a list of {role, content} messages.
        response_key: Column of the response, a string; with ``chat_template``, empty where the assistant's turns stand
            in the messages themselves: all of them are learned.
        chat_template: Render messages with the tokenizer's chat template; a plain response gets the end-of-sequence
            token instead.
        chat_template_kwargs: Further arguments of the template. Example: ``{"enable_thinking": false}``.
        output_path: Where the fine-tuned policy is written, a new or empty directory, or one that the same settings
            wrote before; empty: ``<output_dir>/<experiment>/sft/<digest of the settings>``.
        batch_size: Sequences of one optimizer update.
        lr: Peak learning rate; linear decay to zero over ``max_steps``.
        weight_decay: Decoupled decay, on matrices only.
        warmup_steps: Updates of linear warm-up.
        max_steps: Updates at most.
        eval_every: Updates between evaluations.
        eval_prompts: Held-out prompts of one evaluation, answered greedily; 0 measures no accuracy.
        stop_metric: What ``patience`` watches.
        target_accuracy: Stop at this greedy accuracy on ``data.eval_files``; above 1 never stops early.
        target_val_loss: Stop at this validation loss, in nats a token; 0 never stops early.
        patience: Stop after this many evaluations in which ``stop_metric`` did not improve, and keep the best policy; 0
            never stops early and keeps the last one.
        progress_timeout_s: As a warm start: longest time without a line of progress, of which there is one an
            evaluation.
    """

    enabled: bool = False
    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    val_rows: int = 0
    prompt_key: str = "prompt"
    response_key: str = "response"
    chat_template: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    output_path: str = ""
    batch_size: int = 128
    lr: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 20
    max_steps: int = 1000
    eval_every: int = 50
    eval_prompts: int = 256
    stop_metric: StopMetric = StopMetric.accuracy
    target_accuracy: float = 1.01
    target_val_loss: float = 0.0
    patience: int = 0
    progress_timeout_s: float = 900.0

    @property
    def validates(self) -> bool:
        """Whether there is a validation loss."""
        return bool(self.val_files) or self.val_rows > 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_steps", "eval_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"sft.{name} must be >= 1, got {getattr(self, name)}")
        for name in ("val_rows", "eval_prompts", "warmup_steps", "patience", "target_val_loss", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"sft.{name} must be >= 0, got {getattr(self, name)}; 0 switches it off")
        for name in ("lr", "progress_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"sft.{name} must be > 0, got {getattr(self, name)}")
        self._check_form()
        self._check_stop()

    def _check_form(self) -> None:
        if not self.prompt_key:
            raise ValueError("sft.prompt_key must name a column, got an empty string; 'prompt' is usual")
        if not self.response_key and not self.chat_template:
            raise ValueError(
                "sft.response_key must name a column while sft.chat_template is false, got an empty string; 'response' "
                "is usual"
            )
        if self.chat_template_kwargs and not self.chat_template:
            raise ValueError(
                f"sft.chat_template_kwargs is set to {dict(self.chat_template_kwargs)} but sft.chat_template is false; "
                "set sft.chat_template=true, or leave the arguments out"
            )
        if self.val_files and self.val_rows:
            raise ValueError(f"sft.val_rows must be 0 beside sft.val_files, got {self.val_rows}; leave one of them out")

    def _check_stop(self) -> None:
        needs_loss = self.target_val_loss > 0 or (self.patience > 0 and self.stop_metric is StopMetric.val_loss)
        if needs_loss and not self.validates:
            raise ValueError(
                "sft.target_val_loss and sft.stop_metric=val_loss need a validation loss, got neither sft.val_files "
                "nor sft.val_rows; name one"
            )
        needs_accuracy = self.target_accuracy <= 1 or (self.patience > 0 and self.stop_metric is StopMetric.accuracy)
        if needs_accuracy and not self.eval_prompts:
            raise ValueError(
                "sft.target_accuracy and sft.stop_metric=accuracy need sft.eval_prompts >= 1, got 0; raise it, or stop "
                "at sft.target_val_loss"
            )
