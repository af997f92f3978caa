"""Finds a user's function by the name written in the config."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def import_function(path: str, *, option: str) -> Callable[..., Any]:
    """Import ``module:function``.

    Args:
        path: Example: ``"my_rewards:unit_tests"``.
        option: The config option it was read from, for the message.

    Raises:
        ValueError: it is not of that form, cannot be imported, or is not callable.
    """
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"{option} must be a built-in's name or module:function, got {path!r}")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option}: {path!r} cannot be imported ({error}); is its folder on PYTHONPATH?") from error
    if not callable(function):
        raise ValueError(f"{option}: {path!r} must be callable, got {type(function).__name__}")
    return function
