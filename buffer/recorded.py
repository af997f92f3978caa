"""A ledger that writes each operation to a journal before it does it, and replays them when a server starts again."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from asyncrl.protocol.errors import AsyncRLError
from asyncrl.protocol.types import GroupSummary, Plan

from .batches import summary_from
from .journal import Frames, Journal, Recovered
from .leases import Progress, PutResult, RunningLease
from .ledger import Ledger

logger = logging.getLogger(__name__)


class RecordedLedger(Ledger):
    """`Ledger`, durable. Operations that change nothing are not written; renewals are not either."""

    _journal: Journal | None = None
    _forgettable: Sequence[int] = ()

    def attach(self, journal: Journal, *, now: float) -> Mapping[str, Mapping[int, Frames]]:
        """Take up what the journal holds, and write to it from now on; every running lease starts afresh.

        Returns:
            The frames it holds, those of finished groups among them: kind to group id to frames.
        """
        recovered = journal.recover()
        if recovered.snapshot is not None:
            self.restore(recovered.snapshot)
        self._replay(recovered)
        for lease in self.state.leases.all():
            self.state.leases.extend(lease, now + self._lease_s)
        self.drain_revocations()
        self._journal = journal
        self._forgettable = self.drain_finished()
        return recovered.frames

    def _replay(self, recovered: Recovered) -> None:
        for name, arguments in recovered.operations:
            try:
                getattr(self, f"_replay_{name}")(*arguments)
            except AsyncRLError as error:
                logger.debug("replayed %s%s: %s", name, arguments, error)

    def _record(
        self, name: str, arguments: Sequence[Any], frames: Mapping[tuple[str, int], Frames] | None = None
    ) -> None:
        if self._journal is not None:
            self._journal.record(name, arguments, frames)

    def enqueue(self, group_ids: Iterable[int], prompts: Mapping[int, Frames] | None = None) -> list[int]:
        """See `Ledger.enqueue`; ``prompts`` are kept with the operation."""
        group_ids = list(group_ids)
        frames = {("prompt", group_id): parts for group_id, parts in (prompts or {}).items()}
        self._record("enqueue", [group_ids], frames)
        return super().enqueue(group_ids)

    def lease(
        self, engine_version: int, max_groups: int, *, owner: bytes = b"", request_id: int = 0, now: float
    ) -> list[RunningLease]:
        """See `Ledger.lease`."""
        self.check_engine_version(engine_version)
        if max_groups < 1 or not self.state.num_queued or not self.state.admits(engine_version):
            return []
        self._record("lease", [engine_version, max_groups, owner, request_id, now])
        return super().lease(engine_version, max_groups, owner=owner, request_id=request_id, now=now)

    def take_back(self, lease: RunningLease) -> None:
        """See `Ledger.take_back`."""
        self._record("take_back", [lease.group_id, lease.attempt])
        super().take_back(lease)

    def save_progress(
        self, group_id: int, attempt: int, progress: Progress, frames: Frames = (), *, continued: bool = True
    ) -> None:
        """See `Ledger.save_progress`; ``frames`` are kept with the operation."""
        if self.holds(group_id, attempt):
            arguments = [group_id, attempt, asdict(progress), continued]
            self._record("save_progress", arguments, {("progress", group_id): frames})
        super().save_progress(group_id, attempt, progress, continued=continued)

    def put(self, summary: GroupSummary, payload: Frames = (), *, continued: bool = True) -> PutResult:
        """See `Ledger.put`; ``payload`` is kept with the operation if its lease is held."""
        if self._journal is None:
            return super().put(summary, continued=continued)
        frames = {("payload", summary.group_id): payload} if self.holds(summary.group_id, summary.attempt) else None
        self._record("put", [asdict(summary), continued], frames)
        return super().put(summary, continued=continued)

    def release(self, group_id: int, attempt: int, *, num_tokens: int, reason: str, continued: bool = True) -> None:
        """See `Ledger.release`."""
        self._record("release", [group_id, attempt, num_tokens, reason, continued])
        super().release(group_id, attempt, num_tokens=num_tokens, reason=reason, continued=continued)

    def plan(self, version: int) -> Plan | None:
        """See `Ledger.plan`."""
        self.check_plan(version)
        if version not in self.state.batches.plans:
            if not self.can_plan(version):
                return None
            self._record("plan", [version])
        return super().plan(version)

    def commit(self, version: int) -> list[int]:
        """See `Ledger.commit`; afterwards a snapshot takes the place of the operations."""
        self._record("commit", [version])
        group_ids = super().commit(version)
        if self._journal is not None and group_ids:
            try:
                self._journal.compact(self.snapshot(), forget=[*self._forgettable, *group_ids])
                self._forgettable = ()
            except AsyncRLError as error:
                logger.warning("the journal keeps its operations: %s", error)
        return group_ids

    def drain_finished(self) -> list[int]:
        """See `Ledger.drain_finished`."""
        finished = super().drain_finished()
        if self._journal is not None:
            self._forgettable = [*self._forgettable, *finished]
        return finished

    def _replay_enqueue(self, group_ids: list[int]) -> None:
        super().enqueue(group_ids)

    def _replay_lease(self, version: int, max_groups: int, owner: bytes, request_id: int, now: float) -> None:
        super().lease(version, max_groups, owner=owner, request_id=request_id, now=now)

    def _replay_take_back(self, group_id: int, attempt: int) -> None:
        lease = self.state.leases.held(group_id, attempt)
        if lease is not None:
            super().take_back(lease)

    def _replay_save_progress(self, group_id: int, attempt: int, progress: dict[str, int], continued: bool) -> None:
        super().save_progress(group_id, attempt, Progress(**progress), continued=continued)

    def _replay_put(self, summary: dict[str, Any], continued: bool) -> None:
        super().put(summary_from(summary), continued=continued)

    def _replay_release(self, group_id: int, attempt: int, num_tokens: int, reason: str, continued: bool) -> None:
        super().release(group_id, attempt, num_tokens=num_tokens, reason=reason, continued=continued)

    def _replay_plan(self, version: int) -> None:
        super().plan(version)

    def _replay_commit(self, version: int) -> None:
        super().commit(version)
