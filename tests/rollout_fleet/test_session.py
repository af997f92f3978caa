"""Sessions find the messages of a request in the turn forest of an episode."""

import asyncio
import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from asyncrl.core.errors import EpisodeOverflow
from asyncrl.core.trajectory import ROOT
from rollout_fleet.config import SamplingConfig
from rollout_fleet.episodes import PROMPT
from rollout_fleet.episodes.config import RendererConfig
from rollout_fleet.episodes.messages import chain
from rollout_fleet.episodes.renderer import load_renderer
from rollout_fleet.episodes.session import ChatRequest, SampleOptions, Session, TextRequest
from tests.support.chat_models import CHATML, save_chat_model
from tests.support.scripted_turns import USER, Talk

MORE = {"role": "user", "content": "And in the city?"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Rome"}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    loaded = {}

    def load(style, **options):
        name = json.dumps([style, options])
        if name not in loaded:
            path = save_chat_model(folder / style, style)
            loaded[name] = load_renderer(path, RendererConfig(**options))
        return loaded[name]

    return load


async def test_a_session_continues_the_prompt_if_the_rendered_messages_equal_it(renderers):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>")
    (answer,) = await talk.chat(USER)
    assert answer.message == {"role": "assistant", "content": "Warm."}
    assert (answer.finish_reason, talk.turns.episode.turn(answer.turn).parent) == ("stop", 0)
    assert answer.num_reused_tokens == answer.num_prompt_tokens == len(talk.prompt.prompt_ids)
    assert not talk.session.counts.branches


async def test_a_session_starts_a_new_root_for_messages_that_are_not_the_prompt(renderers):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>")
    (answer,) = await talk.chat({"role": "system", "content": "Be brief."}, USER)
    context = talk.turns.episode.turn(answer.turn).parent
    assert talk.turns.episode.turn(context).parent == ROOT
    assert talk.session.counts.branches == {"new_root": 1}


def test_results_of_different_tool_calls_differ_even_if_two_calls_have_the_same_id():
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in "aab"]
    called = [{"role": "assistant", "content": "", "tool_calls": calls}]
    first, second = (chain([*called, {"role": "tool", "tool_call_id": name, "content": "21"}]) for name in "ab")
    assert first[0] == second[0]
    assert first[1] != second[1]


