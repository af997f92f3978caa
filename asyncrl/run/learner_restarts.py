"""Restarts the learner after the death of a rank: new ranks start from the newest checkpoint, and training continues.

Engines and buffer keep running. The ledger (the buffer's record of all groups) returns to the checkpoint's version, and
stores the new *incarnation* of the learner: the number of restarts. The policy versions after the checkpoint are lost.
The ledger stops the generation of running groups, and withdraws the offered weights. It drops each stored group and
each saved prefix (the first tokens of an unfinished group) that has a token of a lost version, for the reason
``rewound``. An engine gets no group before it has loaded the weights of the new ranks. So the learner never trains on a
token of a lost version.

If a store dies, a batch with groups in that store is lost. No rank has trained on this batch, so the ranks continue,
and the controller plans the step of this batch again. If this happens more than `MAX_REPLANS` times for the same step,
the ranks are restarted.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from asyncrl.config import RunConfig
from asyncrl.core.errors import BatchLost, CheckpointError, ClusterDiedError, LearnerDiedError, ReplayBufferError
from asyncrl.core.lives import Faults, keep_up
from asyncrl.data.prompts import PromptStream
from asyncrl.run.controller import ColocatedController, Controller
from asyncrl.run.resume import Resumed

if TYPE_CHECKING:
    from asyncrl.run.learner_group import LearnerGroup  # only for type checks, because the module loads torch and Ray

AnyController: TypeAlias = Controller | ColocatedController
_NOT_OF_A_LIFE = (LearnerDiedError, ClusterDiedError, ReplayBufferError, CheckpointError)
"""Errors of `LearnerGroup.begin_again` that are raised unchanged. Any other error becomes a `LearnerDiedError`."""
MAX_REPLANS = 3
"""A step whose batch is lost is planned again at most this many times. After the next loss, the ranks restart."""


class LearnerRestarts:
    """Restarts the learner of one run, at most ``learner.restarts`` times.

    ``resumed`` is the checkpoint from which the run began. Restarts use ``resumed`` until the run saves a checkpoint.

    Attributes:
        faults: Object that decides whether the learner restarts. ``faults.num_restarts`` is the learner's incarnation.
        num_replans: Number of lost batches that were planned again so far.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        controller: AnyController,
        learner: LearnerGroup,
        prompts: PromptStream,
        resumed: Resumed | None,
        say: Callable[[str], None],
    ) -> None:
        self.faults = Faults(config.learner.restarts)
        self._checkpoint_steps = config.checkpoint.every_steps
        self._is_colocated = config.placement.colocated
        self._controller = controller
        self._learner = learner
        self._prompts = prompts
        self._resumed = resumed
        self._say = say
        self.num_replans = 0
        self._replans_of = (-1, 0)

    async def through(self, work: Callable[[], Awaitable[None]]) -> None:
        """Call and await ``work``. After a lost batch or a death of the learner, recover and call ``work`` again.

        Raises `LearnerDiedError` if the learner must not start again. Other errors of ``work`` are raised unchanged.
        """
        self._work = work
        await keep_up(self)

    async def watch(self) -> None:
        """Call the function that was given to `through`. If a batch was lost, recover and call the function again.

        Other errors of the function are raised.
        """
        lost: LearnerDiedError | BatchLost | None = None
        while True:
            try:
                if lost is not None:
                    await self._replan(lost)
                return await self._work()
            except Exception as fault:
                lost = death_in(fault)
                # Colocated engines have released the devices to the learner, so they cannot generate the groups again.
                if not isinstance(lost, BatchLost) or self._is_colocated:
                    raise

    async def _replan(self, lost: Exception) -> None:
        version, group_ids = await self._controller.replan()
        last, number = self._replans_of
        self._replans_of = version, number + 1 if version == last else 1
        if not group_ids or self._replans_of[1] > MAX_REPLANS:
            raise LearnerDiedError(f"{lost}; the run has planned this step again {self._replans_of[1] - 1} times")
        self.num_replans += 1
        self._say(f"{len(group_ids)} groups of step {version} were lost with their store; its batch is planned again")

    def _pause_after(self, death: LearnerDiedError) -> float:
        """Return the seconds to wait before the restart.

        If the learner must not start again, raises a `LearnerDiedError` that contains the reason and ``death``.
        """
        if self.faults.restarts == 0:
            raise death
        pause_s = self.faults.add(time.monotonic())
        if pause_s is None:
            raise LearnerDiedError(f"learner.restarts={self.faults.restarts} are used up: {death}")
        if self._newest() is None:
            steps = self._checkpoint_steps
            what = f"checkpoint.every_steps={steps} has not written one yet" if steps else "set checkpoint.every_steps"
            raise LearnerDiedError(f"the run has no checkpoint to restart the learner from; {what}: {death}")
        return pause_s

    def _newest(self) -> Resumed | None:
        return self._controller.newest_checkpoint(self._learner.checkpoints) or self._resumed

    async def end(self, fault: Exception) -> float:
        """Kill the remaining ranks after the death of a rank. Return the seconds to wait before new ranks start.

        Raises ``fault`` if the learner did not cause the fault. Raises the errors of `_pause_after`.
        """
        if (death := death_in(fault)) is None:
            raise fault
        if isinstance(death, BatchLost):
            death = LearnerDiedError(str(death))
        pause_s = self._pause_after(death)
        self._died_s = time.monotonic()
        which = f"restart {self.faults.num_restarts} of learner.restarts={self.faults.restarts}"
        headline, _, _ = str(death).partition("\n")
        self._say(f"the learner starts again from the newest checkpoint ({which}): {headline.rstrip(':')}")
        await self._learner.end()
        return pause_s

    async def begin(self) -> None:
        """Make buffer and controller go back to the newest checkpoint. Start new ranks from this checkpoint."""
        found = self._newest()  # search again, because a newer checkpoint may be complete since `end` searched
        assert found is not None, "the newest checkpoint is never removed"
        finished = await self._controller.rewind(found.state, incarnation=self.faults.num_restarts)
        self._prompts.repeat_unfinished(finished)
        try:
            await self._learner.begin_again(found.checkpoint, found.state.version, incarnation=self.faults.num_restarts)
        except _NOT_OF_A_LIFE:
            raise
        except Exception as fault:
            raise LearnerDiedError(f"the learner did not start again: {fault!r}") from fault
        took_s = time.monotonic() - self._died_s
        self._say(f"the learner continues from version {found.state.version} ({found.checkpoint}) after {took_s:.1f} s")


def death_in(fault: Exception) -> LearnerDiedError | BatchLost | None:
    """Return ``fault`` if it is a `LearnerDiedError` or `BatchLost`; from an exception group, return such an error.

    Returns None if ``fault`` is an error of another class, or a group with an error of another class.
    """
    group = ExceptionGroup("", [fault])
    if group.split((LearnerDiedError, BatchLost))[1] is not None:
        return None
    first: BaseException | None = group.split(LearnerDiedError)[0] or group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, (LearnerDiedError, BatchLost)) else None
