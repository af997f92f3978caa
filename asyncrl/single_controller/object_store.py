"""Values put into Ray's object store by several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from asyncrl.protocol.errors import UsageError

_MAX_THREADS = 16


def parallel_put(data_list: list[Any], max_workers: int | None = None) -> list[ray.ObjectRef]:
    """Put every value into the object store.

    Args:
        data_list: The values; at least one.
        max_workers: Threads to use; by default one per value, at most 16.

    Returns:
        References in the order of the values.

    Raises:
        UsageError: ``data_list`` is empty.
    """
    if not data_list:
        raise UsageError("parallel_put needs at least one value, got an empty list")
    if len(data_list) == 1:
        return [ray.put(data_list[0])]
    with ThreadPoolExecutor(max_workers or min(len(data_list), _MAX_THREADS)) as threads:
        return list(threads.map(ray.put, data_list))
