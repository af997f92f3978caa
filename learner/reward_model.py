"""The reward model in process: a frozen sequence classifier that scores whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .config import LearnerConfig
from .packing import MicroBatch
from .score_model import ScoreModel, load_reward_model
from .scorer import PackedScorer
from .types import TokenSequence


class RewardScorer(PackedScorer[ScoreModel]):
    """Scores sequences at their last token. Its methods are collectives.

    Args:
        config: The options of the group it runs in.
        model_path: Directory in Hugging Face layout: a sequence classifier with one label.
    """

    def __init__(self, config: LearnerConfig, *, model_path: str) -> None:
        super().__init__(
            config,
            model_path=model_path,
            load=lambda on_meta: load_reward_model(model_path, torch.float32, on_meta=on_meta),
        )

    @torch.no_grad()
    def scores(self, sequences: Sequence[TokenSequence]) -> np.ndarray:
        """Score of each of this rank's sequences, as [number of sequences] float32."""
        self._set_training(False)
        results = np.zeros(len(sequences), dtype=np.float32)
        with self.sharding:
            for micro_batch in self._pack(sequences, whole=True).micro_batches:
                values = self.model(micro_batch.to(self.mesh.device), _last_places(micro_batch).to(self.mesh.device))
                results[list(micro_batch.source)] = values[: len(micro_batch.source)].cpu().numpy()
        return results


def _last_places(micro_batch: MicroBatch) -> torch.Tensor:
    return torch.tensor(micro_batch.lengths).cumsum(0) - 1
