"""Measures the held-out accuracy of a policy in the same way for all compared trainers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import torch


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out prompts, and the settings for sampling answers.

    Attributes:
        prompt_ids: [B, P] int64, padded on the left.
        attention_mask: [B, P] int64, 0 where padded.
        ground_truths: The B correct answers.
        tokenizer: The policy's tokenizer.
        samples_per_prompt: Sampled answers per prompt.
        max_new_tokens: Longest answer, in tokens.
        seed: Seed of the sampling, so equal weights give equal accuracy.
    """

    prompt_ids: torch.Tensor
    attention_mask: torch.Tensor
    ground_truths: list[str]
    tokenizer: Any
    samples_per_prompt: int = 8
    max_new_tokens: int = 12
    seed: int = 0

    @torch.no_grad()
    def accuracy(self, model: Any, *, greedy: bool = False) -> float:
        """Return the share of answers that equal the ground truth, 0 to 1. Special tokens are removed from answers.

        Args:
            model: A transformers causal language model. This method restores the model's mode (training or evaluation)
                and torch's random state.
            greedy: Answer each prompt once, with the likeliest tokens, instead of sampling at temperature 1.
        """
        samples = 1 if greedy else self.samples_per_prompt
        choice = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        was_training = model.training
        model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            output = model.generate(
                self.prompt_ids,
                attention_mask=self.attention_mask,
                max_new_tokens=self.max_new_tokens,
                num_return_sequences=samples,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
                **choice,
            )
        model.train(was_training)
        answers = self.tokenizer.batch_decode(output[:, self.prompt_ids.shape[1] :], skip_special_tokens=True)
        truths = [truth for truth in self.ground_truths for _ in range(samples)]
        return sum(answer == truth for answer, truth in zip(answers, truths, strict=True)) / len(truths)


def first_crossing(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the first x at which a noisy accuracy reaches a target.

    The accuracy at a point is the mean of this point and its two neighbors. At the first point, the accuracy is the
    mean of two points. The last point is left out, because its second neighbor is not measured yet.

    Args:
        curve: Pairs [x, accuracy] with rising x, in steps or seconds. Example: with 0.8 at 10, 0.9 at 20, and 1.0 at 30
            and 40, the target 0.9 is crossed at 20.
        target: Accuracy.

    Returns:
        x by linear interpolation; None if the target is not reached.
    """
    smooth = [
        (curve[index][0], fmean(accuracy for _, accuracy in curve[max(0, index - 1) : index + 2]))
        for index in range(len(curve) - 1)  # leave out the last point, because its mean would lack the point after it
    ]
    if smooth and smooth[0][1] >= target:
        return smooth[0][0]
    for before, after in pairwise(smooth):
        if before[1] < target <= after[1]:
            return before[0] + (after[0] - before[0]) * (target - before[1]) / (after[1] - before[1])
    return None


def load_held_out(path: str | Path, tokenizer: Any, *, max_new_tokens: int, samples_per_prompt: int = 8) -> HeldOut:
    """Read held-out prompts from a parquet file with the columns ``prompt`` and ``ground_truth``.

    ``tokenizer`` is the policy's tokenizer. ``max_new_tokens`` limits the length of an answer.
    """
    rows = pq.read_table(path, columns=["prompt", "ground_truth"]).to_pydict()
    batch = tokenizer(rows["prompt"], padding=True, padding_side="left", return_tensors="pt")
    return HeldOut(
        prompt_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        ground_truths=rows["ground_truth"],
        tokenizer=tokenizer,
        samples_per_prompt=samples_per_prompt,
        max_new_tokens=max_new_tokens,
    )
