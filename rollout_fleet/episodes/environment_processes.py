"""Runs environments in child processes, and assigns episodes to them.

An episode (one rollout with an environment) waits for a process that has room for it. The episode's deadline starts
after this wait. One task per process reads the process's answers and passes them to the episodes. Another task checks
all processes twice per second. It kills a process whose event loop is blocked, or that uses too much memory. The
episodes of that process fail.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import psutil

import asyncrl
import rollout_fleet
from asyncrl.core.errors import DeadlineError, WorkerDiedError
from asyncrl.core.types import Prompt
from rollout_fleet.children import ChildProcess, child_environment, with_remedy
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.metrics import EpisodeCount

from .environment import EpisodeFailure, FailureKind, OnTool, Outcome

logger = logging.getLogger(__name__)

_BOOTSTRAP = """
import importlib.util, sys
for place in sys.argv[2:]:  # our packages alone, not what is installed beside them
    name = place.rpartition("/")[2]
    spec = importlib.util.spec_from_file_location(name, f"{place}/__init__.py", submodule_search_locations=[place])
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
from rollout_fleet.episodes.environment_child import main
main(int(sys.argv[1]))
"""
_LIBRARY_THREADS = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "RAYON")
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Environment variables that another Python must not get, because they lead to the packages of this Python."""
WATCH_S = 0.5
CANCEL_TIMEOUT_S = 10.0
"""Longest time that a process may take to end a cancelled episode, in addition to ``blocked_timeout_s``."""
MOST_STUCK = 16
"""A process is replaced if more than this number of threads and tasks of ended episodes still run in it."""
_TRACEBACK_S = 0.2
_MAX_BACKOFF_S = 30.0
_STEADY_S = 300.0
"""If a process lived for more seconds than this, the pause before its replacement is the shortest pause."""


class HasAccess(Protocol):
    """The policy's address and key for one episode."""

    @property
    def base_url(self) -> str:
        """URL that the episode's environment uses to call the policy, for OpenAI's clients."""
        ...

    @property
    def api_key(self) -> str:
        """API key that identifies the episode."""
        ...


