"""Means and deviations over groups of numbers, in float64. Equal numbers give exact zeros.

In shapes, N is the length of the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_DEVIATION = 1e-4
"""Lower bound of a standard deviation that is a divisor. Smaller deviations are noise. The GRPO paper (arXiv
2402.03300, section 4.1.2) does not have a bound. Without a bound, noise of 1e-7 in equal rewards gives advantages of
size 1. TRL adds 1e-4 to the deviation. verl adds 1e-6, and 1e-8 to the variance of whitened tokens."""

_RELATIVE_DEVIATION = 2.0**-23
"""Lower bound of the deviation relative to the largest value: the resolution of float32 rewards."""


def members(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return each number's group index, [N] int64, and the sizes of the groups. Ids are [N] or [N, columns]."""
    _, group, counts = torch.unique(
        group_ids, dim=0 if group_ids.dim() > 1 else None, return_inverse=True, return_counts=True
    )
    return group, counts


def group_sums(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return the sum of the [N] float64 values of each group, [number of groups]."""
    return torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, values)


def largest(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return the largest of the [N] values of each group, [number of groups]."""
    return values.new_zeros(num_groups).scatter_reduce_(0, group, values, "amax", include_self=False)


def centered(values: Tensor, group: Tensor, counts: Tensor, *, weights: Tensor | None = None) -> Tensor:
    """Return the values minus the mean of their group, [N] float64; exactly 0 if all values of the group are equal.

    ``weights`` are [N] float64, 1 by default. ``counts`` has the sum of the weights of each group.
    """
    values = values.to(torch.float64)
    sums = group_sums(values if weights is None else values * weights, group, len(counts))
    highest, lowest = (largest(sign * values, group, len(counts)) for sign in (1, -1))
    return (values - (sums / counts)[group]).masked_fill((highest == -lowest)[group], 0.0)


def smallest_deviation(largest_value: Tensor) -> Tensor:
    """Return the lower bound of a group's deviation; ``largest_value`` is the group's largest absolute value."""
    return (largest_value * _RELATIVE_DEVIATION).clamp(min=MIN_DEVIATION)


def group_deviations(
    values: Tensor, differences: Tensor, group: Tensor, counts: Tensor, *, weights: Tensor | None = None
) -> Tensor:
    """Return the sample deviation (n - 1) of each group, at least `smallest_deviation`.

    ``counts`` are n of each group. ``differences`` are the result of `centered` with the same ``weights``.
    """
    squares = differences.square() if weights is None else differences.square() * weights
    variance = group_sums(squares, group, len(counts)) / (counts - 1).clamp(min=1)
    smallest = smallest_deviation(largest(values.double().abs(), group, len(counts)))
    return torch.maximum(variance.sqrt(), smallest)
