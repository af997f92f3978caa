"""Implements verl's worker methods with the learner's trainer. A call takes a `DataProto`, and waits for the result.

A row is a prompt padded on the left and a response padded on the right. All methods take ``input_ids``,
``attention_mask`` and ``position_ids`` [B, L], and ``responses`` [B, R] for the last R <= L positions. Token columns
are [B, R], 0 at padding. A row without attended tokens is allowed. ``meta_info["temperature"]`` replaces the run's
temperature. The workers ignore micro-batch options in ``meta_info``. The classes take the options of `ModelWorker`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl import single_controller
from asyncrl.single_controller import register

from .config import AlgorithmConfig, LearnerConfig
from .roles import ACTOR, CRITIC, REFERENCE, REWARD_MODEL
from .types import TokenSequence
from .worker import BY_ROWS, ModelWorker

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.single_controller import DataProto

    from .packed_model import PackedModel

_VERL_METRICS = {"value_loss": "vf_loss", "value_clip_fraction": "vf_clipfrac", "value_mean": "vpred_mean"}


class ActorWorker(ModelWorker):
    """One rank of the actor. With LoRA, the actor with its adapters off is also the reference."""

    def __init__(self, config: LearnerConfig, algorithm: AlgorithmConfig, **options: Any) -> None:
        super().__init__(ACTOR, config, algorithm, **options)

    @register(dispatch_mode=BY_ROWS)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return ``old_log_probs`` and ``entropys`` [B, R] float32 of the responses under the current policy."""
        temperature = float(data.meta_info.get("temperature", self._temperature))
        with self.offload.reading(), self.model.at_temperature(temperature):
            log_probs, entropies = self.model.log_probs_and_entropies(scored_sequences(data))
        return single_controller.DataProto.from_dict(
            {"old_log_probs": response_rows(data, log_probs), "entropys": response_rows(data, entropies)},
            meta_info={"temperature": temperature},
        )

    @register(dispatch_mode=BY_ROWS)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return ``ref_log_prob`` [B, R] float32: the log-probs of the responses' tokens with the adapters off.

        Raises `ValueError` without adapters.
        """
        with self.offload.reading():
            return _reference_rows(self.model, data, self._temperature)

    @register(dispatch_mode=BY_ROWS)
    def update_actor(self, data: DataProto) -> DataProto:
        """Make the optimizer updates of one step. Return the metrics ``actor/<name>`` in ``meta_info["metrics"]``.

        The metrics are the same on all ranks. ``data`` has ``old_log_probs`` and ``advantages``, and as needed:

        - ``response_mask``, if the policy did not write all attended response tokens;
        - ``rollout_log_probs`` of the engine for a proximal anchor, a weight or masks; the default is
          ``old_log_probs``;
        - ``ref_log_prob``, with ``algorithm.kl_coef``.
        """
        columns = _columns_of(data, self._algorithm)
        sequences = trained_sequences(data, columns, num_mini_batches=self._algorithm.num_mini_batches)
        temperature = float(data.meta_info.get("temperature", self._temperature))
        with self.offload.updating(), self.model.at_temperature(temperature):
            metrics = self._step.make_updates(sequences)
        self._version = None if self._version is None else self._version + 1
        return single_controller.DataProto(
            meta_info={"metrics": {f"actor/{name}": value for name, value in metrics.items()}}
        )

    @property
    def _actor_model_offloaded(self) -> bool:
        return self.offload.model_offloaded

    @property
    def _actor_optimizer_offloaded(self) -> bool:
        return self.offload.optimizer_offloaded


class CriticWorker(ModelWorker):
    """One rank of the critic."""

    def __init__(self, config: LearnerConfig, algorithm: AlgorithmConfig, **options: Any) -> None:
        super().__init__(CRITIC, config, algorithm, **options)

    @register(dispatch_mode=BY_ROWS)
    def compute_values(self, data: DataProto) -> DataProto:
        """Return ``values`` [B, R] float32: the critic's value before each token of the responses."""
        with self.offload.reading():
            values = self.model.scores(scored_sequences(data))
        return single_controller.DataProto.from_dict({"values": response_rows(data, values)})

    @register(dispatch_mode=BY_ROWS)
    def update_critic(self, data: DataProto) -> DataProto:
        """Make the optimizer updates of one step. Return the metrics ``critic/<name>`` in ``meta_info["metrics"]``.

        ``data`` has ``values`` and ``returns``, and also ``response_mask`` if the policy did not write all attended
        response tokens. The metrics include ``critic/vf_loss``, ``critic/vf_clipfrac`` and ``critic/vpred_mean``.
        """
        columns = {"values": "values", "returns": "returns"}
        sequences = trained_sequences(data, columns, num_mini_batches=self._algorithm.num_mini_batches)
        with self.offload.updating():
            metrics = self._step.make_updates(sequences)
        named = {f"critic/{_VERL_METRICS.get(name, name)}": value for name, value in metrics.items()}
        return single_controller.DataProto(meta_info={"metrics": named})


