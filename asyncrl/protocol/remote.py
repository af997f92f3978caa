"""Waiting for remote results: deadlines, and errors that name the worker they came from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from .errors import DeadlineError

_translators: list[Callable[[BaseException], BaseException]] = []


def on_remote_error(translate: Callable[[BaseException], BaseException]) -> None:
    """Install a function that turns an error of the transport into one that names the worker."""
    if translate not in _translators:
        _translators.append(translate)


def translated(error: BaseException) -> BaseException:
    """The error as the installed translators tell it."""
    for translate in _translators:
        error = translate(error)
    return error


def fetch(refs: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    """Wait for all references; the first failure ends the wait.

    Raises:
        DeadlineError: they were not all there within ``timeout_s`` seconds.
    """
    import ray

    try:
        return ray.get(list(refs), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise _late(refs, timeout_s) from error
    except Exception as error:
        told = translated(error)
        if told is error:
            raise
        raise told from error


async def fetch_async(refs: Sequence[Any]) -> list[Any]:
    """As `fetch`, for a coroutine; cancel it, or wrap it in ``asyncio.timeout``, to set a deadline."""
    try:
        return list(await asyncio.gather(*refs))
    except Exception as error:
        told = translated(error)
        if told is error:
            raise
        raise told from error


def _late(refs: Sequence[Any], timeout_s: float | None) -> DeadlineError:
    import ray

    late = set(ray.wait(list(refs), num_returns=len(refs), timeout=0)[1])
    missing = [index for index, ref in enumerate(refs) if ref in late]
    return DeadlineError(f"{len(missing)} of {len(refs)} results (positions {missing}) were not there in {timeout_s} s")
