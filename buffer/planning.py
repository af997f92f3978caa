"""Batches between the ledger and the learner: plans that wait, and fetches of what they name.

A plan waits for puts, commits and ends of leases. It does not wait in silence for what will not come: whoever asked is
warned when filters drop one group after another, and told by an error when nothing is left that could make a batch.
"""

import logging
from collections.abc import Sequence
from typing import Any

from asyncrl.protocol.errors import AsyncRLError, ReplayBufferError, StoreFull, WireError

from .mailbox import Mailbox
from .messages import Message, integer, integers
from .recorded import RecordedLedger
from .stores import FetchWindow, PayloadStore, size_of
from .summaries import summary_fields
from .waiting import Held, WaitingRoom

logger = logging.getLogger(__name__)

_FIRST_WARNING_STEPS = 4


class Planning:
    """The operations ``plan`` and ``fetch``.

    Args:
        ledger: Plans.
        shelves: Hold the trajectories.
        mailbox: Answers.
        hold_s: A plan that cannot be made is answered after this long.
        store_addresses: Where clients find the payloads, by group id modulo their number; empty if here.
        max_filtered: Plans fail when filters have dropped this many groups in a row; 0 never.
    """

    def __init__(
        self,
        ledger: RecordedLedger,
        shelves: PayloadStore,
        mailbox: Mailbox,
        *,
        hold_s: float,
        store_addresses: Sequence[str],
        max_filtered: int,
    ) -> None:
        self._ledger = ledger
        self._shelves = shelves
        self._mailbox = mailbox
        self._hold_s = hold_s
        self._store_addresses = list(store_addresses)
        self._max_filtered = max_filtered
        self._waits = WaitingRoom()
        self._unread = FetchWindow(shelves.max_bytes)
        self.operations = {"plan": self._plan, "fetch": self._fetch}

    def close(self) -> None:
        """Stop whatever waits."""
        self._waits.close()

    def _plan(self, client: bytes, request: Message) -> None:
        version = integer(request.fields, "version")
        self._ledger.check_plan(version)
        if self._is_filtered_away():
            raise ReplayBufferError(self._filtered())
        held = Held(client=client, request_id=request.request_id, fields={"version": version})
        self._waits.hold(held, self._hold_s, self._answer_late)

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

    def _answer_late(self, held: Held) -> None:
        """A plan has waited for as long as it may: ask again, unless nothing is left that could make it."""
        state = self._ledger.state
        is_idle = not (state.num_queued or state.num_leased or state.num_planned)
        if is_idle and state.account.groups_dropped and state.num_stored < state.rule.groups_per_step:
            text = f"{self._stored()}, no prompts are queued and nothing runs; {self._dropped()}. Enqueue more prompts"
            self._mailbox.fail(held.client, held.request_id, ReplayBufferError(text))
            return
        is_starving = state.account.filtered_in_a_row >= state.rule.groups_per_step
        self._mailbox.reply(held.client, held.request_id, {"warning": self._filtered()} if is_starving else {})

    def note_filtered(self) -> None:
        """A group was dropped by a filter: say so where none is kept for long, and give up where that has no end."""
        if self._is_filtered_away():
            self._fail_all(ReplayBufferError(self._filtered()))
            return
        num_steps, rest = divmod(self._ledger.state.account.filtered_in_a_row, self._ledger.rule.groups_per_step)
        if rest == 0 and num_steps >= _FIRST_WARNING_STEPS and num_steps.bit_count() == 1:
            logger.warning(self._filtered())
            for held in self._waits.all():
                self._waits.leave(held.client, held.request_id)
                self._mailbox.reply(held.client, held.request_id, {"warning": self._filtered()})

    def _is_filtered_away(self) -> bool:
        state = self._ledger.state
        is_short = state.num_stored < state.rule.groups_per_step
        return is_short and 0 < self._max_filtered <= state.account.filtered_in_a_row

    def _filtered(self) -> str:
        number = self._ledger.state.account.filtered_in_a_row
        return (
            f"{self._stored()}, and buffer.filters dropped the last {number} that were finished; {self._dropped()}. "
            "Look at the rewards, take other prompts or filters, or raise buffer.max_filtered_steps"
        )

    def _stored(self) -> str:
        state = self._ledger.state
        return f"{state.num_stored} of the {state.rule.groups_per_step} groups of batch {state.next_plan} are stored"

    def _dropped(self) -> str:
        dropped = self._ledger.state.account.groups_dropped
        return "dropped in all: " + ", ".join(f"{number} for {reason}" for reason, number in dropped.items())

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
        self._fail_all(error)

    def _fail_all(self, error: AsyncRLError) -> None:
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
