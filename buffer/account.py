"""What the ledger counts: tokens by where they went, realised lags, refused puts, and the length bias of dropping."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncrl.protocol.types import BufferStats, GroupSummary

DISCARDED_PREFIX = "discarded_prefix"
STALE_PREFIX = "stale_prefix"


class Account:
    """Running totals. Every policy token that a worker reports or saves is buffered, trained or dropped, once.

    A saved prefix counts as buffered from the end of the attempt that saved it until the attempt that continues it
    reports it as its own, or it is dropped.
    """

    def __init__(self) -> None:
        self.tokens_trained = 0
        self.tokens_buffered = 0
        self.tokens_dropped: Counter[str] = Counter()
        self.puts_refused: Counter[str] = Counter()
        self.lags: Counter[int] = Counter()
        self.groups_consumed = 0
        self.groups_dropped: Counter[str] = Counter()
        self.filtered_in_a_row = 0
        self._kept_lengths = self._kept_samples = 0
        self._dropped_lengths: Counter[str] = Counter()
        self._dropped_samples: Counter[str] = Counter()
        self._samples_per_group = 1

    def store(self, summary: GroupSummary, *, num_inherited: int) -> None:
        """A put was accepted; the prefix it continued is part of it."""
        self.tokens_buffered += summary.num_tokens - num_inherited
        self.filtered_in_a_row = 0
        self._samples_per_group = max(1, len(summary.response_lengths))

    def consume(self, summary: GroupSummary, version: int) -> None:
        """A stored group was trained on at ``version``."""
        self.tokens_buffered -= summary.num_tokens
        self.tokens_trained += summary.num_tokens
        self.groups_consumed += 1
        self.lags[version - summary.oldest_version] += 1
        self._kept_lengths += sum(summary.response_lengths)
        self._kept_samples += len(summary.response_lengths)

    def filter(self, summary: GroupSummary, reason: str, *, num_inherited: int) -> None:
        """A finished group was dropped on arrival, with the prefix it continued."""
        self.tokens_buffered -= num_inherited
        self.groups_dropped[reason] += 1
        self.filtered_in_a_row += 1
        self._drop_tokens(summary.num_tokens, reason)
        self._drop_lengths(summary, reason)

    def refuse(self, summary: GroupSummary, reason: str, *, num_counted: int) -> None:
        """A finished group came too late or too old: its tokens are dropped, but for those counted already."""
        self.puts_refused[reason] += 1
        self._drop_tokens(summary.num_tokens - num_counted, reason)
        if num_counted == 0:
            self._drop_lengths(summary, reason)

    def abandon(self, num_tokens: int, reason: str, *, num_counted: int) -> None:
        """An attempt ended unfinished; its length so far counts as that of a group of the usual size.

        Of one that was saved only the rest is dropped, which says nothing about lengths.
        """
        self._drop_tokens(num_tokens - num_counted, reason)
        if num_tokens > 0 and num_counted == 0:
            self._dropped_lengths[reason] += num_tokens
            self._dropped_samples[reason] += self._samples_per_group

    def give_up(self, reason: str, *, num_saved: int, num_inherited: int) -> None:
        """A running group was revoked and its prefix is not handed on."""
        self.tokens_buffered -= num_inherited
        self.abandon(num_saved, reason, num_counted=0)

    def hand_on(self, *, num_saved: int, num_inherited: int) -> None:
        """A running group ended with a prefix that its next attempt may continue."""
        self.tokens_buffered += num_saved - num_inherited

    def drop_prefix(self, num_tokens: int, reason: str) -> None:
        """A prefix was too old to be continued, or its worker began afresh."""
        self.tokens_buffered -= num_tokens
        self._drop_tokens(num_tokens, reason)

    def snapshot(self) -> dict[str, Any]:
        """Every total, as plain values; how many groups were filtered in a row is a matter of this server's filters."""
        totals = {name: value for name, value in vars(self).items() if name != "filtered_in_a_row"}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in totals.items()}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the totals of a snapshot."""
        for name, value in values.items():
            setattr(self, name, Counter(value) if isinstance(value, dict) else value)

    def _drop_tokens(self, num_tokens: int, reason: str) -> None:
        if num_tokens > 0:
            self.tokens_dropped[reason] += num_tokens

    def _drop_lengths(self, summary: GroupSummary, reason: str) -> None:
        self._dropped_lengths[reason] += sum(summary.response_lengths)
        self._dropped_samples[reason] += len(summary.response_lengths)

    def stats(
        self,
        *,
        learner_version: int,
        groups: Mapping[str, int],
        stored_bytes: int,
        held_bytes: int,
        leases_waiting: int,
    ) -> BufferStats:
        """The totals beside what the ledger and the server hold now."""
        lengths, samples = self._dropped_lengths, self._dropped_samples
        return BufferStats(
            learner_version=learner_version,
            groups={**groups, "consumed": self.groups_consumed, "dropped": self.groups_dropped.total()},
            tokens_trained=self.tokens_trained,
            tokens_dropped=dict(self.tokens_dropped),
            tokens_buffered=self.tokens_buffered,
            lag_histogram=dict(sorted(self.lags.items())),
            puts_refused=dict(self.puts_refused),
            stored_bytes=stored_bytes,
            leases_waiting=leases_waiting,
            mean_length_kept=self._kept_lengths / max(1, self._kept_samples),
            mean_length_dropped=lengths.total() / max(1, samples.total()),
            mean_length_dropped_by_reason={reason: lengths[reason] / samples[reason] for reason in lengths},
            groups_dropped=dict(self.groups_dropped),
            filtered_in_a_row=self.filtered_in_a_row,
            held_bytes=held_bytes,
        )
