"""Model families on each mesh, compared with transformers' forward in an explicit loop over the sequences."""

import functools
import os
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from learner import attention
from learner.config import AlgorithmConfig, Device, LearnerConfig, OptimizerConfig
from learner.pretrained import load_causal_lm
from learner.trainer import Trainer
from tests.support.policy_step import policy_step
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import FAMILIES, TRAINED_FAMILIES, plain_log_probs, random_sequences, save_tiny_model
from tests.support.whole_weights import assert_weights_equal, whole_tensors

TEMPERATURE, CLIP, LR, EPS, DECAY, MAX_NORM = 0.7, 0.2, 1e-3, 1e-4, 0.1, 0.5


@functools.cache
def plain_loop(model_path: str) -> tuple[list[np.ndarray], float, dict[str, np.ndarray]]:
    """Make one PPO update without the learner. Returns the old log-probs, the gradient norm and the new weights."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
    decays = {p: p.ndim >= 2 and not name.endswith("bias") for name, p in model.named_parameters()}
    groups = [
        {"params": [p for p, own in decays.items() if own], "weight_decay": DECAY},
        {"params": [p for p, own in decays.items() if not own], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    log_probs, losses = [], []
    for sequence in random_sequences(9):
        own = plain_log_probs(model, sequence, temperature=TEMPERATURE)
        column = {name: torch.from_numpy(value[sequence.loss_mask]) for name, value in sequence.columns.items()}
        ratio = (own - column["behavior_logprobs"]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        losses.append(-torch.minimum(ratio * column["advantages"], clipped * column["advantages"]))
        log_probs.append(own.detach().numpy())
    torch.cat(losses).mean().backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
    optimizer.step()
    return log_probs, norm, {name: value.detach().numpy() for name, value in model.named_parameters()}


def packed(
    model_path: str, num_ranks: int, sp_size: int, **options: Any
) -> tuple[list[np.ndarray], float, dict[str, np.ndarray]]:
    """Make the same update as `plain_loop`, with the learner. The returned log-probs are of this rank's sequences."""
    optimizer = OptimizerConfig(lr=LR, eps=EPS, weight_decay=DECAY, clip_grad_norm=MAX_NORM)
    config = LearnerConfig(
        num_ranks=num_ranks,
        sp_size=sp_size,
        device=Device.cpu,
        max_tokens_per_micro_batch=60,
        optimizer=optimizer,
        **options,
    )
    trainer = Trainer(config, model_path=model_path, total_updates=1, temperature=TEMPERATURE)
    dp, place = num_ranks // sp_size, trainer.mesh.dp_rank
    sequences = random_sequences(9)[place::dp]
    scores = trainer.scores(sequences)
    log_probs = [score[sequence.loss_mask] for score, sequence in zip(scores, sequences, strict=True)]
    metrics = policy_step(trainer, AlgorithmConfig(clip_low=CLIP, clip_high=CLIP)).run(sequences)
    weights = {name.removeprefix("pretrained."): t.clone().numpy() for name, t in whole_tensors(trainer.head)}
    return log_probs, metrics["grad_norm"], weights  # the names are those of transformers


