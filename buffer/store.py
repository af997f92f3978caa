"""Payload frames by group id, kept as they came off the socket and sent as they are."""

from collections.abc import Sequence
from typing import Any

from asyncrl.protocol.errors import UnknownGroup


def num_bytes(payload: Sequence[Any]) -> int:
    """Bytes of a payload."""
    return sum(memoryview(frame).nbytes for frame in payload)


class MemoryStore:
    """Payloads in this process's memory."""

    def __init__(self) -> None:
        self._payloads: dict[int, tuple[Sequence[Any], int]] = {}
        self.stored_bytes = 0

    def put(self, group_id: int, payload: Sequence[Any]) -> None:
        """Keep a payload until `remove`."""
        size = num_bytes(payload)
        self._payloads[group_id] = (payload, size)
        self.stored_bytes += size

    def get(self, group_id: int) -> Sequence[Any]:
        """The payload's frames.

        Raises:
            UnknownGroup: nothing is stored under this id.
        """
        if group_id not in self._payloads:
            raise UnknownGroup(
                f"no trajectories of group {group_id} are stored; fetch what a plan names, before commit"
            )
        return self._payloads[group_id][0]

    def remove(self, group_id: int) -> None:
        """Forget a payload, if it is there."""
        _, size = self._payloads.pop(group_id, ((), 0))
        self.stored_bytes -= size
