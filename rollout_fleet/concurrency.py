"""How many prompt groups one engine holds at a time, between bounds, by the load that the engine itself reports.

Additive increase, multiplicative decrease (Chiu and Jain, 1989), with the start of TCP: from the lower bound the limit
doubles with every reading until the engine is first at its own limit; from then on it grows by one group at a time. It
shrinks where samples wait inside the engine, or its KV cache is nearly full: what waits there could be sampled
elsewhere, or later and by newer weights, and a full cache makes the engine throw samples out and compute them again.

Pure: the rollout loop reads the load and obeys the limit.
"""

from __future__ import annotations

from .engines.engine import EngineLoad

FULL_CACHE = 0.9
"""Use of the KV cache from which the limit shrinks; it grows below `ROOMY_CACHE`, and stays in between."""
ROOMY_CACHE = 0.75
DECREASE = 0.75
READINGS_TO_SHRINK = 2
"""So many readings in a row must say so: samples that have just come always wait for a moment."""


class GroupLimit:
    """The limit on one engine, from ``lowest`` to ``highest``; equal bounds are a fixed limit.

    Attributes:
        value: Groups that the engine may hold now.
    """

    def __init__(self, lowest: int, highest: int) -> None:
        self._lowest = lowest
        self._highest = highest
        self._has_been_full = False
        self._num_full = 0
        self.value = lowest

    @property
    def is_fixed(self) -> bool:
        """Whether it never changes, whatever the load."""
        return self._lowest == self._highest

    def note(self, load: EngineLoad, *, num_held: int) -> bool:
        """The engine reports its load while it holds ``num_held`` groups; returns whether the limit has changed.

        It grows only where all of it is used: what is not tried says nothing.
        """
        before = self.value
        is_full = load.num_waiting > 0 or load.cache_use >= FULL_CACHE
        self._num_full = self._num_full + 1 if is_full else 0
        if self._num_full >= READINGS_TO_SHRINK:
            self._num_full = 0
            self._has_been_full = True
            self.value = max(self._lowest, int(self.value * DECREASE))
        elif not is_full and load.cache_use < ROOMY_CACHE and num_held >= self.value:
            self.value = min(self._highest, self.value + 1 if self._has_been_full else 2 * self.value)
        return self.value != before
