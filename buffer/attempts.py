"""The steps that end attempts at prompt groups, and that end the groups themselves."""

from collections.abc import Mapping

from asyncrl.core.errors import NotLeaseOwner, UnknownGroup

from . import commands
from .account import DISCARDED_PREFIX, NO_ROOM, REWOUND, Account, AttemptHistory, EndedAttempt
from .groups import Group, GroupState, GroupTable


class Attempts:
    """Ends attempts and groups in a `GroupTable`, and counts their tokens in an `Account`."""

    def __init__(self, groups: GroupTable, history: AttemptHistory, account: Account) -> None:
        self._groups, self._history, self._account = groups, history, account
        self._revocations: list[tuple[bytes, commands.Revoked]] = []
        self._newly_finished: list[int] = []

    def held(self, group_id: int, attempt: int, sender: bytes | None) -> Group | None:
        """Return the group if this attempt is running, else None.

        Raises `NotLeaseOwner` if ``sender`` does not hold the lease.
        """
        group = self._groups.running(group_id, attempt)
        ended = self._history.of(group_id, attempt) if group is None else group
        owner = b"" if ended is None else ended.owner
        if sender is not None and owner and sender != owner:
            raise NotLeaseOwner(
                f"a report of group {group_id} attempt {attempt} came from client {sender.hex()[:8]}, but its lease "
                f"belongs to {owner.hex()[:8]}; only its owner may report it"
            )
        return group

    def check_was_leased(self, group_id: int, attempt: int, remedy: str) -> None:
        """Raise `UnknownGroup` unless the attempt was leased."""
        group = self._groups.get(group_id)
        known = self._history.num_attempts(group_id) if group is None else group.num_attempts
        if not 0 <= attempt < known:
            raise UnknownGroup(f"group {group_id} attempt {attempt} was never leased; {remedy}")

    def hand_on(self, group: Group) -> None:
        """Queue the prompt of a lease that ended. Keep the saved prefix unless it was evicted."""
        if group.is_evicted:
            self._account.give_up(NO_ROOM, num_saved=group.num_saved, num_inherited=group.num_inherited)
        else:
            self._account.hand_on(num_saved=group.num_saved, num_inherited=group.num_inherited)
        self._groups.requeue(group, keeps_progress=not group.is_evicted)

    def settle_prefix(self, group: Group, num_tokens: int, continued: bool) -> None:
        """Count the inherited prefix of a lease as dropped, unless the worker's report contains the prefix."""
        if not continued or num_tokens < group.num_inherited:
            self._account.drop_prefix(group.num_inherited, DISCARDED_PREFIX)
            group.num_inherited = 0

    def settle_owed(self, group_id: int, attempt: int) -> EndedAttempt | None:
        """Return the attempt that owed this report. Return None if no attempt did, or if its owner is dead."""
        owed = self._history.settle(group_id, attempt)
        return None if owed is None or owed.owner in self._account.buried else owed

    def revoke(self, group: Group, reason: str) -> None:
        """Revoke a lease. Its worker still has to report the tokens of the attempt."""
        ended = EndedAttempt(owner=group.owner, owes_report=True, num_counted=group.num_saved, reason=reason)
        self._history.end(group.group_id, group.attempt, ended)
        self._revocations.append((group.owner, commands.Revoked(group.group_id, group.attempt)))

    def give_up(self, group: Group, *, is_dropped: bool, reason: str) -> None:
        """Revoke a running group and drop its tokens. Drop its prompt if ``is_dropped``; otherwise queue the prompt."""
        self.revoke(group, reason)
        with self._account.settling(group.owner):
            self._account.give_up(reason, num_saved=group.num_saved, num_inherited=group.num_inherited)
        if is_dropped:
            self.drop(group, stored=False)
            self._account.groups_dropped[reason] += 1
        else:
            self._groups.requeue(group, keeps_progress=False)

    def drop(self, group: Group, *, stored: bool) -> None:
        """Finish a running group."""
        self._groups.finish(group)
        self.finish(group, stored=stored)

    def finish(self, group: Group, *, stored: bool, is_kept: bool = False) -> None:
        """Remember a group that was consumed or dropped. If ``is_kept``, its frames stay for a further use."""
        self._history.finish(group.group_id, num_attempts=group.num_attempts, stored=stored)
        if not is_kept:
            self._newly_finished.append(group.group_id)

    def evict(self, group: Group, reason: str) -> None:
        """Drop the trajectories of a stored group, or the saved prefix of a queued or running group.

        If the learner has already trained on the group, only its further uses are lost.
        """
        if group.uses:
            self._groups.evict(group)
            self._newly_finished.append(group.group_id)
        elif group.summary is not None:
            self._account.evict(group.summary, reason)
            self._groups.evict(group)
        elif group.state is GroupState.queued:
            self._account.drop_prefix(group.num_saved, reason)
            self._groups.space.set_progress(group, None, 0)
        else:
            self._groups.space.evict_prefix(group)

    def take_back(self, group: Group, lost: Mapping[int, str]) -> None:
        """Evict a group that has no lease. For a leased group, end the lease and queue the prompt.

        ``lost`` maps group ids to reasons. The tokens of these groups are dropped.
        """
        if group.state is not GroupState.leased:
            self.evict(group, lost[group.group_id])
        elif group.group_id in lost:
            self.give_up(group, is_dropped=False, reason=REWOUND)
        else:
            self.revoke(group, REWOUND)
            with self._account.settling(group.owner):
                self.hand_on(group)

    def forget_uses(self, version: int) -> None:
        """Forget the uses of stored groups at ``version`` and later."""
        for group in self._groups:
            kept = tuple(use for use in group.uses if use < version)
            if len(kept) < len(group.uses):
                group.set_uses(kept)
                if not kept:
                    self._account.unlearn(group.result)

    def drain_revocations(self) -> list[tuple[bytes, commands.Revoked]]:
        """Return the leases revoked since the last call, each with its owner."""
        revocations, self._revocations = self._revocations, []
        return revocations

    def drain_finished(self) -> list[int]:
        """Return the groups finished since the last call. The caller may delete their prompts and trajectories."""
        finished, self._newly_finished = self._newly_finished, []
        return finished
