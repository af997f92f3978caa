"""``dry_run=true``: what a run would take and wait for; nothing is made or started."""

import json
from dataclasses import replace

import pytest

from asyncrl.cli import train_command
from asyncrl.cli.compose import CONFIG_DIR, compose_run
from asyncrl.cli.preflight import dry_run
from asyncrl.cli.quickstart import make_assets
from asyncrl.planner.device_memory import ModelSize, engine_memory, kv_tokens, rank_memory
from learner.config import Device, GradientSync, LoraConfig

EXPERIMENTS = sorted(path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml"))
QWEN3_600M = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.fixture
def qwen(tmp_path):
    """A folder with the sizes of Qwen3-0.6B, and no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_600M))
    return str(folder)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_dry_run_of_every_experiment_shows_its_resources(name, qwen, tmp_path):
    config = compose_run([f"experiment={name}", f"output_dir={tmp_path / 'out'}"])
    if not config.quickstart:
        config = replace(config, model=replace(config.model, path=qwen))
    found = dry_run(config)
    page = found.page
    assert f"the learner trains on a token at most {config.buffer.max_lag} learner step" in page
    assert f"{config.rollout_fleet.num_engines} sglang engines" in page
    assert f"then {config.total_steps} steps" in page
    assert all(sum(parts.values()) > 0 for parts in found.memory.values())
    assert found.memory
    assert bool(found.problems) == ("not ready" in page)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_resolved_devices_and_the_resources_of_an_elastic_fleet(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    own = [f"output_dir={tmp_path}", "rollout_fleet.engine=transformers", "learner.device=auto"]
    page = dry_run(compose_run([*own, "rollout_fleet.num_engines={min:1,max:3}"])).page
    assert "learner pool learner: 1 rank on cpu (auto)" in page
    assert "1 to 3 transformers engines on cpu (auto)" in page
    assert "2 CPUs (4 with all engines) and 0 GPUs" in page
    page = dry_run(compose_run([*own, "ray.address=host:1", "placement.num_nodes=2"])).page
    assert "1 transformers engines on what the cluster has" in page


def test_a_dry_run_of_the_quickstart_passes_and_leaves_no_files(tmp_path, capsys):
    options = [f"output_dir={tmp_path / 'out'}", "rollout_fleet.engine=transformers"]
    assert train_command.main(["dry_run=true", *options]) == 0
    page = capsys.readouterr().out
    assert page.startswith("dry run: nothing was started")
    assert "every check passed" in page
    assert "first prompt" in page
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_errors_together_with_the_figures(capsys):
    assert train_command.main(["experiment=custom", "model.path=nowhere", "dry_run=true"]) == 2
    page = capsys.readouterr().out
    assert "model.path must be a directory" in page
    assert "nowhere holds no config.json" in page
    assert "at most 96 groups are open" in page


def test_parameters_are_counted_in_existing_weights(tmp_path):
    """75,008, as the quickstart's own page counts them; and about 0.6 billion by the sizes alone."""
    assets = make_assets(tmp_path / "assets", seed=0, num_train=8, num_held_out=8, num_demonstrations=8)
    assert ModelSize.of(str(assets.model)).num_parameters == 75_008


def test_parameters_of_dense_and_mixture_models_follow_from_the_config(tmp_path, qwen):
    assert ModelSize.of(qwen).num_parameters == pytest.approx(596_049_920, rel=1e-3)
    (tmp_path / "moe").mkdir()
    mixture = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "hidden_size": 2048}
    mixture |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    mixture |= {"tie_word_embeddings": False}
    (tmp_path / "moe" / "config.json").write_text(json.dumps({**QWEN3_600M, **mixture}))
    size = ModelSize.of(str(tmp_path / "moe"))
    assert size.num_parameters == pytest.approx(30.5e9, rel=0.01)
    assert size.intermediate == 8 * 768


def test_memory_of_a_rank_equals_a_calculation_by_hand(qwen):
    """Four ranks: 4 bytes per parameter and 8 of Adam in quarters; gradients whole until the update, or in quarters."""
    config = compose_run(["experiment=gsm8k", "learner.num_ranks=4", f"model.path={qwen}"])
    model = ModelSize.of(qwen)
    parts = rank_memory(config, model)["learner"]
    assert parts["parameters"] == model.num_parameters
    assert parts["optimizer"] == 2 * model.num_parameters
    assert parts["gradients"] == 4 * model.num_parameters
    scattered = replace(config, learner=replace(config.learner, gradient_sync=GradientSync.micro_batch))
    assert rank_memory(scattered, model)["learner"]["gradients"] == model.num_parameters
    assert parts["logits"] == 3 * 1024 * 151936 * 4


def test_adapters_and_offloading_reduce_memory_of_a_rank(qwen):
    config = compose_run(["experiment=gsm8k", f"model.path={qwen}"])
    model = ModelSize.of(qwen)
    whole = rank_memory(config, model)["learner"]
    adapters = rank_memory(
        replace(config, learner=replace(config.learner, lora=LoraConfig(rank=8), device=Device.cuda)), model
    )["learner"]
    assert adapters["optimizer"] < whole["optimizer"] / 20
    assert adapters["frozen parameters"] == 2 * model.num_parameters // 2
    hosted = rank_memory(replace(config, learner=replace(config.learner, offload_policy=True)), model)["learner"]
    assert "parameters" not in hosted
    assert "optimizer" not in hosted


def test_the_kv_cache_holds_the_longest_samples_or_the_configured_tokens(qwen):
    config = compose_run(["experiment=gsm8k", f"model.path={qwen}"])
    assert kv_tokens(config) == 32 * 8 * (512 + 1024)
    cache = engine_memory(config, ModelSize.of(qwen))["kv cache"]
    assert cache == kv_tokens(config) * 2 * 28 * 8 * 128 * 2
    given = compose_run(["experiment=gsm8k", f"model.path={qwen}", "rollout_fleet.sglang.max_total_tokens=1000"])
    assert kv_tokens(given) == 1000
