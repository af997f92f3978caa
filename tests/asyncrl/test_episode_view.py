"""The report's view of an episode: its rows in the order of its branches, and the start and end of each wait."""

import json

import pytest

from asyncrl.profile import episodes
from asyncrl.profile.episodes import episode_view
from asyncrl.profile.report import SampleFiles
from tests.asyncrl.test_samples import keep
from tests.support.described_episodes import forest, long_episode, turn

SAMPLE = {"group_id": 7, "reward": 0.75, "num_tokens": 120}


def test_the_rows_of_an_episode_follow_its_branches_and_its_tools():
    rows = episode_view(SAMPLE, forest())["rows"]
    assert [(row["kind"], row["name"], row["indent"], row["note"]) for row in rows] == [
        ("prompt", "0", 0, ""),
        ("sampled", "1", 0, ""),
        ("tool", "search", 0, ""),
        ("tool", "read <a.txt>", 0, ""),
        ("given", "2", 0, ""),
        ("sampled", "3", 1, "branch of turn 2"),
        ("sampled", "4", 0, "continues turn 2"),
        ("given", "5", 0, ""),
        ("sampled", "6", 0, ""),
        ("given", "7", 0, "new root"),
        ("sampled", "8", 0, ""),
    ]
    assert rows[1]["bars"] == [["queue", 0.2, 0.5], ["generation", 0.5, 1.5]]
    assert rows[3]["bars"] == [["tool", 1.5, 3.0]]
    assert [row["reward"] for row in rows if row["reward"] is not None] == [0.25, -1.0, 0.5, 1.0]


def test_the_waits_of_an_episode_sum_to_its_duration():
    view = episode_view(SAMPLE, forest())
    assert view["waits"][:5] == [
        ["environment", 0.0, 0.2],
        ["queue", 0.2, 0.5],
        ["generation", 0.5, 1.5],
        ["tool", 1.5, 3.0],
        ["environment", 3.0, 3.1],
    ]
    assert view["waits_s"] == {"generation": 4.1, "queue": 1.2, "tool": 1.5, "environment": 1.4}
    assert sum(view["waits_s"].values()) == pytest.approx(8.2)
    assert view["title"] == "group 7, reward 0.750, 5 turns, 120 tokens, 8.2 s"


def test_parallel_turns_count_once_and_generation_has_priority_over_queue_and_tool():
    turns = [turn(0, -1, "go"), turn(1, 0, "aa", at=(0.0, 2.0, 4.0)), turn(2, 0, "bb", at=(0.0, 1.0, 3.0))]
    tools = [{"name": "slow", "began_s": 0.0, "ended_s": None}]
    view = episode_view(SAMPLE, {"failure": "", "duration_s": 6.0, "turns": turns, "tools": tools})
    assert view["waits"] == [["queue", 0.0, 1.0], ["generation", 1.0, 4.0], ["tool", 4.0, 6.0]]


def test_an_episode_of_hundreds_of_turns_and_long_texts_stays_small(monkeypatch):
    episode = long_episode(900)
    episode["turns"][1]["pieces"] = [[3, "a" * 9000], [4, "b" * 9000]]
    view = episode_view(SAMPLE, episode)
    assert (len(view["rows"]), view["num_left_out"]) == (episodes.MAX_ROWS, 1 + 3 * 900 - episodes.MAX_ROWS)
    assert [(version, len(text)) for version, text in view["rows"][1]["pieces"]] == [(3, 2000), (-1, 28), (4, 2000)]
    assert len(json.dumps(view)) < 600_000
    assert {row["indent"] for row in view["rows"]} == {0}


def test_the_episodes_of_a_report_are_the_worst_and_the_best_of_the_newest_training_file(tmp_path):
    keep(tmp_path, "train", 1, 9.0, episodes=[forest()])
    keep(tmp_path, "train", 11, *(float(reward) for reward in range(6)), episodes=[forest()] * 6)
    keep(tmp_path, "greedy", 12, 1.0)
    files = SampleFiles(tmp_path)
    titles = [view["title"].split(", ")[1] for view in files.episodes(4)]
    assert titles == ["reward 0.000", "reward 1.000", "reward 4.000", "reward 5.000"]
    assert files.episodes(4) is files.episodes(4), "the episodes must be read only once"


def test_samples_without_turns_have_no_episodes(tmp_path):
    keep(tmp_path, "train", 11, 0.5)
    assert SampleFiles(tmp_path).episodes(4) == []
