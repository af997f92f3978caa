import asyncio
import json
import os

import numpy as np
import psutil
import pytest

from asyncrl.core.errors import RewardError, SandboxError
from asyncrl.core.types import Prompt
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.episodes.environment import Outcome
from rollout_fleet.reward_functions import FUNCTIONS_IN_PROCESSES, Code, code_of
from rollout_fleet.reward_protocol import BoundReward
from rollout_fleet.rewards import REWARDS, Rollout, WeightedRewards
from rollout_fleet.sandbox import Sandbox


def prompt_with(truth, **extra):
    return Prompt(group_id=7, prompt_ids=np.asarray([3], dtype=np.int32), ground_truth=truth, extra=extra)


async def score(reward, truth, text, *, options=None, **extra):
    """Score one rollout in this process. Returns the reward, or the description of the failure."""
    bound = BoundReward(reward, options)
    rollout = text if isinstance(text, Rollout) else Rollout.answer(text)
    (answer,) = [one async for one in bound.answers(prompt_with(truth, **extra), [rollout])]
    return answer if isinstance(answer, str) else answer.reward


@pytest.mark.parametrize(
    ("truth", "text", "reward"),
    [
        ("0.75", "so 3/4", 1.0),
        ("0.75", r"first 5, then \boxed{0.750001} of 9", 1.0),
        ("0.75", "Answer: 0.76 of 0.75", 1.0),
        ("0.75", "0.76", 0.0),
        ("1,250", "it is 1.25e3", 1.0),
        ("-2", "2", 0.0),
        ("-2", "\N{MINUS SIGN}2", 1.0),
        ("2", "\N{MINUS SIGN}2", 0.0),
        (".5", "Answer: .5", 1.0),
        (".5", "5", 0.0),
        ("0.5", "x=-1 or .5", 1.0),
        (0, "1e-9", 1.0),
        ("5", "1/0", 0.0),
        ("5", "five", 0.0),
        ("5", "1e999", 0.0),
    ],
)
async def test_the_reward_numeric_compares_numbers_with_a_tolerance(truth, text, reward):
    assert await score("numeric", truth, text) == reward


async def test_the_reward_numeric_has_a_tolerance_option_and_needs_a_number_as_ground_truth():
    assert await score("numeric", "100", "104", options={"relative": 0.05}) == 1.0
    assert "the ground truth must be a number, got 'many'" in await score("numeric", "many", "3")


@pytest.mark.parametrize(("num_tokens", "reward"), [(0, 0), (80, 0), (90, -0.5), (100, -1), (500, -1)])
async def test_the_reward_length_equals_the_soft_overlong_punishment(num_tokens, reward):
    options = {"max_tokens": 100, "buffer_tokens": 20}
    assert await score("length", None, Rollout.answer("", num_tokens=num_tokens), options=options) == reward


async def test_the_reward_length_needs_counted_tokens_and_valid_options():
    options = {"max_tokens": 100, "buffer_tokens": 20}
    assert "were not counted" in await score("length", None, "text", options=options)
    with pytest.raises(ValueError, match=r"reward length: buffer_tokens must be in 1..5 \(max_tokens\), got 6"):
        BoundReward("length", {"max_tokens": 5, "buffer_tokens": 6})


async def test_the_reward_format_matches_the_whole_response():
    good = "<think>\n1+1\n</think> <answer>2</answer>"
    assert [await score("format", None, text) for text in (good, good + " more", "2")] == [1.0, 0.0, 0.0]
    assert await score("format", None, "7.", options={"pattern": r"\d\."}) == 1.0
    with pytest.raises(ValueError, match=r"reward format: pattern must be .*, got '\('"):
        BoundReward("format", {"pattern": "("})


