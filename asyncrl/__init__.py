"""asyncrl: asynchronous reinforcement learning of language models with bounded staleness.

The names in ``__all__`` are imported at their first use, so importing asyncrl does not load torch or ray.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - the names are imported for type checkers only
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .single_controller import *

__all__ = [
    "BatchData", "DataProto", "DataProtoConfig", "DataProtoFuture", "DataProtoItem", "Dispatch", "Execute",
    "RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "ResourcePoolManager", "Role", "Worker",
    "WorkerGroup", "create_colocated_worker_cls", "make_nd_compute_dataproto_dispatch_fn", "register",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(".single_controller", __name__), name)
    return value
