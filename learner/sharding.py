"""Enter a model's sequence-parallel group, and move batches between the dp and the sp layout.

Entering sets the group that the attention of the model uses and leaving restores the one before, also when nested and
on errors. Data is not touched by entering: the dispatch gives all sp ranks the same batch, and attention splits it.
`preprocess_data` and `postprocess_data` are for computations that do without the model's own splitting.
"""

from __future__ import annotations

from types import TracebackType

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.protocol import DataProto, all_gather_data_proto

from .ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group


class UlyssesShardingManager:
    """Context in which a model runs over its sp ranks.

    Args:
        device_mesh: Has an axis ``sp``; None makes the context, and both methods, do nothing.
    """

    def __init__(self, device_mesh: DeviceMesh | None) -> None:
        self.device_mesh = device_mesh
        self._mesh = None if device_mesh is None else device_mesh["sp"]
        self._group = None if self._mesh is None else self._mesh.get_group()
        self._before: list[ProcessGroup | None] = []

    def __enter__(self) -> UlyssesShardingManager:
        if self._mesh is not None:
            self._before.append(get_ulysses_sequence_parallel_group())
            set_ulysses_sequence_parallel_group(self._group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mesh is not None:
            set_ulysses_sequence_parallel_group(self._before.pop())

    def preprocess_data(self, data: DataProto) -> DataProto:
        """Put the batches of all sp ranks together, in the order of the ranks, on each of them.

        Args:
            data: This rank's rows; changed in place.

        Returns:
            The same batch, with the rows of all ranks.
        """
        if self._mesh is None or self._mesh.size() == 1:
            return data
        all_gather_data_proto(data, self._group)
        return data

    def postprocess_data(self, data: DataProto) -> DataProto:
        """Keep this rank's part of a batch that all sp ranks hold; the inverse of `preprocess_data`.

        Args:
            data: Its rows are a multiple of sp.
        """
        if self._mesh is None or self._mesh.size() == 1:
            return data
        return data.chunk(chunks=self._mesh.size())[self._mesh.get_local_rank()]
