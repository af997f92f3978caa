"""Leases between the ledger and the workers: who waits for one, who holds one, and who is still there.

A request waits until the ledger admits a group at its engine's version. It is looked at again whenever a message
changed the ledger, and when its client says that its engine has advanced; it is withdrawn by its client, by a goodbye,
or by silence.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Any

from asyncrl.protocol.errors import WireError

from .heartbeats import Heartbeats
from .leases import RunningLease
from .mailbox import Mailbox
from .messages import REVOKED, Message, integer, integers
from .patience import Patience
from .recorded import RecordedLedger
from .stores import PayloadStore
from .turns import Turns
from .waiting import Held, WaitingRoom

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 4096


class Leasing:
    """The operations of workers on leases.

    Args:
        ledger: Admits.
        shelves: Hold the prompts, and say whether one more group fits.
        mailbox: Answers.
        hold_s: A request that nothing is granted to is answered after this long.
        silent_s: A producer not heard of for this long is gone.
    """

    def __init__(
        self, ledger: RecordedLedger, shelves: PayloadStore, mailbox: Mailbox, *, hold_s: float, silent_s: float
    ) -> None:
        self._ledger = ledger
        self._shelves = shelves
        self._mailbox = mailbox
        self._hold_s = hold_s
        self._loop = asyncio.get_running_loop()
        self._waits = WaitingRoom()
        self._granted: OrderedDict[tuple[bytes, int], list[RunningLease]] = OrderedDict()
        self._turns = Turns()
        self._patience = Patience(hold_s)
        self.presence = Heartbeats(silent_s)
        self.operations = {
            "lease": self._lease,
            "cancel": self._cancel,
            "advance": self._advance,
            "renew": self._renew,
            "beat": self._beat,
            "leave": self._leave,
        }

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        return len(self._waits)

    def close(self) -> None:
        """Stop whatever waits."""
        self._waits.close()

    def recover(self, leases: Iterable[RunningLease]) -> None:
        """Take up the leases of the server before this one; their owners have as long to be heard of as others."""
        for lease in leases:
            self._granted.setdefault((lease.owner, lease.request_id), []).append(lease)
            self.presence.enter(lease.owner, self._loop.time())

    def describe(self) -> list[dict[str, Any]]:
        """What is known of every producer, for people."""
        num_leases = Counter(lease.owner for lease in self._ledger.state.leases.all())
        return self.presence.describe(self._loop.time(), num_leases)

    def _lease(self, client: bytes, request: Message) -> None:
        granted = self._granted.get((client, request.request_id))
        if granted is not None:
            self._answer(client, request.request_id, granted)
            return
        version = integer(request.fields, "engine_version")
        num_wanted = integer(request.fields, "max_groups")
        self._ledger.check_engine_version(version)
        fields = {"version": version, "wanted": num_wanted, "granted": []}
        held = Held(client=client, request_id=request.request_id, fields=fields)
        hold_s = self._patience.hold_s(client, version) if self._is_outdated(held) else self._hold_s
        self._waits.hold(held, hold_s, self._answer_nothing)

    def _answer_nothing(self, held: Held) -> None:
        self._answer(held.client, held.request_id, [])

    def _is_outdated(self, held: Held) -> bool:
        """Whether its engine's version will never be admitted again."""
        state = self._ledger.state
        return state.rule.deadline(held.fields["version"]) < state.learner_version

    def answer_outdated(self) -> None:
        """After a commit: let workers ask again whose engine is now too far behind for any group to begin."""
        for held in self._waits.all():
            if self._is_outdated(held):
                self._waits.leave(held.client, held.request_id)
                self._answer_nothing(held)

    def _can_grant(self) -> bool:
        """Whether a group waits that the freshest engine may begin, and fits."""
        state = self._ledger.state
        is_admitted = state.num_queued > 0 and state.admits(state.learner_version)
        return is_admitted and self._shelves.has_room_for_group(state.num_leased)

    def grant(self) -> None:
        """One lease at a time to the waiting worker whose turn it is, until nothing more is admitted."""
        if not self._waits or not self._can_grant():
            return
        waiting = [held for held in self._waits.all() if held.fields["wanted"] > 0]
        line = [(self._turns.of(held.client), place, held) for place, held in enumerate(waiting)]
        heapify(line)
        served: list[Held] = []
        while line and self._can_grant():
            turn, place, held = heappop(line)
            if self._grant_one(held, served):
                heappush(line, (turn + 1, place, held))
        for held in served:
            self._waits.leave(held.client, held.request_id)
            self._remember(held)
            self._answer(held.client, held.request_id, held.fields["granted"])

    def _grant_one(self, held: Held, served: list[Held]) -> bool:
        """Grant a group if its engine is admitted; whether the worker wants more and may get it."""
        granted = held.fields["granted"]
        new = self._ledger.lease(
            held.fields["version"], 1, owner=held.client, request_id=held.request_id, now=self._loop.time()
        )
        for lease in new:
            if lease.progress is None:
                self._shelves.prefixes.remove(lease.group_id)
        if new:
            self._turns.take(held.client)
        granted.extend(new)
        if new and len(granted) == 1:
            served.append(held)
        return bool(new) and len(granted) < held.fields["wanted"]

    def _remember(self, held: Held) -> None:
        """Keep the answer, in case the request is sent again because the answer was lost."""
        self._granted[held.client, held.request_id] = held.fields["granted"]
        if len(self._granted) > _MAX_REMEMBERED:
            self._granted.popitem(last=False)

    def _answer(self, client: bytes, request_id: int, granted: list[RunningLease]) -> None:
        payload: list[Any] = []
        leases = []
        for lease in granted:
            if not self._ledger.holds(lease.group_id, lease.attempt):
                continue
            prompt = self._shelves.prompts.get(lease.group_id)
            prefix = () if lease.progress is None else self._shelves.prefixes.get(lease.group_id)
            leases.append(
                [lease.group_id, lease.attempt, lease.engine_version, lease.deadline, len(prompt), len(prefix)]
            )
            payload += [*prompt, *prefix]
        self._mailbox.reply(client, request_id, {"leases": leases}, payload)

    def _cancel(self, client: bytes, request: Message) -> None:
        """A lease that is no longer wanted; if it was granted meanwhile, its groups go back to the queue."""
        cancelled = integer(request.fields, "request")
        if self._waits.leave(client, cancelled) is None:
            for lease in self._granted.pop((client, cancelled), []):
                self._give_back(lease, "cancelled")
        self._mailbox.reply(client, request.request_id)

    def _give_back(self, lease: RunningLease, reason: str) -> None:
        """A lease whose worker will report nothing of it."""
        if self._ledger.holds(lease.group_id, lease.attempt):
            self._ledger.release(lease.group_id, lease.attempt, num_tokens=0, reason=reason)

    def _advance(self, client: bytes, request: Message) -> None:
        """The client's engine serves a newer version: its waiting requests are looked at in that light."""
        version = integer(request.fields, "engine_version")
        self._ledger.check_engine_version(version)
        for held in self._waits.of_client(client):
            held.fields["version"] = max(held.fields["version"], version)
        self._mailbox.reply(client, request.request_id)

    def _renew(self, client: bytes, request: Message) -> None:
        for group_id, attempt in zip(*_groups_and_attempts(request), strict=True):
            if not self._ledger.renew(group_id, attempt, now=self._loop.time()):
                self._mailbox.push(client, REVOKED, {"group_id": group_id, "attempt": attempt})
        self._mailbox.reply(client, request.request_id)

    def _beat(self, client: bytes, request: Message) -> None:
        """A sign of life, which also makes a producer known that an earlier server knew."""
        self.presence.enter(client, self._loop.time())
        self._mailbox.reply(client, request.request_id)

    def _leave(self, client: bytes, request: Message) -> None:
        """A goodbye, with the leases that the client knows of: all others, and what it waits for, are given back."""
        known = set(zip(*_groups_and_attempts(request), strict=True))
        self._withdraw(client)
        for lease in self._ledger.state.leases.of_owner(client):
            if (lease.group_id, lease.attempt) not in known:
                self._give_back(lease, "undelivered")
        if not self._ledger.state.leases.of_owner(client):
            self.presence.leave(client)
        self._mailbox.reply(client, request.request_id)

    def _withdraw(self, client: bytes) -> None:
        for held in self._waits.of_client(client):
            self._waits.leave(client, held.request_id)

    def take_from_silent(self) -> None:
        """Take the leases of producers that are gone, before they run out."""
        for client in self.presence.take_silent(self._loop.time()):
            leases = self._ledger.state.leases.of_owner(client)
            self._withdraw(client)
            for lease in leases:
                self._ledger.take_back(lease)
            if leases:
                logger.warning("producer %s is silent; %d leases were taken back", client.hex()[:8], len(leases))


def _groups_and_attempts(request: Message) -> tuple[list[int], list[int]]:
    group_ids, attempts = integers(request.fields, "groups"), integers(request.fields, "attempts")
    if len(group_ids) != len(attempts):
        raise WireError(f"{request.name} names one attempt for each group, got {len(attempts)} for {len(group_ids)}")
    return group_ids, attempts
