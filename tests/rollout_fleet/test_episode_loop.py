"""Episodes in the rollout loop while weights change, engines fail and workers stop."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from asyncrl.core.errors import EpisodeEnded, EpisodeOverflow, RequestRefused, WorkerDiedError
from asyncrl.core.trajectory import ROOT
from asyncrl.core.types import Prompt
from rollout_fleet.answering import AnsweringParts
from rollout_fleet.config import RolloutFleetConfig, SamplingConfig, SaveProgress
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.episodes import PROMPT, EpisodeBudget
from rollout_fleet.episodes.config import EnvironmentConfig, OnFailure, OnFailureConfig
from rollout_fleet.episodes.environment import EpisodeFailure, FailureKind, Outcome
from rollout_fleet.episodes.episode_run import EpisodeRun
from rollout_fleet.evaluation import HeldOutAnswers
from rollout_fleet.metrics import FleetCounters
from rollout_fleet.rewards import REWARDS, Score, WeightedRewards
from tests.support.registries import undo_registrations
from tests.support.rollout import digits, make_prompts, running_loop, update
from tests.support.trajectories import assert_by_context

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("virtual_time")]

SAMPLING = SamplingConfig(max_new_tokens=12)
TOOL = 40
"""A token that only tools write."""


def number_of(context: list[int]) -> int:
    return zlib.crc32(np.asarray(context, dtype=np.int32).tobytes())


def next_token(context: list[int]) -> int:
    return 16 + number_of(context) % 20


def writes_by_context(request, version) -> ScriptedAnswer:
    context, response = request.prompt_ids.tolist(), []
    for _ in range(request.sampling.max_new_tokens):
        before = [*context, *response]
        response.append(next_token(before))
        if number_of(before) % 11 == 0:
            break
    return ScriptedAnswer(response=response, token_delay_s=0.01)


Play = Callable[[EpisodeRun, int], Awaitable[Outcome]]


@dataclass
class Playing:
    """A player whose environments are coroutines of the test.

    Attributes:
        cancelled: Names of the episodes whose environments were cancelled.
    """

    environment: Play
    budget: EpisodeBudget = field(default_factory=lambda: EpisodeBudget(max_turns=8, max_tokens=96, max_context=200))
    cancelled: list[str] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        return Counter(failed_tool=0, lost_answers=len(self.cancelled))

    def plays(self, prompt: Prompt) -> bool:
        return True

    def scores(self, failure: EpisodeFailure) -> bool:
        return failure.kind is FailureKind.overflow

    async def play(self, prompt: Prompt, run: EpisodeRun, *, sampling: SamplingConfig, index: int) -> None:
        try:
            run.outcome = await self.environment(run, index)
        except EpisodeFailure as failure:
            run.failure = failure
        except asyncio.CancelledError:
            self.cancelled.append(run.episode.name)
            raise
        except EpisodeEnded:
            self.cancelled.append(run.episode.name)


def turns(num_turns: int, tool_s: float = 0.1) -> Play:
    """Return an environment that samples ``num_turns`` turns and calls a tool between them."""

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        turn = await run.sample(PROMPT, (), SAMPLING)
        for number in range(1, num_turns):
            await asyncio.sleep(tool_s)
            turn = await run.sample(turn, [TOOL, number], SAMPLING)
        return Outcome(reward=1.0, turn_rewards={turn: 0.5}, metrics={"turns": float(num_turns)})

    return environment


async def test_a_group_of_episodes_is_stored_with_all_its_turns(make_buffer):
    buffer = make_buffer(3)
    options = {"player": Playing(turns(3)), "reward": "environment"}
    async with running_loop(buffer, writes_by_context, **options) as (loop, _, _):
        await buffer.stored(3)
        counters = await loop.stop()
    for group in buffer.groups:
        assert_by_context(group, next_token)
        assert [len(branch.turns) for branch in group.branches] == [6, 6], "turns: prompt, 3 answers, 2 tool results"
        assert dict(group.summary.metrics)["turns"] == 3.0
        assert group.turn_sums.tolist() == [0.5, 0.5]
        assert group.summary.rewards == (1.5, 1.5), "the reward is 1 for the outcome plus 0.5 for a turn"
    assert counters.tokens_generated == buffer.num_tokens == buffer.num_accounted
    assert (counters.groups_finished, counters.tokens_in_flight) == (3, 0)


async def test_a_reward_function_sees_every_turn_and_replaces_the_rewards_of_the_environment(make_buffer, monkeypatch):
    def by_turn(prompt, rollout):
        assert rollout.outcome == Outcome(reward=1.0, turn_rewards={max(rollout.turns): 0.5}, metrics={"turns": 2.0})
        return Score(reward=float(rollout.num_tokens), turn_rewards=dict.fromkeys(rollout.turns, 0.25))

    undo_registrations(monkeypatch, REWARDS).register("by_turn")(by_turn)
    buffer = make_buffer(1)
    options = {"player": Playing(turns(2)), "reward": "by_turn"}
    async with running_loop(buffer, writes_by_context, **options):
        await buffer.stored(1)
    (group,) = buffer.groups
    assert group.turn_sums.tolist() == [0.5, 0.5]
    assert group.rewards.sum() == group.summary.num_tokens


@pytest.mark.parametrize("save_progress", list(SaveProgress))
async def test_weights_change_in_the_middle_of_episodes(make_buffer, save_progress):
    buffer = make_buffer(2, groups_per_step=1, max_lag=8)
    options = {"save_progress": save_progress, "player": Playing(turns(4))}
    async with running_loop(buffer, writes_by_context, **options) as (loop, _, _):
        for _ in range(3):
            await asyncio.sleep(0.12)
            await update(loop, buffer)
        await buffer.stored(2)
        counters = await loop.stop()
    for group in buffer.groups:
        assert_by_context(group, next_token)
        assert len({*group.versions.tolist()}) > 2, "tokens must have two versions or more"
    assert counters.tokens_generated == buffer.num_tokens == buffer.num_accounted


async def test_turns_that_an_engine_did_not_abort_before_an_update_are_continued(make_buffer):
    buffer = make_buffer(1, groups_per_step=1, max_lag=8)

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        turn = await run.sample(PROMPT, (), SAMPLING)
        await asyncio.sleep(0.6 if index == 1 else 0.0)
        await run.sample(turn, [TOOL], SAMPLING)
        return Outcome()

    def writes_slowly(request, version) -> ScriptedAnswer:
        return replace(writes_by_context(request, version), token_delay_s=1.0 if TOOL in request.prompt_ids else 0.01)

    options = {"save_progress": SaveProgress.at_updates, "player": Playing(environment), "load_timeout_s": 1.0}
    async with running_loop(buffer, writes_slowly, **options) as (loop, engine, _):
        aborted: list[str] = []

        async def ignored(request_ids):
            aborted.extend(request_ids)

        engine.abort, abort = ignored, engine.abort
        await asyncio.sleep(0.5)
        await update(loop, buffer)
        engine.abort = abort
        assert {*aborted} == {"0-0-0-3-1"}, "only this request must be aborted"
        await buffer.stored(1)
        counters = await loop.stop()
    assert_by_context(buffer.groups[0], next_token)
    assert counters.tokens_generated == buffer.num_tokens == buffer.num_accounted


async def test_a_turn_that_the_engine_aborts_without_a_request_is_continued(make_buffer):
    buffer = make_buffer(1)
    cut_off: set[int] = set()

    def aborts_once(request, version) -> ScriptedAnswer:
        answer = writes_by_context(request, version)
        is_first = TOOL in request.prompt_ids and len(cut_off) < 2 and len(answer.response) > 1
        cut_off.update([len(engine.requests)] if is_first else [])
        return replace(answer, cut_off=1) if is_first else answer

    async with running_loop(buffer, aborts_once, player=Playing(turns(4))) as (loop, engine, _):
        await buffer.stored(1)
        counters = await loop.stop()
    assert cut_off
    assert_by_context(buffer.groups[0], next_token)
    assert (buffer.released, counters.tokens_generated) == ([], buffer.num_tokens)


async def test_requests_to_an_engine_that_aborts_them_are_repeated_only_after_a_pause(make_buffer):
    buffer = make_buffer(1)

    def aborts_for_5_s(request, version) -> ScriptedAnswer:
        is_early = asyncio.get_running_loop().time() < begun_s + 5
        return replace(writes_by_context(request, version), cut_off=0 if is_early else -1)

    begun_s = asyncio.get_running_loop().time()
    async with running_loop(buffer, aborts_for_5_s, player=Playing(turns(2))) as (_, engine, _):
        await buffer.stored(1)
    assert 40 < len(engine.requests) / 2 < 60, "each turn must repeat its request 10 times per second"
    assert_by_context(buffer.groups[0], next_token)


async def test_an_episode_that_waits_for_a_tool_uses_no_slot(make_buffer):
    buffer = make_buffer(3)
    player = Playing(turns(2, tool_s=8.0))
    async with running_loop(buffer, writes_by_context, player=player, groups_in_flight=1) as (_, engine, _):
        await asyncio.sleep(4)
        assert len(buffer.held) == 2, "a second group must be leased while the first group's tools run"
        assert engine.running_at_once == 2, "the engine must run one group's samples"
        await buffer.stored(3)


async def test_the_trace_counts_the_episodes_in_tools_and_environments(make_buffer, recorded):
    buffer = make_buffer(1)
    places: dict[int, list[str]] = {0: [], 1: []}

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        places[index].append(run.place)
        await asyncio.sleep(1)
        turn = await run.sample(PROMPT, (), SAMPLING)
        run.called(["search"])
        places[index].append(run.place)
        await asyncio.sleep(1 + index)
        asking = asyncio.create_task(run.sample(turn, [TOOL], SAMPLING))
        await asyncio.sleep(0)
        places[index].append(run.place)
        await asking
        run.called([])
        places[index].append(run.place)
        run.tool(0, "calculator", True)
        places[index].append(run.place)
        await asyncio.sleep(3)
        run.tool(0, "calculator", False)
        places[index].append(run.place)
        await asyncio.sleep(1 + index)
        return Outcome()

    async with running_loop(buffer, writes_by_context, player=Playing(environment), groups_in_flight=1) as (loop, _, _):
        await buffer.stored(1)
        await loop.stop()
    expected = ["environment", "tool", "running", "environment", "tool", "environment"]
    assert list(places.values()) == [expected, expected]
    trace = recorded()
    values = {
        name: [level.value for level in trace.levels_of(name, "engine-0")] for name in ("environment", "tool", "tail")
    }
    assert (max(values["environment"]), max(values["tool"])) == (2, 2)
    assert values["tail"] == [0, 1, 0], "one of the group's two episodes ends before the other"
    assert (values["environment"][-1], values["tool"][-1]) == (0, 0)


async def test_more_groups_wait_for_tools_if_the_option_allows_it(make_buffer):
    buffer = make_buffer(8)
    environment = EnvironmentConfig(max_groups=5)
    options = {"player": Playing(turns(2, tool_s=100.0)), "groups_in_flight": 1, "environment": environment}
    async with running_loop(buffer, writes_by_context, **options) as (_, _, _):
        await asyncio.sleep(50)
        assert len(buffer.held) == 5


async def test_another_worker_replays_the_episodes_of_a_stopped_worker(make_buffer):
    buffer = make_buffer(1)
    player = Playing(turns(3, tool_s=5.0))
    async with running_loop(buffer, writes_by_context, player=player) as (loop, _, _):
        await asyncio.sleep(7)
        first = await loop.stop()
    assert sorted(player.cancelled) == ["0-0-0", "0-0-1"]
    assert FleetCounters.total([first, first]).episodes == {"failed_tool": 0, "lost_answers": 4}, (
        "the total must include zero counts"
    )
    assert buffer.progress[0].summary.num_tokens == first.tokens_generated > 0
    prefixes = [trajectory.turns[1].token_ids.tolist() for trajectory in buffer.progress[0].trajectories()]
    async with running_loop(buffer, writes_by_context, player=player) as (loop, engine, _):
        await buffer.stored(1)
        second = await loop.stop()
    (group,) = buffer.groups
    assert_by_context(group, next_token)
    assert [trajectory.turns[1].token_ids.tolist() for trajectory in group.trajectories()] == prefixes
    assert all(len(request.prompt_ids) > 3 for request in engine.requests), "saved turns must not be sampled again"
    assert first.tokens_generated + second.tokens_generated == buffer.num_tokens == buffer.num_accounted


async def test_recorded_tokens_that_differ_from_the_new_attempt_are_dropped_and_counted(make_buffer):
    buffer = make_buffer(1)

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        attempt = int(run.episode.name.split("-")[1])
        turn = await run.sample(PROMPT, (), SAMPLING)
        await run.sample(turn, [TOOL, attempt], SAMPLING)
        if attempt == 0:
            await asyncio.sleep(1000)
        return Outcome()

    async with running_loop(buffer, writes_by_context, player=Playing(environment)) as (loop, _, _):
        await asyncio.sleep(5)
        first = await loop.stop()
    async with running_loop(buffer, writes_by_context, player=Playing(environment)) as (loop, _, _):
        await buffer.stored(1)
        second = await loop.stop()
    assert buffer.num_tokens < first.tokens_generated + second.tokens_generated == buffer.num_accounted


async def test_tokens_of_an_attempt_without_replay_are_counted_once_if_the_next_one_stops_early(make_buffer):
    """No attempt uses saved turns. The second attempt is stopped after fewer tokens than the first attempt."""
    buffer = make_buffer(1)
    generated = []

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        run.start_afresh()
        attempt = int(run.episode.name.split("-")[1])
        turn = await run.sample(PROMPT, [TOOL, attempt], SamplingConfig(max_new_tokens=1 if attempt == 1 else 12))
        if attempt < 2:
            await asyncio.sleep(1000)
        await run.sample(turn, [TOOL], SAMPLING)
        return Outcome()

    for life in range(3):
        async with running_loop(buffer, writes_by_context, player=Playing(environment)) as (loop, _, _):
            await (buffer.stored(1) if life == 2 else asyncio.sleep(5))
            generated.append((await loop.stop()).tokens_generated)
    assert generated[0] > generated[1] == 2
    assert buffer.num_tokens < sum(generated) == buffer.num_accounted


async def test_only_groups_that_can_be_replayed_are_handed_over(make_buffer):
    buffer = make_buffer(2)

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        if run.episode.name.startswith("0-"):
            run.start_afresh()
        return await turns(3, tool_s=1.0)(run, index)

    async with running_loop(buffer, writes_by_context, player=Playing(environment), groups_in_flight=2) as (loop, _, _):
        await asyncio.sleep(0.5)
        buffer.hand_on_requests.put_nowait([(0, 0), (1, 0)])
        await buffer.stored(2)
        counters = await loop.stop()
    assert [(group_id, reason) for group_id, _, reason in buffer.released] == [(1, "handed_on")]
    assert counters.tokens_generated == buffer.num_tokens == buffer.num_accounted


async def test_a_revoked_group_ends_immediately_even_if_its_tools_hang(make_buffer):
    buffer = make_buffer(2)
    player = Playing(turns(2, tool_s=1000.0))
    async with running_loop(buffer, writes_by_context, player=player) as (_, _, _):
        await asyncio.sleep(5)
        await buffer.revoke(0)
        await asyncio.sleep(0.1)
        assert sorted(player.cancelled) == ["0-0-0", "0-0-1"]
        assert buffer.held == {(1, 0), (0, 1)}, "a new attempt must begin"


async def test_after_an_engine_failure_during_tools_the_next_engine_continues_the_turns(make_buffer):
    buffer = make_buffer(2)
    player = Playing(turns(2, tool_s=9.0))
    async with running_loop(buffer, writes_by_context, player=player) as (_, engine, run):
        await asyncio.sleep(5)
        engine.die("killed")
        with pytest.raises(WorkerDiedError, match="killed"):
            await run
    assert set(buffer.progress) == {0, 1}
    assert buffer.held == set()
    async with running_loop(buffer, writes_by_context, player=player) as (_, _, _):
        await buffer.stored(2)
    for group in buffer.groups:
        assert_by_context(group, next_token)
    assert sum(buffer.ledger.account.tokens_dropped.values()) == 0


def failing(kind: FailureKind, *, fails: Callable[[EpisodeRun, int], bool]) -> Play:
    async def environment(run: EpisodeRun, index: int) -> Outcome:
        outcome = await turns(2)(run, index)
        if fails(run, index):
            raise EpisodeFailure(kind, "broken")
        return outcome

    return environment


async def test_a_failed_episode_ends_the_attempt_and_the_next_attempt_replays_its_turns(make_buffer):
    buffer = make_buffer(1)
    player = Playing(failing(FailureKind.tool, fails=lambda run, index: run.episode.name == "0-0-1"))
    async with running_loop(buffer, writes_by_context, player=player) as (loop, _, _):
        await buffer.stored(1)
        counters = await loop.stop()
    assert [reason for _, _, reason in buffer.released] == ["episode_tool"]
    assert counters.groups_failed["episode_tool"] == 1
    assert counters.tokens_generated == buffer.num_tokens == buffer.num_accounted, "no tokens may be sampled twice"


@pytest.mark.parametrize("action", [OnFailure.score, OnFailure.drop])
async def test_the_option_on_failure_scores_or_omits_a_failed_episode(make_buffer, action):
    buffer = make_buffer(1)
    player = Playing(failing(FailureKind.tool, fails=lambda run, index: index == 2))
    environment = EnvironmentConfig(on_failure=OnFailureConfig(tool=action))
    options = {"environment": environment, "samples_per_prompt": 3, "reward": "environment"}
    async with running_loop(buffer, writes_by_context, player=player, **options) as (loop, _, _):
        await buffer.stored(1)
        counters = await loop.stop()
    (group,) = buffer.groups
    assert group.rewards.tolist() == ([1.0, 1.0, 0.0] if action is OnFailure.score else [1.0, 1.0])
    assert counters.groups_failed[f"episode_tool_{action}"] == 1
    assert counters.tokens_generated == buffer.num_accounted


async def test_a_failed_episode_in_a_group_of_one_is_scored(make_buffer):
    buffer = make_buffer(1)
    player = Playing(failing(FailureKind.overflow, fails=lambda run, index: True))
    options = {"player": player, "samples_per_prompt": 1, "reward": "environment"}
    async with running_loop(buffer, writes_by_context, **options) as (loop, _, _):
        await buffer.stored(1)
        counters = await loop.stop()
    assert (buffer.released, buffer.groups[0].rewards.tolist()) == ([], [0.0])
    assert counters.groups_failed == {"episode_overflow_score": 1}


async def test_a_group_whose_greedy_episode_has_no_turn_is_generated_again(make_buffer):
    buffer = make_buffer(1)

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        if run.episode.name == "0-0-2":
            raise EpisodeFailure(FailureKind.overflow, "broken")
        return await turns(2)(run, index)

    options = {"player": Playing(environment), "greedy_baseline": True}
    async with running_loop(buffer, writes_by_context, **options):
        await buffer.stored(1)
    assert [reason for _, _, reason in buffer.released] == ["episode_overflow"]
    assert buffer.groups[0].is_baseline.tolist() == [False, False, True]


async def test_an_environment_that_never_calls_the_policy_fails(make_buffer):
    buffer = make_buffer(1)

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        return Outcome(reward=1.0)

    async with running_loop(buffer, writes_by_context, player=Playing(environment), max_attempts=2):
        await buffer.dropped(1)
    assert [reason for _, _, reason in buffer.released] == ["episode_environment"] * 2


@pytest.mark.parametrize("answers_first", [False, True], ids=["abort_first", "answers_first"])
async def test_the_tokens_of_a_cancelled_turn_are_dropped_and_counted(make_buffer, answers_first):
    """With ``answers_first``, the engine sends the tokens of an aborted request before it answers the abort."""
    buffer = make_buffer(1)

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        turn = await run.sample(PROMPT, (), SAMPLING)
        leaving = asyncio.create_task(run.sample(turn, [TOOL], SAMPLING))
        await asyncio.sleep(0.025)
        leaving.cancel()
        return Outcome()

    async with running_loop(buffer, writes_by_context, player=Playing(environment)) as (loop, engine, _):
        abort = engine.abort

        async def abort_slowly(request_ids):
            await abort(request_ids)
            await asyncio.gather(asyncio.create_task(asyncio.sleep(1.0 if answers_first else 0.0)))

        engine.abort = abort_slowly
        await buffer.stored(1)
        counters = await loop.stop()
    (group,) = buffer.groups
    assert buffer.released == []
    assert [len(trajectory.turns) for trajectory in group.trajectories()] == [2, 2]
    assert buffer.num_tokens < counters.tokens_generated == buffer.num_accounted


def refuses_long_prompts(request, version) -> ScriptedAnswer:
    return ScriptedAnswer(error="too long") if 99 in request.prompt_ids else writes_by_context(request, version)


async def test_a_refused_request_fails_only_its_own_turn(make_buffer):
    buffer = make_buffer(1)
    refused = []

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        turn = await run.sample(PROMPT, (), SAMPLING)
        for wrong in ([99], [-1]):
            try:
                await run.sample(turn, wrong, SAMPLING)
            except RequestRefused as error:
                refused.append(str(error))
        await run.sample(turn, [TOOL], SAMPLING)
        return Outcome()

    async with running_loop(buffer, refuses_long_prompts, player=Playing(environment)) as (loop, _, run):
        await buffer.stored(1)
        assert not run.done()
        counters = await loop.stop()
    assert ["too long" in message for message in refused].count(True) == 2
    assert ["must be in 0.." in message for message in refused].count(True) == 2
    assert counters.tokens_generated == buffer.num_tokens == buffer.num_accounted


async def test_a_refused_request_does_not_fail_a_turn_that_was_requested_at_the_same_time(make_buffer):
    buffer = make_buffer(1)
    refused = []

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        turn = await run.sample(PROMPT, (), SAMPLING)
        await asyncio.sleep(5 - asyncio.get_running_loop().time() % 5)
        try:
            await run.sample(turn, [99 if index == 0 else TOOL], SAMPLING)
        except RequestRefused:
            refused.append(index)
        return Outcome()

    async with running_loop(buffer, refuses_long_prompts, player=Playing(environment)) as (loop, _, _):
        await buffer.stored(1)
        counters = await loop.stop()
    assert refused == [0]
    assert counters.tokens_generated == buffer.num_tokens == buffer.num_accounted


async def test_a_request_refused_after_an_update_does_not_fail_a_turn_of_another_group(make_buffer):
    buffer = make_buffer(2, groups_per_step=1, max_lag=8)
    refused = []

    class PlayingSome(Playing):
        def plays(self, prompt: Prompt) -> bool:
            return prompt.group_id == 0

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        turn = await run.sample(PROMPT, (), SAMPLING)
        await asyncio.sleep(1.0)
        try:
            await run.sample(turn, [99 if index == 0 else TOOL], SAMPLING)
        except RequestRefused:
            refused.append((run.episode.name, index))
        return Outcome()

    options = {"save_progress": SaveProgress.at_updates, "player": PlayingSome(environment)}
    async with running_loop(buffer, refuses_long_prompts, **options) as (loop, engine, run):
        engine.load_delay_s = 3.0
        await asyncio.sleep(0.02)
        await update(loop, buffer)
        await buffer.stored(2)
        assert not run.done(), "answers without an environment must not end the loop"
        counters = await loop.stop()
    assert refused == [("0-0-0", 0)]
    for group in buffer.groups:
        assert_by_context(group, next_token)
    assert counters.tokens_generated == buffer.num_tokens == buffer.num_accounted


async def test_an_episode_can_have_branches_roots_and_parallel_turns(make_buffer):
    buffer = make_buffer(1, groups_per_step=1, max_lag=8)

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        first = await run.sample(PROMPT, (), SAMPLING)
        await asyncio.gather(*(run.sample(first, [TOOL, number], SAMPLING) for number in range(3)))
        await run.sample(ROOT, [TOOL, 7], SAMPLING)
        try:
            while True:
                await run.sample(ROOT, [TOOL, 8], SAMPLING)
        except EpisodeOverflow:
            return Outcome()

    options = {"save_progress": SaveProgress.at_updates, "player": Playing(environment)}
    async with running_loop(buffer, writes_by_context, **options) as (loop, _, _):
        for _ in range(2):
            await asyncio.sleep(0.06)
            await update(loop, buffer)
        await buffer.stored(1)
        counters = await loop.stop()
    (group,) = buffer.groups
    assert_by_context(group, next_token)
    assert len(group.branches) == 2 * 7, "each episode must have three branches and four roots"
    assert counters.tokens_generated == buffer.num_tokens == buffer.num_accounted


async def test_the_device_is_released_during_tools_and_later_turns_wait_for_new_weights(make_buffer):
    buffer = make_buffer(1, groups_per_step=1, max_lag=2)
    options = {"player": Playing(turns(3, tool_s=1.0)), "drain_timeout_s": 0.5}
    async with running_loop(buffer, writes_by_context, **options) as (loop, engine, _):
        await asyncio.sleep(0.3)
        await loop.release_device()
        assert engine.released
        await asyncio.sleep(30)
        num_asked = len(engine.requests)
        await update(loop, buffer)
        await buffer.stored(1)
        assert len(engine.requests) > num_asked
    assert_by_context(buffer.groups[0], next_token)


async def test_the_greedy_baseline_is_also_an_episode(make_buffer):
    buffer = make_buffer(1)
    async with running_loop(buffer, writes_by_context, player=Playing(turns(2)), greedy_baseline=True) as (loop, _, _):
        await buffer.stored(1)
        counters = await loop.stop()
    (group,) = buffer.groups
    assert group.is_baseline.tolist() == [False, False, True]
    assert counters.tokens_generated == buffer.num_tokens


def held_out(engine, environment: Play) -> HeldOutAnswers:
    rewards = WeightedRewards(RolloutFleetConfig(reward="environment"))
    return HeldOutAnswers(
        AnsweringParts(engine=engine, rewards=rewards, decode=digits, player=Playing(environment)),
        sampling=lambda source: SAMPLING,
    )


async def test_held_out_prompts_are_also_answered_by_episodes():
    engine = ScriptedEngine(writes_by_context)
    await engine.start()
    answered = await held_out(engine, turns(2)).answer(make_prompts(3), version=0, num_samples=2)
    assert [(one.sampled, one.greedy) for one in answered] == [((1.5, 1.5), 1.5)] * 3
    broken = failing(FailureKind.tool, fails=lambda run, index: run.episode.name.startswith("evaluation-1-1-"))
    answered = await held_out(engine, broken).answer(make_prompts(3), version=0, num_samples=2)
    assert [one.reward_failure for one in answered] == ["", "broken", ""]
    overflowing = failing(FailureKind.overflow, fails=lambda run, index: index == 1)
    answered = await held_out(engine, overflowing).answer(make_prompts(1), version=0, num_samples=2)
    assert [(one.sampled, one.greedy) for one in answered] == [((1.5, 0.0), 1.5)], "the rewards must be as in training"
    await engine.stop()


async def test_a_refused_request_of_a_held_out_episode_does_not_fail_a_parallel_turn():
    engine = ScriptedEngine(refuses_long_prompts)
    await engine.start()

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        first = await run.sample(PROMPT, (), SAMPLING)
        asked = (run.sample(first, [token], SAMPLING) for token in (TOOL, 99))
        beside, refused = await asyncio.gather(*asked, return_exceptions=True)
        assert (beside in run.episode.sampled, type(refused)) == (True, RequestRefused)
        return Outcome(reward=1.0)

    (answered,) = await held_out(engine, environment).answer(make_prompts(1), version=0, num_samples=1)
    assert (answered.sampled, answered.greedy) == ((1.0,), 1.0)
    await engine.stop()


async def test_an_engine_failure_during_a_held_out_episode_fails_the_evaluation():
    engine = ScriptedEngine(writes_by_context)
    await engine.start()

    async def environment(run: EpisodeRun, index: int) -> Outcome:
        await run.sample(PROMPT, (), SAMPLING)
        engine.die("killed")
        try:
            await run.sample(PROMPT, [TOOL], SAMPLING)
        except WorkerDiedError as error:
            raise EpisodeFailure(FailureKind.infrastructure, str(error)) from error
        return Outcome()

    with pytest.raises(WorkerDiedError, match="killed"):
        await held_out(engine, environment).answer(make_prompts(1), version=0, num_samples=1)
    await engine.stop()


async def test_a_worker_ends_after_too_many_failed_episodes_in_a_row(make_buffer):
    buffer = make_buffer(2)
    player = Playing(failing(FailureKind.tool, fails=lambda run, index: True))
    options = {"player": player, "max_failures_in_a_row": 2, "max_attempts": 9}
    async with running_loop(buffer, writes_by_context, **options) as (loop, _, run):
        with pytest.raises(EpisodeFailure, match=r"broken \(failure 2 in a row, the limit of"):
            await asyncio.wait_for(run, 20)
    assert loop.counters().groups_failed["episode_tool"] == 2
    assert loop.counters().groups_failed.total() == 2, "each failed attempt must count once"
