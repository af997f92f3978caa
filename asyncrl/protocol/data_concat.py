"""Joining the results of several workers, of whichever kind they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from .data_proto import DataProto
from .errors import UsageError


def concat_batches(parts: Sequence[Any]) -> Any:
    """Lay `DataProto`s, or TensorDicts, end to end; None where no worker returned anything."""
    if all(part is None for part in parts):
        return None
    if isinstance(parts[0], DataProto):
        return DataProto.concat(parts)
    if isinstance(parts[0], TensorDict):
        return torch.cat(list(parts), dim=0)
    raise UsageError(f"results must be DataProto or TensorDict to be joined, got {type(parts[0]).__name__}")
