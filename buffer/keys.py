"""The CURVE keys (ZMQ's encryption) of a run. The ledger's server, the store servers and each role have a key pair.

The run makes the keys when it starts. Only the owner of the key files can read the files.

A directory holds ``server.json``, ``store.json`` for the store servers, and one file per role, such as
``rollout.json``. Copy to each host only the files of the servers and roles that run there. A server refuses a client
with an unknown key, and operations that the client's role must not send. The roles' keys can be replaced while the
servers run. The servers' own keys are never replaced, because only the servers' hosts have the servers' secret keys.
"""

import json
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from .records import BufferRole
from .sockets import Channel

logger = logging.getLogger(__name__)

SERVER_KEYS = "server.json"
STORE_KEYS = "store.json"
"""Name of the file with the keys of the store servers."""
_ZAP_DOMAIN = "buffer"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerKeys:
    """A server's key pair, and the clients' public keys that the server accepts, by role. All keys are Z85 text.

    The keys in ``former_publics`` are accepted too, while the clients' keys are being replaced.
    """

    public: str
    secret: str
    role_publics: dict[str, str]
    former_publics: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientKeys:
    """A client's key pair, and the public keys of the ledger's server and of the store servers, as Z85 text.

    ``path`` is the file with these keys; None if the keys were not read from a file.
    """

    public: str
    secret: str
    server_public: str
    store_public: str
    path: Path | None = field(default=None, compare=False)

    def for_stores(self) -> "ClientKeys":
        """Return the keys for a connection to a store server."""
        return replace(self, server_public=self.store_public)

    def newest(self) -> "ClientKeys":
        """Return a copy of these keys with the key pair that is now in the file ``path``.

        If ``path`` is None, or if the file cannot be read, the method returns the keys unchanged.
        """
        if self.path is None:
            return self
        try:
            found = _client_keys(self.path)
        except (OSError, ValueError) as error:
            logger.warning("the keys were not read again: %s", error)
            return self
        return replace(self, public=found.public, secret=found.secret)


_CLIENT_NAMES = ("public", "secret", "server_public", "store_public")
_SERVER_NAMES = ("public", "secret", "role_publics")