class ReferenceWorker(ModelWorker):
    """One rank of the reference, a frozen copy of the initial policy."""

    def __init__(self, config: LearnerConfig, algorithm: AlgorithmConfig, **options: Any) -> None:
        super().__init__(REFERENCE, config, algorithm, **options)

    @register(dispatch_mode=BY_ROWS)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return ``ref_log_prob`` [B, R] float32: the log-probs of the responses' tokens under the reference."""
        with self.offload.reading():
            return _reference_rows(self.model, data, self._temperature)


class RewardModelWorker(ModelWorker):
    """One rank of the reward model. The reward model must use the policy's tokenizer."""

    def __init__(self, config: LearnerConfig, algorithm: AlgorithmConfig, **options: Any) -> None:
        super().__init__(REWARD_MODEL, config, algorithm, **options)

    @register(dispatch_mode=BY_ROWS)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Return ``rm_scores`` [B, R] float32: the score of each row at its last attended token, and 0 elsewhere."""
        with self.offload.reading():
            scores = self.model.scores(scored_sequences(data))
        return single_controller.DataProto.from_dict({"rm_scores": response_rows(data, scores)})


def _reference_rows(model: PackedModel, data: DataProto, temperature: float) -> DataProto:
    with model.frozen(), model.at_temperature(float(data.meta_info.get("temperature", temperature))):
        log_probs = model.scores(scored_sequences(data))
    return single_controller.DataProto.from_dict({"ref_log_prob": response_rows(data, log_probs)})


def _columns_of(data: DataProto, algorithm: AlgorithmConfig) -> dict[str, str]:
    columns = {"behavior_logprobs": "old_log_probs", "advantages": "advantages"}
    if algorithm.needs_proximal:
        columns["proximal_logprobs"] = "old_log_probs"
        if "rollout_log_probs" in _names(data):
            columns["behavior_logprobs"] = "rollout_log_probs"
    if algorithm.kl_coef:
        columns["reference_logprobs"] = "ref_log_prob"
    if algorithm.has_own_loss and data.batch is not None:
        shape = data.batch["responses"].shape
        columns |= {name: name for name in sorted(_names(data) - set(columns)) if data.batch[name].shape == shape}
    return columns


_NEEDED = ("input_ids", "attention_mask", "responses")


def scored_sequences(data: DataProto) -> list[TokenSequence]:
    """Return one sequence per row of ``data``, with all attended tokens, including tokens from an environment.

    All attended response tokens are in the loss, so that they get scores. Raises `ValueError` if a column is missing or
    has another shape, or if ``position_ids`` do not count the attended tokens from 0.
    """
    return _sequences(data, _attended_responses(data), {})


def trained_sequences(data: DataProto, columns: Mapping[str, str], *, num_mini_batches: int) -> list[TokenSequence]:
    """Return one training sequence per row of ``data``.

    Attended response tokens are in the loss, except where ``response_mask`` is 0. ``columns`` maps the name of each
    column of the sequences to the name of its [B, R] tensor in ``data``. Each of the ``num_mini_batches`` optimizer
    updates trains on about the same number of neighboring rows. Raises the errors of `scored_sequences`.
    """
    attended = _attended_responses(data)
    mask = _of_responses(data, "response_mask").astype(bool) if "response_mask" in _names(data) else attended
    tensors = {name: _of_responses(data, source).astype(np.float32) for name, source in columns.items()}
    sequences = _sequences(data, mask & attended, tensors)
    return [replace(s, mini_batch=i * num_mini_batches // len(sequences)) for i, s in enumerate(sequences)]


def generated_rows(
    data: DataProto, samples: Sequence[tuple[np.ndarray, np.ndarray]], *, num_response: int
) -> DataProto:
    """Append sampled responses to a batch of prompts. The result has the columns of verl's ``generate_sequences``.

    Args:
        data: The prompts, ``input_ids`` and ``attention_mask`` [B, P], padded on the left.
        samples: For each prompt, the token ids and behavior log-probs of a response of at most ``num_response`` tokens.
        num_response: R, the padded length of the responses.

    Returns:
        ``input_ids``, ``attention_mask`` and ``position_ids`` [B, P + R], ``responses``, ``response_mask`` and
        ``rollout_log_probs`` [B, R].
    """
    import torch

    input_ids, attention = _array(data, "input_ids"), _array(data, "attention_mask")
    responses = np.zeros((len(samples), num_response), dtype=np.int64)
    mask, logprobs = np.zeros_like(responses), np.zeros(responses.shape, dtype=np.float32)
    for row, (token_ids, values) in enumerate(samples):
        responses[row, : len(token_ids)], logprobs[row, : len(token_ids)] = token_ids, values
        mask[row, : len(token_ids)] = 1
    attention = np.concatenate([attention, mask], axis=1)
    columns = {
        "input_ids": np.concatenate([input_ids, responses], axis=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(axis=1) - 1).clip(min=0),
        "responses": responses,
        "response_mask": mask,
        "rollout_log_probs": logprobs,
    }
    return single_controller.DataProto.from_dict({name: torch.from_numpy(values) for name, values in columns.items()})


def response_rows(data: DataProto, values: Sequence[np.ndarray]) -> Tensor:
    """Return [B, R] float32: each sequence's values at the attended tokens of its response, and 0 elsewhere.

    ``values`` has one [T] array per row of ``data``, with a value for each attended token.
    """
    import torch

    attended = _attended_responses(data)
    rows = np.zeros(attended.shape, dtype=np.float32)
    for row, mask, value in zip(rows, attended, values, strict=True):
        count = int(mask.sum())
        row[mask] = value[len(value) - count :]
    return torch.from_numpy(rows)


def _sequences(data: DataProto, mask: np.ndarray, tensors: Mapping[str, np.ndarray]) -> list[TokenSequence]:
    """Return the attended tokens of each row as a sequence. The response tokens in ``mask`` [B, R] are in the loss."""
    input_ids, attention = _array(data, "input_ids"), _array(data, "attention_mask").astype(bool)
    _check_positions(data, attention)
    num_prompt = input_ids.shape[1] - mask.shape[1]
    sequences = []
    for row, keep in enumerate(attention):
        if not keep.any():  # a sequence must not be empty, so make a sequence of one token outside the loss
            blank = {name: np.zeros(1, dtype=np.float32) for name in tensors}
            sequences.append(TokenSequence(input_ids=np.zeros(1, np.int32), loss_mask=np.zeros(1, bool), columns=blank))
            continue
        in_prompt, in_response = int(keep[:num_prompt].sum()), keep[num_prompt:]
        loss_mask = np.concatenate([np.zeros(in_prompt, dtype=bool), mask[row, in_response]])
        if len(loss_mask):
            loss_mask[0] = False  # the model cannot predict the first token
        columns = {
            name: np.concatenate([np.zeros(in_prompt, dtype=np.float32), values[row, in_response]])
            for name, values in tensors.items()
        }
        sequences.append(
            TokenSequence(input_ids=input_ids[row, keep].astype(np.int32), loss_mask=loss_mask, columns=columns)
        )
    return sequences


def _attended_responses(data: DataProto) -> np.ndarray:
    missing = [name for name in _NEEDED if name not in _names(data)]
    if missing:
        raise ValueError(f"data must hold {list(_NEEDED)}, got {sorted(_names(data))}; add {missing}")
    attention = _array(data, "attention_mask").astype(bool)
    shape, num_response = _array(data, "input_ids").shape, _array(data, "responses").shape[1]
    if attention.shape != shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {list(shape)}, got {list(attention.shape)}; let both "
            "hold prompts and responses"
        )
    if num_response > shape[1]:
        raise ValueError(
            f"responses must be the end of input_ids, {list(shape)}, got {[len(attention), num_response]}; append the "
            "responses to the prompts"
        )
    return attention[:, shape[1] - num_response :]


def _check_positions(data: DataProto, attention: np.ndarray) -> None:
    """Raise `ValueError` if ``position_ids`` differ from the positions that the learner uses when it packs the rows."""
    if "position_ids" not in _names(data):
        return
    positions = _array(data, "position_ids")
    counted = attention.cumsum(axis=1) - 1
    if positions.shape != attention.shape or (positions != counted)[attention].any():
        raise ValueError(
            "position_ids must count the attended tokens of each row from 0, as cumsum(attention_mask) - 1 does, got "
            f"other values, of shape {positions.shape}"
        )


def _names(data: DataProto) -> set[str]:
    return set() if data.batch is None else {str(name) for name in data.batch.keys()}  # noqa: SIM118 - not a dict


def _of_responses(data: DataProto, name: str) -> np.ndarray:
    column, shape = _array(data, name), _array(data, "responses").shape
    if column.shape != shape:
        raise ValueError(
            f"{name} must have the shape of responses, {list(shape)}, got {list(column.shape)}; give one value per "
            "response token"
        )
    return column


def _array(data: DataProto, name: str) -> np.ndarray:
    if name not in _names(data):
        raise ValueError(f"data must hold {name!r}, got {sorted(_names(data))}; add it")
    assert data.batch is not None
    column = data.batch[name].detach().cpu()
    return (column.float() if column.is_floating_point() else column).numpy()  # numpy does not support bfloat16
