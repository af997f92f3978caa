"""The interfaces between the buffer, the rollout fleet, the learner and the controller, as typing protocols.

Because of these protocols, the packages of these components do not import each other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import BufferStats, GroupSummary, Lease, Plan, Prompt, WeightOffer


class RolloutBuffer(Protocol):
    """The calls that a rollout worker makes to the replay buffer. The buffer's client sets a deadline for each call.

    Attributes:
        count_generated: Function that the worker assigns. It returns the number of policy tokens that this worker has
            generated so far, including tokens of unfinished samples.
    """

    count_generated: Callable[[], int]

    async def enter(self) -> str:
        """Connect to the buffer and start heartbeats. Return the worker's name (see `ControlBuffer.bury`)."""
        ...

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        """Wait until this worker may generate at least one prompt group; return up to ``max_groups`` leases.

        A lease is the right to generate one group. ``engine_version`` is the policy version that the worker's engine
        serves. If no group is available before the server's time limit, the list is empty. The worker must then call
        this method again.
        """
        ...

    async def renew(self, leases: Sequence[Lease]) -> None:
        """Extend the leases (rights to generate a group) that are still valid. Ignore the other leases.

        `revocation` reports the leases that the buffer has revoked.
        """
        ...

    async def put(self, group: TrajectoryGroup, *, num_left_out: int = 0, data_source: str = "") -> None:
        """Send a finished prompt group to the buffer, and wait until the group is stored.

        A repeated call has no effect.

        Args:
            group: The finished group.
            num_left_out: Number of tokens in trajectories that the worker left out of the group. These tokens count as
                dropped for the reason ``reward``.
            data_source: Name of the prompt's task.

        Raises:
            LeaseExpired: the worker's lease (right to generate the group) has ended. The tokens count as dropped.
            VersionTooOld: a token is older than the policy version of the lease.
        """
        ...

    async def release(self, lease: Lease, *, num_tokens: int, reason: str, max_failures: int = 0) -> bool:
        """Give up a lease, the right to generate a group, without a result. The buffer queues the prompt again.

        Args:
            lease: The lease to give up.
            num_tokens: Number of tokens that the policy has generated for the group. The tokens count as dropped.
            reason: Why the tokens are dropped. Example: ``reward``.
            max_failures: If not 0, this attempt counts as failed, and the buffer drops the group after ``max_failures``
                failed attempts.

        Returns:
            True if the buffer has dropped the group.
        """
        ...

    def take_progress(self, lease: Lease) -> TrajectoryGroup | None:
        """Return the unfinished group that `save_progress` saved for this prompt; None if there is no such group.

        Call this method once per lease, before the generation. In a later call of `put` or `release`, the number of
        tokens must include the tokens of the saved group.
        """
        ...

    async def save_progress(self, lease: Lease, group: TrajectoryGroup) -> None:
        """Save an unfinished group, so that another worker can continue to generate the group.

        Unfinished samples have the finish reason ``unfinished``. The group must have at least one sampled token.
        ``lease`` is this worker's lease of the group.

        Raises the errors of `put`, and `StoreFull`.
        """
        ...

    async def revocation(self) -> tuple[int, int]:
        """Wait until the buffer revokes a lease of this worker. Return a pair: the lease's group id and attempt number.

        The worker must stop generating this group.
        """
        ...

    async def hand_on_request(self) -> list[tuple[int, int]]:
        """Wait until the buffer asks this worker to give up groups, because another worker would finish them sooner.

        Returns a pair per group: group id and attempt number. The worker must save these groups with `save_progress`
        and give up their leases with `release`. The buffer then leases the groups to the other worker.
        """
        ...

    async def next_offer(self, after: int) -> WeightOffer:
        """Wait until weights newer than policy version ``after`` exist, and return the offer of the newest weights.

        With ``after=-1``, all policy versions are newer. Raises `WeightsError` if a version could not be published.
        """
        ...

    async def loaded(self, version: int, took_s: float) -> None:
        """Report that this worker's engine serves policy version ``version``; loading took ``took_s`` seconds."""
        ...

    async def fenced(self) -> None:
        """Report that this worker's engine serves no policy version until the worker calls `loaded` again.

        Until then, `ControlBuffer.served` ignores the engine.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class WeightLog(Protocol):
    """The calls with which learner rank 0 reports published weights to the replay buffer. All calls are thread-safe."""

    def offer(self, offer: WeightOffer) -> int:
        """Tell the engines that a new policy version is ready, and where to load the version.

        Returns the oldest version that an engine can still load. The caller can delete all earlier versions.
        """
        ...

    def publish_failed(self, reason: str) -> None:
        """Report that publishing weights failed. Pending calls that wait for weights raise `WeightsError`.

        ``reason`` is the text of the error.
        """
        ...


class LearnerBuffer(WeightLog, Protocol):
    """The interface of the replay buffer for learner ranks. `buffer.role_clients.SyncBufferClient` implements it."""

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """Return prompt groups of a planned batch, in the order of ``group_ids``.

        The groups' arrays are read-only views of the received bytes.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class ControlBuffer(Protocol):
    """The interface of the buffer for the controller (the run's main process). `buffer.ControlClient` implements it."""

    async def enqueue(self, prompts: Sequence[Prompt], *, wants_outcomes: bool = False) -> Sequence[GroupSummary]:
        """Queue prompts for the rollout workers. Wait while the queue is full.

        The buffer skips a prompt if a prompt with the same group id was queued before.

        If ``wants_outcomes`` is true, the call returns summaries of the groups that workers have finished since the
        previous such call, including the groups that ``buffer.filters`` dropped. Otherwise the result is empty. If
        ``prompts`` is empty, the call does not wait.
        """
        ...

    async def plan(self, version: int) -> Plan:
        """Wait until the buffer has enough groups for the batch of learner step ``version``. Return this batch.

        A second call with the same version returns the same plan.
        """
        ...

    async def commit(self, version: int) -> BufferStats:
        """Report that the learner has finished learner step ``version``. Return the buffer's counts.

        After this call, the learner version is ``version + 1``. A repeated call has no effect.
        """
        ...

    async def stats(self) -> BufferStats:
        """Return the buffer's current counts of groups, tokens and bytes."""
        ...

    async def finished(self) -> list[tuple[int, int]]:
        """Return the ids of the groups that were trained on or dropped, as sorted half-open ranges (start, end)."""
        ...

    async def served(self, after: int, num_engines: int) -> tuple[int, float]:
        """Wait until at least ``num_engines`` engines exist, and all engines serve versions newer than ``after``.

        Returns a pair: the oldest policy version that an engine serves, and the longest load time in seconds. Raises
        `WeightsError` if a version could not be published.
        """
        ...

    async def bury(self, worker: str, num_generated: int = 0) -> int:
        """Declare a rollout worker dead: let other workers generate its groups, and refuse its later messages.

        Tokens that the worker neither stored nor released count as lost. ``worker`` is the name from
        `RolloutBuffer.enter`. Returns the number of tokens that the worker has generated: the larger of
        ``num_generated`` and the number in the worker's latest heartbeat. A repeated call has no effect.
        """
        ...

    async def pin(self, version: int, num_engines: int, known: Collection[str] = ()) -> set[str]:
        """Pin at most ``num_engines`` engines to policy version ``version``, until `unpin` or the next `pin`.

        Call this before the version is offered. The first engines that request the version are pinned: they get no
        newer version. ``known`` has names of engines. The call waits until the set of engines that serve the version
        differs from ``known``, and returns the names of these engines.

        Raises:
            WeightsGone: no engine serves the version, and the buffer does not offer it.
            WeightsError: a version could not be published.
        """
        ...

    async def unpin(self) -> None:
        """Unpin all engines: offer them the newest policy version again."""
        ...

    async def lose(self, group_ids: Sequence[int]) -> None:
        """Report groups of planned batches whose trajectories are lost, because a store of the buffer restarted.

        The buffer discards these groups for the reason ``store_lost``, and queues their prompts again. It also discards
        the batches with these groups and all later batches, so the next calls of `plan` choose these batches again.
        """
        ...

    async def rewind(self, version: int, *, incarnation: int) -> None:
        """Tell the buffer that the learner has restarted from a checkpoint of learner version ``version``.

        ``incarnation`` is the number of these restarts so far. The buffer no longer offers the old learner's weights to
        engines. It revokes all leases, and drops finished and unfinished groups that have a token of a version after
        ``version``. An engine gets new leases after it has loaded weights of the new learner. If a group finished after
        the checkpoint, the caller must enqueue the group's prompt again. A repeated call has no effect.
        """
        ...

    async def resume(self, version: int, *, key: str, tokens_generated: int) -> None:
        """Tell the buffer of a new ``asyncrl train`` process from which checkpoint the process resumes.

        A repeated call has no effect.

        Args:
            version: Learner version of the checkpoint.
            key: Random name of the checkpoint, as it was given to `checkpoint`.
            tokens_generated: Number of policy tokens that the run had generated before the checkpoint. The buffer
                counts tokens that are missing in its restored account as dropped for the reason ``resume``.
        """
        ...

    async def checkpoint(self, folder: Path, version: int, *, key: str) -> Any:
        """Write the buffer's part of a checkpoint to ``folder``, an absolute path. Wait until the folder is complete.

        All steps before ``version`` must be planned or committed. ``key`` is a random name for the checkpoint. A later
        call of `resume` needs the same name.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class LearnerPort(Protocol):
    """The calls that the controller makes to the learner's ranks. The ranks execute the calls one after the other.

    ``checkpoints`` is the folder of the checkpoints.
    """

    checkpoints: Path

    async def scored(self, plan: Plan) -> Plan:
        """Compute the rewards of a planned batch with the reward model. Return the plan with these rewards.

        If the run has no reward model, return ``plan`` itself.
        """
        ...

    def step(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Start the learner step on a batch. Return an awaitable of the step's metrics by name.

        The metrics include ``started_at`` and ``ended_at`` in Unix seconds.
        """
        ...

    def publish(self, version: int) -> Awaitable[None]:
        """Queue a publish of the weights as policy version ``version``, after all steps that are queued so far.

        The returned awaitable is done as soon as the ranks have copied the weights. After the copy, the ranks compute
        the next step, and the rest of the publish runs in the background. After the publish, engines can load the
        version.
        """
        ...

    async def finish_publish(self) -> None:
        """Wait until engines can load the latest published version. Raises `WeightsError` if publishing failed."""
        ...

    def step_critic(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Start to train the critic on the batch of the latest call of `step`. Return an awaitable of metrics by name.

        If the run has no critic, the metrics are empty.
        """
        ...

    def save(self, version: int, run: Mapping[str, Any], *, wait: bool, parts: Sequence[str] = ()) -> Awaitable[str]:
        """Queue the save of a checkpoint.

        Args:
            version: Learner version of the weights.
            run: State of the controller, stored in the checkpoint.
            wait: If true, the returned awaitable is done only after the ranks have written their files.
            parts: Names of folders of the checkpoint that other processes write. The checkpoint is not complete before
                these folders exist.

        Returns:
            An awaitable of the checkpoint's path.
        """
        ...

    async def withdraw(self) -> Sequence[int]:
        """Discard a batch after a `BatchLost`. Wait until the ranks have skipped the queued calls for this batch.

        Returns the ids of the groups whose trajectories are lost. Raises `LearnerDiedError` if the ranks cannot
        continue.
        """
        ...


class ColocatedLearnerPort(LearnerPort, Protocol):
    """A learner that shares its GPUs with the engines, and can free the GPU memory for the engines."""

    def rollout_mode(self, version: int) -> Awaitable[None]:
        """Publish the weights as policy version ``version`` and move the learner's tensors off the devices.

        The awaitable is done after engines can load the version.
        """
        ...

    def trainer_mode(self) -> Awaitable[None]:
        """Move the learner's tensors back to the devices, after `rollout_mode` has moved them off."""
        ...


@dataclass(frozen=True, kw_only=True)
class FleetCounts:
    """Counts since the start of the rollout fleet, summed over its engines.

    Attributes:
        tokens_generated: Tokens that the engines sampled for training, including the tokens of aborted requests.
        tokens_in_flight: Sampled tokens of groups that workers have neither stored in the buffer nor given up.
        groups_failed: How many attempts to generate a group failed, by reason. Example: ``reward``.
        tokens_by_engine: Number of generated tokens of each current engine, including tokens before its restarts.
    """

    tokens_generated: int
    tokens_in_flight: int
    groups_failed: Mapping[str, int] = field(default_factory=dict)
    tokens_by_engine: Mapping[str, int] = field(default_factory=dict)
    episodes: Mapping[str, int] = field(default_factory=dict)


class FleetPort(Protocol):
    """The interface of the rollout fleet for the controller. Engines load new weights without the controller."""

    def engines(self) -> Sequence[str]:
        """Return the names of the current engines. Example: ``"0"``."""
        ...

    async def counters(self) -> FleetCounts:
        """Return the fleet's counts of tokens and failures since the start of the fleet."""
        ...

    async def drain(self) -> FleetCounts:
        """Stop generation: abort all running groups, give up their leases, and return the final counts."""
        ...


class ColocatedFleetPort(FleetPort, Protocol):
    """A rollout fleet that shares its GPUs with the learner, and can free the GPU memory for the learner."""

    async def release_device(self, incarnation: int | None = None) -> None:
        """Wait until running groups end. Then free the engines' GPU memory until new weights are offered.

        No engine starts before the next call of `take_device`. ``incarnation`` is the number of restarts of the learner
        so far. If ``incarnation`` is not None, the engines later refuse weights of earlier incarnations.
        """
        ...

    def take_device(self) -> None:
        """Let engines use the devices again. Call this after the learner has moved its tensors off the devices."""
        ...


class PromptSource(Protocol):
    """The source of the run's prompts, an endless sequence."""

    @property
    def wants_outcomes(self) -> bool:
        """True if the summaries that `note` receives can change the order of the prompts."""
        ...

    def take(self, count: int) -> Sequence[Prompt]:
        """Return the next ``count`` prompts of the endless sequence."""
        ...

    def note(self, groups: Sequence[GroupSummary]) -> None:
        """Receive summaries (rewards, lengths) of finished groups. The summaries can change the order of prompts."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the source's state, such as its position in the order of the prompts, as JSON values."""
        ...
