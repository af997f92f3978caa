"""Connects the ledger's server to the store servers (servers that hold trajectories).

Stores may join and leave while the buffer serves. The ledger numbers the stores. In a resumed run, a new store takes
over the number of a store that had joined before the resume.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.core.errors import ReplayBufferError

from . import operations
from .client import ClientSocket
from .config import BufferConfig
from .encoding import Message
from .keys import client_keys
from .records import Answer, BufferRole
from .waiting import Collaborators

_MAX_HOSTS = 65_536


class StoreLinks:
    """The connections to the stores. The ledger numbers the stores. Call `connect` while an asyncio event loop runs.

    Args:
        config: Options of the buffer.
        on_connected: Called with the store's number each time that a connection to a store begins.
        may_join: Whether further stores may join later.

    Attributes:
        addresses: Addresses of the stores, by number; empty for a lost store.
        disk_bytes: Size in bytes of the payloads that each store has only on disk, by number. The values come from the
            stores' latest reports.
    """

    def __init__(self, config: BufferConfig, *, on_connected: Callable[[int], None], may_join: bool) -> None:
        self.may_join = may_join
        self.addresses: list[str] = []
        self.disk_bytes: list[int] = []
        self._timeout_s = config.request_timeout_s
        self._keys = client_keys(Path(config.keys), BufferRole.ledger).for_stores() if config.keys else None
        self._epoch = config.epoch
        self._on_connected = on_connected
        self._links: list[ClientSocket | None] = []

    def connect(self, address: str, number: int | None = None) -> None:
        """Connect to the store at ``address``.

        ``number`` is the store's number, by default the next free number. If the address is empty, only reserve the
        number.
        """
        link, number = None, len(self._links) if number is None else number
        if address:
            link = ClientSocket(
                address,
                timeout_s=self._timeout_s,
                keys=self._keys,
                on_connected=partial(self._on_connected, number),
                epoch=self._epoch,
            )
        self._links[number : number + 1] = [link]
        self.addresses[number : number + 1] = [address]
        self.disk_bytes[number : number + 1] = [0]

    def disconnect(self, number: int) -> None:
        """Close the connection to a lost store. The store keeps its number."""
        link, self._links[number] = self._links[number], None
        self.addresses[number], self.disk_bytes[number] = "", 0
        if link is not None:
            link.close()

    def remove(self, finished: Sequence[int], ended: Sequence[tuple[int, int]]) -> None:
        """Tell the stores to drop the payloads of ``finished`` groups and of ``ended`` attempts.

        Attempts are (group id, attempt number) pairs. Every store gets the message, because two stores may hold the
        payload of one attempt.
        """
        for number, link in self.connected():
            link.post(operations.Remove(tuple(finished), tuple(ended)), partial(self._note, number, link))

    def _note(self, number: int, link: ClientSocket, answer: operations.Removed | operations.Missing) -> None:
        if self._links[number] is link:
            self.disk_bytes[number] = answer.disk_bytes

    def connected(self) -> list[tuple[int, ClientSocket]]:
        """Return (store number, connection) pairs of the stores that are not lost."""
        return [(number, link) for number, link in enumerate(self._links) if link is not None]

    async def reconcile(self, number: int, reconcile: operations.Reconcile) -> tuple[int, ...]:
        """Send a store the request ``reconcile``. The store drops unneeded payloads, and reports missing payloads.

        Returns the ids of the groups that the store lacks. Raises `AsyncRLError` if the store does not answer.
        """
        link = self._links[number]
        if link is None:
            raise ReplayBufferError(f"store {number} is gone")
        answer = await link.call(reconcile)
        self._note(number, link, answer)
        return answer.group_ids

    def close(self) -> None:
        """Close the connections."""
        for link in self._links:
            if link is not None:
                link.close()


class StoreJoins:
    """The store servers that join and leave.

    Args:
        shared: The ledger and other objects that all request handlers use.
        links: Connections to the store servers; None if the ledger's server holds the trajectories.

    Attributes:
        wanted: The controller's requests for the name of a host that has a worker but no store.
    """

    def __init__(self, shared: Collaborators, links: StoreLinks | None) -> None:
        self._ledger, self._links = shared.ledger, links
        self._hosts: dict[str, None] = {}
        self.wanted = shared.held()
        self.close = self.wanted.close

    def note_host(self, host: str) -> None:
        """Remember the host of a worker. An empty name is ignored."""
        if host and len(self._hosts) < _MAX_HOSTS:
            self._hosts[host] = None

    def recover(self) -> None:
        """Connect to the stores that an earlier server knew."""
        if self._links is not None and self._links.may_join:
            for place in self._ledger.groups.space.stores:
                self._links.connect("" if place.is_gone else place.address)

    def leave_earlier(self) -> None:
        """Close the connections to the stores that joined before the run was resumed from a checkpoint.

        The stores that join later load the groups of these earlier stores from the checkpoint.
        """
        for number in self._ledger.groups.space.awaited_stores():
            if self._links is not None:
                self._links.disconnect(number)

    def settle(self) -> None:
        """Answer each waiting `StoreWanted` request with a host that has a worker and is not in ``known``."""

        def answer_to(request: Message) -> Answer | None:
            host = next((host for host in self._hosts if host not in request.body.known), None)
            return None if host is None else operations.Names((host,))

        self.wanted.answer(answer_to)

    def describe(self) -> list[dict[str, Any]]:
        """Return one JSON object per store server, for `asyncrl inspect`."""
        if self._links is None:
            return []
        space, links = self._ledger.groups.space, self._links
        return [
            {"address": address, "host": place.host, "bytes": held, "disk_bytes": on_disk, "is_gone": place.is_gone}
            for place, address, held, on_disk in zip(
                space.stores, links.addresses, space.stored_bytes, links.disk_bytes, strict=False
            )
        ]

    def joining(self) -> StoreLinks:
        """Return the connections to the stores. Raises `ReplayBufferError` if stores cannot join this buffer."""
        if self._links is None or not self._links.may_join:
            raise ReplayBufferError("stores cannot join this buffer; set buffer.stores_on=hosts")
        return self._links
