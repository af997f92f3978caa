"""Weight offers for tests in which nothing reads the weights, and a log of offers in memory."""

import asyncio
from dataclasses import asdict

from asyncrl.protocol.manifest import WeightOffer
from buffer.offers import OfferLog


def bare_offer(version: int) -> WeightOffer:
    """An offer of a version without a manifest."""
    return WeightOffer(version=version, manifest=f"/weights/v{version}/manifest.json", digest="", num_bytes=0)


class OffersInMemory:
    """The calls of the buffer's ports on weights, on the real log, without sockets; engines are told apart by number.

    Attributes:
        log: The log.
        learner_version: Steps committed; tests change it by `commit_offers`.
        holds: Every version that the log was held at.
    """

    def __init__(self, learner_version: int = 1 << 30) -> None:
        self.log = OfferLog()
        self.learner_version = learner_version
        self.holds: list[int | None] = []
        self._changed = asyncio.Condition()

    async def commit_offers(self, learner_version: int) -> None:
        self.learner_version = learner_version
        await self._notify()

    async def offer(self, offer: WeightOffer) -> int:
        self.log.append(offer.version, asdict(offer))
        await self._notify()
        return self.log.oldest()

    async def publish_failed(self, reason: str) -> None:
        self.log.failure = reason
        await self._notify()

    async def next_offer(self, after: int) -> WeightOffer:
        async with self._changed:
            while (newest := self.log.newest(self.learner_version)) is None or newest[0] <= after:
                await self._changed.wait()
            return WeightOffer(**newest[1])

    async def loaded(self, version: int, took_s: float, engine: bytes = b"0") -> None:
        self.log.loaded(engine, version, took_s)
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

    async def hold(self, version: int | None) -> None:
        self.holds.append(version)
        self.log.hold(version)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
