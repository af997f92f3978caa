"""The ledger's side of the store servers: one connection each, over which the ledger tells them what to remove.

A restarted store server may lack payloads that it acknowledged, or hold payloads that the ledger removed since. So each
time a store is reached, the ledger tells it which groups are finished, and asks which of the other groups it lacks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from asyncrl.core.errors import ReplayBufferError

from .client_socket import ClientSocket
from .config import BufferConfig
from .keys import BufferRole, client_keys
from .messages import integers


class StoreLinks:
    """Connections by the numbers that the ledger knows stores by; made on a running loop.

    Args:
        config: Options of the buffer.
        on_connected: Called with a store's number each time that the store is reached.
        may_join: Whether stores may be added while the buffer serves.

    Attributes:
        addresses: Addresses of the stores, by number; empty for a lost store.
    """

    def __init__(self, config: BufferConfig, *, on_connected: Callable[[int], None], may_join: bool) -> None:
        self.may_join = may_join
        self.addresses: list[str] = []
        self._timeout_s = config.request_timeout_s
        self._keys = client_keys(Path(config.keys), BufferRole.ledger).for_stores() if config.keys else None
        self._epoch = config.epoch
        self._on_connected = on_connected
        self._links: list[ClientSocket | None] = []

    def connect(self, address: str) -> None:
        """Add a store and connect to it; an empty address stands for a lost store."""
        link = None
        if address:
            link = ClientSocket(
                address,
                timeout_s=self._timeout_s,
                keys=self._keys,
                on_push=lambda message: None,
                on_connected=partial(self._on_connected, len(self._links)),
                epoch=self._epoch,
            )
        self._links.append(link)
        self.addresses.append(address)

    def disconnect(self, number: int) -> None:
        """Close the connection to a lost store."""
        link, self._links[number] = self._links[number], None
        self.addresses[number] = ""
        if link is not None:
            link.close()

    def remove(self, finished: Sequence[int], ended: Sequence[tuple[int, int]]) -> None:
        """Tell every store to drop finished groups, and the payloads of attempts up to the ``ended`` ones.

        All stores are told: an attempt that was sent twice may have left its payload on two of them.
        """
        for link in self._links:
            if link is not None:
                link.post("remove", {"groups": [*finished], "ended": [number for pair in ended for number in pair]})

    async def reconcile(
        self,
        number: int,
        attempts: Sequence[tuple[int, int]],
        *,
        finished: Sequence[tuple[int, int]],
        ended: Sequence[tuple[int, int]],
    ) -> list[int]:
        """Tell one store to drop payloads as `remove` does; returns the groups and attempts that it does not hold.

        ``finished`` are ranges [start, end) of groups. Raises `AsyncRLError` if the store does not answer.
        """
        groups, numbers = zip(*attempts, strict=True) if attempts else ((), ())
        fields = {"groups": groups, "attempts": numbers}
        fields |= {
            name: [n for pair in part for n in pair] for name, part in (("finished", finished), ("ended", ended))
        }
        link = self._links[number]
        if link is None:
            raise ReplayBufferError(f"store {number} is gone")
        return integers((await link.request("reconcile", fields)).fields, "groups")

    def close(self) -> None:
        """Close the connections."""
        for link in self._links:
            if link is not None:
                link.close()
