"""Arguments and results of user reward functions in real scoring processes."""

import numpy as np
import pytest

from asyncrl.core.errors import RewardError
from asyncrl.core.types import Prompt
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.episodes.environment import Outcome
from rollout_fleet.reward_protocol import BoundReward
from rollout_fleet.rewards import Rollout, Score, WeightedRewards

MODULE = """
import asyncio, os, sys, time
import numpy as np
from rollout_fleet.rewards import Score

def by_turn(prompt, rollout):
    return Score(reward=1.0, turn_rewards={turn: len(text) / 2 for turn, text in rollout.turns.items()})

def shortest(prompt, rollouts):
    least = min(len(rollout.text) for rollout in rollouts)
    return [float(len(rollout.text) == least) for rollout in rollouts]

def too_few(prompt, rollouts):
    return [1.0]

def group_fails(prompt, rollouts):
    if "exit" in [rollout.text for rollout in rollouts]:
        os._exit(1)
    raise KeyError("all")

started = []

async def waits(prompt, response_text, *, others=2):
    started.append(response_text)
    if response_text == "fail":
        raise OSError("no judge")
    deadline = time.monotonic() + 30
    while len(started) < others and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return float(len(started) >= others)

def has_its_own_loop(prompt, response_text):
    async def one():
        return 1.0
    return asyncio.run(one())

class Counts:
    def __init__(self, *, start, step=1.0):
        self.value, self.step = start, step

    async def start(self):
        await asyncio.sleep(0.001)
        self.value += 100

    def __call__(self, prompt, response_text):
        self.value += self.step
        return self.value

class CannotBeCalled:
    pass

def takes_no_response(prompt):
    return 1.0

def turns_of_any_type(prompt, rollout):
    return Score(turn_rewards={{"float": float, "bool": bool, "numpy": np.int64}[rollout.text](1): 0.5})

def without_order(prompt, rollouts):
    return {place: 1.0 for place in range(len(rollouts))} if rollouts[0].text == "dict" else {1.0, 0.0}

def bad_turns(prompt, rollout):
    return Score(turn_rewards={1: float("nan")} if rollout.text == "nan" else {2: 1.0})
"""


def prompt_of(source=""):
    return Prompt(group_id=7, prompt_ids=np.asarray([3], dtype=np.int32), ground_truth="42", data_source=source)


@pytest.fixture
async def scorer(tmp_path, monkeypatch):
    (tmp_path / "odd_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    async def make(*names, **options):
        rewards = WeightedRewards(RolloutFleetConfig(rewards=list(names), **options))
        made.append(rewards)
        await rewards.start()
        return rewards

    yield make
    for rewards in made:
        await rewards.close()


ROLLOUTS = [Rollout(text="done", turns={1: "ab", 3: "done"}), Rollout.answer("d")]


async def test_turn_rewards_are_weighted_and_added_to_the_trajectory_reward(scorer):
    rewards = await scorer("0.5*odd_rewards:by_turn", "odd_rewards:shortest")
    scores = await rewards.score(prompt_of(), ROLLOUTS)
    assert scores.total.tolist() == [0.5, 1.5]
    assert list(scores.turn_rewards) == [{1: 0.5, 3: 1.0}, {1: 0.25}]
    assert scores.sums.tolist() == [2.0, 1.75]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {"by_turn": [4.0, 1.5], "shortest": [0, 1]}
    second = scores.of(np.asarray([False, True]))
    assert (second.total.tolist(), second.turn_rewards) == ([1.5], [{1: 0.25}])


async def test_a_group_relative_reward_gets_all_rollouts_and_returns_one_score_per_rollout(scorer):
    rewards = await scorer("odd_rewards:shortest")
    assert (await rewards.score(prompt_of(), ["aa", "a", "bbb", "b"])).total.tolist() == [0, 1, 0, 1]
    rewards = await scorer("odd_rewards:too_few")
    with pytest.raises(RewardError, match=r"group 7 returned 1 scores; .*, 2"):
        await rewards.score(prompt_of(), ["a", "b"])


@pytest.mark.parametrize("kind", ["dict", "set"])
async def test_a_group_relative_reward_returns_its_scores_in_order(scorer, kind):
    rewards = await scorer("odd_rewards:without_order")
    with pytest.raises(RewardError, match=rf"returned a {kind}; .* a list of scores"):
        await rewards.score(prompt_of(), [kind, "b"])


@pytest.mark.parametrize(("text", "words"), [("a", "raised KeyError"), ("exit", "ended its process")])
async def test_if_a_group_relative_reward_fails_no_rollout_of_the_group_has_a_score(scorer, text, words):
    rewards = await scorer("odd_rewards:group_fails")
    with pytest.raises(RewardError, match=words):
        await rewards.score(prompt_of(), [text, "b"])
    scores = await rewards.score(prompt_of(), [text, "b", "c"], may_fail=True)
    assert np.isnan(scores.total).all()
    assert [words in failure for failure in scores.failures] == [True] * 3


async def test_an_async_reward_scores_all_rollouts_concurrently(scorer):
    rewards = await scorer("odd_rewards:waits", reward_options={"waits": {"others": 4}})
    assert (await rewards.score(prompt_of(), ["a", "b", "c", "d"])).total.tolist() == [1.0] * 4
    scores = await rewards.score(prompt_of(), ["a", "fail", "c"], may_fail=True)
    assert np.isnan(scores.total).tolist() == [False, True, False]


async def test_a_synchronous_reward_can_create_its_own_event_loop(scorer):
    rewards = await scorer("odd_rewards:has_its_own_loop")
    assert (await rewards.score(prompt_of(), ["a", "b"])).total.tolist() == [1.0, 1.0]


async def test_a_reward_class_is_constructed_once_with_its_options_and_then_started(scorer):
    rewards = await scorer("odd_rewards:Counts", reward_options={"Counts": {"start": 1.0, "step": 2.0}})
    assert (await rewards.score(prompt_of(), ["a", "b"])).total.tolist() == [103.0, 105.0]
    assert (await rewards.score(prompt_of(), ["a"])).total.tolist() == [107.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CannotBeCalled", r"must have a method __call__\(self, prompt, response_text\), got none; add it"),
        ("takes_no_response", r"must take a prompt and a response, got the parameters \['prompt'\]; correct them"),
    ],
)
async def test_a_reward_that_cannot_be_called_is_refused_before_the_first_score(scorer, name, words):
    with pytest.raises(ValueError, match=rf"rollout_fleet\.reward=odd_rewards:{name} {words}"):
        await scorer(f"odd_rewards:{name}")


