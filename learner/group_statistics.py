"""Means and deviations over groups of numbers, in float64. Equal numbers differ from their mean by exactly 0.

In shapes, N is the length of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_DEVIATION = 1e-4
"""Differences from a mean are divided by the standard deviation, or by this number if the deviation is smaller, because
smaller deviations are noise. The GRPO paper (arXiv 2402.03300, section 4.1.2) does not have such a bound. Without a
bound, noise of 1e-7 in equal rewards gives advantages of size 1. TRL adds 1e-4 to the deviation. verl adds 1e-6 to the
deviation, and 1e-8 to the variance of whitened tokens."""

_RELATIVE_DEVIATION = 2.0**-23
"""The resolution of float32 rewards. If the deviation of a group is smaller than this number times the group's largest
absolute value, this product takes its place."""


def members(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Convert group ids to group indices, and count the members of each group.

    ``group_ids`` is [N], or [N, columns] if each id has several columns. Entries with equal ids form a group. Returns a
    pair. The first tensor is [N] int64: the index of each entry's group, from 0. The second tensor is
    [number of groups] int64: the number of entries of each group.
    """
    _, group, counts = torch.unique(
        group_ids, dim=0 if group_ids.dim() > 1 else None, return_inverse=True, return_counts=True
    )
    return group, counts


def group_sums(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return [number of groups] float64: the sum of the values of each group.

    ``values`` are [N] float64. ``group`` is the group index of each value, [N] int64.
    """
    return torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, values)


def largest(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return [number of groups] values: the largest value of each group.

    ``values`` are [N]. ``group`` is the group index of each value, [N] int64.
    """
    return values.new_zeros(num_groups).scatter_reduce_(0, group, values, "amax", include_self=False)


def centered(values: Tensor, group: Tensor, counts: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Return [N] float64: each value minus the mean of its group; exactly 0 if all values of the group are equal.

    ``group`` is the group index of each value. ``weights`` are the weights of the values in the mean, [N] float64, 1 by
    default. ``counts`` is the sum of the weights of each group.
    """
    values = values.to(torch.float64)
    sums = group_sums(values if weights is None else values * weights, group, len(counts))
    highest, lowest = (largest(sign * values, group, len(counts)) for sign in (1, -1))
    return (values - (sums / counts)[group]).masked_fill((highest == -lowest)[group], 0.0)


def smallest_deviation(largest_value: Tensor) -> Tensor:
    """Return the smallest allowed standard deviation of a group. This value replaces smaller deviations.

    ``largest_value`` is the group's largest absolute value.
    """
    return (largest_value * _RELATIVE_DEVIATION).clamp(min=MIN_DEVIATION)


def group_deviations(
    values: Tensor, differences: Tensor, group: Tensor, counts: Tensor, *, weights: Tensor | None = None
) -> Tensor:
    """Return [number of groups] float64: the sample deviation (n - 1) of each group, at least `smallest_deviation`.

    ``counts`` is n for each group: the number of its values, or the sum of their weights. ``differences`` is the result
    of `centered` for the same values and ``weights``.
    """
    squares = differences.square() if weights is None else differences.square() * weights
    variance = group_sums(squares, group, len(counts)) / (counts - 1).clamp(min=1)
    smallest = smallest_deviation(largest(values.double().abs(), group, len(counts)))
    return torch.maximum(variance.sqrt(), smallest)
