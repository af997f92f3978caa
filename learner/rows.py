"""Token sequences ⇄ the padded rows of a `DataProto`, in verl's layout.

A row is a prompt padded on the left and a response padded on the right: ``input_ids``, ``attention_mask`` and
``position_ids`` are [B, L], ``responses`` and everything about single tokens [B, R], R <= L, for the last R places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.protocol.data_proto import DataProto
from asyncrl.protocol.trajectory import TrajectoryGroup

from .types import TokenSequence

_NEEDED = ("input_ids", "attention_mask", "responses")


def scored_sequences(data: DataProto) -> list[TokenSequence]:
    """Sequences to score: every token of the responses that is attended to, environment's included.

    Args:
        data: B rows.

    Raises:
        ValueError: a column is missing, or positions do not count the attended tokens from 0.
    """
    return _sequences(data, _attended_responses(data), {})


def trained_sequences(data: DataProto, columns: Mapping[str, str], *, num_mini_batches: int) -> list[TokenSequence]:
    """Sequences to train on: the tokens of ``response_mask``, or where it is missing those that are attended to.

    Args:
        data: B rows.
        columns: Name of a sequence's column to name of the [B, R] tensor that it is read from.
        num_mini_batches: Optimizer updates; each trains on as many neighbouring rows.

    Raises:
        ValueError: as `scored_sequences`.
    """
    attended = _attended_responses(data)
    mask = _array(data, "response_mask").astype(bool) if "response_mask" in _names(data) else attended
    tensors = {name: _array(data, source).astype(np.float32) for name, source in columns.items()}
    sequences = _sequences(data, mask & attended, tensors)
    return [
        TokenSequence(
            input_ids=s.input_ids,
            loss_mask=s.loss_mask,
            columns=s.columns,
            mini_batch=index * num_mini_batches // len(sequences),
        )
        for index, s in enumerate(sequences)
    ]


def response_rows(data: DataProto, values: Sequence[np.ndarray]) -> Tensor:
    """[B, R] float32 of [T] values a sequence, at the places of the responses' attended tokens; 0 elsewhere."""
    attended = _attended_responses(data)
    rows = np.zeros(attended.shape, dtype=np.float32)
    for row, mask, value in zip(rows, attended, values, strict=True):
        count = int(mask.sum())
        row[mask] = value[len(value) - count :]
    return torch.from_numpy(rows)


def last_token_rows(data: DataProto, scores: np.ndarray) -> Tensor:
    """[B, R] float32 that holds a row's score at the last attended token of its response, 0 elsewhere."""
    attended = _attended_responses(data)
    rows = np.zeros(attended.shape, dtype=np.float32)
    for row, mask, score in zip(rows, attended, scores, strict=True):
        if mask.any():
            row[np.flatnonzero(mask)[-1]] = score
    return torch.from_numpy(rows)


def group_columns(groups: Sequence[TrajectoryGroup], values: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """What was scored of planned groups, by group.

    Args:
        groups: Prompt groups.
        values: [T] float32 a sequence, groups one after another, each with its samples in order.

    Returns:
        Group id to [G, longest response] float32, 0 where there is no token.
    """
    remaining = iter(values)
    columns = {}
    for group in groups:
        rows = np.zeros((group.num_samples, int(group.response_lengths.max())), dtype=np.float32)
        for row, length in zip(rows, group.response_lengths.tolist(), strict=True):
            row[:length] = next(remaining)[len(group.prompt_ids) :]
        columns[group.group_id] = rows
    return columns


def sequence_columns(groups: Sequence[TrajectoryGroup], columns: Mapping[int, np.ndarray]) -> list[np.ndarray]:
    """The inverse of `group_columns`: [T] float32 a sequence, 0 at the prompt."""
    return [
        np.concatenate([np.zeros(len(group.prompt_ids), dtype=np.float32), row[:length]])
        for group in groups
        for row, length in zip(columns[group.group_id], group.response_lengths.tolist(), strict=True)
    ]


def pack_columns(columns: Mapping[int, np.ndarray], name: str) -> DataProto:
    """What `group_columns` gives, as rows that travel: ``group_ids`` [B] and ``name`` [B, longest response]."""
    group_ids = np.repeat(np.array(list(columns), dtype=np.int64), [len(rows) for rows in columns.values()])
    longest = max((rows.shape[1] for rows in columns.values()), default=0)
    padded = [np.pad(rows, ((0, 0), (0, longest - rows.shape[1]))) for rows in columns.values()]
    whole = np.concatenate([np.zeros((0, longest), dtype=np.float32), *padded])
    return DataProto.from_dict({"group_ids": torch.from_numpy(group_ids), name: torch.from_numpy(whole)})


def unpack_columns(parts: Sequence[DataProto], *, name: str) -> dict[int, np.ndarray]:
    """Put together what several ranks packed: group id to [G, longest response of the rank] float32."""
    columns: dict[int, np.ndarray] = {}
    for part in parts:
        group_ids, rows = _array(part, "group_ids"), _array(part, name)
        columns |= {int(group_id): rows[group_ids == group_id] for group_id in np.unique(group_ids)}
    return columns


def _sequences(data: DataProto, mask: np.ndarray, tensors: Mapping[str, np.ndarray]) -> list[TokenSequence]:
    """One sequence a row: its attended tokens, with ``mask`` [B, R] in the loss."""
    input_ids, attention = _array(data, "input_ids"), _array(data, "attention_mask").astype(bool)
    _check_positions(data, attention)
    num_prompt = input_ids.shape[1] - mask.shape[1]
    sequences = []
    for row, keep in enumerate(attention):
        in_prompt, in_response = int(keep[:num_prompt].sum()), keep[num_prompt:]
        loss_mask = np.concatenate([np.zeros(in_prompt, dtype=bool), mask[row, in_response]])
        if len(loss_mask):
            loss_mask[0] = False  # no token predicts the first one
        columns = {
            name: np.concatenate([np.zeros(in_prompt, dtype=np.float32), values[row, in_response]])
            for name, values in tensors.items()
        }
        sequences.append(
            TokenSequence(input_ids=input_ids[row, keep].astype(np.int32), loss_mask=loss_mask, columns=columns)
        )
    return sequences


def _attended_responses(data: DataProto) -> np.ndarray:
    """[B, R] bool, tokens of the responses that are attended to."""
    missing = [name for name in _NEEDED if name not in _names(data)]
    if missing:
        raise ValueError(f"data must hold {list(_NEEDED)}, got {sorted(_names(data))}; add {missing}")
    num_response = _array(data, "responses").shape[1]
    attention = _array(data, "attention_mask").astype(bool)
    return attention[:, attention.shape[1] - num_response :]


def _check_positions(data: DataProto, attention: np.ndarray) -> None:
    """Packing counts positions itself: others than these would silently be lost."""
    if "position_ids" not in _names(data):
        return
    positions = _array(data, "position_ids")
    counted = attention.cumsum(axis=1) - 1
    if positions.shape != attention.shape or (positions != counted)[attention].any():
        raise ValueError(
            "position_ids must count the attended tokens of each row from 0, as cumsum(attention_mask) - 1 does; "
            f"got others, of shape {positions.shape}"
        )


def _names(data: DataProto) -> set[str]:
    return set() if data.batch is None else {str(name) for name in data.batch.keys()}  # noqa: SIM118 - a TensorDict


def _array(data: DataProto, name: str) -> np.ndarray:
    if name not in _names(data):
        raise ValueError(f"data must hold {name!r}, got {sorted(_names(data))}; add it")
    assert data.batch is not None
    return data.batch[name].detach().cpu().numpy()
