"""The staleness rule as arithmetic: when a group is admitted, and which groups a batch must hold.

Nothing here keeps state or waits. ``docs/staleness.md`` proves that these two rules together keep every lag within
``max_lag``. Letters: B groups per learner step, u engine version, w version that is planned next, k learner steps
from w on.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessRule:
    """The bound and the unit it is counted in.

    Attributes:
        max_lag: η, learner steps between a group's oldest token and its consumption, at most. 0 is synchronous.
        groups_per_step: B.
    """

    max_lag: int
    groups_per_step: int

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ValueError(f"max_lag must be >= 0, got {self.max_lag}; use 0 for synchronous training")
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step must be >= 1, got {self.groups_per_step}")

    def deadline(self, engine_version: int) -> int:
        """Last learner version that may consume a group admitted at ``engine_version``."""
        return engine_version + self.max_lag

    def admits(self, open_by_deadline: Mapping[int, int], *, version: int, engine_version: int) -> bool:
        """Whether one more group may begin on an engine that serves ``engine_version``.

        With d = u + η the group is admitted if, for each k from d - w to η, the open groups due at w + k or earlier
        and this one number at most (k + 1)·B, which is what the steps w … w + k consume. It costs O(η).

        Args:
            open_by_deadline: Deadline to number of groups leased or stored, not yet planned; none is before w.
            version: w.
            engine_version: u, at most the learner's version.

        Example: with B = 4, max_lag = 1 and nothing planned, an engine at the learner's version is admitted while
        fewer than 8 groups are open. An engine one version behind is also refused when 4 are due at w.
        """
        first = self.deadline(engine_version) - version
        if first < 0:
            return False
        due = 0
        for k in range(self.max_lag + 1):
            due += open_by_deadline.get(version + k, 0)
            if k >= first and due + 1 > (k + 1) * self.groups_per_step:
                return False
        return True

    def required(self, open_by_deadline: Mapping[int, int], *, version: int) -> list[int]:
        """How many groups due soon the plan of ``version`` must hold.

        Args:
            open_by_deadline: Deadline to number of groups leased or stored, not yet planned; none is before w.
            version: w.

        Returns:
            ``max_lag + 1`` numbers; entry k is how many of the groups due at w + k or earlier this plan must hold, so
            that the steps w + 1 … w + k can take the rest. Never more than B while admission is obeyed.
        """
        due = 0
        required = []
        for k in range(self.max_lag + 1):
            due += open_by_deadline.get(version + k, 0)
            required.append(max(0, due - k * self.groups_per_step))
        return required

    def missing(
        self, open_by_deadline: Mapping[int, int], ready_by_deadline: Mapping[int, int], *, version: int
    ) -> list[int]:
        """How many running groups the plan of ``version`` would have to hold.

        Args:
            open_by_deadline: Deadline to number of groups leased or stored, not yet planned.
            ready_by_deadline: Of these, the stored ones.
            version: w.

        Returns:
            ``max_lag + 1`` numbers; entry k counts those due by w + k, less the entries before it.
        """
        num_ready = num_missing = 0
        missing = []
        for k, required in enumerate(self.required(open_by_deadline, version=version)):
            num_ready += ready_by_deadline.get(version + k, 0)
            missing.append(max(0, required - num_ready - num_missing))
            num_missing += missing[-1]
        return missing
