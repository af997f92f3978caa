"""Runs the real replay buffer (`buffer.service`) in simulated time, without sockets, on simpy's clock.

Admission, selection, byte limits and the log of weight offers are the same code as in a run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import simpy

from asyncrl.core.errors import AsyncRLError
from asyncrl.planner.simulated_time import NEVER_S, SimulatedClock, SimulatedLoop, call_after
from buffer.config import BufferConfig
from buffer.ledger import Ledger
from buffer.messages import HAND_ON, OK, REVOKED, Message, error_of
from buffer.service import BufferService

OnReply = Callable[[Mapping[str, Any]], None]
OnRefusal = Callable[[AsyncRLError], None]
OnRevoked = Callable[[int, int], None]
OnHandOn = Callable[[Sequence[tuple[int, int]]], None]


class _Size:
    """A payload without content; it has only a size."""

    __slots__ = ("_num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def __len__(self) -> int:
        return self._num_bytes


class SimulatedBuffer:
    """The buffer of a simulated run and the calls of its clients. Replies arrive at the same simulated time.

    Args:
        env: The simulation clock.
        config: Options of the buffer. Use `buffer_options`, so that leases and producers never time out.
        groups_per_step: Prompt groups per batch.

    Attributes:
        ledger: The ledger of the service, for reading.
        num_requests: Number of handled requests.
        service_s: CPU seconds of the service for these requests.
    """

    def __init__(self, env: simpy.Environment, config: BufferConfig, *, groups_per_step: int) -> None:
        self._env = env
        clock = SimulatedClock(SimulatedLoop(env))
        self._service = BufferService(config, groups_per_step=groups_per_step, send=self._send, clock=clock)
        self.ledger: Ledger = self._service.ledger
        self.num_requests = 0
        self.service_s = 0.0
        self._inbox: deque[tuple[bytes, Message]] = deque()
        self._outbox: deque[tuple[bytes, Message]] = deque()
        self._on_reply: dict[int, tuple[OnReply, OnRefusal | None]] = {}
        self._on_revoked: dict[bytes, OnRevoked] = {}
        self._on_hand_on: dict[bytes, OnHandOn] = {}
        self._last_id = 0
        self._is_awake = False

    def join(self, client: bytes, on_revoked: OnRevoked, on_hand_on: OnHandOn | None = None) -> None:
        """Register a client for revoked leases and for requests to hand over groups, by group and attempt."""
        self._on_revoked[client] = on_revoked
        if on_hand_on is not None:
            self._on_hand_on[client] = on_hand_on

    def request(
        self,
        client: bytes,
        name: str,
        fields: Mapping[str, Any],
        *,
        num_bytes: int = 0,
        on_reply: OnReply | None = None,
        on_refusal: OnRefusal | None = None,
    ) -> int:
        """Send an operation to the service and return the id of the request.

        ``on_reply`` gets the fields of the reply. ``on_refusal`` gets an error; without ``on_refusal``, the simulation
        raises the error.
        """
        self._last_id += 1
        if on_reply is not None or on_refusal is not None:
            self._on_reply[self._last_id] = (on_reply or (lambda _: None), on_refusal)
        payload: Sequence[Any] = (_Size(num_bytes),) if num_bytes else ()
        self._inbox.append((client, Message(name=name, request_id=self._last_id, fields=fields, payload=payload)))
        identifier = self._last_id
        self._wake()
        return identifier

    def cancel_lease(self, client: bytes, request_id: int) -> None:
        """Cancel a request for leases."""
        self._on_reply.pop(request_id, None)
        self.request(client, "cancel", {"request": request_id})

    def lose(self, group_id: int, attempt: int) -> None:
        """Remove the trajectories of a stored group; the buffer requeues its prompt."""
        self._service.lose_from_store(0, [group_id], stored=[(group_id, attempt)])
        self._wake()

    def _wake(self) -> None:
        """Handle the inbox after all other events of this time, as one burst: the server reads bursts too."""
        if not self._is_awake:
            self._is_awake = True
            call_after(self._env, 0.0, self._work)

    def _work(self) -> None:
        """Handle a burst of requests, settle, and deliver the replies. New requests form the next burst."""
        began_s = time.thread_time()
        while self._inbox:
            client, message = self._inbox.popleft()
            self.num_requests += 1
            self._service.handle(client, message)
        self._service.settle()
        self.service_s += time.thread_time() - began_s
        self._is_awake = False
        while self._outbox:
            self._deliver(*self._outbox.popleft())

    def _send(self, client: bytes, message: Message) -> None:
        """Deliver a message at the end of this burst. A message from a timer of the service starts a new burst."""
        self._outbox.append((client, message))
        self._wake()

    def _deliver(self, client: bytes, message: Message) -> None:
        if message.name == REVOKED:
            self._on_revoked[client](message.fields["group_id"], message.fields["attempt"])
            return
        if message.name == HAND_ON:
            if client in self._on_hand_on:
                groups = zip(message.fields["groups"], message.fields["attempts"], strict=True)
                self._on_hand_on[client](list(groups))
            return
        on_reply, on_refusal = self._on_reply.pop(message.request_id, (None, None))
        if message.name == OK:
            if on_reply is not None:
                on_reply(message.fields)
        elif message.request_id:
            error = error_of(message)
            if on_refusal is None:
                raise error
            on_refusal(error)


def buffer_options(**options: Any) -> BufferConfig:
    """A buffer configuration whose deadlines never expire."""
    never = dict.fromkeys(("lease_s", "heartbeat_s", "request_timeout_s"), NEVER_S)
    sizes = dict.fromkeys(("max_prompt_bytes", "max_message_bytes"), 1 << 62)
    return BufferConfig(**never, **sizes, **options)
