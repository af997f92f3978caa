"""Models on which learner and engine agree only up to some length. The learner refuses longer sequences."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.cli.compose import compose_run
from asyncrl.config import num_positions, why_positions_end
from learner.config import Device, LearnerConfig
from learner.packed_model import PackedModel
from learner.roles import REFERENCE
from learner.rope import length_limit, rope_limit
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import plain_log_probs, random_sequences, save_tiny_model

LIMIT = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [8.0, 9.0, 10.0, 12.0],
    "original_max_position_embeddings": LIMIT,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT, "partial_rotary_factor": 1.0},
    ),
    "dynamic": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0},
            "max_position_embeddings": LIMIT,
        },
    ),
    "indexer": ("deepseek_v32", {"index_topk": LIMIT}),
}


def saved(folder: Path, kind: str) -> str:
    family, options = KINDS[kind]
    return save_tiny_model(folder / kind, family, initializer_range=0.3, **options)


def differences(path: str, num_ranks: int, sp_size: int) -> list[float]:
    """Return the largest difference between packed and plain log-probs, per sequence.

    Also check that a sequence of more than `LIMIT` tokens is refused.
    """
    config = LearnerConfig(device=Device.cpu, max_tokens_per_micro_batch=60, num_ranks=num_ranks, sp_size=sp_size)
    model = PackedModel(config, REFERENCE, model_path=path)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    sequences = random_sequences(7, longest=LIMIT)
    found = [
        float(np.abs(scores[one.loss_mask] - plain_log_probs(plain, one).detach().numpy()).max(initial=0.0))
        for one, scores in zip(sequences, model.scores(sequences), strict=True)
    ]
    longer = next(one for one in random_sequences(20) if len(one.input_ids) > LIMIT)
    # With data parallelism, only rank 0 gets the sequence that is too long.
    own = [longer, *sequences] if model.mesh.rank == 0 or sp_size > 1 else sequences
    with pytest.raises(ValueError, match=rf"beyond {LIMIT} tokens, .*, got \d\d"):
        model.scores(own)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_up_to_the_limit_are_correct_and_longer_ones_are_refused(kind, tmp_path):
    assert max(differences(saved(tmp_path, kind), 1, 1)) < 3e-5


@pytest.mark.long
@pytest.mark.parametrize("sp_size", [1, 2])
def test_two_ranks_agree_on_the_limit(sp_size, tmp_path):
    for found in run_on_ranks(2, every_kind, [saved(tmp_path, kind) for kind in KINDS], sp_size):
        assert max(found) < 3e-5


def every_kind(paths: list[str], sp_size: int) -> list[float]:
    return [difference for path in paths for difference in differences(path, 2, sp_size)]


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"max_position_embeddings": 32768}, None),
        ({"rope_scaling": None, "max_position_embeddings": 32768}, None),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 4096}}, None),
        ({"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 8192}}, None),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": LONGROPE, "max_position_embeddings": 256}, LIMIT),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 2048}, 2048),
        (
            {
                "max_position_embeddings": 9,
                "rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "other": {"rope_type": "default"}},
            },
            9,
        ),
    ],
)
def test_the_limit_of_length_dependent_rope_is_its_original_length(settings, limit):
    assert rope_limit(settings) == limit


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"index_topk": 2048, "max_position_embeddings": 163840}, 2048),
        ({"layer_types": ["minimax_m3_sparse"], "index_topk_blocks": 16, "index_block_size": 128}, 2048),
        ({"sparse_attention_config": {"sparse_topk_blocks": 8, "sparse_block_size": 64}}, 512),
        ({"layer_types": ["full_attention"], "index_topk_blocks": 16, "index_block_size": 128}, None),
        ({"index_topk": None}, None),
        ({"index_topk": 2048, "rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 1024}, 1024),
    ],
)
def test_the_limit_of_sparse_attention_is_the_number_of_selected_tokens(settings, limit):
    found = length_limit(settings)
    assert (found and found.tokens) == limit


def test_the_original_length_of_rope_limits_a_run_before_it_starts(tmp_path):
    settings = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rope_scaling": {"type": "longrope"}}))
    config = compose_run(["experiment=custom"])
    config = replace(config, model=replace(config.model, path=str(tmp_path)))
    assert num_positions(config) == 4096
    assert "its config allows 131072, but beyond 4096 its rotary embeddings depend on" in why_positions_end(config)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert num_positions(config) == 131072
    assert why_positions_end(config) == ""


def test_the_number_of_positions_of_gpt2_limits_a_run(tmp_path):
    save_tiny_model(tmp_path, "gpt2", max_position_embeddings=64)
    config = compose_run(["experiment=custom"])
    assert num_positions(replace(config, model=replace(config.model, path=str(tmp_path)))) == 64
