"""Runs the real replay buffer (`buffer.service`) in simulated time, without sockets, on simpy's clock."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import simpy

from asyncrl.core.errors import AsyncRLError
from buffer.config import BufferConfig
from buffer.encoding import Message, error_of
from buffer.ledger import Ledger
from buffer.operations import Cancel, Failure, HandOn, Revoked
from buffer.records import Operation
from buffer.service import BufferService
from buffer.sockets import LoopClock

_NEVER_S = 1e12
"""The time limits of the simulated buffer, in seconds. They are so long that they never expire."""
_COLLECT_EVERY = 200_000

OnReply = Callable[[Any], None]
OnRefusal = Callable[[AsyncRLError], None]
OnRevoked = Callable[[int, int], None]
OnHandOn = Callable[[Sequence[tuple[int, int]]], None]


class SimulatedLoop(asyncio.AbstractEventLoop):
    """An event loop on a simpy clock, with the methods that asyncio timers need."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._never = asyncio.TimerHandle(_NEVER_S, lambda: None, (), self)  # all timers that never fire share it

    def time(self) -> float:
        """Return the current time in simulated seconds."""
        return self._env.now

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        """Call ``callback`` after ``delay`` seconds, or never if the delay is at least half of `_NEVER_S`."""
        if delay >= _NEVER_S / 2:
            return self._never
        handle = asyncio.TimerHandle(self._env.now + delay, callback, arguments, self, context)
        call_after(self._env, delay, lambda: None if handle.cancelled() else handle._run())
        return handle

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        """Call ``callback`` at the simulated time ``when``, in seconds."""
        return self.call_later(when - self._env.now, callback, *arguments, context=context)

    def get_debug(self) -> bool:
        """Return False: the loop has no debug mode. asyncio's timers call this method."""
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing. A cancelled timer stays on the simpy clock, but it does not call its callback."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this loop the running event loop of the thread until the context ends.

        Until then, the warnings of the buffer are not logged, and garbage collection is rare, which saves time.
        """
        before, log = events._get_running_loop(), logging.getLogger("buffer")
        events._set_running_loop(self)
        level, thresholds = log.level, gc.get_threshold()
        log.setLevel(logging.ERROR)
        gc.set_threshold(_COLLECT_EVERY)
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)
            log.setLevel(level)
            events._set_running_loop(before)


class _SimulatedClock(LoopClock):
    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop, self.stalled_s = loop, 0.0

    def time(self) -> float:
        return self._loop.time()

    def close(self) -> None:
        """Do nothing: unlike `LoopClock`, this clock has no timer to cancel."""


def call_after(env: simpy.Environment, delay: float, callback: Callable[[], None]) -> None:
    """Call ``callback`` after ``delay`` simulated seconds."""
    event = simpy.Timeout(env, delay)
    assert event.callbacks is not None
    event.callbacks.append(lambda _: callback())


class _Size:
    """A placeholder for a payload, with a size in bytes but without content."""

    __slots__ = ("_num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def __len__(self) -> int:
        return self._num_bytes


class SimulatedBuffer:
    """The buffer of a simulated run, with methods for the requests of clients. A reply takes no simulated time.

    Args:
        config: Options of the buffer, from `buffer_options`.
        groups_per_step: Prompt groups per batch.

    Attributes:
        service: The real buffer's service, which handles the requests.
        ledger: The ledger of the service (the states of all groups), read-only.
        num_requests: Number of handled requests.
        service_s: CPU seconds of the service for these requests.
    """

    def __init__(self, env: simpy.Environment, config: BufferConfig, *, groups_per_step: int) -> None:
        self._env = env
        clock = _SimulatedClock(SimulatedLoop(env))
        self.service = BufferService(config, groups_per_step=groups_per_step, send=self._send, clock=clock)
        self.ledger: Ledger = self.service.ledger
        self.num_requests = 0
        self.service_s = 0.0
        self._inbox: deque[Message] = deque()
        self._outbox: deque[tuple[bytes, Message]] = deque()
        self._on_reply: dict[int, tuple[OnReply, OnRefusal | None]] = {}
        self._on_revoked: dict[bytes, OnRevoked] = {}
        self._on_hand_on: dict[bytes, OnHandOn] = {}
        self._last_id = 0
        self._is_awake = False

    def join(self, client: bytes, on_revoked: OnRevoked, on_hand_on: OnHandOn | None = None) -> None:
        """Register the client with the name ``client``. A client holds leases (rights to generate a prompt group).

        The buffer calls ``on_revoked(group_id, attempt)`` after it has revoked a lease. The buffer calls ``on_hand_on``
        with (group id, attempt) pairs of groups that the client must stop, so that another client continues them.
        """
        self._on_revoked[client] = on_revoked
        if on_hand_on is not None:
            self._on_hand_on[client] = on_hand_on

    def request(
        self,
        client: bytes,
        operation: Operation[Any],
        *,
        num_bytes: int = 0,
        on_reply: OnReply | None = None,
        on_refusal: OnRefusal | None = None,
    ) -> int:
        """Send an operation of the client ``client`` to the buffer's service; return the id of the request.

        ``num_bytes`` is the size of the request's payload. The simulation calls ``on_reply`` with the reply, or
        ``on_refusal`` with the error. If ``on_refusal`` is None, the simulation raises the error.
        """
        self._last_id += 1
        if on_reply is not None or on_refusal is not None:
            self._on_reply[self._last_id] = (on_reply or (lambda _: None), on_refusal)
        payload: Sequence[Any] = (_Size(num_bytes),) if num_bytes else ()
        self._inbox.append(Message(request_id=self._last_id, body=operation, payload=payload, client=client))
        self._wake()
        return self._last_id

    def cancel_lease(self, client: bytes, request_id: int) -> None:
        """Cancel a request for leases that has no reply yet. ``request_id`` is the value that `request` returned."""
        self._on_reply.pop(request_id, None)
        self.request(client, Cancel(request_id))

    def lose(self, group_id: int, attempt: int) -> None:
        """Remove the trajectories of a stored group. The buffer then puts the group's prompt back into the queue."""
        self.service.lose_from_store(0, [group_id], stored=[(group_id, attempt)])
        self._wake()

    def _wake(self) -> None:
        """Handle all requests of the present time together, as the real server does."""
        if not self._is_awake:
            self._is_awake = True
            call_after(self._env, 0.0, self._work)

    def _work(self) -> None:
        began_s = time.thread_time()
        while self._inbox:
            self.num_requests += 1
            self.service.handle(self._inbox.popleft())
        self.service.settle()
        self.service_s += time.thread_time() - began_s
        self._is_awake = False
        while self._outbox:
            self._deliver(*self._outbox.popleft())

    def _send(self, client: bytes, message: Message) -> None:
        self._outbox.append((client, message))
        self._wake()

    def _deliver(self, client: bytes, message: Message) -> None:
        body = message.body
        if isinstance(body, Revoked):
            self._on_revoked[client](body.group_id, body.attempt)
            return
        if isinstance(body, HandOn):
            if client in self._on_hand_on:
                self._on_hand_on[client](body.groups)
            return
        on_reply, on_refusal = self._on_reply.pop(message.request_id, (None, None))
        if not isinstance(body, Failure):
            if on_reply is not None:
                on_reply(body)
        elif on_refusal is None:
            raise error_of(body)
        else:
            on_refusal(error_of(body))


def buffer_options(**options: Any) -> BufferConfig:
    """Return a buffer configuration in which leases, heartbeats and requests never time out.

    ``options`` are values of other fields of `BufferConfig`.
    """
    never = dict.fromkeys(("lease_s", "heartbeat_s", "request_timeout_s"), _NEVER_S)
    return BufferConfig(**never, max_prompt_bytes=1 << 62, max_message_bytes=1 << 62, **options)
