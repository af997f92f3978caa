"""Prompt groups that an ended run of the rollout loop still holds: saved as far as they are written, and given back.

No task of the loop owns these groups, and nobody renews them. Where the buffer does not answer, their leases run out,
so that others can lease them; the report of their tokens counts also then, and is repeated until the buffer answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from asyncrl.core.errors import DeclaredDead, LeaseExpired, NotLeaseOwner, UnknownGroup, WrongEpoch

from .config import RolloutFleetConfig, SaveProgress
from .inflight import InflightGroup
from .settlement import Settlement

logger = logging.getLogger(__name__)

_ANSWERS = (DeclaredDead, LeaseExpired, NotLeaseOwner, UnknownGroup, WrongEpoch)
"""The buffer has answered, and takes no report of this attempt from this worker."""


class Returns:
    """The groups that one rollout worker has to give back."""

    def __init__(self, config: RolloutFleetConfig, settlement: Settlement) -> None:
        self._config = config
        self._settlement = settlement
        self._groups: dict[tuple[int, int], InflightGroup] = {}

    def add(self, groups: Iterable[InflightGroup]) -> None:
        """No task of the loop owns these groups any more."""
        self._groups |= {group.key: group for group in groups}

    async def give_back(self) -> None:
        """Save all groups, finished ones too, and release them, within ``stop_timeout_s``.

        A group that was revoked is released only. What the buffer has not answered then is left for the next call.
        """
        if self._config.save_progress is not SaveProgress.never:
            await self._for_each(self._save)
        for key, failure in (await self._for_each(self._release)).items():
            if failure is None or isinstance(failure, _ANSWERS):
                self._groups.pop(key, None)
        if self._groups:
            logger.warning("%d leases could not be given back; they run out", len(self._groups))

    async def keep_giving_back(self) -> None:
        """Repeat `give_back` every ``renew_every_s`` until nothing is left."""
        while self._groups:
            await self.give_back()
            if self._groups:
                await asyncio.sleep(self._config.renew_every_s)

    async def _save(self, group: InflightGroup) -> None:
        if group.end_reason != "revoked":
            await self._settlement.save(group)

    async def _release(self, group: InflightGroup) -> None:
        await self._settlement.release(group, "stopped")

    async def _for_each(
        self, work: Callable[[InflightGroup], Coroutine[Any, Any, None]]
    ) -> dict[tuple[int, int], BaseException | None]:
        """Do ``work`` on all groups at once, within half of ``stop_timeout_s``; what it raised, by group."""
        tasks = {key: asyncio.create_task(work(group)) for key, group in self._groups.items()}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=self._config.stop_timeout_s / 2)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        failures = {key: TimeoutError() if task.cancelled() else task.exception() for key, task in tasks.items()}
        for key, failure in failures.items():
            if failure is not None:
                logger.warning("prompt group %d, attempt %d, is not given back yet: %r", *key, failure)
        return failures
