"""Stored groups and the batches made of them, until each batch is committed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.protocol.errors import StalenessError, UnknownGroup
from asyncrl.protocol.types import GroupSummary, Plan

from .orders import Preference
from .ready import ReadyGroups
from .staleness import StalenessRule


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """A stored or planned group."""

    summary: GroupSummary
    deadline: int


class Batches:
    """What is stored, and which of it is planned for which version.

    Args:
        rule: The staleness bound.
        prefer: Which stored groups a batch prefers.
    """

    def __init__(self, rule: StalenessRule, prefer: Preference) -> None:
        self._rule = rule
        self._stored: dict[int, _Stored] = {}
        self._ready = ReadyGroups(rule, prefer)
        self.plans: dict[int, Plan] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._stored

    @property
    def num_ready(self) -> int:
        """Stored groups that no plan holds."""
        return len(self._ready)

    def ready_due(self) -> dict[int, int]:
        """Deadline to number of groups that no plan holds."""
        return self._ready.due()

    def holds(self, group_id: int, attempt: int) -> bool:
        """Whether this attempt of the group is stored or planned."""
        stored = self._stored.get(group_id)
        return stored is not None and stored.summary.attempt == attempt

    def attempt(self, group_id: int) -> int:
        """Which attempt of a group is stored.

        Raises:
            UnknownGroup: none is.
        """
        if group_id not in self._stored:
            raise UnknownGroup(
                f"no trajectories of group {group_id} are stored; fetch what a plan names, before commit"
            )
        return self._stored[group_id].summary.attempt

    def rank(self, summary: GroupSummary, deadline: int) -> float:
        """What the selection order says of a group.

        Raises:
            ReplayBufferError: it is an order of the user's own, and says nothing that can be compared.
        """
        return self._ready.rank(summary, deadline)

    def add(self, summary: GroupSummary, deadline: int, rank: float) -> None:
        """Store a group."""
        self._stored[summary.group_id] = _Stored(summary=summary, deadline=deadline)
        self._ready.add(summary.group_id, deadline, rank)

    def make(self, version: int, required: list[int]) -> Plan:
        """Make the batch of ``version``, with at least the ``required`` groups of each deadline."""
        group_ids = self._ready.take_batch(required, version)
        plan = Plan(version=version, groups=tuple(self._stored[group_id].summary for group_id in group_ids))
        self.plans[version] = plan
        return plan

    def take(self, version: int) -> Plan:
        """Remove the batch of ``version``, which the learner consumes now.

        Raises:
            StalenessError: a group of it breaks the bound. It must never fire.
        """
        plan = self.plans[version]
        for summary in plan.groups:
            lag, deadline = version - summary.oldest_version, self._stored[summary.group_id].deadline
            if lag > self._rule.max_lag or version > deadline:
                raise StalenessError(
                    f"group {summary.group_id} with deadline {deadline} would be consumed at version {version} with a "
                    f"token of version {summary.oldest_version}: lag {lag}, bound {self._rule.max_lag}"
                )
        for summary in plan.groups:
            del self._stored[summary.group_id]
        return self.plans.pop(version)

    def describe(self, version: int) -> list[dict[str, Any]]:
        """What is known of every group, for people; its lag is what it would be at ``version``."""
        planned = {summary.group_id for plan in self.plans.values() for summary in plan.groups}
        return [
            {
                "group_id": group_id,
                "state": "planned" if group_id in planned else "stored",
                "attempt": stored.summary.attempt,
                "deadline": stored.deadline,
                "lag": version - stored.summary.oldest_version,
                "mean_reward": sum(stored.summary.rewards) / max(1, len(stored.summary.rewards)),
                "mean_length": sum(stored.summary.response_lengths) / max(1, len(stored.summary.response_lengths)),
            }
            for group_id, stored in self._stored.items()
        ]

    def snapshot(self) -> dict[str, Any]:
        """Everything, as plain values; groups that no plan holds in the order they were stored."""
        planned = [summary.group_id for plan in self.plans.values() for summary in plan.groups]
        group_ids = self._ready.in_order() + planned
        return {
            "stored": [[asdict(self._stored[g].summary), self._stored[g].deadline] for g in group_ids],
            "plans": [[plan.version, [summary.group_id for summary in plan.groups]] for plan in self.plans.values()],
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the state of a snapshot into this empty object."""
        planned = {group_id for _, group_ids in values["plans"] for group_id in group_ids}
        for fields, deadline in values["stored"]:
            summary = summary_from(fields)
            self._stored[summary.group_id] = _Stored(summary=summary, deadline=deadline)
            if summary.group_id not in planned:
                self._ready.add(summary.group_id, deadline, self._ready.rank(summary, deadline))
        for version, group_ids in values["plans"]:
            groups = tuple(self._stored[group_id].summary for group_id in group_ids)
            self.plans[version] = Plan(version=version, groups=groups)


def summary_from(fields: Mapping[str, Any]) -> GroupSummary:
    """A summary from the plain values of a snapshot."""
    sequences = {name: tuple(fields[name]) for name in ("response_lengths", "rewards")}
    return GroupSummary(**{**fields, **sequences})
