"""The replay buffer: a ledger that keeps the staleness bound, a payload store, a server and its clients."""

from .client import BufferClient, SyncBufferClient
from .config import BufferConfig, OnStale, SelectionOrder
from .ledger import Ledger
from .process import BufferProcess
from .staleness import StalenessRule

__all__ = [
    "BufferClient",
    "BufferConfig",
    "BufferProcess",
    "Ledger",
    "OnStale",
    "SelectionOrder",
    "StalenessRule",
    "SyncBufferClient",
]
