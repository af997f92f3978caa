"""Renderers of chat templates in the styles of several families, with a small tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from renderers.base import ParsedToolCall
from tokenizers import AddedToken, Tokenizer

from rollout_fleet.episodes.chat_parsers import split_calls
from rollout_fleet.episodes.chat_tokenizer import ChatTokenizer
from rollout_fleet.episodes.config import RendererConfig
from rollout_fleet.episodes.renderer import load_renderer
from tests.support.chat_models import CHATML, TEMPLATES, save_chat_model

USER = {"role": "user", "content": "How warm is it?"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
REASONING_BRANCHES = {"a message after an answer with reasoning", "a message after tools and reasoning"}
ALL_KINDS = {
    *REASONING_BRANCHES,
    "a message after an answer",
    "a message after a system message and an answer",
    "a tool's result",
    "a tool's result after reasoning",
    "results of two parallel calls",
    "a message after tools",
}
AFTER_USER = {kind for kind in ALL_KINDS if kind.startswith("a message")}


def load(folder, style, *, template=None, **options):
    return load_renderer(save_chat_model(folder / style, style, template=template), RendererConfig(**options))


@pytest.mark.parametrize(
    ("style", "name", "branches"),
    [
        ("qwen3", "qwen3", AFTER_USER),
        ("chatml", "template", {*REASONING_BRANCHES, "a tool's result after reasoning"}),
        (
            "llama",
            "template",
            {*REASONING_BRANCHES, "a tool's result after reasoning", "results of two parallel calls"},
        ),
        ("glm", "template", REASONING_BRANCHES),
        ("deepseek", "template", ALL_KINDS),
        ("plain", "plain", set()),
    ],
)
def test_the_self_test_of_a_renderer_reports_which_histories_begin_a_branch(tmp_path, style, name, branches, caplog):
    renderer = load(tmp_path, style)
    assert renderer.name == name
    assert {kind for kind, appends in renderer.append_only.items() if not appends} == branches
    assert set(renderer.append_only) == ALL_KINDS
    for kind in branches:
        assert kind in caplog.text


@pytest.mark.parametrize("style", TEMPLATES)
def test_a_renderer_that_keeps_reasoning_begins_no_branch_in_its_self_test(tmp_path, style):
    renderer = load(tmp_path, style, keep_reasoning=True)
    verdicts = renderer.self_test()
    assert all("branches" not in verdict for verdict in verdicts.values())


def test_a_library_renderer_is_used_only_if_its_output_equals_the_template(tmp_path):
    assert load(tmp_path / "a", "qwen3").name == "qwen3"
    other = TEMPLATES["qwen3"].replace("You may call one or more functions", "You may call functions")
    assert load(tmp_path / "b", "qwen3", template=other).name == "template"
    assert load(tmp_path / "c", "qwen3", template=CHATML).name == "template"
    assert load(tmp_path / "d", "qwen3", template=other, name="qwen3").name == "qwen3", "a configured name has priority"
    assert load(tmp_path / "e", "qwen3", name="template").name == "template"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "qwen33"}, r"renderer.name must be auto, template or one of .*, got 'qwen33'"),
        ({"name": "llama-3"}, r"renderer.name=llama-3 does not fit"),
        ({"name": "template", "tool_parser": "xml"}, r"tool_parser must be one of json, .*, got 'xml'"),
    ],
)
def test_an_error_names_an_unknown_renderer_or_tool_parser(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, "chatml", **options)


def test_a_template_that_concatenates_call_arguments_gets_them_as_text(tmp_path):
    """DeepSeek's templates need the arguments of a call as text. Most other templates need them as an object."""
    call = """'{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}'"""
    renderer = load(tmp_path, "chatml", template=CHATML.replace("call.function | tojson", call))
    assert not any("refused" in verdict for verdict in renderer.self_test().values())
    called = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom\u00e9"}'}}
    answer = {"role": "assistant", "content": "", "tool_calls": [called]}
    parsed = renderer.parse([], renderer.close([USER], answer, [TOOL]), [TOOL])
    assert parsed.calls == (("weather", {"city": "Rom\u00e9"}, ""),)


def test_a_conversation_whose_template_appends_a_final_token_can_be_continued(tmp_path):
    """Phi's templates write an additional token after the last message of a finished conversation."""
    renderer = load(tmp_path, "chatml", template=CHATML + "{{- eos_token if not add_generation_prompt }}")
    assert renderer.append_only["a message after an answer"]
    answer = {"role": "assistant", "content": "21"}
    prompt, sampled = renderer.render([USER], []), renderer.tokenizer.encode("21")
    suffix = renderer.extend(prompt, sampled, [USER, answer], [USER], [])
    assert [*prompt, *sampled, *suffix] == renderer.render([USER, answer, USER], [])


