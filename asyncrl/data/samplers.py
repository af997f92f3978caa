"""Samplers choose which row of the training files becomes the next prompt. ``data.sampler`` names the sampler.

A sampler must not use a clock, and the seed must determine all random numbers. Checkpoints hold the sampler's state.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from asyncrl.core.registry import Registry
from asyncrl.core.types import GroupSummary

UNIFORM = "uniform"
"""Value of ``data.sampler`` without a sampler: the prompt stream takes each row once per epoch."""


class Sampler(Protocol):
    """Chooses the rows of the training files that become prompts.

    The prompt stream calls the class with ``sources``, [N] names of the rows' data sources, and these keywords:

    - ``seed``: the run's seed;
    - ``shuffle``: ``data.shuffle``;
    - ``weights``: ``data.source_weights``, with a weight for each source;
    - each option in ``data.sampler_options``.
    """

    def choose(self) -> int:
        """Return the index of the row that becomes the next prompt, in 0 … N - 1."""
        ...

    def note(self, row: int, group: GroupSummary) -> None:
        """Receive the result of a prompt: ``group`` has the rewards of all samples of the prompt.

        ``row`` is the index of the prompt's row. The prompt stream also calls this method for groups that a filter
        dropped. If the buffer server restarts, a result can be lost. If workers generate a group a second time, its
        result arrives a second time.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the values that the sampler needs to continue after a restart, as JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the values that the method `state` returned in this process or in an earlier process."""
        ...


SAMPLERS: Registry[Any] = Registry("data.sampler")
"""The sampler classes by name. The registry does not include `UNIFORM`, which needs no class."""


@SAMPLERS.register("weighted")
class WeightedSampler:
    """Takes rows from the data sources in proportion to the weights of the sources.

    An epoch is one pass over the rows of one source. If ``shuffle``, each epoch has a new order.
    """

    def __init__(self, sources: Sequence[str], *, seed: int, shuffle: bool, weights: Mapping[str, float]) -> None:
        self._rows: dict[str, list[int]] = {name: [] for name in weights}
        for row, name in enumerate(sources):
            self._rows[name].append(row)
        self._weights = weights
        self._seed, self._shuffle = seed, shuffle
        self._num_chosen = dict.fromkeys(weights, 0)
        self._num_in_order = dict.fromkeys(weights, 0)
        self._order = lru_cache(maxsize=2 * len(weights))(self._draw_order)

    def choose(self) -> int:
        """Return the index of the row that becomes the next prompt. `_next_source` chooses the source of this row."""
        return self._next_in_order(self._next_source())

    def note(self, row: int, group: GroupSummary) -> None:
        """Do nothing: this sampler does not use rewards."""

    def _next_source(self) -> str:
        """Choose the data source of the next prompt, so that the numbers of prompts are in proportion to the weights.

        Choose the source with the smallest (number of its prompts so far + 1) / weight. In a tie, choose the first such
        source.
        """
        source = min(self._weights, key=lambda name: (self._num_chosen[name] + 1) / self._weights[name])
        self._num_chosen[source] += 1
        return source

    def _next_in_order(self, source: str) -> int:
        rows = self._rows[source]
        epoch, place = divmod(self._num_in_order[source], len(rows))
        self._num_in_order[source] += 1
        return rows[self._order(source, epoch)[place]]

    def _draw_order(self, source: str, epoch: int) -> Sequence[int]:
        number = len(self._rows[source])
        if not self._shuffle:
            return range(number)
        return np.random.default_rng([self._seed, epoch, *source.encode()]).permutation(number).tolist()

    def state(self) -> dict[str, Any]:
        """Return how many rows the sampler has taken from each data source, as JSON values."""
        return {"num_chosen": self._num_chosen, "num_in_order": self._num_in_order}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the counts that the method `state` returned."""
        self._num_chosen, self._num_in_order = dict(state["num_chosen"]), dict(state["num_in_order"])


