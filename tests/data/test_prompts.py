import json
from pathlib import Path

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data import DataConfig, OverlongPrompts, PromptStream, load_eval_prompts


@pytest.fixture(scope="session")
def digits_file(tmp_path_factory):
    """Return the path of a file with the prompts ``0=`` to ``9=``, a data source and a nested extra column."""
    path = tmp_path_factory.mktemp("digits") / "digits.parquet"
    columns = {
        "prompt": [f"{n}=" for n in range(10)],
        "ground_truth": [str(n) for n in range(10)],
        "data_source": ["echo"] * 10,
        "extra_info": [{"index": n} for n in range(10)],
    }
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.fixture
def make_stream(digits_file, tokenizer):
    def make(seed=0, files=(digits_file,), **options):
        return PromptStream(DataConfig(train_files=list(files), **options), tokenizer, seed=seed)

    return make


def truths(prompts):
    return [prompt.ground_truth for prompt in prompts]


def write_lines(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_a_prompt_has_tokens_truth_source_and_extra_columns(make_stream):
    stream = make_stream(shuffle=False, data_source_key="data_source", extra_keys=["extra_info.index", "extra_info"])
    prompt = stream.take(4)[3]
    assert prompt.group_id == 3
    assert prompt.prompt_ids.tolist() == [7, 3]  # the tokens of "3="; token 4 is the digit 0
    assert prompt.prompt_ids.dtype == np.int32
    assert not prompt.prompt_ids.flags.writeable
    assert (prompt.ground_truth, prompt.data_source) == ("3", "echo")
    assert prompt.extra == {"extra_info.index": 3, "extra_info": {"index": 3}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_some_rows_and_files_may_lack_an_extra_column_but_not_all_rows(tmp_path, tokenizer, kind):
    """In data of several sources, some columns occur only in the rows of one source."""
    rows = [{"prompt": "1=", "truth": "1"}, {"prompt": "2=", "truth": "2", "cases": None}]
    rows += [{"prompt": "3=", "truth": "3", "cases": "c"}]
    files = []
    for name, content in (("a", rows[:1]), ("b", rows[1:])):
        path = tmp_path / f"{name}.{kind}"
        if kind == "jsonl":
            write_lines(path, *content)
        else:
            pq.write_table(pa.Table.from_pylist(content), path)
        files.append(str(path))
    options = {"train_files": files, "prompt_key": "prompt", "ground_truth_key": "truth", "shuffle": False}
    stream = PromptStream(DataConfig(**options, extra_keys=["cases"]), tokenizer, seed=0)
    assert [prompt.extra for prompt in stream.take(3)] == [{}, {}, {"cases": "c"}]
    with pytest.raises(ValueError, match=r"at least one row .* the column 'case' of data\.extra_keys"):
        PromptStream(DataConfig(**options, extra_keys=["case"]), tokenizer, seed=0)


def test_every_epoch_has_each_prompt_once_in_a_new_order(make_stream):
    stream = make_stream(seed=3)
    epochs = [truths(stream.take(10)) for _ in range(3)]
    assert all(sorted(epoch) == list("0123456789") for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert stream.state()["position"] == 30


def test_the_seed_decides_the_order(make_stream):
    assert truths(make_stream(seed=1).take(25)) == truths(make_stream(seed=1).take(25))
    assert truths(make_stream(seed=1).take(10)) != truths(make_stream(seed=2).take(10))


def test_without_shuffling_every_epoch_has_the_order_of_the_files(make_stream):
    assert truths(make_stream(shuffle=False).take(12)) == list("012345678901")


@given(chunks=st.lists(st.integers(0, 13), max_size=6), saved_after=st.integers(0, 6))
def test_the_prompt_sequence_does_not_depend_on_chunk_sizes_and_resumes(digits_file, tokenizer, chunks, saved_after):
    config = DataConfig(train_files=[digits_file])
    whole = PromptStream(config, tokenizer, seed=5).take(sum(chunks))
    stream, taken = PromptStream(config, tokenizer, seed=5), []
    for index, count in enumerate(chunks):
        if index == saved_after:
            state = msgpack.unpackb(msgpack.packb(stream.state()))
            stream = PromptStream(config, tokenizer, seed=5)
            stream.restore(json.loads(json.dumps(state)))
        taken += stream.take(count)
    assert truths(taken) == truths(whole)
    assert [prompt.group_id for prompt in taken] == list(range(sum(chunks)))


def test_a_stream_can_be_restored_to_an_earlier_position(make_stream):
    stream = make_stream()
    state = stream.state()
    first = truths(stream.take(17))
    stream.restore(state)
    assert truths(stream.take(17)) == first


def test_unfinished_prompts_are_repeated_before_new_prompts(make_stream):
    saved = make_stream(seed=3)
    taken = saved.take(12)
    stream = make_stream(seed=3)
    stream.restore(saved.state())
    stream.repeat_unfinished([(0, 5), (7, 9)])
    again = stream.take(2) + stream.take(4)
    assert [prompt.group_id for prompt in again] == [5, 6, 9, 10, 11, 12]
    assert truths(again) == truths([taken[5], taken[6], *taken[9:], *saved.take(1)])
    assert stream.state()["position"] == 13


@pytest.mark.parametrize("sampler", ["uniform", "difficulty"])
def test_taking_only_repeated_prompts_does_not_advance_the_stream(make_stream, sampler):
    stream = make_stream(sampler=sampler)
    first = stream.take(4)
    stream.repeat_unfinished([])
    state = stream.state()
    assert truths(stream.take(3)) == truths(first[:3])
    assert stream.state() == state


def test_the_state_of_a_stream_is_small(make_stream):
    stream = make_stream()
    stream.take(1000)
    assert len(msgpack.packb(stream.state())) < 500


def test_restoring_a_stream_with_a_changed_file_names_the_file(tmp_path, make_stream):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "1=", "ground_truth": "1"})
    state = make_stream(files=[path]).state()
    write_lines(tmp_path / "a.jsonl", {"prompt": "2=", "ground_truth": "2"})
    with pytest.raises(ValueError, match=r"a\.jsonl must be .*saved state"):
        make_stream(files=[path]).restore(state)


def test_a_file_may_move_between_saving_and_restoring(tmp_path, make_stream, digits_file):
    moved = tmp_path / "moved.parquet"
    moved.write_bytes(Path(digits_file).read_bytes())
    saved = make_stream()
    saved.take(4)
    stream = make_stream(files=[str(moved)])
    stream.restore(saved.state())
    assert stream.take(1)[0].group_id == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 9}, "the seed was 9 when the state was saved, got 0"),
        ({"shuffle": False}, "data.shuffle was False when the state was saved, got True"),
        ({"num_prompts": 11}, "the number of prompts was 11 when the state was saved, got 10"),
        ({"files": []}, "the saved state has 0 files"),
        ({"position": -1}, "position must be an integer >= 0, got -1"),
    ],
)
def test_a_state_of_another_run_is_refused_and_changes_nothing(make_stream, change, message):
    stream = make_stream()
    stream.take(3)
    with pytest.raises(ValueError, match=message):
        stream.restore(stream.state() | change)
    assert stream.state()["position"] == 3


