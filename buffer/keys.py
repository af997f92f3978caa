"""CURVE keys of a run, one per role: made at the start of the run, and only readable by their owner.

A directory holds ``server.json``, ``store.json`` for the store servers, and one file per role: ``rollout.json``,
``learner.json``, ``controller.json``, ``inspector.json`` and ``ledger.json``. Copy to each host only the files of
the roles that run there. The server refuses unknown keys, and operations that do not belong to the role of a key.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from .commands import BufferRole
from .sockets import Channel

logger = logging.getLogger(__name__)

STORE_KEYS = "store.json"
"""The file of the store servers' keys."""
_ZAP_DOMAIN = "buffer"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerKeys:
    """A server's keys: its own key pair, and the accepted public keys by role. Z85 text."""

    public: str
    secret: str
    role_publics: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientKeys:
    """A client's keys: its own key pair, and the public keys of the server and of the store servers. Z85 text."""

    public: str
    secret: str
    server_public: str
    store_public: str

    def for_stores(self) -> "ClientKeys":
        """The keys for a connection to a store server."""
        return replace(self, server_public=self.store_public)


def make_keys(directory: Path) -> None:
    """Make a run's key pairs, in files that only their owner may read. Raises `ValueError` if a file exists."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    (server_public, server_secret), (store_public, store_secret) = _pair(), _pair()
    publics: dict[str, str] = {}
    files: dict[str, dict[str, Any]] = {}
    for role in BufferRole:
        publics[role.value], secret = _pair()
        files[f"{role.value}.json"] = asdict(
            ClientKeys(
                public=publics[role.value], secret=secret, server_public=server_public, store_public=store_public
            )
        )
    files["server.json"] = asdict(ServerKeys(public=server_public, secret=server_secret, role_publics=publics))
    files[STORE_KEYS] = asdict(ServerKeys(public=store_public, secret=store_secret, role_publics=publics))
    for name, values in files.items():
        path = directory / name
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # this also fails on a link
        except FileExistsError:
            raise ValueError(f"{path} exists; keys are made once per run, name a new directory") from None
        with os.fdopen(descriptor, "w") as file:
            json.dump(values, file)


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def ensure_keys(directory: Path) -> None:
    """Make the key pairs of a run unless the directory holds key pairs of an earlier server."""
    if not any((directory / f"{name}.json").exists() for name in ("server", *BufferRole)):
        make_keys(directory)


def server_keys(directory: Path) -> ServerKeys:
    """Read the server's keys. Raises ValueError if they are missing, or readable by others."""
    return ServerKeys(**_read(directory / "server.json", ServerKeys))


def store_keys(directory: Path) -> ServerKeys:
    """Read the store servers' keys. Raises ValueError if they are missing, or readable by others."""
    return ServerKeys(**_read(directory / STORE_KEYS, ServerKeys))


def client_keys(directory: Path, role: BufferRole) -> ClientKeys:
    """Read the keys of a role. Raises ValueError if they are missing, or readable by others."""
    return ClientKeys(**_read(directory / f"{role}.json", ClientKeys))


def _read(path: Path, kind: type) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"no CURVE keys at {path}; make them with buffer.keys.make_keys({str(path.parent)!r})")
    if (owner := path.stat().st_uid) != os.geteuid():
        raise ValueError(f"{path} belongs to user {owner}, this is user {os.geteuid()}; name a directory of your own")
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} is readable by others (mode {path.stat().st_mode & 0o777:o}); chmod 600 {path}")
    values = json.loads(path.read_text())
    if values.keys() != (names := {field.name for field in fields(kind)}):
        raise ValueError(
            f"{path} must hold {sorted(names)}, got {sorted(values)}; remove the directory, and new keys are made"
        )
    return values


def check_exposure(host: str, keys: str) -> None:
    """Raise `ValueError` for a port without keys, because every user of a host can reach its loopback."""
    if host and not keys:
        raise ValueError(
            f"buffer.host={host} is reachable by other users or machines and buffer.keys is empty; name a directory "
            "for keys, or leave buffer.host empty: the server then listens on Unix sockets of its own user"
        )


def secure_server(socket: zmq.Socket[Any], keys: ServerKeys) -> None:
    """Set up CURVE on a server's socket; call this before the socket binds."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)


def secure_client(socket: zmq.Socket[Any], keys: ClientKeys) -> None:
    """Set up CURVE on a client's socket; call this before the socket connects."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)


class KeyGate:
    """Answers ZMQ's authentication requests (ZAP, RFC 27) with the role of a key; refuses unknown keys.

    Make it before the sockets of ``context`` are bound. ``on_refused`` is called for each refused key.
    """

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys, on_refused: Callable[[], None]) -> None:
        self._roles = {z85.decode(public): role for role, public in keys.role_publics.items()}
        self._on_refused = on_refused
        socket = context.socket(zmq.ROUTER)
        socket.bind(_ZAP_ADDRESS)
        self._channel = Channel(socket, self._answer)

    def close(self) -> None:
        """Stop the authentication."""
        self._channel.close()

    def _answer(self, frames: list[zmq.Frame]) -> None:
        parts = [frame.bytes for frame in frames]
        sender, empty, version, request_id = parts[:4]
        is_curve = len(parts) == 9 and parts[7] == b"CURVE"
        role = self._roles.get(parts[8]) if is_curve else None
        if role is None:
            self._on_refused()
            logger.warning("refused a client with an unknown key, from %s", parts[5].decode(errors="replace"))
        status, text = (b"200", b"OK") if role is not None else (b"400", b"unknown key")
        self._channel.send([sender, empty, version, request_id, status, text, (role or "").encode(), b""])
