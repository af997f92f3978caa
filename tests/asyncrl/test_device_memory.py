"""The predicted memory of ranks and engines, compared with hand-computed values and torch's memory tracker."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import (
    CpmAntConfig,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    Qwen3NextConfig,
)

from asyncrl.checks import check_options
from asyncrl.cli import plan_command
from asyncrl.cli.compose import compose_run
from asyncrl.cli.preflight import check_gpu_memory
from asyncrl.cli.quickstart import make_assets
from asyncrl.planner import device_memory
from asyncrl.planner.device_memory import (
    GIB,
    ModelSize,
    RankSetup,
    engine_memory,
    kv_tokens,
    longest_sample,
    rank_bytes,
    rank_memory,
    rank_setup,
)
from asyncrl.planner.fit import (
    MODELS,
    card_bytes,
    device_uses,
    layouts_that_fit,
    model_size,
    remedies_of,
    with_options,
    with_recomputation,
)
from benchmarks.gpu_paper import experiments_that_fit
from learner.config import GradientSync, LearnerConfig, LoraConfig, sums_each_micro_batch
from learner.fsdp import with_memory_options
from learner.heads import WEIGHT_CHUNK_TOKENS

pytestmark = pytest.mark.long

SMALL = model_size("Qwen3-0.6B")
ON_CUDA = ["learner.device=cuda", "rollout_fleet.device=cuda"]


def run(*options, model="Qwen3-0.6B", experiment="gsm8k"):
    return compose_run([f"experiment={experiment}", f"model.path={model}", *options])


# Models


def test_parameters_are_counted_from_existing_weight_files(tmp_path):
    assets = make_assets(tmp_path / "assets", seed=0, num_train=8, num_held_out=8, num_demonstrations=8)
    assert ModelSize.of(str(assets.model)).num_parameters == 75_008


def test_parameters_of_dense_and_mixture_models_follow_from_the_config(tmp_path):
    assert SMALL.num_parameters == pytest.approx(596_049_920, rel=1e-3)
    assert SMALL.root + sum(SMALL.layers) == pytest.approx(SMALL.num_parameters, rel=1e-6)
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-30B-A3B"]))
    mixture = model_size(str(tmp_path))
    assert mixture.num_parameters == 30_532_122_624, "the number must equal the number on the model's page"
    assert (mixture.intermediate, mixture.experts_per_token) == (8 * 768, 8)
    known = model_size("models/Qwen3-30B-A3B-Base")
    assert replace(known, num_parameters=mixture.num_parameters, layers=mixture.layers) == mixture
    assert known.num_parameters == pytest.approx(mixture.num_parameters, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "billions", "experts", "per_token", "cached", "cache_heads"),
    [
        (DeepseekV3Config(), 671.03, (256, 8), 9 * 2048, 61 * (512 + 64), 1),
        (GptOssConfig(num_hidden_layers=24, num_local_experts=32), 20.91, (32, 4), 4 * 2880, 24 * 1024, 8),
        (Qwen3NextConfig(), 79.67, (512, 10), 11 * 512, 12 * 1024, 2),  # only every fourth layer has attention
        (Glm4MoeConfig(head_dim=128), 106.85, (128, 8), 9 * 1408, 46 * 2 * 8 * 128, 8),
        (Llama4TextConfig(), 107.77, (16, 16), 16 * 8192, 48 * 2048, 8),  # every expert computes every token
        (Ernie4_5_MoeConfig(), 21.83, (64, 6), 8 * 1536, 28 * 2 * 512, 4),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_sizes_of_mixtures_are_read_from_the_config_of_each_family(
    tmp_path, config, billions, experts, per_token, cached, cache_heads
):
    config.save_pretrained(tmp_path)
    size = ModelSize.of(str(tmp_path))
    assert size.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert (size.num_experts, size.experts_per_token) == experts
    assert (size.intermediate, size.cached, size.cache_heads) == (per_token, cached, cache_heads)


def test_tensor_parallel_ranks_divide_the_cache_heads_and_replicate_a_single_cache_head():
    config = run("rollout_fleet.sglang.tp_size=8")
    whole, shared = replace(SMALL, cache_heads=1), replace(SMALL, cache_heads=4)
    assert engine_memory(config, whole)["kv cache"] == 4 * engine_memory(config, shared)["kv cache"]


def test_a_model_that_the_learner_does_not_support_has_no_estimate(tmp_path):
    CpmAntConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the learner does not support this"):
        ModelSize.of(str(tmp_path))


# Ranks

GB = 10**9
TRACKED = [
    ("Qwen3-8B", 6, {"num_shards": 4, "tokens": 16384}, 20.134),
    ("Qwen3-8B", 12, {"num_shards": 4, "tokens": 8192}, 23.172),
    ("Qwen3-8B", 4, {"num_shards": 4, "tokens": 16384, "checkpointing": False}, 30.575),
    ("Qwen3-8B", 4, {"num_shards": 4, "tokens": 16384, "whole_gradients": True}, 23.793),
    ("Qwen3-0.6B", 8, {"num_shards": 2, "tokens": 16384, "whole_gradients": True}, 6.369),
    ("Qwen3-0.6B", 8, {"num_shards": 2, "tokens": 16384, "whole_gradients": True, "checkpointing": False}, 15.516),
    ("Qwen3-0.6B", 4, {"num_shards": 1, "tokens": 8192, "whole_gradients": True}, 6.747),
    ("Qwen3-30B-A3B", 3, {"num_shards": 8, "tokens": 16384}, 16.844),
    ("Qwen3-8B", 6, {"num_shards": 4, "tokens": 16384, "keeps_attention": True}, 21.484),
    ("Qwen3-8B", 12, {"num_shards": 4, "tokens": 8192, "keeps_attention": True}, 25.197),
    ("Qwen3-0.6B", 8, {"num_shards": 2, "tokens": 16384, "whole_gradients": True, "keeps_attention": True}, 7.988),
    ("Qwen3-30B-A3B", 3, {"num_shards": 8, "tokens": 16384, "keeps_attention": True}, 17.148),
]
"""Model, number of layers, setup, and peak memory in GB.

