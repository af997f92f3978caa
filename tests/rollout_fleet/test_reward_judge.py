import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.core.types import Prompt
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.reward_judge import KEY_VARIABLE, URL_VARIABLE
from rollout_fleet.reward_protocol import BoundReward
from rollout_fleet.rewards import Rollout, WeightedRewards

QUESTION = {"role": "user", "content": "6 times 7?"}


def prompt_of(**fields):
    return Prompt(group_id=7, prompt_ids=np.asarray([3], dtype=np.int32), ground_truth="42", **fields)


class ScriptedJudge:
    """A server for OpenAI's chat completions with scripted answers. It repeats the last answer for later requests."""

    def __init__(self, *script):
        self.script = list(script)
        self.requests = []

    async def answer(self, request):
        self.requests.append((await request.json(), request.headers.get("Authorization")))
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if callable(step):
            step = step(self.requests[-1][0]["messages"][0]["content"])
        if isinstance(step, int):
            return web.Response(status=step, text="over loaded", headers={"Retry-After": "0"})
        if isinstance(step, bytes):
            return web.Response(body=step)
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": step}}]})


@pytest.fixture
async def judge():
    servers = []

    async def make(*script):
        scripted = ScriptedJudge(*script)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", scripted.answer)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return scripted, {"url": str(server.make_url("/v1/")), "model": "grader"}

    yield make
    for server in servers:
        await server.close()


async def answers(options, texts, prompt=None, *, may_fail=True):
    bound = BoundReward("judge", options)
    rollouts = [Rollout.answer(text) for text in texts]
    prompt = prompt or prompt_of(messages=(QUESTION,))
    found = [one async for one in bound.answers(prompt, rollouts, may_fail=may_fail)]
    return [one if isinstance(one, str) else one.reward for one in found]


async def test_a_judge_gets_question_reference_and_answer_and_its_last_score_counts(judge):
    scripted, options = await judge("Score: 9 at first, but no.\nScore: **4**")
    assert await answers({**options, "options": {"temperature": 0.0}}, ["it is 42 {braces}"]) == [0.4]
    ((body, key),) = scripted.requests
    assert (body["model"], body["temperature"], key) == ("grader", 0.0, None)
    for part in ("user: 6 times 7?", "<reference>\n42", "it is 42 {braces}", "from 0 (wrong) to 10 (right)"):
        assert part in body["messages"][0]["content"]


async def test_a_judge_request_is_repeated_after_errors_and_after_answers_without_a_score(judge):
    scripted, options = await judge(429, 503, "no score", "Score: 11", "Score: 10")
    assert await answers(options, ["a"]) == [1.0]
    assert len(scripted.requests) == 5


@pytest.mark.parametrize(
    ("script", "words", "num_requests"),
    [
        (500, "ConnectionError('the judge at .* answered 500: over loaded", 3),
        (401, "answered 401", 1),
        ("nothing", "must give a score from 0 to 10, got 'nothing'", 3),
        (b"<html>log\xff in</html>", "must answer in JSON, got '<html>log\ufffd in</html>", 3),
        (b'data: {"choices": []}', "must answer in JSON, got", 3),
        (b"null", "answer has no message: null", 3),
        ([{"type": "text", "text": "Score: 5"}], "message must be a text, got", 3),
    ],
)
async def test_a_response_is_a_failure_if_the_judge_gives_no_score_after_all_retries(
    judge, script, words, num_requests
):
    scripted, options = await judge(script)
    (failure,) = await answers({**options, "retries": 2}, ["a"])
    assert words.split(".*")[-1].strip("\\") in failure
    assert len(scripted.requests) == num_requests


async def test_only_the_first_group_of_the_pattern_is_a_score_of_the_judge(judge):
    _, options = await judge("Grade: good")
    (failure,) = await answers({**options, "pattern": r"Score: (\d+)|Grade: (\w+)", "retries": 0}, ["a"])
    assert "must give a score from 0 to 10, got 'Grade: good'" in failure


async def test_responses_get_their_scores_even_if_the_judge_fails_for_another_response(judge):
    _, options = await judge(lambda request: 400 if "bad" in request.split("<answer>")[1] else "Score: 5")
    first, second, third = await answers(options, ["fine", "bad", "fine"])
    assert (first, third) == (0.5, 0.5)
    assert "answered 400" in second


async def test_a_judge_that_cannot_be_reached_is_a_failure(unused_tcp_port_of_loopback):
    url = f"http://127.0.0.1:{unused_tcp_port_of_loopback}/v1"
    (failure,) = await answers({"url": url, "model": "m", "retries": 0}, ["a"])
    assert "gave no answer: ClientConnectorError: Cannot connect to host 127.0.0.1" in failure


