"""Episodes in one rollout worker with the real loop, endpoint, environment processes and rewards."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import psutil
import pytest

from asyncrl.core.types import Prompt
from rollout_fleet.answering import AnsweringParts
from rollout_fleet.config import RolloutFleetConfig, SamplingConfig, SaveProgress
from rollout_fleet.engines.engine import SampleRequest
from rollout_fleet.engines.scripted import Script, ScriptedAnswer, ScriptedEngine
from rollout_fleet.episodes.chat_tokenizer import ChatTokenizer
from rollout_fleet.episodes.config import EnvironmentConfig, OnFailure, OnFailureConfig, RendererConfig
from rollout_fleet.episodes.player import EpisodePlayer
from rollout_fleet.episodes.renderer import ChatRenderer, load_renderer
from rollout_fleet.loop import RolloutLoop
from rollout_fleet.rewards import WeightedRewards
from tests.support.chat_models import save_chat_model
from tests.support.offers import bare_offer
from tests.support.rollout import InMemoryBuffer, update
from tests.support.trajectories import assert_by_context

pytestmark = pytest.mark.timeout(900)
GROUP_SIZE = 4
BYTES = 256
"""In the tokenizer, ids below this number are bytes and a few merged bytes."""
AGENTS = '''
import asyncio, json, os, subprocess
from pathlib import Path
from urllib.parse import urlsplit

FOLDER = Path(__file__).parent

def is_first(name):
    """Return whether no process has called this function with ``name`` before."""
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

async def hang():
    await asyncio.sleep(600)

async def vanish(policy, messages):
    """Send a request and close the connection before the answer, like a client that is killed."""
    place, body = urlsplit(policy.base_url), json.dumps({"model": "policy", "messages": messages}).encode()
    _, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(
        f"POST {place.path}/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {policy.api_key}\\r\\n"
        f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode() + body
    )
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()

async def main(prompt, policy):
    number = 4 * prompt.group_id + policy.sample_index
    fault = {0: "hang", 1: "crash", 2: "leak", 3: "wrong key", 4: "vanish"}.get(number * 7 % 20)
    messages = list(prompt.messages)
    for turn in range(3):
        if turn == 1 and fault == "vanish":
            await vanish(policy, messages)
        message = await policy.chat(messages)
        messages += [message, {"role": "user", "content": f"again {turn}"}]
        if turn == 1 and fault not in (None, "crash", "vanish") and is_first(f"{number}-{fault}"):
            if fault == "hang":
                await policy.run_tool(hang(), name="search")
            if fault == "leak":
                child = subprocess.Popen(["sleep", "600"], start_new_session=True)
                (FOLDER / f"{number}.pid").write_text(str(child.pid))
                asyncio.create_task(hang())
            if fault == "wrong key":
                policy.api_key = "another"
    return {"reward": 1.0, "answer": f"{fault}-{number}"}

def score(prompt, rollout):
    if rollout.outcome.answer.startswith("crash") and is_first(rollout.outcome.answer):
        os._exit(3)
    return rollout.outcome.reward
'''


Next = Callable[[list[int]], int]


def by_context(num_tokens: int, stop_id: int, calls: Sequence[int] = ()) -> Next:
    """Return a function that computes the next token from the tokens before it.

    Decoding and encoding the written tokens usually gives different tokens.
    """

    def next_token(context: list[int]) -> int:
        number = zlib.crc32(np.asarray(context, dtype=np.int32).tobytes())
        if number % 7 < 1 + len(calls):
            return [stop_id, *calls][number % 7]
        return number // 7 % num_tokens

    return next_token


def writes(next_token: Next, stop_id: int) -> Script:
    """Return a script for the scripted engine. It calls ``next_token`` for each token until the token ``stop_id``."""

    def script(request: SampleRequest, version: int) -> ScriptedAnswer:
        context = request.prompt_ids.tolist()
        for _ in range(request.sampling.max_new_tokens):
            context.append(next_token(context))
            if context[-1] == stop_id:
                break
        return ScriptedAnswer(response=context[len(request.prompt_ids) :], token_delay_s=0.02)

    return script


def questions(renderer: ChatRenderer, num_prompts: int, **fields: Any) -> list[Prompt]:
    prompts = []
    for group_id in range(num_prompts):
        messages = ({"role": "user", "content": f"question {group_id}"},)
        ids = np.asarray(renderer.render(messages, []), dtype=np.int32)
        prompts.append(Prompt(group_id=group_id, prompt_ids=ids, messages=messages, **fields))
    return prompts


@asynccontextmanager
async def playing(config: RolloutFleetConfig, buffer: Any, script: Script, model: str) -> AsyncIterator[RolloutLoop]:
    """Yield a running rollout loop. Its episodes run in child processes that call the policy over HTTP."""
    engine, rewards = ScriptedEngine(script), WeightedRewards(config)
    player = EpisodePlayer(config, model_path=model, max_context=4096)
    await engine.start()
    await asyncio.gather(player.start(), rewards.start())
    loop = RolloutLoop(
        config,
        AnsweringParts(engine=engine, rewards=rewards, decode=ChatTokenizer(model).decode, player=player),
        name="engine-0",
        buffer=buffer,
        samples_per_prompt=GROUP_SIZE,
    )
    await loop.load_weights(bare_offer(0))
    running = asyncio.create_task(loop.run())
    try:
        yield loop
        await loop.stop()
        await running
    finally:
        await asyncio.gather(player.close(), rewards.close(), engine.stop())


@pytest.mark.parametrize("num_episodes", [20, *(pytest.param(n, marks=pytest.mark.slow) for n in (120, 1000))])
async def test_every_episode_becomes_one_trajectory_despite_faults_and_the_account_balances(tmp_path, num_episodes):
    """Five of each 20 episodes have a fault.

    The faults are: a hanging tool, a crashing reward, a leaking agent, a wrong key, and a client that disconnects.
    """
    model = save_chat_model(tmp_path / "model", "chatml")
    (tmp_path / "agents.py").write_text(AGENTS)
    renderer = load_renderer(model, RendererConfig())
    prompts = questions(renderer, num_episodes // GROUP_SIZE)
    config = RolloutFleetConfig(
        reward=f"{tmp_path}/agents.py:score",
        reward_timeout_s=60.0,
        max_attempts=2 * GROUP_SIZE,
        max_failures_in_a_row=num_episodes,
        groups_in_flight=8,
        sampling=SamplingConfig(max_new_tokens=10),
        environment=EnvironmentConfig(name=f"{tmp_path}/agents.py:main", tool_timeout_s=0.5, processes=1, max_turns=8),
    )
    next_token = by_context(BYTES, renderer.stop_ids[0])
    buffer = InMemoryBuffer(prompts)
    async with playing(config, buffer, writes(next_token, renderer.stop_ids[0]), model) as loop:
        await buffer.stored(len(prompts), within_s=800)
    assert all(num_asked > 0 for _, num_asked in buffer.leases_asked), "a request for 0 groups would wait forever"
    counters = loop.counters()
    assert sorted(group.group_id for group in buffer.groups) == list(range(len(prompts)))
    assert [group.num_trajectories for group in buffer.groups] == [GROUP_SIZE] * len(prompts)
    assert sum(assert_by_context(group, next_token) for group in buffer.groups) == buffer.num_tokens
    num_each = num_episodes // 20
    failed = counters.groups_failed
    assert 1 <= failed["episode_tool"] <= num_each
    assert 1 <= failed["episode_infrastructure"] <= num_each
    assert failed["reward"] == num_each
    assert failed.total() == sum(failed[name] for name in ("episode_tool", "episode_infrastructure", "reward"))
    repeated = [dict(group.summary.metrics)["episode.repeated_requests"] * GROUP_SIZE for group in buffer.groups]
    assert 1 <= sum(repeated) <= num_each, "a client that repeats its request must get the same turn"
    for group in buffer.groups:
        for index, trajectory in enumerate(group.trajectories()):
            is_vanishing = (GROUP_SIZE * group.group_id + index) * 7 % 20 == 4
            assert len(trajectory.turns) in ((6, 7, 8) if is_vanishing else (6,)), "only a lost client can add turns"
    assert counters.tokens_generated == buffer.num_accounted > buffer.num_tokens
    assert (counters.tokens_in_flight, buffer.held) == (0, set())
    left = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(left) == num_each
    for pid in left:
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


MORTAL = """
import os, signal
from pathlib import Path

