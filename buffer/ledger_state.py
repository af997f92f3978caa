"""What the ledger knows, and how a decision changes it. It decides nothing, so a replay cannot decide anew."""

from collections.abc import Mapping
from typing import Any

from asyncrl.core.types import BufferStats

from . import commands
from .account import (
    DISCARDED_PREFIX,
    NO_ROOM,
    REWOUND,
    STALE_PREFIX,
    STORE_LOST,
    VERSION_TOO_OLD,
    WORKER_DIED,
    Account,
    AttemptHistory,
    EndedAttempt,
    IdSet,
)
from .groups import Group, GroupState, GroupTable

SNAPSHOT_FORMAT = 9


class LedgerState:
    """Every group, the account of their tokens, and what is remembered of those that are finished.

    Args:
        first_version: Learner version to begin at.
        num_stores: Stores that trajectories are spread over.

    Attributes:
        learner_version: v, steps committed.
        incarnation: How often the learner was taken back to a checkpoint.
        account: Where every token went.
    """

    def __init__(self, *, first_version: int, num_stores: int) -> None:
        self.learner_version = first_version
        self.incarnation = 0
        self._groups = GroupTable(num_stores=num_stores)
        self._history = AttemptHistory()
        self.account = Account()
        self._revocations: list[commands.Revocation] = []
        self._finished: list[int] = []

    def enact(self, command: commands.Command[Any], outcome: Any) -> None:
        """Do what was decided."""
        _ENACT[type(command)](self, command, outcome)

    def _queue(self, command: commands.Enqueue, outcome: commands.Queued) -> None:
        for group_id in outcome.group_ids:
            self._groups.enqueue(group_id, num_attempts=self._history.num_attempts(group_id))

    def _grant(self, command: commands.LeaseGroups, outcome: commands.Granted) -> None:
        for granted in outcome.leases:
            group = self._get(granted.group_id)
            if granted.progress is None and group.progress is not None:
                self.account.drop_prefix(group.num_saved, STALE_PREFIX)
            self._groups.lease(group, granted)

    def _renew(self, command: commands.Renew, outcome: commands.Renewed) -> None:
        group = self._groups.running(command.group_id, command.attempt)
        if group is not None and outcome.expires_at is not None:
            self._groups.extend(group, outcome.expires_at)

    def _save(self, command: commands.SavePrefix, outcome: commands.Saved) -> None:
        group = self._groups.running(command.group_id, command.attempt)
        assert group is not None
        self._settle_prefix(group, command.progress.num_tokens, command.continued)
        self._groups.set_progress(group, command.progress, command.num_bytes)

    def _settle_prefix(self, group: Group, num_tokens: int, continued: bool) -> None:
        """A prefix that is not part of what its worker reports is gone: count it as dropped."""
        if continued and num_tokens >= group.num_inherited:
            return
        self.account.drop_prefix(group.num_inherited, DISCARDED_PREFIX)
        group.num_inherited = 0

    def _take_back(self, command: commands.Expire | commands.TakeBack, outcome: commands.TakenBack) -> None:
        for group_id in outcome.group_ids:
            group = self._get(group_id)
            if isinstance(command, commands.TakeBack):
                self._groups.count_death(group)
            if group_id in outcome.dropped:
                self._give_up(group, is_dropped=True, reason=WORKER_DIED)
                continue
            self._revoke(group, reason="expired")
            with self.account.settling(group.owner):
                self._hand_on(group)
        if isinstance(command, commands.TakeBack) and outcome.num_lost is not None:
            self.account.bury(command.owner, outcome.num_lost)

    def _hand_on(self, group: Group) -> None:
        """Queue the prompt of a lease that ended, with what was saved of it."""
        if group.is_evicted:
            self.account.give_up(NO_ROOM, num_saved=group.num_saved, num_inherited=group.num_inherited)
        else:
            self.account.hand_on(num_saved=group.num_saved, num_inherited=group.num_inherited)
        self._groups.requeue(group, keeps_progress=not group.is_evicted)

    def _reserve(self, command: commands.Reserve, outcome: commands.Reserved) -> None:
        for group_id in outcome.evicted:
            self._evict(self._get(group_id), NO_ROOM)
        group = self._groups.running(command.group_id, command.attempt)
        if group is not None:
            self._groups.set_bytes(group, command.num_bytes, outcome.store)

    def _get(self, group_id: int) -> Group:
        group = self._groups.get(group_id)
        assert group is not None
        return group

    def _lose(self, command: commands.LoseGroups, outcome: commands.Lost) -> None:
        self._groups.dissolve(outcome.dissolved)
        for group_id in outcome.group_ids:
            self._evict(self._get(group_id), STORE_LOST)
        for group_id in outcome.unsent:
            self._groups.set_bytes(self._get(group_id), 0)
        for group_id in outcome.missing:
            self._get(group_id).is_missing = True

    def _add_store(self, command: commands.AddStore, outcome: commands.AddedStore) -> None:
        if outcome.is_new:
            self._groups.add_store(command.address, command.host)

    def _drop_store(self, command: commands.DropStore, outcome: commands.DroppedStore) -> None:
        self._groups.stores[command.store].is_gone = True
        for group in self._groups.of_state(GroupState.planned):
            group.is_missing = group.is_missing or group.store == command.store
        for group_id in outcome.reserved:
            self._groups.set_bytes(self._get(group_id), 0)
        for group_id in outcome.group_ids:
            self._evict(self._get(group_id), STORE_LOST)

    def _evict(self, group: Group, reason: str) -> None:
        """The trajectories of a group are gone, or its saved prefix."""
        if group.summary is not None:
            self.account.evict(group.summary, reason)
            self._groups.evict(group)
        elif group.state is GroupState.queued:
            self.account.drop_prefix(group.num_saved, reason)
            self._groups.set_progress(group, None, 0)
        else:
            self._groups.evict_prefix(group)

    def _revoke(self, group: Group, *, reason: str) -> None:
        ended = EndedAttempt(owner=group.owner, owes_report=True, num_counted=group.num_saved, reason=reason)
        self._history.end(group.group_id, group.attempt, ended)
        self._revocations.append(commands.Revocation(owner=group.owner, group_id=group.group_id, attempt=group.attempt))

    def _put(self, command: commands.Put, outcome: commands.PutOutcome) -> None:
        summary, result = command.summary, outcome.result
        if result is commands.PutResult.duplicate:
            self.account.puts_refused["duplicate"] += 1
            return
        group = self._groups.running(summary.group_id, summary.attempt)
        if group is None:
            self._count_late(command)
            return
        with self.account.settling(group.owner):
            self._settle(group, command, outcome)

    def _settle(self, group: Group, command: commands.Put, outcome: commands.PutOutcome) -> None:
        """A running group is stored, dropped by a filter, or refused."""
        summary, result = command.summary, outcome.result
        self._settle_prefix(group, summary.num_tokens + command.num_left_out, command.continued)
        self.account.leave_out(command.num_left_out)
        num_inherited = group.num_inherited
        if result is commands.PutResult.stored:
            self._groups.set_bytes(group, command.num_bytes)
            group.digest = command.digest
            self._groups.store(group, summary, outcome.rank)
            self.account.store(summary, num_inherited=num_inherited)
        elif result is commands.PutResult.filtered:
            self._drop(group, stored=True)
            self.account.filter(summary, outcome.reason, num_inherited=num_inherited)
        else:
            ended = EndedAttempt(owner=group.owner, refusal=outcome.refusal)
            self._history.end(group.group_id, group.attempt, ended)
            self._groups.requeue(group, keeps_progress=False)
            self.account.give_up(VERSION_TOO_OLD, num_saved=0, num_inherited=num_inherited)
            self.account.refuse(summary, VERSION_TOO_OLD, num_counted=0)

    def _count_late(self, command: commands.Put) -> None:
        """A put whose lease was taken away: its tokens are dropped, the first time that it comes."""
        owed = self._settle_owed(command.summary.group_id, command.summary.attempt)
        if owed is not None:
            with self.account.settling(owed.owner):
                num_counted = owed.num_counted if command.continued else 0
                self.account.refuse(command.summary, owed.reason, num_counted=num_counted - command.num_left_out)

    def _settle_owed(self, group_id: int, attempt: int) -> EndedAttempt | None:
        """What an attempt owed, whose report came now; None if it owed nothing, or its owner is buried.

        The tokens of a buried owner are in the account already.
        """
        owed = self._history.settle(group_id, attempt)
        return None if owed is None or owed.owner in self.account.buried else owed

    def _release(self, command: commands.Release, outcome: commands.Released) -> None:
        group = self._groups.running(command.group_id, command.attempt)
        ended = self._history.of(command.group_id, command.attempt)
        attempt = ended if group is None else group
        if attempt is not None:
            with self.account.settling(attempt.owner):
                self._count_release(command, outcome)

    def _count_release(self, command: commands.Release, outcome: commands.Released) -> None:
        num_counted, reason = 0, command.reason
        if outcome.was_running:
            group = self._groups.running(command.group_id, command.attempt)
            assert group is not None
            num_counted = group.num_saved
            group.num_failures += command.max_failures > 0
            if outcome.is_dropped:
                self.account.give_up(reason, num_saved=group.num_saved, num_inherited=group.num_inherited)
                self.account.groups_dropped[reason] += 1
                self._drop(group, stored=False)
            else:
                self._hand_on(group)
        elif outcome.was_owed and (owed := self._settle_owed(command.group_id, command.attempt)) is not None:
            num_counted, reason = owed.num_counted, owed.reason
        else:
            return
        self.account.abandon(command.num_tokens, reason, num_counted=num_counted if command.continued else 0)

    def _plan(self, command: commands.PlanBatch, outcome: commands.Planned) -> None:
        if not outcome.group_ids or outcome.version in self._groups.plans:
            return
        for group_id in outcome.given_up:
            group = self._get(group_id)
            self._give_up(group, is_dropped=outcome.is_dropped)
        self._groups.plan(outcome.version, outcome.group_ids)

    def _give_up(self, group: Group, *, is_dropped: bool, reason: str = "stale") -> None:
        """A straggler: revoke it, then lease its prompt again or drop it."""
        self._revoke(group, reason=reason)
        with self.account.settling(group.owner):
            self.account.give_up(reason, num_saved=group.num_saved, num_inherited=group.num_inherited)
        if is_dropped:
            self._drop(group, stored=False)
            self.account.groups_dropped[reason] += 1
        else:
            self._groups.requeue(group, keeps_progress=False)

    def _drop(self, group: Group, *, stored: bool) -> None:
        """Finish a group that runs."""
        self._groups.finish(group)
        self._finish(group, stored=stored)

    def _finish(self, group: Group, *, stored: bool) -> None:
        self._history.finish(group.group_id, num_attempts=group.num_attempts, stored=stored)
        self._finished.append(group.group_id)

    def _commit(self, command: commands.Commit, outcome: commands.Committed) -> None:
        if not outcome.group_ids:
            return
        for group_id in outcome.group_ids:
            group = self._groups.stored(group_id)
            self._finish(group, stored=True)
            self.account.consume(group.result, outcome.version)
        self._groups.finish_batch(outcome.version)
        self.learner_version += 1

    def _rewind(self, command: commands.Rewind, outcome: commands.Rewound) -> None:
        if not outcome.is_new:
            return
        self._groups.dissolve(tuple(self._groups.plans))
        for group_id in sorted(outcome.group_ids, reverse=True):  # so that the first comes to the head
            group = self._get(group_id)
            if group.state is GroupState.leased:
                self._give_up(group, is_dropped=False, reason=REWOUND)
            else:
                self._evict(group, REWOUND)
        self._history.reopen(IdSet(command.finished))
        self.account.rewind(tokens_trained=command.tokens_trained, lags=dict(command.lag_histogram))
        self.learner_version, self.incarnation = command.version, command.incarnation

    # For people and for the server

    def _describe_leased(self, group: Group, now: float) -> dict[str, Any]:
        return {
            "group_id": group.group_id,
            "state": "leased",
            "attempt": group.attempt,
            "deadline": group.deadline,
            "lag": self.learner_version - group.engine_version,
            "owner": group.owner.hex()[:8],
            "num_saved_tokens": group.num_saved,
            "expires_in_s": round(group.expires_at - now, 1),
        }

    def _describe_stored(self, group: Group) -> dict[str, Any]:
        summary = group.result
        return {
            "group_id": group.group_id,
            "state": str(group.state),
            "attempt": summary.attempt,
            "deadline": group.deadline,
            "lag": self.learner_version - summary.oldest_version,
            "mean_reward": sum(summary.rewards) / max(1, len(summary.rewards)),
            "mean_length": sum(summary.response_lengths) / max(1, len(summary.response_lengths)),
        }

    def describe(self, now: float) -> list[dict[str, Any]]:
        """What is known of every group that is leased, stored or planned, for people."""
        leased = [self._describe_leased(group, now) for group in self._groups.leased()]
        stored = [group for group in self._groups if group.summary is not None]
        return leased + [self._describe_stored(group) for group in stored]

    def describe_stores(self) -> list[dict[str, Any]]:
        """What is known of every store, for people."""
        return [
            {"address": place.address, "host": place.host, "bytes": num_bytes, "is_gone": place.is_gone}
            for place, num_bytes in zip(self._groups.stores, self._groups.stored_bytes, strict=True)
        ]

    def drain_revocations(self) -> list[commands.Revocation]:
        """Leases taken away since the last call."""
        revocations, self._revocations = self._revocations, []
        return revocations

    def drain_ended(self) -> list[tuple[int, int]]:
        """Groups and attempts that ended since the last call, and whose trajectories a store may still hold."""
        ended, self._groups.ended_attempts = self._groups.ended_attempts, []
        return ended

    def drain_finished(self) -> list[int]:
        """Groups consumed or dropped since the last call; nobody needs their prompts and trajectories."""
        finished, self._finished = self._finished, []
        return finished

    def stats(self, *, stored_bytes: int = 0, held_bytes: int = 0, leases_waiting: int = 0) -> BufferStats:
        """The totals, with what the server adds."""
        groups = {
            "queued": self._groups.num_queued,
            "leased": self._groups.num_leased,
            "stored": self._groups.num_stored,
            "planned": self._groups.num_planned,
        }
        held = {"stored_bytes": stored_bytes, "held_bytes": held_bytes, "leases_waiting": leases_waiting}
        return self.account.stats(groups, learner_version=self.learner_version, **held)

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain values, for `restore`."""
        return {
            "format": SNAPSHOT_FORMAT,
            "learner_version": self.learner_version,
            "incarnation": self.incarnation,
            "groups": self._groups.snapshot(),
            "history": self._history.snapshot(),
            "account": self.account.snapshot(),
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take up a snapshot into this new state. Raises `ValueError` if the snapshot has another format."""
        if values.get("format") != SNAPSHOT_FORMAT:
            raise ValueError(
                f"the ledger's snapshot has format={values.get('format')}, expected {SNAPSHOT_FORMAT}; resume with the "
                "release that wrote it, or start without it"
            )
        self.learner_version, self.incarnation = values["learner_version"], values["incarnation"]
        self._groups.restore(values["groups"])
        self._history.restore(values["history"])
        self.account.restore(values["account"])


_ENACT: Mapping[type, Any] = {
    commands.Enqueue: LedgerState._queue,
    commands.LeaseGroups: LedgerState._grant,
    commands.Renew: LedgerState._renew,
    commands.SavePrefix: LedgerState._save,
    commands.Reserve: LedgerState._reserve,
    commands.Put: LedgerState._put,
    commands.Release: LedgerState._release,
    commands.Expire: LedgerState._take_back,
    commands.TakeBack: LedgerState._take_back,
    commands.LoseGroups: LedgerState._lose,
    commands.AddStore: LedgerState._add_store,
    commands.DropStore: LedgerState._drop_store,
    commands.PlanBatch: LedgerState._plan,
    commands.Commit: LedgerState._commit,
    commands.Rewind: LedgerState._rewind,
}
