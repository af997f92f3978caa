"""How many requests of a client are answered in a second."""

import time
from collections import Counter

from asyncrl.core.errors import RateExceeded


class RateLimit:
    """Counts the requests of each client within a second, and the leases that they name; ``per_second`` are allowed."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._counts: Counter[bytes] = Counter()
        self._since = 0.0

    def allows(self, client: bytes, num_parts: int = 1) -> bool:
        """Count a request, of ``num_parts``; False when its client has had its share of this second."""
        now = time.monotonic()
        if now - self._since >= 1.0:
            self._since = now
            self._counts.clear()
        self._counts[client] += num_parts
        return self._counts[client] <= self._per_second

    def error(self) -> RateExceeded:
        """What a client over its rate is told."""
        return RateExceeded(
            f"more than {self._per_second} requests, or leases that they name, came from this client within a second "
            "(buffer.max_requests_per_s); "
            "this one was not answered, send it again later"
        )
