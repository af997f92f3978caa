"""Shows the progress of a run: a live view on a terminal, otherwise one line of metrics every few seconds.

In both cases, an additional line says when a part of the run, such as the learner, is ready.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .estimates import Evaluation
from .run_records import BUSY, PoolUse, RunUse, StepRecord, in_words

logger = logging.getLogger(__name__)

LINE_EVERY_S = 5.0
RATE_STEPS = 10
"""Rates on the terminal, such as tokens per second, are means over this number of learner steps."""
SPARK_STEPS = 60
"""Number of learner steps in a sparkline (a small plot of one line of text)."""
_SPARKS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 30
_OF_THE_POLICY = (("entropy", "entropy"), ("kl", "behavior_kl"), ("gradient", "grad_norm"))


class _Output:
    """Writes to standard output. If a write fails, for example to a closed pipe, the run continues without output."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._has_failed = False

    def write(self, text: str) -> None:
        self._try(lambda: self._file.write(text))

    def flush(self) -> None:
        self._try(self._file.flush)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("the terminal cannot be written: %s; the run goes on without it", error.strerror)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class TerminalView:
    """Shows the progress, metrics and alarms of a run on the terminal."""

    def __init__(self, *, title: str, total_steps: int, console: Console | None = None) -> None:
        output = cast(TextIO, _Output(sys.stdout))
        self._console = console or Console(file=output, highlight=False, soft_wrap=True)
        self._title = title
        self._total_steps = total_steps
        self._began_s = time.monotonic()
        self._waiting: dict[str, float] = {}
        self._records: deque[StepRecord] = deque(maxlen=RATE_STEPS + 1)
        self._history: deque[StepRecord] = deque(maxlen=SPARK_STEPS)
        self._use: RunUse | None = None
        self._last_line_s = 0.0
        self._live = Live(
            get_renderable=self.render, console=self._console, refresh_per_second=4, transient=True, auto_refresh=True
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was created, at the start of ``asyncrl train``."""
        return time.monotonic() - self._began_s

    def __enter__(self) -> TerminalView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, message: str) -> None:
        """Print one line with the elapsed seconds. The line stays above the live view."""
        self._console.print(f"[{self.elapsed_s:6.1f} s] {message}", markup=False)

    @contextmanager
    def waiting_for(self, part: str) -> Iterator[None]:
        """Show during the ``with`` block that the run waits for a component. Then print how long the wait took.

        ``part`` is the component's name.
        """
        self._waiting[part] = time.monotonic()
        if not self._console.is_terminal:
            self.say(f"waiting for {part}")
        try:
            yield
            self.say(f"{part}: ready after {time.monotonic() - self._waiting[part]:.1f} s")
        finally:
            del self._waiting[part]

    def step(self, record: StepRecord) -> None:
        """Show the metrics of a finished learner step in the live view. Without a terminal, print a line instead.

        A line is printed at most every 5 s, and always for the first and the last step.
        """
        self._records.append(record)
        self._history.append(record)
        now = time.monotonic()
        last = record.step + 1 == self._total_steps
        if not self._console.is_terminal and (now - self._last_line_s >= LINE_EVERY_S or record.step == 0 or last):
            self._last_line_s = now
            self.say("  ".join(f"{name} {value}" for name, value in self._cells(record, self._use)))

    def use(self, use: RunUse) -> None:
        """Set the busy and idle times of learner and fleet that the view shows until the next call."""
        self._use = use

    def evaluation(self, evaluation: Evaluation) -> None:
        """Print a line with the mean rewards of an evaluation on held-out prompts."""
        sampled, greedy = evaluation.sampled, evaluation.greedy
        self.say(
            f"held out, policy version {evaluation.policy_version}: sampled {sampled:.3f}, greedy {greedy:.3f} "
            f"({evaluation.num_prompts} prompts){evaluation.shortfall}"
        )

    def summary(self, summary: dict[str, Any], run_dir: Path) -> None:
        """Print the final lines of a completed run. ``summary`` is the result of `summary_document`."""
        tokens, overlap, lag = summary["tokens"], summary["overlap"], summary["max_lag"]
        self._console.print()
        self._console.print(f"policy version {summary['policy_version']} in {run_dir}", markup=False)
        before, after = summary["eval"]["before"], summary["eval"]["after"]
        if before and after:
            for kind in ("sampled", "greedy"):
                self._console.print(f"  held out, {kind:8} {before[kind]:.3f} -> {after[kind]:.3f}")
        before_resume = f" ({lag['before_resume']} before resuming)" if lag["before_resume"] else ""
        self._console.print(f"  lag       at most {lag['realised']} of {lag['bound']} learner steps{before_resume}")
        self._console.print(
            f"  tokens    {tokens['generated']:,} generated = {tokens['trained']:,} trained + {tokens['dropped']:,} "
            f"dropped + {tokens['buffered']:,} buffered + {tokens['in_flight']:,} in flight"
        )
        if failed := summary["groups_failed"]:
            reasons = ", ".join(f"{count} by {reason}" for reason, count in failed.items())
            self._console.print(
                f"  failed    attempts at a prompt group: {reasons}; see logs/rollout-*.log", markup=False
            )
        if overlap:
            busy, folder = overlap["utilisation"], shlex.quote(str(run_dir))
            self._console.print(
                f"  busy      learner {busy['learner']:.0%}, fleet {busy['fleet']:.0%}; {overlap['step_s']:.3f} s per "
                f"step, {overlap['ideal_step_s']:.3f} s for the slower pool alone; why: asyncrl profile {folder}",
                markup=False,
            )
        if advice := summary["advice"]:
            words = f"{advice['change']} is predicted to take {advice['predicted_step_s']:.3g} s per step"
            self._console.print(f"  advice    {words}; {advice['why']}", markup=False)
        self._console.print(
            f"  time      {_duration(summary['wall_s'])}, training {_duration(summary['train_wall_s'])}"
        )

    def _cells(self, record: StepRecord, use: RunUse | None = None) -> list[tuple[str, str]]:
        """Return pairs (name, value) that describe a step. With ``use``, include the busy time of learner and fleet."""
        rollout_rate, learner_rate = self._rates()
        policy = ((shown, record.learner.get(name)) for shown, name in _OF_THE_POLICY)
        return [
            ("step", f"{record.step + 1}/{self._total_steps}"),
            ("reward", f"{record.reward:.3f}"),
            ("lag", f"{record.lag_mean:.2f} (max {record.lag_max})"),
            ("rollout", f"{rollout_rate:,.0f} tok/s"),
            ("learner", f"{learner_rate:,.0f} tok/s"),
            *((shown, f"{value:.3g}") for shown, value in policy if value is not None),
            *(_shares(use) if use else ()),
            ("buffer", f"{record.buffer_groups} stored, {record.leased_groups} generating"),
            ("left", _duration(self._step_s() * (self._total_steps - record.step - 1))),
        ]

    def _rates(self) -> tuple[float, float]:
        """Return a pair: tokens per second of the fleet, and of the learner's updates, over the newest steps."""
        first, last = self._records[0], self._records[-1]
        if first is last or last.time_s <= first.time_s:
            return last.rollout_tokens_per_s, last.learner_tokens_per_s
        steps = list(self._records)[1:]
        trained, update_s = sum(r.learner_tokens_per_s * r.update_s for r in steps), sum(r.update_s for r in steps)
        generated = last.generated_tokens - first.generated_tokens
        return generated / (last.time_s - first.time_s), trained / update_s if update_s > 0 else 0.0

    def _step_s(self) -> float:
        first, last = self._records[0], self._records[-1]
        return last.time_s if first is last else (last.time_s - first.time_s) / (len(self._records) - 1)

    def render(self) -> Panel:
        """Return what the live view shows now, as a Rich panel."""
        rows: list[Text | Table | Columns] = []
        if self._records:
            record = self._records[-1]
            cells = (Text.assemble((name, "dim"), " ", (value, "bold")) for name, value in self._cells(record))
            rows += [self._progress(record), Columns(cells, padding=(0, 2))]
            rows += [self._pools(self._use)] if self._use else []
            rows.append(self._sparks())
        rows += [
            Text(f"waiting for {part} ({time.monotonic() - since:.0f} s)", style="yellow")
            for part, since in self._waiting.items()
        ]
        return Panel(Group(*rows), title=f"{self._title}  {_duration(self.elapsed_s)}", title_align="left")

    def _progress(self, record: StepRecord) -> Table:
        line = Table.grid(expand=True)  # use a table, because a bar alone does not print a newline
        line.add_row(ProgressBar(total=self._total_steps, completed=record.step + 1))
        return line

    def _pools(self, use: RunUse) -> Table:
        """Return a table for learner and fleet: a bar of the recent busy time, and the largest cause of idle time."""
        table = Table.grid(padding=(0, 2))
        for pool in (use.learner, use.fleet):
            busy, cause = pool.recent.get(BUSY, 0.0), pool.top_cause
            table.add_row(
                Text(pool.name, style="dim"),
                ProgressBar(total=1.0, completed=busy, width=_BAR_WIDTH, complete_style="green"),
                Text(f"{busy:.0%}", style="bold"),
                Text(f"{in_words(cause[0])} {cause[1]:.0%}" if cause else "", style="yellow"),
            )
        return table

    def _sparks(self) -> Table:
        table, last = Table.grid(padding=(0, 2)), self._history[-1]
        series = {
            "buffer": ([record.buffer_groups for record in self._history], f"{last.buffer_groups}"),
            "in flight": ([record.leased_groups for record in self._history], f"{last.leased_groups}"),
            "lag": ([record.lag_mean for record in self._history], f"{last.lag_mean:.2f}"),
        }
        for name, (values, now) in series.items():
            table.add_row(Text(name, style="dim"), Text(sparkline(values), style="blue"), Text(now, style="bold"))
        return table


def sparkline(values: Sequence[float]) -> str:
    """Return one character per value, scaled from 0 to the largest value. Example: [0, 1, 2] gives ``▁▅█``."""
    top = max(values, default=0.0) or 1.0
    return "".join(_SPARKS[min(7, max(0, round(7 * value / top)))] for value in values)


def _shares(use: RunUse) -> list[tuple[str, str]]:
    def words(pool: PoolUse) -> str:
        cause = pool.top_cause
        return f"{pool.recent.get(BUSY, 0.0):.0%}" + (f" ({in_words(cause[0])} {cause[1]:.0%})" if cause else "")

    return [(f"{pool.name} at work", words(pool)) for pool in (use.learner, use.fleet)]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
