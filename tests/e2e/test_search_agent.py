"""The search agent trains on SGLang while its process, its engine and its rollout worker are killed in mid-episode.

The policy is random and calls tools by chance, in parallel; what it writes, decoded and encoded again, is seldom the
same tokens. Some answers are lost on their way, so the unmodified client sends those requests again. Each answer of
SGLang and each answer that an agent gets is logged.
"""

import json
import os
import signal
from collections import Counter, defaultdict

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.cli.audit_command import main as audit
from rollout_fleet.episodes.chat_tokenizer import ChatTokenizer
from tests.e2e.run_checks import (
    assert_every_step_is_made_and_no_version_goes_back,
    assert_the_account_closes,
    assert_trained_tokens_have_the_log_prob_of_their_version,
    trained_samples,
)
from tests.support.chat_models import save_calling_policy
from tests.support.engine_log import LOGGING, assert_trained_tokens_were_sampled, read_engine_log
from tests.support.training_run import RunningTraining

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 12
AGENT_PROCESS, ENGINE, WORKER = "environment_child", "sglang::scheduler", "ray::RolloutWorker"
KILLS = {2: AGENT_PROCESS, 5: ENGINE, 8: WORKER}
"""The part that is killed after each of these steps."""
WHAT_HAPPENED = [
    *("episode.branches", "episode.repeated_requests", "episode.replayed_tokens", "episode.retokenised_tokens"),
    *("compactions",),
]
CALLS = [
    json.dumps({"name": "search", "arguments": {"words": "tower built"}}),
    json.dumps({"name": "read", "arguments": {"file": "a.txt"}}),
]
AGENT = """
import asyncio, json, os, random
from contextvars import ContextVar
from pathlib import Path

import httpx
from examples.agents import search
from openai import AsyncOpenAI, DefaultAsyncHttpxClient


FOLDER = Path(__file__).parent
EPISODE = ContextVar("episode")


class Lossy(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request):
        response = await super().handle_async_request(request)
        await response.aread()
        if request.headers["x-stainless-retry-count"] == "0" and random.random() < 0.1:
            raise httpx.ReadError("the answer was lost", request=request)
        if response.status_code == 200:
            (choice,) = response.json()["choices"]
            calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
            said = [choice["message"]["content"], calls, choice["finish_reason"]]
            line = {**EPISODE.get(), "said": said}
            with open(FOLDER / "answers.jsonl", "a") as file:
                file.write(json.dumps(line) + "\\n")
        return response


class SlowTexts(search.Texts):
    async def call(self, call):
        await asyncio.sleep(0.2)
        return await super().call(call)


def client(**options):
    return AsyncOpenAI(http_client=DefaultAsyncHttpxClient(transport=Lossy()), **options)


search.AsyncOpenAI, search.Texts = client, SlowTexts


async def main(prompt, policy, folder):
    own = {"group": prompt.group_id, "sample": policy.sample_index}
    EPISODE.set(own | {"life": random.random(), "worker": os.getppid()})
    with open(FOLDER / "pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    outcome = await search.main(prompt, policy.base_url, policy.api_key, folder=folder, max_chars=250, max_rounds=6)
    return outcome | {"reward": outcome["reward"] + 0.01 * len(outcome["answer"])}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    texts = folder / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("The tower was built in 1889.\n" + "It is high. " * 8)
    (texts / "b.txt").write_text("The tower of the bridge was built in 1932.")
    (folder / "agent.py").write_text(AGENT)
    (folder / "sitecustomize.py").write_text(LOGGING)
    rows = [
        {"prompt": [{"role": "user", "content": f"When was tower {number} built?"}], "ground_truth": "1889"}
        for number in range(64)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    running = RunningTraining(
        folder / "out",
        "experiment=custom",
        f"model.path={save_calling_policy(folder / 'model', CALLS)}",
        f"data.train_files=[{folder}/train.parquet]",
        "data.chat_template=true",
        "data.max_prompt_tokens=128",
        f"total_steps={STEPS}",
        "evaluation.enabled=false",
        "algorithm.groups_per_step=4",
        "algorithm.samples_per_prompt=2",
        "buffer.max_lag=4",
        "rollout_fleet.groups_in_flight=8",
        "rollout_fleet.reward=environment",
        "rollout_fleet.save_progress=at_updates",
        "rollout_fleet.sampling.max_new_tokens=16",
        "rollout_fleet.sglang.max_total_tokens=32768",
        f"rollout_fleet.environment.name={folder}/agent.py:main",
        f"rollout_fleet.environment.options={{folder: {texts}}}",
        "rollout_fleet.environment.renderer.keep_reasoning=true",
        "learner.device=cpu",
        "learner.optimizer.lr=1e-3",
        "learner.keep_snapshots=-1",
        "record_trajectories=true",
        python_path=folder,
    )
    running.workers = []
    try:
        running.wait_for_line("step 1/", 400)
        for step, part in KILLS.items():
            running.wait_until(lambda step=step: running.num_steps >= step, f"step {step}", 400)
            running.workers.append(running.wait_for_process("ray::RolloutWorker"))
            pid = pids_of_agents(running)[-1] if part == AGENT_PROCESS else running.pid_at(part)
            os.kill(pid, signal.SIGKILL)
        assert running.finish(timeout_s=600) == 0, running.output
        yield running
    finally:
        running.end()


def begins(path, beginning):
    return path[: len(beginning)] == beginning


def agents_answers(run):
    """The answers that agents got."""
    return [json.loads(line) for line in (run.output_dir.parent / "answers.jsonl").read_text().splitlines()]


def pids_of_agents(run):
    """The process of each episode that has begun, in order."""
    return [int(line) for line in (run.output_dir.parent / "pids").read_text().split()]


@pytest.fixture(scope="module")
def answers(run):
    """All answers of SGLang."""
    return read_engine_log(run.output_dir.parent)


@pytest.fixture(scope="module")
def rows(run):
    """All trained branches."""
    return trained_samples(run)


def test_every_step_is_made_and_no_token_is_lost(run, rows):
    assert_every_step_is_made_and_no_version_goes_back(run, STEPS)
    assert_the_account_closes(run.summary)
    assert run.summary["tokens"]["trained"] == sum(sum(row["response_mask"]) for row in rows)
    groups = {row["group_id"] for row in rows}
    assert len(groups) == sum(run.summary["max_lag"]["histogram"].values()) == 4 * STEPS


def test_every_trained_id_is_one_that_sglang_was_sent_or_has_sampled_there(run, rows, answers):
    assert assert_trained_tokens_were_sampled(rows, answers) == run.summary["tokens"]["trained"]
    tokenizer = ChatTokenizer(str(run.output_dir.parent / "model"))
    turns = [answer.token_ids for answer in answers if answer.is_finished]
    unstable = [ids for ids in turns if tokenizer.encode(tokenizer.decode(ids)) != ids]
    assert len(unstable) > len(turns) / 4, "the text of an answer would be other tokens"


def test_every_trained_token_has_the_log_prob_that_its_version_gives_it(run, rows, capsys):
    assert len({version for row in rows for version in row["versions"]}) > STEPS / 2
    assert assert_trained_tokens_have_the_log_prob_of_their_version(run, every=3) > 200
    assert audit([str(run.run_dir), "--forward", "20"]) == 0, capsys.readouterr().out


def test_the_agent_branches_compacts_repeats_requests_and_gives_back_no_answer_in_other_tokens(run):
    happened = {name: sum(record.get(name, 0.0) for record in run.records) for name in WHAT_HAPPENED}
    assert happened.pop("episode.retokenised_tokens") == 0
    assert all(happened.values()), happened
    assert any(len(line["said"][1]) > 1 for line in agents_answers(run)), "calls in parallel"


def test_an_agent_that_begins_again_gets_the_answers_that_it_had(run):
    lives = defaultdict(lambda: defaultdict(list))
    for line in agents_answers(run):
        lives[line["group"], line["sample"]][line["life"], line["worker"]].append(line["said"])
    num_again = 0
    for of_episode in lives.values():
        for ((_, worker), before), after in zip(of_episode.items(), [*of_episode.values()][1:], strict=False):
            if worker != run.workers[2]:  # see the next test
                assert [*zip(before, after, strict=False)] == [*zip(before, before, strict=False)][: len(after)]
                num_again += len(before)
    assert num_again > 0


def test_turns_of_killed_parts_are_trained_token_for_token_after_the_replay(run, rows, answers):
    """An agent has got an answer if it asks further.

    A killed worker loses what it sampled since its last weight update, when it saved its progress.
    """
    assert run.workers[0] == run.workers[1], "the death of an agent's process costs the worker nothing"
    newest = max(version for answer in answers if answer.pid == run.workers[2] for version in answer.versions)
    trained, asked, num_again = defaultdict(list), defaultdict(list), Counter()
    for row in rows:
        trained[row["group_id"]].append(row)
    for answer in answers:
        asked[answer.names[:3]].append(answer)
    for (group, attempt, sample), of_attempt in asked.items():
        after = asked.get((group, attempt + 1, sample))
        if group not in trained or after is None:
            continue
        paths = [row["prompt_ids"] + row["response_ids"] for row in trained[group]]
        is_of_worker = of_attempt[0].pid == run.workers[2]
        cause = WORKER if is_of_worker else AGENT_PROCESS if after[0].pid == of_attempt[0].pid else ENGINE
        for answer in of_attempt:
            own = answer.path
            was_got = any(len(other.prompt_ids) > len(own) and begins(other.prompt_ids, own) for other in of_attempt)
            if answer.is_finished and was_got and not (is_of_worker and max(answer.versions) == newest):
                assert any(begins(path, own) for path in paths), (
                    f"lost by {cause}: {answer}; sampled later: {after}; trained: {trained[group]}"
                )
                num_again[cause] += 1
    assert len(num_again) == len(KILLS), num_again


def test_no_process_of_an_agent_outlives_the_run(run):
    assert not any(map(psutil.pid_exists, pids_of_agents(run)))
