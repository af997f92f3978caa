"""How to reach a replay buffer: what its owner hands to every process that uses it."""

from dataclasses import dataclass
from pathlib import Path

from .client import BufferClient
from .keys import ClientKeys, client_keys
from .source import SyncBufferClient


@dataclass(frozen=True, kw_only=True)
class BufferConnection:
    """Opens clients, each in the process that uses it. No secret travels with it: a key is read where it is needed.

    Attributes:
        address: The server's. Example: ``tcp://127.0.0.1:5555``.
        request_timeout_s: Deadline of a client's call.
        keys: Directory that holds ``client.json``; empty where the server has no keys.
    """

    address: str
    request_timeout_s: float = 30.0
    keys: str = ""

    def client(self) -> BufferClient:
        """A client of the running event loop. Raises ValueError if the keys are missing, or readable by others."""
        return BufferClient(self.address, request_timeout_s=self.request_timeout_s, keys=self._read_keys())

    def sync_client(self) -> SyncBufferClient:
        """A client that blocks. Raises ValueError if the keys are missing, or readable by others."""
        return SyncBufferClient(self.address, request_timeout_s=self.request_timeout_s, keys=self._read_keys())

    def _read_keys(self) -> ClientKeys | None:
        return client_keys(Path(self.keys)) if self.keys else None
