"""Notices an engine that has stopped producing tokens.

A slow sample is not a failure: queueing, other requests and weight updates all count as its time. What counts is
silence, which is *no* token of *any* running request for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from asyncrl.protocol.errors import AsyncRLError, DeadlineError

logger = logging.getLogger(__name__)

PROBE_SHARE = 0.25
MAX_SILENT_PERIODS = 3


class SilenceWatch:
    """Watches over the tokens of one engine.

    After three quarters of the deadline the engine is probed. One that does not answer by the deadline has failed. One
    that answers is alive and gets the deadline anew, three times in a row at most.
    """

    def __init__(self, name: str, *, timeout_s: float, probe: Callable[[], Awaitable[None]]) -> None:
        """Begin with nothing running.

        Args:
            name: The engine, for messages.
            timeout_s: The deadline, ``rollout_fleet.silence_timeout_s``.
            probe: Returns when the engine shows that it is alive; may raise or hang.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._probe = probe
        self._num_running = 0
        self._is_paused = False
        self._heard_s = time.monotonic()
        self._listening = asyncio.Event()

    def token(self) -> None:
        """A token arrived. May be called from any thread."""
        self._heard_s = time.monotonic()

    @contextmanager
    def running(self, num_requests: int) -> Iterator[None]:
        """Requests run inside the block."""
        self._change(num_requests, is_paused=self._is_paused)
        try:
            yield
        finally:
            self._change(-num_requests, is_paused=self._is_paused)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Generation stands still on purpose inside the block, under another deadline."""
        self._change(0, is_paused=True)
        try:
            yield
        finally:
            self._change(0, is_paused=False)

    async def wait(self) -> NoReturn:
        """Wait for silence.

        Raises:
            DeadlineError: there was no token within the deadline, and no answer to the probe.
        """
        num_silent_periods = 0
        while True:
            await self._listening.wait()
            heard_s = self._heard_s
            left_s = heard_s + (1 - PROBE_SHARE) * self._timeout_s - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
                num_silent_periods = num_silent_periods if heard_s == self._heard_s else 0
                continue
            error = await self._probe_error()
            if heard_s != self._heard_s or not self._listening.is_set():
                num_silent_periods = 0
                continue
            num_silent_periods += 1
            if error is not None or num_silent_periods == MAX_SILENT_PERIODS:
                raise self._failure(error, num_silent_periods)
            logger.warning("%s: no token for %g s, but it answers a probe", self._name, self._timeout_s)
            self.token()

    async def _probe_error(self) -> str | None:
        """Probe the engine; returns what is wrong with it."""
        try:
            async with asyncio.timeout(PROBE_SHARE * self._timeout_s):
                await self._probe()
        except TimeoutError:
            return f"it did not answer a probe within {PROBE_SHARE * self._timeout_s:g} s"
        except AsyncRLError as error:
            return f"the probe failed: {error}"
        return None

    def _failure(self, error: str | None, num_periods: int) -> DeadlineError:
        error = error or f"it answered {num_periods} probes, but produced no token"
        return DeadlineError(
            f"{self._name} produced no token of its {self._num_running} running requests within "
            f"rollout_fleet.silence_timeout_s = {self._timeout_s:g} s, and {error}"
        )

    def _change(self, num_requests: int, *, is_paused: bool) -> None:
        was_listening = self._listening.is_set()
        self._num_running += num_requests
        self._is_paused = is_paused
        if self._num_running and not is_paused:
            if not was_listening:
                self.token()
            self._listening.set()
        else:
            self._listening.clear()
