"""The arguments that SGLang resolves for every shipped experiment, on simulated GPUs."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from asyncrl.cli.compose import CONFIG_DIR, compose_run
from asyncrl.cli.quickstart import MODEL_CONFIG
from asyncrl.planner.device_memory import engine_reserve
from asyncrl.run.fleet_group import fleet_options
from rollout_fleet.config import EngineDevice
from rollout_fleet.engines.sglang import SGLangEngine
from rollout_fleet.engines.sglang_server import WEIGHT_LOADER
from tests.support.training_run import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not importlib.util.find_spec("sglang"), reason="SGLang is not installed"),
]
EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))
CARDS = {"A100": "flashinfer", "H100": "fa3", "B200": "trtllm_mha"}
"""The attention backend that SGLang chooses by itself on each card."""
HEAD_DIMS = {
    "flashinfer": {64, 128, 256},
    "fa3": set(range(8, 257, 8)),
    "trtllm_mha": {64, 128},
    "triton": range(1, 513),
}
"""Head sizes for which each backend has kernels. All kernels except Triton's accept only float16 and bfloat16."""
QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "dtype": "bfloat16"}
MODELS = {
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
    },
    "Qwen3-30B-A3B-Base": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 32768,
    },
}


def engine_of(name, folder):
    """Return a pair: the options of an experiment, and its CUDA engine. The model folder has only ``config.json``."""
    config = compose_run([f"experiment={name}"])
    model = MODELS.get(config.model.path)
    settings = MODEL_CONFIG if model is None else QWEN | model
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    fleet = replace(fleet_options(config), device=EngineDevice.cuda)
    return config, SGLangEngine(
        fleet, model_path=str(path), device=EngineDevice.cuda, rank=0, log_dir=str(folder), seed=0
    )


@pytest.fixture(scope="module")
def on_cards(tmp_path_factory):
    """Return three things for each card and experiment: the options, the engine, and SGLang's resolved arguments."""
    folder = tmp_path_factory.mktemp("cards")
    (folder / "server.yaml").write_text("api-key: 0\n")
    engines = [engine_of(name, folder) for name in EXPERIMENTS]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "pretended_card.py")],
        input=json.dumps([engine.server.arguments(folder) for _, engine in engines]),
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        card: {name: (*engine, made) for name, engine, made in zip(EXPERIMENTS, engines, options, strict=True)}
        for card, options in json.loads(done.stdout).items()
    }


@pytest.fixture(params=CARDS)
def resolved(request, on_cards):
    return request.param, on_cards[request.param]


def test_the_attention_backend_of_each_experiment_supports_dtype_and_head_size(resolved):
    card, experiments = resolved
    for name, (_, engine, made) in experiments.items():
        backend, head_dim = made["attention_backend"], engine.facts.head_dim
        assert head_dim in HEAD_DIMS[backend], (name, backend, head_dim)
        assert made["dtype"] == "bfloat16", name
        assert backend == (CARDS[card] if head_dim == 128 else "triton"), name


GIB_OF_CARD = {"A100": 80, "H100": 80, "B200": 180}


def test_each_experiment_decodes_with_graphs_overlap_float32_logits_and_the_planned_memory(resolved):
    card, experiments = resolved
    for name, (config, _, made) in experiments.items():
        decode = made["cuda_graph_config"]["decode"]
        assert decode["backend"] == "full", name
        assert max(decode["bs"]) >= config.rollout_fleet.sglang.max_running_requests, name
        assert made["disable_overlap_schedule"] is False, name
        assert made["enable_fp32_lm_head"] is True, name
        assert made["custom_weight_loader"] == [WEIGHT_LOADER], name
        card_bytes = GIB_OF_CARD[card] << 30
        reserved = engine_reserve(card_bytes, config.rollout_fleet.sglang.tp_size)
        assert 1 - reserved / card_bytes == pytest.approx(made["mem_fraction_static"], abs=0.005), name


def test_colocated_experiments_keep_the_memory_saver(resolved):
    _, experiments = resolved
    for name, (config, _, made) in experiments.items():
        assert made["enable_memory_saver"] is config.placement.colocated, name
    assert sum(config.placement.colocated for config, _, _ in experiments.values()) >= 2
