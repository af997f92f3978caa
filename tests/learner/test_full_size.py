"""An update of each experiment's policy on fake tensors. The model has its full width, but only two layers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncrl.cli.compose import CONFIG_DIR, compose_run
from benchmarks.full_size import MODELS, QUICKSTART, fake_update
from benchmarks.gpu_paper import planned_bytes
from learner.config import SELECTIVE, GradientSync, LearnerConfig
from learner.packing import MicroBatch
from tests.support.ranks import run_on_ranks

EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml") if path.stem != "custom")
ALWAYS = ("dapo_math_30b_a3b", "dapo_math_8_nodes", "gsm8k_lora")
"""Experiments whose tests are not slow. They combine experts, sequence parallelism and adapters."""
LAYERS = 2
SMALL = {**QUICKSTART, "num_hidden_layers": LAYERS}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in EXPERIMENTS]
)
def test_an_update_of_each_experiment_at_full_width_never_waits_for_the_device(name):
    config = compose_run([f"experiment={name}"])
    settings = MODELS.get(Path(config.model.path).name, QUICKSTART)
    (update,) = run_on_ranks(
        1, fake_update, {**settings, "num_hidden_layers": LAYERS}, config.learner, config.algorithm
    )
    assert update.waits == []
    assert update.dtypes == {(torch.float32, torch.float32)}
    assert update.num_without_gradient == 0
    assert update.num_micro_batches == 2
    learner = config.learner
    reduced = update.num_micro_batches if update.reduces_each else 1
    if learner.num_ranks > 1:
        # Each unit is gathered twice per micro-batch. The root unit stays gathered, so it is gathered once.
        assert update.collectives["allgather_base"] == update.num_micro_batches * (2 * update.num_units - 1)
        assert update.collectives["reduce_scatter_base"] == reduced * update.num_units
    num_attention = update.num_micro_batches * LAYERS * (3 if update.recomputes else 2)
    assert update.collectives["alltoall_base"] == (4 * num_attention if learner.sp_size > 1 else 0)


@pytest.mark.long
def test_recomputation_without_attention_does_not_repeat_the_exchange_of_heads():
    options = {"num_ranks": 4, "sp_size": 2, "activation_checkpointing": "selective"}
    learner = LearnerConfig(max_tokens_per_micro_batch=64, **options)
    (update,) = run_on_ranks(1, fake_update, SMALL, learner)
    assert update.recomputes
    assert update.waits == []
    assert update.collectives["alltoall_base"] == 4 * update.num_micro_batches * LAYERS * 2


PLANNED = {
    "one-product": (
        "phi3",
        8,
        {"hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40, "num_key_value_heads": 10},
    ),
    "windows-and-sinks": ("gpt_oss", 8, {"num_local_experts": 32}),
    "one-dense-layer": (
        "deepseek_v3",
        8,
        {
            "num_hidden_layers": 6,
            "n_routed_experts": 32,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "num_attention_heads": 32,
        },
    ),
    "experts-by-their-rows": ("qwen3_moe", 8, {"num_experts": 12, "head_dim": 128}),
    "padded-experts": ("qwen3_moe", 7, {"num_experts": 12, "head_dim": 128}),
}
"""Family, ranks and sizes. In the last two entries, the experts are sharded by their rows, or padded."""
PLANNED_ALWAYS = ("windows-and-sinks", "padded-experts")


def planned_and_tracked(family: str, num_ranks: int, sizes: dict[str, int]) -> tuple[int, int]:
    """Return a pair for one rank: the peak memory that the planner predicts, and the peak of torch's memory tracker.

    The model has three layers, which store the outputs of attention for the backward pass.
    """
    settings = {"model_type": family, "num_hidden_layers": 3, "vocab_size": 32_000, "pad_token_id": 0, **sizes}
    memory = {"activation_checkpointing": SELECTIVE, "gradient_sync": GradientSync.micro_batch}
    learner = LearnerConfig(num_ranks=num_ranks, **memory)
    return planned_bytes(settings, learner), fake_update(settings, learner, num_sequences=16).peak_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in PLANNED_ALWAYS else pytest.mark.slow) for case in PLANNED]
)
def test_the_planner_predicts_the_peak_memory_with_stored_attention(case):
    ((planned, tracked),) = run_on_ranks(1, planned_and_tracked, *PLANNED[case])
    assert planned == pytest.approx(tracked, rel=0.08)


def waits_with(change: str) -> list[str]:
    original = MicroBatch.to

    def to(batch: MicroBatch, device: torch.device) -> MicroBatch:
        if change == "item":
            batch.input_ids.max().item()
        return replace(original(batch, device), columns={name: each.cpu() for name, each in batch.columns.items()})

    MicroBatch.to = to  # this process runs no other test
    return fake_update(SMALL, LearnerConfig(max_tokens_per_micro_batch=64)).waits


@pytest.mark.long
def test_a_wait_for_the_device_in_the_loop_is_detected():
    (waits,) = run_on_ranks(1, waits_with, "cpu")
    assert set(waits) == {"cpu"}
    with pytest.raises(AssertionError, match=r"item|_local_scalar_dense"):
        run_on_ranks(1, waits_with, "item")
