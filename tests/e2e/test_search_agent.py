"""The search agent trains on SGLang. During its episodes, the test kills its process, engine and rollout worker.

The policy is random and calls tools by chance. If its sampled tokens are decoded to text and encoded again, the tokens
usually change. Some answers do not reach the agent, so the agent's unmodified client repeats the requests.
"""

import json
import os
import signal
from collections import defaultdict
from dataclasses import dataclass

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

STEPS = 16
AGENT_PROCESS, ENGINE, WORKER = "environment_child", "sglang::scheduler", "ray::RolloutWorker"
KILLED = (AGENT_PROCESS, ENGINE, WORKER)
"""The parts that the test kills, in this order. The test waits for two steps before each kill."""
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
        await asyncio.sleep(0.6)
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
        "rollout_fleet.groups_in_flight=4",
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
        for part in KILLED:
            step = running.num_steps + 2
            running.wait_until(lambda step=step: running.num_steps >= step, f"step {step}", 400)
            worker = worker_of_last_answer(folder)
            running.workers.append(worker)
            pid = {AGENT_PROCESS: pids_of_agents(running)[-1], WORKER: worker}.get(part) or running.pid_at(part)
            os.kill(pid, signal.SIGKILL)
            if part == ENGINE:
                running.wait_until(lambda old=worker: worker_of_last_answer(folder) != old, "another engine", 400)
        assert running.finish(timeout_s=600) == 0, running.output
        yield running
    finally:
        running.end()


def worker_of_last_answer(folder):
    """Return the process id of the rollout worker to which SGLang sent its latest answer."""
    return json.loads((folder / "engine.jsonl").read_text().splitlines()[-1])["pid"]


def begins(path, beginning):
    return path[: len(beginning)] == beginning


def agents_answers(run):
    """Return the answers that reached the agents."""
    return [json.loads(line) for line in (run.output_dir.parent / "answers.jsonl").read_text().splitlines()]


def pids_of_agents(run):
    """Return the process ids of the agents, in the order in which their episodes began."""
    return [int(line) for line in (run.output_dir.parent / "pids").read_text().split()]


@pytest.fixture(scope="module")
def answers(run):
    """Return all answers of SGLang."""
    return read_engine_log(run.output_dir.parent)


@pytest.fixture(scope="module")
def rows(run):
    """Return all trained branches."""
    return trained_samples(run)


def test_every_step_is_made_and_no_token_is_lost(run, rows):
    assert_every_step_is_made_and_no_version_goes_back(run, STEPS)
    assert_the_account_closes(run.summary)
    assert run.summary["tokens"]["trained"] == sum(sum(row["response_mask"]) for row in rows)
    groups = {row["group_id"] for row in rows}
    assert len(groups) == sum(run.summary["max_lag"]["histogram"].values()) == 4 * STEPS


def test_every_trained_token_was_sent_to_sglang_or_sampled_by_sglang(run, rows, answers):
    assert assert_trained_tokens_were_sampled(rows, answers) == run.summary["tokens"]["trained"]
    tokenizer = ChatTokenizer(str(run.output_dir.parent / "model"))
    turns = [answer.token_ids for answer in answers if answer.is_finished]
    unstable = [ids for ids in turns if tokenizer.encode(tokenizer.decode(ids)) != ids]
    assert len(unstable) > len(turns) / 4, "encoding an answer's text must give other tokens"


def test_every_trained_token_has_the_log_prob_of_its_version(run, rows, capsys):
    assert len({version for row in rows for version in row["versions"]}) > STEPS / 2
    assert assert_trained_tokens_have_the_log_prob_of_their_version(run, every=3) > 200
    assert audit([str(run.run_dir), "--forward", "20"]) == 0, capsys.readouterr().out


def test_the_agent_branches_compacts_repeats_requests_and_returns_unchanged_tokens(run):
    happened = {name: sum(record.get(name, 0.0) for record in run.records) for name in WHAT_HAPPENED}
    assert happened.pop("episode.retokenised_tokens") == 0
    assert all(happened.values()), happened
    assert any(len(line["said"][1]) > 1 for line in agents_answers(run)), "an answer must have calls in parallel"


@dataclass(frozen=True)
class Replay:
    """An episode that began again after the death of a process.

    Attributes:
        cause: The part that was killed.
        saved: The turns that the agent had received before the death. The agent has received a turn if it sent a
            further request. A killed worker loses the turns since the last weight update; ``saved`` excludes them.
        after: The tokens that SGLang sampled after the death.
        is_kept: Whether the learner trained exactly the tokens of each saved turn.
    """

    cause: str
    group: int
    sample: int
    saved: list
    after: list
    is_kept: list


@pytest.fixture(scope="module")
def replays(run, rows, answers):
    """Return the episodes that began again after the death of a process.

    The result excludes the group of an episode whose saved turns were all too old. The ledger counts the tokens of such
    turns as ``stale_prefix``.
    """
    trained, attempts = defaultdict(list), defaultdict(list)
    for row in rows:
        trained[row["group_id"]].append(row["prompt_ids"] + row["response_ids"])
    for answer in answers:
        attempts[answer.names[:3]].append(answer)
    killed = run.workers[2]
    newest = max(version for answer in answers if answer.pid == killed for version in answer.versions)
    replays = []
    for (group, attempt, sample), before in attempts.items():
        after, pid = attempts.get((group, attempt + 1, sample)), before[0].pid
        if group in trained and after is not None:
            cause = WORKER if pid == killed else AGENT_PROCESS if after[0].pid == pid else ENGINE
            saved = [
                answer
                for answer in before
                if answer.is_finished
                and any(begins(other.prompt_ids, answer.path) and other.prompt_ids != answer.path for other in before)
                and (cause != WORKER or max(answer.versions) < newest)
            ]
            is_kept = [any(begins(path, answer.path) for path in trained[group]) for answer in saved]
            replays.append(Replay(cause, group, sample, saved, after, is_kept))
    stale = [replay for replay in replays if replay.saved and not any(replay.is_kept)]
    num_stale = sum(len(answer.token_ids) for replay in stale for answer in replay.saved)
    assert num_stale <= run.summary["tokens"]["dropped_by_reason"].get("stale_prefix", 0), stale
    groups = {replay.group for replay in stale}
    return [replay for replay in replays if replay.group not in groups]


def test_turns_that_an_agent_received_before_a_kill_are_trained_token_for_token(run, replays):
    assert run.workers[0] == run.workers[1] != run.workers[2], "an agent's death must not end its worker"
    for replay in replays:
        assert all(replay.is_kept), replay
    assert {replay.cause for replay in replays if replay.saved} == {*KILLED}


def test_a_restarted_agent_gets_the_same_answers_again(run, replays):
    lives = defaultdict(lambda: defaultdict(list))
    for line in agents_answers(run):
        lives[line["group"], line["sample"]][line["life"], line["worker"]].append(line["said"])
    num_again = 0
    for replay in replays:
        of_episode = lives[replay.group, replay.sample]
        for ((_, worker), had), got in zip(of_episode.items(), [*of_episode.values()][1:], strict=False):
            if worker != run.workers[2]:
                assert got[: len(had)] == had[: len(got)], replay
                num_again += len(had)
    assert num_again > 0


def test_no_process_of_an_agent_outlives_the_run(run):
    assert not any(map(psutil.pid_exists, pids_of_agents(run)))
