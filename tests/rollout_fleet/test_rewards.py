import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest

from asyncrl.core.errors import RewardError, WorkerDiedError
from asyncrl.core.types import Prompt
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.rewards import REWARDS, RewardProcesses, Rollout, WeightedRewards
from tests.support.leftovers import left_in_shared_memory, shared_memory_of
from tests.support.registries import undo_registrations

PROMPT = Prompt(group_id=7, prompt_ids=np.asarray([3, 4], dtype=np.int32), ground_truth="42")
USER_REWARDS = """
import os, subprocess, sys, time
import numpy as np

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

def reads_input(prompt, response_text):
    if response_text == "program":
        subprocess.Popen(["cat"])
        return float(len(subprocess.run(["cat"], capture_output=True).stdout))
    if response_text == "close":
        sys.stdin.close()
        return 0.0
    return float(len(sys.stdin.read()))

def starts(prompt, response_text):
    how, pid_file = response_text.split()
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    with open(pid_file, "w") as file:
        file.write(str(pid))
    if how == "exit":
        os._exit(1)
    time.sleep(600 if how == "hang" else 0)
    return 1.0

def odd(prompt, response_text):
    if response_text == "print":
        print("a" * 100_000)
    return {
        "nan": float("nan"), "huge": 1e39, "list": [1.0, 0.0], "array": np.array([1.0, 2.0]), "none": None,
        "int": 2, "float32": np.float32(0.5), "bool": True, "print": 3.0,
    }[response_text]

not_callable = 3

from rollout_fleet.rewards import REWARDS
REWARDS.register("by another name")(length)
"""


class TextScorer(RewardProcesses):
    """Reward processes that score texts. Each text is scored as the answer of a rollout."""

    async def score(self, prompt, texts, *, may_fail=False):
        scores = await super().score(prompt, [Rollout.answer(text) for text in texts], may_fail=may_fail)
        return np.asarray([np.nan if isinstance(one, str) else one.reward for one in scores], dtype=np.float32)


@pytest.fixture(autouse=True)
def own_names(monkeypatch):
    """Remove the rewards that the test registered."""
    undo_registrations(monkeypatch, REWARDS)
    monkeypatch.delitem(sys.modules, "user_rewards", raising=False)


@pytest.fixture
async def user_rewards(tmp_path, monkeypatch):
    """Put a module of rewards on the import path.

    Yields a function that makes and starts scorers. The fixture closes the scorers after the test.
    """
    (tmp_path / "user_rewards.py").write_text(USER_REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    scorers = []

    async def make(function, *, timeout_s=20.0, num_processes=1):
        config = RolloutFleetConfig(reward_processes=num_processes, reward_timeout_s=timeout_s)
        scorer = TextScorer(f"user_rewards:{function}", config)
        scorers.append(scorer)
        await scorer.start()
        return scorer

    yield make
    for scorer in scorers:
        await scorer.close()


async def test_exact_match_compares_the_whole_response_with_the_ground_truth():
    scorer = TextScorer("exact_match", RolloutFleetConfig())
    rewards = await scorer.score(PROMPT, ["42", "420", " 42", "", "42"])
    assert rewards.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert rewards.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "truth", "text", "reward"),
    [
        ("last_number", "1250", "5 x 250 = $1,250.", 1.0),
        ("last_number", "1250", "1250, or 1251", 0.0),
        ("last_number", "-2.5", "it is -2.50", 1.0),
        ("last_number", "7", "seven", 0.0),
        ("last_number", "12345678901234567890", "12345678901234567891", 0.0),
        ("last_number", "12345678901234567890", "12,345,678,901,234,567,890.0", 1.0),
        ("last_number", "0.5", "it is .5", 1.0),
        ("last_number", "3", "version 1.2.3", 1.0),
        ("last_number", "-3", "\N{MINUS SIGN}3", 1.0),
        ("last_number", "3", "\N{MINUS SIGN}3", 0.0),
        ("final_answer", "12345678901234567890", "Answer: 12345678901234567891", 0.0),
        ("final_answer", "1e999", "Answer: 1e998", 0.0),
        ("final_answer", "snan", "Answer: nan", 0.0),
        ("final_answer", "-3", "Answer: \N{MINUS SIGN}3.0", 1.0),
        ("final_answer", "34", "so\nAnswer: 34", 1.0),
        ("final_answer", "34", "Answer: 33\nno: \\boxed{34.0}", 1.0),
        ("final_answer", r"\frac{1}{2}", r"thus \boxed{\frac{1} {2}}.", 1.0),
        ("final_answer", "x+1", "answer: $x + 1$.", 1.0),
        ("final_answer", "34", "34", 0.0),
        ("final_answer", "34", r"\boxed{34", 0.0),
        ("final_answer", "1/2", "Answer: 0.5", 0.0),
    ],
)
def test_answers_to_problems_are_compared_as_numbers_or_as_text(name, truth, text, reward):
    prompt = Prompt(group_id=0, prompt_ids=PROMPT.prompt_ids, ground_truth=truth)
    assert REWARDS.get(name)(prompt, text) == reward


