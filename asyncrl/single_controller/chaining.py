"""Passing the results of one call to another: the references go to Ray as arguments of their own.

Ray then starts the call when they are there, and passes on the error where one failed. Fetched by the method itself
they would block its process, and in an asyncio actor, where calls run interleaved, it could wait for itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncrl.protocol.future import DataProtoFuture

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def holds_future(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether any argument is a `DataProtoFuture`."""
    return any(isinstance(value, DataProtoFuture) for value in (*args, *kwargs.values()))


def detach_references(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Any]]:
    """The arguments with as many blanks in each future as it had references, and these references in order."""
    references: list[Any] = []

    def blank(value: Any) -> Any:
        if not isinstance(value, DataProtoFuture):
            return value
        references.extend(value.futures)
        return replace(value, futures=[None] * len(value.futures))

    return (tuple(map(blank, args)), {key: blank(value) for key, value in kwargs.items()}), references


def attach_results(args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]) -> Arguments:
    """The arguments with every future resolved from the results, which are in the order of the references."""
    remaining = iter(results)

    def resolved(value: Any) -> Any:
        if not isinstance(value, DataProtoFuture):
            return value
        return value.resolve([next(remaining) for _ in value.futures])

    return tuple(map(resolved, args)), {key: resolved(value) for key, value in kwargs.items()}