async def test_turn_rewards_must_be_finite_numbers_for_existing_turns(scorer):
    rewards = await scorer("odd_rewards:bad_turns")
    with pytest.raises(RewardError, match=r"must return one finite number"):
        await rewards.score(prompt_of(), ["nan"])
    with pytest.raises(RewardError, match=r"rewards of turns \[2\]; .* \[1\]"):
        await rewards.score(prompt_of(), ["a"])


async def test_the_index_of_a_rewarded_turn_can_be_a_number_of_any_type(scorer):
    rewards = await scorer("odd_rewards:turns_of_any_type")
    scores = await rewards.score(prompt_of(), ["float", "bool", "numpy"])
    assert scores.turn_rewards == [{1: 0.5}] * 3


async def test_the_data_source_of_a_prompt_selects_the_rewards(scorer):
    by_source = {"code": ["2*odd_rewards:shortest"], "math": ["exact_match", "0.5*last_number"]}
    rewards = await scorer(rewards_by_source=by_source)
    texts = ["42", "it is 42"]
    of_code, of_math, of_others = [await rewards.score(prompt_of(one), texts) for one in ("code", "math", "other")]
    assert of_code.total.tolist() == [2.0, 0.0]
    assert of_math.total.tolist() == [1.5, 0.5]
    assert of_others.total.tolist() == [1.0, 0.0]
    assert [sorted(scores.parts) for scores in (of_code, of_math, of_others)] == [
        ["shortest"],
        ["exact_match", "last_number"],
        ["exact_match"],
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"reward_options": {"length": {}}},
            r"each key of rollout_fleet.reward_options must be a reward of the run \(one of \['exact_match",
        ),
        ({"reward_options": {"exact_match": 3}}, "got exact_match: 3; correct the name"),
        ({"rewards_by_source": {"a": []}}, r"rewards_by_source\.a must name a reward, got none"),
        ({"rewards_by_source": {"a": ["x*b"]}}, r"rewards_by_source\.a must hold NAME or WEIGHT"),
        ({"rewards_by_source": {"a": ["x.py:f"], "b": ["y.py:f"]}}, "must have different names"),
    ],
)
def test_invalid_reward_options_are_refused(options, words):
    with pytest.raises(ValueError, match=rf"rollout_fleet\.{words}" if words.startswith("re") else words):
        WeightedRewards(RolloutFleetConfig(**options))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("numeric", {"tolerance": 1}, r"reward_options\.numeric must fit the options \['relative', 'absolute'\]"),
        ("length", {}, r"reward_options\.length must fit .*'max_tokens', 'buffer_tokens'.* got \{\}: missing"),
        ("exact_match", {"prompt": 1}, r"reward_options\.exact_match must fit"),
    ],
)
def test_an_error_names_options_that_a_reward_does_not_have(name, options, words):
    with pytest.raises(ValueError, match=words):
        WeightedRewards(RolloutFleetConfig(reward=name, reward_options={name: options}))


async def test_the_reward_environment_returns_the_turn_rewards_of_the_outcome():
    outcome = Outcome(reward=0.5, turn_rewards={2: 0.25})
    (score,) = [
        one async for one in BoundReward("environment").answers(prompt_of(), [Rollout(text="", outcome=outcome)])
    ]
    assert score == Score(reward=0.5, turn_rewards={2: 0.25})
