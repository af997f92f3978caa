"""The connection of one process to the buffer: requests to its server, and payloads to and from the store servers.

`buffer.roles` has the calls of a worker, of the learner and of the controller on top of it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.core import record
from asyncrl.core.errors import ReplayBufferError, StoreFull

from .client_socket import ClientSocket
from .encoding import JOIN_BELOW_BYTES
from .keys import ClientKeys
from .messages import SPACE, Message
from .sockets import allow_clients


class BufferClient:
    """Sends requests to a buffer. It connects at the first call, and only the event loop of that call may use it.

    Args:
        address: Where the server listens. Example: ``"ipc:///dev/shm/asyncrl-1f/sockets/buffer"``.
        request_timeout_s: Deadline of each request. The server answers a request that waits within half of it.
        keys: CURVE keys, if the server has them.
        epoch: The run that this client belongs to. Empty takes the run that the server names first.
        incarnation: The learner's incarnation that this client belongs to.

    Attributes:
        host: Host of this client, as `ControlClient.add_store` names it. Its puts go to the store there, if that has
            room.
        on_connected: Called each time that the server is reached.
        on_push: Called with each message of this name that answers no request.
    """

    def __init__(
        self,
        address: str,
        *,
        request_timeout_s: float = 30.0,
        keys: ClientKeys | None = None,
        epoch: str = "",
        host: str = "",
        incarnation: int = 0,
    ) -> None:
        self.address = address
        self.timeout_s = request_timeout_s
        self.host = host
        self.incarnation = incarnation
        self.is_closed = False
        self.on_connected: Callable[[], None] = lambda: None
        self.on_push: dict[str, Callable[[Message], None]] = {SPACE: self._note_space}
        self._epoch = epoch
        self._keys = keys
        self._link: ClientSocket | None = None
        self._store_links: dict[str, ClientSocket] = {}
        self._has_other_clock: bool | None = None  # None until the server has named its clock
        self._space = asyncio.Event()

    async def connect(self) -> None:
        """Open the connection now; does not wait for the server. Raises `ValueError` if the address is malformed."""
        _ = self.link

    @property
    def link(self) -> ClientSocket:
        """The connection to the buffer's server. Raises `ReplayBufferError` if it is closed, or of another loop."""
        if self.is_closed:
            raise self.closed_error()
        if self._link is None:
            self._link = self._link_to(self.address, self._keys, lambda: self.on_connected())
        elif self._link.loop is not asyncio.get_running_loop():
            raise ReplayBufferError(
                f"the client of the buffer at {self.address} lives on another event loop, that of its first call; make "
                "one for each loop"
            )
        return self._link

    def store_link(self, address: str) -> ClientSocket:
        """The connection to a store server. Raises `ValueError` if this process may not open so many files."""
        if address not in self._store_links:
            keys = self._keys.for_stores() if self._keys is not None else None
            allow_clients(0, num_links=len(self._store_links) + 2)
            self._store_links[address] = self._link_to(address, keys)
        return self._store_links[address]

    def _link_to(
        self, address: str, keys: ClientKeys | None, on_connected: Callable[[], None] = lambda: None
    ) -> ClientSocket:
        return ClientSocket(
            address,
            timeout_s=self.timeout_s,
            keys=keys,
            on_push=self._push,
            on_connected=on_connected,
            epoch=self._epoch,
        )

    def _push(self, message: Message) -> None:
        if (on_push := self.on_push.get(message.name)) is not None:
            on_push(message)

    def _note_space(self, _: Message) -> None:
        self._space.set()
        self._space = asyncio.Event()

    def closed_error(self) -> ReplayBufferError:
        """What calls of a closed client raise."""
        return ReplayBufferError(f"the client of the buffer at {self.address} is closed")

    async def close(self, goodbye: Callable[[ClientSocket], Awaitable[None]] | None = None) -> None:
        """Close the connections; pending calls raise `ReplayBufferError`. ``goodbye`` may send a last request."""
        if self.is_closed:
            return
        self.is_closed = True
        self._space.set()
        if self._link is not None:
            self._link.fail_all(self.closed_error())
            if goodbye is not None and self._link.is_connected:
                await goodbye(self._link)
        for link in (self._link, *self._store_links.values()):
            if link is not None:
                link.close()

    # Requests

    async def request(self, name: str, fields: Mapping[str, Any], payload: Sequence[Any] = ()) -> Mapping[str, Any]:
        """Send a request and return the fields of its reply. Errors as `ClientSocket.request`."""
        return (await self.link.request(name, fields, payload)).fields

    async def request_until(self, name: str, fields: Mapping[str, Any], wanted: str) -> Mapping[str, Any]:
        """Repeat a request until its reply has the field ``wanted``; the server may answer "nothing yet"."""
        while wanted not in (reply := await self.request(name, fields)):
            pass
        return reply

    async def request_with_space(
        self, name: str, fields: Mapping[str, Any], payload: Sequence[Any]
    ) -> Mapping[str, Any]:
        """Repeat a request while the buffer is full: each time that groups have left, or after half a deadline."""
        while True:
            space = self._space  # a push that comes during the request counts too
            try:
                return await self.request(name, fields, payload)
            except StoreFull:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.timeout_s / 2):
                        await space.wait()

    async def request_with_payload(
        self, link: ClientSocket, name: str, fields: Mapping[str, Any], payload: Sequence[Any]
    ) -> Message:
        """Reserve the bytes of a large payload, or of a refused small one, before it is sent.

        If the lease is lost, the request goes without its payload, and the server says what became of the lease.
        """
        is_reserved = sum(map(len, payload)) < JOIN_BELOW_BYTES
        while True:
            if not is_reserved and not (await self.reserve(link, fields, payload))["is_held"]:
                payload = ()
            try:
                return await link.request(name, fields, payload)
            except StoreFull:
                is_reserved = False

    async def reserve(self, link: ClientSocket, fields: Mapping[str, Any], payload: Sequence[Any]) -> Mapping[str, Any]:
        """Wait until a server has reserved the bytes of a payload."""
        names = ("group_id", "attempt", "host")
        asked = {name: fields[name] for name in names if name in fields} | {"num_bytes": sum(map(len, payload))}
        while not (reply := await link.request("reserve", asked, caller="put")).fields.get("granted"):
            pass
        return reply.fields

    async def hello(self, fields: Mapping[str, Any], caller: str) -> Mapping[str, Any]:
        """Greet the server; returns what every client must know. ``caller`` is the call that an error names."""
        sent_ns = time.monotonic_ns()
        reply = await self.link.request("hello", fields, caller=caller)
        self.note_clock(sent_ns, reply)
        return reply.fields

    async def hello_for_clock(self, caller: str) -> None:
        """Compare this host's clock with the server's, if this process records and the clocks differ."""
        if record.current() is not None and self._has_other_clock is not False:
            await self.hello({}, caller)

    def note_clock(self, sent_ns: int, reply: Message) -> None:
        """Record the offset of this host's clock from the server's, if they are on different hosts."""
        clock = reply.fields["clock"]
        self._has_other_clock = clock != record.clock_id()
        if self._has_other_clock:
            now_ns = time.monotonic_ns()
            offset_ns = reply.fields["now_ns"] - (sent_ns + now_ns) // 2
            record.clock(clock, offset_ns=offset_ns, error_ns=(now_ns - sent_ns) // 2)