def every_family(paths: list[str], sp_size: int, options: dict[str, Any]) -> list:
    return [packed(path, int(os.environ["WORLD_SIZE"]), sp_size, **options) for path in paths]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folders of random models by family.

    The weights are so large that an error in attention changes log-probs by several nats.
    """
    root = tmp_path_factory.mktemp("families")
    return {family: save_tiny_model(root / family, family, initializer_range=0.3) for family in TRAINED_FAMILIES}


def assert_equal_to_the_plain_loop(path: str, ranks: list, dp: int, sp: int) -> None:
    log_probs, norm, weights = plain_loop(path)
    for rank, (got, got_norm, _) in enumerate(ranks):
        for one, other in zip(got, log_probs[rank // sp :: dp], strict=True):
            np.testing.assert_allclose(one, other, atol=3e-5)
        assert got_norm == pytest.approx(norm, rel=1e-4)
    assert_weights_equal(ranks[0][2], weights, atol=2e-5)


def compare_on_ranks(chosen: list[str], dp: int, sp: int, **options: Any) -> None:
    results = run_on_ranks(dp * sp, every_family, chosen, sp, options, timeout_s=400.0)
    for index, path in enumerate(chosen):
        assert_equal_to_the_plain_loop(path, [result[index] for result in results], dp, sp)


@pytest.mark.long
@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_one_process_equals_the_plain_loop(family, paths):
    assert_equal_to_the_plain_loop(paths[family], [packed(paths[family], 1, 1)], 1, 1)


def test_a_model_that_adds_its_own_tokens_to_a_sequence_is_refused(tmp_path):
    AutoConfig.for_model("cpmant", num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is of type cpmant, .* adds tokens"):
        load_causal_lm(str(tmp_path), torch.float32)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_recomputation_of_layers_with_a_state_does_not_change_the_update(family, paths):
    recomputed = packed(paths[family], 1, 1, activation_checkpointing=True)
    assert_equal_to_the_plain_loop(paths[family], [recomputed], 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("family", TRAINED_FAMILIES)
def test_layers_are_recomputed_without_their_attention(family, paths, monkeypatch):
    """Recomputation of layers changes neither the update nor the number of times that attention is computed.

    In models with attention sinks, recomputation doubles this number.
    """
    calls, attended = [], attention.attended

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return attended(*args, **options)

    monkeypatch.setattr(attention, "attended", counted)
    options = {"skip_selftest": "it counts calls"}
    packed(paths[family], 1, 1, **options)
    without = calls.count(True)
    calls.clear()
    recomputed = packed(paths[family], 1, 1, activation_checkpointing="selective", **options)
    assert calls.count(True) == (2 if family == "gpt_oss" else 1) * without
    assert_equal_to_the_plain_loop(paths[family], [recomputed], 1, 1)


FEW = ["qwen3", "qwen3_next"]
"""A family with attention only, and a family that also has layers with a state, and experts."""
OF_EACH_KIND = [*FEW, "lfm2", "gpt_oss", "deepseek_v3", "llama4_text", "minimax", "granitemoehybrid"]
"""Families with sinks, windows, latent attention, chunks, and other kinds of states."""


@pytest.mark.long
@pytest.mark.parametrize(
    "families", [OF_EACH_KIND, pytest.param(TRAINED_FAMILIES, marks=pytest.mark.slow)], ids=["of-each-kind", "all"]
)
def test_sequence_parallel_ranks_equal_the_plain_loop(families, paths):
    compare_on_ranks([paths[family] for family in families], 1, 2)


@pytest.mark.long
@pytest.mark.parametrize("families", [FEW, pytest.param(FAMILIES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_two_by_two_ranks_equal_the_plain_loop(paths, families):
    compare_on_ranks([paths[family] for family in families], 2, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "families",
    [[*FEW, "lfm2", "gpt_oss"], pytest.param(TRAINED_FAMILIES, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_four_sequence_parallel_ranks_equal_the_plain_loop(paths, families):
    """The models have fewer key-value heads than ranks. The states of recurrent layers pass through several ranks."""
    skipped = "the self-test runs on two sequence-parallel ranks"
    compare_on_ranks([paths[family] for family in families], 1, 4, skip_selftest=skipped)


@pytest.mark.parametrize("families", [FEW, pytest.param(FAMILIES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_two_data_parallel_ranks_equal_the_plain_loop(paths, families):
    compare_on_ranks([paths[family] for family in families], 2, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options", "ranks"),
    [("qwen3_moe", {"num_experts": 3}, 2), ("gpt_oss", {"num_local_experts": 2}, 4), ("llama4_text", {}, 4)],
)
def test_ranks_that_cannot_divide_the_experts_equal_the_plain_loop(family, options, ranks, tmp_path):
    path = save_tiny_model(tmp_path / "model", family, initializer_range=0.3, **options)
    compare_on_ranks([path], ranks, 1, gradient_sync="micro_batch", activation_checkpointing=True)
