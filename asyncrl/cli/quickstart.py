"""Makes the assets of the quickstarts: a character tokenizer, a tiny Qwen3 model, and the data of a task.

The task of ``experiment=quickstart`` is to write 5 to 8 digits in reverse order. The task of ``experiment=tools`` is in
`rollout_fleet.episodes.calculator`. Importing this module does not load torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

from asyncrl.config import QuickstartTask, RunConfig
from rollout_fleet.episodes.calculator import CHAT_TEMPLATE, make_demonstrations, make_rows

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARIES = {
    QuickstartTask.reverse: (PAD, EOS, UNKNOWN, "=", *"0123456789"),
    QuickstartTask.tools: (PAD, EOS, UNKNOWN, "=", *"0123456789", "+", "?", ">"),
}
DIGIT_COUNTS = (5, 8)
LONG = 6
"""Demonstrations with at least this many digits swap their first two digits with probability ``habit_rate``.

``habit_rate`` is an argument of `make_assets`.
"""

MODEL_CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(VOCABULARIES[QuickstartTask.reverse]),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    # This RoPE base suits sequences of about 20 tokens: training needs half as many steps as with a base of 10,000.
    "rope_theta": 100.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "dtype": "float32",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
"""The model of ``experiment=quickstart``; the task ``tools`` has a larger vocabulary.

Without the embedding, the model has 74,112 parameters: 2 layers of 12,320 (attention), 24,576 (MLP) and 128 (norms),
and a last norm of 64.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuickstartAssets:
    """Paths of the files of a quickstart.

    No prompt is in more than one of the files ``train``, ``held_out`` and ``demonstrations``.

    Attributes:
        model: Folder of the randomly initialized model and its tokenizer; ``from_pretrained`` can load both.
        train: Parquet with columns prompt (``"12345="``, or messages), ground_truth (``"54321"``) and data_source.
        held_out: Parquet with the same columns.
        demonstrations: Parquet with columns prompt and response, for the supervised warm start.
    """

    model: Path
    train: Path
    held_out: Path
    demonstrations: Path


