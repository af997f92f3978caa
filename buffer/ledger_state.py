"""What the ledger knows: its parts, the numbers derived from them, and their snapshot. It decides nothing."""

from collections.abc import Mapping
from typing import Any

from asyncrl.protocol.types import BufferStats

from .account import Account
from .attempts import Attempts
from .batches import Batches
from .leases import RunningLeases
from .orders import Preference
from .queue import PromptQueue
from .staleness import StalenessRule

SNAPSHOT_FORMAT = 3


class LedgerState:
    """Prompts that wait, leases that run, groups that are stored, and the account of their tokens.

    Args:
        rule: The staleness bound.
        prefer: Which stored groups a batch prefers.
        first_version: Learner version to begin at.

    Attributes:
        learner_version: v, steps committed.
    """

    def __init__(self, rule: StalenessRule, prefer: Preference, *, first_version: int = 0) -> None:
        self.rule = rule
        self.learner_version = first_version
        self.account = Account()
        self.attempts = Attempts()
        self.queue = PromptQueue()
        self.leases = RunningLeases()
        self.batches = Batches(rule, prefer)

    @property
    def num_queued(self) -> int:
        """Groups that wait for admission."""
        return len(self.queue)

    @property
    def num_leased(self) -> int:
        """Groups that are being generated."""
        return len(self.leases)

    @property
    def num_stored(self) -> int:
        """Groups that wait for a plan."""
        return self.batches.num_ready

    @property
    def num_planned(self) -> int:
        """Groups that wait for the commit of their step."""
        return len(self.batches) - self.batches.num_ready

    @property
    def outstanding(self) -> int:
        """Groups admitted, and neither consumed nor dropped."""
        return len(self.leases) + len(self.batches)

    @property
    def next_plan(self) -> int:
        """w, the version to be planned next."""
        return self.learner_version + len(self.batches.plans)

    def due(self) -> dict[int, int]:
        """Deadline to number of groups leased or stored, not yet planned."""
        due = self.batches.ready_due()
        for deadline, number in self.leases.due().items():
            due[deadline] = due.get(deadline, 0) + number
        return due

    def required(self) -> list[int]:
        """How many groups of each deadline the next batch must hold; see `StalenessRule.required`."""
        return self.rule.required(self.due(), version=self.next_plan)

    def missing(self) -> list[int]:
        """How many running groups of each deadline the next batch would have to hold."""
        return self.rule.missing(self.due(), self.batches.ready_due(), version=self.next_plan)

    def admits(self, engine_version: int) -> bool:
        """Whether a group may begin now on an engine that serves ``engine_version``."""
        return self.rule.admits(
            outstanding=self.outstanding, learner_version=self.learner_version, engine_version=engine_version
        )

    def unfinished(self, *, now: float) -> list[dict[str, Any]]:
        """What is known of every group that is leased, stored or planned, for people."""
        version = self.learner_version
        return self.leases.describe(now, version=version) + self.batches.describe(version)

    def stats(self, *, stored_bytes: int, held_bytes: int, leases_waiting: int) -> BufferStats:
        """The totals, with what the server adds."""
        groups = {
            "queued": self.num_queued,
            "leased": self.num_leased,
            "stored": self.num_stored,
            "planned": self.num_planned,
        }
        return self.account.stats(
            learner_version=self.learner_version,
            groups=groups,
            stored_bytes=stored_bytes,
            held_bytes=held_bytes,
            leases_waiting=leases_waiting,
        )

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain values, for `restore`."""
        return {
            **self._header(),
            "learner_version": self.learner_version,
            "queue": self.queue.snapshot(),
            "leases": self.leases.snapshot(),
            "batches": self.batches.snapshot(),
            "attempts": self.attempts.snapshot(),
            "account": self.account.snapshot(),
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take what a snapshot holds into this new state.

        Raises:
            ValueError: the snapshot has another format, or another bound or batch size.
        """
        for name, expected in self._header().items():
            if values.get(name) != expected:
                raise ValueError(
                    f"the ledger's snapshot has {name}={values.get(name)}, expected {expected}; resume with the "
                    "options and the release that wrote it, or start without it"
                )
        self.learner_version = values["learner_version"]
        self.queue.restore(values["queue"])
        self.leases.restore(values["leases"])
        self.batches.restore(values["batches"])
        self.attempts.restore(values["attempts"])
        self.account.restore(values["account"])

    def _header(self) -> dict[str, int]:
        """What must be the same where a snapshot is written and read."""
        return {
            "format": SNAPSHOT_FORMAT,
            "max_lag": self.rule.max_lag,
            "groups_per_step": self.rule.groups_per_step,
        }
