"""What a running episode counts, describes and refuses: cached tokens, turns, invalid token ids, wrong keys."""

import asyncio
import json
from dataclasses import replace

import aiohttp
import numpy as np
import pytest

from asyncrl.core.errors import RequestRefused
from asyncrl.core.types import FinishReason, Prompt
from rollout_fleet.config import RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines.engine import SampleOutput
from rollout_fleet.episodes import PROMPT, Endpoint, Episode, EpisodeBudget, SessionCounts
from rollout_fleet.episodes.environment import Outcome
from rollout_fleet.episodes.environment_processes import EnvironmentProcesses
from rollout_fleet.episodes.episode_run import EpisodeRun, PromptTokens
from rollout_fleet.episodes.player import EpisodePlayer, session_metrics
from rollout_fleet.metrics import EpisodeCount


def answered(num_tokens, *, num_cached, is_aborted=False):
    return SampleOutput(
        token_ids=np.full(num_tokens, 9, dtype=np.int32),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int32),
        finish_reason=None if is_aborted else FinishReason.stop,
        num_cached=num_cached,
    )


async def play(answers):
    """Run an episode of three turns. Returns the `EpisodeRun`.

    The first turn follows the prompt of 10 tokens. Each later turn follows 4 given tokens.
    """
    budget = EpisodeBudget(max_turns=9, max_tokens=99, max_context=99)
    run = EpisodeRun(Episode("0-0-0", np.arange(10, dtype=np.int32), budget), ask=lambda: None, vocab_size=100)
    left, turn, given = iter(answers), PROMPT, ()
    for _ in range(3):
        asking = asyncio.create_task(run.sample(turn, given, SamplingConfig(max_new_tokens=8)))
        await asyncio.sleep(0)
        while not asking.done():
            for request in run.next_requests():
                run.take(request.id, next(left))
            await asyncio.sleep(0)
        turn, given = asking.result(), (1, 2, 3, 4)
    return run


async def test_prefix_hits_count_cached_prompt_tokens_after_the_first_turn():
    first, second = answered(6, num_cached=10), answered(2, num_cached=15)
    cut_off, rest = answered(3, num_cached=0, is_aborted=True), answered(1, num_cached=29)
    run = await play([first, second, cut_off, rest])
    assert run.later_prompts == PromptTokens(num_tokens=20 + 26, num_cached=15 + 0), (
        "prompts of 10+6+4 and 20+2+4 tokens"
    )
    assert session_metrics(run, SessionCounts())["episode.prefix_hits"] == pytest.approx(15 / 46)


async def test_the_description_of_an_episode_has_texts_per_policy_version_and_turn_rewards():
    mixed = answered(4, num_cached=None)
    mixed = replace(mixed, versions=np.array([3, 3, 4, 4], dtype=np.int32))
    run = await play([mixed, answered(2, num_cached=None), answered(1, num_cached=None)])
    run.tool(0, "search", True)
    run.tool(0, "search", False)
    described = run.described(lambda ids: " ".join(map(str, ids)), {1: 0.5})
    turns = described["turns"]
    assert [(each["turn"], each["parent"], each["is_sampled"], each["num_tokens"]) for each in turns] == [
        *((0, -1, False, 10), (1, 0, True, 4), (2, 1, False, 4), (3, 2, True, 2), (4, 3, False, 4), (5, 4, True, 1)),
    ]
    assert turns[1]["pieces"] == [[3, "9 9"], [4, "9 9"]]
    assert turns[2]["pieces"] == [[-1, "1 2 3 4"]]
    assert [each["reward"] for each in turns] == [None, 0.5, None, None, None, None]
    assert turns[0]["asked_s"] is None
    assert 0 <= turns[1]["asked_s"] <= turns[1]["ended_s"] <= turns[3]["asked_s"] <= described["duration_s"]
    assert [tool["name"] for tool in described["tools"]] == ["search"]
    json.dumps(described)


async def test_an_episode_refuses_token_ids_outside_the_vocabulary():
    run = await play([answered(1, num_cached=None) for _ in range(3)])
    num_turns = len(run.episode.live)
    with pytest.raises(RequestRefused, match=r"token ids must be in 0\.\.99, got 5\.\.100;"):
        run.give(PROMPT, [5, 100])
    with pytest.raises(RequestRefused, match=r"token ids must be in 0\.\.99, got -1\.\.-1"):
        await run.sample(PROMPT, [-1], SamplingConfig())
    assert len(run.episode.live) == num_turns
    assert run.episode.path(run.give(PROMPT, [5, 99])).tolist() == [*range(10), 5, 99]


async def test_an_episode_has_no_prefix_hits_if_the_engine_does_not_report_its_cache():
    run = await play([answered(6, num_cached=None) for _ in range(3)])
    assert "episode.prefix_hits" not in session_metrics(run, SessionCounts())


async def test_an_environment_can_reward_only_finished_turns(monkeypatch):
    budget = EpisodeBudget(max_turns=9, max_tokens=99, max_context=99)
    run = EpisodeRun(Episode("0-0-0", np.arange(10, dtype=np.int32), budget), ask=lambda: None, vocab_size=100)
    player = EpisodePlayer(RolloutFleetConfig(), model_path="", max_context=99)
    rewarded: dict[int, float] = {}

    async def outcome(*args, **options):
        return Outcome(turn_rewards=rewarded)

    async def always(*args):
        return True

    monkeypatch.setattr(player, "_renderer", object())
    monkeypatch.setattr(EnvironmentProcesses, "run", outcome)
    monkeypatch.setattr(EnvironmentProcesses, "is_replayable", always)
    first, second = (asyncio.create_task(run.sample(PROMPT, (), SamplingConfig(max_new_tokens=8))) for _ in range(2))
    await asyncio.sleep(0)
    run.take(run.next_requests()[0].id, answered(3, num_cached=None))
    prompt = Prompt(group_id=0, prompt_ids=np.arange(10, dtype=np.int32))
    for turn, is_finished in ((0, False), (1, True), (2, False), (3, False)):
        rewarded, run.failure = {turn: 1.0}, None
        await player.play(prompt, run, sampling=SamplingConfig(), index=0)
        assert (run.failure is None) == is_finished
        assert is_finished or f"rewards turns [{turn}], but each of these is the prompt" in str(run.failure)
    second.cancel()
    assert await first == 1


async def test_the_player_counts_a_request_with_a_wrong_key(monkeypatch):
    endpoint = Endpoint()
    monkeypatch.setattr("rollout_fleet.episodes.player.Endpoint", lambda: endpoint)
    player = EpisodePlayer(RolloutFleetConfig(), model_path="", max_context=99)
    assert player.counts == dict.fromkeys(EpisodeCount, 0)
    await endpoint.start()
    url = f"{endpoint.open(None).base_url}/chat/completions"
    headers = {"authorization": "Bearer of-nobody"}
    async with aiohttp.ClientSession() as http, http.post(url, headers=headers, json={}) as answer:
        assert answer.status == 401
    await player.close()
    assert {name: count for name, count in player.counts.items() if count} == {"unknown_keys": 1, "error_answers": 1}
