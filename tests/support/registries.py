"""Undoes the registrations that a test makes in a registry."""

from typing import Any

import pytest

from asyncrl.core.registry import Registry


def undo_registrations(monkeypatch: pytest.MonkeyPatch, registry: Registry[Any]) -> Registry[Any]:
    """Return the registry. At the end of the test, names that were registered after this call are removed."""
    monkeypatch.setattr(registry, "entries", dict(registry.entries))
    return registry
