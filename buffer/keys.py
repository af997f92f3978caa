"""CURVE keys of a run: made once, when it starts, readable by their owner only, checked whenever a client connects.

A directory holds ``server.json`` and ``client.json``. Copy ``client.json`` to the hosts whose workers and learner ranks
are to reach the buffer; whoever holds another key is refused.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from .channel import Channel

logger = logging.getLogger(__name__)

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_LOOPBACK = ("127.", "localhost", "::1", "[::1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerKeys:
    """What a server needs: its own key pair, and the public key it lets in. Z85 text."""

    public: str
    secret: str
    client_public: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientKeys:
    """What a client needs: its own key pair, and the server's public key. Z85 text."""

    public: str
    secret: str
    server_public: str


def make_keys(directory: Path) -> None:
    """Make the key pairs of a run, in files that only their owner may read.

    Raises:
        ValueError: there are keys already.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    server, client = ([half.decode() for half in zmq.curve_keypair()] for _ in range(2))
    values = {
        "server.json": ServerKeys(public=server[0], secret=server[1], client_public=client[0]),
        "client.json": ClientKeys(public=client[0], secret=client[1], server_public=server[0]),
    }
    for name, keys in values.items():
        path = directory / name
        if path.exists():
            raise ValueError(f"{path} exists; keys are made once for each run, name a new directory")
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(keys)))


def ensure_keys(directory: Path) -> None:
    """Make the key pairs of a run unless the directory holds them already, for a server that is started again."""
    if not any((directory / name).exists() for name in ("server.json", "client.json")):
        make_keys(directory)


def server_keys(directory: Path) -> ServerKeys:
    """Read the server's keys. Raises ValueError if they are missing, or readable by others."""
    return ServerKeys(**_read(directory / "server.json"))


def client_keys(directory: Path) -> ClientKeys:
    """Read a client's keys. Raises ValueError if they are missing, or readable by others."""
    return ClientKeys(**_read(directory / "client.json"))


def _read(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(f"no CURVE keys at {path}; make them with buffer.keys.make_keys({str(path.parent)!r})")
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} is readable by others (mode {path.stat().st_mode & 0o777:o}); chmod 600 {path}")
    return json.loads(path.read_text())


def check_exposure(host: str, keys: str) -> None:
    """Refuse to serve beyond loopback without keys.

    Raises:
        ValueError: ``host`` is no loopback address and ``keys`` names no directory.
    """
    if not keys and not host.startswith(_LOOPBACK):
        raise ValueError(
            f"buffer.host={host} is reachable from other machines and buffer.keys is empty; make keys with "
            "buffer.keys.make_keys, or bind 127.0.0.1"
        )


def secure_server(socket: zmq.Socket[Any], keys: ServerKeys) -> None:
    """Make a socket that is to be bound speak CURVE."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, "buffer")


def secure_client(socket: zmq.Socket[Any], keys: ClientKeys) -> None:
    """Make a socket that is to be connected speak CURVE."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)


class Gate:
    """Answers ZMQ's question (ZAP, RFC 27) whether a key may enter.

    Args:
        context: Of the socket to guard; make the gate before binding it.
        keys: Whom to let in.
        on_refused: Called for each key turned away.
    """

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys, on_refused: Callable[[], None]) -> None:
        self._allowed = z85.decode(keys.client_public)
        self._on_refused = on_refused
        socket = context.socket(zmq.ROUTER)
        socket.bind(_ZAP_ADDRESS)
        self._channel = Channel(socket, self._answer)

    def close(self) -> None:
        """Stop answering."""
        self._channel.close()

    def _answer(self, frames: list[zmq.Frame]) -> None:
        parts = [frame.bytes for frame in frames]
        sender, empty, version, request_id = parts[:4]
        allowed = len(parts) == 9 and parts[7] == b"CURVE" and parts[8] == self._allowed
        if not allowed:
            self._on_refused()
            logger.warning("refused a client with an unknown key, from %s", parts[5].decode(errors="replace"))
        status, text = (b"200", b"OK") if allowed else (b"400", b"unknown key")
        self._channel.send([sender, empty, version, request_id, status, text, b"", b""])
