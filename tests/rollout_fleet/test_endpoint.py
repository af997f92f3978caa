"""The endpoint with real clients (the openai package and plain HTTP) and scripted turns."""

import asyncio
import json
import logging

import aiohttp
import openai
import pytest
from pydantic import BaseModel

from asyncrl.core.errors import EpisodeEnded, RequestRefused
from rollout_fleet.episodes import Endpoint, load_renderer
from rollout_fleet.episodes.config import RendererConfig
from tests.support.chat_models import save_chat_model
from tests.support.scripted_turns import USER, Talk

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
DEEP_TOOL = {"type": "function", "function": {"name": "deep", "parameters": json.loads("[" * 300 + "]" * 300)}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
END = "<|im_end|>"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return load_renderer(
        save_chat_model(tmp_path_factory.mktemp("chat") / "qwen3"), RendererConfig(keep_reasoning=True)
    )


@pytest.fixture
async def endpoint():
    endpoint = Endpoint(keep_alive_s=0.05)
    await endpoint.start()
    yield endpoint
    await endpoint.close()


@pytest.fixture
async def talk(endpoint, renderer):
    """Yield a function that opens an episode with scripted turns and returns a pair: `Talk` and openai client."""
    clients = []

    def begin(*texts, **options):
        talk = Talk(renderer, *texts, **options)
        access = endpoint.open(talk.session)
        clients.append(openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key))
        talk.access = access
        return talk, clients[-1]

    yield begin
    for client in clients:
        await client.close()


async def post(access, path, body, **headers):
    headers = {"authorization": f"Bearer {access.api_key}", **headers}
    async with aiohttp.ClientSession() as http, http.post(access.base_url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.text()


async def until(condition):
    async with asyncio.timeout(10):
        for _ in iter(condition, True):
            await asyncio.sleep(0.01)


async def test_the_endpoint_answers_the_openai_client(talk):
    talking, client = talk("Warm." + END)
    answer = await client.chat.completions.create(model="policy", messages=[USER], logprobs=True, max_tokens=50)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.turn) == ("Warm.", "stop", 1)
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * answer.usage.completion_tokens
    assert "".join(entry.token for entry in choice.logprobs.content) == "Warm." + END
    assert answer.usage.prompt_tokens == len(talking.prompt.prompt_ids)
    assert (await client.models.list()).data[0].id == "policy"


async def test_a_token_that_is_only_a_part_of_a_character_has_no_bytes_in_the_answer(talk):
    _, client = talk("a€" + END)
    answer = await client.chat.completions.create(model="policy", messages=[USER], logprobs=True)
    assert [entry.bytes for entry in answer.choices[0].logprobs.content] == [[97], None, None, None, [*END.encode()]]


async def test_the_stream_helpers_of_openai_read_the_streams_of_the_endpoint(talk):
    talking, client = talk("<think>\nhm\n</think>\n\nSo:\n" + CALL + "\n" + CALL + END, tools=[TOOL])
    kinds = []
    async with client.chat.completions.stream(model="policy", messages=[USER], tools=[TOOL]) as stream:
        async for event in stream:
            kinds.append(event.type)
        answer = await stream.get_final_completion()
    message = answer.choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert {"content.delta", "content.done"} <= set(kinds)
    assert [call.function.parsed_arguments for call in message.tool_calls] == [{"city": "Rome"}] * 2
    assert answer.choices[0].finish_reason == "tool_calls"
    results = [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in message.tool_calls]
    talking.texts.append("21." + END)
    after = await client.chat.completions.create(
        model="policy", messages=[USER, message.model_dump(), *results], tools=[TOOL]
    )
    assert after.choices[0].message.content == "21."
    assert not talking.session.counts.branches
    talking.check()


