import asyncio
import os
import time

import numpy as np
import psutil
import pytest

from asyncrl.protocol.errors import RewardError
from asyncrl.protocol.types import Prompt
from rollout_fleet.rewards.processes import RewardProcesses
from rollout_fleet.rewards.registry import find_reward

pytestmark = pytest.mark.timeout(60)
PROMPT = Prompt(group_id=7, prompt_ids=np.asarray([3, 4], dtype=np.int32), ground_truth="42")
USER_REWARDS = """
import os, time

def length(prompt, response_text):
    return len(response_text) / 2

def by_kind(prompt, response_text):
    if response_text == "raise":
        raise KeyError("units")
    if response_text == "hang":
        time.sleep(600)
    if response_text == "exit":
        os._exit(3)
    return "high" if response_text == "text" else 1.0

def own_pid(prompt, response_text):
    return float(os.getpid())

not_callable = 3
"""


@pytest.fixture
async def user_rewards(tmp_path, monkeypatch):
    """Puts a module of rewards on the path; returns a maker of started scorers, closed at the end."""
    (tmp_path / "user_rewards.py").write_text(USER_REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    scorers = []

    async def make(function, *, timeout_s=20.0):
        scorer = RewardProcesses(f"user_rewards:{function}", num_processes=1, timeout_s=timeout_s)
        scorers.append(scorer)
        await scorer.start()
        return scorer

    yield make
    for scorer in scorers:
        await scorer.close()


async def test_exact_match_compares_the_whole_response_with_the_ground_truth():
    scorer = RewardProcesses("exact_match", num_processes=1, timeout_s=1.0)
    rewards = await scorer.score(PROMPT, ["42", "420", " 42", "", "42"])
    assert rewards.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert rewards.dtype == np.float32


async def test_a_users_function_scores_in_a_process_of_its_own(user_rewards):
    scorer = await user_rewards("length")
    assert (await scorer.score(PROMPT, ["abc", ""])).tolist() == [1.5, 0.0]


async def test_a_reward_that_raises_is_named_with_group_and_remedy_and_the_next_group_is_scored(user_rewards):
    scorer = await user_rewards("by_kind")
    with pytest.raises(RewardError, match=r"'user_rewards:by_kind' on prompt group 7 raised KeyError\('units'\); fix"):
        await scorer.score(PROMPT, ["raise"])
    assert (await scorer.score(PROMPT, ["fine"])).tolist() == [1.0]


async def test_a_reward_that_hangs_is_an_error_by_its_deadline_and_its_process_is_killed(user_rewards):
    scorer = await user_rewards("by_kind", timeout_s=0.5)
    (child,) = [p for p in psutil.Process().children() if "rollout_fleet.rewards.processes" in " ".join(p.cmdline())]
    started = time.monotonic()
    with pytest.raises(
        RewardError, match=r"group 7 did not score it within rollout_fleet.reward_timeout_s = 0.5 s; make it faster"
    ):
        await scorer.score(PROMPT, ["hang"])
    assert time.monotonic() - started < 5
    assert await asyncio.to_thread(child.wait, 5) is not None or not child.is_running()


async def test_a_reward_that_ends_its_process_is_an_error(user_rewards):
    scorer = await user_rewards("by_kind")
    with pytest.raises(RewardError, match="group 7 ended its process"):
        await scorer.score(PROMPT, ["exit"])


async def test_a_reward_that_is_no_number_is_an_error(user_rewards):
    scorer = await user_rewards("by_kind")
    with pytest.raises(RewardError, match="returned 'high'; it must return one finite number per response"):
        await scorer.score(PROMPT, ["text"])


async def test_closing_ends_the_scoring_processes(user_rewards):
    scorer = await user_rewards("own_pid")
    pid = int((await scorer.score(PROMPT, ["x"]))[0])
    assert pid != os.getpid()
    process = psutil.Process(pid)
    await scorer.close()
    await asyncio.to_thread(psutil.wait_procs, [process], 5)
    assert not process.is_running()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "exakt_match",
            r"rollout_fleet.reward must be a built-in \(exact_match\) or module:function, got 'exakt_match'",
        ),
        ("no_such_module:f", "'no_such_module:f' cannot be imported"),
        ("math:no_such_function", "'math:no_such_function' cannot be imported"),
        ("math:pi", "'math:pi' must be callable, got float"),
        (":f", r"must be a built-in \(exact_match\) or module:function, got ':f'"),
    ],
)
def test_an_unknown_reward_fails_by_name(name, message):
    with pytest.raises(ValueError, match=message):
        find_reward(name)
