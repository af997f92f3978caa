"""How the server's parts answer: replies, errors, and messages that nobody asked for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.protocol.errors import AsyncRLError

from .messages import OK, PUSH_ID, Message

Send = Callable[[bytes, Message], None]


class Mailbox:
    """Sends to clients.

    Args:
        send: Sends one message to one client.
    """

    def __init__(self, send: Send) -> None:
        self._send = send

    def reply(
        self, client: bytes, request_id: int, fields: Mapping[str, Any] | None = None, payload: Sequence[Any] = ()
    ) -> None:
        """Answer a request."""
        self._send(client, Message(name=OK, request_id=request_id, fields=fields or {}, payload=payload))

    def fail(self, client: bytes, request_id: int, error: AsyncRLError) -> None:
        """Answer a request with an error, which the client raises."""
        self._send(client, Message.of_error(request_id, error))

    def push(self, client: bytes, name: str, fields: Mapping[str, Any] | None = None) -> None:
        """Tell a client something."""
        self._send(client, Message(name=name, request_id=PUSH_ID, fields=fields or {}))
