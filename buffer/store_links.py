"""The ledger's side of the store servers: a connection to each, over which they learn what has left.

A store server may have come back without what it acknowledged, or with what the ledger has removed since. Whenever one
is reached, it is told which groups are finished, and asked which of the others it lacks.
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
        on_connected: Called with the number of a store that is reached, also when it was gone for a while.
        may_join: Whether stores may be added while the buffer serves.

    Attributes:
        addresses: Where clients find the stores, by number; empty for one that is gone.
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
        """Count one more store; an empty address stands for one that is gone."""
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
        """A store is gone for good."""
        link, self._links[number] = self._links[number], None
        self.addresses[number] = ""
        if link is not None:
            link.close()

    def remove(self, finished: Sequence[int], ended: Sequence[tuple[int, int]]) -> None:
        """Have every store forget finished groups, and what attempts up to the ``ended`` ones brought of others.

        Every store: an attempt that was sent twice may have left its payload on two of them.
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
        """Have a store forget as `remove` does; returns which of the groups and attempts it does not hold.

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
