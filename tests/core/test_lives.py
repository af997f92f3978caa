"""The loop that restarts the parts of a run, with a scripted part in virtual time."""

import asyncio
import time

import pytest

from asyncrl.core.errors import WorkerDiedError
from asyncrl.core.lives import Faults, keep_up

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time")]


class Part:
    """A part of a run with scripted errors. Each call of `begin` or `watch` raises the next entry of ``script``.

    The call does not raise if the entry is None or if no entry is left. `end` returns the next entry of ``pauses``. If
    no entry is left, `end` raises its argument.
    """

    def __init__(self, script, pauses) -> None:
        self.script, self.pauses = list(script), list(pauses)
        self.calls, self.ended = [], []

    async def _next(self, name: str) -> None:
        self.calls.append((name, time.monotonic()))
        await asyncio.sleep(1)
        if self.script and (error := self.script.pop(0)) is not None:
            raise error

    async def begin(self) -> None:
        await self._next("begin")

    async def watch(self) -> None:
        await self._next("watch")

    async def end(self, fault: Exception) -> float:
        self.ended.append(fault)
        if not self.pauses:
            raise fault
        return self.pauses.pop(0)


async def test_any_error_ends_the_life_of_a_part_and_the_next_life_begins_after_a_pause():
    death, no_room = KeyError("rank"), OSError(28, "No space left on device")
    part = Part([death, no_room], [0.0, 5.0])
    began_s = time.monotonic()
    await keep_up(part)
    assert part.ended == [death, no_room]
    assert [(name, at_s - began_s) for name, at_s in part.calls] == [
        ("watch", 0),
        ("begin", 1),
        ("begin", 7),
        ("watch", 8),
    ]


async def test_the_last_error_of_a_part_is_raised_when_no_restart_remains():
    part = Part([None, OSError("no room"), OSError("still none")], [0.0])
    with pytest.raises(OSError, match="still none"):
        await keep_up(part, has_begun=False)


async def test_a_call_cancelled_by_ray_ends_the_life_and_a_cancelled_task_ends_the_loop():
    part = Part([asyncio.CancelledError()], [0.0, 0.0])
    keeping = asyncio.create_task(keep_up(part))
    await asyncio.sleep(1.5)
    assert [type(fault) for fault in part.ended] == [WorkerDiedError]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert keeping.cancelled()
    assert len(part.ended) == 1


def test_pauses_before_restarts_double_up_to_the_longest_pause():
    faults = Faults(6, window_s=100.0, backoff_s=1.0, longest_backoff_s=5.0)
    assert [faults.add(float(at)) for at in range(7)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0, None]
    assert faults.num_restarts == 6


def test_faults_expire_after_the_window_and_never_expire_without_a_window():
    faults, always = Faults(2, window_s=10.0, backoff_s=1.0), Faults(2)
    assert [faults.add(at) for at in (0.0, 9.0, 10.0, 19.5, 19.9)] == [0.0, 1.0, 1.0, 1.0, None]
    assert [always.add(at) for at in (0.0, 1e6, 1e12)] == [0.0, 0.0, None]
    assert (faults.num_restarts, always.num_restarts) == (4, 2)
    assert Faults(0).add(0.0) is None
