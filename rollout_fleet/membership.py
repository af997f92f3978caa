"""How an engine is asked to join a run that goes, or to leave it: the commands, the run, and the desk between them.

::

    asyncrl join, asyncrl leave ──ask──▶ FleetDesk (a named Ray actor of the run) ──next_request──▶ the controller
                                ◀─words─                                          ◀──answer──

Whoever may connect to the run's Ray cluster may ask: Ray's own authentication is the desk's (``RAY_AUTH_MODE=token``).
`ask` waits for the desk, which waits for the controller; `FleetDesk.next_request` is woken by `FleetDesk.ask`.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

NAMESPACE = "asyncrl"
"""Ray namespace of the desks; each is named by its run's folder."""
ADDRESS_FILE = "fleet.json"
"""In the run's folder: how to reach the run's Ray cluster from its node."""
AUTH_MODE, AUTH_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""Ray's variables: how a cluster authenticates, and its token. A process that connects needs those of the cluster."""


class Action(Enum):
    """What is asked for."""

    join = "join"
    leave = "leave"
    describe = "describe"


@dataclass(frozen=True, kw_only=True)
class FleetRequest:
    """A request to a run's fleet.

    Attributes:
        action: What to do.
        num_engines: Of ``join``: how many.
        node: Of ``join``: address of the node to be on; empty for any.
        member: Of ``leave``: rank of the rollout worker.
    """

    action: Action
    num_engines: int = 1
    node: str = ""
    member: int = -1


@dataclass(frozen=True, kw_only=True)
class FleetAnswer:
    """What became of a request: words for people, and whether it was refused."""

    words: str
    is_refused: bool = False


class FleetDesk:
    """Passes requests on to the controller, and its answers back; an asynchronous Ray actor."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[tuple[int, FleetRequest]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[FleetAnswer]] = {}
        self._num_asked = 0

    async def ask(self, request: FleetRequest) -> FleetAnswer:
        """Ask the run, and wait for its answer."""
        number, self._num_asked = self._num_asked, self._num_asked + 1
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((number, request))
        try:
            return await self._answers[number]
        finally:
            del self._answers[number]

    async def next_request(self) -> tuple[int, FleetRequest]:
        """Wait for the next request; it is answered by its number."""
        return await self._requests.get()

    async def answer(self, number: int, answer: FleetAnswer) -> None:
        """Answer a request; nothing, where nobody waits for it any more."""
        if number in self._answers:
            self._answers[number].set_result(answer)


def write_address(run_dir: Path, *, address: str, node_address: str) -> None:
    """Write down how commands of this user on this node reach the run's Ray cluster."""
    found = {
        "address": address,
        "node_address": node_address,
        "auth_mode": os.environ.get(AUTH_MODE, ""),
        "auth_token": os.environ.get(AUTH_TOKEN, ""),
    }
    path = run_dir / ADDRESS_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # it holds a token
        file.write(json.dumps(found) + "\n")
