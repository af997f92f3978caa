"""Errors of Ray told in the words of the group: which worker, which rank, which node, and what it said last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from asyncrl.protocol.errors import WorkerDiedError
from asyncrl.protocol.remote import on_remote_error

from .worker_log import last_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """What an error says of a worker.

    Attributes:
        group: Name of its group.
        rank: Its rank in the group.
        node: Address of the node that it was placed on.
        log_file: Path of its log on that node; None where the group keeps no logs.
    """

    group: str
    rank: int
    node: str
    log_file: str | None = None


_identities: dict[str, WorkerIdentity] = {}


def introduce(worker: Any, identity: WorkerIdentity) -> None:
    """Remember who the worker is, for errors to come."""
    _identities[worker._actor_id.hex()] = identity
    on_remote_error(_told)


def forget(worker: Any) -> None:
    """The worker was shut down on purpose."""
    _identities.pop(worker._actor_id.hex(), None)


def identity_of(worker: Any) -> WorkerIdentity | None:
    """Who the worker is, if this process has made it or attached to it."""
    return _identities.get(worker._actor_id.hex())


def _told(error: BaseException) -> BaseException:
    """`WorkerDiedError` where a worker's death is the cause, in the call itself or in one that it waited for."""
    actor_error: Any = error
    while isinstance(actor_error, ray.exceptions.RayTaskError) and isinstance(actor_error.cause, BaseException):
        actor_error = actor_error.cause
    if not isinstance(actor_error, ray.exceptions.RayActorError):
        return error
    identity = _identities.get(str(actor_error.actor_id))
    if identity is None:
        return WorkerDiedError(f"a worker that this process did not start died: {actor_error}")
    return death_of(identity, str(actor_error))


def death_of(identity: WorkerIdentity, reason: str) -> WorkerDiedError:
    """The error that tells of a worker's death."""
    message = (
        f"worker of group {identity.group!r}, rank {identity.rank}, on node {identity.node} died. {reason.strip()}"
    )
    if identity.log_file is not None:
        message += f"\nLast lines of {identity.log_file}:\n{last_lines(identity.log_file)}"
    return WorkerDiedError(message)