FOLDER = Path(__file__).parent


async def main(prompt, policy):
    messages = list(prompt.messages)
    for turn in range(3):
        message = await policy.chat(messages)
        with open(FOLDER / f"{prompt.group_id}-{policy.sample_index}", "a") as file:
            file.write(f"{os.getpid()} {message.text}\\n")
        messages += [message, {"role": "user", "content": "again"}]
        if turn == 1 and not (FOLDER / "killed").exists():
            (FOLDER / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


async def test_episodes_of_a_killed_process_restart_with_their_saved_turns(tmp_path):
    """The engine's tokens are random. So an episode can get the same answers again only from its saved record."""
    model = save_chat_model(tmp_path / "model", "chatml")
    (tmp_path / "agent.py").write_text(MORTAL)
    renderer = load_renderer(model, RendererConfig())
    rng = np.random.default_rng(0)
    letters = [*renderer.stop_ids[:1], *renderer.tokenizer.encode("xyzvkq")]
    config = RolloutFleetConfig(
        reward="environment",
        groups_in_flight=4,
        sampling=SamplingConfig(max_new_tokens=10),
        environment=EnvironmentConfig(name=f"{tmp_path}/agent.py:main"),
    )
    buffer = InMemoryBuffer(questions(renderer, 3))
    script = writes(lambda context: int(rng.choice(letters)), renderer.stop_ids[0])
    async with playing(config, buffer, script, model) as loop:
        await buffer.stored(3, within_s=60)
    assert loop.counters().groups_failed.keys() == {"episode_environment"}
    assert loop.counters().tokens_generated == buffer.num_accounted, "tokens of killed turns must count"
    num_replayed = 0
    for path in tmp_path.glob("?-?"):
        lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
        lives = [[text for pid, text in lines if pid == life] for life in dict.fromkeys(pid for pid, _ in lines)]
        num_replayed += len(lives[0]) if len(lives) > 1 else 0
        assert all(lives[-1][: len(life)] == life for life in lives)
    assert num_replayed > 3


FULL = """
import json
import os
import sys
import urllib.request


def main(prompt, base_url, api_key):
    "Exceed the turn limit with one request. The errors of this client have no code."
    for _ in range(3):
        body = json.dumps({"messages": prompt["messages"] if isinstance(prompt, dict) else prompt.messages}).encode()
        headers = {"Authorization": "Bearer " + api_key}
        urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)).read()


async def wrong_turn(prompt, policy):
    await policy.chat(prompt.messages)
    return {"turn_rewards": {99: 1.0}}


if __name__ == "__main__":
    with open(os.environ["ASYNCRL_PROMPT"]) as file:
        main(json.load(file), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
"""


@pytest.mark.parametrize("agent", ["{}:main", "command"])
async def test_an_episode_with_an_overflow_is_scored_for_any_error_of_its_client(tmp_path, agent):
    model = save_chat_model(tmp_path / "model", "chatml")
    path = tmp_path / "agent.py"
    path.write_text(FULL)
    renderer = load_renderer(model, RendererConfig())
    command = {"command": [sys.executable, str(path)]} if agent == "command" else {}
    config = RolloutFleetConfig(
        reward="environment",
        sampling=SamplingConfig(max_new_tokens=10),
        environment=EnvironmentConfig(name=agent.format(path), options=command, max_turns=2),
    )
    buffer = InMemoryBuffer(questions(renderer, 1))
    script = writes(by_context(BYTES, renderer.stop_ids[0]), renderer.stop_ids[0])
    async with playing(config, buffer, script, model) as loop:
        await buffer.stored(1, within_s=60)
    counters = loop.counters()
    assert counters.groups_failed == {"episode_overflow_score": GROUP_SIZE}
    assert counters.episodes["failed_overflow"] == GROUP_SIZE
    assert counters.episodes["failed_environment"] == 0


async def test_a_reward_of_an_unknown_turn_counts_as_a_failed_episode(tmp_path):
    model = save_chat_model(tmp_path / "model", "chatml")
    (tmp_path / "agent.py").write_text(FULL)
    renderer = load_renderer(model, RendererConfig())
    config = RolloutFleetConfig(
        reward="environment",
        sampling=SamplingConfig(max_new_tokens=10),
        environment=EnvironmentConfig(
            name=f"{tmp_path}/agent.py:wrong_turn", on_failure=OnFailureConfig(reward=OnFailure.score)
        ),
    )
    buffer = InMemoryBuffer(questions(renderer, 1))
    script = writes(by_context(BYTES, renderer.stop_ids[0]), renderer.stop_ids[0])
    async with playing(config, buffer, script, model) as loop:
        await buffer.stored(1, within_s=60)
    assert loop.counters().episodes["failed_reward"] == GROUP_SIZE


SEARCHING = """
import random

import httpx
from examples.agents.search import main
from examples.agents import search
from openai import AsyncOpenAI, DefaultAsyncHttpxClient


class Lossy(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request):
        response = await super().handle_async_request(request)
        await response.aread()
        if request.headers["x-stainless-retry-count"] == "0" and random.random() < 0.2:
            raise httpx.ReadError("the answer was lost", request=request)
        return response


def client(**options):
    return AsyncOpenAI(http_client=DefaultAsyncHttpxClient(transport=Lossy()), **options)


search.AsyncOpenAI = client
"""


@pytest.mark.long
async def test_trained_tokens_of_the_search_agent_are_the_sampled_tokens_while_weights_change(tmp_path):
    """The agent makes branches, compacts its conversation and calls tools in parallel. Its client repeats requests.

    Decoding and encoding a sampled answer often gives different tokens.
    """
    calls = [{"name": "search", "arguments": {"words": "tower"}}, {"name": "read", "arguments": {"file": "a.txt"}}]
    model = save_chat_model(tmp_path / "model", "chatml", calls=[json.dumps(call) for call in calls])
    (tmp_path / "agent.py").write_text(SEARCHING)
    (tmp_path / "a.txt").write_text("The tower was built in 1889.\n" + "It is high. " * 8)
    renderer = load_renderer(model, RendererConfig())
    (stop_id,), tokenizer = renderer.stop_ids[:1], renderer.tokenizer
    call_ids = [tokenizer.encode(f"<tool_call>{json.dumps(call)}</tool_call>") for call in calls]
    next_token = by_context(BYTES, stop_id, [token for (token,) in call_ids])
    config = RolloutFleetConfig(
        reward="environment",
        groups_in_flight=4,
        save_progress=SaveProgress.at_updates,
        sampling=SamplingConfig(max_new_tokens=10),
        environment=EnvironmentConfig(
            name=f"{tmp_path}/agent.py:main", options={"folder": str(tmp_path), "max_chars": 250, "max_rounds": 6}
        ),
    )
    buffer = InMemoryBuffer(questions(renderer, 4, ground_truth="1889"), groups_per_step=1, max_lag=8)
    first_turn = max(len(prompt.prompt_ids) for prompt in questions(renderer, 4))
    num_later, moments = itertools.count(1), {number: asyncio.Event() for number in (4, 8, 12)}
    write = writes(next_token, stop_id)

    def script(request: SampleRequest, version: int) -> ScriptedAnswer:
        if len(request.prompt_ids) > first_turn and (moment := moments.get(next(num_later))) is not None:
            moment.set()  # this turn's prompt contains sampled tokens; change the weights while the turn runs
        return write(request, version)

    async with playing(config, buffer, script, model) as loop:
        for moment in moments.values():
            await asyncio.wait_for(moment.wait(), 60)
            await update(loop, buffer)
        await buffer.stored(4, within_s=60)
    assert sum(assert_by_context(group, next_token) for group in buffer.groups) == buffer.num_tokens
    assert loop.counters().tokens_generated == buffer.num_tokens == buffer.num_accounted
    assert len({*np.concatenate([group.versions for group in buffer.groups]).tolist()}) > 2, (
        "there must be several versions"
    )
    happened = Counter()
    for group in buffer.groups:
        happened.update(dict(group.summary.metrics))
    assert happened["compactions"] > 0
    assert happened["episode.branches"] > 0
    assert happened["episode.repeated_requests"] > 0
    sampled = [
        turn.token_ids.tolist() for g in buffer.groups for one in g.trajectories() for turn in one.turns if turn.sampled
    ]
    assert any(sum(token in turn for (token,) in call_ids) > 1 for turn in sampled), "a turn must have parallel calls"
    assert sum(tokenizer.encode(tokenizer.decode(turn)) != turn for turn in sampled) > len(sampled) / 4
