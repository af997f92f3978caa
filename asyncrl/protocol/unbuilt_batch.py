"""The tensors of a batch as long as nobody asks for their TensorDict, which takes longer to build than to cut."""

from __future__ import annotations

from collections.abc import ItemsView
from dataclasses import dataclass
from typing import Any, overload

import torch
from tensordict import TensorDict


@dataclass(slots=True)
class UnbuiltBatch:
    """What a `DataProto` holds after it was cut, joined or received; it is never written to.

    Not frozen, for that would double the time to make one.

    Attributes:
        tensors: Tensors by name, all of ``num_rows`` rows.
        num_rows: B.
        device: Of the TensorDict to be built; None where it has none of its own.
        is_borrowed: The memory belongs to others too, so that the TensorDict gets copies.
    """

    tensors: dict[str, Any]
    num_rows: int
    device: torch.device | None = None
    is_borrowed: bool = False

    @property
    def batch_size(self) -> torch.Size:
        """``[B]``."""
        return torch.Size((self.num_rows,))

    def items(self) -> ItemsView[str, Any]:
        """Names and tensors, to be read only."""
        return self.tensors.items()

    def select(self, *keys: str) -> UnbuiltBatch:
        """The tensors named. Raises `KeyError` where there is no such tensor."""
        missing = [key for key in keys if key not in self.tensors]
        if missing:
            raise KeyError(f"batch has no {missing}, only {list(self.tensors)}")
        return UnbuiltBatch({key: self.tensors[key] for key in keys}, self.num_rows, self.device, self.is_borrowed)

    def build(self) -> TensorDict:
        """The TensorDict, in memory of its own where this is shared."""
        return self.clone() if self.is_borrowed else self._build(self.tensors)

    def clone(self) -> TensorDict:
        """The TensorDict, in memory of its own."""
        return self._build({key: tensor.clone() for key, tensor in self.tensors.items()})

    def _build(self, tensors: dict[str, Any]) -> TensorDict:
        return TensorDict(tensors, batch_size=self.batch_size, device=self.device)


class BuiltWhenRead:
    """The attribute ``batch`` of a `DataProto`: a TensorDict or None, built when it is first read.

    On the class itself it is None, which `dataclasses` takes for the field's default.
    """

    @overload
    def __get__(self, data: None, kind: Any = None) -> None: ...

    @overload
    def __get__(self, data: object, kind: Any = None) -> TensorDict | None: ...

    def __get__(self, data: Any, kind: Any = None) -> TensorDict | None:
        if data is None:
            return None
        if isinstance(data._batch, UnbuiltBatch):
            data._batch = data._batch.build()
        return data._batch

    def __set__(self, data: Any, batch: TensorDict | UnbuiltBatch | None) -> None:
        data._batch = batch


BUILT_WHEN_READ = BuiltWhenRead()
