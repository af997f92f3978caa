"""The protocols between the packages. These packages do not import each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import BufferStats, GroupSummary, Lease, Plan, Prompt, WeightOffer


class RolloutBuffer(Protocol):
    """The interface of a rollout worker to the replay buffer. The client's deadline applies to every call.

    Attributes:
        count_generated: Set by the worker. Returns the number of policy tokens that this worker has generated so far,
            including running samples.
    """

    count_generated: Callable[[], int]

    async def enter(self) -> str:
        """Connect and start the heartbeats; return the worker's name for `ControlBuffer.bury`."""
        ...

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        """Wait until at least one group is admitted at ``engine_version``; return up to ``max_groups`` leases.

        Returns an empty list if the server's long-poll period ends first. Then call again.
        """
        ...

    async def renew(self, leases: Sequence[Lease]) -> None:
        """Extend the leases that are still valid. `revocation` reports the revoked leases."""
        ...

    async def put(self, group: TrajectoryGroup, *, num_left_out: int = 0, data_source: str = "") -> None:
        """Store a finished group and wait until it is stored. Idempotent.

        Args:
            group: The finished group.
            num_left_out: Tokens of trajectories that the worker omitted. They count as dropped for the reason
                ``reward``.
            data_source: As in `Prompt`.

        Raises:
            LeaseExpired: the lease has ended. The tokens count as dropped.
            VersionTooOld: a token is older than the policy version of the lease.
        """
        ...

    async def release(self, lease: Lease, *, num_tokens: int, reason: str, max_failures: int = 0) -> bool:
        """Return a lease without a result. Its ``num_tokens`` policy tokens count as dropped for ``reason``.

        The buffer requeues the prompt. If ``max_failures`` is not 0, the attempt counts as failed, and the buffer drops
        the group after ``max_failures`` failed attempts. Returns whether the buffer dropped the group.
        """
        ...

    def take_progress(self, lease: Lease) -> TrajectoryGroup | None:
        """Return the saved prefix of this lease's group, if an earlier attempt saved one.

        Call this once, before generating. The later put or release must include the tokens of the prefix.
        """
        ...

    async def save_progress(self, lease: Lease, group: TrajectoryGroup) -> None:
        """Save a running group with its lease, so that another worker can continue it.

        Unfinished samples have the finish reason ``unfinished``. The group must have at least one token.

        Raises the errors of `put`, and `StoreFull`.
        """
        ...

    async def revocation(self) -> tuple[int, int]:
        """Wait until the buffer revokes an attempt; return its (group_id, attempt). The worker must abort it."""
        ...

    async def hand_on_request(self) -> list[tuple[int, int]]:
        """Wait for groups that another worker would finish sooner; return the (group_id, attempt) of each group.

        The worker must save and release these groups. The buffer then leases them to a faster worker.
        """
        ...

    async def next_offer(self, after: int) -> WeightOffer:
        """Wait for weights newer than version ``after`` (-1 for any) and return the newest version.

        Raises `WeightsError` if a version could not be published.
        """
        ...

    async def loaded(self, version: int, took_s: float) -> None:
        """Report that this worker's engine serves ``version``; loading took ``took_s`` seconds."""
        ...

    async def fenced(self) -> None:
        """Report that this worker's engine serves no version until the next `loaded`.

        Until then, `ControlBuffer.served` ignores this engine.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class WeightLog(Protocol):
    """The interface of learner rank 0 to report published versions; thread-safe."""

    def offer(self, offer: WeightOffer) -> int:
        """Offer weights to the engines.

        Returns the oldest version that the buffer may still offer, so that the caller can delete older versions.
        """
        ...

    def publish_failed(self, reason: str) -> None:
        """Report a failed publish. Calls that wait for weights raise `WeightsError`."""
        ...


class LearnerBuffer(WeightLog, Protocol):
    """The interface of a learner rank to the replay buffer."""

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """Return planned groups in the order of ``group_ids``. Arrays are read-only views of the received bytes."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class ControlBuffer(Protocol):
    """The interface of the controller to the replay buffer."""

    async def enqueue(self, prompts: Sequence[Prompt], *, wants_outcomes: bool = False) -> Sequence[GroupSummary]:
        """Queue prompts. Waits while the queue is full. Idempotent per group id.

        With ``wants_outcomes``, the call returns the groups that workers have finished since the last call with
        ``wants_outcomes``, including groups that a filter dropped. Otherwise it returns no groups. Without prompts, the
        call does not wait.
        """
        ...

    async def plan(self, version: int) -> Plan:
        """Wait for the batch that the learner consumes at ``version``. A second call returns the same plan."""
        ...

    async def commit(self, version: int) -> BufferStats:
        """Mark the plan of ``version`` as consumed. The learner version is then ``version + 1``. Idempotent."""
        ...

    async def stats(self) -> BufferStats:
        """Return the ledger's current counts."""
        ...

    async def finished(self) -> list[tuple[int, int]]:
        """Return the ids of consumed and dropped groups, as sorted ranges [start, end)."""
        ...

    async def served(self, after: int, num_engines: int) -> tuple[int, float]:
        """Wait until at least ``num_engines`` engines exist, and all of them serve versions newer than ``after``.

        Returns the oldest version that an engine serves, and the longest load time in seconds. Raises `WeightsError` if
        a version could not be published.
        """
        ...

    async def bury(self, worker: str, num_generated: int = 0) -> int:
        """Declare a rollout worker dead: take back its leases and refuse its later messages. Idempotent.

        Tokens that the worker neither stored nor released count as lost. ``worker`` is the name from
        `RolloutBuffer.enter`. Returns the larger of ``num_generated`` and the number of generated tokens in the
        worker's last heartbeat.
        """
        ...

    async def pin(self, version: int, num_engines: int, known: Collection[str] = ()) -> set[str]:
        """Keep up to ``num_engines`` engines on ``version`` until `unpin` or the next `pin`.

        Call this before the version is offered. The first engines that request the version stay on it. The call waits
        until the set of engines that serve the version differs from ``known``, and returns that set.

        Raises:
            WeightsGone: no engine serves the version, and the buffer does not offer it.
            WeightsError: a version could not be published.
        """
        ...

    async def unpin(self) -> None:
        """Offer all engines the newest version again."""
        ...

    async def lose(self, group_ids: Sequence[int]) -> None:
        """Report groups of planned batches that are missing in the stores.

        The buffer requeues their prompts for the reason ``store_lost``. It plans their batches, and all later batches,
        again.
        """
        ...

    async def rewind(self, version: int, *, incarnation: int) -> None:
        """Set the learner back to the ``version`` of a checkpoint; ``incarnation`` is its new incarnation. Idempotent.

        The buffer withdraws all offers, revokes running attempts, and drops groups and saved prefixes with a token of a
        later version. Engines get new leases after they load weights of the new learner. The caller must enqueue again
        the prompts of groups that finished after the checkpoint.
        """
        ...

    async def resume(self, version: int, *, key: str, tokens_generated: int) -> None:
        """Set the buffer of a resumed run to a checkpoint, as `rewind` does, with incarnation 0. Idempotent.

        Args:
            version: Learner version of the checkpoint.
            key: Name of the checkpoint, as in `checkpoint`.
            tokens_generated: Policy tokens that the run generated up to the checkpoint. Tokens that the restored
                account lacks count as dropped for the reason ``resume``.
        """
        ...

    async def checkpoint(self, folder: Path, version: int, *, key: str) -> Any:
        """Write the state for `resume` to ``folder``, an absolute path. Return when the folder is complete.

        The steps before ``version`` must be planned or committed. ``key`` is a random name for the checkpoint.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class LearnerPort(Protocol):
    """The interface of the controller to the learner group. The ranks execute calls in the order of the calls."""

    checkpoints: Path

    async def scored(self, plan: Plan) -> Plan:
        """Return the plan with the rewards of the reward model, or the same plan without a reward model."""
        ...

    def update(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Start the update on a batch. The metrics include ``started_at`` and ``ended_at`` in Unix seconds."""
        ...

    def publish(self, version: int) -> Awaitable[None]:
        """Publish the weights as ``version``, after all updates that are queued so far.

        The ranks continue as soon as they have copied the weights. After the publish, the buffer offers the version to
        the engines.
        """
        ...

    async def finish_publish(self) -> None:
        """Wait until the current version is offered. Raises `WeightsError` if publishing failed."""
        ...

    def update_critic(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Train the critic on the batch of the last `update`. Without a critic, return no metrics."""
        ...

    def save(self, version: int, run: Mapping[str, Any], *, wait: bool, parts: Sequence[str] = ()) -> Awaitable[str]:
        """Save a checkpoint of ``version`` with the run's state ``run``. With ``wait``, wait until it is complete.

        ``parts`` names the folders of the checkpoint that other processes write. The checkpoint is complete when these
        folders exist too.
        """
        ...

    async def withdraw(self) -> Sequence[int]:
        """Discard the batch after a `BatchLost`, and wait until the ranks have skipped their queued calls.

        Returns the missing groups. Raises `LearnerDiedError` if the ranks cannot continue.
        """
        ...


class ColocatedLearnerPort(LearnerPort, Protocol):
    """A learner group that can release its devices for the engines."""

    def rollout_mode(self, version: int) -> Awaitable[None]:
        """Publish the weights as ``version``, offload, and wait until the version is offered."""
        ...

    def trainer_mode(self) -> Awaitable[None]:
        """Load the offloaded tensors to the devices again."""
        ...


@dataclass(frozen=True, kw_only=True)
class FleetCounts:
    """The fleet's counters, summed over its engines.

    Attributes:
        tokens_generated: Policy tokens that the engines produced for training, including aborted requests.
        tokens_in_flight: Generated tokens of groups that are neither stored nor released.
        groups_failed: Failed attempts by reason. Example: ``reward``.
        tokens_by_engine: ``tokens_generated`` of each current engine, including tokens from before its restarts.
    """

    tokens_generated: int
    tokens_in_flight: int
    groups_failed: Mapping[str, int] = field(default_factory=dict)
    tokens_by_engine: Mapping[str, int] = field(default_factory=dict)
    episodes: Mapping[str, int] = field(default_factory=dict)


class FleetPort(Protocol):
    """The interface of the controller to the rollout fleet. The engines load offered weights without the controller."""

    def engines(self) -> Sequence[str]:
        """Return the names of the current engines."""
        ...

    async def counters(self) -> FleetCounts:
        """Return the fleet's counters since its start."""
        ...

    async def drain(self) -> FleetCounts:
        """Abort running groups, release their leases, and return the final counters."""
        ...


class ColocatedFleetPort(FleetPort, Protocol):
    """A fleet that can release its devices."""

    async def release_device(self, incarnation: int | None = None) -> None:
        """Wait until running groups end, then release the devices until the next weights are offered.

        No engine starts before `take_device`. If ``incarnation`` is given, the engines then refuse weights of earlier
        incarnations.
        """
        ...

    def take_device(self) -> None:
        """Let engines start again. Call it after the learner has moved its tensors off the devices."""
        ...


class PromptSource(Protocol):
    """The source of the run's prompts, in an endless order."""

    @property
    def wants_outcomes(self) -> bool:
        """Whether the outcomes that `note` receives may change the order of the prompts."""
        ...

    def take(self, count: int) -> Sequence[Prompt]:
        """Return the next ``count`` prompts."""
        ...

    def note(self, groups: Sequence[GroupSummary]) -> None:
        """Receive the outcomes of finished groups."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the source's state as JSON values. Example: the position in the order of the prompts."""
        ...
