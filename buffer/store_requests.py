"""Store servers that join the buffer from the hosts of the rollout workers, and leave it.

The buffer learns of a host from its workers. The controller waits for a host without a store; `StoreRequests.settle`
answers it, or a timer answers "nothing yet".
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.core.errors import ReplayBufferError, WireError

from .commands import AddStore, DropStore
from .messages import Message, integer, text
from .store_links import StoreLinks
from .waiting import Collaborators, PendingRequest

logger = logging.getLogger(__name__)

_MAX_HOSTS = 65_536


class StoreRequests:
    """The operations ``add_store``, ``drop_store`` and ``store_wanted``; ``links`` connect to the stores."""

    def __init__(self, shared: Collaborators, *, links: StoreLinks | None) -> None:
        self._ledger, self._store, self._replies = shared.ledger, shared.store, shared.replies
        self._links = links
        self._hosts: dict[str, None] = {}
        self._pending = shared.pending()
        self.operations: dict[str, Callable[[bytes, Message], None]] = {
            "add_store": self._add,
            "drop_store": self._drop,
            "store_wanted": self._wanted,
        }

    def close(self) -> None:
        """Cancel every pending request."""
        self._pending.close()

    def note_host(self, fields: Mapping[str, Any]) -> None:
        """Remember the host of a worker, if its message names one."""
        if "host" in fields and len(self._hosts) < _MAX_HOSTS:
            self._hosts[text(fields, "host")] = None

    def recover(self) -> None:
        """Connect to the stores that an earlier server knew."""
        if self._links is not None and self._links.may_join:
            for place in self._ledger.groups.space.stores:
                self._links.connect("" if place.is_gone else place.address)

    def settle(self) -> None:
        """Answer each pending request with a host that has no store."""
        for pending in self._pending.all():
            known = pending.fields["known"]
            if (host := next((host for host in self._hosts if host not in known), None)) is not None:
                self._pending.remove(pending.client, pending.request_id)
                self._replies.reply(pending.client, pending.request_id, {"host": host})

    def describe(self) -> list[dict[str, Any]]:
        """Describe the store servers for `asyncrl inspect`; empty without store servers."""
        if self._links is None:
            return []
        groups = self._ledger.groups
        stores = zip(groups.space.stores, self._links.addresses, groups.space.stored_bytes, strict=True)
        return [
            {"address": address, "host": place.host, "bytes": num_bytes, "is_gone": place.is_gone}
            for place, address, num_bytes in stores
        ]

    def _wanted(self, client: bytes, request: Message) -> None:
        self._check_may_join()
        known = request.fields.get("known")
        if not isinstance(known, list) or not all(isinstance(host, str) for host in known):
            raise WireError("field 'known' must be a list of hosts")
        pending = PendingRequest(client=client, request_id=request.request_id, fields={"known": frozenset(known)})
        self._pending.add(pending)

    def _check_may_join(self) -> StoreLinks:
        if self._links is None or not self._links.may_join:
            raise ReplayBufferError("stores cannot join this buffer; set buffer.stores_on=hosts")
        return self._links

    def _add(self, client: bytes, request: Message) -> None:
        """Add a store and reply with its number. Adding it again has no effect."""
        links = self._check_may_join()
        address, host = text(request.fields, "address"), text(request.fields, "host")
        added = self._ledger.apply(AddStore(address=address, host=host))
        if added.is_new:
            links.connect(address)
            logger.info("store %d of host %s joins at %s", added.store, host, address)
        self._replies.reply(client, request.request_id, {"store": added.store})

    def _drop(self, client: bytes, request: Message) -> None:
        """Drop a store that the controller declares lost, and reply with the number of lost groups."""
        links, number = self._check_may_join(), integer(request.fields, "store")
        if number >= len(self._ledger.groups.space.stores):
            raise WireError(f"store {number} never joined; {len(self._ledger.groups.space.stores)} stores have")
        dropped = self._ledger.apply(DropStore(store=number))
        if dropped.is_new:
            links.disconnect(number)
            self._store.evict(dropped.group_ids)
            logger.warning("store %d is lost with %d stored groups", number, len(dropped.group_ids))
        self._replies.reply(client, request.request_id, {"groups": len(dropped.group_ids)})
