"""The staleness rule as arithmetic: when a group is admitted, and which groups a batch must hold.

Nothing here keeps state or waits. The proof that these two rules together keep every lag within ``max_lag`` is in
``docs/staleness.md``. Letters: B groups a learner step consumes, u engine version, v learner version, w version that
is planned next, k learner steps from w on.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessRule:
    """The bound and the unit it is counted in.

    Attributes:
        max_lag: Learner steps between a group's oldest token and its consumption, at most. 0 is synchronous.
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

    def admits(self, *, outstanding: int, learner_version: int, engine_version: int) -> bool:
        """Whether one more group may begin on an engine that serves ``engine_version``.

        Args:
            outstanding: Groups leased, stored or planned: admitted, and neither consumed nor dropped.
            learner_version: Steps committed.
            engine_version: u, at most ``learner_version``.

        Example: with B = 4 and max_lag = 1, an engine at the learner's version is admitted while fewer than 8 groups
        are outstanding, one that is a version behind while fewer than 4 are.
        """
        behind = learner_version - engine_version
        return outstanding + behind * self.groups_per_step < (self.max_lag + 1) * self.groups_per_step

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


class Window:
    """What a batch may still take, while it is being filled in any order of preference.

    A batch takes ready groups one by one. A group due at w + k may be taken while, for every j < k, the seats left
    after it suffice for the groups due at w + j or earlier that must be in. Once a deadline is closed it stays
    closed, so filling a batch costs O(B·max_lag).
    """

    def __init__(self, required: list[int], seats: int) -> None:
        self._slack = [seats - number for number in required]
        self._last = next((j for j, slack in enumerate(self._slack) if slack <= 0), len(self._slack))

    @property
    def last(self) -> int:
        """Largest k whose groups may be taken now."""
        return self._last

    def take(self, k: int) -> None:
        """Seat a group due at w + k."""
        for j in range(min(k, len(self._slack))):
            self._slack[j] -= 1
            if self._slack[j] <= 0 and j < self._last:
                self._last = j
