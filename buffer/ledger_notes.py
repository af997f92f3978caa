"""Records the ledger for the run's profile: one stamp per group event, and the ledger's counts.

`Ledger.on_applied` calls `LedgerNotes.note` with every command; the service calls `levels` once per burst of messages.
"""

import time
from collections.abc import Iterable
from typing import Any

from asyncrl.core.record import NONE, GroupEvent, LevelName, Recorder

from . import commands
from .account import WORKER_DIED
from .ledger import Ledger

LANE = "buffer"


class LedgerNotes:
    """Writes group events and counts to the recorder of this process."""

    def __init__(self, ledger: Ledger, recorder: Recorder) -> None:
        self._ledger = ledger
        self._recorder = recorder
        self._planned: dict[int, tuple[int, ...]] = {}

    def note(self, command: commands.Command[Any, Any], outcome: Any) -> None:
        """Stamp the groups that a command moved."""
        match outcome:
            case commands.Granted():
                for lease in outcome.leases:
                    self._stamp_lease(lease)
            case commands.PutOutcome():
                self._stamp_put(command, outcome)
            case commands.Released(was_running=True):
                self._stamp_released(command, outcome)
            case commands.TakenBack() | commands.Lost() | commands.DroppedStore():
                self._stamp_requeued(command, outcome)
            case commands.Reserved() | commands.Rewound():
                self._stamp_requeued(command, outcome)
            case commands.Planned():
                self._stamp_planned(outcome)
            case commands.Committed():
                self._planned.pop(outcome.version, None)
                self._stamp_all(GroupEvent.trained, outcome.group_ids, version=outcome.version)
                self._recorder.level(LevelName.cpu, time.process_time_ns() // 1000)

    def levels(self, *, held_bytes: int) -> None:
        """Record the counts that have changed."""
        ledger, level = self._ledger, self._recorder.level
        level(LevelName.queued, ledger.groups.num_queued, lane=LANE)
        level(LevelName.leased, ledger.groups.num_leased, lane=LANE)
        level(LevelName.stored, ledger.groups.num_stored, lane=LANE)
        level(LevelName.planned, ledger.groups.num_planned, lane=LANE)
        level(LevelName.budget, ledger.budget, lane=LANE)
        level(LevelName.full, int(not ledger.room.has_room()), lane=LANE)
        level(LevelName.version, ledger.learner_version, lane=LANE)
        level(LevelName.bytes, held_bytes, lane=LANE)

    def _stamp_lease(self, lease: commands.GrantedLease) -> None:
        self._recorder.stamp(
            GroupEvent.lease,
            lease.group_id,
            attempt=lease.attempt,
            version=lease.engine_version,
            lane=LANE,
            deadline=lease.deadline,
            inherited=lease.num_inherited,
        )

    def _stamp_put(self, command: Any, outcome: commands.PutOutcome) -> None:
        summary = command.summary
        match outcome.result:
            case commands.PutResult.stored:
                event, details = GroupEvent.stored, {"bytes": command.num_bytes}
            case commands.PutResult.filtered:
                event, details = GroupEvent.dropped, {"reason": outcome.reason}
            case commands.PutResult.too_old:
                event, details = GroupEvent.requeued, {"reason": "version_too_old"}
            case _:  # an earlier event settled this attempt
                return
        self._recorder.stamp(
            event,
            summary.group_id,
            attempt=summary.attempt,
            version=summary.oldest_version,
            lane=LANE,
            newest=summary.newest_version,
            learner=self._ledger.learner_version,
            tokens=summary.num_tokens,
            prompt_tokens=summary.num_prompt_tokens,
            lengths=summary.response_lengths,
            rewards=summary.rewards,
            **details,
        )

    def _stamp_requeued(self, command: Any, outcome: Any) -> None:
        match outcome:
            case commands.TakenBack():
                self._stamp_all(GroupEvent.dropped, outcome.dropped, reason=WORKER_DIED)
                reason = "silent" if isinstance(command, commands.TakeBack) else "expired"
                queued = [group_id for group_id in outcome.group_ids if group_id not in outcome.dropped]
                self._stamp_all(GroupEvent.requeued, queued, reason=reason)
                return
            case commands.Lost() | commands.DroppedStore():
                reason = "store_lost"
            case commands.Rewound():
                self._planned.clear()
                reason = "rewound"
            case _:
                self._stamp_all(GroupEvent.requeued, outcome.evicted, reason="no_room")
                return
        self._stamp_all(GroupEvent.requeued, outcome.group_ids, reason=reason)

    def _stamp_released(self, command: Any, outcome: commands.Released) -> None:
        event = GroupEvent.dropped if outcome.is_dropped else GroupEvent.requeued
        self._recorder.stamp(
            event,
            command.group_id,
            attempt=command.attempt,
            lane=LANE,
            reason=command.reason,
            tokens=command.num_tokens,
        )

    def _stamp_planned(self, outcome: commands.Planned) -> None:
        """Stamp a new batch. A repeated plan returns the same batch, unless a loss dissolved it."""
        if outcome.group_ids and self._planned.get(outcome.version) != outcome.group_ids:
            self._planned[outcome.version] = outcome.group_ids
            self._stamp_all(GroupEvent.planned, outcome.group_ids, version=outcome.version)
            event = GroupEvent.dropped if outcome.is_dropped else GroupEvent.requeued
            self._stamp_all(event, outcome.given_up, reason="stale")

    def _stamp_all(self, event: GroupEvent, group_ids: Iterable[int], *, version: int = NONE, **details: Any) -> None:
        for group_id in group_ids:
            self._recorder.stamp(event, group_id, attempt=NONE, version=version, lane=LANE, **details)
