"""The process that runs environments: many concurrent episodes in one event loop.

The parent, `rollout_fleet.episodes.environment_processes`, sends pickled requests. This process answers in JSON::

    {"run": 7, …} ──▶   "loading"                            the event loop may be blocked until the next message
                        "beat"                               once per second
                        {"id": 7, "tool": [0, "search", true]}       tool call 0 of episode 7 begins; false: it ends
                        {"id": 7, "outcome": …, "num_left": 0, "num_stuck": 0}  or  {"id": 7, "failure": …, …}
    {"cancel": 7} ──▶   the answer to request 7

At the end of an episode, its tasks are cancelled and its programs are killed. ``num_left`` is the number of these tasks
and programs together. Threads, and tasks that ignore their cancellation, may still run. ``num_stuck`` is the number of
these threads and tasks, of all ended episodes. If it is too large, the parent replaces the process.

This module needs only the standard library, because the process may use another Python than the run.
"""

from __future__ import annotations

import array
import asyncio
import contextvars
import faulthandler
import functools
import importlib.util
import inspect
import json
import logging
import multiprocessing.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, BinaryIO

from asyncrl.core.types import Prompt
from rollout_fleet.child_pipes import LENGTH, MARK, READY, kill_marked, open_pipes, write_frame

from .adapters import FunctionEnvironment
from .environment import ENVIRONMENTS, OVERFLOW_CODE, EpisodeFailure, FailureKind, Outcome, Policy, ToolError

logger = logging.getLogger(__name__)

BEAT_S = 1.0
GRACE_S = 1.0
"""Time limit for the cancelled tasks of an ended episode to end, in seconds."""
MOST_NAMED = 80
"""Longest reported tool name, in characters. The policy may have written the name."""
EPISODE = "ASYNCRL_EPISODE"
"""Name of the environment variable that marks the programs that an episode started."""
_ENVIRONMENTS_KEPT = 16
_THREADS = 64
_SHUTTING_DOWN = frozenset({410, 503})  # the policy's endpoint answers with these HTTP statuses after an episode's end


class _Traces:
    """The tasks, threads, calls in thread pools, and programs that one episode has started in this process."""

    def __init__(self, episode: str) -> None:
        self.episode = episode
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.calls: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self.forks: list[int] = []
        self.has_programs = False

    async def clear_up(self, own_thread: ThreadPoolExecutor) -> int:
        """Kill the episode's programs and cancel its tasks. Return how many programs and tasks still ran."""
        killed = sum(map(_kill_fork, self.forks))
        if self.has_programs or self.forks:  # a forked process may have started programs too
            kill = functools.partial(kill_marked, EPISODE, self.episode, spare=(os.getpid(),))
            killed += await asyncio.get_running_loop().run_in_executor(own_thread, kill)
        tasks = {task for task in self.tasks if not task.done()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE_S)
        return killed + len(tasks)

    def mark(self, environment: Mapping[str, str] | None) -> dict[str, str]:
        """Return the environment variables for a program that the episode starts: ``environment`` plus two marks.

        `clear_up` and the parent of this process find the program by these marks, and kill it.
        """
        self.has_programs = True
        given = os.environ if environment is None else environment
        return {**given, EPISODE: self.episode, MARK: os.environ.get(MARK, "")}

    @property
    def num_stuck(self) -> int:
        """Number of the episode's unfinished tasks, threads and calls in thread pools."""
        unfinished = sum(not work.done() for work in (*self.tasks, *self.calls))
        return unfinished + sum(thread.is_alive() for thread in self.threads)


_current: contextvars.ContextVar[_Traces | None] = contextvars.ContextVar("episode", default=None)


def _kill_fork(pid: int) -> bool:
    try:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ChildProcessError, ProcessLookupError):  # the process had ended, and the environment had waited for it
        return False
    return True


class _DefaultThreads(ThreadPoolExecutor):
    """The thread pool for ``asyncio.to_thread``."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def without_stop_iteration() -> Any:
            try:
                return fn(*args, **kwargs)
            except StopIteration as error:  # an asyncio future cannot raise StopIteration
                raise RuntimeError("a call in a thread raised StopIteration") from error

        return super().submit(without_stop_iteration)


def _call_in(traces: _Traces | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in this thread. ``traces`` records the tasks and programs that the function starts."""
    token = _current.set(traces)
    try:
        return function(*args, **kwargs)
    finally:
        _current.reset(token)


