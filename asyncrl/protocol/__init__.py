"""The vocabulary of the system: types, errors and ports. Importing it loads neither torch nor ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .future import DataProtoFuture

if TYPE_CHECKING:
    from .data_proto import DataProto, DataProtoItem

__all__ = ["DataProto", "DataProtoFuture", "DataProtoItem"]

_WITH_TORCH = {"DataProto": "data_proto", "DataProtoItem": "data_proto"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WITH_TORCH[name]}", __name__), name)
