"""Tracks which rollout workers have engines, and passes users' requests to add or remove engines to the controller.

::

    asyncrl join, asyncrl leave ──ask──▶ FleetDesk (a named Ray actor of the run) ──next_request──▶ the controller
                                ◀─answer                                          ◀──answer──

Every process that can connect to the run's Ray cluster can send requests. Only Ray's authentication
(``RAY_AUTH_MODE=token``) restricts which processes can connect.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path

from asyncrl.core.errors import MembershipRefused

NAMESPACE = "asyncrl"
"""Ray namespace of all `FleetDesk` actors. The name of an actor is its run's folder."""
ADDRESS_FILE = "fleet.json"
"""Name of the file in the run's folder that has the address of the run's Ray cluster."""
AUTH_MODE, AUTH_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
"""Ray's environment variables for authentication. A process that connects needs the cluster's values."""


class Presence(StrEnum):
    """The state of a rollout worker's engine. In the diagram, ``absent`` means that the worker has no engine.

    ::

        absent ──join──▶ coming ──arrived──▶ present ──leave──▶ leaving ──gone──▶ absent
                            └──────────────────leave───────────────▲
        any but absent ──gone──▶ absent                                the engine failed for good, or has left
    """

    coming = "coming"
    present = "present"
    leaving = "leaving"


class Roster:
    """Tracks the engine of each rank of a run's rollout workers, and decides which engines may join and leave.

    The run starts with ``fewest`` engines, and may have up to ``most``. At least ``needed`` engines must stay. If
    ``most`` is None, the fleet has a fixed size. The run keeps Ray resources for the ranks below ``fewest``, so a new
    engine can reuse these ranks. A rank from ``fewest`` on is never used again, so its logs and counters belong to one
    engine.
    """

    def __init__(self, *, fewest: int, most: int | None, needed: int) -> None:
        self._fewest = fewest
        self._most = most
        self._needed = needed
        self._next = fewest
        self._presence = dict.fromkeys(range(fewest), Presence.present)

    @property
    def ranks(self) -> list[int]:
        """Ranks of the rollout workers whose engine is coming, present or leaving, in ascending order."""
        return sorted(self._presence)

    @property
    def num_free(self) -> int:
        """Number of engines that may join now; 0 if the fleet has a fixed size."""
        return 0 if self._most is None else max(0, self._most - len(self._presence))

    def presence_of(self, rank: int) -> Presence | None:
        """Return the state of the engine of a rank (coming, present or leaving); None if the rank has no engine."""
        return self._presence.get(rank)

    def join(self, num_engines: int, *, in_kept_places: bool = True) -> list[int]:
        """Choose the ranks of ``num_engines`` engines that join, mark these ranks as coming, and return them.

        Ranks below ``fewest`` without an engine are chosen first, because the run keeps Ray resources for these ranks.
        All other ranks are new. If ``in_kept_places`` is false, all ranks are new.

        Raises:
            MembershipRefused: the fleet has a fixed size, or would have more than ``most`` engines.
        """
        self._check_elastic("join")
        if num_engines < 1:
            raise MembershipRefused(f"--num must be >= 1 engines, got {num_engines}")
        if num_engines > self.num_free:
            raise MembershipRefused(
                f"rollout_fleet.num_engines allows {self._most} engines, and {len(self._presence)} are present, "
                f"coming or leaving; got a request for {num_engines} more; add at most {self.num_free}, or wait until "
                "other engines have left"
            )
        kept = [rank for rank in range(self._fewest) if rank not in self._presence] if in_kept_places else []
        new = range(self._next, self._next + max(0, num_engines - len(kept)))
        self._next = new.stop
        ranks = [*kept[:num_engines], *new]
        self._presence.update(dict.fromkeys(ranks, Presence.coming))
        return ranks

    def arrived(self, rank: int) -> None:
        """Mark the joining engine of rollout worker ``rank`` as present. Call this when the engine serves."""
        if self._presence.get(rank) is Presence.coming:
            self._presence[rank] = Presence.present

    def leave(self, rank: int) -> None:
        """Mark the engine of a rank as leaving. The caller then stops the engine and calls `gone`.

        Raises:
            MembershipRefused: the fleet has a fixed size, the rank has no engine, or too few engines would remain.
        """
        self._check_elastic("leave")
        presence = self._presence.get(rank)
        if presence is None:
            raise MembershipRefused(f"the fleet has no rollout worker {rank}, only {self.ranks}; name one of these")
        if presence is Presence.leaving:
            raise MembershipRefused(f"rollout worker {rank} is leaving already; wait until it has left")
        num_left = sum(one is Presence.present for one in self._presence.values()) - 1
        if presence is Presence.present and num_left < self._needed:
            raise MembershipRefused(
                f"rollout worker {rank} must stay: {num_left} engines would be left, but rollout_fleet.min_engines is "
                f"{self._needed}; let another engine join first"
            )
        self._presence[rank] = Presence.leaving

    def gone(self, rank: int) -> None:
        """Record that the engine of a rank has ended, with all its processes. The rank then has no engine."""
        self._presence.pop(rank, None)

    def _check_elastic(self, what: str) -> None:
        if self._most is None:
            raise MembershipRefused(
                f"engines can {what} only an elastic fleet; rollout_fleet.num_engines={self._fewest} is a fixed size; "
                f"start the run with 'rollout_fleet.num_engines={{min: {self._fewest}, max: {2 * self._fewest}}}'"
            )


