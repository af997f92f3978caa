"""The ledger's own types as header fields: summaries of groups, and its totals."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from asyncrl.protocol.errors import WireError
from asyncrl.protocol.types import BufferStats, GroupSummary

from .messages import MAX_COUNT, integer, integers

_INTEGERS = ("group_id", "attempt", "num_prompt_tokens", "num_tokens", "oldest_version", "newest_version")
_LISTS = ("response_lengths", "branch_tokens", "num_branches")
_NAMES = (*_INTEGERS, *_LISTS, "rewards")
_NUMBERS = frozenset({int, float})


def summary_fields(summary: GroupSummary) -> dict[str, Any]:
    """A summary as header fields."""
    return {name: getattr(summary, name) for name in _NAMES}


def summary_of(fields: Any) -> GroupSummary:
    """The summary in header fields.

    Raises:
        WireError: a field is missing or of the wrong type.
    """
    if not isinstance(fields, dict):
        raise WireError(f"a group summary is a map, got {type(fields).__name__}")
    rewards = fields.get("rewards")
    if not isinstance(rewards, list) or not _NUMBERS.issuperset(map(type, rewards)):
        raise WireError("field 'rewards' must be a list of numbers")
    numbers = {name: integer(fields, name) for name in _INTEGERS}
    lists: dict[str, Any] = {name: tuple(integers(fields, name)) for name in _LISTS}
    num_tokens = max(numbers["num_tokens"], *map(sum, lists.values()))
    if num_tokens > MAX_COUNT:
        raise WireError(f"a group has at most 2**40 tokens, got {num_tokens}")
    return GroupSummary(rewards=tuple(rewards), **numbers, **lists)


def stats_fields(stats: BufferStats) -> dict[str, Any]:
    """The ledger's totals as header fields."""
    fields = asdict(stats)
    fields["lag_histogram"] = list(stats.lag_histogram.items())
    return fields


def stats_of(fields: Mapping[str, Any]) -> BufferStats:
    """The ledger's totals in header fields.

    Raises:
        WireError: they are not.
    """
    try:
        return BufferStats(**{**fields, "lag_histogram": dict(fields.get("lag_histogram", ()))})
    except TypeError as error:
        raise WireError(f"these are not the totals of a ledger: {error}") from error