async def test_a_regular_expression_that_never_ends_is_stopped_at_the_reward_deadline():
    """This reward runs in a separate process. In the rollout worker it would block the event loop of all groups."""
    assert "format" in FUNCTIONS_IN_PROCESSES
    config = RolloutFleetConfig(reward="format", reward_options={"format": {"pattern": "(a+)+b"}}, reward_timeout_s=1.0)
    rewards = WeightedRewards(config)
    await rewards.start()
    try:
        with pytest.raises(RewardError, match=r"did not score it within rollout_fleet\.reward_timeout_s = 1 s"):
            await rewards.score(prompt_with(None), ["a" * 60])
        assert (await rewards.score(prompt_with(None), ["aab", "b"])).total.tolist() == [1.0, 0.0]
    finally:
        await rewards.close()


@pytest.mark.parametrize(
    ("truth", "text", "reward"),
    [
        (r"\frac{1}{2}", r"thus \boxed{0.5}", 1.0),
        ("x^2 + 2x + 1", r"$(x+1)^2$", 1.0),
        (r"$\sqrt{8}$", r"\boxed{2\sqrt{2}}", 1.0),
        ("7", r"\boxed{8}", 0.0),
        ("7", "no idea", 0.0),
    ],
)
async def test_the_reward_math_verify_accepts_equal_expressions(truth, text, reward):
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    assert await score("math_verify", truth, text) == reward


def test_the_reward_math_verify_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr("rollout_fleet.reward_functions.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"math_verify: the package math-verify must be installed.*asyncrl\[math\]"):
        WeightedRewards(RolloutFleetConfig(reward="math_verify"))


@pytest.fixture(scope="module")
def can_isolate():
    try:
        asyncio.run(Sandbox().start())
    except SandboxError as error:
        pytest.skip(f"this machine cannot isolate programs: {error}")


def test_the_code_of_a_response_is_its_last_fenced_block():
    assert code_of("first\n```python\nx = 1\n```\nthen\n``` py\nx = 2\n```\n") == "x = 2\n"
    assert code_of("print(1)") == "print(1)"
    assert code_of("```a\nx = 1\n```\nand ```python\ny") == "x = 1\n"


@pytest.mark.parametrize("text", ["```" + "a" * 150_000, "```" * 50_000])
def test_the_code_after_a_very_long_line_is_found_in_linear_time(text):
    """A regular expression would need half a minute for this text. The deadline of a reward is shorter."""
    assert code_of(text) == text


ADDS = "Here:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```"
PAIRS = [{"stdin": "1 2\n", "stdout": "3\n"}, {"input": "2 2", "output": "4"}]


@pytest.mark.parametrize(
    ("tests", "text", "reward"),
    [
        (PAIRS, ADDS, 1.0),
        (json.dumps({"inputs": ["1 2", ["5 5"]], "outputs": ["3  ", ["10"]]}), ADDS, 1.0),
        (PAIRS, "print(3)", 0.0),
        (PAIRS, "this is no program", 0.0),
        ("assert add(1, 2) == 3\nassert add(2, 2) == 4", "def add(a, b):\n    return a + b", 1.0),
        ("assert add(1, 2) == 3", "def add(a, b):\n    return a - b", 0.0),
        (["assert f() == 1", "assert f() == 2"], "f = iter([1, 2]).__next__", 0.0),
        ("import pickle\nassert pickle.loads(pickle.dumps(A())).x == 1", "class A:\n    x = 1", 1.0),
        ("assert stdout() == sources == 1", "stdout = lambda: 1\nsources = names = os = sys = run = 1", 1.0),
        ([{"stdin": None, "input": "1 2", "stdout": None, "output": "3"}], ADDS, 1.0),
        ("assert False", "import sys\nsys.exit(0)", 0.0),
        ("assert False", "import os\nos._exit(0)", 0.0),
        ("assert False", "print('all asserts hold')\nraise SystemExit", 0.0),
        ("assert open('tests.py')", "pass", 0.0),
        ("assert f() == 1", "import sys\nsys.stdout.close()\ndef f(): return 1", 0.0),
    ],
)
@pytest.mark.usefixtures("can_isolate")
async def test_the_reward_code_runs_programs_against_their_tests(tests, text, reward):
    assert await score("code", tests, text) == reward


@pytest.mark.usefixtures("can_isolate")
async def test_the_reward_code_can_count_passed_tests_and_read_tests_from_a_column():
    options = {"partial": True, "tests": "cases", "limits": {"wall_time_s": 5.0}}
    assert await score("code", None, "print(3)", options=options, cases=PAIRS) == 0.5
    assert "must have tests in column 'cases'" in await score("code", None, "print(3)", options=options)


NO_PAIRS = [[{"stdin": None, "stdout": "3"}], {"inputs": "12", "outputs": "34"}, {"inputs": None, "outputs": None}]


@pytest.mark.parametrize("tests", [None, "", [], [{"stdin": "1"}], {"inputs": ["1"], "outputs": []}, 3, *NO_PAIRS])
@pytest.mark.usefixtures("can_isolate")
async def test_the_reward_code_fails_for_rows_without_tests(tests):
    assert "the tests must be Python asserts or a list of {stdin, stdout}, got" in await score("code", tests, "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "jail"}, "reward code: the kind of a sandbox"),
        ({"limits": {"ram": 1}}, "reward code: .*'ram'"),
        ({"at_once": 0}, "at_once"),
    ],
)
def test_the_reward_code_refuses_invalid_options(options, words):
    with pytest.raises(ValueError, match=words):
        BoundReward("code", options)


