"""The log of weight offers: the learner appends, the rollout workers ask for the newest, the controller follows.

A version is shown to the workers when the step that made it is committed, and while it is no newer than the version at
which the controller holds the log. A request waits until newer weights are shown, under the timer of all long polls. It
is woken by an offer, a commit, a hold that moves, or a failed publish; a controller by the last worker that loads.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.protocol.errors import WeightsError, WireError

from .admission import Collaborators, PendingRequest, PendingRequests
from .messages import MAX_REASON, Message, integer, seconds

_MAX_OFFERS = 64


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


class OfferRequests:
    """The operations on the log of offers."""

    def __init__(self, shared: Collaborators) -> None:
        self._ledger, self._replies, self._hold_s = shared.ledger, shared.replies, shared.hold_s
        self._log = OfferLog()
        self._shown = -1
        self._receivers = PendingRequests()
        self._followers = PendingRequests()
        self.operations: dict[str, Callable[[bytes, Message], None]] = {
            "offer": self._offer,
            "next_offer": self._next_offer,
            "loaded": self._loaded,
            "served": self._served,
            "hold": self._hold,
        }

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
        if "serves" in fields:
            self._log.loaded(client, integer(fields, "serves"))
            self._answer_followers()

    def forget(self, client: bytes) -> None:
        """A client left, or is silent: nobody waits for its engine."""
        self._log.forget(client)
        self._answer_followers()

    def _offer(self, client: bytes, message: Message) -> None:
        offer, reason = message.fields.get("offer"), message.fields.get("failure")
        if isinstance(offer, dict):
            self._log.append(integer(offer, "version"), offer)
            self.show()
        elif isinstance(reason, str) and 0 < len(reason) <= MAX_REASON:
            self._log.failure = reason
            self._fail_all()
        else:
            got = str({name: message.fields[name] for name in ("offer", "failure") if name in message.fields})[:200]
            raise WireError(
                f"an offer must have the fields of weights, or a failure of 1 to {MAX_REASON} characters, got {got}"
            )
        self._replies.reply(client, message.request_id, {"oldest": self._log.oldest()})

    def _fail_all(self) -> None:
        for pending in (self._receivers, self._followers):
            for request in pending.all():
                pending.remove(request.client, request.request_id)
                self._replies.fail(request.client, request.request_id, WeightsError(self._log.failure))

    def _next_offer(self, client: bytes, message: Message) -> None:
        request = _pending(client, message, {"at_least": integer(message.fields, "at_least")})
        if not self._answer_receiver(request):
            self._receivers.add(request, self._hold_s, self._answer_nothing)

    def _answer_receiver(self, request: PendingRequest) -> bool:
        newest = self._log.newest(self._ledger.learner_version)
        if newest is None or newest[0] < request.fields["at_least"]:
            return False
        self._replies.reply(request.client, request.request_id, {"offer": newest[1]})
        return True

    def _loaded(self, client: bytes, message: Message) -> None:
        version = integer(message.fields, "version")
        self._ledger.check_engine_version(version)
        self._log.loaded(client, version, seconds(message.fields, "seconds"))
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
        self.show()
        self._replies.reply(client, message.request_id)

    def _answer_nothing(self, request: PendingRequest) -> None:
        self._replies.reply(request.client, request.request_id)


def _pending(client: bytes, message: Message, fields: dict[str, Any]) -> PendingRequest:
    return PendingRequest(client=client, request_id=message.request_id, fields=fields)
