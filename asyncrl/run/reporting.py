"""Makes and shows the reports of a run: a `StepRecord` per learner step, and the counts of all tokens at the end.

If the terminal, a tracker, the dashboard or the planner's advice fails, the run continues. After a step, a thread
computes how busy learner and engines were. To use little CPU time, this thread then sleeps 100 times as long as the
computation took.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from asyncrl.config import RunConfig
from asyncrl.core import receipts, record
from asyncrl.core.errors import AccountError
from asyncrl.core.ports import FleetCounts
from asyncrl.core.types import BufferStats, GroupSummary, Plan, TokenAccount
from asyncrl.metrics import (
    Alarm,
    Alarms,
    Evaluation,
    History,
    RunLimits,
    RunUse,
    StepRecord,
    TerminalView,
    TrackedRun,
    Trackers,
    TrainingResult,
)
from asyncrl.profile.attribution import LiveUse

logger = logging.getLogger(__name__)

_REST_FACTOR = 100.0
_LEAST_REST_S = 1.0
_START_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 30.0
_ENGINE_STEPS = 10
"""The engines' speeds are compared over this number of the newest learner steps."""
MIN_ADVICE_STEPS = 30
"""A run with fewer learner steps gets no advice."""
_ADVICE_S = 20.0


class Reporter:
    """Makes a `StepRecord` of each finished learner step, and keeps the data for the summary.

    Args:
        samples_per_prompt: Number of trained samples per group, without ReMax's greedy answer.
        store_bytes: Largest number of bytes of groups that all stores together may hold.
        on_step: Function that is called with each new record.
        version: The policy version that every engine serves at the beginning.
        earlier: The buffer's counts at the start of this process if the process continues a run; None for a new run.
        last: The newest record of the earlier processes, whose totals this process continues. None for a new run.

    Attributes:
        engine_version: Every engine serves this policy version or a later one.
        num_steps: Number of steps that this process has recorded. A step that ran twice counts twice.
    """

    def __init__(
        self,
        *,
        samples_per_prompt: int,
        store_bytes: int,
        on_step: Callable[[StepRecord], None],
        version: int,
        earlier: BufferStats | None,
        last: StepRecord | None = None,
    ) -> None:
        self.engine_version = version
        self.num_steps = 0
        self._before = (last.time_s, last.generated_tokens, last.failed_groups) if last else (0.0, 0, 0)
        self._trained = slice(samples_per_prompt)
        self._store_bytes = store_bytes
        self._on_step = on_step
        self._earlier = earlier
        self._began_s = self._ended_s = 0.0
        self._last_tokens = 0
        self._publish_s = 0.0
        self._max_lag = 0
        self._num_samples = self._num_groups = 0
        self._engine_tokens: deque[Mapping[str, int]] = deque(maxlen=_ENGINE_STEPS + 1)
        self._step_span = record.NO_SPAN

    def begin(self) -> None:
        """Record that training begins, or begins again after a call of `rewind`."""
        self._began_s = self._began_s or time.time()
        self._step_span = record.span(record.SpanKind.step, step=self.engine_version)

    def rewind(self, version: int) -> None:
        """Record that learner and engines go back to ``version``. The totals of time and tokens stay the same."""
        self._step_span.close()
        self.engine_version = version

    def planned(self, plan: Plan) -> None:
        """Write the receipt (a record for ``asyncrl audit``) of a step's batch, before the ranks train on the batch.

        A receipt at the commit would be too late, because a checkpoint after this step may be complete earlier.
        """
        receipts.note(receipts.Act.planned, step=plan.version, groups=[_planned(group) for group in plan.groups])

    def published(self, version: int, took_s: float) -> None:
        """Record that every engine serves ``version``. The slowest engine took ``took_s`` seconds to load it."""
        self.engine_version = version
        self._publish_s = took_s

    def step(
        self, plan: Plan, *, plan_wait_s: float, metrics: Mapping[str, float], stats: BufferStats, counts: FleetCounts
    ) -> None:
        """Record a finished step. ``metrics`` must have ``started_at`` and ``ended_at`` in Unix seconds.

        ``stats`` are the buffer's counts after the commit, and ``counts`` are the fleet's counters.
        """
        self._step_span.close()
        self._step_span = record.span(record.SpanKind.step, step=plan.version + 1)
        receipts.note(receipts.Act.committed, step=plan.version)
        record.cpu()
        previous_s = self._ended_s or self._began_s
        self._ended_s = max(value for name, value in metrics.items() if name.endswith("ended_at"))
        elapsed_s = self._ended_s - previous_s
        new_tokens = counts.tokens_generated - self._last_tokens
        self._last_tokens = counts.tokens_generated
        time_before_s, tokens_before, failed_before = self._before
        batch = self._batch_numbers(plan)
        self._max_lag = max(self._max_lag, batch["lag_max"])
        self._engine_tokens.append(counts.tokens_by_engine)
        self.num_steps += 1
        self._num_groups += len(plan.groups)
        self._num_samples += sum(self._numbers_of_samples(plan))
        self._on_step(
            StepRecord(
                step=plan.version,
                time_s=time_before_s + self._ended_s - self._began_s,
                **batch,
                **self._learner_numbers(plan, metrics),
                **self._buffer_numbers(stats),
                generated_tokens=tokens_before + counts.tokens_generated,
                rollout_tokens_per_s=new_tokens / elapsed_s if elapsed_s > 0 else 0.0,
                failed_groups=failed_before + sum(counts.groups_failed.values()),
                engine_version=self.engine_version,
                plan_wait_s=plan_wait_s,
                publish_s=self._publish_s,
                slowest_engine=slowest_engine(self._engine_tokens[0], counts.tokens_by_engine),
                episodes=dict(counts.episodes),
            )
        )

    def result(self, stats: BufferStats, counts: FleetCounts) -> TrainingResult:
        """Return the results of the training, including the token account: what became of the generated tokens.

        ``stats`` and ``counts`` are the final counts of buffer and fleet. Raises `AccountError` if some generated
        tokens are missing in the account.
        """
        earlier = self._earlier
        lags = Counter(stats.lag_histogram)
        if earlier is not None:
            lags -= Counter(earlier.lag_histogram)
        return TrainingResult(
            policy_version=stats.learner_version,
            train_wall_s=self._ended_s - self._began_s,
            tokens=balanced_account(stats, counts, num_earlier=0 if earlier is None else earlier.num_tokens),
            max_lag_realised=max(lags, default=self._max_lag),
            max_lag_before=0 if earlier is None else max(earlier.lag_histogram, default=0),
            lag_histogram=dict(sorted(stats.lag_histogram.items())),
            tokens_dropped=dict(stats.tokens_dropped),
            groups_failed=dict(counts.groups_failed),
            samples_per_group=self._num_samples / max(1, self._num_groups),
        )

    def _numbers_of_samples(self, plan: Plan) -> list[int]:
        """Return the number of trained samples of each group. Samples whose reward failed are not in the group."""
        return [len(group.rewards[self._trained]) for group in plan.groups]

    def _batch_numbers(self, plan: Plan) -> dict[str, Any]:
        groups = [group for group in plan.groups if group.is_scored]
        lags = [plan.version - group.oldest_version for group in plan.groups]
        rewards = [reward for group in groups for reward in group.rewards[self._trained]]
        lengths = [length for group in groups for length in group.response_lengths[self._trained]]
        metrics: dict[str, list[float]] = {}
        for name, value in (metric for group in groups for metric in group.metrics):
            metrics.setdefault(name, []).append(value)
        for group in groups:
            if group.data_source:
                source = f"source.{group.data_source}"
                metrics.setdefault(f"{source}.reward", []).extend(group.rewards[self._trained])
                metrics.setdefault(f"{source}.response_length", []).extend(group.response_lengths[self._trained])
        return {
            "reward": statistics.fmean(rewards),
            "reward_std": statistics.pstdev(rewards),
            "equal_reward_groups": statistics.mean(
                len(set(group.rewards[self._trained])) == 1 and not group.has_unlike_turns for group in groups
            ),
            "truncated_samples": sum(group.num_truncated for group in groups) / len(rewards),
            "samples_per_group": statistics.fmean(self._numbers_of_samples(plan)),
            "unscored_groups": len(plan.groups) - len(groups),
            "reused_groups": sum(group.num_uses > 0 for group in plan.groups),
            "metrics": {name: statistics.fmean(values) for name, values in metrics.items()},
            "response_length": statistics.fmean(lengths),
            "lag_mean": statistics.fmean(lags),
            "lag_max": max(lags),
            "lags": dict(Counter(lags)),
        }

    def _learner_numbers(self, plan: Plan, metrics: Mapping[str, float]) -> dict[str, Any]:
        update_s = metrics["ended_at"] - metrics["started_at"]
        num_tokens = sum(group.num_tokens for group in plan.groups)
        return {
            "update_s": update_s,
            "learner_tokens_per_s": num_tokens / update_s if update_s > 0 else 0.0,
            "learner": {
                name: value for name, value in metrics.items() if not name.endswith(("started_at", "ended_at"))
            },
        }

    def _buffer_numbers(self, stats: BufferStats) -> dict[str, Any]:
        return {
            "groups": stats.groups,
            "tokens_dropped_by_reason": stats.tokens_dropped,
            "groups_dropped_by_reason": stats.groups_dropped,
            "buffer_groups": stats.groups["stored"],
            "leased_groups": stats.groups["leased"],
            "dropped_groups": stats.groups["dropped"],
            "kept_length": stats.mean_length_kept,
            "dropped_length": stats.mean_length_dropped,
            "buffer_fill": stats.stored_bytes / self._store_bytes,
            "buffer_on_disk": min(1.0, stats.disk_bytes / max(1, stats.stored_bytes)),
        }


