"""What the ledger counts: tokens by where they went, realised lags, refused puts, and the length bias of dropping."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncrl.protocol.types import BufferStats, GroupSummary


class Account:
    """Running totals. Every policy token that a worker reports is buffered, trained or dropped, and counted once."""

    def __init__(self) -> None:
        self.tokens_trained = 0
        self.tokens_buffered = 0
        self.tokens_dropped: Counter[str] = Counter()
        self.puts_refused: Counter[str] = Counter()
        self.lags: Counter[int] = Counter()
        self.groups_consumed = 0
        self.groups_dropped = 0
        self._kept_lengths = self._kept_samples = 0
        self._dropped_lengths = self._dropped_samples = 0
        self._samples_per_group = 1

    def store(self, summary: GroupSummary) -> None:
        """A put was accepted."""
        self.tokens_buffered += summary.num_tokens
        self._samples_per_group = max(1, len(summary.response_lengths))

    def consume(self, summary: GroupSummary, version: int) -> None:
        """A stored group was trained on at ``version``."""
        self.tokens_buffered -= summary.num_tokens
        self.tokens_trained += summary.num_tokens
        self.groups_consumed += 1
        self.lags[version - summary.oldest_version] += 1
        self._kept_lengths += sum(summary.response_lengths)
        self._kept_samples += len(summary.response_lengths)

    def filter(self, summary: GroupSummary, reason: str) -> None:
        """A finished group was dropped on arrival."""
        self.groups_dropped += 1
        self._drop_group(summary, reason)

    def refuse(self, summary: GroupSummary, reason: str, *, num_inherited: int = 0) -> None:
        """A finished group came too late, or too old: its tokens are dropped, but for those the next attempt took."""
        self.puts_refused[reason] += 1
        self._drop_group(summary, reason, num_inherited=num_inherited)

    def _drop_group(self, summary: GroupSummary, reason: str, *, num_inherited: int = 0) -> None:
        self._drop_tokens(summary.num_tokens - num_inherited, reason)
        self._dropped_lengths += sum(summary.response_lengths)
        self._dropped_samples += len(summary.response_lengths)

    def abandon(self, num_tokens: int, reason: str) -> None:
        """An attempt ended unfinished; its length so far counts as that of a group of the usual size."""
        self._drop_tokens(num_tokens, reason)
        if num_tokens > 0:
            self._dropped_lengths += num_tokens
            self._dropped_samples += self._samples_per_group

    def keep_progress(self, num_tokens: int) -> None:
        """A running group ended with a prefix that its next attempt may continue."""
        self.tokens_buffered += num_tokens

    def use_progress(self, num_tokens: int) -> None:
        """The next attempt continues the prefix."""
        self.tokens_buffered -= num_tokens

    def drop_progress(self, num_tokens: int) -> None:
        """The prefix was too old to be continued."""
        self.tokens_buffered -= num_tokens
        self._drop_tokens(num_tokens, "stale_prefix")

    def snapshot(self) -> dict[str, Any]:
        """Every total, as plain values."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the totals of a snapshot."""
        for name, value in values.items():
            setattr(self, name, Counter(value) if isinstance(value, dict) else value)

    def _drop_tokens(self, num_tokens: int, reason: str) -> None:
        if num_tokens > 0:
            self.tokens_dropped[reason] += num_tokens

    def stats(
        self, *, learner_version: int, groups: Mapping[str, int], stored_bytes: int, leases_waiting: int
    ) -> BufferStats:
        """The totals beside what the ledger and the server hold now."""
        return BufferStats(
            learner_version=learner_version,
            groups={**groups, "consumed": self.groups_consumed, "dropped": self.groups_dropped},
            tokens_trained=self.tokens_trained,
            tokens_dropped=dict(self.tokens_dropped),
            tokens_buffered=self.tokens_buffered,
            lag_histogram=dict(sorted(self.lags.items())),
            puts_refused=dict(self.puts_refused),
            stored_bytes=stored_bytes,
            leases_waiting=leases_waiting,
            mean_length_kept=self._kept_lengths / max(1, self._kept_samples),
            mean_length_dropped=self._dropped_lengths / max(1, self._dropped_samples),
        )
