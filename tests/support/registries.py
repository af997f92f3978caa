"""Registrations of a test."""

from typing import Any

import pytest

from asyncrl.core.registry import Registry


def undo_registrations(monkeypatch: pytest.MonkeyPatch, registry: Registry[Any]) -> Registry[Any]:
    """Remove the names that the test registers, and their modules' registrations, at the end of the test."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    return registry
