"""Runs a function in a child process as another user of this host."""

import json
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

NOBODY = 65534


def as_stranger(function: Callable[[], Any]) -> Any:
    """Run a function in a child process as the user `NOBODY`. Returns its result, which must be JSON.

    Skips the test if this process does not run as root.
    """
    if os.geteuid() != 0:
        pytest.skip("only root may run code as another user")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            answer = {"answer": function()}
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            answer = {"error": repr(error)}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    said = b""
    while part := os.read(reading, 65536):
        said += part
    os.close(reading)
    os.waitpid(child, 0)
    answer = json.loads(said)
    assert "error" not in answer, answer["error"]
    return answer["answer"]


def refusals(paths: list[str]) -> dict[str, str]:
    """Connect to Unix sockets.

    Returns a word per socket: the name of the error, ``closed`` if the server closes the connection, or an
    empty string if the connection stays open. A path that begins with @ is an abstract socket.
    """
    found = {}
    for path in paths:
        with socket.socket(socket.AF_UNIX) as end:
            try:
                end.settimeout(10.0)
                end.connect(path.replace("@", "\0", 1) if path.startswith("@") else path)
                found[path] = "" if end.recv(1) else "closed"
            except TimeoutError:
                found[path] = ""
            except OSError as error:
                found[path] = type(error).__name__
    return found
