"""An enumeration that can grow at run time, for dispatch modes and roles that users add."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar


class _Members(type):
    """Makes a class of members behave as an enumeration: iteration, ``in``, ``len`` and look-up by name."""

    _registry: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._registry.values())

    def __contains__(cls, item: Any) -> bool:
        return item.upper() in cls._registry if isinstance(item, str) else item in cls._registry.values()

    def __getitem__(cls, name: str) -> Any:
        return cls._registry[name.upper()]

    def __len__(cls) -> int:
        return len(cls._registry)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        member = cls._registry.get(name.upper())
        if member is None:
            known = ", ".join(member.name for member in cls)
            raise AttributeError(f"{cls.__name__} has no member {name!r}, only {known}; add it with register()")
        return member


class DynamicEnum(metaclass=_Members):
    """Base of a growing enumeration. Names are unique without regard to case; members compare by identity.

    Attributes:
        keeps_case: Whether members keep their names as written; by default names are in capitals.
    """

    keeps_case: ClassVar[bool] = False
    _registry: ClassVar[dict[str, Any]] = {}
    _next_value: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        cls._registry = {}
        cls._next_value = 0

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value

    @classmethod
    def register(cls, name: str) -> Any:
        """Add a member and return it; ``cls.NAME`` finds it from then on.

        Raises:
            ValueError: there is such a member already.
        """
        if name.upper() in cls._registry:
            raise ValueError(f"{cls.__name__} has a member {name!r} already; choose another name")
        member = cls(name if cls.keeps_case else name.upper(), cls._next_value)
        cls._next_value += 1
        cls._registry[name.upper()] = member
        return member

    @classmethod
    def remove(cls, name: str) -> Any:
        """Take a member out and return it."""
        return cls._registry.pop(name.upper())

    @classmethod
    def from_name(cls, name: str) -> Any:
        """The member of this name, or None."""
        return cls._registry.get(name.upper())

    @classmethod
    def names(cls) -> list[str]:
        """Names of all members, in the order of their registration."""
        return [member.name for member in cls]

    @classmethod
    def values(cls) -> list[Any]:
        """All members, in the order of their registration."""
        return list(cls)

    def __reduce__(self) -> tuple[Any, ...]:
        return _member, (type(self), self.name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"


def _member(kind: type[DynamicEnum], name: str) -> Any:
    """Find a member after unpickling; a process that has not seen its registration registers it."""
    return kind.from_name(name) or kind.register(name)
