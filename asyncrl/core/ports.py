"""The seams between the packages: what each part needs of the others. Peers never import one another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import BufferStats, Lease, Plan, Prompt, WeightOffer


class RolloutBuffer(Protocol):
    """What a rollout worker needs of the replay buffer. Every call is awaited under the client's deadline.

    Attributes:
        count_generated: Returns the policy tokens that this worker has generated, those of running samples among them.
            The worker sets it, and each beat reports what it returns.
    """

    count_generated: Callable[[], int]

    async def enter(self) -> str:
        """Connect, and be heard of from now on; returns the name that `ControlBuffer.bury` knows this worker by."""
        ...

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        """Wait until at least one group is admitted at ``engine_version``; return up to ``max_groups`` leases.

        Empty when nothing was admitted within the server's long-poll period: ask again, with the engine's version then.
        """
        ...

    async def renew(self, leases: Sequence[Lease]) -> None:
        """Extend the leases that are still held; the others arrive through `revocation`."""
        ...

    async def put(self, group: TrajectoryGroup, *, num_left_out: int = 0) -> None:
        """Store a finished group; returns once it is stored. Sent again until acknowledged; stored once.

        ``num_left_out`` tokens of trajectories that are not part of it are dropped (``reward``).
        Raises `LeaseExpired` if the attempt is no longer the current one, which counts its tokens as dropped, and
        `VersionTooOld` if the group holds a token older than its lease.
        """
        ...

    async def release(self, lease: Lease, *, num_tokens: int, reason: str, max_failures: int = 0) -> bool:
        """Give a lease back unfinished. Its ``num_tokens`` policy tokens count as dropped for ``reason``.

        The prompt is queued again, unless the attempt has failed, and so have ``max_failures`` of its attempts on
        whichever workers by now: then the group is dropped. 0: it has not failed. Returns whether it was dropped.
        """
        ...

    def take_progress(self, lease: Lease) -> TrajectoryGroup | None:
        """What an earlier attempt saved of this lease's group, to be continued; asked once, before it begins.

        Who takes it reports all tokens, those of the prefix among them, in its put or release. Who does not begins
        afresh, and the prefix counts as dropped when it puts.
        """
        ...

    async def save_progress(self, lease: Lease, group: TrajectoryGroup) -> None:
        """Save a running group with its lease, so that another worker can continue it.

        Samples that did not end have the finish reason ``unfinished``; the group has at least one token. Raises as
        `put` does, or `StoreFull` if there is no room for it now.
        """
        ...

    async def revocation(self) -> tuple[int, int]:
        """Wait for the next (group_id, attempt) whose rollout is to be aborted."""
        ...

    async def hand_on_request(self) -> list[tuple[int, int]]:
        """Wait for groups that others would have done sooner; returns the (group_id, attempt) of each.

        What is saved and released goes to them.
        """
        ...

    async def next_offer(self, after: int) -> WeightOffer:
        """Wait for weights newer than version ``after``, -1 for any; the newest are answered, others are skipped.

        Raises `WeightsError` if a version could not be published.
        """
        ...

    async def loaded(self, version: int, took_s: float) -> None:
        """Report that this worker's engine serves ``version``, which it took ``took_s`` seconds to load."""
        ...

    async def fenced(self) -> None:
        """Report that this worker's engine serves nothing until `loaded` is called again: nobody waits for it."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class WeightLog(Protocol):
    """Where a learner's rank 0 reports what it published; any thread may call it."""

    def offer(self, offer: WeightOffer) -> int:
        """Offer weights to the engines; returns the oldest version that engines may still be offered."""
        ...

    def publish_failed(self, reason: str) -> None:
        """Report that a version could not be published: whoever waits for weights raises `WeightsError`."""
        ...


