"""Records how each attempt (a worker's try to generate a group) ended, and counts the attempt's tokens.

`Account` counts the policy tokens of a run as buffered, trained or dropped. `AttemptHistory` remembers the groups that
finished, and the attempts that ended without a stored group. With this history, the ledger counts a repeated message
only once. A full history forgets its oldest entries first. `Attempts` updates the table of groups, the account and the
history when an attempt or a group ends.
"""

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import convert, to_builtins

from asyncrl.core.errors import NotLeaseOwner, UnknownGroup
from asyncrl.core.types import BufferStats, GroupSummary

from .groups import Group, GroupState, GroupTable
from .operations import Revoked
from .records import Row

DISCARDED_PREFIX = "discarded_prefix"
STALE = "stale"
STALE_PREFIX = "stale_prefix"
NO_ROOM = "no_room"
STORE_LOST = "store_lost"
REWOUND = "rewound"
VERSION_TOO_OLD = "version_too_old"
LOST = "lost"
WORKER_DIED = "worker_died"
REWARD = "reward"
RESUME = "resume"

MAX_REMEMBERED = 4096
"""Largest length of each of three lists. One list holds the attempts that ended without a stored group. Another list
holds the finished groups that had several attempts or were not stored. The third list holds the dead workers. Each list
forgets its oldest entry first."""


