"""Chat messages, tools and environments in the columns of parquet and jsonl files."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.data import DataConfig, PromptStream, load_eval_prompts
from buffer.encoding import prompt_frames, prompt_of


def tool(name, **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "12"}}
CONVERSATION = [
    {"role": "user", "content": "3"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "c1"},
]
WITHOUT_NULL = ({"role": "user", "content": "3"}, {"role": "assistant", "tool_calls": [CALL]}, CONVERSATION[2])
COLUMNS = {"tools_key": "tools", "environment_key": "where", "environment_options_key": "options"}


@pytest.fixture(params=["jsonl", "parquet"])
def write(request, tmp_path):
    def rows(*values):
        values = [{"ground_truth": "x", **value} for value in values]
        path = tmp_path / f"rows.{request.param}"
        if request.param == "parquet":
            pq.write_table(pa.Table.from_pylist(values), path)
        else:
            path.write_text("\n".join(map(json.dumps, values)))
        return str(path)

    return rows


@pytest.fixture
def read(chat_tokenizer):
    def prompts(path, **options):
        has_environment = options.pop("has_environment", False)
        options = {"chat_template": True, "shuffle": False, **options}
        stream = PromptStream(
            DataConfig(train_files=[path], **options), chat_tokenizer, seed=0, has_environment=has_environment
        )
        return stream.take(stream.num_prompts)

    return prompts


def digits(prompt):
    """Decode the prompt. Token 3 is ``=``, and token 4 is 0."""
    return "".join("=" if token == 3 else str(token - 4) for token in prompt.prompt_ids)


def test_a_conversation_with_tool_calls_is_rendered_and_its_messages_are_stored(write, read):
    (prompt,) = read(write({"prompt": CONVERSATION}))
    assert digits(prompt) == "3125="
    assert prompt.messages == WITHOUT_NULL
    assert (prompt.tools, prompt.environment, prompt.environment_options) == ((), "", {})


def test_the_system_prompt_is_the_first_message_of_each_prompt(write, read):
    path = write({"prompt": [{"role": "user", "content": "1"}]}, {"prompt": [{"role": "user", "content": "2"}]})
    prompts = read(path, system_prompt="99")
    assert [digits(prompt) for prompt in prompts] == ["991=", "992="]
    assert [prompt.messages[0] for prompt in prompts] == [{"role": "system", "content": "99"}] * 2


def test_each_prompt_has_the_tools_environment_and_options_of_its_row(write, read):
    first = {"prompt": [{"role": "user", "content": "1"}], "tools": [tool("7")], "where": "a.py:A"}
    second = {"prompt": [{"role": "user", "content": "2"}], "tools": None, "where": None, "options": None}
    one, two = read(write({**first, "options": {"level": 3, "names": ["é"]}}, second), **COLUMNS)
    assert (digits(one), digits(two)) == ("17=", "2=")
    assert (len(one.tools), one.tools[0]["function"]["name"]) == (1, "7")
    assert (one.environment, one.environment_options) == ("a.py:A", {"level": 3, "names": ["é"]})
    assert (two.tools, two.environment, two.environment_options) == ((), "", {})


def test_tools_and_options_as_json_text_keep_their_nulls(write, read):
    schemas = [tool("7", properties={"x": {"default": None}}), tool("8", properties={"y": {"enum": [1, None]}})]
    row = {"prompt": [{"role": "user", "content": "1"}], "where": "a", "options": json.dumps({"seed": None})}
    one, two = read(write({**row, "tools": json.dumps(schemas)}, {**row, "tools": "[]"}), **COLUMNS)
    assert list(one.tools) == schemas
    assert one.environment_options == {"seed": None}
    assert two.tools == ()


def test_parquet_does_not_add_the_fields_of_other_rows_to_a_schema(tmp_path, read):
    schemas = [[tool("7", properties={"x": {"type": "string"}})], [tool("8", properties={"y": {"type": "number"}})]]
    rows = [{"prompt": [{"role": "user", "content": "1"}], "tools": each, "ground_truth": "x"} for each in schemas]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    prompts = read(str(tmp_path / "rows.parquet"), tools_key="tools")
    assert [list(prompt.tools) for prompt in prompts] == schemas


def test_jsonl_keeps_a_null_argument_of_a_call(tmp_path, read):
    arguments = {"function": {"name": "add", "arguments": {"a": None}}}
    row = {"prompt": [{"role": "assistant", "tool_calls": [arguments]}, {"role": "user", "content": "1"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (prompt,) = read(
        str(tmp_path / "rows.jsonl"), ground_truth_key="", chat_template_kwargs={"chat_template": template}
    )
    assert prompt.messages[0]["tool_calls"] == [arguments]


@pytest.mark.parametrize(("own", "run"), [("a", False), (None, True), ("a", True), (None, False)])
def test_a_text_row_with_an_environment_has_one_user_message(write, read, own, run):
    path = write({"prompt": "12=", "where": own}, {"prompt": "3=", "where": "b"})
    first, second = read(path, chat_template=False, environment_key="where", has_environment=run)
    expected = ({"role": "user", "content": "12="},) if own or run else ()
    assert (digits(first), first.messages) == ("12=", expected)
    assert second.messages == ({"role": "user", "content": "3="},)


def test_held_out_prompts_have_the_columns_of_training_prompts(write, chat_tokenizer):
    row = {"prompt": CONVERSATION, "tools": [tool("7")], "where": "a", "options": {"level": 1}}
    path = write(row)
    options = {"chat_template": True, "system_prompt": "9", **COLUMNS}
    (trained,) = PromptStream(DataConfig(train_files=[path], **options), chat_tokenizer, seed=0).take(1)
    (held_out,) = load_eval_prompts(DataConfig(eval_files=[path], **options), chat_tokenizer)
    assert digits(held_out) == digits(trained) == "931257="
    assert held_out.messages == trained.messages
    assert held_out.environment_options == {"level": 1}
    (text,) = load_eval_prompts(DataConfig(eval_files=[write({"prompt": "1="})]), chat_tokenizer, has_environment=True)
    assert text.messages == ({"role": "user", "content": "1="},)


def test_encoding_and_decoding_do_not_change_a_prompt_of_a_file(write, read):
    row = {"prompt": CONVERSATION, "tools": [tool("7", type="object")], "where": "a", "options": {"level": [1, 2.5]}}
    (sent,) = read(write(row), system_prompt="9", **COLUMNS)
    got = prompt_of([bytes(frame) for frame in prompt_frames(sent)])
    for name in ("messages", "tools", "environment", "environment_options"):
        assert getattr(got, name) == getattr(sent, name)


def test_equal_tools_of_many_rows_are_stored_once(tmp_path, read):
    rows = [{"prompt": [{"role": "user", "content": "1"}], "tools": [tool("7")], "ground_truth": "x"}] * 50
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = read(str(tmp_path / "rows.jsonl"), tools_key="tools")
    assert len({id(prompt.tools[0]) for prompt in prompts}) == 1


def test_a_saved_stream_continues_with_messages_and_tools(write, chat_tokenizer):
    rows = [{"prompt": [{"role": "user", "content": str(i)}], "tools": [tool(str(i))]} for i in range(4)]
    config = DataConfig(train_files=[write(*rows)], chat_template=True, tools_key="tools")
    whole = PromptStream(config, chat_tokenizer, seed=5)
    expected = whole.take(11)
    saved = PromptStream(config, chat_tokenizer, seed=5)
    saved.take(7)
    resumed = PromptStream(config, chat_tokenizer, seed=5)
    resumed.restore(json.loads(json.dumps(saved.state())))
    assert [(p.messages, p.tools) for p in resumed.take(4)] == [(p.messages, p.tools) for p in expected[7:]]


USER = [{"role": "user", "content": "1"}]
SYSTEM = [{"role": "system", "content": "1"}, *USER]
BAD_ROWS = [
    ({"prompt": SYSTEM}, r"column 'prompt', message 0 has role = 'system', expected no system message"),
    ({"tools": {"a": 1}}, r"column 'tools' is \{'a': 1\} \(dict\), expected a list of tool schemas"),
    ({"tools": "[{"}, r"column 'tools' is '\[\{', expected JSON"),
    ({"tools": '"add"'}, r"column 'tools' is 'add' \(str\), expected a list of tool schemas"),
    ({"tools": ["add"]}, r"column 'tools', tool 0 is 'add' \(str\), expected a schema such as"),
    ({"tools": [tool("7"), {"type": "function"}]}, r"column 'tools', tool 1 is .*expected a schema such as"),
    ({"tools": [{"name": "add", "parameters": {"a": 1}}]}, r"column 'tools', tool 0 is .*expected a schema such as"),
    ({"tools": [tool("7"), tool("7")]}, r"column 'tools', tool 1 has the name '7' of an earlier tool"),
    ({"tools": json.dumps([tool("7", maximum=2**70)])}, r"column 'tools' is .*expected strings, numbers \(64 bits\)"),
    ({"where": 7}, r"column 'where' is 7, expected an environment's name, or null"),
    ({"options": ["level"]}, r"column 'options' is \['level'\] \(list\), expected a mapping of options"),
    ({"options": "level=3"}, r"column 'options' is 'level=3', expected JSON"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_the_error_for_an_invalid_row_names_the_row_and_the_column(write, read, row, message):
    right = {"prompt": USER, "tools": [tool("7")], "where": "a", "options": {"level": 1}}
    with pytest.raises(ValueError, match=rf"rows\.\w+, (line 1|row 0): {message}"):
        read(write({**right, **row}), system_prompt="9", **COLUMNS)


@pytest.mark.parametrize("key", ["tools", "where", "options"])
def test_the_error_for_a_column_that_the_file_lacks_names_the_column(write, read, key):
    row = {"prompt": USER, "tools": [tool("7")], "where": "a", "options": {"level": 1}}
    del row[key]
    with pytest.raises(ValueError, match=f"no column '{key}'"):
        read(write(row), **COLUMNS)
