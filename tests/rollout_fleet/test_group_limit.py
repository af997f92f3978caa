"""The limit of groups per engine depends on the load that the engine reports. It stays between min and max."""

import asyncio

import pytest

from asyncrl.core.errors import EngineError
from rollout_fleet.engines.engine import EngineLoad
from rollout_fleet.inflight import GroupLimit
from tests.support.rollout import running_loop, writes

ROOMY = EngineLoad(num_running=4, num_waiting=0, cache_use=0.3)
TIGHT = EngineLoad(num_running=4, num_waiting=0, cache_use=0.8)
WAITING = EngineLoad(num_running=4, num_waiting=1, cache_use=0.3)
FULL = EngineLoad(num_running=4, num_waiting=0, cache_use=0.95)


def limits(limit: GroupLimit, *loads: EngineLoad) -> list[int]:
    """Return the limit after each reported load. The worker always runs as many groups as the limit permits."""
    values = []
    for load in loads:
        limit.note(load, num_held=limit.value)
        values.append(limit.value)
    return values


def test_the_limit_doubles_until_the_engine_is_full_and_then_grows_by_one():
    limit = GroupLimit(2, 100)
    assert limits(limit, ROOMY, ROOMY, ROOMY, ROOMY) == [4, 8, 16, 32]
    assert limits(limit, WAITING, WAITING) == [32, 24]
    assert limits(limit, ROOMY, ROOMY, FULL, FULL) == [25, 26, 26, 19]


def test_the_limit_does_not_change_after_one_full_reading_or_between_the_thresholds():
    limit = GroupLimit(8, 100)
    assert limits(limit, WAITING, TIGHT, FULL, TIGHT, WAITING) == [8] * 5


def test_the_limit_stays_within_its_bounds_and_a_fixed_limit_never_changes():
    assert limits(GroupLimit(2, 5), *[ROOMY] * 3, *[FULL] * 8) == [4, 5, 5, 5, 3, 3, 2, 2, 2, 2, 2]
    fixed = GroupLimit(3, 3)
    assert fixed.is_fixed
    assert limits(fixed, ROOMY, FULL, FULL) == [3, 3, 3]


def test_the_limit_does_not_grow_while_slots_are_unused():
    limit = GroupLimit(4, 100)
    assert not limit.note(ROOMY, num_held=3)
    assert limit.note(ROOMY, num_held=4)
    assert limit.value == 8


@pytest.mark.parametrize("room", [3, 10, 37])
def test_the_limit_settles_near_the_capacity_of_the_engine(room):
    limit = GroupLimit(1, 128)
    values = []
    for _ in range(200):
        num_waiting = max(0, limit.value - room)
        load = EngineLoad(num_running=min(room, limit.value), num_waiting=num_waiting, cache_use=0.5)
        values += limits(limit, load)
    assert max(values) <= 2 * room, "the limit must be at most twice the capacity"
    settled = values[50:]
    assert max(settled) == room + 1
    assert min(settled) >= int(0.75 * (room + 1))


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("virtual_time")
async def test_a_loop_runs_as_many_groups_as_fit_into_its_engine(make_buffer, recorded):
    buffer = make_buffer(400, groups_per_step=400)
    in_flight = {"min": 1, "max": 50}
    async with running_loop(buffer, writes(5, 0.5), groups_in_flight=in_flight) as (_, engine, _):
        engine.num_slots = 12  # a group has 2 samples
        await asyncio.sleep(60)
        engine.running_at_once = 0
        await asyncio.sleep(60)
        assert 12 <= engine.running_at_once <= 16
    levels = {level.value for level in recorded().levels if level.name == "capacity"}
    assert {2, 4, 8} <= levels
    assert max(levels) <= 32


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("virtual_time")
async def test_an_unreadable_engine_load_ends_the_loop_only_at_the_first_reading(make_buffer, monkeypatch, caplog):
    async def no_load():
        raise EngineError("no load is reported here")

    buffer = make_buffer(40, groups_per_step=40)
    async with running_loop(buffer, writes(5, 0.5), groups_in_flight={"min": 1, "max": 4}) as (_, engine, run):
        await asyncio.sleep(2)
        monkeypatch.setattr(engine, "read_load", no_load)
        await asyncio.sleep(10)
        assert not run.done()
    assert "the limit on prompt groups stays" in caplog.text
    async with running_loop(buffer, writes(5, 0.5), groups_in_flight={"min": 1, "max": 4}) as (_, engine, run):
        monkeypatch.setattr(engine, "read_load", no_load)
        with pytest.raises(EngineError, match="no load is reported here"):
            await run
