"""A buffer service with its journal, but without sockets. It simulates that the process is killed during a write."""

import errno
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from buffer import BufferConfig, Durability, journal
from buffer.encoding import PUSH_ID, Message
from buffer.journal import AppendOnlyFile, Journal
from buffer.operations import Failure
from buffer.service import BufferService
from buffer.sockets import LoopClock


class Killed(BaseException):
    """Raised at a simulated kill of the process."""


class MortalWrites:
    """Replaces `buffer.journal.write_all`. Simulates a kill of the process before, during or after some writes.

    ``kills`` has a pair for each kill. The first number says which write after the previous kill is interrupted. The
    second number says how many 32nds of this write reach the disk. Writes of the journal's threads are not interrupted.
    """

    def __init__(self, kills: list[tuple[int, int]]) -> None:
        self._kills = list(kills)
        self._count = 0
        self._write_all = journal.write_all

    def __call__(self, descriptor: int, parts: list[Any], offset: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._write_all(descriptor, parts, offset)
            return
        self._count += 1
        if not self._kills or self._count < self._kills[0][0]:
            self._write_all(descriptor, parts, offset)
            return
        _, share = self._kills.pop(0)
        self._count = 0
        data = b"".join(map(bytes, parts))
        self._write_all(descriptor, [data[: len(data) * share // 32]], offset)
        raise Killed


class _DeadWrites(MortalWrites):
    """Refuses the writes of the main thread, because a killed process cannot write."""

    def __init__(self) -> None:
        super().__init__([])

    def __call__(self, descriptor: int, parts: list[Any], offset: int) -> None:
        if threading.current_thread() is threading.main_thread():
            raise OSError(errno.EIO, "the process was killed")
        self._write_all(descriptor, parts, offset)


@dataclass(eq=False)
class _Timer:
    when: float
    fire: Callable[[], None]
    is_over: bool = False

    def cancel(self) -> None:
        self.is_over = True


class ManualClock(LoopClock):
    """A clock whose timers fire only when the test calls `fire_due`."""

    def __init__(self, time: Callable[[], float]) -> None:
        super().__init__(time)
        self._timers: list[_Timer] = []

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        """Add a timer. `fire_due` fires it."""
        self._timers.append(_Timer(when, callback))
        return self._timers[-1]

    def fire_due(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Pass the callback of each due timer to ``run``. Skip timers that an earlier callback has cancelled."""
        now, timers = self.time(), self._timers
        self._timers = [timer for timer in timers if timer.when > now and not timer.is_over]
        for timer in timers:
            if timer.when <= now and not timer.is_over:
                run(timer.fire)


class MortalServer:
    """A buffer service with its journal. A kill loses the replies to commands that are not in the journal's files yet.

    Attributes:
        num_kills: Number of kills so far.
        service: The service since the latest kill.
        replies: Replies that the test has not read yet, by client and request.
    """

    def __init__(
        self, config: BufferConfig, directory: Path, *, groups_per_step: int, clock: ManualClock | None = None
    ) -> None:
        self._config = replace(config, durability=Durability.disk, directory=str(directory))
        self._groups_per_step = groups_per_step
        self._clock = clock
        self.num_kills = 0
        self.replies: dict[tuple[bytes, int], Message] = {}
        self._unanswered: OrderedDict[tuple[bytes, int], Message] = OrderedDict()
        self._outbox: list[tuple[bytes, Message]] = []
        self._start()

    def _start(self) -> None:
        while True:
            self._outbox.clear()
            kept = None
            try:
                kept = Journal(Path(self._config.directory) / "journal")
                self.service = BufferService(
                    self._config,
                    groups_per_step=self._groups_per_step,
                    send=self._send,
                    journal=kept,
                    clock=self._clock,
                )
            except Killed:
                self._release(kept)
            else:
                self._journal = kept
                return

    def _send(self, client: bytes, message: Message) -> None:
        self._outbox.append((client, message))

    def _release(self, kept: Journal | None) -> None:
        """Release the journal's lock and close its files without changing them, as the kernel does after a kill."""
        self.num_kills += 1
        if kept is not None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(journal, "write_all", _DeadWrites())
                patch.setattr(AppendOnlyFile, "cut", lambda file, num_bytes: None)
                kept.close()

    def kill(self) -> None:
        """Kill and restart the service. After the restart, the clients repeat their unanswered requests."""
        self.service.close()
        self._release(self._journal)
        self._start()
        for (client, _), request in list(self._unanswered.items()):
            self.deliver(client, request)

    def send(self, client: bytes, request: Message) -> None:
        """Send a request. If the service restarts before it has answered, the request is sent again."""
        self._unanswered[client, request.request_id] = request
        self.deliver(client, request)

    def forget(self, client: bytes) -> None:
        """Remove a client, so that its unanswered requests are not repeated."""
        for key in [key for key in self._unanswered if key[0] == client]:
            del self._unanswered[key]

    def deliver(self, client: bytes, request: Message) -> None:
        """Deliver a request to the service, for the first time or as a late copy."""
        request.client = client
        self._do(lambda: self.service.handle(request))

    def pass_time(self) -> None:
        """Fire the due timers of the `ManualClock`. A timer ends expired leases, or the leases of a silent worker."""
        self._clock.fire_due(self._do)

    def _do(self, work: Any) -> None:
        try:
            work()
            self.service.settle()
            self._journal.flush()
        except Killed:
            self.kill()
            return
        for client, message in self._outbox:
            if message.request_id != PUSH_ID:
                self.replies[client, message.request_id] = message
                self._unanswered.pop((client, message.request_id), None)
        self._outbox.clear()

    def ask(self, client: bytes, request: Message) -> Message:
        """Send a request that the service answers immediately. Returns the reply. An error fails the test."""
        self.send(client, request)
        reply = self.replies.pop((client, request.request_id))
        assert kind_of(reply) == "ok", reply
        return reply

    def close(self) -> None:
        """Close the service normally, without a kill."""
        self.service.close()
        self._journal.close()


def kind_of(reply: Message) -> str:
    """Return the name of the error in a reply, or ``ok``."""
    return reply.body.name if isinstance(reply.body, Failure) else "ok"
