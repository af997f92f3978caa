import importlib
import json
import subprocess
import sys

import pytest

import rollout_fleet
from rollout_fleet.config import (
    EngineKind,
    OnUpdate,
    RolloutFleetConfig,
    SamplingConfig,
    SaveProgress,
    SGLangConfig,
    TransformersConfig,
)
from rollout_fleet.engines import make_engine
from rollout_fleet.engines.engine import load_decoder, read_model_facts
from rollout_fleet.engines.scripted import ScriptedEngine

KEEPS = SGLangConfig(on_update=OnUpdate.keep)


@pytest.mark.parametrize("module", ["rollout_fleet", "rollout_fleet.config", "rollout_fleet.loop"])
def test_importing_the_fleet_loads_neither_torch_nor_ray_nor_sglang(module):
    check = f"import sys, {module}; print(sorted({{'torch', 'ray', 'sglang', 'transformers'}} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"


def test_every_public_name_of_the_package_exists_and_the_list_is_sorted():
    assert rollout_fleet.__all__ == sorted(rollout_fleet.__all__)
    assert all(hasattr(rollout_fleet, name) for name in rollout_fleet.__all__)


def test_a_missing_sglang_is_an_error_with_a_remedy_and_no_other_engine_is_used(monkeypatch, model_path, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else real(name))
    with pytest.raises(ValueError, match=r"rollout_fleet\.engine=transformers"):
        make_engine(RolloutFleetConfig(), model_path=model_path, rank=0, log_dir=str(tmp_path), seed=0)


def test_the_scripted_engine_takes_its_script_from_the_config(tmp_path):
    config = RolloutFleetConfig(engine=EngineKind.scripted)
    engine = make_engine(config, model_path="", rank=0, log_dir=str(tmp_path), seed=0)
    assert isinstance(engine, ScriptedEngine)


@pytest.mark.parametrize("engine", [EngineKind.sglang, EngineKind.transformers])
def test_a_path_without_a_model_is_refused_before_any_process_starts(engine, tmp_path):
    with pytest.raises(ValueError, match=r"must hold a config.json"):
        make_engine(RolloutFleetConfig(engine=engine), model_path=str(tmp_path), rank=0, log_dir="", seed=0)


def test_the_end_of_sequence_and_padding_tokens_come_from_the_model_files(model_path, tmp_path):
    facts = read_model_facts(model_path)
    assert (facts.vocab_size, facts.eos_ids, facts.pad_id) == (19, (1,), 0)
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "eos_token_id": [4, 9]}')
    facts = read_model_facts(str(tmp_path))
    assert (facts.vocab_size, facts.eos_ids, facts.pad_id) == (50, (4, 9), 4)


def test_sizes_that_are_missing_in_a_config_are_the_defaults_of_the_model_family(tmp_path):
    """The published configuration of Gemma 3 (4B) has neither the vocabulary size nor the number of heads."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "eos_token_id": 1}))
    facts = read_model_facts(str(tmp_path))
    assert (facts.vocab_size, facts.head_dim, facts.eos_ids) == (262208, 256, (1,))


def test_text_is_decoded_without_special_tokens(model_path):
    decode = load_decoder(model_path)
    assert decode([3, 4, 13, 5, 1]) == "01>2"
    assert decode([1]) == ""


def test_each_outer_stop_deadline_is_longer_than_the_inner_deadlines():
    config = RolloutFleetConfig(stop_timeout_s=3.0)
    assert config.stop_timeout_s < config.server_stop_timeout_s < config.worker_stop_timeout_s
    assert config.worker_stop_timeout_s > 2 * config.stop_timeout_s + config.server_stop_timeout_s


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RolloutFleetConfig(num_engines=0), "num_engines must be >= 1, got 0"),
        (lambda: RolloutFleetConfig(num_engines="two"), "num_engines must be >= 1, got two"),
        (lambda: RolloutFleetConfig(num_engines={"min": 3, "max": 2}), "must be a number or {min: N, max: M} with 1"),
        (lambda: RolloutFleetConfig(num_engines={"min": 3}), "num_engines must be a number or {min: N"),
        (
            lambda: RolloutFleetConfig(num_engines={"min": 1, "max": 4}, min_engines=2),
            "min_engines must be in 1..1,",
        ),
        (lambda: RolloutFleetConfig(renew_every_s=0), "renew_every_s must be > 0 seconds, got 0"),
        (lambda: RolloutFleetConfig(reward_processes=0), "reward_processes must be >= 1, got 0"),
        (lambda: TransformersConfig(max_rows=0), "transformers.max_rows must be >= 1, got 0"),
        (lambda: SGLangConfig(tp_size=0), "sglang.tp_size must be >= 1, got 0"),
        (lambda: SamplingConfig(temperature=-1.0), r"temperature must be >= 0, got -1.0; 0 is greedy decoding"),
        (lambda: SamplingConfig(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0; 1.0 keeps all tokens"),
        (lambda: SamplingConfig(top_k=0), "sampling.top_k must be -1 or >= 1, got 0; -1 keeps all tokens"),
        (lambda: SamplingConfig(min_p=1.0), r"min_p must be in \[0, 1\), got 1.0; 0.0 keeps all tokens"),
        (lambda: SamplingConfig(max_new_tokens=0), "max_new_tokens must be >= 1, got 0"),
        (
            lambda: RolloutFleetConfig(engine=EngineKind.transformers, sglang=KEEPS),
            "on_update must be recompute with rollout_fleet.engine=transformers, got keep",
        ),
        (
            lambda: RolloutFleetConfig(save_progress=SaveProgress.at_updates, sglang=KEEPS),
            "on_update must be recompute with rollout_fleet.save_progress=at_updates, got keep",
        ),
        (
            lambda: RolloutFleetConfig(engine=EngineKind.transformers, groups_in_flight={"min": 1, "max": 4}),
            r"must be a number with rollout_fleet\.engine=transformers.*does not report its load",
        ),
        *(
            (lambda bounds=bounds: RolloutFleetConfig(groups_in_flight=bounds), r"groups_in_flight must be .*got")
            for bounds in (0, 2.5, True, {"min": 0, "max": 4}, {"min": 4, "max": 2}, {"min": 4}, {"most": 3})
        ),
    ],
)
def test_an_error_names_an_option_that_is_out_of_its_bounds(make, message):
    with pytest.raises(ValueError, match=f"rollout_fleet.*{message}"):
        make()


def test_a_model_without_a_vocabulary_size_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match=r"config.json must name an integer vocab_size, got None"):
        read_model_facts(str(tmp_path))