@pytest.mark.usefixtures("can_isolate")
async def test_the_reward_code_scores_zero_for_an_endless_or_hostile_program():
    config = RolloutFleetConfig(reward="code", reward_options={"code": {"limits": {"cpu_time_s": 1.0}}})
    rewards = WeightedRewards(config)
    await rewards.start()
    try:
        texts = ["while True: pass", "print(3)", f"import os; os.kill({os.getpid()}, 9)"]
        scores = await rewards.score(prompt_with([{"stdin": "", "stdout": "3"}]), texts)
    finally:
        await rewards.close()
    assert scores.total.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.long
@pytest.mark.usefixtures("can_isolate")
async def test_programs_are_killed_with_a_scoring_process_that_missed_its_deadline():
    options = {"code": {"limits": {"wall_time_s": 600.0}}}
    rewards = WeightedRewards(RolloutFleetConfig(reward="code", reward_options=options, reward_timeout_s=8.0))
    await rewards.start()
    try:
        name = f"prog{os.getpid()}"  # a process name that is unique on this machine
        code = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{name}'); time.sleep(600)"
        scoring = asyncio.create_task(rewards.score(prompt_with("assert True"), [code]))
        programs: list[psutil.Process] = []
        while not programs and not scoring.done():
            await asyncio.sleep(0.1)
            programs = [one for one in psutil.process_iter(["name"]) if one.info["name"] == name]
        with pytest.raises(RewardError, match="did not score it within"):
            await scoring
        _, alive = await asyncio.to_thread(psutil.wait_procs, programs, 30)
    finally:
        await rewards.close()
    assert (len(programs), alive) == (1, [])


async def test_the_reward_code_is_refused_at_the_start_on_a_machine_without_isolation(monkeypatch):
    async def refuse(self):
        raise SandboxError("this machine must isolate code that the policy wrote")

    monkeypatch.setattr(Sandbox, "start", refuse)
    with pytest.raises(SandboxError, match="must isolate"):
        await Code().start()


async def test_the_reward_environment_needs_the_reward_of_an_outcome_or_a_failed_episode():
    assert "the environment returned no reward" in await score("environment", None, "text")
    empty = Rollout(text="", outcome=Outcome())
    assert "the environment returned no reward" in await score("environment", None, empty)
    failed = Rollout(text="", failure="it overflowed")
    assert await score("environment", None, failed) == 0.0
    assert await score("environment", None, failed, options={"failed": -1.0}) == -1.0


def test_only_some_built_in_rewards_run_in_scoring_processes():
    assert set(REWARDS.names()) > FUNCTIONS_IN_PROCESSES
