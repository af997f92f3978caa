"""Plain and chat demonstrations: their tokens, and the tokens in the loss."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from asyncrl.data.demonstrations import DemonstrationFormat, load_demonstrations

WORDS = ["<unk>", "<eos>", "<user>", "<assistant>", "<end>", "a", "b", "c", "d", "<system>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
PLAIN = DemonstrationFormat(prompt_key="prompt", response_key="response")
CHAT = DemonstrationFormat(prompt_key="messages", response_key="", chat_template=True)


@pytest.fixture
def tokenizer():
    rust = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    rust.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<eos>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def write(tmp_path):
    def rows(*values):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(value) + "\n" for value in values))
        return [str(path)]

    return rows


def shown(demonstration):
    """Return a demonstration as text. Words in capitals are in the loss."""
    words = [WORDS[index] for index in demonstration.token_ids]
    return " ".join(w.upper() if m else w for w, m in zip(words, demonstration.learned, strict=True))


def turn(role, content):
    return {"role": role, "content": content}


def test_the_loss_of_a_plain_row_covers_its_response_and_the_end_token(tokenizer, write):
    first, second = load_demonstrations(
        write({"prompt": "a b", "response": "c d"}, {"prompt": "d", "response": ""}), PLAIN, tokenizer
    )
    assert shown(first) == "a b C D <EOS>"
    assert shown(second) == "d <EOS>"
    assert first.token_ids.dtype == np.int32


def test_the_loss_covers_every_assistant_turn_and_its_end_token(tokenizer, write):
    conversation = [turn("system", "d"), turn("user", "a"), turn("assistant", "b"), turn("user", "c a")]
    (open_ended,) = load_demonstrations(write({"messages": conversation}), CHAT, tokenizer)
    assert shown(open_ended) == "<system> d <end> <user> a <end> <assistant> B <END>"
    conversation.append(turn("assistant", "d d"))
    (whole,) = load_demonstrations(write({"messages": conversation}), CHAT, tokenizer)
    assert shown(whole) == (
        "<system> d <end> <user> a <end> <assistant> B <END> <user> c a <end> <assistant> D D <END>"
    )


def test_the_response_column_becomes_the_last_turn(tokenizer, write):
    form = DemonstrationFormat(prompt_key="messages", response_key="answer", chat_template=True)
    (got,) = load_demonstrations(write({"messages": [turn("user", "a")], "answer": "b c"}), form, tokenizer)
    assert shown(got) == "<user> a <end> <assistant> B C <END>"


def test_the_loss_covers_tool_calls_but_not_tools_or_the_system_prompt(tokenizer, write):
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}<{{ m.role }}> "
        "{% for c in m.tool_calls or [] %}{{ c.function.name }} {% endfor %}"
        "{% if m.content %}{{ m.content }} {% endif %}<end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    form = DemonstrationFormat(
        prompt_key="messages", response_key="", chat_template=True, system_prompt="d", tools_key="tools"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "b"}}]}
    row = {
        "messages": [turn("user", "a"), call, turn("tool", "c"), turn("assistant", "d")],
        "tools": [{"type": "function", "function": {"name": "b"}}],
    }
    (got,) = load_demonstrations(write(row), form, tokenizer)
    assert shown(got) == ("b <system> d <end> <user> a <end> <assistant> B <END> <unk> c <end> <assistant> D <END>")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [turn("user", "a")]}, "line 1: column 'messages' has no assistant message"),
        ({"messages": "a"}, r"expected a list of \{role, content\} messages"),
        ({"messages": [{"role": "user"}, turn("assistant", "b")]}, "message 0 has content"),
    ],
)
def test_the_error_for_a_conversation_without_learned_tokens_names_the_reason(tokenizer, write, row, message):
    with pytest.raises(ValueError, match=message):
        load_demonstrations(write(row), CHAT, tokenizer)


def test_the_error_for_a_response_that_is_not_text_names_the_row(tokenizer, write):
    with pytest.raises(ValueError, match=r"line 2: column 'response' is 7 \(int\), expected a string"):
        load_demonstrations(write({"prompt": "a", "response": "b"}, {"prompt": "a", "response": 7}), PLAIN, tokenizer)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, write):
    tokenizer.chat_template = TEMPLATE.replace("{% for", "{{ messages | length }} {% for")
    with pytest.raises(ValueError, match="changes earlier text"):
        load_demonstrations(write({"messages": [turn("user", "a"), turn("assistant", "b")]}), CHAT, tokenizer)


def test_a_tokenizer_without_a_needed_template_or_end_token_is_refused(tokenizer, write):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"sft\.chat_template is true but the tokenizer of .* has no template"):
        load_demonstrations(write({"messages": [turn("user", "a"), turn("assistant", "b")]}), CHAT, tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"has no end-of-sequence token, .*; set eos_token"):
        load_demonstrations(write({"prompt": "a", "response": "b"}), PLAIN, tokenizer)


def test_the_error_of_a_missing_demonstration_column_names_sft_options(tokenizer, write):
    with pytest.raises(ValueError, match=r"line 2: no column 'response'.*sft\.\*_key"):
        load_demonstrations(write({"prompt": "a", "response": "b"}, {"prompt": "a"}), PLAIN, tokenizer)
