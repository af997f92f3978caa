"""Make your own task: a BPE tokenizer with a chat template, a small Llama, and three parquet files of messages.

    python make_task.py task

The task is to sort 4 to 6 numbers. Replace the model and the data by your own, in the same form.
"""

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, USER, ASSISTANT, END = SPECIAL = ["<pad>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_questions(count, *, seed):
    """Return lists of messages, such as ``[{"role": "user", "content": "sort: 7 23 4"}]``, and their answers."""
    rng = random.Random(seed)
    messages, answers = [], []
    for _ in range(count):
        numbers = rng.sample(range(30), rng.randint(4, 6))
        messages.append([{"role": "user", "content": "sort: " + " ".join(map(str, numbers))}])
        answers.append(" ".join(map(str, sorted(numbers))))
    return messages, answers


def with_mistakes(answer, rng, rate=0.12):
    """Return the answer of an imperfect teacher, who replaces each number by a random one with probability ``rate``."""
    return " ".join(str(rng.randrange(30)) if rng.random() < rate else number for number in answer.split())


def make_tokenizer(texts):
    """Train a byte-level BPE tokenizer on the task's texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE, padding_side="left"
    )


def make_model(tokenizer):
    """Return a Llama of 0.2 million parameters with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def main(folder):
    """Write ``model/``, ``train.parquet``, ``held_out.parquet`` and ``demonstrations.parquet``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", 8192, 1), ("held_out", 256, 2), ("demonstrations", 12288, 3)):
        messages, answers = make_questions(count, seed=seed)
        if name == "demonstrations":
            rng = random.Random(0)
            columns = {"messages": messages, "response": [with_mistakes(answer, rng) for answer in answers]}
            tokenizer = make_tokenizer([m[0]["content"] + " " + a for m, a in zip(messages, answers, strict=True)])
        else:
            columns = {"messages": messages, "answer": answers}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer).save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
