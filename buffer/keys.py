"""CURVE keys of a run: made once, when it starts, readable by their owner only, checked whenever a client connects.

A directory holds ``server.json`` and ``client.json``. Copy ``client.json`` to the hosts whose workers and learner ranks
are to reach the buffer; whoever holds another key is refused.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

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
