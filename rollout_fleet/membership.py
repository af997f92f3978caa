"""Requests to a running fleet: engines join or leave. The commands ask a desk, and the run answers through it.

::

    asyncrl join, asyncrl leave ──ask──▶ FleetDesk (a named Ray actor of the run) ──next_request──▶ the controller
                                ◀─words─                                          ◀──answer──

Every process that may connect to the run's Ray cluster may ask: the desk relies on Ray's authentication
(``RAY_AUTH_MODE=token``). `FleetDesk.ask` waits for the controller's answer and wakes `FleetDesk.next_request`.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

NAMESPACE = "asyncrl"
"""Ray namespace of the desks; the name of a desk is its run's folder."""
ADDRESS_FILE = "fleet.json"
"""File in the run's folder with the address of the run's Ray cluster, as seen from its node."""
AUTH_MODE, AUTH_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""Ray's variables for the authentication of a cluster. A process that connects needs the cluster's values."""


class Action(Enum):
    """The kinds of requests."""

    join = "join"
    leave = "leave"
    describe = "describe"


@dataclass(frozen=True, kw_only=True)
class FleetRequest:
    """A request to a run's fleet.

    Attributes:
        action: What to do.
        num_engines: For ``join``: how many engines.
        node: For ``join``: address of their node; empty for any.
        member: For ``leave``: rank of the rollout worker.
    """

    action: Action
    num_engines: int = 1
    node: str = ""
    member: int = -1


@dataclass(frozen=True, kw_only=True)
class FleetAnswer:
    """The result of a request: words for people, and whether it was refused."""

    words: str
    is_refused: bool = False


class FleetDesk:
    """Passes requests to the controller and its answers back; an asynchronous Ray actor."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[tuple[int, FleetRequest]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[FleetAnswer]] = {}
        self._num_asked = 0

    async def ask(self, request: FleetRequest) -> FleetAnswer:
        """Ask the run and wait for its answer."""
        number, self._num_asked = self._num_asked, self._num_asked + 1
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((number, request))
        try:
            return await self._answers[number]
        finally:
            del self._answers[number]

    async def next_request(self) -> tuple[int, FleetRequest]:
        """Wait for the next request; returns its number, for `answer`, and the request."""
        return await self._requests.get()

    async def answer(self, number: int, answer: FleetAnswer) -> None:
        """Answer a request. Without effect if its caller has gone."""
        if number in self._answers:
            self._answers[number].set_result(answer)


def write_address(run_dir: Path, *, address: str, node_address: str) -> None:
    """Write the file from which this user's commands on this node learn how to reach the run's Ray cluster."""
    found = {
        "address": address,
        "node_address": node_address,
        "auth_mode": os.environ.get(AUTH_MODE, ""),
        "auth_token": os.environ.get(AUTH_TOKEN, ""),
    }
    path = run_dir / ADDRESS_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # the file holds a token
        file.write(json.dumps(found) + "\n")
