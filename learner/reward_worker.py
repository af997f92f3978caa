"""The reward model's process: one rank of the group that scores finished trajectories."""

from __future__ import annotations

import numpy as np

from asyncrl.protocol.data_proto import DataProto
from asyncrl.single_controller import Dispatch, register

from .reward_model import RewardScorer
from .rows import last_token_rows, scored_sequences
from .types import RankBatch
from .worker import BY_ROWS, PER_DP_RANK, RoleWorker


class RewardModelWorker(RoleWorker[RewardScorer]):
    """One rank of the reward model; its model's tokens are the policy's."""

    role = "rm"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        """Join the group, load the model and connect to the buffer."""
        self._start(RewardScorer(self._config, model_path=self._model_path))

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    def score(self, batch: RankBatch) -> dict[int, tuple[float, ...]]:
        """Score planned groups: group id to a score a sample."""
        with self._residence.reading():
            scores = self._scorer.scores(self._sequences(batch))
        sizes = [group.num_samples for group in self._fetch(batch)]
        parts = np.split(scores, np.cumsum(sizes)[:-1]) if sizes else []
        return {group_id: tuple(part.tolist()) for group_id, part in zip(batch.group_ids, parts, strict=True)}

    @register(dispatch_mode=BY_ROWS)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Scores of whole rows, each at the last token of its response.

        Args:
            data: Rows of ``input_ids``, ``attention_mask``, ``position_ids``, ``responses``, in the reward model's own
                tokens.

        Returns:
            ``rm_scores`` [B, R] float32, 0 but for the last attended token.
        """
        with self._residence.reading():
            scores = self._scorer.scores(scored_sequences(data))
        return DataProto.from_dict({"rm_scores": last_token_rows(data, scores)})
