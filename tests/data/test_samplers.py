"""A sampler's choice depends only on its seed and on outcomes of groups. A sampler continues from its saved state."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.errors import SamplerError
from asyncrl.core.types import GroupSummary
from asyncrl.data import DataConfig, PromptStream
from asyncrl.data.samplers import make_sampler

SOURCES = ["a"] * 6 + ["b"] * 2


def outcome(group_id: int, *rewards: float) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        attempt=0,
        num_prompt_tokens=1,
        response_lengths=(1,) * len(rewards),
        num_tokens=len(rewards),
        oldest_version=0,
        newest_version=0,
        rewards=rewards,
    )


def make(name: str = "weighted", sources=SOURCES, *, seed=0, shuffle=True, weights=None, **options):
    return make_sampler(name, sources, seed=seed, shuffle=shuffle, weights=weights or {}, options=options)


def choose(sampler, number: int) -> list[int]:
    return [sampler.choose() for _ in range(number)]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 60))
def test_the_share_of_each_source_is_exact_within_one_prompt(first: int, second: int, number: int):
    counts = Counter(SOURCES[row] for row in choose(make(weights={"a": first, "b": second}), number))
    assert abs(counts["a"] - number * first / (first + second)) < 1 + 1e-9


def test_each_epoch_of_a_source_has_each_of_its_rows_once_in_a_new_order():
    rows = choose(make(weights={"a": 3, "b": 1}), 48)
    of_a = [row for row in rows if row < 6]
    epochs = [of_a[start : start + 6] for start in range(0, 36, 6)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4, 5] for epoch in epochs)
    assert len({*map(tuple, epochs)}) > 3
    assert choose(make(seed=1), 20) == choose(make(seed=1), 20) != choose(make(seed=2), 20)
    assert choose(make(sources=["a"] * 3, shuffle=False), 4) == [0, 1, 2, 0]


@pytest.mark.parametrize(("target", "preferred"), [(1.0, 0), (0.5, 1), (0.0, 2)])
def test_prompts_outside_the_explored_share_have_success_rates_near_the_target(target: float, preferred: int):
    """The success rate of a row is 1, 0.5 or 0, if its index modulo 3 is 0, 1 or 2."""
    sampler = make("difficulty", ["a"] * 30, target=target, explore=0.2)
    chosen: Counter[int] = Counter()
    for number in range(600):
        row = sampler.choose()
        chosen[row % 3] += number >= 300
        sampler.note(row, outcome(number, *([1.0, 1.0], [1.0, 0.0], [0.0, 0.0])[row % 3]))
    assert chosen[preferred] / chosen.total() > 0.8


def test_a_row_enters_the_pool_at_its_first_outcome_and_leaves_it_when_it_is_learned():
    sampler = make("difficulty", ["a"] * 4, shuffle=False, explore=0.01, width=0.2, memory=0.0)
    assert choose(sampler, 2) == [0, 1]
    sampler.note(1, outcome(1, 1.0, 0.0))
    assert choose(sampler, 2) == [1, 2], "the pool must not contain a row whose group still runs"
    sampler.note(1, outcome(2, 1.0, 1.0))
    sampler.note(0, outcome(0, 0.0, 0.0))
    assert choose(sampler, 1) == [3]
    sampler.note(0, outcome(0, 0.0, 1.0))
    assert choose(sampler, 2) == [0, 0], "row 0 must come from the pool, and then from the file order"


def test_outcomes_without_finite_rewards_are_ignored():
    sampler = make("difficulty")
    before = json.dumps(sampler.state())
    sampler.note(0, outcome(0, float("nan"), 1.0))
    assert json.dumps(sampler.state()) == before


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=60), st.integers(0, 60))
def test_a_restored_sampler_continues_with_the_same_rows(rates: list[float], saved_after: int):
    whole, sampler = (make("difficulty", weights={"a": 2, "b": 1}) for _ in range(2))
    for number, rate in enumerate(rates):
        if number == saved_after:
            state = json.loads(json.dumps(sampler.state()))
            sampler = make("difficulty", weights={"a": 2, "b": 1})
            sampler.restore(state)
        row = whole.choose()
        assert sampler.choose() == row
        for one in (whole, sampler):
            one.note(row, outcome(number, 1.0 if rate else 0.0, 1.0 if rate == 1.0 else 0.0))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("weighted", {"weights": {"a": 1}}, r"must have a weight for each data source \['a', 'b'\]"),
        ("weighted", {"target": 1}, "data.sampler=weighted cannot be made with data.sampler_options={'target': 1}"),
        ("difficulty", {"target": 2}, r"data.sampler_options.target must be in \[0, 1\], got 2"),
        ("difficulty", {"explore": 0}, r"data.sampler_options.explore must be in \(0, 1\]"),
        ("hard", {}, "data.sampler must be one of"),
    ],
)
def test_the_error_for_a_sampler_that_cannot_be_made_names_the_option(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(name, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source_weights": {"a": 1}}, "data.source_weights={'a': 1} needs a sampler that uses it"),
        ({"sampler_options": {"target": 1}}, "data.sampler_options={'target': 1} needs a sampler that uses it"),
        ({"sampler": "weighted", "source_weights": {"a": 0}}, "data.source_weights must be > 0, got {'a': 0}"),
        ({"sampler": "weighted", "source_weights": {"a": 1}}, "needs data.data_source_key"),
    ],
)
def test_source_options_without_an_effect_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


@pytest.fixture
def make_stream(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}=", "ground_truth": str(n), "source": ["even", "odd"][n % 2]} for n in range(10)]
    path.write_text("\n".join(map(json.dumps, rows)))

    def make(**options):
        config = DataConfig(train_files=[str(path)], data_source_key="source", **options)
        return PromptStream(config, tokenizer, seed=3)

    return make


def test_a_position_of_the_stream_always_means_the_same_prompt(make_stream):
    stream = make_stream(sampler="difficulty")
    first = stream.take(12)
    assert [prompt.group_id for prompt in first] == list(range(12))
    stream.note([outcome(prompt.group_id, 1.0, 0.0) for prompt in first])
    truths = [prompt.ground_truth for prompt in first]
    assert [prompt.ground_truth for prompt in stream.at([3, 0, 11])] == [truths[3], truths[0], truths[11]]
    state = json.loads(json.dumps(stream.state()))
    restored = make_stream(sampler="difficulty")
    restored.restore(state)
    assert [prompt.ground_truth for prompt in restored.at(range(12))] == truths
    assert [prompt.ground_truth for prompt in restored.take(9)] == [prompt.ground_truth for prompt in stream.take(9)]


def test_environment_by_source_sets_the_environment_of_rows(make_stream):
    stream = make_stream(shuffle=False, environment_by_source={"odd": "sums.py:Sums"})
    assert [prompt.environment for prompt in stream.take(3)] == ["", "sums.py:Sums", ""]
    assert [bool(prompt.messages) for prompt in stream.at([0, 1])] == [False, True]


def test_a_stream_refuses_the_state_of_another_sampler(make_stream):
    for saved, own in (("uniform", "weighted"), ("weighted", "uniform"), ("weighted", "difficulty")):
        with pytest.raises(ValueError, match=f"data.sampler was {saved} when the state was saved, got {own}"):
            make_stream(sampler=own).restore(make_stream(sampler=saved).state())


def test_a_users_sampler_is_loaded_from_a_file_and_gets_the_outcomes(make_stream, tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Longest:\n"
        "    def __init__(self, sources, *, seed, shuffle, weights, first=0):\n"
        "        self.rows, self.seen = [first], []\n"
        "    def choose(self):\n"
        "        return self.rows[-1]\n"
        "    def note(self, row, group):\n"
        "        self.rows.append((row + len(group.rewards)) % 10)\n"
        "    def state(self):\n"
        "        return {'rows': self.rows}\n"
        "    def restore(self, state):\n"
        "        self.rows = state['rows']\n"
    )
    stream = make_stream(sampler=f"{tmp_path}/mine.py:Longest", sampler_options={"first": 4})
    assert [prompt.ground_truth for prompt in stream.take(2)] == ["4", "4"]
    stream.note([outcome(0, 1.0, 0.0, 0.0)])
    assert [prompt.ground_truth for prompt in stream.take(1)] == ["7"]
    new = make_stream(sampler=f"{tmp_path}/mine.py:Longest", sampler_options={"first": 4})
    assert (new.first().ground_truth, new.state()["position"]) == ("4", 0)
    wrong = make_stream(sampler=f"{tmp_path}/mine.py:Longest", sampler_options={"first": 10})
    with pytest.raises(SamplerError, match=r"mine.py:Longest must choose a row in 0..9, got 10"):
        wrong.take(1)


def test_the_error_of_a_broken_sampler_names_its_class(make_stream, tmp_path):
    lines = "class Broken:\n    def __init__(self, sources, **given):\n"
    lines += "        self.note = self.state = self.restore = print\n"
    (tmp_path / "short.py").write_text(lines)
    with pytest.raises(ValueError, match=r"short.py:Broken must have the methods .*, got a class without \['choose'\]"):
        make_stream(sampler=f"{tmp_path}/short.py:Broken")
    (tmp_path / "wrong.py").write_text(lines + "    def choose(self):\n        return {}['row']\n")
    with pytest.raises(SamplerError, match=r"wrong.py:Broken: choose raised KeyError: 'row'; correct the class"):
        make_stream(sampler=f"{tmp_path}/wrong.py:Broken").first()


def test_the_documented_sampler_first_takes_the_row_with_the_lowest_reward(make_stream, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()
    (tmp_path / "page.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    stream = make_stream(sampler=f"{tmp_path}/page.py:HardestFirst")
    first = stream.take(10)
    stream.note([outcome(prompt.group_id, 1.0, float(prompt.group_id != 6)) for prompt in first])
    assert stream.take(1)[0].ground_truth == first[6].ground_truth
    restored = make_stream(sampler=f"{tmp_path}/page.py:HardestFirst")
    restored.restore(stream.state())
    assert restored.take(3)[0].ground_truth == stream.take(3)[0].ground_truth
