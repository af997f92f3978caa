"""What a buffer server does with requests for batches: a plan waits until it can be made, a fetch is answered at once.

Whoever settles after a burst of messages calls `BatchRequests.make`; a timer answers "nothing yet" otherwise.
"""

import logging
from typing import Any

from asyncrl.core.errors import AsyncRLError, ReplayBufferError, StoreFull, WireError

from .admission import Collaborators, PendingRequest, PendingRequests
from .commands import PlanBatch
from .messages import Message, integer, integers, summary_fields
from .store_links import StoreLinks
from .stores import FetchWindow, size_of

logger = logging.getLogger(__name__)

_FIRST_WARNING_STEPS = 4


class BatchRequests:
    """The operations ``plan`` and ``fetch``; plans fail after ``max_filtered`` filtered groups in a row, if not 0.

    ``links`` lead to the store servers, where these hold the payloads.
    """

    def __init__(self, shared: Collaborators, *, links: StoreLinks | None, max_filtered: int) -> None:
        self._ledger, self._store, self._replies = shared.ledger, shared.store, shared.replies
        self._hold_s = shared.hold_s
        self._links = links
        self._max_filtered = max_filtered
        self._pending = PendingRequests()
        self._unread = FetchWindow(shared.ledger.room.max_bytes)
        self.operations = {"plan": self._plan, "fetch": self._fetch}

    def close(self) -> None:
        """Stop whatever waits."""
        self._pending.close()

    def _plan(self, client: bytes, message: Message) -> None:
        version = integer(message.fields, "version")
        self._ledger.check_plan(version)
        if self._is_filtered_away():
            raise ReplayBufferError(self._filtered())
        request = PendingRequest(client=client, request_id=message.request_id, fields={"version": version})
        self._pending.add(request, self._hold_s, self._answer_late)

    def make(self) -> None:
        """Make and send every batch that somebody waits for and that can be made."""
        for request in sorted(self._pending.all(), key=lambda request: request.fields["version"]):
            try:
                version = request.fields["version"]
                is_made = self._ledger.apply(PlanBatch(version=version)).group_ids
            except ReplayBufferError as error:
                self._pending.remove(request.client, request.request_id)
                self._replies.fail(request.client, request.request_id, error)
                continue
            if is_made:
                self._pending.remove(request.client, request.request_id)
                groups = [summary_fields(summary) for summary in self._ledger.batch(version).groups]
                self._replies.reply(request.client, request.request_id, {"groups": groups})

    def _answer_late(self, request: PendingRequest) -> None:
        """A plan has waited for as long as it may: ask again, unless nothing is left that could make it."""
        ledger = self._ledger
        is_idle = not (ledger.groups.num_queued or ledger.groups.num_leased or ledger.groups.num_planned)
        if is_idle and ledger.account.groups_dropped and ledger.groups.num_stored < ledger.rule.groups_per_step:
            text = f"{self._stored()}, no prompts are queued and nothing runs; {self._dropped()}. Enqueue more prompts"
            self._replies.fail(request.client, request.request_id, ReplayBufferError(text))
            return
        is_starving = ledger.account.filtered_in_a_row >= ledger.rule.groups_per_step
        self._replies.reply(request.client, request.request_id, {"warning": self._filtered()} if is_starving else {})

    def note_filtered(self) -> None:
        """A group was dropped by a filter: say so where none is kept for long, and give up where that has no end."""
        if self._is_filtered_away():
            self._fail_all(ReplayBufferError(self._filtered()))
            return
        num_steps, rest = divmod(self._ledger.account.filtered_in_a_row, self._ledger.rule.groups_per_step)
        if rest == 0 and num_steps >= _FIRST_WARNING_STEPS and num_steps.bit_count() == 1:
            logger.warning(self._filtered())
            for request in self._pending.all():
                self._pending.remove(request.client, request.request_id)
                self._replies.reply(request.client, request.request_id, {"warning": self._filtered()})

    def _is_filtered_away(self) -> bool:
        ledger = self._ledger
        is_short = ledger.groups.num_stored < ledger.rule.groups_per_step
        return is_short and 0 < self._max_filtered <= ledger.account.filtered_in_a_row

    def _filtered(self) -> str:
        number = self._ledger.account.filtered_in_a_row
        return (
            f"{self._stored()}, and buffer.filters dropped the last {number} that were finished; {self._dropped()}. "
            "Look at the rewards, take other prompts or filters, or raise buffer.max_filtered_steps"
        )

    def _stored(self) -> str:
        ledger = self._ledger
        stored = f"{ledger.groups.num_stored} of the {ledger.rule.groups_per_step} groups"
        return f"{stored} of batch {ledger.next_plan} are stored"

    def _dropped(self) -> str:
        dropped = self._ledger.account.groups_dropped
        return "dropped in all: " + ", ".join(f"{number} for {reason}" for reason, number in dropped.items())

    def fail(self, size: int) -> None:
        """Tell everybody who waits for a batch that it does not fit."""
        ledger = self._ledger
        error = StoreFull(
            f"buffer.max_stored_bytes={ledger.room.max_bytes} cannot hold a batch: {ledger.groups.num_stored} groups "
            f"fill it, {ledger.rule.groups_per_step} are needed, the next has {size} bytes; raise it"
        )
        self._fail_all(error)

    def _fail_all(self, error: AsyncRLError) -> None:
        for request in self._pending.all():
            self._pending.remove(request.client, request.request_id)
            self._replies.fail(request.client, request.request_id, error)

    def _fetch(self, client: bytes, message: Message) -> None:
        """Payloads, or where they are: the store servers, and the attempts to ask them for."""
        group_ids = integers(message.fields, "groups")
        if len(set(group_ids)) != len(group_ids):
            raise WireError("a fetch names each group once")
        if self._links is not None:
            groups = [self._ledger.groups.in_store(group_id) for group_id in group_ids]
            fields = {
                "stores": self._links.addresses,
                "attempts": [group.result.attempt for group in groups],
                "places": [group.store for group in groups],
                "digests": [group.digest for group in groups],
            }
            self._replies.reply(client, message.request_id, fields)
            return
        parts = [self._store.trajectories(group_id) for group_id in group_ids]
        payload: list[Any] = [frame for frames in parts for frame in frames]
        self._unread.add(client, message.request_id, size_of(payload), read=integer(message.fields, "read"))
        self._replies.reply(client, message.request_id, {"counts": [len(frames) for frames in parts]}, payload)
