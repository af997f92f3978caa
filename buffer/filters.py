"""Dynamic-sampling filters: finished groups that teach nothing are dropped on arrival, and another prompt is admitted.

A filter looks at a group's summary and says whether to keep it. Its name is the reason its tokens are dropped for.
"""

from collections.abc import Callable, Mapping, Sequence

from asyncrl.protocol.types import GroupSummary

from .naming import find

Filter = Callable[[GroupSummary], bool]


def _rewards_differ(summary: GroupSummary) -> bool:
    """A group of equal rewards has zero advantages everywhere (DAPO, arXiv 2503.14476, equation 11)."""
    return len(set(summary.rewards)) > 1


def _has_tokens(summary: GroupSummary) -> bool:
    """A group in which the policy wrote nothing has no loss."""
    return summary.num_tokens > 0


FILTERS: Mapping[str, Filter] = {"equal_rewards": _rewards_differ, "no_tokens": _has_tokens}
"""Name to the test that a kept group passes."""


def find_filters(names: Sequence[str]) -> dict[str, Filter]:
    """Name to filter, built in or at ``module:function``, in the order given.

    Raises:
        ValueError: there is no such filter.
    """
    return {name: find(name, FILTERS, option="buffer.filters") for name in names}


def dropped_by(filters: Mapping[str, Filter], summary: GroupSummary) -> str | None:
    """The first filter that drops the group, or None."""
    return next((name for name, keeps in filters.items() if not keeps(summary)), None)
