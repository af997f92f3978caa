"""The commands ``asyncrl join`` and ``asyncrl leave``. They add engines to a running run, or remove one engine."""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.core.errors import DeadlineError, MembershipRefused, with_exit_status

from .membership import ADDRESS_FILE, AUTH_MODE, AUTH_TOKEN, NAMESPACE, Action, FleetAnswer, FleetRequest

_CONNECT_S = 5.0
_PROBE_S = 2.0
"""Interval at which a command that waits for its answer checks that the run's Ray cluster still listens."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``asyncrl join``: add engines to a running run, and wait until each of them serves or has failed.

    Returns the exit status of the command.
    """
    parser = _parser("join", "Add engines to a running run, up to rollout_fleet.num_engines.max.")
    parser.add_argument("--num", type=int, default=1, metavar="N", help="how many engines (default 1)")
    parser.add_argument("--node", default="", help="address of their node (default: any node with room)")
    options = parser.parse_args(arguments)
    return _run(options, FleetRequest(action=Action.join, num_engines=options.num, node=options.node))


def leave(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``asyncrl leave``: remove one engine from a running run, and wait for the end of this engine.

    Without the number of an engine, the command lists the engines. Returns the exit status of the command.
    """
    parser = _parser("leave", "Let an engine release its running groups and end; without MEMBER, list the engines.")
    parser.add_argument("member", type=int, nargs="?", metavar="MEMBER", help="number of the rollout worker")
    options = parser.parse_args(arguments)
    if options.member is None:
        return _run(options, FleetRequest(action=Action.describe))
    return _run(options, FleetRequest(action=Action.leave, member=options.member))


def ask(run: str, request: FleetRequest, *, timeout_s: float) -> FleetAnswer:
    """Send a request about engines to a running run, and return the run's answer, a message for the user.

    The answer also says whether the run refused the request. ``run`` is the run's folder, or the address of its Ray
    cluster.

    Raises:
        ValueError: the run does not exist, has ended, or has a fleet of a fixed size.
        DeadlineError: the run does not answer in time.
    """
    folder = Path(run)
    found = _read_address(folder) if folder.is_dir() else {"address": run}
    expected = f"--run {run} must be the folder of a run, or the address of its Ray cluster (auto, or host:port)"
    if found["address"] != "auto" and not _is_served(found["address"]):
        raise ValueError(f"{expected}; no process listens there")  # otherwise `ray.init` would retry for minutes
    for variable, key in ((AUTH_MODE, "auth_mode"), (AUTH_TOKEN, "auth_token")):
        if found.get(key):
            os.environ[variable] = found[key]  # set these variables before `import ray`, which reads them
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")  # if the cluster refuses the token, give up after 5 retries
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    own: dict[str, Any] = {"_node_ip_address": found["node_address"]} if found.get("node_address") else {}
    try:
        ray.init(found["address"], namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{expected}; Ray says: {str(error).splitlines()[0]}; if the cluster requires a token, set "
            f"{AUTH_MODE}=token, and set {AUTH_TOKEN} to the token of the run"
        ) from None
    try:
        desk = _desk_of(str(folder.resolve()) if folder.is_dir() else "", run)
        asked, end_s = desk.ask.remote(request), time.monotonic() + timeout_s
        while not ray.wait([asked], timeout=max(0.0, min(_PROBE_S, end_s - time.monotonic())))[0]:
            if time.monotonic() > end_s:
                break
            # If the run has ended, raise an error here. Otherwise Ray would end this process after a minute.
            if not _is_served(ray.get_runtime_context().gcs_address):
                raise ValueError(f"run {run} ended before it answered")
        return ray.get(asked, timeout=0)
    except GetTimeoutError:
        raise DeadlineError(
            f"the run did not finish the request within --timeout-s={timeout_s:g} s, and still works on it; "
            f"'asyncrl leave --run {run}' lists the engines"
        ) from None
    except RayError as error:
        raise ValueError(f"run {run} ended before it answered: {str(error).splitlines()[0]}") from None
    finally:
        ray.shutdown()


def _read_address(folder: Path) -> dict[str, str]:
    path = folder / ADDRESS_FILE
    if not path.is_file():
        what = "has a fleet of a fixed size" if (folder / "config.yaml").is_file() else "is not the folder of a run"
        raise ValueError(
            f"--run {folder} {what}: there is no {ADDRESS_FILE}; name a running run that was started with "
            "'rollout_fleet.num_engines={min: 2, max: 8}'"
        )
    found = json.loads(path.read_text())
    if (folder / "summary.json").is_file() or not _is_served(found["address"]):
        raise ValueError(
            f"--run {folder}: this run has ended; to continue it, start a new run with checkpoint.resume=auto"
        )
    return found


def _is_served(address: str) -> bool:
    """Return whether a process listens at ``address``, such as ``10.0.0.1:6379``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _desk_of(name: str, run: str) -> Any:
    import ray
    from ray.util import list_named_actors

    actors: list[Any] = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    if not name and len(names) == 1:
        name = names[0]
    if name not in names:
        raise ValueError(
            f"--run {run} must name a running run with an elastic fleet; the cluster has "
            f"{', '.join(names) or 'none'}; name one of them by its folder, or start one with "
            "'rollout_fleet.num_engines={min: 2, max: 8}'"
        )
    return ray.get_actor(name, namespace=NAMESPACE)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"asyncrl {name}", description=description)
    run = "folder of the run, or address of its Ray cluster (auto, host:port) where it is the only elastic run"
    parser.add_argument("--run", required=True, help=run)
    parser.add_argument("--timeout-s", type=float, default=900.0, help="deadline of the request (default 900)")
    return parser


@with_exit_status
def _run(options: argparse.Namespace, request: FleetRequest) -> int:
    answer = ask(options.run, request, timeout_s=options.timeout_s)
    if answer.is_refused:
        raise MembershipRefused(answer.words)
    sys.stdout.write(answer.words + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
