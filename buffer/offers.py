"""The log of weight offers (messages that tell engines where to load a new policy version).

The learner adds offers, and the workers request the newest offer. The buffer shows a version to the workers after the
commit of the step that made the version. For an evaluation, the controller can pin a few engines to a version. The
buffer shows these engines no newer offers until they are unpinned.

- A worker's request for weights waits until an offer, a commit, a change of the pin, or a failed publish.
- A controller's request waits until enough engines have loaded a version, or until the set of pinned engines changes.
- A timer ends each wait after half of ``buffer.request_timeout_s``.

When the learner goes back to a checkpoint, the buffer withdraws all offers. A version number may then mean other
weights than before. So the buffer shows the next offer to every engine, even if the engine serves a higher
version number. A journal keeps the offers. Heartbeats tell a restarted server which version each engine serves.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from msgspec import convert, to_builtins

from asyncrl.core.errors import WeightsError, WeightsGone
from asyncrl.core.types import WeightOffer

from . import operations
from .encoding import Message
from .journal import Journal
from .records import Answer
from .waiting import Collaborators

logger = logging.getLogger(__name__)

_MAX_OFFERS = 64
_TOLD_AT_ONCE = 64
_JOURNALED_AS = "offers"


class OfferLog:
    """The newest offers, and the version that each engine serves.

    Attributes:
        failure: Why the learner could not publish weights; empty if nothing failed.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._offers: dict[int, WeightOffer] = {}
        self._pin: int | None = None
        self._num_wanted = 0
        self._pinned: set[bytes] = set()
        self._serving: dict[bytes, int] = {}
        self._names: dict[bytes, str] = {}
        self._num_serving: Counter[int] = Counter()
        self._slowest_s: dict[int, float] = {}

    def append(self, offer: WeightOffer) -> None:
        """Add an offer of weights. An earlier offer of the same version is replaced.

        If there are too many offers, delete one: the second oldest offer of a version that is not pinned. The pinned
        version is the version that pinned engines stay on.
        """
        self._offers[offer.version] = offer
        if len(self._offers) > _MAX_OFFERS:
            # Keep the oldest offer and the pinned version's offer, because engines may be loading these weights.
            del self._offers[sorted(set(self._offers) - {self._pin})[1]]

    def pin(self, version: int, num_engines: int) -> bool:
        """Pin ``num_engines`` engines to ``version``: these engines get no offer of a newer version.

        The first engines that request weights and accept this version are pinned. Returns whether the call changes the
        pinned version or the number of engines.
        """
        is_new = (version, num_engines) != (self._pin, self._num_wanted)
        if is_new:
            self.unpin()
            self._pin, self._num_wanted = version, num_engines
        return is_new

    def unpin(self) -> None:
        """Let the pinned engines (engines that are kept on one version) load newer versions again."""
        self._pin, self._num_wanted = None, 0
        self._pinned.clear()

    def pinned(self) -> list[str]:
        """Return the sorted names of the engines that are pinned to (kept on) a version and serve this version."""
        return sorted(self._names.get(engine, "") for engine in self._pinned if self._serving.get(engine) == self._pin)

    def is_pin_lost(self, learner_version: int) -> bool:
        """Return whether the pinned version (the version that pinned engines stay on) is lost.

        The pinned version is lost if its offer is deleted, no pinned engine serves the version, and engines may load a
        newer version. Raises `WeightsError` if a publish failed.
        """
        newest = self.newest(learner_version)
        is_past = self._pin is not None and newest is not None and self._pin < newest
        return is_past and self._pin not in self._offers and not self.pinned()

    def newest(self, learner_version: int) -> int | None:
        """Return the newest version that engines may load, and delete older offers that no engine needs.

        Returns None if there is no version that engines may load. Raises `WeightsError` if a publish failed.
        """
        self.check()
        shown = [version for version in self._offers if version <= learner_version]
        if not shown:
            return None
        newest = max(shown)
        is_awaited = len(self.pinned()) < self._num_wanted
        for version in shown:
            if version != newest and not (version == self._pin and is_awaited):
                del self._offers[version]
        return newest

    def next_for(self, engine: bytes, at_least: int, learner_version: int) -> WeightOffer | None:
        """Return the offer that an engine should load next, or None if no offer has version ``at_least`` or newer.

        For an evaluation, some engines are pinned to (kept on) one version. Until enough engines are pinned, an engine
        that gets the offer of this version becomes a pinned engine. Raises `WeightsError` if a publish failed.
        """
        newest = self.newest(learner_version)
        if newest is None:
            return None
        if self._pin is not None and self._pin <= learner_version:
            if engine in self._pinned and self._pin < at_least:
                return None
            if self._pin in self._offers and at_least <= self._pin:
                if engine in self._pinned or len(self._pinned) < self._num_wanted:
                    self._pinned.add(engine)
                    return self._offers[self._pin]
            else:
                # A pinned engine that restarts after the pinned version's offer was deleted loads the newest version.
                self._pinned.discard(engine)
        return self._offers[newest] if newest >= at_least else None

    def oldest(self) -> int:
        """Return the oldest version in the log, or 0 if the log has no offers."""
        return min(self._offers, default=0)

    def check(self) -> None:
        """Raise `WeightsError` if the learner failed to publish a version."""
        if self.failure:
            raise WeightsError(self.failure)

    def loaded(self, engine: bytes, version: int, took_s: float = 0.0, name: str = "") -> None:
        """Record that an engine serves a version after a load of ``took_s`` seconds.

        ``engine`` is the client id of the engine's worker. ``name`` is the controller's name for the engine. A repeated
        report of the same version changes nothing.
        """
        if self._serving.get(engine) != version:
            self._stop_counting(engine)
            self._serving[engine] = version
            self._names[engine] = name
            self._num_serving[version] += 1
            self._slowest_s[version] = max(took_s, self._slowest_s.get(version, 0.0))

    def forget(self, engine: bytes) -> None:
        """Forget an engine that is lost or serves no version. The engine is then not pinned to a version."""
        self._stop_counting(engine)
        self._names.pop(engine, None)
        self._pinned.discard(engine)

    def _stop_counting(self, engine: bytes) -> None:
        version = self._serving.pop(engine, None)
        if version is None:
            return
        self._num_serving[version] -= 1
        if not self._num_serving[version]:
            del self._num_serving[version], self._slowest_s[version]

    def served(self, num_engines: int) -> tuple[int, float] | None:
        """Return the oldest version that any engine serves, and the seconds of the slowest load of this version.

        Returns None until ``num_engines`` engines have loaded a version.
        """
        if not self._serving or len(self._serving) < num_engines:
            return None
        oldest = min(self._num_serving)
        return oldest, self._slowest_s[oldest]

    @property
    def num_pinned(self) -> int:
        """Number of engines that are pinned to (kept on) a version, including engines that have not loaded it yet."""
        return len(self._pinned)

    def snapshot(self) -> dict[str, Any]:
        """Return the state that a restarted server needs, as a dict of plain values for `restore`."""
        return {
            "offers": to_builtins(list(self._offers.values())),
            "pin": [self._pin, self._num_wanted, sorted(self._pinned)],
            "failure": self.failure,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Load ``values``, a result of `snapshot`."""
        self._offers = {offer.version: offer for offer in convert(values["offers"], list[WeightOffer])}
        self._pin, self._num_wanted, pinned = values["pin"]
        self._pinned, self.failure = set(pinned), values["failure"]


class OfferRequests:
    """The offers, and the requests that wait for offers. A server with a journal writes the offers to the journal.

    Attributes:
        log: The offers.
        receivers: Workers' requests for weights.
        followers: The controller's requests for the version that the engines serve.
        evaluators: The controller's requests for the names of the pinned engines (engines that are kept on one
            version).
    """

    def __init__(self, shared: Collaborators, journal: Journal | None = None) -> None:
        self._ledger, self._journal = shared.ledger, journal
        self.log = OfferLog()
        self._shown: int | None = None
        self._untold: deque[Message] = deque()
        self._next_turn: asyncio.TimerHandle | None = None
        self.receivers, self.followers, self.evaluators = shared.held(), shared.held(), shared.held()

    def recover(self) -> None:
        """Load the offers that an earlier server wrote to the journal.

        The offers are ignored if the learner has gone back to a checkpoint since they were written.
        """
        journaled = None if self._journal is None else self._journal.read(_JOURNALED_AS)
        incarnation, values = journaled or (0, None)
        if values is not None and incarnation == self._ledger.incarnation:
            self.log.restore(values)

    def close(self) -> None:
        """Cancel all waiting requests and all timers."""
        self._untold.clear()
        if self._next_turn is not None:
            self._next_turn.cancel()
        for held in (self.receivers, self.followers, self.evaluators):
            held.close()

    def show(self) -> None:
        """If the newest version that engines may load has changed, try to answer the waiting requests.

        Workers wait for weights. The controller waits for the names of the pinned engines (engines that are kept on
        one version). After a failed publish, engines must not load weights.
        """
        newest = None if self.log.failure else self.log.newest(self._ledger.learner_version)
        if newest != self._shown:
            self._shown = newest
            self._untold = deque(self.receivers.all())
            self._tell_receivers()
            self.evaluators.answer(self.answer_evaluator)

    def _tell_receivers(self) -> None:
        """Answer some workers now, and the other workers in later iterations of the event loop.

        Between the iterations, the server can answer the first workers' requests for leases.
        """
        self._next_turn = None
        told = [self._untold.popleft() for _ in range(min(_TOLD_AT_ONCE, len(self._untold)))]
        self.receivers.answer(self.answer_receiver, [request for request in told if request in self.receivers])
        if self._untold:
            self._next_turn = asyncio.get_running_loop().call_later(0.0, self._tell_receivers)

    def note_loaded(self, client: bytes, loaded: operations.Loaded) -> None:
        """Record the version that the engine of a worker serves.

        The call ignores a report about weights that the learner made before it went back to a checkpoint.
        """
        if self.is_current(loaded):
            self.log.loaded(client, loaded.version, loaded.seconds, loaded.engine)
            self._tell_controllers()

    def forget(self, client: bytes) -> None:
        """Forget a worker's engine, because the worker is gone or the engine serves no version."""
        num_pinned = self.log.num_pinned
        self.log.forget(client)
        if self.log.num_pinned != num_pinned:
            self._write()
        self._tell_controllers()

    def withdraw(self) -> None:
        """Delete every offer, because the learner goes back to a checkpoint."""
        self.log = OfferLog()
        self._shown = None
        self._write()

    def is_current(self, message: operations.Loaded | operations.Offer | operations.NextOffer) -> bool:
        """Return whether a message names the learner's current incarnation.

        The incarnation counts how often the learner has gone back to a checkpoint.
        """
        return message.incarnation == self._ledger.incarnation

    def add(self, offer: WeightOffer) -> None:
        """Add the learner's offer, and show the offer to the engines if they may load its version now."""
        self.log.append(offer)
        self._write()
        self.show()

    def fail(self, failure: str) -> None:
        """Fail all waiting requests, because the learner failed to publish a version. ``failure`` says why."""
        self.log.failure = failure
        self._write()
        for held in (self.receivers, self.followers, self.evaluators):
            held.fail_all(WeightsError(failure))

    def _write(self) -> None:
        if self._journal is not None:
            self._journal.write(_JOURNALED_AS, [self._ledger.incarnation, self.log.snapshot()])

    def answer_receiver(self, request: Message) -> Answer | None:
        """Return the answer to `NextOffer`, or None if no offer is new enough.

        Raises `WeightsError` if a publish failed.
        """
        # If the learner has gone back to a checkpoint since the request was sent, any offer is new enough.
        at_least = request.body.at_least if self.is_current(request.body) else 0
        num_pinned = self.log.num_pinned
        offer = self.log.next_for(request.client, at_least, self._ledger.learner_version)
        if self.log.num_pinned != num_pinned:
            self._write()
        return None if offer is None else operations.Offered(offer)

    def answer_follower(self, request: Message) -> Answer | None:
        """Return the answer to `Served`, or None if the request must wait longer."""
        served = self.log.served(request.body.num_engines)
        return None if served is None or served[0] < request.body.at_least else operations.Serving(*served)

    def _tell_controllers(self) -> None:
        if not self.log.failure:
            self.followers.answer(self.answer_follower)
            self.evaluators.answer(self.answer_evaluator)

    def pin(self, version: int, num_engines: int) -> None:
        """Keep engines on (pin them to) a version, with `OfferLog.pin`. Raises `WeightsError` if a publish failed."""
        self.log.check()
        if self.log.pin(version, num_engines):
            self._write()
            self.receivers.answer(self.answer_receiver)

    def unpin(self) -> None:
        """Let the pinned engines (engines that are kept on one version) load newer versions again."""
        self.log.unpin()
        self._write()
        if not self.log.failure:
            self.receivers.answer(self.answer_receiver)

    def answer_evaluator(self, request: Message) -> Answer | None:
        """Return the answer to `Pin`: the names of the pinned engines.

        Return None if the request already has exactly these names (``known``). The request must then wait longer.
        Raises `WeightsGone` if the pinned version is lost (`OfferLog.is_pin_lost`).
        """
        engines = self.log.pinned()
        if self.log.is_pin_lost(self._ledger.learner_version):
            raise WeightsGone(f"policy version {request.body.version} is no longer offered, and no engine serves it")
        return None if set(engines) == set(request.body.known) else operations.Names(tuple(engines))
