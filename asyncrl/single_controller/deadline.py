"""A deadline over the calls inside a block, whichever groups they go to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_deadline_s: ContextVar[float | None] = ContextVar("call_deadline_s", default=None)


@contextmanager
def call_deadline(timeout_s: float) -> Iterator[None]:
    """Give each blocking call inside the block ``timeout_s`` seconds, instead of its group's own time-out.

    A call that is late raises `DeadlineError`; the workers go on with it.
    """
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
    token = _deadline_s.set(timeout_s)
    try:
        yield
    finally:
        _deadline_s.reset(token)


def deadline_in_force(default_s: float | None) -> float | None:
    """Seconds that a call made now may take; None for as long as it likes."""
    return _deadline_s.get() or default_s