def test_a_state_that_lacks_a_field_is_refused(make_stream):
    with pytest.raises(ValueError, match=r"must have \['files', 'num_prompts', 'seed', 'shuffle'\]"):
        make_stream().restore({"position": 3})


def test_several_files_are_read_as_one_data_set(tmp_path, make_stream, digits_file):
    more = write_lines(tmp_path / "b.jsonl", {"prompt": "12=", "ground_truth": "21"})
    stream = make_stream(files=[digits_file, more], shuffle=False)
    assert truths(stream.take(12)) == [*"0123456789", "21", "0"]


def test_the_error_for_a_too_long_prompt_names_the_row(tmp_path, make_stream):
    rows = [{"prompt": prompt, "ground_truth": "x"} for prompt in ("12=", "123=", "1234=")]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    with pytest.raises(
        ValueError, match=r"a\.jsonl, line 2: column 'prompt' has 4 tokens, expected .*= 3 \(2 of 3 rows"
    ):
        make_stream(files=[path], max_prompt_tokens=3)
    assert make_stream(files=[path], max_prompt_tokens=5).num_prompts == 3


def test_an_option_filters_and_counts_long_prompts(tmp_path, make_stream):
    rows = [{"prompt": f"{p}=", "ground_truth": p} for p in ("1", "123", "2", "12345")]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    options = {"overlong_prompts": OverlongPrompts.filter, "shuffle": False}
    stream = make_stream(files=[path], max_prompt_tokens=2, **options)
    assert (stream.num_prompts, stream.num_filtered) == (2, 2)
    assert truths(stream.take(3)) == ["1", "2", "1"]
    with pytest.raises(ValueError, match=r"at most data.max_prompt_tokens = 1 tokens, got 4 longer"):
        make_stream(files=[path], max_prompt_tokens=1, **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 7, "ground_truth": "x"}, r"line 1: column 'prompt' is 7 \(int\), expected a string .*convert it"),
        ({"prompt": None, "ground_truth": "x"}, r"line 1: column 'prompt' is None"),
        ({"prompt": [{"role": "user"}], "ground_truth": "x"}, r"expected a string .*set data.chat_template=true"),
        ({"prompt": "", "ground_truth": "x"}, r"line 1: column 'prompt' is '', which has no tokens"),
        ({"prompt": "1="}, r"line 1: no column 'ground_truth'"),
        ({"prompt": "1=", "ground_truth": None}, r"line 1: column 'ground_truth' is null"),
    ],
)
def test_the_error_for_a_row_of_the_wrong_type_names_the_row(tmp_path, make_stream, row, message):
    with pytest.raises(ValueError, match=message):
        make_stream(files=[write_lines(tmp_path / "a.jsonl", row)])