@pytest.fixture
def unused_tcp_port_of_loopback():
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def test_a_judge_key_must_be_in_an_environment_variable_of_pass_secrets(judge, monkeypatch):
    scripted, options = await judge("Score: 10")
    monkeypatch.setenv("GRADER_API_KEY", "s3cret")
    options = {"judge": {**options, "api_key": "GRADER_API_KEY"}}
    for passed in ([], ["GRADER_API_KEY"]):
        rewards = WeightedRewards(RolloutFleetConfig(reward="judge", reward_options=options, pass_secrets=passed))
        await rewards.start()
        try:
            scores = await rewards.score(prompt_of(messages=(QUESTION,)), ["a"], may_fail=True)
        finally:
            await rewards.close()
        assert np.isfinite(scores.total).tolist() == [bool(passed)]
    assert [key for _, key in scripted.requests] == ["Bearer s3cret"]


async def test_only_requests_to_a_judge_on_another_host_use_the_proxy(judge, monkeypatch):
    proxy, options = await judge("Score: 10")
    monkeypatch.setenv("http_proxy", options["url"].removesuffix("/v1/"))
    here, own = await judge("Score: 5")
    for options, expected in (({"url": "http://judge.example/v1", "model": "far"}, 1.0), (own, 0.5)):
        rewards = WeightedRewards(RolloutFleetConfig(reward="judge", reward_options={"judge": options}))
        await rewards.start()
        try:
            scores = await rewards.score(prompt_of(messages=(QUESTION,)), ["a"], may_fail=True)
        finally:
            await rewards.close()
        assert scores.total.tolist() == [expected]
    assert ([body["model"] for body, _ in proxy.requests], len(here.requests)) == (["far"], 1)


async def test_a_judge_template_can_use_data_columns_and_missing_columns_are_failures(judge):
    scripted, options = await judge("Score: 3")
    own = {**options, "template": "{extra[rubric]}: {response} {low} {high}", "low": 1, "high": 5}
    assert await answers(own, ["a"], prompt_of(extra={"rubric": "be kind"})) == [0.5]
    assert scripted.requests[0][0]["messages"][0]["content"] == "be kind: a 1 5"
    assert await answers(options, ["a"], prompt_of(extra={"question": "why?"})) == [0.3]
    (failure,) = await answers(options, ["a"], prompt_of())
    assert "name its column (question or prompt) in data.extra_keys" in failure
    (failure,) = await answers(own, ["a"], prompt_of())
    assert "KeyError('rubric'); name the column in data.extra_keys" in failure


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"template": "{answer}"}, r"reward judge: template may have the fields .* got KeyError\('answer'\)"),
        ({"template": "{"}, "reward judge: template may have the fields"),
        ({"pattern": "Score"}, "pattern must have a capture group for the score, got 'Score'"),
        ({"low": 5, "high": 5}, "low must be below high, got 5 and 5"),
        ({"pattern": "("}, r"reward judge: pattern must be a regular expression, got '\('"),
        ({"url": "localhost:8000/v1"}, "url must begin with http:// or https:// and a host, got 'localhost:8000/v1'"),
        ({"at_once": 0}, "at_once >= 1, got 4, 60.0 and 0"),
        ({"timeout_s": 0}, "timeout_s > 0 and at_once >= 1, got 4, 0 and 16"),
        ({"retries": -1}, "retries must be >= 0, .* got -1"),
        ({"temperature": 0}, r"reward_options.judge must fit the options \['url', 'model'"),
    ],
)
def test_an_error_names_an_invalid_option_of_a_judge(options, words):
    with pytest.raises(ValueError, match=words):
        BoundReward("judge", {"url": "http://localhost/v1", "model": "m", **options})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward": "judge"}, "either reward_options.judge.url .* or rollout_fleet.judge_model .* got none"),
        (
            {"reward": "judge", "judge_model": "m", "reward_options": {"judge": {"url": "http://x", "model": "m"}}},
            "got both; set one",
        ),
        ({"judge_model": "m"}, "judge_model must be empty without the reward judge, got 'm'; add judge"),
    ],
)
def test_a_judge_needs_an_external_server_or_a_server_of_the_run(fields, words):
    with pytest.raises(ValueError, match=words):
        RolloutFleetConfig(**fields)


async def test_a_judge_of_the_run_uses_the_url_and_the_key_from_the_worker(judge, monkeypatch):
    scripted, options = await judge("Score: 10")
    rewards = WeightedRewards(RolloutFleetConfig(reward="judge", judge_model="m"))
    await rewards.start({URL_VARIABLE: options["url"], KEY_VARIABLE: "k3y"})
    try:
        scores = await rewards.score(prompt_of(messages=(QUESTION,)), ["a"])
    finally:
        await rewards.close()
    assert scores.total.tolist() == [1.0]
    assert [key for _, key in scripted.requests] == ["Bearer k3y"]
    (failure,) = await answers({}, ["a"])
    assert "is served only during a run; set rollout_fleet.reward_options.judge.url" in failure
