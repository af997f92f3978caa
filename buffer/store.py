"""Where payload frames are kept: beside the ledger, as they came off the socket, or on store servers by group id."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncrl.protocol.errors import UnknownGroup, WireError

_SIZE_BYTES = 8


class Store(Protocol):
    """Payloads by group id."""

    stored_bytes: int

    def measure(self, payload: Sequence[Any]) -> int:
        """Bytes that the payload of a put takes."""
        ...

    def put(self, group_id: int, payload: Sequence[Any], size: int) -> None:
        """Keep a payload of ``size`` bytes until `remove`."""
        ...

    def get(self, group_id: int) -> Sequence[Any]:
        """The payload's frames. Raises UnknownGroup if they are not here."""
        ...

    def remove(self, group_id: int) -> None:
        """Forget a payload, if it is there."""
        ...


class MemoryStore:
    """Payloads in this process's memory."""

    def __init__(self) -> None:
        self._payloads: dict[int, tuple[Sequence[Any], int]] = {}
        self.stored_bytes = 0

    def measure(self, payload: Sequence[Any]) -> int:
        """See `Store.measure`."""
        return sum(map(len, payload))

    def put(self, group_id: int, payload: Sequence[Any], size: int) -> None:
        """See `Store.put`; a payload that was there is replaced."""
        self.remove(group_id)
        self._payloads[group_id] = (payload, size)
        self.stored_bytes += size

    def get(self, group_id: int) -> Sequence[Any]:
        """See `Store.get`."""
        if group_id not in self._payloads:
            raise UnknownGroup(
                f"no trajectories of group {group_id} are stored; fetch what a plan names, before commit"
            )
        return self._payloads[group_id][0]

    def remove(self, group_id: int) -> None:
        """See `Store.remove`."""
        _, size = self._payloads.pop(group_id, ((), 0))
        self.stored_bytes -= size


def size_frame(size: int) -> bytes:
    """What a put carries to the ledger when its payload is on a store server: the payload's size."""
    return size.to_bytes(_SIZE_BYTES, "little")


class RemoteStore:
    """Sizes of payloads that store servers hold.

    Args:
        remove: Tells the store server of a group to forget it.
    """

    def __init__(self, remove: Callable[[int], None]) -> None:
        self._remove = remove
        self._sizes: dict[int, int] = {}
        self.stored_bytes = 0

    def measure(self, payload: Sequence[Any]) -> int:
        """See `Store.measure`."""
        if len(payload) != 1 or len(payload[0]) != _SIZE_BYTES:
            raise WireError("payloads are kept by store servers here; a put carries its size in 8 bytes")
        return int.from_bytes(bytes(payload[0]), "little")

    def put(self, group_id: int, payload: Sequence[Any], size: int) -> None:
        """See `Store.put`; a payload that was there is replaced."""
        self.stored_bytes += size - self._sizes.get(group_id, 0)
        self._sizes[group_id] = size

    def get(self, group_id: int) -> Sequence[Any]:
        """See `Store.get`."""
        raise UnknownGroup(f"the trajectories of group {group_id} are on a store server; ask that")

    def remove(self, group_id: int) -> None:
        """See `Store.remove`."""
        self.stored_bytes -= self._sizes.pop(group_id, 0)
        self._remove(group_id)
