"""Weight offers without weights, and a log of offers in memory, for tests that do not read the weights."""

import asyncio
from collections.abc import Collection

from asyncrl.core.types import WeightOffer
from buffer.offers import OfferLog


def bare_offer(version: int) -> WeightOffer:
    """Return an offer of a version without a manifest."""
    return WeightOffer(version=version, manifest=f"/weights/v{version}/manifest.json", digest="", num_bytes=0)


class OffersInMemory:
    """Implements the buffer's calls for weight offers without sockets, with the real `OfferLog`.

    The names of the engines are numbers.

    Attributes:
        log: The log of the offers.
        learner_version: Number of committed steps. `commit_offers` sets it.
        pins: All versions that were pinned so far.
    """

    def __init__(self, learner_version: int = 1 << 30) -> None:
        self.log = OfferLog()
        self.learner_version = learner_version
        self.pins: list[int | None] = []
        self._changed = asyncio.Condition()

    async def commit_offers(self, learner_version: int) -> None:
        self.learner_version = learner_version
        await self._notify()

    async def offer(self, offer: WeightOffer) -> int:
        self.log.append(offer)
        await self._notify()
        return self.log.oldest()

    async def withdraw_offers(self) -> None:
        """Forget all earlier offers, as after a restart of the learner."""
        self.log = OfferLog()
        await self._notify()

    async def publish_failed(self, reason: str) -> None:
        self.log.failure = reason
        await self._notify()

    async def next_offer(self, after: int, engine: str = "0") -> WeightOffer:
        async with self._changed:
            while (offer := self.log.next_for(engine.encode(), after + 1, self.learner_version)) is None:
                await self._changed.wait()
            return offer

    async def loaded(self, version: int, took_s: float, engine: str = "0") -> None:
        self.log.loaded(engine.encode(), version, took_s, engine)
        await self._notify()

    async def fenced(self, engine: bytes = b"0") -> None:
        self.log.forget(engine)
        await self._notify()

    async def served(self, after: int, num_engines: int) -> tuple[int, float]:
        async with self._changed:
            while True:
                self.log.check()
                served = self.log.served(num_engines)
                if served is not None and served[0] > after:
                    return served
                await self._changed.wait()

    async def pin(self, version: int, num_engines: int, known: Collection[str] = ()) -> set[str]:
        if self.log.pin(version, num_engines):
            self.pins.append(version)
            await self._notify()
        async with self._changed:
            while (engines := set(self.log.pinned())) == set(known):
                self.log.check()
                await self._changed.wait()
            return engines

    async def unpin(self) -> None:
        self.pins.append(None)
        self.log.unpin()
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