def _planned(group: GroupSummary) -> dict[str, Any]:
    return {
        "group": group.group_id,
        "attempt": group.attempt,
        "tokens": group.num_tokens,
        "digest": group.digest,
        "is_scored": group.is_scored,
        "use": group.num_uses,
    }


def slowest_engine(before: Mapping[str, int], now: Mapping[str, int]) -> float:
    """Return the smallest number of new tokens of an engine, divided by the median over the engines.

    ``before`` and ``now`` map each engine to its total number of tokens at two moments. Engines that are not in
    ``before`` are left out. With fewer than two engines, the result is 1. Example: engines with 100, 100 and 25 new
    tokens give 0.25.
    """
    new = [tokens - before[engine] for engine, tokens in now.items() if engine in before]
    middle = statistics.median(new) if len(new) > 1 else 0
    return min(new) / middle if middle > 0 else 1.0


def balanced_account(stats: BufferStats, counts: FleetCounts, *, num_earlier: int = 0) -> TokenAccount:
    """Return the token account of a run: how many tokens it generated, trained, dropped and still has.

    The account includes all processes of the run. ``num_earlier`` is the number of tokens that earlier processes
    generated. ``counts`` has the tokens of this process. Raises `AccountError` if the tokens that are trained, dropped,
    buffered or in flight do not sum to the generated tokens.
    """
    tokens = TokenAccount(
        generated=num_earlier + counts.tokens_generated,
        trained=stats.tokens_trained,
        dropped=sum(stats.tokens_dropped.values()),
        buffered=stats.tokens_buffered,
        in_flight=counts.tokens_in_flight,
        reused=stats.tokens_reused,
    )
    if tokens.balance != 0:
        raise AccountError(
            f"every generated token must be trained, dropped, buffered or in flight; {tokens.balance} are not: "
            f"{tokens}, dropped {dict(stats.tokens_dropped)}; please report this with the run's logs"
        )
    return tokens


