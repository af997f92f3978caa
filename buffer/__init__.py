"""The replay buffer: a ledger that enforces the staleness bound, a payload store, a server and its clients."""

from .client import BufferClient
from .config import BufferConfig, Durability, OnStale, StoresOn
from .keys import BufferRole, ClientKeys, client_keys, make_keys
from .ledger import Ledger
from .process import BufferProcess, BufferSupervisor
from .role_clients import BufferConnection, ControlClient, LearnerClient, SyncBufferClient, WorkerClient
from .rule import StalenessRule

__all__ = [
    "BufferClient",
    "BufferConfig",
    "BufferConnection",
    "BufferProcess",
    "BufferRole",
    "BufferSupervisor",
    "ClientKeys",
    "ControlClient",
    "Durability",
    "LearnerClient",
    "Ledger",
    "OnStale",
    "StalenessRule",
    "StoresOn",
    "SyncBufferClient",
    "WorkerClient",
    "client_keys",
    "make_keys",
]
