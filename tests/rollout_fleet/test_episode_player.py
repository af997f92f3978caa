"""Episodes in one worker with its loop, endpoint, environment processes and rewards; only the engine is scripted.

Some agents hang, leak, use a wrong key or lose their client, and some rewards crash, each the first time.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from typing import Any

import numpy as np
import psutil
import pytest

from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import Prompt
from rollout_fleet.config import RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.episodes.config import EnvironmentConfig, RendererConfig
from rollout_fleet.episodes.player import EpisodePlayer
from rollout_fleet.episodes.renderer import load_renderer
from rollout_fleet.loop import RolloutLoop
from rollout_fleet.rewards import WeightedRewards
from tests.support.chat_models import save_chat_model
from tests.support.offers import bare_offer
from tests.support.rollout import InMemoryBuffer, ready_member

pytestmark = pytest.mark.timeout(900)
GROUP_SIZE = 4
AGENTS = '''
import asyncio, json, os, subprocess
from pathlib import Path
from urllib.parse import urlsplit

FOLDER = Path(__file__).parent

def is_first(name):
    """Whether this has not happened before, in any process."""
    try:
        os.close(os.open(FOLDER / name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

async def hang():
    await asyncio.sleep(600)

async def vanish(policy, messages):
    """Send a request and close the connection before the answer, as a client does that is killed."""
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


def write(vocab_size: int, stop_id: int):
    """A script: tokens that follow from the tokens before them; decoded and encoded again, they are others."""

    def next_token(context: list[int]) -> int:
        number = zlib.crc32(np.asarray(context, dtype=np.int32).tobytes())
        return stop_id if number % 7 == 0 else number // 7 % (vocab_size - 40)

    def script(request: Any, version: int) -> ScriptedAnswer:
        context = request.prompt_ids.tolist()
        for _ in range(request.sampling.max_new_tokens):
            context.append(next_token(context))
            if context[-1] == stop_id:
                break
        return ScriptedAnswer(response=context[len(request.prompt_ids) :], token_delay_s=0.02)

    return next_token, script


def assert_by_context(group: TrajectoryGroup, next_token: Any) -> int:
    """Every sampled token follows from the tokens before it on its path; returns their number."""
    num_checked = 0
    for branch in group.branches:
        ids, mask = group.along(branch, "token_ids").tolist(), group.trained_mask(branch)
        for place in np.flatnonzero(mask).tolist():
            assert ids[place] == next_token(ids[:place])
            num_checked += 1
    return num_checked


@pytest.mark.parametrize("num_episodes", [120, pytest.param(1000, marks=pytest.mark.slow)])
async def test_of_faulty_episodes_each_becomes_one_trajectory_and_the_account_balances(tmp_path, num_episodes):
    """A twentieth each: hanging tool, crashing reward, leaking agent, wrong key, vanishing client."""
    model = save_chat_model(tmp_path / "model", "chatml")
    (tmp_path / "agents.py").write_text(AGENTS)
    renderer = load_renderer(model, RendererConfig())
    prompts = []
    for group_id in range(num_episodes // GROUP_SIZE):
        messages = ({"role": "user", "content": f"question {group_id}"},)
        ids = np.asarray(renderer.render(messages, []), dtype=np.int32)
        prompts.append(Prompt(group_id=group_id, prompt_ids=ids, messages=messages))
    config = RolloutFleetConfig(
        reward=f"{tmp_path}/agents.py:score",
        reward_timeout_s=60.0,
        max_attempts=2 * GROUP_SIZE,
        max_failures_in_a_row=num_episodes,
        groups_in_flight=8,
        sampling=SamplingConfig(max_new_tokens=10),
        environment=EnvironmentConfig(name=f"{tmp_path}/agents.py:main", tool_timeout_s=0.5, processes=1, max_turns=8),
    )
    next_token, script = write(len(renderer.tokenizer), renderer.stop_ids[0])
    buffer: Any = InMemoryBuffer(prompts)
    engine = ScriptedEngine(script)
    player = EpisodePlayer(config, model_path=model, max_context=4096)
    rewards = WeightedRewards(config)
    await engine.start()
    await engine.load_weights(bare_offer(0))
    await asyncio.gather(player.start(), rewards.start())
    loop = RolloutLoop(
        config,
        engine=engine,
        member=ready_member(),
        buffer=buffer,
        rewards=rewards,
        decode=renderer.tokenizer.decode,
        samples_per_prompt=GROUP_SIZE,
        player=player,
    )
    running = asyncio.create_task(loop.run())
    try:
        await buffer.stored(len(prompts), within_s=800)
        counters = await loop.stop()
        await running
    finally:
        await asyncio.gather(player.close(), rewards.close(), engine.stop())
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
    assert 1 <= sum(repeated) <= num_each, "a client that vanished before its answer came gets the same turn"
    for group in buffer.groups:
        for index, trajectory in enumerate(group.trajectories()):
            is_vanishing = (GROUP_SIZE * group.group_id + index) * 7 % 20 == 4
            assert len(trajectory.turns) in ((6, 7, 8) if is_vanishing else (6,)), "or else a sibling"
    assert counters.tokens_generated == buffer.num_accounted > buffer.num_tokens
    assert (counters.tokens_in_flight, buffer.held) == (0, set())
    left = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(left) == num_each
    for pid in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
