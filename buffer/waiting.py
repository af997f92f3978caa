"""Requests that the server holds until the ledger can answer them, each under a timer that answers in its stead."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.protocol.errors import ReplayBufferError

_MAX_PER_CLIENT = 256
_MAX_IN_ALL = 16_384


@dataclass(kw_only=True, slots=True, eq=False)
class Held:
    """A request without an answer yet.

    Attributes:
        client: Who asked.
        request_id: Which of its requests.
        fields: What was asked, as the operation needs it.
        num_bytes: Payload that waits with it.
        timer: Gives the answer "nothing yet".
    """

    client: bytes
    request_id: int
    fields: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    timer: asyncio.TimerHandle | None = None


class WaitingRoom:
    """Held requests of one operation, in the order they came; none is held twice and none longer than asked."""

    def __init__(self) -> None:
        self._held: dict[tuple[bytes, int], Held] = {}
        self._by_client: dict[bytes, dict[int, Held]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def all(self) -> list[Held]:
        """Those waiting now, first come first."""
        return list(self._held.values())

    def of_client(self, client: bytes) -> list[Held]:
        """Those of one client."""
        return list(self._by_client.get(client, {}).values())

    def hold(self, held: Held, hold_s: float, on_timeout: Callable[[Held], None]) -> None:
        """Hold a request for ``hold_s`` at most; one sent again takes the place of the first.

        Raises:
            ReplayBufferError: too many are waiting.
        """
        self.leave(held.client, held.request_id)
        if len(self._by_client.get(held.client, ())) >= _MAX_PER_CLIENT or len(self._held) >= _MAX_IN_ALL:
            raise ReplayBufferError(
                f"{len(self._held)} requests of this kind wait, of them {len(self.of_client(held.client))} of this "
                f"client; at most {_MAX_IN_ALL} and {_MAX_PER_CLIENT} may"
            )

        def time_out() -> None:
            self.leave(held.client, held.request_id)
            on_timeout(held)

        held.timer = asyncio.get_running_loop().call_later(hold_s, time_out)
        self._held[held.client, held.request_id] = held
        self._by_client.setdefault(held.client, {})[held.request_id] = held
        self.num_bytes += held.num_bytes

    def leave(self, client: bytes, request_id: int) -> Held | None:
        """Take a request out, because it is answered or no longer wanted."""
        held = self._held.pop((client, request_id), None)
        if held is None:
            return None
        of_client = self._by_client[client]
        del of_client[request_id]
        if not of_client:
            del self._by_client[client]
        self.num_bytes -= held.num_bytes
        if held.timer is not None:
            held.timer.cancel()
        return held

    def close(self) -> None:
        """Cancel every timer."""
        for held in self.all():
            self.leave(held.client, held.request_id)