def _submitting(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """Wrap ``ThreadPoolExecutor.submit``, so that a call belongs to the episode that submits it."""

    @functools.wraps(submit)
    def submitting(pool: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # Unset the current episode during `submit`, because the pool may start a thread that later episodes also use.
        traces = _current.get()
        call = _call_in(None, submit, pool, _call_in, traces, fn, *args, **kwargs)
        if traces is not None:
            traces.calls.add(call)
        return call

    return submitting


def _noting_pid(start: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(start)
    def noting(*args: Any) -> int:
        pid = start(*args)
        if pid and (traces := _current.get()) is not None:
            traces.forks.append(pid)
        return pid

    return noting


def _marking(spawn: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(spawn)
    def marking(path: Any, argv: Any, env: Mapping[str, str], **options: Any) -> int:
        traces = _current.get()
        return spawn(path, argv, env if traces is None else traces.mark(env), **options)

    return marking


def _trace(loop: asyncio.AbstractEventLoop) -> None:
    def make_task(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=loop, **options)
        if (traces := _current.get()) is not None:
            traces.tasks.add(task)
        return task

    start_thread, start_program = threading.Thread.start, subprocess.Popen.__init__

    @functools.wraps(start_thread)
    def start(thread: threading.Thread) -> None:
        traces = _current.get()
        if traces is not None:
            thread.run = functools.partial(_call_in, traces, thread.run)  # type: ignore[method-assign]
        start_thread(thread)
        if traces is not None:
            traces.threads.add(thread)

    @functools.wraps(start_program)
    def init(program: subprocess.Popen[Any], *args: Any, **options: Any) -> None:
        if (traces := _current.get()) is not None:
            options["env"] = traces.mark(options.get("env"))
        start_program(program, *args, **options)

    def system(command: str) -> int:
        if (status := subprocess.Popen(command, shell=True).wait()) < 0:
            return -status  # like `os.system`, return the number of the signal that ended the command
        return status << 8

    loop.set_task_factory(make_task)  # type: ignore[arg-type]
    loop.set_default_executor(_DefaultThreads(_THREADS))
    threading.Thread.start = start  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = _submitting(ThreadPoolExecutor.submit)  # type: ignore[method-assign]
    subprocess.Popen.__init__ = init  # type: ignore[method-assign]
    os.system = system
    os.posix_spawn, os.posix_spawnp = _marking(os.posix_spawn), _marking(os.posix_spawnp)
    os.fork = _noting_pid(os.fork)
    multiprocessing.util.spawnv_passfds = _noting_pid(multiprocessing.util.spawnv_passfds)  # type: ignore[attr-defined]


class EnvironmentChild:
    """Runs the episodes that the parent requests, and writes the answers to a pipe."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers = answers
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._kept: dict[str, Any] = {}
        self._ended: list[_Traces] = []
        self._own_thread = ThreadPoolExecutor(1)

    async def serve(self, questions: BinaryIO) -> None:
        """Read the parent's requests from the pipe ``questions`` and run the episodes, until the pipe closes."""
        loop = asyncio.get_running_loop()
        _trace(loop)
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), questions)
        beating = asyncio.create_task(self._beat())
        write_frame(self._answers, READY)
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                question = pickle.loads(await reader.readexactly(length))
                if "cancel" in question:
                    if (task := self._episodes.get(question["cancel"])) is not None:
                        task.cancel()
                elif "describe" in question:
                    self._describe(question)
                else:
                    self._episodes[question["run"]] = asyncio.create_task(self._run(question))
        except asyncio.IncompleteReadError:
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            write_frame(self._answers, "beat")
            await asyncio.sleep(BEAT_S)

    def _describe(self, question: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {"id": question["describe"]}
        try:
            environment = self._environment(question["name"], question["options"])
            answer["replayable"] = bool(getattr(environment, "replayable", True))
        except BaseException as error:  # noqa: BLE001 - user code may raise any exception
            failure = _failure(error)
            answer["failure"] = (failure.kind, str(failure))
        write_frame(self._answers, answer)

    async def _run(self, question: Mapping[str, Any]) -> None:
        number, answer = question["run"], {}
        traces = _Traces(f"{os.getpid()}-{number}")
        context = contextvars.copy_context()
        context.run(_current.set, traces)
        try:
            policy = Policy(**question["policy"], on_tool=functools.partial(self._on_tool, number))
            prompt = _prompt(question["prompt"])
            environment = self._environment(question["name"], question["options"])
            body = context.run(asyncio.create_task, _outcome(environment, prompt, policy))
            # Read the task's exception. Otherwise asyncio would log an exception that was never retrieved.
            body.add_done_callback(lambda body: body.cancelled() or body.exception())
            await asyncio.wait([body])
            answer["outcome"] = asdict(body.result())
        except BaseException as error:  # the user's code raised an error, or the parent cancelled the episode
            failure = _failure(error)
            answer["failure"] = (failure.kind, str(failure))
            if not isinstance(error, (asyncio.CancelledError, EpisodeFailure)):
                logger.warning("an episode failed: %s", failure, exc_info=error)
        num_left = await traces.clear_up(self._own_thread)
        self._ended = [ended for ended in (*self._ended, traces) if ended.num_stuck]
        num_stuck = sum(ended.num_stuck for ended in self._ended)
        del self._episodes[number]
        write_frame(self._answers, {"id": number, **answer, "num_left": num_left, "num_stuck": num_stuck})

    def _on_tool(self, episode: int, number: int, name: str, is_running: bool) -> None:
        write_frame(self._answers, {"id": episode, "tool": [number, name[:MOST_NAMED], is_running]})

    def _environment(self, name: str, options: Mapping[str, Any]) -> Any:
        key = json.dumps([name, options], sort_keys=True, default=repr)
        environment = self._kept.pop(key, None)
        if environment is None:
            write_frame(self._answers, "loading")
            environment = _load(name, options)
            write_frame(self._answers, "beat")
        self._kept[key] = environment
        if len(self._kept) > _ENVIRONMENTS_KEPT:
            del self._kept[next(iter(self._kept))]
        return environment


def _load(name: str, options: Mapping[str, Any]) -> Any:
    try:
        entry = ENVIRONMENTS.get(name)
        if not inspect.isclass(entry):
            return FunctionEnvironment(entry, options)
        if not callable(getattr(entry, "run", None)):
            raise ValueError(f"rollout_fleet.environment.name={name}: the class must have a method run(prompt, policy)")
        try:
            inspect.signature(entry).bind(**options)
        except TypeError as error:
            raise ValueError(
                f"rollout_fleet.environment.options must be the arguments of {name}{inspect.signature(entry)}, got "
                f"{dict(options)}: {error}"
            ) from error
    except ValueError as error:
        raise EpisodeFailure(FailureKind.environment, str(error)) from error
    return entry(**options)


def _prompt(pickled: bytes) -> Prompt:
    fields = pickle.loads(pickled)
    token_ids: Any = array.array("i", fields["prompt_ids"])
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        token_ids = np.frombuffer(token_ids, dtype=np.int32)
    return Prompt(**{**fields, "prompt_ids": token_ids})


async def _outcome(environment: Any, prompt: Prompt, policy: Policy) -> Outcome:
    try:
        outcome = Outcome.of(await environment.run(prompt, policy))
    except SystemExit as error:  # SystemExit and KeyboardInterrupt in a task would end the event loop
        raise EpisodeFailure(FailureKind.environment, f"the environment called sys.exit({error.code})") from error
    except KeyboardInterrupt as error:
        raise EpisodeFailure(FailureKind.environment, "the environment raised KeyboardInterrupt") from error
    return replace(outcome, metrics={**policy.metrics, **outcome.metrics})


def _failure(error: BaseException) -> EpisodeFailure:
    """Convert ``error``, which ended an episode, to an `EpisodeFailure`.

    The first exception of a known type decides the kind. The search begins with ``error``, then visits its causes.
    """
    for cause in _causes(error):
        if isinstance(cause, EpisodeFailure):
            return cause
        if isinstance(cause, ToolError):
            return EpisodeFailure(FailureKind.tool, str(cause))
        if getattr(cause, "code", None) == OVERFLOW_CODE:  # exceptions of OpenAI's client have the attribute ``code``
            return EpisodeFailure(FailureKind.overflow, str(cause))
        if getattr(cause, "status_code", None) in _SHUTTING_DOWN:
            return EpisodeFailure(FailureKind.infrastructure, str(cause))
    what = "was cancelled" if isinstance(error, asyncio.CancelledError) else f"raised {error!r}"
    return EpisodeFailure(FailureKind.environment, f"the environment {what}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        for member in getattr(error, "exceptions", ()):
            yield from _causes(member)
        error = error.__cause__


def main(parent_pid: int) -> None:
    """Run this child process: run environments for the parent until its pipe closes, then exit.

    ``parent_pid`` is the parent's process id.
    """
    questions, answers = open_pipes(parent_pid)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)  # the parent sends this signal if the event loop is blocked
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    serving = loop.create_task(EnvironmentChild(answers).serve(questions))
    while not serving.done():
        try:
            loop.run_until_complete(serving)
        except (SystemExit, KeyboardInterrupt) as error:
            logger.warning("a task of an environment raised %r; only this task ends", error)
    os._exit(0)  # exit without waiting for threads