async def test_a_user_function_runs_in_a_scoring_process(user_rewards):
    scorer = await user_rewards("length")
    assert (await scorer.score(PROMPT, ["abc", ""])).tolist() == [1.5, 0.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise", r"raised KeyError\('units'\); fix"),
        ("exit", "ended its process"),
        ("text", "returned 'high'; it must return one finite number per response"),
    ],
)
async def test_the_error_of_a_failed_reward_names_the_group_and_the_next_group_is_scored(user_rewards, text, words):
    scorer = await user_rewards("by_kind")
    for _ in range(2):
        with pytest.raises(RewardError, match=f"'user_rewards:by_kind' on prompt group 7 {words}"):
            await scorer.score(PROMPT, [text])
    assert (await scorer.score(PROMPT, ["fine"])).tolist() == [1.0]


async def test_a_reward_that_exceeds_its_deadline_is_an_error_and_its_process_is_killed(user_rewards):
    scorer = await user_rewards("by_kind", timeout_s=0.5)
    (child,) = [p for p in psutil.Process().children() if "rollout_fleet.rewards" in " ".join(p.cmdline())]
    with pytest.raises(RewardError, match=r"group 7 .*within rollout_fleet\.reward_timeout_s = 0\.5 s"):
        await scorer.score(PROMPT, ["hang"])
    assert await asyncio.to_thread(child.wait, 30) is not None or not child.is_running()
    assert (await scorer.score(PROMPT, ["fine"])).tolist() == [1.0], "another process must score the text"


async def test_if_scoring_may_fail_only_the_failed_responses_have_no_reward(user_rewards):
    scorer = await user_rewards("by_kind", timeout_s=1.0)
    texts = ["raise", "fine", "exit", "text", "hang", "fine"]
    rewards = await scorer.score(PROMPT, texts, may_fail=True)
    assert rewards.tolist() == pytest.approx([np.nan, 1.0, np.nan, np.nan, np.nan, 1.0], nan_ok=True)
    with pytest.raises(RewardError, match="raised KeyError"):
        await scorer.score(PROMPT, ["raise", "hang"])
    assert (await scorer.score(PROMPT, ["fine", "fine"])).tolist() == [1.0, 1.0]


async def test_a_response_has_no_total_reward_if_one_of_its_rewards_failed(monkeypatch):
    undo_registrations(monkeypatch, REWARDS).register("no_a")(lambda prompt, text: float("nan") if text == "a" else 1.0)
    rewards = WeightedRewards(RolloutFleetConfig(rewards=["exact_match", "no_a"]))
    scores = await rewards.score(PROMPT, ["a", "42"], may_fail=True)
    assert scores.total.tolist() == pytest.approx([np.nan, 2.0], nan_ok=True)
    assert scores.of(np.isfinite(scores.total)).parts["exact_match"].tolist() == [1.0]
    with pytest.raises(RewardError, match="returned nan"):
        await rewards.score(PROMPT, ["a", "42"])


def children() -> set[int]:
    """Return the ids of this process's children."""
    return {child.pid for child in psutil.Process().children()}


async def test_a_reward_and_the_programs_that_it_starts_have_an_empty_standard_input(user_rewards):
    scorer = await user_rewards("reads_input", timeout_s=10.0)
    processes = children()
    for _ in range(2):
        assert (await scorer.score(PROMPT, ["itself", "program"])).tolist() == [0.0, 0.0]
    for _ in range(2):
        assert (await scorer.score(PROMPT, ["close", "program"])).tolist() == [0.0, 0.0]
    assert children() == processes, "the process of the rewards must stay the same"


@pytest.mark.parametrize(
    ("how", "words"), [("exit", "ended its process"), ("hang", "did not score it within"), ("return", "")]
)
async def test_child_processes_of_a_reward_end_with_its_scoring_process(user_rewards, tmp_path, how, words):
    scorer = await user_rewards("starts", timeout_s=2.0)
    text = f"{how} {tmp_path / 'pid'}"
    if words:
        with pytest.raises(RewardError, match=words):
            await scorer.score(PROMPT, [text])
    else:
        assert (await scorer.score(PROMPT, [text])).tolist() == [1.0]
        await scorer.close()
    started = int((tmp_path / "pid").read_text())
    await asyncio.to_thread(_await_end, started)


def _await_end(pid):
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:  # a process that has ended can stay a zombie
            time.sleep(0.05)


async def test_a_cancelled_scoring_process_ends_and_a_failed_restart_is_a_reward_error(user_rewards, tmp_path):
    scorer, processes = await user_rewards("by_kind"), children()
    (tmp_path / "user_rewards.py").write_text("raise RuntimeError('half saved')")
    scoring = asyncio.create_task(scorer.score(PROMPT, ["hang"]))
    await asyncio.sleep(0)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert children() < processes, "the process must end, and no process may start"
    for _ in range(2):
        with pytest.raises(RewardError, match=r"group 7 could not be scored: .* exit status 1 before it was ready"):
            await scorer.score(PROMPT, ["fine"])
    (tmp_path / "user_rewards.py").write_text(USER_REWARDS)
    assert (await scorer.score(PROMPT, ["fine"])).tolist() == [1.0], "the corrected module must be used"


