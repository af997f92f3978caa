"""What a run does when a learner rank dies: the ranks start again from the newest checkpoint, and training goes on.

Where only a batch is lost, because the store died that held it, no rank has made its step: the ranks live, the batch is
planned anew, and nothing goes back. A batch that is lost again and again counts as a death.

Engines and buffer stay up. The ledger goes back to the checkpoint's version under a new *incarnation* of the learner:
running attempts are revoked, stored groups dropped (``rewound``), offers withdrawn. Engines lease again once they have
loaded what the new ranks publish, so no token of a version that was lost with the old ranks is ever trained on.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from asyncrl.config import RunConfig
from asyncrl.core.errors import BatchLost, CheckpointError, ClusterDiedError, LearnerDiedError, ReplayBufferError
from asyncrl.run.controller import ColocatedController, Controller
from asyncrl.run.resume import PromptsAgain, Resumed

if TYPE_CHECKING:
    from asyncrl.run.learner_group import LearnerGroup  # loads torch and Ray

AnyController: TypeAlias = Controller | ColocatedController
Recovery: TypeAlias = Callable[[], Awaitable[None]]
_NOT_OF_A_LIFE = (LearnerDiedError, ClusterDiedError, ReplayBufferError, CheckpointError)
"""What another start of the learner would not mend, and its death, which counts as it is."""
MAX_REPLANS = 3
"""How often the batch of one step is planned anew; after that the ranks start again."""


class LearnerRestarts:
    """Restarts the learner of one run, ``learner.restarts`` times at most.

    Args:
        config: Options.
        controller: Goes back to a checkpoint together with the buffer.
        learner: The ranks.
        prompts: Hands out again what was finished since the checkpoint.
        resumed: The checkpoint that the run itself began from, which is one to go back to.
        say: Is told of each restart, in one line.

    Attributes:
        num_restarts: How often the learner was started again: its incarnation.
        num_replans: How often a batch was planned anew because it was lost.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        controller: AnyController,
        learner: LearnerGroup,
        prompts: PromptsAgain,
        resumed: Resumed | None,
        say: Callable[[str], None],
    ) -> None:
        self._limit = config.learner.restarts
        self._checkpoint_steps = config.checkpoint.every_steps
        self._is_colocated = config.placement.colocated
        self._controller = controller
        self._learner = learner
        self._prompts = prompts
        self._resumed = resumed
        self._say = say
        self.num_restarts = self.num_replans = 0
        self._replans_of = (-1, 0)

    async def through(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work``, again from where it stood where a batch was lost, or from the newest checkpoint after a death.

        Raises `LearnerDiedError` where the learner may not be started again, and whatever else ``work`` raises.
        """
        recover: Recovery | None = None
        while True:
            try:
                if recover is not None:
                    await recover()
                return await work()
            except Exception as fault:
                recover = self._recovery(fault)
                if recover is None:
                    raise

    def _recovery(self, fault: Exception) -> Recovery | None:
        """What to do about a fault; None where it is none of the learner's. Raises as `_check`."""
        found = death_in(fault)
        if isinstance(found, BatchLost):
            if not self._is_colocated:  # whose engines wait for the devices
                return partial(self._replan, found)
            found = LearnerDiedError(str(found))
        if found is None:
            return None
        self._check(found)
        return partial(self._start_again, found)

    async def _replan(self, lost: BatchLost) -> None:
        version, group_ids = await self._controller.replan()
        last, number = self._replans_of
        self._replans_of = version, number + 1 if version == last else 1
        if not group_ids or self._replans_of[1] > MAX_REPLANS:
            raise LearnerDiedError(f"{lost}; it was planned anew {self._replans_of[1] - 1} times")
        self.num_replans += 1
        self._say(f"{len(group_ids)} groups of step {version} were lost with their store; its batch is planned anew")

    def _check(self, death: LearnerDiedError) -> None:
        """Raise ``death``, with what stands in the way, where the learner may not be started again."""
        if self._limit == 0:
            raise death
        if self._is_colocated:
            raise _with_reason(death, "with placement.colocated=true no learner is started again within a run")
        if self.num_restarts >= self._limit:
            raise _with_reason(death, f"learner.restarts={self._limit} are used up")
        if self._newest() is None:
            steps = self._checkpoint_steps
            what = f"none is whole yet with checkpoint.every_steps={steps}" if steps else "set checkpoint.every_steps"
            raise _with_reason(death, f"the run has no checkpoint to start the learner again from; {what}")

    def _newest(self) -> Resumed | None:
        return self._controller.newest_checkpoint(self._learner.checkpoints) or self._resumed

    async def _start_again(self, death: LearnerDiedError) -> None:
        began_s = time.monotonic()
        self.num_restarts += 1
        which = f"restart {self.num_restarts} of learner.restarts={self._limit}"
        self._say(f"{_headline(death)}; the learner starts again from the newest checkpoint ({which})")
        await self._learner.end()
        found = self._newest()  # whose writing may have ended only now
        assert found is not None, "a whole checkpoint stays"
        await self._controller.rewind(found.state, incarnation=self.num_restarts)
        self._prompts.again(found.state.finished)
        try:
            await self._learner.begin_again(found.checkpoint, found.state.version, incarnation=self.num_restarts)
        except _NOT_OF_A_LIFE:
            raise
        except Exception as fault:
            raise LearnerDiedError(f"the learner did not start again: {fault!r}") from fault
        took_s = time.monotonic() - began_s
        self._say(f"the learner goes on from version {found.state.version} ({found.checkpoint}) after {took_s:.1f} s")


def death_in(fault: Exception) -> LearnerDiedError | BatchLost | None:
    """The learner's death, or else a batch that it lost, if nothing else went wrong."""
    group = ExceptionGroup("", [fault])
    if group.split((LearnerDiedError, BatchLost))[1] is not None:
        return None
    first: BaseException | None = group.split(LearnerDiedError)[0] or group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, (LearnerDiedError, BatchLost)) else None


def _headline(death: LearnerDiedError) -> str:
    return str(death).partition("\n")[0].rstrip(".:")


def _with_reason(death: LearnerDiedError, reason: str) -> LearnerDiedError:
    """The death with a further half of its first line."""
    _, _, log = str(death).partition("\n")
    return LearnerDiedError(f"{_headline(death)}; {reason}" + (f"\n{log}" if log else ""))