class Watching:
    """Shows each step and evaluation of a run on the terminal, in experiment trackers and in the dashboard."""

    def __init__(self, config: RunConfig, run_dir: Path, view: TerminalView) -> None:
        self._config = config
        self._run_dir = run_dir
        self._view = view
        self._trackers = Trackers({})
        self._dashboard: asyncio.subprocess.Process | None = None
        self._num_steps = 0
        limits = RunLimits(
            total_steps=config.total_steps,
            max_lag=config.buffer.max_lag,
            compares_groups=config.algorithm.compares_groups,
        )
        self._alarms = Alarms(limits)
        self._stepped = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Open trackers and dashboard. Raises `ValueError` if a tracker cannot be opened."""
        config = self._config
        tracked = TrackedRun(
            experiment=config.experiment,
            folder=self._run_dir,
            options=asdict(config),
            prometheus_address=config.prometheus_address,
        )
        self._trackers = await asyncio.to_thread(Trackers.open, config.tracker, tracked)
        for line in self._trackers.lines:
            self._view.say(line)
        if config.dashboard:
            self._view.say(await self._start_dashboard())
        self._reading = asyncio.create_task(self._read_use())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._dashboard is not None and self._dashboard.returncode is None:
            with suppress(ProcessLookupError):
                self._dashboard.kill()
            await self._dashboard.wait()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._trackers.close)
        except TimeoutError:
            self._view.say(f"the trackers {self._config.tracker} took longer than {_CLOSE_TIMEOUT_S:g} s to end")
        if failed := {name: count for name, count in self._trackers.num_failed.items() if count}:
            self._view.say(f"trackers that failed, and how often: {failed}; logs/controller.log says why")

    async def _start_dashboard(self) -> str:
        """Start the dashboard. Return a line for the user.

        The dashboard exits when its stdin closes, so it ends with this process.
        """
        log, address = self._run_dir / "logs" / "dashboard.log", self._config.dashboard_address
        command = [sys.executable, "-m", "asyncrl.profile.dashboard", str(self._run_dir), "--with-parent"]
        with log.open("ab") as stderr:
            self._dashboard = await asyncio.create_subprocess_exec(
                *command,
                *("--address", address),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C must not end the dashboard
            )
        assert self._dashboard.stdout is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_TIMEOUT_S):
                if url := (await self._dashboard.stdout.readline()).decode().strip():
                    return f"dashboard: {url}"
        return f"the dashboard did not start at {address}; the run continues without it; see {log}"

    def examine(self, record: StepRecord) -> StepRecord:
        """Show the alarms that begin or end at a step.

        Returns the record, with added metrics of the alarms and of the free disk space.
        """
        record = replace(record, free_disk_bytes=shutil.disk_usage(self._run_dir).free)
        self._show(self._alarms.step(record))
        return replace(record, metrics={**record.metrics, **self._alarms.metrics()})

    def _show(self, changed: Sequence[Alarm]) -> None:
        for alarm in changed:
            kind = "warning" if alarm.last_step is None else "over"
            self._view.say(f"{kind}: {alarm}")

    def step(self, record: StepRecord) -> None:
        """Show a finished learner step on the terminal and in the trackers."""
        self._view.step(record)
        self._trackers.record(record)
        self._num_steps += 1
        self._stepped.set()

    async def last_advice(self) -> None:
        """If ``profile.advice`` is on, search for better options, for the run's report. Call this after training."""
        profile = self._config.profile
        is_advised = profile.enabled and profile.advice and not self._config.placement.colocated
        if is_advised and self._num_steps >= MIN_ADVICE_STEPS:
            await look_for_advice(self._run_dir)

    def go_on(self, history: History) -> None:
        """Send the steps and evaluations of the run's earlier processes to the trackers.

        Show the alarms that are still active.
        """
        self._alarms.go_on(history)
        self._show(self._alarms.current)
        self._trackers.go_on([*history.evaluations, *history.steps])

    def evaluation(self, evaluation: Evaluation) -> None:
        """Show a finished evaluation. If the reward has fallen, also show an alarm."""
        self._view.evaluation(evaluation)
        self._trackers.record(evaluation)
        self._show(self._alarms.evaluation(evaluation))

    async def _read_use(self) -> None:
        live = LiveUse(self._run_dir)
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            began_s = time.monotonic()
            try:
                use: RunUse | None = await asyncio.to_thread(live.read)
            except FileNotFoundError:  # the run has no profile, because profile.enabled is false
                return
            except Exception:
                logger.exception("the busy times of learner and engines cannot be read")
                return
            if use is not None:
                self._view.use(use)
                self._trackers.record(use)
            await asyncio.sleep(max(_LEAST_REST_S, _REST_FACTOR * (time.monotonic() - began_s)))


async def look_for_advice(run_dir: Path) -> None:
    """Simulate a finished training with other options. The run's report shows the results as advice and frontier.

    The frontier is the best throughput for each lag. The simulation runs with niceness 19 for at most 20 s. If the
    simulation fails, this function only logs a warning.
    """
    command = ["nice", "-n", "19", sys.executable, "-m", "asyncrl", "plan", str(run_dir)]
    with (run_dir / "logs" / "advice.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--only-advice", f"{_ADVICE_S:.0f}", "--frontier"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    status = None
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_ADVICE_S):
                status = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if status != 0:
        logger.warning("no advice was found (status %s); see logs/advice.log", status)