async def test_a_scoring_process_that_cannot_start_is_an_error(user_rewards, tmp_path):
    scorer = await user_rewards("by_kind")
    (tmp_path / "user_rewards.py").write_text("raise RuntimeError('half saved')")
    with pytest.raises(WorkerDiedError, match="exit status 1 before it was ready"):
        await scorer.start()


async def test_an_exception_in_a_built_in_reward_is_a_reward_error():
    """A built-in reward runs in the rollout worker, where an uncaught exception would end the loop."""

    @REWARDS.register("overflows")
    def overflows(prompt, response_text):
        return 10**400

    scorer = TextScorer("overflows", RolloutFleetConfig())
    with pytest.raises(RewardError, match=r"'overflows' on prompt group 7 raised OverflowError\(.*\); fix it"):
        await scorer.score(PROMPT, ["42"])


async def test_a_scoring_process_knows_a_reward_name_that_a_module_registered(user_rewards):
    scorer = await user_rewards("by another name")
    np.testing.assert_array_equal(await scorer.score(PROMPT, ["four"]), [2.0])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("nan", "nan"),
        ("huge", "1e\\+39"),
        ("list", r"\[1.0, 0.0\]"),
        ("array", r"array\(\[1., 2.\]\)"),
        ("none", "None"),
    ],
)
async def test_a_reward_must_return_one_finite_number_per_response(user_rewards, text, what):
    scorer = await user_rewards("odd")
    with pytest.raises(RewardError, match=rf"group 7 returned {what}.*; .*one finite number"):
        await scorer.score(PROMPT, [text])


async def test_a_reward_can_return_any_number_type_and_can_print(user_rewards):
    scorer = await user_rewards("odd")
    assert (await scorer.score(PROMPT, ["int", "float32", "bool", "print"])).tolist() == [2.0, 0.5, 1.0, 3.0]


async def test_the_total_is_the_weighted_sum_of_the_rewards_and_each_reward_is_reported(user_rewards):
    await user_rewards("length")  # write the module
    rewards = WeightedRewards(RolloutFleetConfig(rewards=["exact_match", "0.5*user_rewards:length"]))
    await rewards.start()
    try:
        scores = await rewards.score(PROMPT, ["42", "four"])
    finally:
        await rewards.close()
    assert scores.total.tolist() == [1.5, 1.0]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {"exact_match": [1, 0], "length": [1, 2]}


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (["much*exact_match"], "must hold NAME or WEIGHT"),
        (["0.5*"], "must hold NAME or WEIGHT"),
        (["inf*exact_match"], "must hold NAME or WEIGHT"),
        (["a.py:f", "2*b.py:f"], r"must have different names, got \['f', 'f'\]"),
    ],
)
def test_rewards_with_invalid_weights_or_duplicate_names_are_refused(rewards, words):
    with pytest.raises(ValueError, match=rf"rollout_fleet\.rewards {words}"):
        RolloutFleetConfig(rewards=rewards)


async def test_several_scoring_processes_score_groups_in_parallel(user_rewards):
    scorer = await user_rewards("own_pid", num_processes=2)
    first, second = await asyncio.gather(scorer.score(PROMPT, ["x"]), scorer.score(PROMPT, ["x"]))
    assert first[0] != second[0]


OWNER = """
import asyncio, sys
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.rewards import RewardProcesses

async def main():
    rewards = RewardProcesses("user_rewards:length", RolloutFleetConfig(reward_processes=2))
    await rewards.start()
    print(*(process.pid for process in rewards._processes), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_worker_leaves_neither_processes_nor_semaphores(tmp_path):
    (tmp_path / "user_rewards.py").write_text(USER_REWARDS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    children = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(children) == 2
    shared_memory = shared_memory_of([psutil.Process(owner.pid), *children])
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]
    assert left_in_shared_memory(shared_memory) == []


async def test_closing_ends_the_scoring_processes(user_rewards):
    scorer = await user_rewards("own_pid")
    pid = int((await scorer.score(PROMPT, ["x"]))[0])
    assert pid != os.getpid()
    process = psutil.Process(pid)
    await scorer.close()
    await asyncio.to_thread(psutil.wait_procs, [process], 30)
    assert not process.is_running()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "exakt_match",
            r"rollout_fleet.reward must be one of \[.*'exact_match'.*\], or file.py:function or module:function",
        ),
        ("no_such_module:f", "rollout_fleet.reward=no_such_module:f cannot be imported: ModuleNotFoundError"),
        ("no_such_file.py:f", "there is no file .*no_such_file.py"),
        ("math:no_such_function", "math has no 'no_such_function'"),
        ("math:pi", "must name a function, got 3.14"),
        (":f", r"must be one of \[.*'exact_match'.*\], or file.py:function"),
    ],
)
def test_an_error_names_an_unknown_reward(name, message):
    with pytest.raises(ValueError, match=message):
        REWARDS.get(name)