def make_keys(directory: Path) -> None:
    """Make a run's key pairs, in files that only their owner may read. Raises `ValueError` if a file exists."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    (server_public, server_secret), (store_public, store_secret) = _pair(), _pair()
    roles = {
        role: ClientKeys(public=public, secret=secret, server_public=server_public, store_public=store_public)
        for role, (public, secret) in ((role, _pair()) for role in BufferRole)
    }
    publics = {role.value: keys.public for role, keys in roles.items()}
    files = {f"{role.value}.json": _plain(keys) for role, keys in roles.items()}
    files[SERVER_KEYS] = asdict(ServerKeys(public=server_public, secret=server_secret, role_publics=publics))
    files[STORE_KEYS] = asdict(ServerKeys(public=store_public, secret=store_secret, role_publics=publics))
    for name, values in files.items():
        path = directory / name
        try:
            # ``O_EXCL`` makes `os.open` fail if the path is a file or a symbolic link.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ValueError(f"{path} exists; keys are made once per run, so use a new directory") from None
        with os.fdopen(descriptor, "w") as file:
            json.dump(values, file)


def _plain(keys: ClientKeys) -> dict[str, str]:
    return {name: getattr(keys, name) for name in _CLIENT_NAMES}


# To replace the roles' keys, call `add_keys`, `put_keys` and `retire_keys` in this order.
# If the process dies between these calls, call all three functions again.


def add_keys(directory: Path) -> dict[str, ClientKeys]:
    """Make new keys for all roles, and add them to the servers' files. Return the new keys by role.

    The servers must read their files again before you call `put_keys`. Raises `ValueError` if a file is missing or
    malformed, or if another user owns the file or has access to it.
    """
    new = {role.value: _pair() for role in BufferRole}
    server, store = server_keys(directory), store_keys(directory)
    for name, keys in ((SERVER_KEYS, server), (STORE_KEYS, store)):
        former = {role: [*keys.former_publics.get(role, ()), public] for role, public in keys.role_publics.items()}
        publics = {role: public for role, (public, _) in new.items()}
        _replace(directory / name, asdict(replace(keys, role_publics=publics, former_publics=former)))
    return {
        role: ClientKeys(public=public, secret=secret, server_public=server.public, store_public=store.public)
        for role, (public, secret) in new.items()
    }


def put_keys(directory: Path, keys: Mapping[str, ClientKeys]) -> None:
    """Write each role's new keys to the role's file in ``directory``. Clients that connect later use the new keys."""
    for role, own in keys.items():
        _replace(directory / f"{role}.json", _plain(own))


def retire_keys(directory: Path) -> None:
    """Remove the roles' old keys from the servers' files.

    A server accepts the old keys until it reads its file again. `ControlClient.renew_keys` makes the servers read their
    files.
    """
    for name, read in ((SERVER_KEYS, server_keys), (STORE_KEYS, store_keys)):
        _replace(directory / name, asdict(replace(read(directory), former_publics={})))


def _replace(path: Path, values: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def ensure_keys(directory: Path) -> None:
    """Make the key pairs of a run if the directory has no key pairs yet."""
    if not any((directory / f"{name}.json").exists() for name in ("server", *BufferRole)):
        make_keys(directory)


def server_keys(directory: Path) -> ServerKeys:
    """Read the keys of the ledger's server from the server's file in ``directory``, and return them.

    Raises `ValueError` if the file is missing or malformed, or if another user owns the file or has access to it.
    """
    return ServerKeys(**_read(directory / SERVER_KEYS, _SERVER_NAMES, optional=("former_publics",)))


def store_keys(directory: Path) -> ServerKeys:
    """Read the keys of the store servers from ``store.json`` in ``directory``, and return them.

    Raises `ValueError` in the same cases as `server_keys`, for example if the file is missing.
    """
    return ServerKeys(**_read(directory / STORE_KEYS, _SERVER_NAMES, optional=("former_publics",)))


def client_keys(directory: Path, role: BufferRole) -> ClientKeys:
    """Read the keys of a client with this role from the role's file in ``directory``, and return them.

    Raises `ValueError` in the same cases as `server_keys`, for example if the file is missing.
    """
    return _client_keys(directory / f"{role}.json")


def _client_keys(path: Path) -> ClientKeys:
    return ClientKeys(**_read(path, _CLIENT_NAMES), path=path)


def _read(path: Path, names: Collection[str], *, optional: Collection[str] = ()) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"no CURVE keys at {path}; make them with buffer.keys.make_keys({str(path.parent)!r})")
    if (owner := path.stat().st_uid) != os.geteuid():
        raise ValueError(f"{path} must belong to user {os.geteuid()}, got user {owner}; use a directory of your own")
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} is readable by other users (mode {path.stat().st_mode & 0o777:o}); chmod 600 {path}")
    values = json.loads(path.read_text())
    if not isinstance(values, dict) or values.keys() - {*optional} != {*names}:
        got = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{path} must hold {sorted(names)}, got {got}; remove the directory to make new keys")
    return values


def check_exposure(host: str, keys: str) -> None:
    """Raise `ValueError` if a server listens on a port (``host`` is not empty) without ``keys``.

    Every user of the server's machine can reach a port, even a loopback port.
    """
    if host and not keys:
        raise ValueError(
            f"other users or machines can reach buffer.host={host}, but buffer.keys is empty; set buffer.keys to a "
            "directory, or leave buffer.host empty to use Unix sockets that only this user may open"
        )


def secure_server(socket: zmq.Socket[Any], keys: ServerKeys) -> None:
    """Set up CURVE (ZMQ's encryption) on a server's socket before the socket binds."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)


def secure_client(socket: zmq.Socket[Any], keys: ClientKeys) -> None:
    """Set up CURVE (ZMQ's encryption) on a client's socket before the socket connects."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)


class KeyGate:
    """Answers ZMQ's authentication requests (ZAP, RFC 27): accepts clients with a known key, and refuses other clients.

    Make this object before the sockets of ``context`` are bound. ZMQ sends one request per connection. The answer for
    an accepted client has the client's public key. ZMQ adds this key to each message of the connection. The server
    calls `role_of` with the key of each message, because keys may be replaced while the client is connected.
    """

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys, on_refused: Callable[[], None]) -> None:
        self.renew(keys)
        self._on_refused = on_refused
        socket = context.socket(zmq.ROUTER)
        socket.bind(_ZAP_ADDRESS)
        self._channel = Channel(socket, self._answer)

    def renew(self, keys: ServerKeys) -> None:
        """Accept only the clients' public keys in ``keys`` from now on."""
        self._newest = {public: role for role, public in keys.role_publics.items()}
        former = {public: role for role, publics in keys.former_publics.items() for public in publics}
        self._roles = former | self._newest

    def role_of(self, public: str) -> str | None:
        """Return the role of a client's public key; None if the key is not accepted."""
        return self._roles.get(public)

    def is_newest(self, public: str) -> bool:
        """Return whether ``public`` is the newest public key of a role."""
        return public in self._newest

    def close(self) -> None:
        """Stop the authentication. ZMQ gets no further answers."""
        self._channel.close()

    def _answer(self, frames: list[zmq.Frame]) -> None:
        parts = [frame.bytes for frame in frames]
        sender, empty, version, request_id = parts[:4]
        is_curve = len(parts) == 9 and parts[7] == b"CURVE"
        public = z85.encode(parts[8]) if is_curve else b""
        is_known = public.decode() in self._roles
        if not is_known:
            self._on_refused()
            logger.warning("refused a client with an unknown key, from %s", parts[5].decode(errors="replace"))
        status, text = (b"200", b"OK") if is_known else (b"400", b"unknown key")
        self._channel.send([sender, empty, version, request_id, status, text, public if is_known else b"", b""])
