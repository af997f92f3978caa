"""The replay buffer: a ledger that keeps the staleness bound, a payload store, a server and its clients."""

from .client import BufferClient
from .config import BufferConfig, Durability, OnStale, StoresOn
from .connection import BufferConnection, SyncBufferClient
from .keys import BufferRole, ClientKeys, client_keys, make_keys
from .ledger import Ledger
from .process import BufferProcess, BufferSupervisor
from .rule import StalenessRule

__all__ = [
    "BufferClient",
    "BufferConfig",
    "BufferConnection",
    "BufferProcess",
    "BufferRole",
    "BufferSupervisor",
    "ClientKeys",
    "Durability",
    "Ledger",
    "OnStale",
    "StalenessRule",
    "StoresOn",
    "SyncBufferClient",
    "client_keys",
    "make_keys",
]
