"""What a run reports: a `StepRecord` per learner step, and the token account at the end. Nothing here waits."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrl.core import record
from asyncrl.core.errors import AccountError
from asyncrl.core.ports import FleetCounts
from asyncrl.core.types import BufferStats, GroupSummary, Plan, TokenAccount
from asyncrl.metrics import StepRecord, TrainingResult
from asyncrl.run.resume import RunState

_TIMES = ("started_at", "ended_at")


class Reporter:
    """Makes a record of each finished step, and keeps what the summary needs.

    Args:
        samples_per_prompt: Samples of a group that are trained on; a greedy baseline may follow them.
        on_step: Receives each record.
        resumed: The state in which the run began.

    Attributes:
        engine_version: The version that every engine serves, or a later one.
    """

    def __init__(self, *, samples_per_prompt: int, on_step: Callable[[StepRecord], None], resumed: RunState) -> None:
        self.engine_version = resumed.version
        self._trained = slice(samples_per_prompt)
        self._on_step = on_step
        self._resumed = resumed
        self._began_s = self._ended_s = self._last_record_s = 0.0
        self._last_tokens = 0
        self._publish_s = 0.0
        self._max_lag = 0
        self._num_samples = self._num_groups = 0
        self._step_span = record.NO_SPAN

    def begin(self) -> None:
        """Note that training begins, or begins again after `rewind`."""
        self._began_s = self._began_s or time.time()
        self._last_record_s = time.time()
        self._step_span = record.span(record.SpanKind.step, step=self.engine_version)

    def rewind(self, version: int) -> None:
        """Note that learner and engines go back to an earlier version. Time and tokens continue to count."""
        self._step_span.close()
        self.engine_version = version

    def published(self, version: int, took_s: float) -> None:
        """Note that every engine serves ``version``, ``took_s`` seconds after its publish began."""
        self.engine_version = version
        self._publish_s = took_s

    def step(
        self, plan: Plan, *, plan_wait_s: float, metrics: Mapping[str, float], stats: BufferStats, counts: FleetCounts
    ) -> None:
        """Record a finished step.

        Args:
            plan: Its batch.
            plan_wait_s: How long the controller waited for the batch.
            metrics: The learner's, with ``started_at`` and ``ended_at`` in Unix seconds.
            stats: The ledger's after the commit.
            counts: The fleet's.
        """
        self._step_span.close()
        self._step_span = record.span(record.SpanKind.step, step=plan.version + 1)
        record.cpu()
        now_s = time.time()
        update_s = metrics["ended_at"] - metrics["started_at"]
        elapsed_s = now_s - self._last_record_s
        new_tokens = counts.tokens_generated - self._last_tokens
        self._ended_s = max(value for name, value in metrics.items() if name.endswith("ended_at"))
        self._last_record_s, self._last_tokens = now_s, counts.tokens_generated
        batch = self._batch_numbers(plan)
        self._max_lag = max(self._max_lag, batch["lag_max"])
        self._num_groups += len(plan.groups)
        self._num_samples += sum(self._numbers_of_samples(plan))
        self._on_step(
            StepRecord(
                step=plan.version,
                time_s=self._ended_s - self._began_s,
                **batch,
                generated_tokens=counts.tokens_generated,
                rollout_tokens_per_s=new_tokens / elapsed_s if elapsed_s > 0 else 0.0,
                learner_tokens_per_s=sum(group.num_tokens for group in plan.groups) / update_s if update_s > 0 else 0.0,
                buffer_groups=stats.groups["stored"],
                leased_groups=stats.groups["leased"],
                dropped_groups=stats.groups["dropped"],
                failed_groups=sum(counts.groups_failed.values()),
                kept_length=stats.mean_length_kept,
                dropped_length=stats.mean_length_dropped,
                engine_version=self.engine_version,
                plan_wait_s=plan_wait_s,
                update_s=update_s,
                publish_s=self._publish_s,
                learner={name: value for name, value in metrics.items() if not name.endswith(_TIMES)},
                groups=stats.groups,
            )
        )

    def result(self, stats: BufferStats, counts: FleetCounts) -> TrainingResult:
        """Close the token account with the final figures of ledger and fleet.

        Raises `AccountError` if it does not balance.
        """
        tokens = balanced_account(stats, counts)
        before = self._resumed
        dropped = Counter(before.all_dropped()) + Counter(stats.tokens_dropped)
        lags = Counter(before.lag_histogram) + Counter(stats.lag_histogram)
        return TrainingResult(
            policy_version=stats.learner_version,
            train_wall_s=self._ended_s - self._began_s,
            tokens=replace(
                tokens,
                generated=before.tokens_generated + tokens.generated,
                trained=before.tokens_trained + tokens.trained,
                dropped=sum(dropped.values()),
            ),
            max_lag_realised=max(stats.lag_histogram, default=self._max_lag),
            max_lag_before=max(before.lag_histogram, default=0),
            lag_histogram=dict(sorted(lags.items())),
            tokens_dropped=dict(dropped),
            groups_failed=dict(counts.groups_failed),
            samples_per_group=self._num_samples / max(1, self._num_groups),
        )

    def _numbers_of_samples(self, plan: Plan) -> list[int]:
        """Number of samples of each group that are trained on. Samples whose reward failed may be missing."""
        return [len(group.rewards[self._trained]) for group in plan.groups]

    def _batch_numbers(self, plan: Plan) -> dict[str, Any]:
        """The fields of a record that the batch determines."""
        groups = [group for group in plan.groups if group.is_scored]
        lags = [plan.version - group.oldest_version for group in plan.groups]
        rewards = [reward for group in groups for reward in group.rewards[self._trained]]
        lengths = [length for group in groups for length in group.response_lengths[self._trained]]
        return {
            "reward": statistics.fmean(rewards),
            "reward_std": statistics.pstdev(rewards),
            "equal_reward_groups": statistics.mean(len(set(group.rewards[self._trained])) == 1 for group in groups),
            "truncated_samples": sum(group.num_truncated for group in groups) / len(rewards),
            "samples_per_group": statistics.fmean(self._numbers_of_samples(plan)),
            "unscored_groups": len(plan.groups) - len(groups),
            "metrics": _means(groups),
            "response_length": statistics.fmean(lengths),
            "lag_mean": statistics.fmean(lags),
            "lag_max": max(lags),
            "lags": dict(Counter(lags)),
        }


def _means(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Mean over the groups of each metric of their trajectories."""
    values: dict[str, list[float]] = {}
    for name, value in (metric for group in groups for metric in group.metrics):
        values.setdefault(name, []).append(value)
    return {name: statistics.fmean(found) for name, found in values.items()}


def balanced_account(stats: BufferStats, counts: FleetCounts) -> TokenAccount:
    """The token account of this life of the run. Raises `AccountError` if it does not balance."""
    tokens = TokenAccount(
        generated=counts.tokens_generated,
        trained=stats.tokens_trained,
        dropped=sum(stats.tokens_dropped.values()),
        buffered=stats.tokens_buffered,
        in_flight=counts.tokens_in_flight,
    )
    if tokens.balance != 0:
        raise AccountError(
            f"every generated token must be trained, dropped, buffered or in flight; {tokens.balance} are not: "
            f"{tokens}, dropped {dict(stats.tokens_dropped)}; please report this with the run's logs"
        )
    return tokens
