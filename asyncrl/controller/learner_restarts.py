"""What a run does when a learner rank dies: the ranks start again from the newest checkpoint, and training goes on.

Engines and buffer stay up. The ledger goes back to the checkpoint's version under a new *incarnation* of the learner:
running attempts are revoked, stored groups dropped (``rewound``), offers withdrawn. Engines lease again once they have
loaded what the new ranks publish, so no token of a version that was lost with the old ranks is ever trained on.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from asyncrl.config import RunConfig
from asyncrl.controller.controller import ColocatedController, Controller
from asyncrl.controller.resume import PromptsAgain, Resumed
from asyncrl.protocol.errors import LearnerDiedError

if TYPE_CHECKING:
    from asyncrl.controller.learner_group import LearnerGroup  # loads torch and Ray

AnyController: TypeAlias = Controller | ColocatedController


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
        self._is_colocated = config.placement.colocated
        self._controller = controller
        self._learner = learner
        self._prompts = prompts
        self._resumed = resumed
        self._say = say
        self.num_restarts = 0

    async def through(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work``, and from the newest checkpoint again each time a rank died in it.

        Raises `LearnerDiedError` where the learner may not be started again, and whatever else ``work`` raises.
        """
        death: LearnerDiedError | None = None
        while True:
            try:
                if death is not None:
                    await self._start_again(death)
                return await work()
            except Exception as fault:
                death = death_in(fault)
                if death is None:
                    raise
                self._check(death)

    def _check(self, death: LearnerDiedError) -> None:
        """Raise ``death``, with what stands in the way, where the learner may not be started again."""
        if self._limit == 0:
            raise death
        if self._is_colocated:
            raise _with_reason(death, "with placement.colocated=true no learner is started again within a run")
        if self.num_restarts >= self._limit:
            raise _with_reason(death, f"learner.restarts={self._limit} are used up")
        if self._newest() is None:
            reason = "the run has no checkpoint to start the learner again from; set checkpoint.every_steps"
            raise _with_reason(death, reason)

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
        await self._learner.begin_again(found.checkpoint, found.state.version, incarnation=self.num_restarts)
        took_s = time.monotonic() - began_s
        self._say(f"the learner goes on from version {found.state.version} ({found.checkpoint}) after {took_s:.1f} s")


def death_in(fault: Exception) -> LearnerDiedError | None:
    """The learner's death, if nothing else went wrong."""
    deaths, others = ExceptionGroup("", [fault]).split(LearnerDiedError)
    first: BaseException | None = None if others is not None else deaths
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, LearnerDiedError) else None


def _headline(death: LearnerDiedError) -> str:
    return str(death).partition("\n")[0].rstrip(".:")


def _with_reason(death: LearnerDiedError, reason: str) -> LearnerDiedError:
    """The death with a further half of its first line."""
    _, _, log = str(death).partition("\n")
    return LearnerDiedError(f"{_headline(death)}; {reason}" + (f"\n{log}" if log else ""))
