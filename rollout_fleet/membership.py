"""How an engine is asked to join a run that goes, or to leave it: the commands, the run, and the desk between them.

::

    asyncrl join, asyncrl leave ──ask──▶ FleetDesk (a named Ray actor of the run) ──next_request──▶ the controller
                                ◀─words─                                          ◀──answer──

Whoever may connect to the run's Ray cluster may ask: Ray's own authentication is the desk's (``RAY_AUTH_MODE=token``).
`ask` waits for the desk, which waits for the controller; `FleetDesk.next_request` is woken by `FleetDesk.ask`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from asyncrl.protocol.errors import AsyncRLError, DeadlineError

NAMESPACE = "asyncrl"
"""Ray namespace of the desks; each is named by its run's folder."""
ADDRESS_FILE = "fleet.json"
"""In the run's folder: how to reach the run's Ray cluster from its node."""
_CONNECT_S = 5.0
_AUTH_MODE = "RAY_AUTH_MODE"
"""Ray sets it in a process that starts a cluster; one that connects by an address must have it from elsewhere."""


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
    """Write down how commands on this node reach the run's Ray cluster."""
    path = run_dir / ADDRESS_FILE
    found = {"address": address, "node_address": node_address, "auth_mode": os.environ.get(_AUTH_MODE, "")}
    path.write_text(json.dumps(found) + "\n")


def ask(run: str, request: FleetRequest, *, timeout_s: float) -> FleetAnswer:
    """Ask a run, by its folder or by the address of its Ray cluster, and wait for the answer.

    Raises:
        ValueError: there is no such run, it has ended, or it has a fleet of a fixed size.
        DeadlineError: it does not answer in time.
    """
    folder = Path(run)
    found = _read_address(folder) if folder.is_dir() else {"address": run, "node_address": "", "auth_mode": ""}
    if found["auth_mode"]:
        os.environ.setdefault(_AUTH_MODE, found["auth_mode"])  # Ray reads it when it is imported
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    with _connected(found["address"], found["node_address"]):
        desk = _desk_of(str(folder.resolve()) if folder.is_dir() else "", run)
        try:
            return ray.get(desk.ask.remote(request), timeout=timeout_s)
        except GetTimeoutError:
            raise DeadlineError(
                f"the run did not finish this within --timeout-s={timeout_s:g} s, and goes on with it; 'asyncrl leave "
                f"--run {run}' shows what the members do"
            ) from None
        except RayError as error:
            raise ValueError(f"run {run} ended before it answered: {str(error).splitlines()[0]}") from None


def _read_address(folder: Path) -> dict[str, str]:
    path = folder / ADDRESS_FILE
    if not path.is_file():
        what = "has a fleet of a fixed size" if (folder / "config.yaml").is_file() else "is no folder of a run"
        raise ValueError(
            f"--run {folder} {what}: there is no {ADDRESS_FILE}; name a run that goes and was started with "
            "'rollout_fleet.num_engines={min: 2, max: 8}'"
        )
    found = json.loads(path.read_text())
    if (folder / "summary.json").is_file() or not _is_listening(found["address"]):
        raise ValueError(f"--run {folder}: this run has ended; start another, with checkpoint.resume=auto to go on")
    return found


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


@contextmanager
def _connected(address: str, node_address: str) -> Iterator[None]:
    """Be connected to a Ray cluster. Raises `ValueError` if there is none."""
    import ray

    own: dict[str, Any] = {"_node_ip_address": node_address} if node_address else {}
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--run {address} must be the folder of a run, or the address of its Ray cluster as a node of it knows it "
            f"(auto, or host:port): {reason}"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _desk_of(name: str, run: str) -> Any:
    """The desk of this name, or the only one of the cluster."""
    import ray
    from ray.util import list_named_actors

    actors: list[Any] = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    if not name and len(names) == 1:
        name = names[0]
    if name not in names:
        raise ValueError(
            f"--run {run} must name a run that goes and has an elastic fleet; the cluster has "
            f"{', '.join(names) or 'none'}; name one of them by its folder, or start one with "
            "'rollout_fleet.num_engines={min: 2, max: 8}'"
        )
    return ray.get_actor(name, namespace=NAMESPACE)


def request_parser(name: str, description: str) -> argparse.ArgumentParser:
    """What both commands have in common."""
    parser = argparse.ArgumentParser(prog=f"asyncrl {name}", description=description)
    run = "folder of the run, or address of its Ray cluster (auto, host:port) where it is the only elastic run"
    parser.add_argument("--run", required=True, help=run)
    parser.add_argument("--timeout-s", type=float, default=900.0, help="how long to wait for it (default 900)")
    return parser


def run_request(options: argparse.Namespace, request: FleetRequest) -> int:
    """Ask, and print the answer; returns the exit status."""
    try:
        answer = ask(options.run, request, timeout_s=options.timeout_s)
    except (ValueError, AsyncRLError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if answer.is_refused:
        sys.stderr.write(f"error: {answer.words}\n")
        return 1
    sys.stdout.write(answer.words + "\n")
    return 0