class Action(Enum):
    """What a request asks for: to add engines, to remove an engine, or to describe the fleet."""

    join = "join"
    leave = "leave"
    describe = "describe"


@dataclass(frozen=True, kw_only=True)
class FleetRequest:
    """A user's request about the engines of a run.

    Attributes:
        num_engines: For ``join``: number of engines to add.
        node: For ``join``: address of the node for the engines; empty for any node.
        member: For ``leave``: rank of the rollout worker to remove.
    """

    action: Action
    num_engines: int = 1
    node: str = ""
    member: int = -1


@dataclass(frozen=True, kw_only=True)
class FleetAnswer:
    """The result of a request: a message for the user, and whether the request was refused."""

    words: str
    is_refused: bool = False


class FleetDesk:
    """An asynchronous Ray actor. It passes users' requests to the run's controller, and returns the answers."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[tuple[int, FleetRequest]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[FleetAnswer]] = {}
        self._num_asked = 0

    async def ask(self, request: FleetRequest) -> FleetAnswer:
        """Pass a user's request to the run's controller, and return the controller's answer.

        The controller gets the request by `next_request`, and answers by `answer`.
        """
        number, self._num_asked = self._num_asked, self._num_asked + 1
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((number, request))
        try:
            return await self._answers[number]
        finally:
            del self._answers[number]

    async def next_request(self) -> tuple[int, FleetRequest]:
        """Wait for the next request, and return (number, request). Pass the number to `answer`."""
        return await self._requests.get()

    async def answer(self, number: int, answer: FleetAnswer) -> None:
        """Answer the request with this number, from `next_request`. Does nothing if the sender has disconnected."""
        if number in self._answers:
            self._answers[number].set_result(answer)


def write_address(run_dir: Path, *, address: str, node_address: str) -> None:
    """Write the address of the run's Ray cluster, with Ray's authentication token, to a file in the run's folder.

    ``asyncrl join`` and ``asyncrl leave`` read this file. Only the user of this process can read it.
    """
    found = {
        "address": address,
        "node_address": node_address,
        "auth_mode": os.environ.get(AUTH_MODE, ""),
        "auth_token": os.environ.get(AUTH_TOKEN, ""),
    }
    path = run_dir / ADDRESS_FILE
    path.unlink(missing_ok=True)
    # the file has the token of the Ray cluster, so only this user may read it
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(json.dumps(found) + "\n")
