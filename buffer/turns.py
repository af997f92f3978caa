"""Whose turn it is when more workers wait than groups can begin: start-time fair queueing (Goyal et al., SIGCOMM 96).

Each grant moves a worker's turn by one, and the lowest turn is served first. One that was away resumes at the turn that
is being served: it is not paid back for the time it asked for nothing, so that a newcomer holds up nobody.
"""

_MAX_KNOWN = 4096


class Turns:
    """Turns of clients; those behind the turn being served need not be remembered."""

    def __init__(self) -> None:
        self._next: dict[bytes, int] = {}
        self._serving = 0

    def of(self, client: bytes) -> int:
        """The turn of a client; the lowest is served first."""
        return max(self._next.get(client, 0), self._serving)

    def take(self, client: bytes) -> None:
        """A client was served in its turn."""
        turn = self.of(client)
        self._serving = turn
        self._next[client] = turn + 1
        if len(self._next) > _MAX_KNOWN:
            self._next = {known: turn for known, turn in self._next.items() if turn > self._serving + 1}
