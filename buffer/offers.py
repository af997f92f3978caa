"""The log of weight offers: the learner appends, the rollout workers ask for the newest, the controller follows.

A version is shown to the workers when the step that made it is committed, and while it is no newer than the version at
which the controller holds the log. A request waits until newer weights are shown, under the timer of all long polls. It
is woken by an offer, a commit, a hold that moves, or a failed publish; a controller by the last worker that loads.

Every offer names the incarnation of its learner. When the learner goes back to a checkpoint, what the one before had
offered is withdrawn, and every engine is shown the next offer, whatever version it serves: the same number may now mean
other weights.

With a journal the log survives its server. Which version each engine serves is not written down: the workers say so
again with their next heartbeat, which a client sends as soon as it reaches a server again.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.protocol.errors import WeightsError, WireError, WrongEpoch

from .admission import Collaborators, PendingRequest, PendingRequests
from .journal import Journal
from .messages import MAX_REASON, Message, incarnation_of, integer, seconds

_MAX_OFFERS = 64
_JOURNALED_AS = "offers"


class OfferLog:
    """The newest offers, and which version each engine serves. No socket, no clock.

    Attributes:
        failure: Why a version could not be published; empty where none failed.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._offers: dict[int, Mapping[str, Any]] = {}
        self._held_at: int | None = None
        self._serving: dict[bytes, int] = {}
        self._num_serving: Counter[int] = Counter()
        self._slowest_s: dict[int, float] = {}

    def append(self, version: int, offer: Mapping[str, Any]) -> None:
        """Offer a version; one that is offered again replaces the earlier offer."""
        self._offers[version] = offer
        if len(self._offers) > _MAX_OFFERS:
            del self._offers[sorted(self._offers)[1]]  # the first may be the one that is shown

    def hold(self, version: int | None) -> None:
        """Show nothing newer than ``version``, which is no older than what is shown; None shows all."""
        self._held_at = version

    def newest(self, learner_version: int) -> tuple[int, Mapping[str, Any]] | None:
        """The newest version that is shown, with its offer; older ones are forgotten.

        Raises:
            WeightsError: a version could not be published.
        """
        self.check()
        limit = learner_version if self._held_at is None else min(learner_version, self._held_at)
        shown = [version for version in self._offers if version <= limit]
        if not shown:
            return None
        newest = max(shown)
        for version in shown:
            if version != newest:
                del self._offers[version]
        return newest, self._offers[newest]

    def oldest(self) -> int:
        """The oldest version that can still be shown; 0 where there is none."""
        return min(self._offers, default=0)

    def check(self) -> None:
        """Raise `WeightsError` if a version could not be published."""
        if self.failure:
            raise WeightsError(self.failure)

    def loaded(self, engine: bytes, version: int, took_s: float = 0.0) -> None:
        """An engine serves a version, which it took ``took_s`` seconds to load; a repetition changes nothing."""
        if self._serving.get(engine) != version:
            self.forget(engine)
            self._serving[engine] = version
            self._num_serving[version] += 1
            self._slowest_s[version] = max(took_s, self._slowest_s.get(version, 0.0))

    def forget(self, engine: bytes) -> None:
        """An engine is gone."""
        version = self._serving.pop(engine, None)
        if version is None:
            return
        self._num_serving[version] -= 1
        if not self._num_serving[version]:
            del self._num_serving[version], self._slowest_s[version]

    def served(self, num_engines: int) -> tuple[int, float] | None:
        """The oldest version served, and the seconds of its slowest load; None while fewer engines have loaded any."""
        if not self._serving or len(self._serving) < num_engines:
            return None
        oldest = min(self._num_serving)
        return oldest, self._slowest_s[oldest]

    def snapshot(self) -> dict[str, Any]:
        """What a server that is started again must know, as plain values."""
        return {"offers": list(self._offers.values()), "held_at": self._held_at, "failure": self.failure}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take up a snapshot into this new log."""
        self._offers = {offer["version"]: offer for offer in values["offers"]}
        self._held_at, self.failure = values["held_at"], values["failure"]


class OfferRequests:
    """The operations on the log of offers, which a journal keeps, where there is one."""

    def __init__(self, shared: Collaborators, journal: Journal | None = None) -> None:
        self._ledger, self._replies, self._hold_s = shared.ledger, shared.replies, shared.hold_s
        self._journal = journal
        self._log = OfferLog()
        self._shown = -1
        self._receivers = PendingRequests()
        self._followers = PendingRequests()
        self.operations: dict[str, Callable[[bytes, Message], None]] = {
            "offer": self._offer,
            "next_offer": self._next_offer,
            "served": self._served,
            "hold": self._hold,
        }

    def recover(self, journal: Journal) -> None:
        """Take up what an earlier server wrote, if the learner that offered it lives, by the recovered ledger."""
        incarnation, values = journal.read(_JOURNALED_AS) or (0, None)
        if values is not None and incarnation == self._ledger.incarnation:
            self._log.restore(values)

    def close(self) -> None:
        """Stop whatever waits."""
        self._receivers.close()
        self._followers.close()

    def show(self) -> None:
        """Answer who waits for weights, if newer ones are shown now; called whenever they may be."""
        newest = None if self._log.failure else self._log.newest(self._ledger.learner_version)
        if newest is not None and newest[0] != self._shown:
            self._shown = newest[0]
            for request in self._receivers.all():
                if self._answer_receiver(request):
                    self._receivers.remove(request.client, request.request_id)

    def note_beat(self, client: bytes, fields: Mapping[str, Any]) -> None:
        """A sign of life, with the version that the client's engine serves: makes one known again that was silent."""
        if "serves" in fields and self.is_current(fields):
            self._log.loaded(client, integer(fields, "serves"), seconds(fields, "seconds"))
            self._answer_followers()

    def forget(self, client: bytes) -> None:
        """A client left, or is silent: nobody waits for its engine."""
        self._log.forget(client)
        self._answer_followers()

    def withdraw(self) -> None:
        """The learner was replaced: nothing that it offered is shown any more, also after a restart."""
        self._log = OfferLog()
        self._shown = -1

    def is_current(self, fields: Mapping[str, Any]) -> bool:
        """Whether a message is of the learner that lives, or of an engine that serves weights of it."""
        return incarnation_of(fields) == self._ledger.incarnation

    def _offer(self, client: bytes, message: Message) -> None:
        if not self.is_current(message.fields):
            raise WrongEpoch(
                f"an offer came from the learner's life {incarnation_of(message.fields)}, this buffer serves its life "
                f"{self._ledger.incarnation}: that learner was replaced by one from a checkpoint, and must end"
            )
        offer, reason = message.fields.get("offer"), message.fields.get("failure")
        if isinstance(offer, dict):
            self._log.append(integer(offer, "version"), offer)
            self._write()
            self.show()
        elif isinstance(reason, str) and 0 < len(reason) <= MAX_REASON:
            self._log.failure = reason
            self._write()
            self._fail_all()
        else:
            raise WireError(f"an offer has the fields of weights, or a reason of at most {MAX_REASON} characters")
        self._replies.reply(client, message.request_id, {"oldest": self._log.oldest()})

    def _write(self) -> None:
        """Write the log down, before anybody is told. Raises `ReplayBufferError` if the disk is full."""
        if self._journal is not None:
            self._journal.write(_JOURNALED_AS, [self._ledger.incarnation, self._log.snapshot()])

    def _fail_all(self) -> None:
        for pending in (self._receivers, self._followers):
            for request in pending.all():
                pending.remove(request.client, request.request_id)
                self._replies.fail(request.client, request.request_id, WeightsError(self._log.failure))

    def _next_offer(self, client: bytes, message: Message) -> None:
        fields = {"at_least": integer(message.fields, "at_least"), "incarnation": incarnation_of(message.fields)}
        request = _pending(client, message, fields)
        if not self._answer_receiver(request):
            self._receivers.add(request, self._hold_s, self._answer_nothing)

    def _answer_receiver(self, request: PendingRequest) -> bool:
        newest = self._log.newest(self._ledger.learner_version)
        is_new = request.fields["incarnation"] != self._ledger.incarnation  # to this engine, whatever its number
        if newest is None or (newest[0] < request.fields["at_least"] and not is_new):
            return False
        self._replies.reply(request.client, request.request_id, {"offer": newest[1]})
        return True

    def loaded(self, client: bytes, message: Message) -> None:
        """The operation ``loaded``: an engine serves a version."""
        version, took_s = integer(message.fields, "version"), seconds(message.fields, "seconds")
        if self.is_current(message.fields):
            self._ledger.check_engine_version(version)
            self._log.loaded(client, version, took_s)
        self._replies.reply(client, message.request_id)
        self._answer_followers()

    def _served(self, client: bytes, message: Message) -> None:
        fields = {name: integer(message.fields, name) for name in ("at_least", "num_engines")}
        self._log.check()
        request = _pending(client, message, fields)
        if not self._answer_follower(request):
            self._followers.add(request, self._hold_s, self._answer_nothing)

    def _answer_followers(self) -> None:
        for request in self._followers.all():
            if self._answer_follower(request):
                self._followers.remove(request.client, request.request_id)

    def _answer_follower(self, request: PendingRequest) -> bool:
        served = self._log.served(request.fields["num_engines"])
        if served is None or served[0] < request.fields["at_least"]:
            return False
        self._replies.reply(request.client, request.request_id, {"version": served[0], "seconds": served[1]})
        return True

    def _hold(self, client: bytes, message: Message) -> None:
        self._log.hold(integer(message.fields, "version") if "version" in message.fields else None)
        self._write()
        self.show()
        self._replies.reply(client, message.request_id)

    def _answer_nothing(self, request: PendingRequest) -> None:
        self._replies.reply(request.client, request.request_id)


def _pending(client: bytes, message: Message, fields: dict[str, Any]) -> PendingRequest:
    return PendingRequest(client=client, request_id=message.request_id, fields=fields)