torch's `FSDPMemTracker` measured the peak on the learner's packed model, in the second of two micro-batches. The
measurement used fake tensors, CUDA's matrix products and chunks of 1,024 tokens.
"""


@pytest.mark.parametrize(("name", "num_layers", "setup", "tracked_gb"), TRACKED)
def test_memory_of_a_rank_is_within_five_percent_of_the_tracked_peak(name, num_layers, setup, tracked_gb):
    model = ModelSize.from_settings({**MODELS[name], "num_hidden_layers": num_layers}, name)
    assert sum(rank_bytes(model, RankSetup(**setup)).values()) == pytest.approx(tracked_gb * GB, rel=0.05)


def test_memory_of_a_rank_equals_a_calculation_by_hand():
    """Each of four ranks has a quarter of the parameters and of AdamW's moments.

    Each rank has all gradients by default, and a quarter of the gradients with ``gradient_sync=micro_batch``.
    """
    config = run("learner.num_ranks=4")
    parts = rank_memory(config, SMALL)["learner"]
    assert parts["parameters"] == SMALL.num_parameters
    assert parts["optimizer"] == 2 * SMALL.num_parameters
    assert parts["gradients"] == 4 * SMALL.num_parameters
    scattered = with_options(config, {"learner.gradient_sync": GradientSync.micro_batch})
    assert rank_memory(scattered, SMALL)["learner"]["gradients"] == SMALL.num_parameters
    assert parts["gathered root unit"] == 2 * (151936 * 1024 + 1024)
    # The first two terms are the gradients of the tied output layer (float32) and of 4,096 tokens' logits (bfloat16).
    # The third term is the gradient of the logits of one chunk of 1,024 tokens, in both dtypes.
    assert parts["output layer"] == 4 * 151936 * 1024 + 2 * 4096 * 151936 + 6 * 1024 * 151936
    assert device_memory.WEIGHT_CHUNK_TOKENS == WEIGHT_CHUNK_TOKENS


def test_adapters_and_offloading_reduce_memory_of_a_rank():
    config = run()
    whole = rank_memory(config, SMALL)["learner"]
    adapters = with_options(config, {"learner.lora": LoraConfig(rank=8)})
    parts = rank_memory(adapters, SMALL)["learner"]
    assert parts["optimizer"] < whole["optimizer"] / 20
    assert parts["frozen parameters"] == 2 * SMALL.num_parameters // 2
    hosted = rank_memory(with_options(config, {"learner.offload_policy": True}), SMALL)["learner"]
    assert "parameters" not in hosted
    assert "optimizer" not in hosted


def test_roles_of_a_pool_add_their_parameters_and_share_temporary_memory():
    alone = rank_memory(run(), SMALL)["learner"]
    both = rank_memory(run("algorithm.advantage=gae", "algorithm.kl_reward_coef=0.01"), SMALL)["learner"]
    assert both["optimizer"] == 2 * alone["optimizer"]
    assert both["frozen parameters"] == 2 * SMALL.num_parameters // 2
    assert both["output layer"] == alone["output layer"]


PPO = ["algorithm.advantage=gae", "algorithm.kl_reward_coef=0.01", "learner.num_ranks=2"]


def test_each_role_is_counted_with_its_own_options():
    def sizes(*options):
        return rank_memory(run(*ON_CUDA, *PPO, *options), SMALL)["learner"]

    num = SMALL.num_parameters
    assert sizes()["optimizer"] == 2 * 8 * num // 2
    assert sizes("learner.critic.offload_policy=true")["optimizer"] == 8 * num // 2
    assert sizes("learner.reference.frozen_dtype=float32")["frozen parameters"] == 4 * num // 2
    assert "frozen parameters" not in sizes("learner.reference.param_offload=true")
    assert "frozen parameters" not in sizes("learner.reference.offload_policy=true")
    # While one role trains, the optimizer moments of the other role are in host memory.
    assert sizes("learner.optimizer_offload=true")["optimizer"] == 8 * num // 2
    assert sizes("learner.fsdp_size=2", "learner.critic.fsdp_size=1")["optimizer"] == 8 * num // 2 + 8 * num
    own = ["learner.critic.max_tokens_per_micro_batch=4096", "learner.critic.activation_checkpointing=false"]
    setups = {role: rank_setup(run(*ON_CUDA, *PPO, *own), role, SMALL) for role in ("actor", "critic", "ref")}
    assert {role: setup.tokens for role, setup in setups.items()} == {"actor": 16384, "critic": 4096, "ref": 16384}
    assert {role: setup.checkpointing for role, setup in setups.items()} == {
        "actor": True,
        "critic": False,
        "ref": True,
    }


def test_a_role_with_its_own_model_path_is_counted_with_the_sizes_of_that_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-4B"]))
    critic = model_size(str(tmp_path))
    parts = rank_memory(run(*PPO, f"learner.critic.path={tmp_path}"), SMALL)["learner"]
    assert parts["parameters"] == 4 * SMALL.num_parameters // 2 + 4 * critic.num_parameters // 2
    (tmp_path / "config.json").write_text("{}")
    check_gpu_memory(run(*ON_CUDA, *PPO, f"learner.critic.path={tmp_path}"), card_bytes("L4"))


COLOCATED = [*ON_CUDA, *PPO, "placement.colocated=true", "rollout_fleet.num_engines=2"]
MOVES = "learner.offload_at_transition_only=true"


def test_a_separate_pool_is_counted_separately_and_is_never_paused():
    config = run(*COLOCATED, MOVES, "placement.pools={values: 1}", "placement.critic=values")
    ranks = {use.name: use.parts for use in device_uses(config, SMALL, card_bytes("H100"))}
    assert ranks["learner rank (values)"]["optimizer"] == 8 * SMALL.num_parameters
    assert "paused engine" not in ranks["learner rank (values)"]
    assert ranks["learner rank (learner)"]["paused engine"] == ranks["engine"]["paused rank"] == 2 * GIB


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ([], 12 + 12 + 2),
        ([MOVES], 0),
        ([MOVES, "learner.critic.offload_at_transition_only=false"], 12),
        # ``param_offload`` moves the critic's parameters to the host, but not its optimizer moments
        ([MOVES, "learner.critic.param_offload=true"], 8),
        ([MOVES, "learner.reference.param_offload=true"], 0),
    ],
)
def test_a_colocated_engine_leaves_room_for_the_memory_of_each_paused_role(options, bytes_each):
    engine = device_uses(run(*COLOCATED, *options), SMALL, card_bytes("H100"))[-1]
    assert engine.parts["paused rank"] - 2 * GIB == pytest.approx(bytes_each * SMALL.num_parameters / 2, abs=8)


def test_a_role_that_does_not_fit_is_refused_with_the_option_to_change():
    own = ["learner.num_ranks=4", "learner.critic.max_tokens_per_micro_batch=262144", "algorithm.groups_per_step=1024"]
    with pytest.raises(ValueError, match=r"set learner.critic.max_tokens_per_micro_batch=131072$"):
        check_gpu_memory(run(*ON_CUDA, *PPO, *own, model="Qwen3-8B"), card_bytes("H200"))


@pytest.mark.parametrize(
    ("sync", "billions", "gib", "each"),
    [("auto", 0.6, 80, False), ("auto", 8, 80, True), ("auto", 8, 0, False), ("update", 8, 80, False),
     ("micro_batch", 0.6, 0, True)],
)  # fmt: skip
def test_gradient_sync_is_chosen_by_size_and_only_on_a_gpu(sync, billions, gib, each):
    assert sums_each_micro_batch(GradientSync(sync), round(billions * 1e9), gib * GIB) is each


def test_the_learner_on_cuda_recomputes_layers_and_sums_large_gradients_per_micro_batch(monkeypatch):
    properties = type("Properties", (), {"total_memory": 80})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    model, config = nn.Linear(2, 2), LearnerConfig()
    on_cpu = with_memory_options(config, model, torch.device("cpu"))
    assert (on_cpu.activation_checkpointing, on_cpu.gradient_sync) == (False, GradientSync.update)
    # The gradients (24 bytes) need more than 15% of the card (80 bytes), so ranks sum them after each micro-batch.
    on_cuda = with_memory_options(config, model, torch.device("cuda"))
    assert (on_cuda.activation_checkpointing, on_cuda.gradient_sync) == (True, GradientSync.micro_batch)
    named = replace(config, activation_checkpointing=False, gradient_sync=GradientSync.update)
    assert with_memory_options(named, model, torch.device("cuda")) == named


@pytest.mark.parametrize(
    ("model", "card", "options", "want"),
    [
        ("Qwen3-8B", "H100", ["learner.num_ranks=4"], "selective"),
        ("Qwen3-8B", "H100", ["learner.num_ranks=2", "learner.max_tokens_per_micro_batch=8192"], None),
        ("Qwen3-8B", "H100", ["learner.num_ranks=4", "learner.max_tokens_per_micro_batch=65536"], None),
        ("Qwen3-8B", "H100", ["learner.num_ranks=4", "learner.activation_checkpointing=true"], True),
        ("Qwen3-8B", "H100", ["learner.num_ranks=4", "learner.activation_checkpointing=false"], False),
        ("Qwen3-0.6B", "A10", [], "selective"),
        ("Qwen3-4B", "A100-40", ["learner.num_ranks=2"], None),
    ],
)
def test_layers_store_their_attention_by_default_if_the_ranks_fit_easily(model, card, options, want):
    config = run(*ON_CUDA, *options, model=model)
    assert with_recomputation(config, card_bytes(card)).learner.activation_checkpointing == want


def test_without_a_known_gpu_or_model_the_recomputation_stays_unset(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert with_recomputation(run(*ON_CUDA), 0).learner.activation_checkpointing is None
    assert with_recomputation(run("learner.device=cpu"), card_bytes("H100")).learner.activation_checkpointing is None
    unusual = run(*ON_CUDA, model=str(tmp_path))
    assert with_recomputation(unusual, card_bytes("H100")).learner.activation_checkpointing is None


# Engines


def test_the_kv_cache_holds_the_longest_samples_or_the_configured_tokens():
    config = run()
    assert kv_tokens(config) == 32 * 8 * (512 + 1024)
    assert engine_memory(config, SMALL)["kv cache"] == kv_tokens(config) * 2 * 28 * 8 * 128 * 2
    assert kv_tokens(run("rollout_fleet.sglang.max_total_tokens=1000")) == 1000


def test_an_engine_fills_a_card_with_its_cache_up_to_the_memory_fraction():
    card = card_bytes("H100")
    parts = engine_memory(run(), model_size("Qwen3-8B"), card_bytes=card)
    assert sum(parts.values()) == card
    assert parts["activations and graphs"] == pytest.approx(0.17 * card, rel=0.01)
    given = run("rollout_fleet.sglang.extra_args=['--mem-fraction-static=0.5']")
    assert engine_memory(given, SMALL, card_bytes=card)["activations and graphs"] == card // 2


# GPUs


@pytest.mark.parametrize(
    ("model", "options", "card", "remedy"),
    [
        ("Qwen3-14B", ["learner.num_ranks=8", "learner.gradient_sync=update"], "H100",
         "learner.gradient_sync=micro_batch"),
        ("Qwen3-8B", ["learner.num_ranks=4", "learner.activation_checkpointing=false"], "H100",
         "learner.activation_checkpointing=true"),
        ("Qwen3-8B", ["learner.num_ranks=4", "learner.max_tokens_per_micro_batch=131072"], "H100",
         "learner.max_tokens_per_micro_batch=65536"),
        ("Qwen3-8B", ["learner.num_ranks=1"], "H200", "learner.max_tokens_per_micro_batch=4096"),
        ("Qwen3-32B", ["learner.num_ranks=16"], "A100-40",
         "learner.max_tokens_per_micro_batch=2048 rollout_fleet.sglang.tp_size=2 learner.num_ranks=32"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_is_refused_with_bytes_and_the_option_that_helps(model, options, card, remedy):
    config = run(*ON_CUDA, *options, model=model)
    with pytest.raises(ValueError, match=r"needs \d+\.\d GiB \(.*\), expected at most") as refused:
        check_gpu_memory(config, card_bytes(card))
    assert str(refused.value).endswith(f"; set {remedy}")
    size = model_size(model)
    changed = with_options(config, remedies_of(config, size, card_bytes(card)))
    assert all(use.fits for use in device_uses(changed, size, card_bytes(card)))
    check_gpu_memory(run(*options, "learner.device=cpu", "rollout_fleet.device=cpu", model=model), card_bytes(card))


def test_a_run_that_never_fits_is_refused_without_an_option():
    with pytest.raises(ValueError, match=r"GPUs .*, or a smaller model$"):
        check_gpu_memory(run(*ON_CUDA, "rollout_fleet.sampling.max_new_tokens=100000000"), card_bytes("H100"))


def test_the_memory_of_a_model_with_unknown_sizes_is_not_checked(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    check_gpu_memory(run(*ON_CUDA, model=str(tmp_path)), card_bytes("L4"))


def test_colocated_devices_reserve_the_memory_that_the_paused_side_keeps():
    config = run(*ON_CUDA, experiment="gsm8k_colocated")
    card = card_bytes("A10")
    rank, engine = device_uses(config, SMALL, card)
    assert rank.parts["paused engine"] == engine.parts["paused rank"] == 2 * GIB
    assert engine.total == card
    stays = with_options(config, {"learner.offload_at_transition_only": False})
    kept = sum(rank.parts[kind] for kind in ("CUDA context", "parameters", "optimizer"))
    assert device_uses(stays, SMALL, card)[1].parts["paused rank"] == kept


@pytest.mark.parametrize(
    ("model", "num_ranks", "tp_size", "card", "remedy"),
    [
        ("Qwen3-8B", 16, 1, "A10",
         "learner.max_tokens_per_micro_batch=4096 rollout_fleet.sglang.tp_size=2 rollout_fleet.num_engines=8"),
        ("Qwen3-8B", 8, 1, "A10",
         "learner.max_tokens_per_micro_batch=2048 rollout_fleet.sglang.tp_size=2 learner.num_ranks=16"),
        ("Qwen3-14B", 4, 2, "A100-40", "learner.num_ranks=16 rollout_fleet.num_engines=8"),
        ("Qwen3-32B", 6, 2, "H100", "learner.num_ranks=12 rollout_fleet.num_engines=6"),
        ("Qwen3-8B", 6, 2, "A100-40", "learner.max_tokens_per_micro_batch=8192"),
    ],
)  # fmt: skip
def test_colocated_devices_that_do_not_fit_get_a_remedy_that_the_checks_accept(model, num_ranks, tp_size, card, remedy):
    shape = [f"learner.num_ranks={num_ranks}", f"rollout_fleet.num_engines={num_ranks // tp_size}"]
    config = run(*ON_CUDA, *shape, f"rollout_fleet.sglang.tp_size={tp_size}", experiment="gsm8k_colocated", model=model)
    size, card = model_size(model), card_bytes(card)
    found = remedies_of(config, size, card)
    changed = with_options(config, found)
    check_options(changed)
    assert all(use.fits for use in device_uses(changed, size, card))
    assert remedy == " ".join(f"{name}={value}" for name, value in found.items())


def test_every_shipped_experiment_fits_on_the_gpus_that_its_file_names():
    assert set(experiments_that_fit().values()) == {""}


def test_the_plan_prints_what_fits_with_bytes_by_kind(capsys):
    assert plan_command.main(["--fit", "Qwen3-8B", "--gpu", "H100:8"]) == 0
    page = capsys.readouterr().out
    assert "8.19 billion parameters; 8 x H100 of 79.6 GiB" in page
    rows = [line.split() for line in page.splitlines() if " x tp " in line]
    assert {(row[0], row[1]) for row in rows} >= {("2", "1"), ("4", "4"), ("6", "2")}
    assert not any(row[0] == "1" for row in rows), "one rank cannot hold 131 GB, so no row may have one rank"
    assert "gradients 7.6" in page
    assert "weights 15.3, kv cache 50.8, activations and graphs 13.6" in page
    assert plan_command.main(["--fit", "dapo_math_30b_a3b", "--gpu", "H100:16", "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)
    # With nine ranks, neither the 128 experts nor the rows of an expert can be divided equally.
    assert {layout["num_ranks"] for layout in layouts} == {8, *range(10, 16)}
    assert all(layout["budget"] * layout["sp_size"] >= 2048 + 20480 for layout in layouts)


def test_layouts_that_fit_respect_the_options_of_each_role():
    overrides = ["algorithm.advantage=gae", "learner.critic.sp_size=2"]
    config = run(*overrides, "learner.critic.max_tokens_per_micro_batch=4096")
    layouts = layouts_that_fit(config, SMALL, card_bytes("H100"), 8)
    assert {layout.num_ranks for layout in layouts} == {2, 4, 6}
    too_small = run(*overrides, "learner.critic.max_tokens_per_micro_batch=64")
    assert longest_sample(too_small) > 128
    assert layouts_that_fit(too_small, SMALL, card_bytes("H100"), 8) == []


def test_the_plan_says_if_nothing_fits_and_refuses_unknown_gpus_and_models(capsys):
    assert plan_command.main(["--fit", "Qwen3-32B", "--gpu", "H100:8"]) == 1
    assert "nothing fits" in capsys.readouterr().out
    assert plan_command.main(["--fit", "gsm8k", "--gpu", "H100:1"]) == 1
    assert "placement.colocated=true" in capsys.readouterr().out
    for arguments, named in (
        (["gsm8k", "--gpu", "V100"], "the GPU must be one of A10, A100"),
        (["gsm8k", "--gpu", "H100:0"], "--gpu must be NAME:COUNT"),
        (["nowhere"], "nowhere has no config.json"),
    ):
        assert plan_command.main(["--fit", *arguments]) == 2
        assert named in capsys.readouterr().err
    with pytest.raises(SystemExit):
        plan_command.main([])
