"""Gathering the parts of a `DataProto` from all ranks of a torch process group."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .data_concat import concat_rows

if TYPE_CHECKING:
    from .data_proto import DataProto


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Lay the parts of all ranks end to end, in the order of the ranks, in place; every rank has all of it then.

    The ranks must have the same columns; the number of their rows may differ, and be zero. Tensors come back to the
    device that this rank's were on, and ``meta_info`` stays as it is.

    Args:
        data: This rank's part.
        process_group: The group; None is the default one. It bounds the wait by its own timeout.

    Raises:
        BatchError: the ranks have different columns; raised on all of them.
    """
    tensors = data._columns()
    part = pickle.dumps(data.select(meta_info_keys=()), protocol=5)
    whole = concat_rows([pickle.loads(message) for message in _all_gather_bytes(part, process_group)])
    if whole.batch is not None and data._batch is not None:
        for key, tensor in tensors.items():
            whole.batch[key] = whole.batch[key].to(tensor.device)
        if data._batch.device is not None:
            whole.batch = whole.batch.to(data._batch.device)
    data.batch, data.non_tensor_batch = whole.batch, whole.non_tensor_batch


def _all_gather_bytes(message: bytes, group: Any) -> list[memoryview]:
    """The messages of all ranks, in memory of their own; they travel padded to the longest."""
    on_cpu = any(name in dist.get_backend(group) for name in ("gloo", "mpi"))
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    num_ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([len(message)], device=device), group=group)
    longest = max(map(int, sizes))
    padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(gathered, padded, group=group)
    return [part.cpu().numpy().data[: int(size)] for part, size in zip(gathered, sizes, strict=True)]
