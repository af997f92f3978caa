"""Batches between the ledger and the learner: plans that wait, fetches of what they name, commits."""

from collections.abc import Sequence
from typing import Any

from asyncrl.protocol.errors import ReplayBufferError, StoreFull, WireError

from .mailbox import Mailbox
from .messages import Message, integer, integers
from .recorded import RecordedLedger
from .shelves import Shelves, size_of
from .summaries import summary_fields
from .unread import Unread
from .waiting import Held, WaitingRoom


class Planning:
    """The operations ``plan`` and ``fetch``.

    Args:
        ledger: Plans.
        shelves: Hold the trajectories.
        mailbox: Answers.
        hold_s: A plan that cannot be made is answered after this long.
        store_addresses: Where clients find the payloads, by group id modulo their number; empty if here.
    """

    def __init__(
        self,
        ledger: RecordedLedger,
        shelves: Shelves,
        mailbox: Mailbox,
        *,
        hold_s: float,
        store_addresses: Sequence[str],
    ) -> None:
        self._ledger = ledger
        self._shelves = shelves
        self._mailbox = mailbox
        self._hold_s = hold_s
        self._store_addresses = list(store_addresses)
        self._waits = WaitingRoom()
        self._unread = Unread(shelves.max_bytes)
        self.operations = {"plan": self._plan, "fetch": self._fetch}

    def close(self) -> None:
        """Stop whatever waits."""
        self._waits.close()

    def _plan(self, client: bytes, request: Message) -> None:
        version = integer(request.fields, "version")
        self._ledger.check_plan(version)
        held = Held(client=client, request_id=request.request_id, fields={"version": version})
        self._waits.hold(held, self._hold_s, lambda held: self._mailbox.reply(held.client, held.request_id))

    def make(self) -> None:
        """Make and send every batch that somebody waits for and that can be made."""
        for held in sorted(self._waits.all(), key=lambda held: held.fields["version"]):
            try:
                plan = self._ledger.plan(held.fields["version"])
            except ReplayBufferError as error:
                self._waits.leave(held.client, held.request_id)
                self._mailbox.fail(held.client, held.request_id, error)
                continue
            if plan is not None:
                self._waits.leave(held.client, held.request_id)
                groups = [summary_fields(summary) for summary in plan.groups]
                self._mailbox.reply(held.client, held.request_id, {"groups": groups})

    def fail_without_room(self) -> None:
        """Nothing runs, nothing is under way, no lease fits, and a batch is not complete: nobody would ever wake it."""
        state = self._ledger.state
        if not self._waits or state.num_leased or state.num_planned or state.num_stored >= state.rule.groups_per_step:
            return
        if not self._shelves.has_room_for_group(0):
            self.fail(self._shelves.largest_bytes)

    def fail_if_stuck(self, size: int) -> None:
        """A put does not fit, and no batch is under way that could leave: plans would wait for it for ever."""
        if self._ledger.state.num_planned == 0:
            self.fail(size)

    def fail(self, size: int) -> None:
        """Tell everybody who waits for a batch that it does not fit."""
        state = self._ledger.state
        error = StoreFull(
            f"buffer.max_stored_bytes={self._shelves.max_bytes} cannot hold a batch: {state.num_stored} groups fill "
            f"it, {state.rule.groups_per_step} are needed, the next has {size} bytes; raise it"
        )
        for held in self._waits.all():
            self._waits.leave(held.client, held.request_id)
            self._mailbox.fail(held.client, held.request_id, error)

    def _fetch(self, client: bytes, request: Message) -> None:
        """Payloads, or where they are: the store servers, and the attempts to ask them for."""
        group_ids = integers(request.fields, "groups")
        if len(set(group_ids)) != len(group_ids):
            raise WireError("a fetch names each group once")
        if self._store_addresses:
            attempts = [self._ledger.state.batches.attempt(group_id) for group_id in group_ids]
            fields = {"stores": self._store_addresses, "attempts": attempts}
            self._mailbox.reply(client, request.request_id, fields)
            return
        parts = [self._shelves.payloads.get(group_id) for group_id in group_ids]
        payload: list[Any] = [frame for frames in parts for frame in frames]
        self._unread.add(client, request.request_id, size_of(payload), read=integer(request.fields, "read"))
        self._mailbox.reply(client, request.request_id, {"counts": [len(frames) for frames in parts]}, payload)
