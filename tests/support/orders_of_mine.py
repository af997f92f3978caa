"""Selection orders and filters as a user could write them. Their names are ``tests.support.orders_of_mine:…``."""

from asyncrl.core.types import GroupSummary


def longest_first(summary: GroupSummary, deadline: int) -> float:
    return -sum(summary.response_lengths)


def by_group(summary: GroupSummary, deadline: int) -> float:
    return summary.group_id


def scattered(summary: GroupSummary, deadline: int) -> float:
    """Return a sort key that does not depend on the deadline. Some keys are infinite."""
    return (float("inf"), -float("inf"), float(summary.group_id * 7 % 5), 0.0)[summary.group_id * 11 % 4]


def no_number(summary: GroupSummary, deadline: int) -> float:
    return float("nan")


def only_even_groups(summary: GroupSummary) -> bool:
    return summary.group_id % 2 == 0


def fails(summary: GroupSummary) -> bool:
    raise KeyError("no such column")