async def test_the_endpoint_streams_text_logprobs_and_usage(talk):
    _, client = talk("Warm." + END, "Cold." + END)
    stream = await client.chat.completions.create(
        model="policy", messages=[USER], stream=True, n=2, logprobs=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Warm.", "Cold."]
    assert chunks[-1].usage.completion_tokens > 0
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop", "stop"]


async def test_the_openai_method_parse_reads_an_answer_that_follows_a_schema(talk):
    class Weather(BaseModel):
        city: str
        degrees: int

    talking, client = talk('{"city": "Rome", "degrees": 21}' + END)
    answer = await client.chat.completions.parse(model="policy", messages=[USER], response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="Rome", degrees=21)
    assert set(json.loads(talking.turns.samplings[0].json_schema)["properties"]) == {"city", "degrees"}


async def test_a_stream_sends_comments_until_its_turn_ends(talk):
    talking, _ = talk("Warm." + END)
    talking.turns.gate.clear()
    body = {"messages": [USER], "stream": True}
    answer = asyncio.create_task(post(talking.access, "/chat/completions", body))
    await asyncio.sleep(0.3)
    talking.turns.gate.set()
    status, text = await answer
    assert status == 200
    assert text.count(": the policy is sampling") >= 3
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": "hi"}, "messages must be a list, got str"),
        ({"messages": []}, "messages must hold at least one message"),
        ({"messages": [USER], "functions": [{}]}, "functions is not supported here; leave it out"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0] must be"),
        ({"messages": [USER], "tools": ["web"]}, "tools[0] must be an object, got 'web'"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls must be a list, got int"),
        ({"messages": [USER], "stream": True, "stream_options": [1]}, "stream_options must be an object, got [1]"),
        ({"messages": [USER], "top_logprobs": 5}, "top_logprobs must be 0, got 5"),
        ({"messages": [USER], "tools": [DEEP_TOOL]}, "the request must be JSON with at most 250 levels of objects"),
        ({"messages": [USER], "n": 0}, "n must be >= 1, got 0"),
        ({"messages": [USER], "n": "2"}, "n must be a whole number, got '2'"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"messages": [USER], "stop": [""]}, "stop must be a text or a list of texts"),
        ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format.type must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type must be"),
        ([], "the body of /v1/chat/completions must be a JSON object, got list"),
    ],
)
async def test_an_invalid_request_gets_a_400_error_that_names_the_problem(talk, endpoint, body, message):
    talking, _ = talk()
    status, text = await post(talking.access, "/chat/completions", body)
    assert status == 400
    assert json.loads(text)["error"]["message"].startswith(message)
    assert endpoint.counts.errors == {400: 1}


