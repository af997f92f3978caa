"""Requests that the server holds until the ledger can answer them, each under a timer that answers in its stead."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True, eq=False)
class Held:
    """A request without an answer yet.

    Attributes:
        client: Who asked.
        request_id: Which of its requests.
        fields: What was asked, as the operation needs it.
        timer: Gives the answer "nothing yet".
    """

    client: bytes
    request_id: int
    fields: dict[str, Any] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class WaitingRoom:
    """Held requests of one operation, in the order they came; none is held twice and none longer than asked."""

    def __init__(self) -> None:
        self._held: dict[tuple[bytes, int], Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def all(self) -> list[Held]:
        """Those waiting now, first come first."""
        return list(self._held.values())

    def hold(self, held: Held, hold_s: float, on_timeout: Callable[[Held], None]) -> None:
        """Hold a request for ``hold_s`` at most; one sent again takes the place of the first."""
        self.leave(held.client, held.request_id)

        def time_out() -> None:
            self.leave(held.client, held.request_id)
            on_timeout(held)

        held.timer = asyncio.get_running_loop().call_later(hold_s, time_out)
        self._held[held.client, held.request_id] = held

    def leave(self, client: bytes, request_id: int) -> Held | None:
        """Take a request out, because it is answered or no longer wanted."""
        held = self._held.pop((client, request_id), None)
        if held is not None and held.timer is not None:
            held.timer.cancel()
        return held

    def close(self) -> None:
        """Cancel every timer."""
        for held in self._held.values():
            if held.timer is not None:
                held.timer.cancel()
        self._held.clear()
