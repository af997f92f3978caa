"""The seconds that an episode spends in the engine's queue, in generation, in tools and in its environment."""

from dataclasses import asdict

import pytest

from rollout_fleet.episodes.episode_times import EpisodeTimes


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_the_times_of_an_episode_come_from_its_turns_and_tools(clock):
    times = EpisodeTimes(clock)
    clock.now += 1.0
    times.asked(1)
    clock.now += 0.25
    times.first_token(1)
    clock.now += 2.0
    times.first_token(1)  # turn 1 continues after a weight update
    times.ended(1)
    times.called(["search", "weather"])
    assert times.is_in_tool
    clock.now += 4.0
    times.asked(3)
    assert not times.is_in_tool
    times.first_token(3)
    times.ended(3)
    times.called([])
    assert not times.is_in_tool
    assert {turn: asdict(times.turns[turn]) for turn in times.turns} == {
        1: {"asked_s": 1.0, "first_token_s": 1.25, "ended_s": 3.25},
        3: {"asked_s": 7.25, "first_token_s": 7.25, "ended_s": 7.25},
    }
    assert [asdict(tool) for tool in times.tools] == [{"name": "search, weather", "began_s": 3.25, "ended_s": 7.25}]


def test_tool_calls_that_the_policy_object_times_are_recorded_only_once(clock):
    times = EpisodeTimes(clock)
    times.asked(1)
    times.ended(1)
    times.called(["search", "weather"])
    times.tool(0, "search", True)
    times.tool(1, "weather", True)
    clock.now += 1.0
    times.tool(1, "weather", False)
    assert times.is_in_tool
    clock.now += 1.0
    times.tool(0, "search", False)
    times.asked(3)
    assert not times.is_in_tool
    assert [asdict(tool) for tool in times.tools] == [
        {"name": "search", "began_s": 0.0, "ended_s": 2.0},
        {"name": "weather", "began_s": 0.0, "ended_s": 1.0},
    ]


def test_a_running_tool_ends_when_its_episode_ends(clock):
    times = EpisodeTimes(clock)
    times.called(["search"])
    clock.now += 3.0
    times.end()
    clock.now += 1.0
    assert times.duration_s == 3.0
    assert [asdict(tool) for tool in times.tools] == [{"name": "search", "began_s": 0.0, "ended_s": 3.0}]
