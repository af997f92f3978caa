"""Finds a built-in, or a user's own function, by the name in the options."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from asyncrl.protocol.errors import ReplayBufferError

Found = TypeVar("Found", bound=Callable[..., Any])


def find(name: str, built_ins: Mapping[str, Found], *, option: str) -> Found:
    """Look up a name of ``built_ins``, or import ``module:function``.

    Args:
        name: Example: ``"my_orders:longest_first"``.
        built_ins: What needs no import.
        option: Where the name was read, for the message.

    Returns:
        The function; one of the user's own raises `ReplayBufferError` for whatever it raises.

    Raises:
        ValueError: it is neither.
    """
    if name in built_ins:
        return built_ins[name]
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"{option} names {name!r}; known are {sorted(built_ins)}, or module:function of your own")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option}: {name!r} cannot be imported ({error}); is its folder on PYTHONPATH?") from error
    if not callable(function):
        raise ValueError(f"{option}: {name!r} must be a function, got {type(function).__name__}")
    return _named(function, f"{option} {name!r}")


def _named(function: Callable[..., Any], what: str) -> Any:
    """A user's function whose errors say where they come from, so that they answer a request and end no server."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise ReplayBufferError(f"{what} raised {type(error).__name__}: {error}") from error

    return call
