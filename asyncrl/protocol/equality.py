"""When two entries of a batch count as the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_Pairs = frozenset[tuple[int, int]]


def deep_equal(a: Any, b: Any) -> bool:
    """Equality of type and value that looks into arrays, tensors and containers; NaN equals NaN.

    Containers that hold themselves are equal where they do so in the same way.
    """
    return _equal(a, b, frozenset())


def facts_equal(a: Any, b: Any) -> bool:
    """As `deep_equal`, or equal by their own ``==``, as 1 and 1.0 are, or a dict and an OrderedDict."""
    if deep_equal(a, b):
        return True
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):  # a comparison that has no single answer, as of arrays
        return False


def _equal(a: Any, b: Any, open_pairs: _Pairs) -> bool:
    """``open_pairs`` are the containers, by identity, that this comparison is inside of."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return tensors_equal(a, b)
    if isinstance(a, float | np.floating):
        return bool(a == b or (a != a and b != b))
    if not isinstance(a, np.ndarray | Mapping | list | tuple):
        return bool(a == b)
    if (id(a), id(b)) in open_pairs:
        return True
    return _containers_equal(a, b, open_pairs | {(id(a), id(b))})


def _containers_equal(a: Any, b: Any, open_pairs: _Pairs) -> bool:
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key], open_pairs) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_equal(x, y, open_pairs) for x, y in zip(a, b, strict=True))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.hasobject and not a.dtype.names:
        return all(_equal(x, y, open_pairs) for x, y in zip(a.flat, b.flat, strict=True))
    if a.dtype.names:
        return all(_equal(a[name], b[name], open_pairs) for name in a.dtype.names)
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))


def tensors_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and values; NaN equals NaN. Nested tensors are compared by their rows."""
    if a.is_nested or b.is_nested:
        if not (a.is_nested and b.is_nested) or a.size(0) != b.size(0):
            return False
        return all(map(tensors_equal, a.unbind(), b.unbind()))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() or a.is_complex():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)