async def test_a_session_appends_only_the_tokens_of_new_messages(renderers):
    talk = Talk(renderers("chatml"), "it is warm<|im_end|>", "also<|im_end|>")
    (first,) = await talk.chat(USER)
    assert first.token_ids.tolist() != talk.renderer.tokenizer.encode("it is warm<|im_end|>"), "the tokens must differ"
    (second,) = await talk.chat(USER, first.message, MORE)
    context = talk.turns.episode.turn(talk.turns.episode.turn(second.turn).parent)
    assert context.parent == first.turn
    assert talk.renderer.tokenizer.decode(context.token_ids.tolist()) == (
        "\n<|im_start|>user\nAnd in the city?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not talk.session.counts.branches
    talk.check()


@pytest.mark.parametrize(
    "sent_back",
    [
        lambda m: {**m, "content": "", "refusal": None, "annotations": [], "audio": None, "function_call": None},
        lambda m: {**m, "content": [{"type": "text", "text": ""}]},
        lambda m: {**m, "tool_calls": [{**m["tool_calls"][0], "id": "mine", "index": 0}]},
        lambda m: {
            **m,
            "tool_calls": [
                {**m["tool_calls"][0], "function": {"name": "weather", "arguments": '{\n "city" :  "Rome" }'}}
            ],
        },
        lambda m: {
            **m,
            "tool_calls": [{**m["tool_calls"][0], "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
        },
        lambda m: {key: value for key, value in m.items() if key != "reasoning_content"},
        lambda m: {**m, "reasoning_content": None},
    ],
)
async def test_a_session_recognizes_its_answer_in_any_notation_of_a_client(renderers, sent_back):
    talk = Talk(renderers("qwen3"), "<think>\nhm\n</think>\n\n" + CALL, "<think>\n\n</think>\n\n21.<|im_end|>")
    (call,) = await talk.chat(USER, tools=[TOOL])
    assert call.finish_reason == "tool_calls"
    assert call.message["reasoning_content"].strip() == "hm"
    message = sent_back(call.message)
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21"}
    (answer,) = await talk.chat(USER, message, result, tools=[TOOL])
    episode = talk.turns.episode
    assert episode.turn(episode.turn(answer.turn).parent).parent == call.turn
    talk.check()


@pytest.mark.parametrize(
    ("edit", "cause", "is_given_back"),
    [
        (lambda ms: [ms[0], {**ms[1], "content": "Cold."}, ms[2]], "edited", False),
        (lambda ms: [ms[0], {**ms[1], "reasoning_content": "other"}, ms[2]], "edited", True),
        (lambda ms: [{"role": "user", "content": "A summary."}, ms[2]], "new_root", False),
        (lambda ms: [ms[0], {"role": "user", "content": "Be quick."}, ms[1], ms[2]], "edited", True),
    ],
)
async def test_a_session_counts_branches_by_their_cause_when_the_history_changes(renderers, edit, cause, is_given_back):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>", "Yes.<|im_end|>")
    (first,) = await talk.chat(USER)
    (second,) = await talk.chat(*edit([USER, first.message, MORE]))
    assert talk.session.counts.branches == {cause: 1}
    assert talk.session.counts.retokenised_tokens == (len(first.token_ids) if is_given_back else 0)
    above = talk.turns.episode.path(talk.turns.episode.turn(second.turn).parent)
    assert above.tolist() == talk.renderer.render([*edit([USER, first.message, MORE])], [])
    talk.check()


async def test_a_session_counts_the_tokens_of_each_answer_that_a_branch_renders_again(renderers):
    """A client edits a message after the first answer. This makes a branch, in which later answers are encoded again.

    The tokens of these answers are counted. The second and the third answer have equal texts but different tokens.
    """
    answers = ["Warm.<|im_end|>", "it is warm<|im_end|>", "it is warm<|im_end|>", "Yes.", "Yes."]
    talk = Talk(renderers("chatml"), *answers)
    messages = [USER]
    for _ in range(3):
        (answer,) = await talk.chat(*messages)
        messages += [answer.message, MORE]
    await talk.chat(*messages)
    assert talk.session.counts.retokenised_tokens == 0
    await talk.chat(*messages[:2], {"role": "user", "content": "And at night?"}, *messages[3:])
    assert talk.session.counts.retokenised_tokens == 2 * len(answer.token_ids) > 0
    assert talk.session.counts.branches == {"edited": 1}
    talk.check()


async def test_a_session_branches_when_the_tools_change(renderers):
    talk = Talk(renderers("qwen3"), CALL, "Yes.<|im_end|>")
    (call,) = await talk.chat(USER, tools=[TOOL])
    result = {"role": "tool", "tool_call_id": call.message["tool_calls"][0]["id"], "content": "21"}
    await talk.chat(USER, call.message, result, tools=[TOOL, TOOL])
    assert talk.session.counts.branches["tools"] == 1


async def test_a_session_branches_when_the_template_drops_the_reasoning(renderers):
    answers = ["<think>\nhm\n</think>\n\nWarm.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"]
    talk = Talk(renderers("qwen3"), *answers)
    (first,) = await talk.chat(USER)
    await talk.chat(USER, first.message, MORE)
    assert talk.session.counts.branches == {"template": 1}
    text = talk.renderer.tokenizer.decode(talk.turns.requests[1][0].tolist())
    assert "hm" not in text
    assert "Warm." in text
    kept = Talk(renderers("qwen3", keep_reasoning=True), *answers)
    (first,) = await kept.chat(USER)
    await kept.chat(USER, first.message, MORE)
    assert not kept.session.counts.branches
    kept.check()


@pytest.mark.parametrize("style", ["qwen3", "chatml", "llama", "glm", "plain"])
async def test_a_turn_without_an_end_token_gets_the_end_of_the_template(renderers, style):
    renderer = renderers(style, keep_reasoning=True)
    talk = Talk(renderer, "Warm and", "x" + renderer.tokenizer.decode([renderer.stop_ids[0]]), most=8)
    (first,) = await talk.chat(USER)
    assert (first.finish_reason, first.message["content"]) == ("length", "Warm and")
    await talk.chat(USER, first.message, MORE)
    assert not talk.session.counts.branches
    whole = renderer.tokenizer.decode(talk.turns.requests[1][0].tolist())
    plain = renderer.tokenizer.decode(renderer.render([USER, {"role": "assistant", "content": "Warm and"}, MORE], []))
    assert whole.partition("Warm and")[2] == plain.partition("Warm and")[2]
    talk.check()


async def test_a_stop_string_ends_a_turn_and_its_tokens_stay_in_the_turn(renderers):
    talk = Talk(renderers("chatml"), "Warm. STOP", "Yes.<|im_end|>")
    (first,) = await talk.chat(USER, stop=("STOP",))
    assert first.message["content"] == "Warm. "
    assert talk.renderer.tokenizer.decode(first.token_ids.tolist()) == "Warm. STOP"
    await talk.chat(USER, first.message, MORE)
    assert "Warm. STOP<|im_end|>\n<|im_start|>user" in talk.renderer.tokenizer.decode(
        talk.turns.requests[1][0].tolist()
    )
    talk.check()


async def test_an_answer_with_a_malformed_tool_call_can_be_continued(renderers):
    talk = Talk(renderers("qwen3", keep_reasoning=True), "<tool_call>\n{oops</tool_call><|im_end|>", "Sorry.<|im_end|>")
    (first,) = await talk.chat(USER, tools=[TOOL])
    assert "tool_calls" not in first.message
    assert "{oops" in first.message["content"]
    await talk.chat(USER, first.message, {"role": "user", "content": "Write JSON."}, tools=[TOOL])
    assert (talk.session.counts.malformed_calls, talk.session.counts.branches.get("edited")) == (1, None)
    talk.check()


async def test_a_repeated_request_gets_the_running_turn_of_the_first_request(renderers):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>")
    talk.turns.gate.clear()
    first, second = asyncio.create_task(talk.chat(USER)), asyncio.create_task(talk.chat(dict(USER)))
    await asyncio.sleep(0.01)
    talk.turns.gate.set()
    assert (await first)[0].turn == (await second)[0].turn
    assert (talk.session.counts.requests, talk.session.counts.repeated) == (1, 1)


async def test_an_equal_request_after_the_first_answer_gets_a_new_sample(renderers):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>", "Cold.<|im_end|>")
    (first,), (second,) = await talk.chat(USER), await talk.chat(USER)
    parents = {talk.turns.episode.turn(turn).parent for turn in (first.turn, second.turn)}
    assert first.turn != second.turn
    assert parents == {0}


async def test_a_retry_after_a_lost_answer_gets_the_same_turn(renderers):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>", "Cold.<|im_end|>")
    (first,) = await talk.chat(USER)
    talk.session.lose(ChatRequest(messages=(USER,)))
    assert (await talk.chat(USER))[0].turn == first.turn, "after a lost answer, the repeated request must get it"
    assert (await talk.chat(USER, is_retry=True))[0].turn == first.turn, "a retry must get the same answer"
    assert (await talk.chat(USER))[0].turn != first.turn, "a new request must get a new answer"


async def test_requests_with_the_same_idempotency_key_get_the_same_turn(renderers):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>", "Cold.<|im_end|>")
    (first,), (again,), (other,) = [(await talk.chat(USER, key=key)) for key in "aab"]
    assert first.turn == again.turn != other.turn
    with pytest.raises(ValueError, match=r"idempotency key 'a' was used .*; use a new key"):
        await talk.chat(MORE, key="a")


async def test_a_turn_continues_after_its_client_has_disconnected(renderers):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>")
    talk.turns.gate.clear()
    gone = asyncio.create_task(talk.chat(USER))
    await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    talk.session.lose(ChatRequest(messages=(USER,)))
    talk.turns.gate.set()
    assert (await talk.chat(USER))[0].message["content"] == "Warm."
    assert len(talk.turns.requests) == 1


async def test_n_answers_are_siblings_and_each_can_be_continued(renderers):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>", "Cold.<|im_end|>", "So.<|im_end|>", "No.<|im_end|>")
    answers = await talk.chat(USER, n=2, seed=5)
    assert [sampling.seed for sampling in talk.turns.samplings] == [5, 6]
    episode = talk.turns.episode
    for answer in answers:
        (after,) = await talk.chat(USER, answer.message, MORE)
        assert episode.turn(episode.turn(after.turn).parent).parent == answer.turn
    talk.check()


async def test_the_ids_of_tool_calls_distinguish_siblings_with_equal_texts(renderers):
    talk = Talk(renderers("qwen3"), CALL, CALL, "a<|im_end|>", "b<|im_end|>")
    answers = await talk.chat(USER, tools=[TOOL], n=2)
    for answer in answers:
        result = {"role": "tool", "tool_call_id": answer.message["tool_calls"][0]["id"], "content": "21"}
        (after,) = await talk.chat(USER, answer.message, result, tools=[TOOL])
        episode = talk.turns.episode
        assert episode.turn(episode.turn(after.turn).parent).parent == answer.turn


async def test_tool_call_ids_have_the_nine_characters_that_mistral_templates_need(tmp_path):
    check = """{%- if m.role == 'tool' and m.tool_call_id | length != 9 %}{{- raise_exception('not 9') }}{%- endif %}"""
    template = CHATML.replace("{%- for m in messages %}", "{%- for m in messages %}" + check)
    renderer = load_renderer(save_chat_model(tmp_path, "chatml", template=template), RendererConfig())
    assert renderer.append_only["results of two parallel calls"]
    talk = Talk(renderer, CALL.removesuffix("<|im_end|>") + CALL, "Warm.<|im_end|>")
    (call,) = await talk.chat(USER, tools=[TOOL])
    ids = [own["id"] for own in call.message["tool_calls"]]
    results = [{"role": "tool", "tool_call_id": own, "content": "21"} for own in ids]
    await talk.chat(USER, call.message, *results, tools=[TOOL])
    assert len(set(ids)) == 2
    assert all(own.isalnum() for own in ids)


KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "[EOS]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)


async def test_a_tool_call_has_the_id_that_the_policy_wrote_if_the_id_is_unique(tmp_path):
    """Kimi K2's policies write the ids of tool calls. The chat template writes the same id before the tool's result."""
    path = save_chat_model(tmp_path, "chatml")
    tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in KIMI])
    tokenizer.save(f"{path}/tokenizer.json")
    renderer = load_renderer(path, RendererConfig(name="kimi-k2"))
    call = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    sampled = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|><|im_end|>"
    talk = Talk(renderer, sampled, sampled, sampled)
    (first,) = await talk.chat(USER, tools=[TOOL])
    assert [own["id"] for own in first.message["tool_calls"]] == ["functions.weather:0"]
    result = {"role": "tool", "tool_call_id": "functions.weather:0", "content": "21"}
    (second,) = await talk.chat(USER, first.message, result, tools=[TOOL])
    episode = talk.turns.episode
    prompt = renderer.tokenizer.decode(episode.path(episode.turn(second.turn).parent).tolist())
    assert "## Return of functions.weather:0" in prompt
    (repeated,) = second.message["tool_calls"]
    assert repeated["id"] != "functions.weather:0", "two calls of a conversation must have different ids"
    (sibling,) = await talk.chat(USER, tools=[TOOL])
    assert sibling.message["tool_calls"][0]["id"] != "functions.weather:0", "two answers must have different call ids"


async def test_tool_calls_of_a_replayed_session_have_the_same_ids(tmp_path):
    """Some chat templates render the ids of tool calls, so a replay must use the same ids.

    The first attempt has a turn that is not saved. So later turns have other indices in the replay.
    """
    template = CHATML.replace("{{- '<|im_start|>' + m.role", "{{- '<|im_start|>' + m.role + (m.tool_call_id or '')")
    renderer = load_renderer(save_chat_model(tmp_path, "chatml", template=template), RendererConfig())

    async def play(talk):
        (call,) = await talk.chat(USER, tools=[TOOL])
        result = {"role": "tool", "tool_call_id": call.message["tool_calls"][0]["id"], "content": "21"}
        (answer,) = await talk.chat(USER, call.message, result, tools=[TOOL])
        return answer.message["content"]

    first = Talk(renderer, CALL, "Warm.<|im_end|>")
    first.session.give(PROMPT, [5])
    assert await play(first) == "Warm."
    again = Talk(renderer, "Cold.<|im_end|>", recorded=first.turns.episode.progress())
    assert await play(again) == "Warm."
    assert again.turns.episode.num_dropped == 0


async def test_sampling_options_that_training_cannot_use_are_overridden_and_counted(renderers, caplog):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>")
    await talk.chat(USER, max_tokens=4096, other={"temperature": 0.2, "top_p": 1.0, "presence_penalty": 0.5})
    assert talk.session.counts.overridden == {"temperature": 1, "presence_penalty": 1, "max_tokens": 1}
    assert talk.turns.samplings[0] == SamplingConfig(stop_token_ids=talk.renderer.stop_ids, max_new_tokens=512)
    assert "asks for temperature=0.2; its turns are sampled with the run's 1.0" in caplog.text


async def test_sampling_options_of_a_request_are_refused_if_the_run_refuses_them(renderers):
    talk = Talk(renderers("chatml"))
    session = Session(
        talk.turns, talk.renderer, sampling=SamplingConfig(temperature=0.7), prompt=talk.prompt, refuses=True
    )
    with pytest.raises(ValueError, match=r"temperature must be 0.7, the run's value, got 0.2"):
        await session.chat(ChatRequest(messages=[USER], options=SampleOptions(other={"temperature": 0.2})))


async def test_every_request_after_an_overflow_raises_the_overflow(renderers):
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>", max_turns=1)
    await talk.chat(USER)
    for _ in range(2):
        with pytest.raises(EpisodeOverflow, match="has used 1 of max_turns = 1"):
            await talk.chat(USER)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must hold at least one message"),
        (
            [{"role": "robot"}],
            r"messages\[0\].role must be one of system, developer, user, assistant, tool, got 'robot'",
        ),
        (
            [USER, {"role": "user", "content": [{"type": "video"}]}],
            r"messages\[1\].content\[0\].type must be one of",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], r"messages\[0\].tool_calls\[0\].function.name must be a string"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "function_call is not supported; use tool_calls"),
    ],
)
async def test_an_error_names_the_message_that_a_session_cannot_read(renderers, messages, message):
    with pytest.raises(ValueError, match=message):
        await Talk(renderers("chatml")).chat(*messages)


