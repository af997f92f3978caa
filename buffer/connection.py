"""How to reach a buffer: `BufferConnection` makes clients where they are used, `SyncBufferClient` is that of a rank."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.core.errors import ReplayBufferError
from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import BufferStats, WeightOffer

from .client import BufferClient
from .keys import BufferRole, ClientKeys, client_keys

_Result = TypeVar("_Result")


class SyncBufferClient:
    """Implements the port `LearnerBuffer`: a `BufferClient`, with its arguments, on a thread of its own.

    Any thread may call it. Raises `ValueError` if the address is malformed.
    """

    def __init__(
        self,
        address: str,
        *,
        request_timeout_s: float = 30.0,
        keys: ClientKeys | None = None,
        epoch: str = "",
        incarnation: int = 0,
    ) -> None:
        self.address = address
        self._client = BufferClient(
            address, request_timeout_s=request_timeout_s, keys=keys, epoch=epoch, incarnation=incarnation
        )
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"buffer client {address}", daemon=True)
        self._thread.start()
        try:
            self._call("connect", self._client.connect)
        except BaseException:
            self.close()
            raise

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """See `LearnerBuffer.fetch`. Where store servers hold the payloads, all are asked at once."""
        return self._call("fetch", lambda: self._client.fetch(group_ids))

    def offer(self, offer: WeightOffer) -> int:
        """See `WeightLog.offer`."""
        return self._call("offer", lambda: self._client.offer(offer))

    def publish_failed(self, reason: str) -> None:
        """See `WeightLog.publish_failed`."""
        self._call("publish_failed", lambda: self._client.publish_failed(reason))

    def stats(self) -> BufferStats:
        """The ledger now."""
        return self._call("stats", self._client.stats)

    def close(self) -> None:
        """Close the connection and end the thread."""
        if os.getpid() != self._process or self._loop.is_closed():
            return
        self._call("close", self._client.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, name: str, call: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run a call of the asynchronous client on its thread."""
        if os.getpid() != self._process:
            raise ReplayBufferError(
                f"buffer.{name}: the client of the buffer at {self.address} was made in process {self._process}, and "
                f"this is {os.getpid()}; make one in each process"
            )
        if self._loop.is_closed():
            raise ReplayBufferError(f"the client of the buffer at {self.address} is closed")

        async def run() -> _Result:
            return await call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()


@dataclass(frozen=True, kw_only=True)
class BufferConnection:
    """Opens clients, each in the process that uses it; the other attributes are `BufferClient`'s.

    No secret travels with it: a key is read where it is needed.

    Attributes:
        keys: Directory that holds the key of ``role``; empty where the server has no keys.
        role: What the clients are.
    """

    address: str
    request_timeout_s: float = 30.0
    keys: str = ""
    role: BufferRole = BufferRole.controller
    epoch: str = ""
    incarnation: int = 0

    def for_role(self, role: BufferRole) -> "BufferConnection":
        """The same connection for another role."""
        return replace(self, role=role)

    def client(self, name: str = "", *, host: str = "") -> BufferClient:
        """A client of the running event loop. Raises ValueError if the keys are missing, or readable by others."""
        return BufferClient(self.address, name=name, host=host, **self._options())

    def sync_client(self) -> SyncBufferClient:
        """A client that blocks. Raises ValueError if the keys are missing, or readable by others."""
        return SyncBufferClient(self.address, **self._options())

    def _options(self) -> dict[str, Any]:
        keys = client_keys(Path(self.keys), self.role) if self.keys else None
        names = ("request_timeout_s", "epoch", "incarnation")
        return {"keys": keys, **{name: getattr(self, name) for name in names}}