@SAMPLERS.register("difficulty")
class DifficultySampler(WeightedSampler):
    """Prefers prompts that the policy solves at a rate near ``target``. A lower target prefers harder prompts.

    A data source has a *pool* of rows with an estimated success rate within ``width`` of ``target``. When a group is
    finished, the sampler updates the estimate of its row, and the row enters or leaves the pool. A chosen row leaves
    the pool until its group is finished. A fraction ``explore`` of the prompts comes from all rows of the source in
    order. While the pool is empty, all prompts come from all rows in order.

    Args:
        target: Preferred success rate, in [0, 1]. The policy learns most from rows near 0.5.
        width: Largest difference between ``target`` and a success rate in the pool; > 0.
        explore: Fraction of the prompts that come from all rows in order, in (0, 1].
        success: Smallest reward with which a trajectory counts as a success.
        memory: Weight of the old estimate of a success rate when a new result changes this estimate, in [0, 1).
    """

    def __init__(
        self,
        sources: Sequence[str],
        *,
        target: float = 0.5,
        width: float = 0.3,
        explore: float = 0.25,
        success: float = 1.0,
        memory: float = 0.5,
        **given: Any,
    ) -> None:
        super().__init__(sources, **given)
        for name, value, is_valid, expected in (
            ("target", target, 0 <= target <= 1, "in [0, 1]"),
            ("width", width, width > 0, "> 0"),
            ("explore", explore, 0 < explore <= 1, "in (0, 1]: rows enter the pool only after their first result"),
            ("memory", memory, 0 <= memory < 1, "in [0, 1)"),
        ):
            if not is_valid:
                raise ValueError(f"data.sampler_options.{name} must be {expected}, got {value}")
        self._sources = sources
        self._target, self._width, self._explore = target, width, explore
        self._success, self._memory = success, memory
        self._rates: dict[int, float] = {}
        self._pools: dict[str, OrderedDict[int, None]] = {name: OrderedDict() for name in self._rows}

    def choose(self) -> int:
        """Choose a data source, and return the index of the row of this source that becomes the next prompt.

        Each data source has a pool of rows with a success rate near ``target``. Usually, the sampler takes the row
        that has been in the pool for the longest time. If the pool is empty, the sampler takes the next row of the data
        source in order. For a fraction ``explore`` of the prompts, it also takes the next row in order.
        """
        source = self._next_source()
        number, pool = self._num_chosen[source], self._pools[source]
        explores = math.floor(number * self._explore) > math.floor((number - 1) * self._explore)
        if pool and not explores:
            return pool.popitem(last=False)[0]
        row = self._next_in_order(source)
        pool.pop(row, None)
        return row

    def note(self, row: int, group: GroupSummary) -> None:
        """Update the estimated success rate of a row from the rewards of a finished group.

        The method ignores a group that has no rewards, and a group with a reward that is not finite.
        """
        if not group.rewards or not group.is_scored:
            return
        rate = sum(reward >= self._success for reward in group.rewards) / len(group.rewards)
        rate += self._memory * (self._rates.get(row, rate) - rate)
        self._rates[row], pool = rate, self._pools[self._sources[row]]
        if abs(rate - self._target) <= self._width:
            pool.setdefault(row)
        else:
            pool.pop(row, None)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values: rows taken per data source, success rates of the rows, and the pools.

        The pool of a source is a list of its rows with a success rate near ``target``.
        """
        pools = {name: list(pool) for name, pool in self._pools.items()}
        return super().state() | {"rates": [list(item) for item in self._rates.items()], "pools": pools}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the values that the method `state` returned."""
        super().restore(state)
        self._rates = {int(row): rate for row, rate in state["rates"]}
        self._pools = {name: OrderedDict.fromkeys(rows) for name, rows in state["pools"].items()}


def make_sampler(
    name: str,
    sources: Sequence[str],
    *,
    seed: int,
    shuffle: bool,
    weights: Mapping[str, float],
    options: Mapping[str, Any],
) -> Sampler:
    """Create the sampler that ``data.sampler`` names.

    Args:
        name: Registered name, ``file.py:Class`` or ``module:Class``.
        sources: [N] names: the data source of each training row.
        seed: The run's seed.
        shuffle: Whether rows are taken in random order.
        weights: Weight of each data source. An empty mapping means equal weights.
        options: Further arguments of the class.

    Raises:
        ValueError: a source has no weight, a source with a weight has no rows, or the class does not take the
            ``options``.
    """
    found = dict.fromkeys(sources)
    given = weights or dict.fromkeys(found, 1.0)
    if found.keys() != given.keys():
        raise ValueError(
            f"data.source_weights must have a weight for each data source {sorted(found)} of the training rows, got "
            f"{dict(given)}; name exactly these sources"
        )
    try:
        sampler = SAMPLERS.get(name)(
            sources, seed=seed, shuffle=shuffle, weights={source: given[source] for source in found}, **options
        )
    except TypeError as error:
        raise ValueError(f"data.sampler={name} cannot be made with data.sampler_options={options}: {error}") from error
    needed = ("choose", "note", "state", "restore")
    if missing := [method for method in needed if not callable(getattr(sampler, method, None))]:
        raise ValueError(
            f"data.sampler={name} must have the methods {', '.join(needed)}, got a class without {missing}; add them"
        )
    return sampler