async def test_a_text_request_continues_the_tokens_of_an_earlier_text(renderers):
    talk = Talk(renderers("chatml"), "it is warm", "so it is")
    (first,) = await talk.session.complete(TextRequest(prompt="say:", options=SampleOptions(max_tokens=10)))
    (second,) = await talk.session.complete(TextRequest(prompt="say:it is warm; again:"))
    episode = talk.turns.episode
    assert episode.turn(episode.turn(second.turn).parent).parent == first.turn
    assert talk.session.counts.branches == {"new_root": 1}
    talk.check()


async def test_a_text_with_the_end_token_of_an_answer_continues_the_answer(renderers):
    """A client applies the chat template itself. It adds the end token, which is not in the text of the answer."""
    talk = Talk(renderers("chatml"), "Warm.<|im_end|>", "Yes.<|im_end|>")
    text = talk.renderer.tokenizer.decode(talk.prompt.prompt_ids.tolist())
    (first,) = await talk.session.complete(TextRequest(prompt=text))
    assert first.message["content"] == "Warm."
    longer = text + "Warm.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    await talk.session.complete(TextRequest(prompt=longer))
    prompt, turn = talk.turns.requests[1]
    assert talk.renderer.tokenizer.decode(prompt.tolist()) == longer
    episode = talk.turns.episode
    assert episode.turn(episode.turn(turn).parent).parent == first.turn
    talk.check()


