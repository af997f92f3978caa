"""How long a request for a lease is held whose engine is too far behind for anything that happens here to grant it.

Only its worker can change that: it says `advance`, or withdraws the request and asks at its engine's new version. One
that does neither must be answered now and then, so that it asks anew. It may have asked a moment before its engine
advanced, so the first hold is short; each further one at the same version is twice as long, so that nobody polls.
"""

from collections import OrderedDict

_FIRST_HOLD_S = 0.1
_MAX_KNOWN = 4096


class Patience:
    """Holds by client.

    Args:
        longest_s: No hold is longer.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._last: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def hold_s(self, client: bytes, version: int) -> float:
        """How long the client's request at this engine version is held; the next one at it twice as long."""
        last_version, last_s = self._last.pop(client, (-1, 0.0))
        hold_s = 2 * last_s if version == last_version else _FIRST_HOLD_S
        hold_s = min(hold_s, self._longest_s)
        self._last[client] = (version, hold_s)
        if len(self._last) > _MAX_KNOWN:
            self._last.popitem(last=False)
        return hold_s