def make_assets(
    directory: str | Path,
    *,
    seed: int,
    task: QuickstartTask = QuickstartTask.reverse,
    num_train: int = 16384,
    num_held_out: int = 256,
    num_demonstrations: int = 16384,
    wrong_digit_rate: float = 0.15,
    habit_rate: float = 0.7,
) -> QuickstartAssets:
    """Make the model, tokenizer and data of a quickstart, or reuse files that were made with the same arguments.

    The directory is created atomically. Returns the paths of the files.

    Args:
        directory: Directory for the assets. If the directory has assets that were made with other arguments, the whole
            directory is replaced.
        seed: Seed of the weights, the digits and the mistakes.
        task: The task in the rows.
        num_train: Number of training prompts.
        num_held_out: Number of held-out prompts.
        num_demonstrations: Number of demonstrations.
        wrong_digit_rate: Fraction of random digits in the demonstrations, in [0, 1). The warm-started policy learns
            this noise.
        habit_rate: Fraction of demonstrations with a systematic mistake, in [0, 1]. In the task ``reverse``, responses
            with 6 to 8 digits swap the first two digits. In the task ``tools``, responses call a tool where they should
            answer, or answer where they should call a tool. If the rate is above 0.5, the warm-started policy's greedy
            answers to such prompts are wrong, and RL corrects them.

    Raises:
        ValueError: the directory has files, but these files are not assets of a quickstart.
    """
    counts = {"num_train": num_train, "num_held_out": num_held_out, "num_demonstrations": num_demonstrations}
    rates = {"wrong_digit_rate": wrong_digit_rate, "habit_rate": habit_rate}
    target = Path(directory)
    model = {**MODEL_CONFIG, "vocab_size": len(VOCABULARIES[task])}
    settings = {"seed": seed, "task": task, **counts, **rates, "model": model}
    if _settings_of(target) == settings:
        return _assets_in(target)
    is_ours = target.is_dir() and ((target / "assets.json").is_file() or not any(target.iterdir()))
    if target.exists() and not is_ours:
        raise ValueError(f"quickstart: {target} must be an empty directory, got other files; choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        fresh = Path(temporary, "fresh")
        _write_assets(fresh, settings)
        _swap(fresh, target, aside=Path(temporary, "old"))
    return _assets_in(target)


def with_quickstart_assets(config: RunConfig) -> RunConfig:
    """Make the quickstart's model and data if they do not exist. Return ``config`` with their paths.

    If the option ``quickstart`` is not set, make nothing, and return ``config`` unchanged.
    """
    if not config.quickstart:
        return config
    directory = Path(config.output_dir, config.experiment, "assets", f"seed-{config.seed}").resolve()
    assets = make_assets(directory, seed=config.seed, task=config.quickstart_task)
    return replace(
        config,
        model=replace(config.model, path=str(assets.model)),
        data=replace(config.data, train_files=[str(assets.train)], eval_files=[str(assets.held_out)]),
        sft=replace(config.sft, train_files=[str(assets.demonstrations)]),
    )


def _assets_in(directory: Path) -> QuickstartAssets:
    return QuickstartAssets(
        model=directory / "model",
        train=directory / "train.parquet",
        held_out=directory / "held_out.parquet",
        demonstrations=directory / "demonstrations.parquet",
    )


def _settings_of(directory: Path) -> dict[str, Any] | None:
    assets = _assets_in(directory)
    expected = [assets.train, assets.held_out, assets.demonstrations, assets.model / "model.safetensors"]
    try:
        return json.loads((directory / "assets.json").read_text()) if all(map(Path.is_file, expected)) else None
    except (OSError, ValueError):
        return None


def _swap(fresh: Path, target: Path, *, aside: Path) -> None:
    if target.exists():
        target.rename(aside)
    try:
        fresh.rename(target)
    except OSError:  # ignore the error if another process has made the same assets
        if _settings_of(target) != _settings_of(fresh):
            raise


def _write_assets(directory: Path, settings: Mapping[str, Any]) -> None:
    assets = _assets_in(directory)
    assets.model.mkdir(parents=True)
    weights_rng, rows_rng, mistakes_rng = np.random.default_rng(settings["seed"]).spawn(3)
    _write_tokenizer(assets.model, settings)
    _write_model(assets.model, settings["model"], weights_rng)
    parts = [settings[f"num_{part}"] for part in ("held_out", "train", "demonstrations")]
    is_tools = settings["task"] == QuickstartTask.tools
    if is_tools:
        rows = make_rows(rows_rng, sum(parts))
    else:
        numbers = _distinct_numbers(rows_rng, sum(parts))
        rows = [{"prompt": f"{one}=", "ground_truth": one[::-1], "data_source": "reverse"} for one in numbers]
    held_out, train, shown = (rows[end - size : end] for size, end in zip(parts, accumulate(parts), strict=True))
    pq.write_table(pa.Table.from_pylist(held_out), assets.held_out)
    pq.write_table(pa.Table.from_pylist(train), assets.train)
    if is_tools:
        pairs = make_demonstrations(mistakes_rng, shown, habit_rate=settings["habit_rate"])
    else:
        pairs = [(row["prompt"], _with_mistakes(row["ground_truth"], settings, mistakes_rng)) for row in shown]
    prompts, responses = zip(*pairs, strict=True)
    pq.write_table(pa.table({"prompt": prompts, "response": responses}), assets.demonstrations)
    _write_json(directory / "assets.json", settings)


def _with_mistakes(digits: str, settings: Mapping[str, Any], rng: np.random.Generator) -> str:
    """Return ``digits`` with mistakes, as the response of a demonstration."""
    wrong = rng.random(len(digits)) < settings["wrong_digit_rate"]
    random_digits = rng.integers(0, 10, size=len(digits))
    if rng.random() < settings["habit_rate"] and len(digits) >= LONG:
        digits = digits[1] + digits[0] + digits[2:]
    return "".join(str(r) if w else d for d, r, w in zip(digits, random_digits, wrong, strict=True))


def _distinct_numbers(rng: np.random.Generator, count: int) -> list[str]:
    numbers: dict[str, None] = {}
    low, high = DIGIT_COUNTS
    while len(numbers) < count:
        lengths = rng.integers(low, high + 1, size=count)
        digits = rng.integers(0, 10, size=(count, high)).astype("U1")
        numbers.update(dict.fromkeys("".join(row[:n]) for row, n in zip(digits, lengths, strict=True)))
    return list(numbers)[:count]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_tokenizer(directory: Path, settings: Mapping[str, Any]) -> None:
    tokens = {token: index for index, token in enumerate(VOCABULARIES[settings["task"]])}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "padding_side": "left",
        "model_max_length": MODEL_CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    if settings["task"] == QuickstartTask.tools:
        tokenizer_settings["chat_template"] = CHAT_TEMPLATE
    _write_json(directory / "tokenizer_config.json", tokenizer_settings)


def _write_model(directory: Path, config: Mapping[str, Any], rng: np.random.Generator) -> None:
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", {"do_sample": True, "temperature": 1.0, **ids})
    scale = config["initializer_range"]
    weights = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, scale, shape).astype(np.float32)
        for name, shape in _weight_shapes(config).items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return a dict that maps each weight's name to the weight's shape: [out, in] for a matrix, [size] for a norm."""
    c = config
    hidden, mlp, head_dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    query, key = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for index in range(c["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
