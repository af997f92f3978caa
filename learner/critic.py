"""The critic in process: a token classifier that predicts returns, scored and stepped on token sequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .config import CriticConfig, LearnerConfig
from .optimizer import PolicyOptimizer
from .packing import MicroBatch
from .score_model import ScoreModel, load_critic
from .scorer import PackedBatch, PackedScorer
from .types import TokenSequence


class CriticTrainer(PackedScorer[ScoreModel]):
    """Predicts the value of the state before each token, and learns from returns. Its methods are collectives.

    Args:
        config: The options of the group it runs in; the optimizer is the critic's own.
        critic: The critic's options.
        model_path: Directory in Hugging Face layout: a token classifier, or a causal language model to start from.
        total_updates: Optimizer updates of the whole run, for the schedule.
        seed: Seeds dropout, where the model has any.
    """

    def __init__(
        self, config: LearnerConfig, critic: CriticConfig, *, model_path: str, total_updates: int, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        super().__init__(
            config,
            model_path=model_path,
            load=lambda on_meta: load_critic(model_path, torch.float32, on_meta=on_meta),
        )
        self.optimizer = PolicyOptimizer(self.model, critic.optimizer, total_updates=total_updates)
        self._value_clip = critic.value_clip

    def values(self, sequences: Sequence[TokenSequence]) -> list[np.ndarray]:
        """Value of the state before each token of this rank's sequences.

        Returns:
            [T] float32 a sequence, 0 where the token is not in the loss.
        """
        return self._per_token(sequences, lambda batch: (self.model(batch, batch.predict_index),))[0]

    def update(self, sequences: Sequence[TokenSequence]) -> dict[str, float]:
        """Make one optimizer update on the sequences of all ranks; every token of the batch counts the same.

        Args:
            sequences: This rank's share, with the columns ``returns`` and ``values`` (those before the step); the sp
                ranks of a group pass the same.

        Returns:
            The same on every rank: ``value_loss``, ``value_clip_fraction``, ``value_mean``, ``return_mean``,
            ``explained_variance`` (1 - variance of return less value ÷ variance of the return, before the update;
            0 where all returns are equal), ``num_tokens``, ``num_sequences``, ``num_micro_batches``, ``grad_norm``,
            ``lr``, ``skipped_updates``.
        """
        self._set_training(True)
        batch, rows = self._pack(sequences), []
        try:
            with self.sharding:
                for micro_batch in batch.micro_batches:
                    share, row = self._share_of_loss(micro_batch.to(self.mesh.device), batch)
                    (share * self.mesh.num_ranks).backward()  # FSDP averages gradients over ranks; their sum is meant
                    rows.append(row)
        except BaseException:
            self.optimizer.adamw.zero_grad()  # half a gradient must not reach the next update
            raise
        return _summary(self._reduce(rows), batch.num_tokens) | batch.counts() | self.optimizer.step()

    def _share_of_loss(self, micro_batch: MicroBatch, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """What a micro-batch adds to the loss of the whole batch, with gradient, and to each sum."""
        values = self.model(micro_batch, micro_batch.predict_index)
        # An empty micro-batch does not know the columns' names: it has every column, with no entries.
        columns = micro_batch.columns if len(values) else defaultdict(values.detach)
        loss, clipped = value_loss(values, columns["values"], columns["returns"], clip=self._value_clip)
        exact, error = columns["returns"].double(), (columns["returns"] - values.detach()).double()
        sums = {
            "value_loss": loss.detach().double(),
            "value_clip_fraction": clipped.double(),
            "value_mean": values.detach().double(),
            "return_mean": exact,
            "return_square": exact.square(),
            "error": error,
            "error_square": error.square(),
        }
        return loss.sum() / max(1, batch.num_tokens), {name: value.sum() for name, value in sums.items()}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Squared error of the values, with PPO's clipping (the loss of OpenAI's ``baselines`` ppo2; arXiv 2005.12729, 3).

    half of max((v - R)², (clip(v, old - c, old + c) - R)²): a value that has left the interval towards the return gets
    no gradient.

    Args:
        values: [M] float32, with gradient.
        old_values: [M] float32, the values before the step.
        returns: [M] float32.
        clip: c, > 0; 0 does not clip.

    Returns:
        [M] float32 losses, and [M] bool where the clipped error is the larger one. Example: value 1, old value 0,
        return 2 and c 0.2 give 0.5 · 1.8² = 1.62, clipped.
    """
    loss = (values - returns).square()
    if not clip:
        return 0.5 * loss, torch.zeros_like(values, dtype=torch.bool)
    moved = values - old_values
    outside = moved.abs() > clip
    # Not clamp alone: inside the interval old + (v - old) differs from v in the last bit, which would count as clipped.
    near = torch.where(outside, old_values + moved.clamp(-clip, clip), values)
    clipped = (near - returns).square()
    return 0.5 * torch.maximum(loss, clipped), outside & (clipped > loss)


def _summary(sums: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    means = {name: value / max(1, num_tokens) for name, value in sums.items()}
    variance = means["return_square"] - means["return_mean"] ** 2
    left = means["error_square"] - means["error"] ** 2
    # A variance below rounding is none.
    explained = 1.0 - left / variance if variance > 1e-12 * means["return_square"] else 0.0
    names = ("value_loss", "value_clip_fraction", "value_mean", "return_mean")
    return {name: means[name] for name in names} | {"explained_variance": explained}
