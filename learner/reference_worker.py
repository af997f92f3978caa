"""The reference: one rank of a frozen copy of the policy that the run starts from."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.protocol.data_proto import DataProto
from asyncrl.protocol.ports import TrajectorySource
from asyncrl.single_controller import Dispatch, register

from .config import AlgorithmConfig, LearnerConfig
from .rows import response_rows, scored_sequences
from .scorer import PolicyScorer
from .types import RankBatch
from .worker import BY_ROWS, PER_DP_RANK, RoleWorker


class ReferenceWorker(RoleWorker[PolicyScorer]):
    """One rank of the reference. Under LoRA there is none: the actor scores with its adapters off.

    Args:
        config: Options of the group it runs in.
        algorithm: What is optimised.
        model_path: Directory in Hugging Face layout.
        temperature: Softmax temperature at sampling; log-probs are taken under it.
        connect_buffer: See `RoleWorker`.
    """

    role = "ref"

    def __init__(
        self,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        model_path: str,
        temperature: float,
        connect_buffer: Callable[[], TrajectorySource] | None = None,
    ) -> None:
        super().__init__(config, algorithm, model_path=model_path, connect_buffer=connect_buffer)
        self._temperature = temperature

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> None:
        """Join the group, load the model and connect to the buffer."""
        self._start(PolicyScorer(self._config, model_path=self._model_path, temperature=self._temperature))

    @register(dispatch_mode=PER_DP_RANK, blocking=False)
    def score(self, batch: RankBatch, send: bool = True) -> DataProto | None:
        """Score the log-probs of planned groups; see `RoleWorker._keep`."""
        with self._residence.reading():
            values = self._scorer.log_probs(self._sequences(batch))
        return self._keep(batch, values, "ref_log_prob", send=send)

    @register(dispatch_mode=BY_ROWS)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of responses under the reference.

        Args:
            data: Rows of ``input_ids``, ``attention_mask``, ``position_ids``, ``responses``; ``temperature`` of
                ``meta_info`` replaces that of the run.

        Returns:
            ``ref_log_prob`` [B, R] float32, 0 where the response is padded.
        """
        with self._residence.reading():
            return reference_rows(self._scorer, data, self._temperature)


def reference_rows(scorer: PolicyScorer, data: DataProto, temperature: float) -> DataProto:
    """``ref_log_prob`` of the rows under a scorer's weights."""
    with scorer.at_temperature(float(data.meta_info.get("temperature", temperature))):
        log_probs = scorer.log_probs(scored_sequences(data))
    return DataProto.from_dict({"ref_log_prob": response_rows(data, log_probs)})