class IdSet:
    """A set of integers, kept as disjoint sorted ranges ``[start, end)``."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self._starts.append(start)
            self._ends.append(end)

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._starts, value) - 1
        return i >= 0 and value < self._ends[i]

    def __len__(self) -> int:
        return sum(end - start for start, end in self.ranges())

    def add(self, value: int) -> None:
        """Add an integer to the set."""
        i = bisect_right(self._starts, value)
        if i > 0 and value < self._ends[i - 1]:
            return
        touches_left = i > 0 and self._ends[i - 1] == value
        touches_right = i < len(self._starts) and self._starts[i] == value + 1
        if touches_left and touches_right:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif touches_left:
            self._ends[i - 1] = value + 1
        elif touches_right:
            self._starts[i] = value
        else:
            self._starts.insert(i, value)
            self._ends.insert(i, value + 1)

    def minus(self, others: "IdSet") -> list[int]:
        """Return a sorted list of the integers in this set that are not in ``others``."""
        missing: list[int] = []
        for start, end in self.ranges():
            i = bisect_right(others._ends, start)
            while start < end:
                first, last = (others._starts[i], others._ends[i]) if i < len(others._ends) else (end, end)
                missing.extend(range(start, min(first, end)))
                start, i = max(start, last), i + 1
        return missing

    def ranges(self) -> list[tuple[int, int]]:
        """Return the set as sorted (start, end) pairs, end excluded. Example: {1, 2, 5} gives [(1, 3), (5, 6)]."""
        return list(zip(self._starts, self._ends, strict=True))


class EndedAttempt(Row, frozen=True):
    """An attempt (a worker's try to generate a group) that ended before the buffer had accepted the group.

    Attributes:
        owner: Id of the client that held the lease (the right to generate the group).
        owes_report: Whether the worker must still report how many tokens it generated.
        num_counted: Number of saved tokens of the attempt. The account has counted these tokens already.
        reason: Why the attempt ended. The attempt's other tokens count as dropped for this reason.
        refusal: Error message for a worker that sends the attempt's refused group again; empty if no group was refused.
    """

    owner: bytes = b""
    owes_report: bool = False
    num_counted: int = 0
    reason: str = ""
    refusal: str = ""


class AttemptHistory:
    """Attempts and groups that have ended. ``len(history)`` is the number of records in memory."""

    def __init__(self) -> None:
        self.finished = IdSet()
        self._ended: OrderedDict[tuple[int, int], EndedAttempt] = OrderedDict()
        self._unusual: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._reopened: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._ended) + len(self._unusual) + len(self._reopened) + len(self.finished.ranges())

    def end(self, group_id: int, attempt: int, ended: EndedAttempt) -> None:
        """Remember ``ended``, the record of an attempt that ended before the buffer had accepted the group."""
        self._ended[group_id, attempt] = ended
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def of(self, group_id: int, attempt: int) -> EndedAttempt | None:
        """Return the record of an attempt that ended before the buffer accepted the group; None if there is none."""
        return self._ended.get((group_id, attempt))

    def settle(self, group_id: int, attempt: int) -> EndedAttempt | None:
        """Remove the record of an ended attempt from this history if the worker must still report the attempt's tokens.

        Returns the removed record. Returns None if no report is expected, or if there is no record.
        """
        ended = self._ended.get((group_id, attempt))
        if ended is None or not ended.owes_report:
            return None
        del self._ended[group_id, attempt]
        return ended

    def finish(self, group_id: int, *, num_attempts: int, stored: bool) -> None:
        """Remember a group that was consumed or dropped, and its number of attempts.

        ``stored`` says whether the result of the group's latest attempt was accepted.
        """
        self.finished.add(group_id)
        self._reopened.pop(group_id, None)
        if num_attempts != 1 or not stored:
            self._unusual[group_id] = (num_attempts, num_attempts - 1 if stored else -1)
            if len(self._unusual) > MAX_REMEMBERED:
                self._unusual.popitem(last=False)

    def reopen(self, finished: IdSet) -> None:
        """Replace the set of finished groups with ``finished``, an earlier state of the set.

        Groups that are no longer in the set may be queued again. The number of their next attempt is then the number
        of their latest attempt plus 1.
        """
        self._reopened.update((group_id, self.num_attempts(group_id)) for group_id in self.finished.minus(finished))
        for group_id in self._reopened:
            self._unusual.pop(group_id, None)
        self.finished = finished

    def num_attempts(self, group_id: int) -> int:
        """Return how many attempts a finished group had. `reopen` may have removed the group from the finished groups.

        Returns 0 for any other group. Returns 1 for a finished group if this history has forgotten the number.
        """
        if group_id in self.finished:
            return self._unusual.get(group_id, (1, 0))[0]
        return self._reopened.get(group_id, 0)

    def was_stored(self, group_id: int, attempt: int) -> bool:
        """Return True if the group is finished, and the buffer accepted the result of its attempt ``attempt``."""
        return group_id in self.finished and self._unusual.get(group_id, (1, 0))[1] == attempt

    def snapshot(self) -> dict[str, Any]:
        """Return the history as a dict of plain values, for `restore`."""
        return {
            "finished": self.finished.ranges(),
            "unusual": [[group_id, *counts] for group_id, counts in self._unusual.items()],
            "ended": to_builtins(list(self._ended.items()), builtin_types=(bytes,)),
            "reopened": list(self._reopened.items()),
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Replace the history with ``values``, a result of `snapshot`."""
        self.finished = IdSet(values["finished"])
        self._unusual = OrderedDict((group_id, (number, stored)) for group_id, number, stored in values["unusual"])
        self._reopened = dict(values["reopened"])
        self._ended = OrderedDict(convert(values["ended"], list[tuple[tuple[int, int], EndedAttempt]]))


class Account:
    """Counts policy tokens. The account counts each reported or saved token once, as buffered, trained or dropped.

    When an attempt ends and its group is unfinished, the account counts the attempt's saved tokens as buffered. The
    tokens stay buffered while a later attempt continues the group. The tokens that a dead worker generated and did not
    report count as lost, and later reports of a dead worker are ignored. ``buried`` maps the id of each dead worker to
    the number of tokens that the worker generated.
    """

    def __init__(self) -> None:
        self.tokens_trained = 0
        self.tokens_buffered = 0
        self.tokens_dropped: Counter[str] = Counter()
        self.puts_refused: Counter[str] = Counter()
        self.tokens_reused = self.groups_reused = 0
        self.lags: Counter[int] = Counter()
        self.groups_consumed = 0
        self.groups_dropped: Counter[str] = Counter()
        self.filtered_in_a_row = 0
        self.buried: dict[bytes, int] = {}
        self._settled: Counter[bytes] = Counter()
        self._kept_lengths = self._kept_samples = 0
        self._dropped_lengths: Counter[str] = Counter()
        self._dropped_samples: Counter[str] = Counter()
        self._samples_per_group = 1

    @property
    def num_tokens(self) -> int:
        """Number of all counted policy tokens: trained, buffered and dropped."""
        return self.tokens_trained + self.tokens_buffered + self.tokens_dropped.total()

    @contextmanager
    def settling(self, owner: bytes) -> Iterator[None]:
        """Attribute the tokens that are counted inside the ``with`` block to the worker ``owner`` (a client id)."""
        before = self.num_tokens
        yield
        if settled := self.num_tokens - before:
            self._settled[owner] += settled

    def settled_by(self, owner: bytes) -> int:
        """Return the number of tokens that `settling` has attributed to the worker ``owner``."""
        return self._settled[owner]

    def bury(self, owner: bytes, num_lost: int) -> None:
        """Record that the worker ``owner`` died, and count its ``num_lost`` unreported tokens as lost."""
        self._drop_tokens(num_lost, LOST)
        self.buried[owner] = self._settled.pop(owner, 0) + num_lost
        if len(self.buried) > MAX_REMEMBERED:
            del self.buried[next(iter(self.buried))]

    def store(self, summary: GroupSummary, *, num_inherited: int) -> None:
        """Count the tokens of a stored group as buffered.

        ``num_inherited`` is the number of these tokens that come from an earlier attempt. The account has counted them
        already.
        """
        self.tokens_buffered += summary.num_tokens - num_inherited
        self.filtered_in_a_row = 0
        self._samples_per_group = max(1, len(summary.response_lengths))

    def leave_out(self, num_tokens: int) -> None:
        """Count ``num_tokens`` tokens as dropped, because the reward of their trajectories failed."""
        self._drop_tokens(num_tokens, REWARD)

    def consume(self, summary: GroupSummary, version: int) -> None:
        """Count a group that the learner step ``version`` trained on.

        When a step trains on the group for the first time, the group's tokens move from buffered to trained. When a
        later step trains on the group again, the tokens count as reused.
        """
        self.lags[version - summary.oldest_version] += 1
        if summary.num_uses:
            self.tokens_reused += summary.num_tokens
            self.groups_reused += 1
            return
        self.tokens_buffered -= summary.num_tokens
        self.tokens_trained += summary.num_tokens
        self.groups_consumed += 1
        self._kept_lengths += sum(summary.response_lengths)
        self._kept_samples += len(summary.response_lengths)

    def filter(self, summary: GroupSummary, reason: str, *, num_inherited: int) -> None:
        """Count a finished group that the filter with the name ``reason`` dropped.

        ``num_inherited`` is the number of the group's tokens that come from an earlier attempt. The account has counted
        these tokens as buffered, and this call undoes that count.
        """
        self.tokens_buffered -= num_inherited
        self.groups_dropped[reason] += 1
        self.filtered_in_a_row += 1
        self._drop_tokens(summary.num_tokens, reason)
        self._drop_lengths(summary, reason)

    def refuse(self, summary: GroupSummary, reason: str, *, num_counted: int) -> None:
        """Count a finished group that the buffer refuses, because the group came too late or its tokens are too old.

        The group's tokens count as dropped, except ``num_counted`` tokens that the account has counted before.
        """
        self.puts_refused[reason] += 1
        self._drop_tokens(summary.num_tokens - num_counted, reason)
        if num_counted == 0:
            self._drop_lengths(summary, reason)

    def abandon(self, num_tokens: int, reason: str, *, num_counted: int) -> None:
        """Count ``num_tokens - num_counted`` tokens of an unfinished attempt as dropped.

        The account has counted the other ``num_counted`` tokens of the attempt before. If ``num_counted`` is 0, the
        mean length of dropped samples includes the tokens. For this mean, the account assumes that the attempt has as
        many samples as the latest stored group.
        """
        self._drop_tokens(num_tokens - num_counted, reason)
        if num_tokens > 0 and num_counted == 0:
            self._dropped_lengths[reason] += num_tokens
            self._dropped_samples[reason] += self._samples_per_group

    def give_up(self, reason: str, *, num_saved: int, num_inherited: int) -> None:
        """Count the ``num_saved`` saved tokens of a revoked attempt as dropped.

        ``num_inherited`` is the number of these tokens that come from an earlier attempt. The account has counted them
        as buffered, and this call undoes that count.
        """
        self.tokens_buffered -= num_inherited
        self.abandon(num_saved, reason, num_counted=0)

    def hand_on(self, *, num_saved: int, num_inherited: int) -> None:
        """Count the ``num_saved`` saved tokens of an ended attempt as buffered.

        ``num_inherited`` is the number of these tokens that come from an earlier attempt. The account has counted them
        already.
        """
        self.tokens_buffered += num_saved - num_inherited

    def evict(self, summary: GroupSummary, reason: str) -> None:
        """Move the tokens of a stored group from buffered to dropped, because the group was lost or evicted."""
        self.tokens_buffered -= summary.num_tokens
        self._drop_tokens(summary.num_tokens, reason)
        self._drop_lengths(summary, reason)

    def drop_prefix(self, num_tokens: int, reason: str) -> None:
        """Move ``num_tokens`` tokens of an unfinished group's saved prefix from buffered to dropped."""
        self.tokens_buffered -= num_tokens
        self._drop_tokens(num_tokens, reason)

    def unlearn(self, summary: GroupSummary) -> None:
        """Move the tokens of a stored group from trained to buffered, because their training step was undone."""
        self.tokens_trained -= summary.num_tokens
        self.tokens_buffered += summary.num_tokens

    def rewind(self, *, tokens_trained: int, tokens_reused: int, groups_reused: int, lags: Mapping[int, int]) -> None:
        """Set the counts of trained and reused tokens back to their values at a checkpoint.

        The tokens that were trained after the checkpoint count as dropped. ``lags`` maps each lag, in learner steps, to
        the number of times that a step trained on a group with this lag. The mean lengths of responses are not reset.
        """
        self._drop_tokens(self.tokens_trained - tokens_trained, REWOUND)
        self.tokens_trained = tokens_trained
        self.tokens_reused, self.groups_reused = tokens_reused, groups_reused
        self.lags = Counter(lags)
        self.groups_consumed = self.lags.total() - groups_reused

    def begin_life(self, tokens_generated: int) -> None:
        """Prepare the account for a resumed run, and forget the workers that the run had before the resume.

        The run generated ``tokens_generated`` tokens before the resume. If the account has counted fewer tokens, the
        difference counts as dropped.
        """
        self._drop_tokens(tokens_generated - self.num_tokens, RESUME)
        self.buried, self._settled = {}, Counter()

    def snapshot(self) -> dict[str, Any]:
        """Return all totals except ``filtered_in_a_row`` as a dict of plain values, for `restore`.

        ``filtered_in_a_row`` is the number of groups that filters have dropped since the latest stored group. A
        restarted server begins this count at 0.
        """
        totals = {name: value for name, value in vars(self).items() if name != "filtered_in_a_row"}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in totals.items()}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Set the totals to ``values``, a result of `snapshot`."""
        for name, value in values.items():
            setattr(self, name, Counter(value) if isinstance(value, dict) else value)

    def _drop_tokens(self, num_tokens: int, reason: str) -> None:
        if num_tokens > 0:
            self.tokens_dropped[reason] += num_tokens

    def _drop_lengths(self, summary: GroupSummary, reason: str) -> None:
        self._dropped_lengths[reason] += sum(summary.response_lengths)
        self._dropped_samples[reason] += len(summary.response_lengths)

    def stats(self, groups: Mapping[str, int], **held: int) -> BufferStats:
        """Return the totals as one `BufferStats` record.

        ``groups`` maps each state of an unfinished group to the number of groups in this state. The keyword arguments
        ``held`` are the values of other fields of the record.
        """
        lengths, samples = self._dropped_lengths, self._dropped_samples
        return BufferStats(
            groups={**groups, "consumed": self.groups_consumed, "dropped": self.groups_dropped.total()},
            tokens_trained=self.tokens_trained,
            tokens_dropped=dict(self.tokens_dropped),
            tokens_buffered=self.tokens_buffered,
            lag_histogram=dict(sorted(self.lags.items())),
            puts_refused=dict(self.puts_refused),
            mean_length_kept=self._kept_lengths / max(1, self._kept_samples),
            mean_length_dropped=lengths.total() / max(1, samples.total()),
            mean_length_dropped_by_reason={reason: lengths[reason] / samples[reason] for reason in lengths},
            groups_dropped=dict(self.groups_dropped),
            filtered_in_a_row=self.filtered_in_a_row,
            tokens_reused=self.tokens_reused,
            groups_reused=self.groups_reused,
            **held,
        )


class Attempts:
    """Ends attempts and groups in a `GroupTable`, and counts their tokens in an `Account`."""

    def __init__(self, groups: GroupTable, history: AttemptHistory, account: Account) -> None:
        self._groups, self._history, self._account = groups, history, account
        self._revocations: list[tuple[bytes, Revoked]] = []
        self._newly_finished: list[int] = []

    def held(self, group_id: int, attempt: int, sender: bytes | None) -> Group | None:
        """Return the record of a group if the group's attempt number ``attempt`` is running, else None.

        Raises `NotLeaseOwner` if the attempt's lease (the right to generate the group) does not belong to the client
        ``sender``. A ``sender`` of None skips this check.
        """
        group = self._groups.running(group_id, attempt)
        ended = self._history.of(group_id, attempt) if group is None else group
        owner = b"" if ended is None else ended.owner
        if sender is not None and owner and sender != owner:
            raise NotLeaseOwner(
                f"a report of group {group_id} attempt {attempt} came from client {sender.hex()[:8]}, but client "
                f"{owner.hex()[:8]} owns the lease; only the owner of the lease may report the attempt"
            )
        return group

    def check_was_leased(self, group_id: int, attempt: int, remedy: str) -> None:
        """Raise `UnknownGroup` if the group never had an attempt number ``attempt``.

        ``remedy`` is the end of the error message.
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

        ``continued`` says whether the worker continued the prefix. ``num_tokens`` is the attempt's number of tokens. If
        the prefix has more tokens than the attempt, the prefix always counts as dropped.
        """
        if not continued or num_tokens < group.num_inherited:
            self._account.drop_prefix(group.num_inherited, DISCARDED_PREFIX)
            group.num_inherited = 0

    def settle_owed(self, group_id: int, attempt: int) -> EndedAttempt | None:
        """Remove and return the record of an ended attempt, because the worker now reports the attempt's tokens.

        Returns None if no such report is expected, or if the worker was declared dead.
        """
        owed = self._history.settle(group_id, attempt)
        return None if owed is None or owed.owner in self._account.buried else owed

    def revoke(self, group: Group, reason: str) -> None:
        """Record that a running group's attempt ended early, and make a message to the worker (`drain_revocations`).

        The worker must still report the attempt's tokens. These tokens count as dropped for ``reason``.
        """
        ended = EndedAttempt(owner=group.owner, owes_report=True, num_counted=group.num_saved, reason=reason)
        self._history.end(group.group_id, group.attempt, ended)
        self._revocations.append((group.owner, Revoked(group.group_id, group.attempt)))

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
        """Remove a running group from the table of unfinished groups, and remember the group as finished.

        ``stored`` says whether the result of the latest attempt was accepted.
        """
        self._groups.finish(group)
        self.finish(group, stored=stored)

    def finish(self, group: Group, *, stored: bool, is_kept: bool = False) -> None:
        """Remember a group as finished, because it was consumed or dropped.

        ``stored`` says whether the result of the latest attempt was accepted. If ``is_kept``, the buffer keeps the
        prompt and the trajectories for a further training step.
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
        """End the lease of a group, or drop the tokens of a group, because the learner goes back to a checkpoint.

        ``lost`` maps the id of each group that loses its tokens to the reason. A leased group loses its lease, and is
        queued again. If the group is in ``lost``, it also loses its saved prefix (the tokens so far). A group without a
        lease must be in ``lost``, and loses its tokens (`evict`).
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
        """Forget that the learner step ``version`` and later steps have trained on the stored groups.

        If no earlier step trained on a group, the group's tokens count as buffered again, not as trained.
        """
        for group in self._groups:
            kept = tuple(use for use in group.uses if use < version)
            if len(kept) < len(group.uses):
                group.set_uses(kept)
                if not kept:
                    self._account.unlearn(group.result)

    def drain_revocations(self) -> list[tuple[bytes, Revoked]]:
        """Return (client id, message) pairs for the leases revoked since the previous call.

        Each message tells its client which lease the client has lost.
        """
        revocations, self._revocations = self._revocations, []
        return revocations

    def drain_finished(self) -> list[int]:
        """Return the ids of the groups finished since the previous call.

        The caller may delete the prompts and trajectories of these groups.
        """
        finished, self._newly_finished = self._newly_finished, []
        return finished
