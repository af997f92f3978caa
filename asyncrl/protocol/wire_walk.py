"""What every part of the codec knows of values: how deep they nest, and where in one something stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_CONTAINERS = frozenset({list, dict, tuple, np.ndarray})
_LEAVES = frozenset({type(None), bool, int, float, str, bytes})
_OBJECT = np.dtype(object)
_MANY = 8  # items that are looked through faster at once than one by one


@dataclass(frozen=True, slots=True)
class Columns:
    """Tensors by name that the receiver takes as views of the frames, and promises to copy before it writes."""

    tensors: dict[str, Any]


class Unsupported(Exception):
    """The wire does not carry this value.

    Attributes:
        value: The value.
    """

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.value = value


def check_depth(value: Any, max_depth: int) -> None:
    """Raise `ValueError` where containers, object arrays among them, nest deeper than ``max_depth``."""
    level = [value] if _is_container(value) else []
    for _ in range(max_depth):
        if not level:
            return
        inner: list[Any] = []
        for container in level:
            items = _items_of(container)
            if len(items) > _MANY and _LEAVES.issuperset(map(type, items)):
                continue
            for item in items:
                if type(item) in _CONTAINERS and _is_container(item):
                    inner.append(item)
        level = inner
    if level:
        raise ValueError(f"containers nest deeper than {max_depth}, or one holds itself")


def path_to(target: Any, value: Any) -> str:
    """Where ``target`` stands in ``value``, by identity. Example: ``value['meta_info']['paths'][0]``."""
    found = _search(target, value, "value")
    return "value" if found is None else found


def _search(target: Any, value: Any, path: str) -> str | None:
    if value is target:
        return path
    for step, item in _steps(value):
        found = _search(target, item, path + step)
        if found is not None:
            return found
    return None


def _steps(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, each with the expression that leads to it."""
    if type(value) is Columns:
        value = value.tensors
    if type(value) is dict:
        for key, item in value.items():
            yield f"[key {key!r:.80}]", key
            yield f"[{key!r:.80}]", item
    elif _is_container(value):
        for index, item in enumerate(_items_of(value)):
            yield f"[{index}]", item


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS and (type(value) is not np.ndarray or value.dtype is _OBJECT)


def _items_of(container: Any) -> Any:
    if type(container) is dict:
        return container.values()
    return container.reshape(-1).tolist() if type(container) is np.ndarray else container
