"""Who was heard of when: producers that beat, and what each of them did. Pure; the caller passes the time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True)
class _Producer:
    """A client that leases.

    Attributes:
        last_heard: On the clock of ``now``.
        num_puts: Groups it stored.
        num_tokens: Policy tokens of those.
    """

    last_heard: float
    num_puts: int = 0
    num_tokens: int = 0


class Heartbeats:
    """Producers by client id.

    Args:
        silent_s: One not heard of for this long is gone.
    """

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._producers: dict[bytes, _Producer] = {}

    def enter(self, client: bytes, now: float) -> None:
        """A producer is here, and will be heard of again within ``silent_s``."""
        if client not in self._producers:
            self._producers[client] = _Producer(last_heard=now)
        self.hear(client, now)

    def hear(self, client: bytes, now: float) -> None:
        """Any message of a client came; of no effect for one that did not `enter`."""
        producer = self._producers.pop(client, None)
        if producer is not None:
            producer.last_heard = now
            self._producers[client] = producer

    def count_put(self, client: bytes, num_tokens: int) -> None:
        """A producer stored a group."""
        producer = self._producers.get(client)
        if producer is not None:
            producer.num_puts += 1
            producer.num_tokens += num_tokens

    def leave(self, client: bytes) -> None:
        """A producer said goodbye."""
        self._producers.pop(client, None)

    def next_silence(self) -> float | None:
        """When the producer heard of longest ago would be gone; None without producers."""
        longest_ago = next(iter(self._producers.values()), None)
        return None if longest_ago is None else longest_ago.last_heard + self._silent_s

    def take_silent(self, now: float) -> list[bytes]:
        """Remove and return the producers that are gone."""
        gone = []
        for client, producer in self._producers.items():
            if producer.last_heard + self._silent_s > now:
                break
            gone.append(client)
        for client in gone:
            del self._producers[client]
        return gone

    def describe(self, now: float, num_leases: Mapping[bytes, int]) -> list[dict[str, Any]]:
        """What is known of every producer, for people."""
        return [
            {
                "owner": client.hex()[:8],
                "leases": num_leases.get(client, 0),
                "puts": producer.num_puts,
                "tokens": producer.num_tokens,
                "heard_s_ago": round(now - producer.last_heard, 1),
            }
            for client, producer in self._producers.items()
        ]