def test_a_model_without_a_template_needs_tokens_for_the_role_markers(tmp_path):
    path = tmp_path / "plain"
    save_chat_model(path, "plain")
    stored = json.loads((path / "tokenizer.json").read_text())
    words = {"<unk>": 0, "1": 1, "<|endoftext|>": 2}
    stored |= {"model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}, "added_tokens": []}
    (path / "tokenizer.json").write_text(json.dumps(stored))
    settings = {"eos_token": "<|endoftext|>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"no tokens for <\|system\|> of the plain template; add a chat_template"):
        load_renderer(str(path), RendererConfig())
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json must be .* tokenizers library"):
        load_renderer(str(path), RendererConfig())


@pytest.mark.parametrize("style", ["qwen3", "chatml", "glm", "plain"])
def test_a_tool_call_is_read_back_as_it_was_rendered(tmp_path, style):
    renderer = load(tmp_path, style)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}}
    answer = {"role": "assistant", "content": "I ask.", "tool_calls": [call, call]}
    prompt = renderer.render([USER], [TOOL])
    parsed = renderer.parse(prompt, renderer.close([USER], answer, [TOOL]), [TOOL])
    assert parsed.calls == (("weather", {"city": "Rome", "days": 2}, ""),) * 2
    assert (parsed.content.strip(), parsed.num_malformed) == ("I ask.", 0)


def test_a_text_argument_of_a_call_in_xml_is_read_as_text(tmp_path):
    renderer = load(tmp_path, "chatml", tool_parser="qwen3.5")
    arguments = "<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>"
    call = f"<tool_call>\n<function=weather>\n{arguments}\n</function>\n</tool_call><|im_end|>"
    parsed = renderer.parse(renderer.render([USER], [TOOL]), renderer.tokenizer.encode(call), [TOOL])
    assert (parsed.calls, parsed.num_malformed) == ((("weather", {"city": "Rome", "days": 2}, ""),), 0)


def test_a_warning_names_a_template_whose_tool_calls_the_parser_cannot_read(tmp_path, caplog):
    written = "'<invoke=' + call.function.name + '></invoke>'"
    template = CHATML.replace("call.function | tojson", written)
    load(tmp_path, "chatml", template=template)
    assert "does not read tool calls in the form in which the chat template of" in caplog.text
    caplog.clear()
    for style in ("qwen3", "plain"):
        assert load(tmp_path / "read", style).reads_calls, style
    assert "does not read tool calls" not in caplog.text


def test_a_renderer_finds_the_parser_for_the_tool_calls_of_its_template(tmp_path):
    """The template writes tool calls in the format of Qwen3.5. The package `renderers` does not know this template."""
    parameters = "{%- for name in call.function.arguments %}{{- '<parameter=' + name + '>\n' }}"
    parameters += "{{- call.function.arguments[name] + '\n</parameter>\n' }}{%- endfor %}"
    begun = "'\n<function=' + call.function.name + '>\n' }}" + parameters + "{{- '</function>\n'"
    renderer = load(tmp_path, "chatml", template=CHATML.replace("call.function | tojson", begun))
    assert (renderer.name, renderer.reads_calls) == ("template", True)
    sampled = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    parsed = renderer.parse(renderer.render([USER], [TOOL]), renderer.tokenizer.encode(sampled + "<|im_end|>"), [TOOL])
    assert parsed.calls == (("weather", {"city": "Oslo"}, ""),)


def test_a_parser_of_sglang_is_used_if_no_other_parser_reads_the_tool_calls(tmp_path):
    pytest.importorskip("sglang")
    renderer = load(tmp_path, "llama")
    assert renderer.reads_calls
    sampled = renderer.tokenizer.encode('{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>')
    assert renderer.parse([], sampled, [TOOL]).calls == (("weather", {"city": "Oslo"}, ""),)


def test_the_ids_that_a_policy_of_mistral_writes_are_read(tmp_path):
    pytest.importorskip("sglang")
    renderer = load(tmp_path, "chatml", tool_parser="sglang:mistral")
    calls = [{"name": "weather", "arguments": {"id": "c"}, "id": own} for own in ("abcdefgh1", "abcdefgh2", "short")]
    sampled = renderer.tokenizer.encode(f"[TOOL_CALLS] {json.dumps(calls)}<|im_end|>")
    parsed = renderer.parse([], sampled, [TOOL])
    assert [(call.name, call.id) for call in parsed.calls] == [
        ("weather", "abcdefgh1"),
        ("weather", "abcdefgh2"),
        ("weather", ""),
    ]


