"""Environments in child processes: each episode has one outcome or one failure."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shlex
import signal
import sys
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from asyncrl.core.types import Prompt
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.episodes.config import EnvironmentConfig
from rollout_fleet.episodes.environment import EpisodeFailure, FailureKind, Outcome
from rollout_fleet.episodes.environment_processes import EnvironmentProcesses
from tests.support.policy_endpoint import PolicyEndpoint

AGENTS = '''
import asyncio, multiprocessing, os, subprocess, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
from rollout_fleet.episodes import EpisodeFailure, FailureKind, Outcome, ToolError

POOL = ThreadPoolExecutor(32)

class Talker:
    """An environment of two turns. The reward is the number of letters in the last answer."""
    replayable = False

    def __init__(self, rounds=2):
        self.rounds = rounds

    async def run(self, prompt, policy):
        messages = [dict(message) for message in prompt.messages]
        for _ in range(self.rounds):
            messages.append(await policy.chat(messages, max_tokens=5))
            messages.append({"role": "user", "content": messages[-1].text.lower() + "!"})
        return Outcome(reward=len(messages[-2]["content"]), turn_rewards={messages[-2].turn: 0.5},
                       metrics={"sample": policy.sample_index}, answer=messages[-2].text)

class Broken:
    run = None

class Silent:
    async def run(self, prompt, policy):
        pass

    def __init__(self):
        raise ValueError("no board")

class Raw:
    async def run(self, prompt, policy):
        first = await policy.sample(prompt.prompt_ids.tolist())
        second = await policy.sample(first.token_ids, parent=first.turn)
        return Outcome(reward=sum(second.token_ids), metrics={"turn": second.turn})

async def slow_tool():
    await asyncio.sleep(600)

async def main(prompt, policy, how="", path=""):
    how = prompt.extra.get("how", how)
    if how == "raise":
        raise KeyError("board")
    if how == "exit":
        sys.exit(3)
    if how == "exit in a task":
        await asyncio.create_task(exits())
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "stop in a thread":
        await asyncio.to_thread(next, iter(()))
    if how == "huge":
        return 10**400
    if how == "half a pair":
        return {"reward": 1.0, "metrics": {"tool_\\ud800": 1.0}, "answer": "a\\udfffb"}
    if how == "no answer":
        return {"reward": 1.0, "answer": None}
    ways = {
        "leak by fork": lambda: multiprocessing.get_context("fork").Process(target=leak, args=(path,)).start(),
        "leak by thread": lambda: threading.Thread(target=leak, args=(path,)).start(),
        "leak by executor": lambda: asyncio.get_running_loop().run_in_executor(None, leak, path),
        "leak by pool": lambda: POOL.submit(leak, path, function="sleep"),
    }
    if how in ways:
        ways[how]()
        while not os.path.exists(path):
            await asyncio.sleep(0.05)
        return 1.0
    if how == "leak by system":
        os.system("setsid sleep 602 & echo $! > " + path)
        return 1.0
    if how == "leak by spawn":
        pid = os.posix_spawn("/bin/sleep", ["sleep", "603"], os.environ, setsid=True)
        with open(path, "w") as file:
            file.write(str(pid))
        return 1.0
    if how == "crash with files":
        with open(path, "w") as file:
            file.write(tempfile.mkdtemp())
        os._exit(3)
    if how == "crash":
        os._exit(3)
    if how == "slow":
        await asyncio.sleep(1.0)
        return 2.0
    if how == "hang":
        await asyncio.sleep(600)
    if how == "hang in a tool":
        await policy.run_tool(slow_tool(), name="search")
    if how == "stubborn":
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
    if how == "fail at the end":
        try:
            await asyncio.sleep(600)
        finally:
            raise KeyError("board")
    if how == "block":
        time.sleep(600)
    if how == "hog":
        hoard = bytearray(os.urandom(1 << 20)) * 400
        await asyncio.sleep(600)
    if how == "leak":
        programs = [subprocess.Popen(["sleep", "600"], start_new_session=True).pid,
                    subprocess.Popen(["sh", "-c", "setsid sleep 601 & echo $! > " + path + ".inner"]).pid]
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        with open(path, "w") as file:
            file.write(" ".join(map(str, [*programs, pid])))
        asyncio.create_task(slow_tool())
        threading.Thread(target=time.sleep, args=(1,)).start()
        return 1.0
    if how == "use a pool":
        list(POOL.map(time.sleep, [0.1] * 32))
        return 1.0
    if how == "leak a thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        return 1.0
    if how == "wrong key":
        policy.api_key = "another"
    if how == "other":
        return {"reward": 1.0, "metrics": {"pid": os.getpid()}}
    if how == "nan":
        return float("nan")
    print("a line for the log")
    message = await policy.chat([{"role": "user", "content": "x"}])
    return 1.0

async def exits():
    sys.exit(4)

def leak(path, function="sleep"):
    program = subprocess.Popen([function, "604"], start_new_session=True)
    with open(path + ".partial", "w") as file:
        file.write(str(program.pid))
    os.rename(path + ".partial", path)
    program.wait()

async def with_client(prompt, base_url, api_key):
    from openai import AsyncOpenAI
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="policy", messages=list(prompt.messages))
    return {"answer": answer.choices[0].message.content, "reward": 1.0}

def in_a_thread(prompt, base_url, api_key):
    from openai import OpenAI
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = client.chat.completions.create(model="policy", messages=list(prompt.messages))
    return Outcome(answer=answer.choices[0].message.content)

async def secrets(prompt, policy):
    return Outcome(reward=float(os.environ.get("JUDGE_API_KEY") == "s3cret"), answer=os.environ["OMP_NUM_THREADS"])

async def needs_secret(prompt, policy):
    return os.environ["OTHER_API_KEY"]
'''


def prompt(how: str = "", group_id: int = 7) -> Prompt:
    ids = np.asarray([3, 4], dtype=np.int32)
    messages = ({"role": "user", "content": "hello"},)
    return Prompt(group_id=group_id, prompt_ids=ids, messages=messages, extra={"how": how} if how else {})


@pytest.fixture
def agents(tmp_path: Path) -> str:
    path = tmp_path / "agents.py"
    path.write_text(AGENTS)
    return str(path)


@asynccontextmanager
async def processes(name: str, *, pass_secrets: tuple[str, ...] = (), **options):
    config = RolloutFleetConfig(
        environment=EnvironmentConfig(name=name, **options), pass_secrets=list(pass_secrets), stop_timeout_s=2.0
    )
    environments = EnvironmentProcesses(config)
    await environments.start()
    try:
        yield environments
    finally:
        await environments.close()
    assert [p for p in psutil.Process().children() if "environment_child" in " ".join(p.cmdline())] == []


def assert_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, f"process {pid} has not ended"
                time.sleep(0.05)


async def test_an_environment_runs_in_a_child_process_and_calls_the_policy(agents):
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:Talker", options={"rounds": 3}) as environments:
        outcome = await environments.run(prompt(), endpoint.open(), sample=2)
        assert outcome == Outcome(reward=7.0, turn_rewards={3: 0.5}, metrics={"sample": 2.0}, answer="HELLO!!")
        assert [len(request["messages"]) for request in endpoint.requests] == [1, 3, 5]
        assert endpoint.requests[0]["max_tokens"] == 5
        assert await environments.is_replayable(f"{agents}:Talker") is False
        assert await environments.is_replayable(f"{agents}:main") is True


async def test_a_data_row_can_override_environment_options_or_choose_another_environment(agents):
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:Talker", options={"rounds": 3}) as environments:
        outcome = await environments.run(prompt(), endpoint.open(), sample=0, options={"rounds": 1})
        assert outcome.reward == 5.0
        with pytest.raises(EpisodeFailure, match=r"options must be the arguments of .*Raw\(\), got .*'rounds'"):
            await environments.run(prompt(), endpoint.open(), sample=0, name=f"{agents}:Raw", options={"rounds": 1})
        outcome = await environments.run(prompt(), endpoint.open(), sample=0, name=f"{agents}:Raw")
        assert outcome.metrics, "another environment must not get the run's options"


async def test_the_worker_gets_an_event_for_each_tool_call(agents):
    heard = []
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main", tool_timeout_s=0.1) as environments:
        with pytest.raises(EpisodeFailure, match="tool search"):
            await environments.run(
                prompt("hang in a tool"), endpoint.open(), sample=0, on_tool=lambda *call: heard.append(call)
            )
    assert heard == [(0, "search", True), (0, "search", False)]


async def test_temporary_files_of_a_crashed_process_are_removed(agents, tmp_path, monkeypatch):
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main") as environments:
        with pytest.raises(EpisodeFailure, match="exit status 3"):
            await environments.run(
                prompt("crash with files"), endpoint.open(), sample=0, options={"path": str(tmp_path / "folder")}
            )
    assert Path((tmp_path / "folder").read_text()).is_relative_to(scratch)
    assert [*scratch.iterdir()] == []


async def test_a_new_worker_removes_the_files_and_programs_of_a_killed_worker(agents, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, held = (tmp_path / f"asyncrl-child-{name}" for name in ("left", "held"))
    for folder in (left, held):
        (folder / "files").mkdir(parents=True)
    left_program, held_program = [
        await asyncio.create_subprocess_exec("sleep", "600", env={"ASYNCRL_CHILD": name}) for name in ("left", "held")
    ]
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        async with processes(f"{agents}:main"):
            assert (left.exists(), held.exists()) == (False, True)
            assert await asyncio.wait_for(left_program.wait(), 5) == -signal.SIGKILL
            assert held_program.returncode is None
    finally:
        os.close(lock)
        held_program.kill()
        await held_program.wait()


async def test_an_environment_samples_raw_tokens_after_a_turn(agents):
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:Raw") as environments:
        outcome = await environments.run(prompt(), endpoint.open(), sample=0)
    assert (outcome.reward, outcome.metrics) == (5 + 6, {"turn": 2.0})
    assert [request["parent"] for request in endpoint.requests] == [0, 1]


@pytest.mark.parametrize("function", ["with_client", "in_a_thread"])
async def test_a_function_with_an_unmodified_openai_client_works_as_an_environment(agents, function):
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:{function}") as environments:
        assert (await environments.run(prompt(), endpoint.open(), sample=0)).answer == "HELLO"


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raise", FailureKind.environment, r"raised KeyError\('board'\)"),
        ("exit", FailureKind.environment, r"called sys.exit\(3\)"),
        ("exit in a task", FailureKind.environment, r"called sys.exit\(4\)"),
        ("interrupt", FailureKind.environment, "raised KeyboardInterrupt"),
        ("stop in a thread", FailureKind.environment, "a call in a thread raised StopIteration"),
        ("crash", FailureKind.environment, "ended with exit status 3; an environment must not exit"),
        ("hang", FailureKind.environment, "episode_timeout_s = 2 s; make the environment faster"),
        ("stubborn", FailureKind.environment, "episode_timeout_s = 2 s"),
        ("hang in a tool", FailureKind.tool, "tool search did not answer within .*tool_timeout_s = 0.3 s"),
        ("block", FailureKind.environment, "blocked its event loop for longer than .*blocked_timeout_s = 1.5 s"),
        ("hog", FailureKind.environment, r"used \d\.\d GB .*memory_limit_gb = 0.3; raise"),
        ("wrong key", FailureKind.infrastructure, "answered 401 to /chat/completions: wrong key"),
        ("nan", FailureKind.reward, "returned 'nan' .*one finite number"),
        ("huge", FailureKind.reward, "too large to convert to float.*one finite number"),
    ],
)
async def test_a_failed_environment_fails_only_its_own_episode(agents, how, kind, words):
    limits = {
        "episode_timeout_s": 20.0 if how in ("block", "hog") else 2.0,
        "tool_timeout_s": 0.3,
        "blocked_timeout_s": 20.0 if how == "hog" else 1.5,
        "memory_limit_gb": 0.3,
    }
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main", **limits) as environments:
        with pytest.raises(EpisodeFailure, match=words) as failure:
            await environments.run(prompt(how), endpoint.open(), sample=0)
        assert failure.value.kind is kind
        assert (await environments.run(prompt(), endpoint.open(), sample=0)).reward == 1.0


async def test_leftover_processes_of_an_episode_are_ended_and_its_environment_process_is_reused(agents, tmp_path):
    path = tmp_path / "pids"
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main") as environments:
        pid = (await environments.run(prompt("other"), endpoint.open(), sample=0)).metrics["pid"]
        options = {"path": str(path), "how": "leak"}
        await environments.run(prompt(), endpoint.open(), sample=0, options=options)
        assert_ended([int(pid) for file in (path, Path(f"{path}.inner")) for pid in file.read_text().split()])
        assert environments.counts["leftovers"] >= 4
        assert (await environments.run(prompt("other"), endpoint.open(), sample=0)).metrics["pid"] == pid


@pytest.mark.parametrize("how", ["fork", "system", "spawn", "thread", "executor", "pool"])
async def test_all_programs_that_an_episode_started_are_ended(agents, tmp_path, how):
    path = tmp_path / "pid"
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main") as environments:
        await environments.run(prompt(f"leak by {how}"), endpoint.open(), sample=0, options={"path": str(path)})
        await asyncio.to_thread(assert_ended, [int(path.read_text())])


async def test_an_interrupt_in_one_episode_does_not_fail_another_episode(agents):
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main") as environments:
        other = asyncio.create_task(environments.run(prompt("slow"), endpoint.open(), sample=0))
        with pytest.raises(EpisodeFailure, match="raised KeyboardInterrupt"):
            await environments.run(prompt("interrupt"), endpoint.open(), sample=0)
        assert (await other).reward == 2.0


async def test_a_missing_answer_or_invalid_unicode_becomes_text(agents):
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main") as environments:
        outcome = await environments.run(prompt("half a pair"), endpoint.open(), sample=0)
        assert (outcome.metrics, outcome.answer) == ({"tool_?": 1.0}, "a?b")
        assert (await environments.run(prompt("no answer"), endpoint.open(), sample=0)).answer == ""


async def test_an_environment_process_with_too_many_leftover_threads_is_replaced(agents):
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main") as environments:
        pid = (await environments.run(prompt("other"), endpoint.open(), sample=0)).metrics["pid"]
        for _ in range(17):
            await environments.run(prompt("leak a thread"), endpoint.open(), sample=0)
        assert environments.counts["processes_retired"] == 1
        assert (await environments.run(prompt("other"), endpoint.open(), sample=0)).metrics["pid"] != pid
        await asyncio.to_thread(assert_ended, [int(pid)])


async def test_an_environment_process_with_an_idle_thread_pool_is_not_replaced(agents):
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main") as environments:
        for _ in range(2):
            await environments.run(prompt("use a pool"), endpoint.open(), sample=0)
        assert environments.counts["processes_retired"] == 0


@pytest.mark.parametrize("what", ["hang", "fail at the end"])
async def test_a_cancelled_episode_frees_its_slot_and_prints_no_traceback(agents, capfd, what):
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main", episodes_per_process=1) as environments:
        running = asyncio.create_task(environments.run(prompt(what), endpoint.open(), sample=0))
        await asyncio.sleep(0.5)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await environments.run(prompt(), endpoint.open(), sample=0)).reward == 1.0
    assert "Traceback" not in capfd.readouterr().err


async def test_an_environment_gets_only_the_secrets_in_pass_secrets_and_its_failure_names_the_option(
    agents, monkeypatch
):
    for name in ("JUDGE_API_KEY", "OTHER_API_KEY"):
        monkeypatch.setenv(name, "s3cret")
    environment = processes(f"{agents}:secrets", pass_secrets=("JUDGE_API_KEY",), threads=3)
    async with PolicyEndpoint() as endpoint, environment as environments:
        outcome = await environments.run(prompt(), endpoint.open(), sample=0)
        assert (outcome.reward, outcome.answer) == (1.0, "3")
        with pytest.raises(EpisodeFailure, match=r"environments get OTHER_API_KEY with .*pass_secrets=\[OTHER_API_KEY"):
            await environments.run(prompt(), endpoint.open(), sample=0, name=f"{agents}:needs_secret")


@pytest.mark.long
@pytest.mark.parametrize("excluded", ["", "example.org", "*"])
async def test_the_clients_of_an_agent_connect_to_the_endpoint_without_a_proxy(agents, monkeypatch, excluded):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", excluded)
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main") as environments:
        for function in ("with_client", "in_a_thread"):
            outcome = await environments.run(prompt(), endpoint.open(), sample=0, name=f"{agents}:{function}")
            assert outcome.answer == "HELLO"


async def test_any_client_reports_an_overflow_as_an_overflow_failure(agents):
    def overflows(body):
        return {"error": {"message": "episode 7-0-0 has used 4 of max_turns = 4", "code": "context_length_exceeded"}}

    async with PolicyEndpoint(overflows) as endpoint, processes(f"{agents}:main") as environments:
        for function in ("main", "with_client", "in_a_thread"):
            with pytest.raises(EpisodeFailure, match="has used 4 of max_turns = 4") as failure:
                await environments.run(prompt(), endpoint.open(), sample=0, name=f"{agents}:{function}")
            assert failure.value.kind is FailureKind.overflow


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", r"environment.name must be one of \[.*\], or file.py:function"),
        ("{}:Missing", "has no 'Missing'"),
        ("{}:Broken", r"Broken: the class must have a method run\(prompt, policy\)"),
        ("{}:Silent", r"raised ValueError\('no board'\)"),
        ("{}:slow_tool", r"slow_tool\(\) must take \(prompt, policy\) or \(prompt, base_url, api_key\)"),
    ],
)
async def test_a_worker_refuses_an_invalid_environment_at_the_start(agents, name, words):
    with pytest.raises(ValueError, match=words):
        async with processes(name.format(agents)):
            pass


async def test_an_error_names_the_option_of_a_python_that_does_not_exist(agents):
    with pytest.raises(ValueError, match=r"environment\.python must be .*, got '/no/py"):
        async with processes(f"{agents}:main", python="/no/python"):
            pass


async def test_each_episode_fails_until_its_environment_process_can_restart(agents, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o700)
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main", python=str(python)) as environments:
        whole = python.read_text()
        python.write_text("#!/bin/sh\nexit 7\n")
        with pytest.raises(EpisodeFailure, match="exit status 3"):
            await environments.run(prompt("crash"), endpoint.open(), sample=0)
        for _ in range(2):
            with pytest.raises(EpisodeFailure, match="exit status 7 before it was ready") as failure:
                await environments.run(prompt(), endpoint.open(), sample=0)
            assert failure.value.kind is FailureKind.infrastructure
        python.write_text(whole)
        assert (await environments.run(prompt(), endpoint.open(), sample=0)).reward == 1.0


async def test_running_episodes_fail_at_the_close_and_no_episode_begins_later(agents):
    async with PolicyEndpoint() as endpoint, processes(f"{agents}:main", episodes_per_process=1) as environments:
        runs = [asyncio.create_task(environments.run(prompt("hang"), endpoint.open(), sample=0)) for _ in range(2)]
        await asyncio.sleep(0.5)
        await environments.close()
        failures = await asyncio.gather(*runs, return_exceptions=True)
    assert [str(failure) for failure in failures] == [
        "the environment's process was stopped with its worker",
        "the rollout worker has closed its environments",
    ]


@pytest.mark.long
async def test_each_of_200_episodes_has_one_outcome_or_one_failure_and_leaves_no_processes(agents, tmp_path):
    """Six of each 20 episodes have a fault, for example a leak. Each of four other faults occurs in one episode."""
    kinds = ["hang in a tool", "leak", "wrong key", "cancel", "exit", "raise", *[""] * 14]
    limits = {"tool_timeout_s": 1.0, "blocked_timeout_s": 5.0, "memory_limit_gb": 0.4, "processes": 2}
    ended, failed, cancelled = [], [], []
    async with (
        PolicyEndpoint() as endpoint,
        processes(f"{agents}:main", episodes_per_process=32, episode_timeout_s=60.0, **limits) as environments,
    ):

        async def one(index: int) -> None:
            how = kinds[index % len(kinds)]
            how = {26: "crash", 66: "block", 106: "hog", 146: "stubborn"}.get(index, how)
            options = {"path": str(tmp_path / f"pids-{index}")}
            task = asyncio.create_task(
                environments.run(prompt("hang" if how == "cancel" else how), endpoint.open(), sample=0, options=options)
            )
            if how in ("cancel", "stubborn"):
                await asyncio.sleep(3.0)
                task.cancel()
            try:
                await task
                ended.append(index)
            except EpisodeFailure:
                failed.append(index)
            except asyncio.CancelledError:
                cancelled.append(index)

        await asyncio.gather(*map(one, range(200)))
    assert sorted(ended + failed + cancelled) == list(range(200))
    assert len(ended) >= 60
    left = [int(pid) for path in tmp_path.glob("pids-*") for pid in path.read_text().split()]
    assert left
    assert_ended(left)
    assert endpoint.refused >= 1
