"""Plain values of all ranks: they travel as msgpack of a named type, so that reading them runs no code."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from asyncrl.single_controller.serialization import all_gather_bytes

T = TypeVar("T")


def gather_values(value: T, kind: Any, group: dist.ProcessGroup | None) -> list[T]:
    """The values of all ranks of a group, in their order; a collective.

    Args:
        value: Numbers, strings, lists, tuples, and dataclasses of them.
        kind: Its type, for what is read. Example: ``list[tuple[int, int]]``.
        group: None stands for this rank alone.

    Raises:
        msgspec.ValidationError: a rank sent something else.
    """
    if group is None:
        return [value]
    return [msgspec.msgpack.decode(part, type=kind) for part in all_gather_bytes(msgspec.msgpack.encode(value), group)]


def gather_rows(tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """The CPU tensors of all ranks, one tuple per rank; a collective. Ranks may have different numbers of rows.

    ``device`` is the one that the group's backend moves.
    """
    num_rows = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(num_rows, torch.tensor([len(tensors[0])], device=device), group=group)
    counts = num_rows.tolist()
    columns = []
    for tensor in tensors:
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        sent = padded.to(device)
        gathered = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(gathered, sent, group=group)
        columns.append([part[:count].cpu() for part, count in zip(gathered, counts, strict=True)])
    return list(zip(*columns, strict=True))