def test_a_library_renderer_must_also_match_a_template_that_concatenates_arguments(tmp_path):
    joined = TEMPLATES["qwen3"].replace("call.function.arguments | tojson", "call.function.arguments")
    assert load(tmp_path / "same", "qwen3", template=joined).name == "qwen3"
    other = joined.replace("{{- '}\\n</tool_call>' }}", "{{- '}</tool_call>' }}")
    assert other != joined
    assert load(tmp_path / "other", "qwen3", template=other).name == "template"


def test_text_after_a_tool_call_is_read(tmp_path):
    renderer = load(tmp_path, "chatml")
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    sampled = renderer.tokenizer.encode(f"I ask.\n{call}\n{call}\nAnd wait.<|im_end|>")
    parsed = renderer.parse(renderer.render([USER], [TOOL]), sampled, [TOOL])
    assert (parsed.content, len(parsed.calls)) == ("I ask.\nAnd wait.", 2)


def test_a_turn_ends_at_every_end_token_of_the_model(tmp_path):
    """Llama 3 ends an answer that calls a tool with `<|eom_id|>`. Only generation_config.json names this token."""
    path = save_chat_model(tmp_path, "llama")
    tokenizer = Tokenizer.from_file(f"{path}/tokenizer.json")
    tokenizer.add_special_tokens([AddedToken("<|eom_id|>", special=True)])
    tokenizer.save(f"{path}/tokenizer.json")
    ends = [tokenizer.token_to_id(token) for token in ("<|eot_id|>", "<|eom_id|>")]
    Path(path, "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    renderer = load_renderer(path, RendererConfig())
    assert {*ends} <= {*renderer.stop_ids}
    prompt, sampled = renderer.render([USER], []), renderer.tokenizer.encode("21<|eom_id|>")
    suffix = renderer.extend(prompt, sampled, [USER, {"role": "assistant", "content": "21"}], [USER], [])
    assert renderer.tokenizer.decode(suffix).startswith("<|start_header_id|>user")


def test_a_tool_call_whose_name_is_not_a_string_is_malformed():
    calls = [ParsedToolCall(raw=str(name), name=name, arguments={}) for name in (5, {"a": 1}, "", None, "weather")]
    assert split_calls(calls) == ([("weather", {}, "")], ["5", "{'a': 1}", "", "None"])


def test_the_gpt_oss_vocabulary_is_downloaded_only_for_a_model_with_channels(tmp_path, monkeypatch, caplog):
    asked = []

    def download(name):
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", download)
    load(tmp_path / "a", "chatml")
    assert asked == []
    path = save_chat_model(tmp_path / "b" / "chatml", "chatml")
    stored = json.loads(Path(path, "tokenizer.json").read_text())
    marker = {"id": len(stored["model"]["vocab"]) + 99, "content": "<|channel|>", "special": True}
    stored["added_tokens"].append(dict(stored["added_tokens"][0]) | marker)
    Path(path, "tokenizer.json").write_text(json.dumps(stored))
    assert load_renderer(path, RendererConfig()).name == "template"
    assert len(asked) == 1
    assert "renderer gpt-oss cannot be used: OSError('no network')" in caplog.text


@pytest.mark.parametrize("style", ["qwen3", "chatml"])
def test_a_tool_call_that_cannot_be_read_stays_in_the_content(tmp_path, style):
    renderer = load(tmp_path, style)
    sampled = renderer.tokenizer.encode("Hm.<tool_call>{oops}</tool_call><|im_end|>")
    parsed = renderer.parse(renderer.render([USER], [TOOL]), sampled, [TOOL])
    assert (parsed.calls, parsed.num_malformed) == ((), 1)
    assert "Hm." in parsed.content
    assert "{oops}" in parsed.content


def test_reasoning_that_the_prompt_begins_or_that_has_no_end_is_read(tmp_path):
    renderer = load(tmp_path, "deepseek")
    prompt = renderer.render([USER], [])
    ended = renderer.parse(prompt, renderer.tokenizer.encode("it is warm</think>So.<|endoftext|>"), [])
    assert (ended.reasoning.strip(), ended.content) == ("it is warm", "So.")
    unended = renderer.parse(prompt, renderer.tokenizer.encode("it is warm"), [])
    assert (unended.reasoning.strip(), unended.content) == ("it is warm", "")


def test_a_turn_that_ended_with_the_wrong_role_marker_is_not_continued(tmp_path):
    renderer = load(tmp_path, "glm")
    encode = renderer.tokenizer.encode
    history = [USER, {"role": "assistant", "content": "21"}]
    prompt = renderer.render([USER], [])
    for marker, continues in (("<|user|>", True), ("<|observation|>", False)):
        suffix = renderer.extend(prompt, encode("<think></think>\n21" + marker), history, [USER], [])
        assert (suffix is not None) == continues


def test_a_template_that_renders_the_last_message_differently_is_not_append_only(tmp_path):
    moving = CHATML.replace("{{- '<|im_start|>' +", "{{- 'last: ' if loop.last }}{{- '<|im_start|>' +")
    renderer = load(tmp_path, "chatml", template=moving)
    assert not renderer.append_only["a message after an answer"]


@pytest.mark.parametrize("style", ["chatml", "llama", "glm", "plain"])
@pytest.mark.parametrize(("more", "num_short"), [("", 0), (" ", 2)], ids=["as-the-template", "with-a-space"])
def test_a_reused_renderer_appends_the_same_tokens_as_a_new_one_and_renders_less(tmp_path, style, more, num_short):
    renderer, new = (load(tmp_path / name, style, name="template") for name in ("one", "other"))
    rendered, render = [], renderer.tokenizer.render

    def counted(messages, **options):
        rendered.append(len(messages))
        return render(messages, **options)

    renderer.tokenizer.render = counted
    messages, prompt = [USER], renderer.render([USER], [])
    sampled = renderer.close([USER], {"role": "assistant", "content": "21"}, [])
    if more:
        own = renderer.without_stop(sampled)
        sampled = [*own, *renderer.tokenizer.encode(more), *sampled[len(own) :]]
    for _ in range(4):
        messages.append({"role": "assistant", "content": "21"})
        rendered.clear()
        suffix = renderer.extend(prompt, sampled, messages, [USER], [])
        assert suffix == new.extend(prompt, sampled, messages, [USER], [])
        assert rendered == [len(messages) + 1, 2, 3][: 1 + num_short], "only one whole conversation may be rendered"
        messages.append(USER)
        prompt = [*prompt, *sampled, *suffix]


def test_a_prompt_is_not_continued_if_the_template_changes_an_earlier_message(tmp_path):
    moving = CHATML.replace("{{- '<|im_start|>' +", "{{- 'long: ' if messages | length > 4 }}{{- '<|im_start|>' +")
    renderer = load(tmp_path, "chatml", template=moving)
    answer = {"role": "assistant", "content": "21"}
    prompt, sampled = renderer.render([USER], []), renderer.tokenizer.encode("21<|im_end|>")
    suffix = renderer.extend(prompt, sampled, [USER, answer], [USER], [])
    assert suffix is not None
    history = [USER, answer, USER, answer]
    assert renderer.extend([*prompt, *sampled, *suffix], sampled, history, [USER], []) is None


def test_tool_parsers_of_sglang_are_found_by_name(tmp_path):
    pytest.importorskip("sglang")
    renderer = load(tmp_path, "chatml", tool_parser="sglang:pythonic")
    sampled = renderer.tokenizer.encode('[weather(city="Rome")]<|im_end|>')
    parsed = renderer.parse(renderer.render([USER], [TOOL]), sampled, [TOOL])
    assert parsed.calls == (("weather", {"city": "Rome"}, ""),)
    with pytest.raises(ValueError, match="SGLang has no tool parser 'klingon'"):
        load(tmp_path / "other", "chatml", tool_parser="sglang:klingon")


def test_the_tokenizer_encodes_and_renders_like_the_transformers_tokenizer(tmp_path):
    from transformers import PreTrainedTokenizerFast

    path = save_chat_model(tmp_path / "qwen3")
    theirs, own = PreTrainedTokenizerFast.from_pretrained(path), ChatTokenizer(path)
    messages = [{"role": "system", "content": "Be brief."}, USER]
    text = own.render(messages, tools=[TOOL], add_generation_prompt=True)
    assert text == theirs.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert own.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert own.decode(own.encode(text)) == theirs.decode(own.encode(text)) == text
    assert (own.eos_token_id, own.convert_tokens_to_ids("<think>")) == (
        theirs.eos_token_id,
        theirs.convert_tokens_to_ids("<think>"),
    )


def test_a_renderer_loads_neither_torch_nor_the_models_of_transformers(tmp_path):
    path = save_chat_model(tmp_path / "qwen3")
    code = f"""
import sys
from rollout_fleet.episodes.config import RendererConfig
from rollout_fleet.episodes.renderer import load_renderer
renderer = load_renderer({path!r}, RendererConfig())
renderer.parse(renderer.render([{USER!r}], []), renderer.tokenizer.encode("x"), [])
print(sorted({{"torch", "transformers.modeling_utils", "sglang"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
