"""Joining the results of several workers, of whichever kind they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from .data_proto import DataProto


def concat_batches(parts: Sequence[Any]) -> Any:
    """Lay `DataProto`s, or TensorDicts, end to end."""
    if isinstance(parts[0], DataProto):
        return DataProto.concat(parts)
    if isinstance(parts[0], TensorDict):
        return torch.cat(list(parts), dim=0)
    raise TypeError(f"results must be DataProto or TensorDict to be joined, got {type(parts[0]).__name__}")
