"""Waiting for remote results: deadlines, and errors that name the worker they came from.

Ray is imported where there is something to wait for, so that the protocol itself does not load it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import DeadlineError, WorkerDiedError


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """What an error says of a worker.

    Attributes:
        group: Name of its group.
        rank: Its rank in the group.
        node: Address of the node that it was placed on.
        last_words: Reads the path and the end of its log; None where the group keeps no logs.
    """

    group: str
    rank: int
    node: str
    last_words: Callable[[], str] | None = None


_identities: dict[str, WorkerIdentity] = {}


def introduce(actor_id: str, identity: WorkerIdentity) -> None:
    """Remember who an actor is, for errors to come; who is known already stays."""
    _identities.setdefault(actor_id, identity)


def forget(actor_id: str) -> None:
    """The actor was shut down on purpose."""
    _identities.pop(actor_id, None)


def identity_of(actor_id: str) -> WorkerIdentity | None:
    """Who the actor is, if this process started it or attached to it."""
    return _identities.get(actor_id)


def fetch(refs: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    """Wait for all references; the first failure ends the wait.

    Raises:
        DeadlineError: they were not all there within ``timeout_s`` seconds; the message names who was late.
        WorkerDiedError: a worker died that was to compute one, or something that one waits for.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return ray.get(list(refs), timeout=timeout_s)
    except GetTimeoutError as error:
        raise _late(refs, timeout_s) from error
    except RayError as error:
        raise translated(error) from None


async def fetch_async(refs: Sequence[Any]) -> list[Any]:
    """As `fetch`, in a coroutine; wrap it in ``asyncio.timeout`` to set a deadline."""
    from ray.exceptions import RayError

    try:
        return list(await asyncio.gather(*refs))
    except RayError as error:
        raise (await asyncio.to_thread(translated, error)) from None


def translated(error: Exception) -> Exception:
    """`WorkerDiedError` where a known worker's death is the cause, directly or through a call that waited for it."""
    from ray.exceptions import RayActorError, RayTaskError

    cause: Any = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if not isinstance(cause, RayActorError):
        return error
    identity = _identities.get(str(cause.actor_id))
    return error if identity is None else death_of(identity, str(cause))


def death_of(identity: WorkerIdentity, reason: str) -> WorkerDiedError:
    """The error that tells of a worker's death."""
    message = (
        f"worker of group {identity.group!r}, rank {identity.rank}, on node {identity.node} died. {reason.strip()}"
    )
    if identity.last_words is not None:
        message += f"\nLast lines of {identity.last_words()}"
    return WorkerDiedError(message)


def _late(refs: Sequence[Any], timeout_s: float | None) -> DeadlineError:
    """Name the workers whose results are not there."""
    import ray

    late = set(ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[1])
    names = [_computed_by(ref, index) for index, ref in enumerate(refs) if ref in late]
    return DeadlineError(f"{len(names)} of {len(refs)} results were not there after {timeout_s} s: {', '.join(names)}")


def _computed_by(ref: Any, index: int) -> str:
    identity = _identities.get(ref.task_id().actor_id().hex())
    return f"result {index}" if identity is None else f"group {identity.group!r} rank {identity.rank}"
