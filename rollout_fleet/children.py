"""Child processes of a rollout worker that run a user's code: rewards and environments."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.core.errors import WorkerDiedError
from asyncrl.core.host import NO_GPUS
from asyncrl.core.stacks import missed

from .child_pipes import LENGTH, MARK, ChildFolder, kill_marked
from .config import RolloutFleetConfig
from .engines.process_guard import without_secrets

_THIS_HOST = ("127.0.0.1", "localhost")


class ChildProcess:
    """A child process that runs a user's code, with the pipes to it. Use `start` to make one.

    Its temporary files are in a folder that is removed when the child ends.

    Attributes:
        pid: Process id of the child, which is also its session id.
    """

    def __init__(self, process: Process, mark: str, folder: ChildFolder) -> None:
        self.pid = process.pid
        self._process = process
        self._mark = mark
        self._folder = folder
        self._clearing_up = asyncio.create_task(self._clear_up())

    @classmethod
    async def start(
        cls, command: Sequence[str], environment: Mapping[str, str], *, what: str, timeout_s: float
    ) -> ChildProcess:
        """Start a child process, and wait for its first message.

        ``environment`` has all environment variables of the child. ``what`` names the child in errors.

        Raises `WorkerDiedError` if the child ends before its first message, and `DeadlineError` if the message does not
        come within ``timeout_s`` seconds.
        """
        await asyncio.to_thread(ChildFolder.clear_up_unlocked)  # in a thread: removing large folders takes seconds
        mark = uuid.uuid4().hex
        folder = ChildFolder(mark)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                env={**environment, MARK: mark, "TMPDIR": folder.path},
                start_new_session=True,
            )
        except BaseException:
            folder.remove()
            raise
        child = cls(process, mark, folder)
        try:
            async with asyncio.timeout(timeout_s):
                await child.receive()
        except TimeoutError:
            error = missed(f"{what} was not up within {timeout_s:g} s")
            await child.kill()
            raise error from None
        except asyncio.IncompleteReadError:
            raise WorkerDiedError(
                f"{what} ended with exit status {await child.exit_status()} before it was ready; its traceback is in "
                "the worker's log"
            ) from None
        except BaseException:
            await child.kill()
            raise
        return child

    async def send(self, question: Any) -> None:
        """Pickle ``question`` and send it to the child. Raises `ConnectionError` if the child has ended."""
        assert self._process.stdin is not None
        frame = pickle.dumps(question)
        self._process.stdin.write(LENGTH.pack(len(frame)) + frame)
        await self._process.stdin.drain()

    async def receive(self) -> Any:
        """Wait for the child's next message and return it, parsed from JSON.

        Raises `asyncio.IncompleteReadError` if the child has ended.
        """
        assert self._process.stdout is not None
        (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        return json.loads(await self._process.stdout.readexactly(length))

    async def exit_status(self) -> int | None:
        """Wait up to a second for the child to exit, and return the child's exit status.

        The status is negative if a signal ended the child. Call this method when the child's pipe has closed. A child
        that does not exit within the second is killed.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), 1.0)
        await self.kill()
        return self._process.returncode

    def signal(self, signum: int) -> None:
        """Send the signal ``signum`` to the child, but not to its descendants. Does nothing if the child has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signum)

    async def kill(self) -> None:
        """Kill the child and all its descendants, wait for their end, and remove the child's temporary files."""
        self.signal(signal.SIGKILL)
        await asyncio.shield(self._clearing_up)

    async def _clear_up(self) -> None:
        """Kill the descendants as soon as the child exits, because the child's process id may be reused later."""
        await self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.to_thread(kill_marked, MARK, self._mark)
        await asyncio.to_thread(self._folder.remove)


def child_environment(config: RolloutFleetConfig) -> dict[str, str]:
    """Return the environment variables for a child process that runs a user's code.

    The child sees no GPUs. It gets a secret of this process only if the option ``rollout_fleet.pass_secrets`` names the
    secret. ``no_proxy`` includes this host, so connections to this host do not use a proxy.
    """
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    direct = known if known == "*" else ",".join(filter(None, (known, *_THIS_HOST)))
    return {**without_secrets(config.pass_secrets), **NO_GPUS, "no_proxy": direct, "NO_PROXY": direct}


def with_remedy(message: str, config: RolloutFleetConfig, *, who: str) -> str:
    """Return ``message``, the error of a child process, with a hint if ``message`` names a secret.

    The hint is added if ``message`` contains the name of a secret environment variable that children do not get. The
    hint names the option that passes the variable. ``who`` names the kind of processes. Example: ``"environments"``.
    """
    withheld = sorted(os.environ.keys() - without_secrets(config.pass_secrets).keys())
    missed = next((name for name in withheld if name in message), None)
    if missed is None:
        return message
    return f"{message}; {who} get {missed} with rollout_fleet.pass_secrets=[{missed}]"
