"""Names for algorithms: ours by a short name, a user's own by ``module:function``, without touching our files."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Named implementations of one kind.

    Args:
        option: The option that names an entry, for messages. Example: ``algorithm.loss``.
    """

    def __init__(self, option: str) -> None:
        self._option = option
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters an implementation under a name."""

        def enter(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self._option}={name} is registered already; choose another name")
            self._entries[name] = entry
            return entry

        return enter

    def names(self) -> list[str]:
        """Registered names, sorted."""
        return sorted(self._entries)

    def get(self, name: str) -> T:
        """Look an implementation up.

        Args:
            name: A registered name, or ``module:attribute`` of an importable module.

        Raises:
            ValueError: there is no such name, module or attribute.
        """
        if name in self._entries:
            return self._entries[name]
        module, _, attribute = name.partition(":")
        if not attribute:
            raise ValueError(f"{self._option} must be one of {self.names()} or module:function, got {name!r}")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{self._option}={name!r} cannot be imported: {error}") from error
