"""Who watches a run: the terminal, the trackers, the dashboard, the planner. None may slow it down, or end it.

The dashboard is a process of its own. How the pools are used is read from the run's own record, on a thread, after
learner steps; `Watching.step` wakes that, and it rests long enough to stay below a hundredth of the time. So does the
planner, which replays the run under other options, in processes of its own (`AdviceProcess`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self

from asyncrl.config import RunConfig
from asyncrl.metrics import Evaluation, LearningSignals, RunUse, StepRecord, TerminalView, TrackedRun, Trackers
from asyncrl.profile.advice import advice_file
from asyncrl.profile.live import LiveUse

logger = logging.getLogger(__name__)

_REST_FACTOR = 100.0
_LEAST_REST_S = 1.0
_START_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 30.0
MIN_ADVICE_STEPS = 30
"""Learner steps before the first look for advice."""
ADVICE_SHARE = 0.01
"""CPU time that looks for advice may take, as a share of the time since training began."""
_FIRST_ADVICE_S = 3.0
_LAST_ADVICE_S = 20.0


class Watching:
    """Tells all who watch a run of each step and evaluation.

    Args:
        config: Of the run.
        run_dir: Its folder.
        view: The terminal.
    """

    def __init__(self, config: RunConfig, run_dir: Path, view: TerminalView) -> None:
        self._config = config
        self._run_dir = run_dir
        self._view = view
        self._trackers = Trackers({})
        self._dashboard = DashboardProcess(run_dir, config.dashboard_address)
        is_advised = config.profile.enabled and config.profile.advice and not config.placement.colocated
        self._advice = AdviceProcess(run_dir) if is_advised else None
        self._signals = LearningSignals()
        self._stepped = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Open trackers and dashboard. Raises `ValueError` where a tracker cannot be opened."""
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
            self._view.say(await self._dashboard.start())
        self._reading = asyncio.create_task(self._read_use())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send what is left, and end the dashboard."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._advice is not None:
            await self._advice.stop()
        await self._dashboard.stop()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._trackers.close)
        except TimeoutError:
            self._view.say(f"the trackers {self._config.tracker} took longer than {_CLOSE_TIMEOUT_S:g} s to end")
        if failed := {name: count for name, count in self._trackers.num_failed.items() if count}:
            self._view.say(f"trackers that failed, and how often: {failed}; logs/controller.log says why")

    def step(self, record: StepRecord) -> None:
        """A learner step is done."""
        self._view.step(record)
        self._trackers.step(record)
        for line in self._signals.step(record):
            self._view.say(f"warning: {line}")
        if self._advice is not None:
            self._advice.step()
        self._stepped.set()

    async def last_advice(self) -> None:
        """Look for advice once more, on the whole run, and predict the frontier: nothing trains any more."""
        if self._advice is not None:
            await self._advice.last()

    def evaluation(self, evaluation: Evaluation) -> None:
        """A held-out evaluation is done."""
        self._view.evaluation(evaluation)
        self._trackers.evaluation(evaluation)

    async def _read_use(self) -> None:
        live = LiveUse(self._run_dir)
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            began_s = time.monotonic()
            try:
                use: RunUse | None = await asyncio.to_thread(live.read)
            except FileNotFoundError:  # profile.enabled=false
                return
            except Exception:
                logger.exception("how the pools are used cannot be read")
                return
            if use is not None:
                self._view.use(use)
                self._trackers.use(use)
            await asyncio.sleep(max(_LEAST_REST_S, _REST_FACTOR * (time.monotonic() - began_s)))


class DashboardProcess:
    """The dashboard of a run, as a child that ends with this process, whatever that dies of: its stdin ends then.

    Args:
        run_dir: Folder of the run.
        address: ``host:port`` to serve it at.
    """

    def __init__(self, run_dir: Path, address: str) -> None:
        self._run_dir = run_dir
        self._address = address
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Start it; returns a line for the user: where it is, or why it is not."""
        log = self._run_dir / "logs" / "dashboard.log"
        command = [sys.executable, "-m", "asyncrl.profile.dashboard", str(self._run_dir), "--with-parent"]
        with log.open("ab") as stderr:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *("--address", self._address),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C is the run's: the page shows how it ends
            )
        assert self._process.stdout is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_TIMEOUT_S):
                if url := (await self._process.stdout.readline()).decode().strip():
                    return f"dashboard: {url}"
        return f"the dashboard did not come up at {self._address}, the run goes on without it; see {log}"

    async def stop(self) -> None:
        """End it, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


class AdviceProcess:
    """``asyncrl plan --only-advice`` beside a run, again and again: at nice 19, one process at a time.

    The first look is taken once a hundredth of the time since training began suffices for it, the next when it
    suffices for all so far and one more. A look that fails is counted at four times the cost, and tried again then.

    Args:
        run_dir: Folder of the run; ``advice.json`` is written there.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._num_steps = 0
        self._began_s = 0.0
        self._spent_s, self._next_s = 0.0, _FIRST_ADVICE_S
        self._looking: asyncio.Task[None] | None = None

    def step(self) -> None:
        """A learner step is done: take a look, if it may be afforded."""
        now_s = time.monotonic()
        self._began_s = self._began_s or now_s
        self._num_steps += 1
        is_looking = self._looking is not None and not self._looking.done()
        affordable_s = ADVICE_SHARE * (now_s - self._began_s)
        if not is_looking and self._num_steps >= MIN_ADVICE_STEPS and self._spent_s + self._next_s <= affordable_s:
            self._looking = asyncio.create_task(self._look())

    async def last(self) -> None:
        """Look once more after the last step, and predict each bound for the report's frontier, within a few seconds.

        A run with too few steps is not looked at.
        """
        if self._num_steps >= MIN_ADVICE_STEPS:
            await self.stop()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_ADVICE_S):
                    await self._look("--frontier")

    async def stop(self) -> None:
        """End a look that is being taken."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self, *flags: str) -> None:
        limit_s = math.ceil(max(10.0, 4 * self._next_s))
        command = ["nice", "-n", "19", sys.executable, "-m", "asyncrl", "plan", str(self._run_dir)]
        try:
            with (self._run_dir / "logs" / "advice.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    *("--only-advice", str(limit_s)),
                    *flags,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            try:
                status = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
            if status != 0:
                raise ChildProcessError(f"it ended with status {status}")
            cost_s = json.loads(advice_file(self._run_dir).read_text())["cpu_s"]
        except (OSError, ValueError, KeyError) as error:
            logger.warning("no advice was found: %s; see logs/advice.log", error)
            cost_s = 4 * self._next_s
        self._spent_s += cost_s
        self._next_s = cost_s
