"""What the ledger counts: tokens by where they went, realised lags, refused puts, and the length bias of dropping."""

from collections import Counter
from collections.abc import Mapping

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

    def refuse(self, summary: GroupSummary, reason: str) -> None:
        """A finished group came too late, or too old: its tokens are dropped."""
        self.puts_refused[reason] += 1
        self._drop_tokens(summary.num_tokens, reason)
        self._dropped_lengths += sum(summary.response_lengths)
        self._dropped_samples += len(summary.response_lengths)

    def abandon(self, num_tokens: int, reason: str) -> None:
        """An attempt ended unfinished; its length so far counts as that of a group of the usual size."""
        self._drop_tokens(num_tokens, reason)
        if num_tokens:
            self._dropped_lengths += num_tokens
            self._dropped_samples += self._samples_per_group

    def _drop_tokens(self, num_tokens: int, reason: str) -> None:
        if num_tokens:
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
