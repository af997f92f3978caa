"""What shows a run to people: terminal, trackers, dashboard and advice. A failure of one does not end the run.

The dashboard is a separate process. A thread reads how the pools are used from the run's record. `Watching.step` wakes
the thread, which then rests long enough to take less than a hundredth of the time. The planner looks for advice once,
after the last step.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self

from asyncrl.config import RunConfig
from asyncrl.metrics import Evaluation, LearningSignals, RunUse, StepRecord, TerminalView, TrackedRun, Trackers
from asyncrl.profile.attribution import LiveUse

logger = logging.getLogger(__name__)

_REST_FACTOR = 100.0
_LEAST_REST_S = 1.0
_START_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 30.0
MIN_ADVICE_STEPS = 30
"""A run with fewer learner steps gets no advice."""
_ADVICE_S = 20.0


class Watching:
    """Passes each step and evaluation of a run on to the terminal, the trackers and the dashboard.

    Args:
        config: The run.
        run_dir: The run's folder.
        view: The terminal.
    """

    def __init__(self, config: RunConfig, run_dir: Path, view: TerminalView) -> None:
        self._config = config
        self._run_dir = run_dir
        self._view = view
        self._trackers = Trackers({})
        self._dashboard = DashboardProcess(run_dir, config.dashboard_address)
        self._num_steps = 0
        self._signals = LearningSignals()
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
            self._view.say(await self._dashboard.start())
        self._reading = asyncio.create_task(self._read_use())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Flush the trackers and stop the dashboard."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._dashboard.stop()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._trackers.close)
        except TimeoutError:
            self._view.say(f"the trackers {self._config.tracker} took longer than {_CLOSE_TIMEOUT_S:g} s to end")
        if failed := {name: count for name, count in self._trackers.num_failed.items() if count}:
            self._view.say(f"trackers that failed, and how often: {failed}; logs/controller.log says why")

    def step(self, record: StepRecord) -> None:
        """Show a finished learner step."""
        self._view.step(record)
        self._trackers.record(record)
        for line in self._signals.step(record):
            self._view.say(f"warning: {line}")
        self._num_steps += 1
        self._stepped.set()

    async def last_advice(self) -> None:
        """Look for advice on the whole run, unless ``profile.advice`` is off. Call it after training."""
        profile = self._config.profile
        is_advised = profile.enabled and profile.advice and not self._config.placement.colocated
        if is_advised and self._num_steps >= MIN_ADVICE_STEPS:
            await look_for_advice(self._run_dir)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Show a finished evaluation."""
        self._view.evaluation(evaluation)
        self._trackers.record(evaluation)

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
                logger.exception("the use of the pools cannot be read")
                return
            if use is not None:
                self._view.use(use)
                self._trackers.record(use)
            await asyncio.sleep(max(_LEAST_REST_S, _REST_FACTOR * (time.monotonic() - began_s)))


class DashboardProcess:
    """The dashboard of a run, a child process. It exits when its stdin closes, so it cannot outlive this process.

    Args:
        run_dir: Folder of the run.
        address: ``host:port`` to serve it at.
    """

    def __init__(self, run_dir: Path, address: str) -> None:
        self._run_dir = run_dir
        self._address = address
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Start the process; returns a line for the user with its address, or with the reason if it does not start."""
        log = self._run_dir / "logs" / "dashboard.log"
        command = [sys.executable, "-m", "asyncrl.profile.dashboard", str(self._run_dir), "--with-parent"]
        with log.open("ab") as stderr:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *("--address", self._address),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C must not end it: the page shows how the run ends
            )
        assert self._process.stdout is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_TIMEOUT_S):
                if url := (await self._process.stdout.readline()).decode().strip():
                    return f"dashboard: {url}"
        return f"the dashboard did not start at {self._address}; the run continues without it; see {log}"

    async def stop(self) -> None:
        """End the process if it runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def look_for_advice(run_dir: Path) -> None:
    """Simulate a finished training under other options, for the advice and the frontier in its report.

    ``asyncrl plan --only-advice`` runs at nice 19 for at most `_ADVICE_S`. A failure is only logged.
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
