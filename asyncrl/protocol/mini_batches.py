"""Going through the rows of a `DataProto` in mini-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from .columns import object_array
from .errors import BatchError

if TYPE_CHECKING:
    from .data_proto import DataProto


def mini_batches(
    data: DataProto, mini_batch_size: int, epochs: int, seed: int | None, dataloader_kwargs: dict[str, Any]
) -> Iterator[DataProto]:
    """What `DataProto.make_iterator` returns: a DataLoader chooses the rows, which are then taken at once.

    As `collate_fn` does with rows, it makes object arrays of all arrays; Python lists of one length become a further
    dimension.

    Raises:
        BatchError: ``mini_batch_size`` does not divide the rows.
    """
    if mini_batch_size < 1 or len(data) % mini_batch_size != 0:
        raise BatchError(f"mini_batch_size must divide the {len(data)} rows, got {mini_batch_size}")
    if not len(data):  # a DataLoader shuffles no empty data set
        return iter(())

    def collate(rows: list[int]) -> DataProto:
        mini_batch = data.select_idxs(rows)
        arrays = mini_batch.non_tensor_batch
        mini_batch.non_tensor_batch = {key: object_array(list(array)) for key, array in arrays.items()}
        return mini_batch

    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = DataLoader(
        range(len(data)),  # type: ignore[arg-type]
        batch_size=mini_batch_size,
        collate_fn=collate,
        generator=generator,
        **dataloader_kwargs,
    )
    return (mini_batch for _ in range(epochs) for mini_batch in loader)
