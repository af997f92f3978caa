"""The pages in docs/ match the code, and docs/guarantees.md names existing tests."""

import ast
import re
from dataclasses import fields

import numpy as np
import pytest

from asyncrl.cli.compose import describe
from asyncrl.config import RunConfig
from asyncrl.metrics import StepRecord
from asyncrl.metrics.run_records import FOR_TRACKERS
from asyncrl.profile import FleetCause, LearnerCause
from rollout_fleet.episodes.episode import Episode, EpisodeBudget
from rollout_fleet.episodes.episode_run import EpisodeRun, PromptTokens
from rollout_fleet.episodes.player import session_metrics
from rollout_fleet.episodes.session import SessionCounts
from rollout_fleet.metrics import EpisodeCount
from tests.support.training_run import ROOT, documented_metrics

CODE = [
    path for package in ("asyncrl", "rollout_fleet", "learner", "buffer") for path in (ROOT / package).rglob("*.py")
]
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text()
    for name in ("metrics", "rewards", "sources", "tuning", "troubleshooting", "profiling", "several_hosts", "gpus")
}
GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text()


def messages_of(page):
    return [
        row.split(" | ")[0].removeprefix("| ").strip("`") for row in page.splitlines() if re.match(r"\| `.*` \| ", row)
    ]


def texts(path):
    """Yield one list for each string in a Python file: the constant parts of the string."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield [part.value for part in node.values if isinstance(part, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield [node.value]


def test_every_message_in_troubleshooting_exists_in_the_code():
    strings = [parts for path in CODE for parts in texts(path)]
    messages = messages_of(PAGES["troubleshooting"])
    assert len(messages) > 30
    missing = [
        message
        for message in messages
        if not any(all(any(piece in part for part in parts) for piece in message.split("…")) for parts in strings)
    ]
    assert missing == []


def test_the_metrics_page_and_the_code_have_the_same_metrics():
    documented = documented_metrics()
    own = {field.name for field in fields(StepRecord)} - {"learner", "metrics", "episodes", *FOR_TRACKERS}
    assert own <= documented
    budget = EpisodeBudget(max_turns=1, max_tokens=1, max_context=2, max_tree_tokens=2)
    episode = Episode("0-0-0", np.array([1], dtype=np.int32), budget)
    an_episode = EpisodeRun(episode, ask=lambda: None, vocab_size=2)
    of_episodes = {name for name in documented if name.startswith("episode.")}
    an_episode.later_prompts = PromptTokens(num_tokens=4, num_cached=1)
    assert of_episodes == {*session_metrics(an_episode, SessionCounts()), *(f"episode.{name}" for name in EpisodeCount)}
    assert {
        name for name in documented - of_episodes if not name.startswith(("learner.", "reward.", "alarm.", "source."))
    } <= own
    files = [*(ROOT / "learner").glob("*.py"), ROOT / "asyncrl/run/learner_group.py"]
    source = "\n".join(path.read_text() for path in files)
    ends = {name.rpartition(".")[2] for name in documented if name.startswith("learner.")}
    ends -= {f"{mode}_device_bytes_{when}" for mode in ("rollout", "trainer") for when in ("before", "after")}
    assert [name for name in sorted(ends) if f'"{name}"' not in source] == []


def test_the_profiling_page_and_the_code_have_the_same_causes():
    for title, causes in (("an engine's slot", FleetCause), ("a rank", LearnerCause)):
        part = PAGES["profiling"].partition(f"## Why {title} was idle")[2].partition("\n## ")[0]
        rows = [row.split("|")[1] for row in part.splitlines() if row.startswith("| `")]
        assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(causes)


@pytest.mark.parametrize("page", PAGES)
def test_every_option_on_a_page_exists(page):
    options, names = describe(RunConfig()), {field.name for field in fields(RunConfig)}
    sections = "|".join(name for name in names if any(option.startswith(f"{name}.") for option in options))
    named = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:=[^`]*)?`", PAGES[page])) - documented_metrics()
    assert len(named) > 8
    assert [name for name in sorted(named) if name not in options] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_between_pages_works(page):
    links = re.findall(r"\]\((\w+\.md)\)", PAGES[page])
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []


def test_every_test_in_the_guarantees_exists():
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"(?:def |^)(test_\w+)", source, re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", GUARANTEES))
    assert len(named) > 20
    assert named <= defined, sorted(named - defined)


def test_every_file_in_the_guarantees_exists():
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", GUARANTEES)) | {
        f"docs/{name}" for name in re.findall(r"\]\((\w+\.md)\)", GUARANTEES)
    }
    assert len(named) >= 8
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
