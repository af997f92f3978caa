"""What the controller needs of the parts that it drives: the learner group, the rollout fleet and the prompts.

`LearnerGroup` and `FleetGroup` are the real ones; the tests drive the loops with scripted ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.protocol.types import Plan, Prompt, WeightSnapshot


class LearnerPort(Protocol):
    """What the controller needs of the learner group. Calls queue on the ranks in the order they are made."""

    async def scored(self, plan: Plan) -> Plan:
        """Return the plan with the rewards of the reward model, where there is one."""
        ...

    def update(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Start the update on a batch; its metrics come with ``started_at`` and ``ended_at`` (Unix seconds)."""
        ...

    def publish(self, version: int) -> Awaitable[WeightSnapshot]:
        """Write the weights, as they are after the updates queued so far, as ``version``."""
        ...

    def update_critic(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Let the critic learn from the batch of the last `update`; no metrics where there is no critic."""
        ...

    def save(self, version: int, run: Mapping[str, Any], *, wait: bool) -> Awaitable[str]:
        """Save a checkpoint of ``version`` with the run's own state; with ``wait``, until it is complete."""
        ...


class ColocatedLearnerPort(LearnerPort, Protocol):
    """A learner group that can leave its devices."""

    def rollout_mode(self, version: int) -> Awaitable[WeightSnapshot]:
        """Publish the weights as ``version``, then offload as the options say."""
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
        busy_s: Seconds with a request running, mean over the engines.
    """

    tokens_generated: int
    tokens_in_flight: int
    busy_s: float


class FleetPort(Protocol):
    """What the controller needs of the rollout fleet."""

    async def load(self, snapshot: WeightSnapshot) -> float:
        """Put a snapshot on every engine; returns the seconds of the slowest."""
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
        """Let what runs end, and give the devices up until `load`."""
        ...


class PromptSource(Protocol):
    """Where prompts come from."""

    def take(self, count: int) -> Sequence[Prompt]:
        """Return the next ``count`` prompts of an endless order."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return where the order stands, as values that JSON can hold."""
        ...
