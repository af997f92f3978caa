"""Runs a training step of TRL's GRPOTrainer on given samples, without generation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports] - needs the bench extra
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports] - needs the bench extra
from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports] - needs the bench extra

from learner.types import TokenSequence


def grpo_step(model_path: str, sequences: Sequence[TokenSequence], *, lr: float, clip: float) -> Callable[[], float]:
    """Return a function that makes TRL's training step on ``sequences`` and returns the loss.

    The step consists of forward pass, loss, backward pass, gradient clipping and update.
    """
    trainer = _trainer(model_path, len(sequences), lr=lr, clip=clip)
    inputs = _inputs(sequences)
    trainer.create_optimizer()
    optimizer: Any = trainer.optimizer
    trainer.current_gradient_accumulation_steps = 1
    model: Any = trainer.model.train()

    def step() -> float:
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _trainer(model_path: str, batch_size: int, *, lr: float, clip: float) -> Any:
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=batch_size,
        num_generations=8,
        loss_type="dapo",
        beta=0.0,
        epsilon=clip,
        learning_rate=lr,
        adam_beta2=0.95,
        weight_decay=0.01,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["0"] * batch_size}),
        processing_class=_tokenizer(),
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {str(number): number for number in range(20)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="1", unk_token="0")


def _inputs(sequences: Sequence[TokenSequence]) -> dict[str, Tensor]:
    """Pad prompts on the left and responses on the right, as TRL's trainer does; return the trainer's inputs."""
    prompts = [s.input_ids[~s.loss_mask] for s in sequences]
    responses = [s.input_ids[s.loss_mask] for s in sequences]
    num_prompt, num_response = max(map(len, prompts)), max(map(len, responses))
    prompt_ids = np.stack([np.pad(ids, (num_prompt - len(ids), 0)) for ids in prompts])
    response_ids = np.stack([np.pad(ids, (0, num_response - len(ids))) for ids in responses])
    prompt_mask = np.stack([np.arange(num_prompt) >= num_prompt - len(ids) for ids in prompts])
    response_mask = np.stack([np.arange(num_response) < len(ids) for ids in responses])
    return {
        "prompt_ids": torch.from_numpy(prompt_ids.astype(np.int64)),
        "prompt_mask": torch.from_numpy(prompt_mask.astype(np.int64)),
        "completion_ids": torch.from_numpy(response_ids.astype(np.int64)),
        "completion_mask": torch.from_numpy(response_mask.astype(np.int64)),
        "advantages": torch.tensor([float(s.columns["advantages"][-1]) for s in sequences]),
        "num_items_in_batch": torch.tensor(int(response_mask.sum())),
    }
