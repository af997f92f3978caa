"""Ends attempts (the tries of workers to generate a prompt group), and ends groups that are consumed or dropped."""

from collections.abc import Mapping

from asyncrl.core.errors import NotLeaseOwner, UnknownGroup

from . import operations
from .account import DISCARDED_PREFIX, NO_ROOM, REWOUND, Account, AttemptHistory, EndedAttempt
from .groups import Group, GroupState, GroupTable


class Attempts:
    """Ends attempts and groups in a `GroupTable`, and counts their tokens in an `Account`."""

    def __init__(self, groups: GroupTable, history: AttemptHistory, account: Account) -> None:
        self._groups, self._history, self._account = groups, history, account
        self._revocations: list[tuple[bytes, operations.Revoked]] = []
        self._newly_finished: list[int] = []

    def held(self, group_id: int, attempt: int, sender: bytes | None) -> Group | None:
        """Return the record of a group if a worker generates it now as attempt number ``attempt``, else None.

        Raises `NotLeaseOwner` if the attempt's lease (the right to generate the group) does not belong to the client
        ``sender``. A ``sender`` of None skips this check.
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
        """Check that a worker has leased the group before, as attempt number ``attempt``.

        Raises `UnknownGroup` otherwise. ``remedy`` is the end of the error's message.
        """
        group = self._groups.get(group_id)
        known = self._history.num_attempts(group_id) if group is None else group.num_attempts
        if not 0 <= attempt < known:
            raise UnknownGroup(f"group {group_id} attempt {attempt} was never leased; {remedy}")

    def hand_on(self, group: Group) -> None:
        """End the lease of a running group, and put the group's prompt at the head of the queue.

        The saved prefix (the tokens so far) stays with the prompt, if the prefix was not evicted.
        """
        if group.is_evicted:
            self._account.give_up(NO_ROOM, num_saved=group.num_saved, num_inherited=group.num_inherited)
        else:
            self._account.hand_on(num_saved=group.num_saved, num_inherited=group.num_inherited)
        self._groups.requeue(group, keeps_progress=not group.is_evicted)

    def settle_prefix(self, group: Group, num_tokens: int, continued: bool) -> None:
        """Count the inherited prefix (saved tokens of an earlier attempt) as dropped if the worker did not continue it.

        ``continued`` is the worker's statement whether it continued the prefix. ``num_tokens`` is the number of tokens
        in the worker's report. If the report has fewer tokens than the prefix, the prefix always counts as dropped.
        """
        if not continued or num_tokens < group.num_inherited:
            self._account.drop_prefix(group.num_inherited, DISCARDED_PREFIX)
            group.num_inherited = 0

    def settle_owed(self, group_id: int, attempt: int) -> EndedAttempt | None:
        """Return the record of an ended attempt whose worker now reports its tokens, and forget the record.

        Returns None if no report of this attempt is expected, or if the worker was declared dead.
        """
        owed = self._history.settle(group_id, attempt)
        return None if owed is None or owed.owner in self._account.buried else owed

    def revoke(self, group: Group, reason: str) -> None:
        """Record that a running group's attempt ended early, and queue a notice to its worker for `drain_revocations`.

        The worker still has to report the attempt's tokens. These tokens count as dropped for ``reason``.
        """
        ended = EndedAttempt(owner=group.owner, owes_report=True, num_counted=group.num_saved, reason=reason)
        self._history.end(group.group_id, group.attempt, ended)
        self._revocations.append((group.owner, operations.Revoked(group.group_id, group.attempt)))

    def give_up(self, group: Group, *, is_dropped: bool, reason: str) -> None:
        """Revoke the lease of a running group, and count the group's saved tokens as dropped for ``reason``.

        If ``is_dropped``, the group ends. Otherwise its prompt goes to the head of the queue.
        """
        self.revoke(group, reason)
        with self._account.settling(group.owner):
            self._account.give_up(reason, num_saved=group.num_saved, num_inherited=group.num_inherited)
        if is_dropped:
            self.drop(group, stored=False)
            self._account.groups_dropped[reason] += 1
        else:
            self._groups.requeue(group, keeps_progress=False)

    def drop(self, group: Group, *, stored: bool) -> None:
        """Remove a running group, and remember it as finished.

        ``stored`` is whether the result of the latest attempt was accepted.
        """
        self._groups.finish(group)
        self.finish(group, stored=stored)

    def finish(self, group: Group, *, stored: bool, is_kept: bool = False) -> None:
        """Remember a group as finished, because it was consumed or dropped.

        ``stored`` is whether the result of the latest attempt was accepted. If ``is_kept``, the prompt and the
        trajectories stay for a further training step.
        """
        self._history.finish(group.group_id, num_attempts=group.num_attempts, stored=stored)
        if not is_kept:
            self._newly_finished.append(group.group_id)

    def evict(self, group: Group, reason: str) -> None:
        """Drop the trajectories of a stored group, or the saved prefix (tokens so far) of a queued or running group.

        ``reason`` names the cause in the counts of dropped tokens. If the learner has already trained on the group,
        the group's tokens still count as trained. No further learner step trains on the group.
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
        """End the lease of a group and queue its prompt. If the group has no lease, `evict` its tokens.

        The tokens of the groups in ``lost`` are dropped. ``lost`` maps each of these group ids to the reason. A leased
        group that is not in ``lost`` keeps its saved prefix. A group without a lease must be in ``lost``.
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
        """Forget, for all stored groups, which learner steps from ``version`` on have trained on them.

        If no earlier step trained on a group, the group's tokens count as buffered again, not as trained.
        """
        for group in self._groups:
            kept = tuple(use for use in group.uses if use < version)
            if len(kept) < len(group.uses):
                group.set_uses(kept)
                if not kept:
                    self._account.unlearn(group.result)

    def drain_revocations(self) -> list[tuple[bytes, operations.Revoked]]:
        """Return (client id, message) pairs for the leases revoked since the previous call.

        Each message tells the client which lease the client has lost.
        """
        revocations, self._revocations = self._revocations, []
        return revocations

    def drain_finished(self) -> list[int]:
        """Return the ids of the groups finished since the previous call.

        The caller may delete the prompts and trajectories of these groups.
        """
        finished, self._newly_finished = self._newly_finished, []
        return finished