class _EnvironmentProcess:
    """A child process with its episodes. The keys of ``answers`` and ``listeners`` are the ids of requests."""

    def __init__(self, child: ChildProcess, config: RolloutFleetConfig) -> None:
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.listeners: dict[int, OnTool] = {}
        self.is_retiring = False
        self.began = time.monotonic()
        self._child = child
        self._options = config.environment
        self._end: str | None = None
        self._quiet_until = time.monotonic() + self._options.blocked_timeout_s
        self._reading = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    async def ask(self, question: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Send a request and return the answer. If this call is cancelled, `cancel` can still wait for the answer."""
        answer = self.answers[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self.answers.pop(number, None))
        if self._end is not None:
            answer.set_result(self._lost())
        with suppress(ConnectionError):  # if the process has ended, `_read` sets a failure as the answer
            await self._child.send(question)
        return await asyncio.shield(answer)

    async def cancel(self, number: int) -> None:
        """Cancel an episode. If the process does not report the end of the episode in time, kill the process."""
        answer = self.answers.get(number)
        if answer is None:
            return
        with suppress(ConnectionError):
            await self._child.send({"cancel": number})
        timeout_s = self._options.blocked_timeout_s + CANCEL_TIMEOUT_S
        done, _ = await asyncio.wait([answer], timeout=timeout_s)
        if not done:
            await self.end(f"did not clear up a cancelled episode within {timeout_s:g} s")

    def check(self, late_s: float) -> str:
        """Return the reason to kill the process; an empty text if there is none.

        The process gets ``late_s`` more seconds to answer: the seconds for which the worker's event loop was blocked.
        """
        self._quiet_until += late_s
        options = self._options
        if time.monotonic() > self._quiet_until:
            self._child.signal(signal.SIGUSR1)
            return (
                f"blocked its event loop for longer than rollout_fleet.environment.blocked_timeout_s = "
                f"{options.blocked_timeout_s:g} s; its tracebacks are in the worker's log. Await what takes long, or "
                "call it with asyncio.to_thread"
            )
        used_gb = _memory_bytes(self._child.pid) / 1e9
        if used_gb > options.memory_limit_gb:
            return (
                f"used {used_gb:.1f} GB of memory with its children, more than "
                f"rollout_fleet.environment.memory_limit_gb = {options.memory_limit_gb:g}; raise the option, or lower "
                "episodes_per_process"
            )
        return ""

    async def end(self, why: str) -> None:
        """Kill the process. Its episodes fail, with ``why`` in the error message."""
        if self._end is None:
            self._end = why
        await self._child.kill()
        await asyncio.shield(self._reading)

    def _lost(self) -> dict[str, Any]:
        return {"failure": (FailureKind.environment, f"the environment's process {self._end}")}

    async def _read(self) -> None:
        try:
            while True:
                message = await self._child.receive()
                options, is_loading = self._options, message == "loading"
                allowed_s = options.start_timeout_s if is_loading else options.blocked_timeout_s
                self._quiet_until = time.monotonic() + allowed_s
                if isinstance(message, dict) and "tool" in message:
                    if (listener := self.listeners.get(message["id"])) is not None:
                        listener(*message["tool"])
                elif isinstance(message, dict) and (answer := self.answers.get(message["id"])) is not None:
                    answer.set_result(message)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            status = await self._child.exit_status()
            self._end = self._end or f"ended with exit status {status}; an environment must not exit or crash"
        finally:
            self._end = self._end or "was stopped"
            for answer in list(self.answers.values()):
                if not answer.done():
                    answer.set_result(self._lost())


class EnvironmentProcesses:
    """Child processes that run the environments of one rollout worker.

    Attributes:
        counts: Number of events of each kind so far, by the kind's name (`EpisodeCount`). Events that the HTTP
            endpoint counts are missing here.
    """

    def __init__(self, config: RolloutFleetConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._options = config.environment
        self._places = asyncio.Semaphore(self._options.processes * self._options.episodes_per_process)
        self._slots: list[_EnvironmentProcess | None] = [None] * self._options.processes
        self._starting = [asyncio.Lock() for _ in self._slots]
        self._retiring: set[_EnvironmentProcess] = set()
        self._numbers = itertools.count()
        self._num_ends = 0
        self._is_closed = False
        self._replayable: dict[str, bool] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the child processes.

        If the run names an environment, one process loads this environment now, to find errors early.

        Raises:
            ValueError: the environment cannot be loaded, or ``rollout_fleet.environment.python`` cannot be run.
            WorkerDiedError: a process ended before it was ready.
            DeadlineError: a process was not up in time.
        """
        self._watching = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(*(self._start_in(slot) for slot in range(len(self._slots))))
            if self._options.name:
                await self.is_replayable(self._options.name)
        except EpisodeFailure as error:
            await self.close()
            raise ValueError(f"rollout_fleet.environment cannot be used: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def is_replayable(self, name: str, options: Mapping[str, Any] | None = None) -> bool:
        """Return whether an interrupted episode of the environment ``name`` may run again with its recorded turns.

        The result is the attribute ``replayable`` of the environment. ``options`` are the environment's keyword
        arguments. Raises `EpisodeFailure` if the environment cannot be loaded, or its process cannot be started.
        """
        if name not in self._replayable:
            question = {"name": name, "options": self._merged(name, options)}
            async with self._places:
                process = await self._process(0)
                number = next(self._numbers)
                answer = await process.ask({"describe": number, **question}, number)
            if "failure" in answer:
                kind, message = answer["failure"]
                raise EpisodeFailure(FailureKind(kind), with_remedy(message, self._config, who="environments"))
            self._replayable[name] = answer["replayable"]
        return self._replayable[name]

    async def run(
        self,
        prompt: Prompt,
        access: HasAccess,
        *,
        sample: int,
        name: str = "",
        options: Mapping[str, Any] | None = None,
        on_tool: OnTool | None = None,
    ) -> Outcome:
        """Run the environment of one episode in a child process, and return the outcome.

        If this call is cancelled, the environment is cancelled too, with the tasks and programs that it started.

        Args:
            prompt: The prompt that the environment gets.
            access: Base URL and key of the episode.
            sample: Index of the rollout in its group, 0..G - 1.
            name: The environment. Empty: the environment of the run.
            options: Keyword arguments of the environment from the prompt's row of the data. If the environment is that
                of the run, these options override the configured options.
            on_tool: Function that is called when a call of `Policy.run_tool` begins and when it ends.

        Raises:
            EpisodeFailure: the episode has no outcome.
        """
        name = name or self._options.name
        values = {field.name: getattr(prompt, field.name) for field in fields(prompt)}
        question = {
            "prompt": pickle.dumps({**values, "prompt_ids": prompt.prompt_ids.tolist()}),
            "name": name,
            "options": self._merged(name, options),
            "policy": {
                "base_url": access.base_url,
                "api_key": access.api_key,
                "sample_index": sample,
                "turn_timeout_s": self._options.turn_timeout_s,
                "tool_timeout_s": self._options.tool_timeout_s,
            },
        }
        answer = await self._run(question, on_tool)
        if "failure" in answer:
            kind, message = answer["failure"]
            raise EpisodeFailure(FailureKind(kind), with_remedy(message, self._config, who="environments"))
        return Outcome.of(answer["outcome"])

    async def close(self) -> None:
        """Kill all child processes. Running episodes fail, and later calls of `run` fail."""
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
        processes = [process for process in (*self._slots, *self._retiring) if process is not None]
        await asyncio.gather(*(process.end("was stopped with its worker") for process in processes))
        await asyncio.gather(*self._background)

    def _merged(self, name: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
        of_run = self._options.options if name == self._options.name else {}
        return {**of_run, **(options or {})}

    async def _run(self, question: Mapping[str, Any], on_tool: OnTool | None) -> dict[str, Any]:
        await self._places.acquire()
        process, number = None, next(self._numbers)
        answer: dict[str, Any]
        try:
            least = min(range(len(self._slots)), key=lambda slot: len(p.answers) if (p := self._slots[slot]) else 0)
            process = await self._process(least)
            if on_tool is not None:
                process.listeners[number] = on_tool
            async with asyncio.timeout(self._options.episode_timeout_s):
                answer = await process.ask({"run": number, **question}, number)
        except TimeoutError:
            answer = {
                "failure": (
                    FailureKind.environment,
                    "the episode did not end within rollout_fleet.environment.episode_timeout_s = "
                    f"{self._options.episode_timeout_s:g} s; make the environment faster, or raise the option",
                )
            }
        finally:
            clearing = asyncio.create_task(self._clear(process, number))
            self._background.add(clearing)
            clearing.add_done_callback(self._background.discard)
        self.counts[EpisodeCount.leftovers] += answer.get("num_left", 0)
        if process is not None and answer.get("num_stuck", 0) > MOST_STUCK:
            self._retire(process)
        return answer

    async def _clear(self, process: _EnvironmentProcess | None, number: int) -> None:
        try:
            if process is not None:
                process.listeners.pop(number, None)
                await process.cancel(number)
        finally:
            self._places.release()
        if process is not None and process.is_retiring and not process.answers:
            await process.end("was replaced")
            self._retiring.discard(process)

    def _retire(self, process: _EnvironmentProcess) -> None:
        if process not in self._slots:  # the process has already been retired or replaced
            return
        logger.warning("a process of environments is replaced: more than %d threads or tasks are left", MOST_STUCK)
        self.counts[EpisodeCount.processes_retired] += 1
        process.is_retiring = True
        self._retiring.add(process)
        self._slots[self._slots.index(process)] = None

    async def _process(self, slot: int) -> _EnvironmentProcess:
        """Return the child process with the index ``slot``. If no such process runs, start a new process.

        The start is delayed if any child process has ended or failed to start before.
        """
        async with self._starting[slot]:
            process = self._slots[slot]
            if process is not None and not process.has_ended:
                return process
            if process is not None:
                self._slots[slot] = None
                self._num_ends = 1 if time.monotonic() - process.began > _STEADY_S else self._num_ends + 1
                self.counts[EpisodeCount.processes_ended] += 1
            if self._num_ends:
                await asyncio.sleep(min(_MAX_BACKOFF_S, 0.1 * 2 ** min(self._num_ends, 10)))
            try:
                return await self._start_in(slot)
            except (WorkerDiedError, DeadlineError, ValueError) as error:
                self._num_ends += 1
                raise EpisodeFailure(FailureKind.infrastructure, str(error)) from error

    async def _start_in(self, slot: int) -> _EnvironmentProcess:
        child = None if self._is_closed else await self._start_child()
        if child is None or self._is_closed:
            if child is not None:
                await child.kill()
            raise EpisodeFailure(FailureKind.infrastructure, "the rollout worker has closed its environments")
        process = self._slots[slot] = _EnvironmentProcess(child, self._config)
        return process

    async def _start_child(self) -> ChildProcess:
        environment = child_environment(self._config)
        for library in _LIBRARY_THREADS:
            environment[f"{library}_NUM_THREADS"] = str(self._options.threads)
        if self._options.python:
            environment = {key: value for key, value in environment.items() if key not in _FOREIGN}
            environment["PYTHONPATH"] = os.getcwd()
        else:
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        places = [str(Path(package.__file__ or "").parent) for package in (asyncrl, rollout_fleet)]
        python = self._options.python or sys.executable
        try:
            return await ChildProcess.start(
                [python, "-P", "-c", _BOOTSTRAP, str(os.getpid()), *places],
                environment,
                what="a process of environments",
                timeout_s=self._options.start_timeout_s,
            )
        except OSError as error:
            raise ValueError(
                f"rollout_fleet.environment.python must be the path of a Python interpreter, got {python!r}: {error}"
            ) from error

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(WATCH_S)
            late_s = time.monotonic() - before - WATCH_S
            for process in [*self._slots, *self._retiring]:
                if process is None or process.has_ended:
                    continue
                if why := process.check(late_s):
                    logger.warning("a process of environments is killed: it %s", why)
                    self.counts[EpisodeCount.processes_killed] += 1
                    await asyncio.sleep(_TRACEBACK_S)
                    await process.end(why)


def _memory_bytes(pid: int) -> int:
    total = 0
    with suppress(psutil.Error):
        for process in (root := psutil.Process(pid), *root.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return total