FUNCTION = {name: TOOL["function"][name] for name in ("name", "description", "parameters")}
ANTHROPIC_TOOL = {"name": "weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}


@pytest.mark.parametrize(
    ("path", "body", "overridden"),
    [
        ("/chat/completions", {"tools": [TOOL], "tool_choice": "required"}, ["tool_choice"]),
        (
            "/chat/completions",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
            ["tool_choice"],
        ),
        ("/chat/completions", {"tools": [TOOL], "parallel_tool_calls": False}, ["parallel_tool_calls"]),
        ("/chat/completions", {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}, []),
        ("/chat/completions", {"parallel_tool_calls": False}, []),
        ("/chat/completions", {"best_of": 3, "verbosity": "low"}, ["best_of", "verbosity"]),
        ("/chat/completions", {"best_of": 1, "verbosity": "medium"}, []),
        ("/chat/completions", {"tools": [TOOL, {"type": "web_search"}]}, ["hosted_tools"]),
        ("/responses", {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}, ["tool_choice"]),
        ("/responses", {"tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}]}, ["hosted_tools"]),
        (
            "/messages",
            {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            ["parallel_tool_calls", "tool_choice"],
        ),
        ("/messages", {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "none"}}, ["tool_choice"]),
        ("/messages", {"tools": [ANTHROPIC_TOOL, {"type": "bash_20250124", "name": "bash"}]}, ["hosted_tools"]),
    ],
)
async def test_a_tool_choice_that_cannot_be_enforced_is_ignored_and_counted(talk, path, body, overridden):
    tools = [{"type": "function", "function": FUNCTION}] if path != "/chat/completions" else body.get("tools", [])[:1]
    talking, _ = talk("Warm." + END, tools=tools)
    messages = {"input": [USER]} if path == "/responses" else {"messages": [USER]}
    status, text = await post(talking.access, path, {"model": "policy", **messages, **body})
    assert (status, "Warm." in text) == (200, True)
    assert sorted(talking.session.counts.overridden) == overridden
    assert not talking.session.counts.branches, "a tool choice must not begin a branch"


async def test_a_tool_choice_that_cannot_be_enforced_is_refused_if_the_run_refuses_other_options(talk):
    talking, _ = talk(refuses=True)
    for body, message in (
        ({"tool_choice": "required"}, "tool_choice must be auto, the run's value, got required"),
        ({"tools": [{"type": "web_search"}]}, "hosted_tools must be [], the run's value, got ['web_search']"),
    ):
        status, text = await post(talking.access, "/chat/completions", {"messages": [USER], "tools": [TOOL], **body})
        assert (status, json.loads(text)["error"]["message"].startswith(message)) == (400, True)


async def test_the_responses_api_splits_a_function_name_into_namespace_and_name(talk):
    whole = {"type": "function", "function": {**FUNCTION, "name": "city__weather"}}
    talking, _ = talk(CALL.replace("weather", "city__weather") + END, "21." + END, tools=[whole])
    space = {"type": "namespace", "name": "city", "description": "d", "tools": [{"type": "function", **FUNCTION}]}
    body = {"model": "policy", "tools": [space]}
    _, text = await post(talking.access, "/responses", {**body, "input": [USER]})
    (call,) = json.loads(text)["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "city", "weather")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    status, text = await post(talking.access, "/responses", {**body, "input": [USER, call, result]})
    assert (status, "21." in text) == (200, True)
    assert not talking.session.counts.branches
    talking.check()


async def test_the_endpoint_answers_the_requests_of_claude_code(talk):
    system, reminder = "You write programs.", {"role": "system", "content": "Skills: none."}
    prompt = [{"role": "system", "content": system}, USER, reminder]
    talking, _ = talk("Done." + END, prompt=prompt, tools=[{"type": "function", "function": FUNCTION}])
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "claude-opus",
        "max_tokens": 64000,
        "system": [{"type": "text", "text": system, **mark}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": USER["content"], **mark}]}, reminder],
        "tools": [{**ANTHROPIC_TOOL, **mark}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    status, text = await post(talking.access, "/messages?beta=true", {**body, "stream": True})
    assert (status, "Done." in text) == (200, True)
    assert not talking.session.counts.branches
    assert set(talking.session.counts.overridden) == {"max_tokens", "reasoning_effort"}
    del body["max_tokens"]
    status, text = await post(talking.access, "/messages/count_tokens?beta=true", body)
    assert (status, json.loads(text)) == (200, {"input_tokens": len(talking.prompt.prompt_ids)})
    status, text = await post(talking.access, "/messages/count_tokens", {**body, "system": None, "messages": []})
    assert (status, json.loads(text)["error"]["message"]) == (400, "messages must hold at least one message, got none")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/responses", {"input": "hi", "background": False, "top_logprobs": 0}),
        ("/chat/completions", {"messages": [USER], "functions": [], "web_search_options": None}),
    ],
)
async def test_an_unknown_field_with_an_off_value_is_accepted(talk, path, body):
    talking, _ = talk("Warm." + END)
    status, text = await post(talking.access, path, body)
    assert (status, "Warm." in text) == (200, True)


async def test_a_request_of_an_anthropic_thread_contains_only_the_new_messages(talk):
    texts = [CALL + END, "21." + END, "Yes." + END]
    talking, _ = talk(*texts, tools=[{"type": "function", "function": FUNCTION}])
    body = {"max_tokens": 99, "messages": [USER], "tools": [ANTHROPIC_TOOL], "thread": {"type": "create"}}
    _, text = await post(talking.access, "/messages", body)
    first = json.loads(text)
    result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": "21"}
    goes_on = {"type": "continue", "previous_message_id": first["id"]}
    body = {"max_tokens": 99, "messages": [{"role": "user", "content": [result]}], "thread": goes_on, "stream": True}
    _, text = await post(talking.access, "/messages", body)
    begun = next(json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: "))
    goes_on = {"type": "continue", "previous_message_id": begun["message"]["id"]}
    asked = {"max_tokens": 99, "messages": [{"role": "user", "content": "Sure?"}], "thread": goes_on}
    status, text = await post(talking.access, "/messages/count_tokens", asked)
    assert (status, json.loads(text)["input_tokens"] > len(talking.prompt.prompt_ids)) == (200, True)
    status, text = await post(talking.access, "/messages", asked)
    assert (status, json.loads(text)["content"]) == (200, [{"type": "text", "text": "Yes."}]), (
        "the answer must have the fields that clients check"
    )
    assert not talking.session.counts.branches
    talking.check()
    for wrong in ({**goes_on, "previous_message_id": "m"}, {"type": "continue"}, "continue"):
        status, text = await post(talking.access, "/messages", {**asked, "thread": wrong})
        assert (status, "set to the id of an earlier answer of a thread in this episode" in text) == (400, True)


async def test_the_anthropic_messages_api_accepts_a_json_schema(talk):
    talking, _ = talk("{}" + END)
    output = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    await post(talking.access, "/messages", {"max_tokens": 9, "messages": [USER], "output_config": output})
    assert [sampling.json_schema for sampling in talking.turns.samplings] == ['{"type": "object"}']


async def test_unknown_keys_and_keys_of_ended_episodes_are_refused_and_counted(talk, endpoint):
    talking, client = talk("Warm." + END)
    stranger = client.with_options(api_key="sk-stranger")
    with pytest.raises(openai.AuthenticationError, match="no running episode has this key"):
        await stranger.chat.completions.create(model="policy", messages=[USER])
    endpoint.close_session(talking.access.api_key)
    with pytest.raises(openai.APIStatusError, match="has ended") as caught:
        await client.chat.completions.create(model="policy", messages=[USER])
    assert caught.value.status_code == 410
    assert (endpoint.counts.unknown_keys, endpoint.counts.closed_keys) == (1, 1)
    assert not talking.turns.requests


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (EpisodeEnded("cut off"), 503, "episode_ended"),
        (RequestRefused("no schema here"), 400, "invalid_request_error"),
        (RuntimeError("broken"), 500, "server_error"),
    ],
)
async def test_a_failed_turn_has_an_http_status_and_the_client_does_not_retry(talk, error, status, kind, caplog):
    talking, client = talk()

    async def fail(*_):
        talking.turns.requests.append(None)
        await asyncio.sleep(0.2)
        raise error

    talking.turns.sample = fail
    with caplog.at_level(logging.CRITICAL), pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(model="policy", messages=[USER])
    assert (caught.value.status_code, caught.value.code, len(talking.turns.requests)) == (status, kind, 1)
    with pytest.raises(openai.APIError, match=str(error)):  # the status is 200: the answer began before the error
        async for _ in await client.chat.completions.create(model="policy", messages=[USER], stream=True):
            pass


async def test_an_overflow_has_the_error_code_context_length_exceeded(talk):
    _, client = talk("Warm." + END, max_turns=1)
    await client.chat.completions.create(model="policy", messages=[USER])
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="policy", messages=[USER])
    assert caught.value.code == "context_length_exceeded"


async def test_a_client_that_disconnects_and_repeats_its_request_gets_the_same_turn(talk, endpoint):
    talking, client = talk("Warm." + END, "Cold." + END)
    talking.turns.gate.clear()
    asked = asyncio.create_task(client.chat.completions.create(model="policy", messages=[USER]))
    await until(lambda: len(talking.turns.requests) == 1)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await asyncio.sleep(0.1)
    talking.turns.gate.set()
    await until(lambda: endpoint.counts.lost == 1)
    again = await client.chat.completions.create(model="policy", messages=[USER])
    assert (again.choices[0].message.content, len(talking.turns.requests)) == ("Warm.", 1)


async def test_all_retries_of_the_openai_client_get_the_same_turn(talk):
    _, client = talk("Warm." + END, "Cold." + END)
    turns = []
    for retries in "01":
        answer = await client.chat.completions.create(
            model="policy", messages=[USER], extra_headers={"x-stainless-retry-count": retries}
        )
        turns.append(answer.choices[0].turn)
    keyed = [
        await client.chat.completions.create(model="p", messages=[USER], extra_headers={"idempotency-key": "k"})
        for _ in range(2)
    ]
    assert turns == [1, 1]
    assert [answer.choices[0].turn for answer in keyed] == [2, 2]


async def test_the_completions_api_continues_a_text(talk):
    talking, client = talk("it is warm", "and so on")
    first = await client.completions.create(model="policy", prompt="say:", max_tokens=10, logprobs=1)
    assert first.choices[0].text == "it is warm"
    assert first.choices[0].logprobs.token_logprobs == [-0.5] * 10
    stream = await client.completions.create(model="policy", prompt="say:it is warm now", max_tokens=9, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "and so on"
    assert talking.session.counts.branches == {"new_root": 1}
    talking.check()


async def test_the_responses_api_runs_a_tool_loop(talk):
    function = {name: TOOL["function"][name] for name in ("name", "description", "parameters")}
    texts = ["So:\n" + CALL + END, "21." + END, "Yes." + END]
    talking, client = talk(*texts, tools=[{"type": "function", "function": function}])
    tool = {"type": "function", **function}
    first = await client.responses.create(model="policy", input=[USER], tools=[tool])
    call = next(item for item in first.output if item.type == "function_call")
    assert (first.output_text, json.loads(call.arguments)) == ("So:", {"city": "Rome"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    items = [USER, *(item.model_dump() for item in first.output), result]
    kinds = []
    async with client.responses.stream(model="policy", input=items, tools=[tool]) as stream:
        async for event in stream:
            kinds.append(event.type)
        second = await stream.get_final_response()
    assert second.output_text == "21."
    assert kinds[0] == "response.created"
    assert {"response.output_text.delta", "response.completed"} <= set(kinds)
    third = await client.responses.create(
        model="policy", input="And now?", tools=[tool], previous_response_id=second.id
    )
    assert third.output_text == "Yes."
    assert talking.session.counts.branches == {}, "each request must continue the conversation"
    talking.check()


async def test_a_continued_response_keeps_the_system_message_but_not_the_instructions(talk):
    system = {"role": "system", "content": "Be brief."}
    talking, client = talk("Warm." + END, "Yes." + END, "No." + END, prompt=[system, USER])
    first = await client.responses.create(model="policy", input=[system, USER])
    await client.responses.create(model="policy", input="And now?", previous_response_id=first.id)
    assert not talking.session.counts.branches
    talking, client = talk("Warm." + END, "Yes." + END, prompt=[system, USER])
    first = await client.responses.create(model="policy", input=[USER], instructions="Be brief.")
    await client.responses.create(model="policy", input="And?", previous_response_id=first.id, instructions="Be long.")
    text = talking.renderer.tokenizer.decode(talking.turns.requests[1][0].tolist())
    assert ("Be brief." in text, "Be long." in text) == (False, True)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_anthropic_message_names_the_stop_text_that_ended_it(talk, streams):
    talking, _ = talk("So: STOP")
    body = {"max_tokens": 99, "messages": [USER], "stop_sequences": ["never", "STOP"], "stream": streams}
    _, text = await post(talking.access, "/messages", body)
    assert '"stop_reason":"stop_sequence","stop_sequence":"STOP"' in text
    assert '"text":"So: "' in text


async def test_the_anthropic_messages_api_runs_a_tool_loop(talk, endpoint):
    texts = ["<think>\nhm\n</think>\n\n" + CALL + END, "21." + END]
    talking, _ = talk(*texts, tools=[{"type": "function", "function": FUNCTION}])
    body = {"model": "policy", "max_tokens": 99, "messages": [USER], "tools": [ANTHROPIC_TOOL]}
    status, text = await post(talking.access, "/messages", body)
    first = json.loads(text)
    assert (status, first["stop_reason"]) == (200, "tool_use")
    thought, call = first["content"]
    assert (thought["type"], call["input"]) == ("thinking", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "21"}]}
    messages = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    _, text = await post(talking.access, "/messages", {**body, "messages": messages, "stream": True})
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[2]["delta"]["text"] == "21."
    assert events[4]["delta"]["stop_reason"] == "end_turn"
    status, text = await post(talking.access, "/messages", {**body, "mcp_servers": [1]})
    assert (status, json.loads(text)["type"]) == (400, "error")
    assert not talking.session.counts.branches
    talking.check()


async def test_the_asyncrl_routes_sample_and_give_raw_tokens(talk):
    talking, _ = talk("ab", "cd")
    _, text = await post(talking.access, "/asyncrl/sample", {"parent": 0, "tokens": [5], "max_tokens": 2})
    first = json.loads(text)
    assert first["logprobs"] == [-0.5, -0.5]
    assert (first["versions"], first["finish_reason"]) == ([3, 3], "length")
    _, text = await post(talking.access, "/asyncrl/give", {"parent": first["turn"], "tokens": [9]})
    _, text = await post(talking.access, "/asyncrl/sample", {"parent": json.loads(text)["turn"], "tokens": []})
    path = talking.turns.episode.path(json.loads(text)["turn"]).tolist()
    assert path[: len(talking.prompt.prompt_ids)] == talking.prompt.prompt_ids.tolist()
    assert path[len(talking.prompt.prompt_ids) :][:4] == [5, *first["token_ids"], 9]
    status, text = await post(talking.access, "/asyncrl/sample", {"parent": 99, "tokens": [1]})
    assert (status, "turn 99" in text) == (400, True)


@pytest.mark.parametrize("tokens", [[5, 1.5], [5, None], [5, "5"], [[1, 2], [3, 4]], [5, -1], [5, 1 << 40]])
@pytest.mark.parametrize("path", ["/asyncrl/sample", "/asyncrl/give", "/completions"])
async def test_values_that_are_not_token_ids_are_refused(talk, path, tokens):
    talking, _ = talk()
    status, text = await post(
        talking.access, path, {"prompt": tokens} if path == "/completions" else {"parent": 0, "tokens": tokens}
    )
    assert (status, "list of token ids" in text) == (400, True)
    assert not talking.turns.requests


async def test_an_error_names_an_unknown_route(talk):
    talking, _ = talk()
    status, text = await post(talking.access, "/embeddings", {})
    assert (status, "there is no POST /v1/embeddings here" in text) == (404, True)


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_an_unmodified_agent_of_openai_agents_runs_its_tool_loop(talk, kind):
    agents = pytest.importorskip("agents", reason="openai-agents is not installed; it needs a newer openai")
    agents.set_tracing_disabled(True)
    _, client = talk(*[CALL + "\n" + CALL + END, "It is 21." + END] * 2)
    weather = agents.function_tool(lambda city: f"21 degrees in {city}", name_override="weather")
    model = getattr(agents, kind)(model="policy", openai_client=client)
    agent = agents.Agent(name="a", instructions="Be brief.", tools=[weather], model=model)
    assert (await agents.Runner.run(agent, "How warm?")).final_output == "It is 21."
    streamed = agents.Runner.run_streamed(agent, "How warm is it?")
    assert [event async for event in streamed.stream_events()]
    assert streamed.final_output == "It is 21."