async def test_a_text_is_continued_without_the_space_that_a_tokenizer_adds_at_the_start_of_a_text(tmp_path):
    path = save_chat_model(tmp_path, "chatml")
    letters = ["\n", "\u2581", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(BPE(vocab={letter: token for token, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    talk = Talk(load_renderer(path, RendererConfig()), "a", "b")
    for text in ("say:", "say:a, and so"):
        await talk.session.complete(TextRequest(prompt=text))
    assert talk.renderer.tokenizer.decode(talk.turns.requests[1][0].tolist()) == "say: a, and so"


async def test_an_equal_text_after_an_empty_answer_gets_a_new_sample(renderers):
    talk = Talk(renderers("chatml"), "<|im_end|>", "it is warm<|im_end|>")
    for _ in range(2):
        await talk.session.complete(TextRequest(prompt="say:"))
    (first, _), (second, _) = talk.turns.requests
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize(
    ("limit", "num_answers", "message"),
    [
        ({"max_turns": 3}, 10**9, r"1 of max_turns = 3, and has no room for 1000000000 answers: .* may use 999999999"),
        ({"max_tokens": 66}, 4, "used 6 of max_tokens = 66, and has no room for 4 answers: .* may use 60"),
        ({"max_tree_tokens": 97}, 3, "used 40 of max_tree_tokens = 97, and has no room for 3 answers"),
    ],
)
async def test_a_request_for_more_answers_than_the_budget_allows_samples_no_tokens(
    renderers, limit, num_answers, message
):
    talk = Talk(renderers("chatml"), *["Warm.<|im_end|>"] * 3, most=20, **limit)
    await talk.chat(USER)
    with pytest.raises(EpisodeOverflow, match=message):
        await talk.chat(USER, n=num_answers)
    assert len(talk.turns.requests) == 1
    assert len(await talk.chat(USER, n=2)) == 2


async def test_a_request_with_token_ids_for_several_answers_is_refused(renderers):
    talk = Talk(renderers("chatml"))
    with pytest.raises(ValueError, match="n must be 1 in a request with token ids, got 2"):
        await talk.session.sample(0, [5], SampleOptions(n=2))
    assert talk.turns.requests == []


async def test_a_session_samples_and_gives_raw_tokens_after_any_turn(renderers):
    talk = Talk(renderers("chatml"), "ab", "cd")
    answer = await talk.session.sample(0, [5, 6], SampleOptions(max_tokens=2))
    given = talk.session.give(answer.turn, [9])
    below = await talk.session.sample(given, [], SampleOptions(max_tokens=2))
    path = [*talk.prompt.prompt_ids.tolist(), 5, 6, *answer.token_ids.tolist(), 9, *below.token_ids.tolist()]
    assert talk.turns.episode.path(below.turn).tolist() == path
    with pytest.raises(ValueError, match="turn 99 was neither given nor sampled"):
        await talk.session.sample(99, [1], SampleOptions())


async def test_a_session_fails_if_the_prompt_of_a_turn_differs_from_the_request(renderers):
    talk = Talk(renderers("chatml"), "one<|im_end|>", "two<|im_end|>", "three<|im_end|>")
    sample = talk.turns.sample

    async def encoded_again(parent, new_tokens, sampling, images=()):
        return await sample(ROOT, [*talk.turns.episode.path(parent), *new_tokens], sampling, images)

    (first,) = await talk.chat(USER)
    talk.turns.sample = encoded_again
    with pytest.raises(AssertionError, match="is not turn 1 and the tokens"):
        await talk.chat(USER, first.message, MORE)

    async def other_tokens(parent, new_tokens, sampling, images=()):
        return await sample(parent, [*new_tokens[:-1], 5], sampling, images)

    talk.turns.sample = other_tokens
    with pytest.raises(AssertionError, match="is not turn 1 and the tokens"):
        await talk.chat(USER, first.message, MORE, key="another")


@pytest.mark.parametrize("style", ["chatml", "qwen3"])
@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("null", "{}"),
        (r'"{\"city\": \"Rome\"}"', '{"city": "Rome"}'),
        ('"Rome"', None),
        ("[1, 2]", None),
        ("5", None),
        ("true", None),
    ],
)
async def test_a_tool_call_whose_arguments_are_not_an_object_is_text(renderers, style, arguments, read):
    """The arguments of a tool call must be a JSON object that maps argument names to values."""
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    talk = Talk(renderers(style), text + "<|im_end|>")
    (answer,) = await talk.chat(USER, tools=[TOOL])
    calls = [call["function"]["arguments"] for call in answer.message.get("tool_calls", ())]
    assert (calls, talk.session.counts.malformed_calls) == (([], 1) if read is None else ([read], 0))
    assert read is not None or arguments in answer.message["content"]


NESTED = '{"name": "weather", "arguments": {"city": %s}}'


@pytest.mark.parametrize("style", ["chatml", "qwen3", "chatml/qwen3"])
@pytest.mark.parametrize(
    "arguments", ["[" * 3000, "[" * 3000 + "]" * 3000, "[" * 300 + "]" * 300, r'"\ud83d"', "9" * 5000]
)
async def test_a_tool_call_with_deep_or_invalid_arguments_is_text_and_the_session_continues(
    renderers, style, arguments
):
    text = f"<tool_call>\n{NESTED % arguments}\n</tool_call>"
    style, _, parser = style.partition("/")
    options = {"name": "template", "tool_parser": parser} if parser else {}
    talk = Talk(renderers(style, **options), text + "<|im_end|>", "Warm.<|im_end|>", most=8000)
    (first,) = await talk.chat(USER, tools=[TOOL])
    assert first.finish_reason == "stop"
    assert "tool_calls" not in first.message
    assert arguments in first.message["content"]
    assert talk.session.counts.malformed_calls == 1
    (second,) = await talk.chat(USER, first.message, MORE, tools=[TOOL])
    assert second.message["content"] == "Warm."