def test_a_data_source_must_be_a_string(tmp_path, make_stream):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "1=", "ground_truth": "1", "source": 4})
    with pytest.raises(ValueError, match=r"line 1: column 'source' is 4, expected a string"):
        make_stream(files=[path], data_source_key="source")


def test_a_run_without_ground_truth_needs_no_column(tmp_path, make_stream):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "1="})
    assert make_stream(files=[path], ground_truth_key="").take(1)[0].ground_truth is None


def test_a_stream_without_files_is_refused(make_stream):
    with pytest.raises(ValueError, match=r"data\.train_files must name"):
        make_stream(files=[])


def test_held_out_prompts_have_the_order_of_the_files(digits_file, tokenizer):
    config = DataConfig(eval_files=[digits_file], eval_max_prompts=4)
    prompts = load_eval_prompts(config, tokenizer)
    assert truths(prompts) == list("0123")
    assert [prompt.group_id for prompt in prompts] == [0, 1, 2, 3]
    assert len(load_eval_prompts(DataConfig(eval_files=[digits_file]), tokenizer)) == 10
    assert load_eval_prompts(DataConfig(), tokenizer) == []


def test_chat_messages_are_rendered_by_the_template_up_to_the_answer(tmp_path, chat_tokenizer):
    messages = [{"role": "system", "content": "1", "tool_calls": None}, {"role": "user", "content": "23"}]
    rows = {"prompt": [messages], "reward_model": [{"ground_truth": "32", "style": "rule"}]}
    path = tmp_path / "verl.parquet"
    pq.write_table(pa.table(rows), path)
    options = {"train_files": [str(path)], "ground_truth_key": "reward_model.ground_truth", "chat_template": True}
    plain = PromptStream(DataConfig(**options), chat_tokenizer, seed=0).take(1)[0]
    shouted = PromptStream(DataConfig(chat_template_kwargs={"shout": True}, **options), chat_tokenizer, seed=0).take(1)
    assert plain.prompt_ids.tolist() == [5, 6, 7, 3]  # 1 2 3 =
    assert plain.ground_truth == "32"
    assert shouted[0].prompt_ids.tolist() == [5, 6, 7, 13, 3]


def test_special_tokens_come_from_the_template_or_from_the_tokenizer_but_not_twice(tmp_path):
    class Recorder:
        chat_template = "any"

        def __call__(self, text, *, add_special_tokens):
            return {"input_ids": [[1] * add_special_tokens + [2] for _ in text]}

        def apply_chat_template(self, conversation, **kwargs):
            return "rendered"

    plain = write_lines(tmp_path / "plain.jsonl", {"prompt": "1"})
    chat = write_lines(tmp_path / "chat.jsonl", {"prompt": [{"role": "user", "content": "1"}]})

    def first_ids(path, chat_template):
        config = DataConfig(train_files=[path], chat_template=chat_template, ground_truth_key="")
        return PromptStream(config, Recorder(), seed=0).take(1)[0].prompt_ids.tolist()

    assert first_ids(plain, False) == [1, 2]
    assert first_ids(chat, True) == [2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("1=", r"line 1: column 'prompt' is '1=' \(str\), expected a list of .*data.chat_template=false"),
        ([], r"line 1: column 'prompt' is \[\]"),
        (["hello"], r"line 1: column 'prompt', message 0 is 'hello'"),
        ([{"role": "user", "content": "1"}, {"content": "1"}], r"message 1 has role = None"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"message 0 has content = .*only text"),
        (
            [{"role": "narrator", "content": "1"}],
            r"line 1: column 'prompt': the chat template refuses .*no narrator here",
        ),
    ],
)
def test_the_error_for_invalid_messages_names_the_row(tmp_path, chat_tokenizer, prompt, message):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": prompt, "ground_truth": "x"})
    with pytest.raises(ValueError, match=message):
        PromptStream(DataConfig(train_files=[path], chat_template=True), chat_tokenizer, seed=0)


def test_a_tokenizer_without_a_template_refuses_messages(make_stream):
    with pytest.raises(ValueError, match=r"data.chat_template is true but the tokenizer .* has no template"):
        make_stream(chat_template=True)
