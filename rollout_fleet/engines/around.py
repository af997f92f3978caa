"""What engines that stand around another one have in common: what they do not change is the other's."""

from __future__ import annotations

from asyncrl.protocol.types import WeightSnapshot

from .base import Engine


class EngineAround:
    """Hands every call but `Engine.generate` and `Engine.abort` to the engine inside."""

    def __init__(self, engine: Engine) -> None:
        """Take the engine, which is started and stopped with this one."""
        self._engine = engine

    @property
    def version(self) -> int:
        """See `Engine.version`."""
        return self._engine.version

    async def start(self) -> None:
        """See `Engine.start`."""
        await self._engine.start()

    async def release_memory(self) -> None:
        """See `Engine.release_memory`."""
        await self._engine.release_memory()

    async def load_weights(self, snapshot: WeightSnapshot) -> float:
        """See `Engine.load_weights`."""
        return await self._engine.load_weights(snapshot)

    async def wait_failed(self) -> None:
        """See `Engine.wait_failed`."""
        await self._engine.wait_failed()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await self._engine.stop()
