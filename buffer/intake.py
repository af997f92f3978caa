"""Prompts on their way into the queue: a request waits until the queue has had room for all of its prompts."""

from asyncrl.protocol.errors import WireError

from .mailbox import Mailbox
from .messages import Message, integers
from .recorded import RecordedLedger
from .stores import PayloadStore, size_of
from .waiting import Held, WaitingRoom


class Intake:
    """The operation ``enqueue``.

    Args:
        ledger: Queues.
        shelves: Keep the prompts.
        mailbox: Answers.
        queue_size: Prompts queued at once.
        hold_s: A request is answered after this long, with how many of its prompts are queued.
    """

    def __init__(
        self, ledger: RecordedLedger, shelves: PayloadStore, mailbox: Mailbox, *, queue_size: int, hold_s: float
    ) -> None:
        self._ledger = ledger
        self._shelves = shelves
        self._mailbox = mailbox
        self._queue_size = queue_size
        self._hold_s = hold_s
        self._waits = WaitingRoom()
        self.operations = {"enqueue": self._enqueue}

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waits)

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of the prompts that wait."""
        return self._waits.num_bytes

    def close(self) -> None:
        """Stop whatever waits."""
        self._waits.close()

    def _enqueue(self, client: bytes, request: Message) -> None:
        group_ids, counts = integers(request.fields, "groups"), integers(request.fields, "counts")
        if len(group_ids) != len(counts) or sum(counts) != len(request.payload):
            raise WireError("enqueue names as many groups as it carries prompts")
        self._waits.leave(client, request.request_id)
        size = size_of(request.payload)
        self._shelves.check_prompts(size, num_waiting_bytes=self._waits.num_bytes)
        payload = iter(request.payload)
        prompts = [(group_id, [next(payload) for _ in range(n)]) for group_id, n in zip(group_ids, counts, strict=True)]
        fields = {"prompts": prompts, "queued": 0}
        held = Held(client=client, request_id=request.request_id, fields=fields, num_bytes=size)
        self._waits.hold(held, self._hold_s, self._answer)

    def _answer(self, held: Held) -> None:
        self._mailbox.reply(held.client, held.request_id, {"queued": held.fields["queued"]})

    def fill(self) -> None:
        """Queue what the queue has room for, first come first."""
        for held in self._waits.all():
            prompts = held.fields["prompts"]
            while held.fields["queued"] < len(prompts) and self._ledger.state.num_queued < self._queue_size:
                group_id, frames = prompts[held.fields["queued"]]
                if self._ledger.enqueue([group_id], {group_id: frames}):
                    self._shelves.prompts.put(group_id, frames)
                held.fields["queued"] += 1
            if held.fields["queued"] < len(prompts):
                return
            self._waits.leave(held.client, held.request_id)
            self._answer(held)