class LearnerBuffer(WeightLog, Protocol):
    """What a learner rank needs of the replay buffer."""

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """Return planned groups in the order asked for. Arrays are read-only views of the received bytes."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class ControlBuffer(Protocol):
    """What the controller needs of the replay buffer."""

    async def enqueue(self, prompts: Sequence[Prompt]) -> None:
        """Queue prompts; returns when they are queued, which waits while the queue is full. Idempotent by group id."""
        ...

    async def plan(self, version: int) -> Plan:
        """Wait for the batch that the learner consumes at ``version``; asking again gives the same plan."""
        ...

    async def commit(self, version: int) -> BufferStats:
        """Mark the plan of ``version`` consumed: the learner is now at ``version + 1``. Idempotent."""
        ...

    async def stats(self) -> BufferStats:
        """The ledger now."""
        ...

    async def finished(self) -> list[tuple[int, int]]:
        """Ids of the groups that are consumed or dropped, as sorted ranges [start, end)."""
        ...

    async def served(self, after: int, num_engines: int) -> tuple[int, float]:
        """Wait until at least ``num_engines`` engines serve versions newer than ``after``, and all engines do.

        Returns the oldest version that one of them serves, and the seconds that the slowest took to load it. Raises
        `WeightsError` if a version could not be published.
        """
        ...

    async def bury(self, worker: str, num_generated: int = 0) -> int:
        """A rollout worker is dead, or ended with leases: take these back, and accept nothing of it any more.

        ``worker`` is what `RolloutBuffer.enter` returned to it. ``num_generated`` are the tokens that it is known to
        have generated; its last heartbeat may know of more. Returns all of them. Those that were neither stored nor
        released count as lost. Asking again returns the same.
        """
        ...

    async def pin(self, version: int, num_engines: int, known: Collection[str] = ()) -> set[str]:
        """Have up to ``num_engines`` engines keep ``version``, which is still to come, until `unpin` or another pin.

        They are those that ask for it first. It is offered to them until so many serve it, however old it is then; the
        other engines go on to newer versions. Waits until those that serve it are others than ``known``; returns their
        names. Raises `WeightsGone` if none serves it and it is not offered any more, `WeightsError` if a version could
        not be published.
        """
        ...

    async def unpin(self) -> None:
        """Offer all engines the newest version again."""
        ...

    async def lose(self, group_ids: Sequence[int]) -> None:
        """The learner's ranks did not find these groups of planned batches: they are generated again (``store_lost``).

        The batches that held them, and those after them, are planned anew. Groups that no batch holds are left out.
        """
        ...

    async def rewind(
        self,
        version: int,
        *,
        incarnation: int,
        finished: Sequence[tuple[int, int]],
        tokens_trained: int,
        lag_histogram: Mapping[int, int],
    ) -> None:
        """Take the learner back to ``version``, which a checkpoint holds, for its next life, number ``incarnation``.

        ``finished`` are the groups that were consumed or dropped before ``version``; ``tokens_trained`` and
        ``lag_histogram`` what the steps of this run before it had consumed. Offers are withdrawn, running attempts
        revoked, and engines lease again once they have loaded what the new learner offers. Prompts that were finished
        since then have to be enqueued again. Idempotent.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class LearnerPort(Protocol):
    """What the controller needs of the learner group. Calls queue on the ranks in the order they are made."""

    async def scored(self, plan: Plan) -> Plan:
        """Return the plan with the rewards of the reward model, where there is one."""
        ...

    def update(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Start the update on a batch; its metrics come with ``started_at`` and ``ended_at`` (Unix seconds)."""
        ...

    def publish(self, version: int) -> Awaitable[None]:
        """Publish the weights, as they are after the updates queued so far, as ``version``.

        The ranks are free as soon as they have copied them; the engines learn from the buffer when they are offered.
        """
        ...

    async def finish_publish(self) -> None:
        """Wait until the version that is on its way is offered. Raises `WeightsError` if it could not be published."""
        ...

    def update_critic(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Let the critic learn from the batch of the last `update`; no metrics where there is no critic."""
        ...

    def save(self, version: int, run: Mapping[str, Any], *, wait: bool) -> Awaitable[str]:
        """Save a checkpoint of ``version`` with the run's own state; with ``wait``, until it is complete."""
        ...

    async def withdraw(self) -> Sequence[int]:
        """After a `BatchLost`: wait until the ranks have passed over what was queued, and let go of the batch.

        Returns the groups that they did not find. Raises `LearnerDiedError` if the ranks cannot go on from there.
        """
        ...


class ColocatedLearnerPort(LearnerPort, Protocol):
    """A learner group that can leave its devices."""

    def rollout_mode(self, version: int) -> Awaitable[None]:
        """Publish the weights as ``version``, offload as the options say, and wait until the version is offered."""
        ...

    def trainer_mode(self) -> Awaitable[None]:
        """Bring back what `rollout_mode` moved away."""
        ...


@dataclass(frozen=True, kw_only=True)
class FleetCounts:
    """The fleet's counters, over its engines.

    Attributes:
        tokens_generated: Policy tokens that the engines produced for training, including those of aborted requests.
        tokens_in_flight: Those of them that are not yet stored or given back.
        groups_failed: Attempts that failed, by reason: ``aborted`` by the engine, ``stalled``, ``reward``, …
    """

    tokens_generated: int
    tokens_in_flight: int
    groups_failed: Mapping[str, int] = field(default_factory=dict)


class FleetPort(Protocol):
    """What the controller needs of the rollout fleet. Its engines take offered weights by themselves."""

    def engines(self) -> Sequence[str]:
        """Names of the engines that are there now."""
        ...

    async def counters(self) -> FleetCounts:
        """Return the fleet's own counts since it began."""
        ...

    async def drain(self) -> FleetCounts:
        """Stop all work: abort what runs, give the leases back; returns the final counts."""
        ...


class ColocatedFleetPort(FleetPort, Protocol):
    """A fleet that can leave its devices."""

    async def release_device(self) -> None:
        """Let what runs end, and give the devices up until the next weights."""
        ...


class PromptSource(Protocol):
    """Where prompts come from."""

    def take(self, count: int) -> Sequence[Prompt]:
        """Return the next ``count`` prompts of an endless order."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return where the order stands, as values that JSON can hold."""
        ...
