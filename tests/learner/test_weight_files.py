"""Each rank reads its own rows of the weights, for all kinds of files, names and conversions."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from learner import fsdp, weight_files
from learner.config import Device, LearnerConfig, LoraConfig
from learner.pretrained import load_causal_lm
from learner.trainer import Trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import save_tiny_model
from tests.support.whole_weights import whole_tensors

CONFIG = LearnerConfig(device=Device.cpu, skip_selftest="compares weights")


def loaded(model_path: str, num_ranks: int = 1, lora_rank: int = 0) -> tuple[dict[str, np.ndarray], int]:
    """Return the whole weights by name, and the number of bytes that this rank read."""
    fsdp.MIN_UNIT_NUMEL = 1
    weight_files.BLOCK_BYTES = 300  # with this size, a block has only a few rows
    num_bytes, fromfile = [], np.fromfile
    np.fromfile = lambda *a, **k: num_bytes.append(a[2]) or fromfile(*a, **k)
    try:
        config = replace(CONFIG, num_ranks=num_ranks, lora=LoraConfig(rank=lora_rank))
        trainer = Trainer(config, model_path=model_path, total_updates=1)
    finally:
        np.fromfile = fromfile
        weight_files.BLOCK_BYTES = 32 << 20
    whole = {name.removeprefix("pretrained."): tensor.clone().numpy() for name, tensor in whole_tensors(trainer.head)}
    return whole, sum(num_bytes)


def expected(model_path: str) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def assert_equal(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def shard_files(model_path: str, num_bytes: str = "10KB") -> None:
    """Replace the model's weight file by several files with an index."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    Path(model_path, "model.safetensors").unlink()
    model.save_pretrained(model_path, max_shard_size=num_bytes)
    assert len(list(Path(model_path).glob("model-*.safetensors"))) > 2


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "phi3", "llama4_text"])
def test_three_ranks_read_a_checkpoint_of_several_files(family: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", family)
    shard_files(path)
    want = expected(path)
    assert_equal(loaded(path)[0], want)
    ranks = run_on_ranks(3, loaded, path, 3)
    assert_equal(ranks[0][0], want)
    if family == "qwen3_moe":  # the file stores four experts separately
        num_bytes = sum(value.nbytes for value in want.values())
        assert sum(read for _, read in ranks) == num_bytes
        assert max(read for _, read in ranks) < 0.5 * num_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1}),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}),
        ("llama4_text", {}),
    ],
)
def test_ranks_that_cannot_divide_the_experts_divide_their_rows(family: str, options: dict, tmp_path: Path) -> None:
    """Four ranks load two experts. If FSDP sharded the experts, it would add two experts as padding."""
    path = save_tiny_model(tmp_path / "model", family, **options)
    shard_files(path)
    ranks = run_on_ranks(4, loaded_with_shards, path, 4)
    assert_equal(ranks[0][0], expected(path))
    for _, held, sizes in ranks:
        experts = {name: dimension for name, dimension in held.items() if name.endswith("_proj") and "experts" in name}
        assert set(experts.values()) == {1}
        assert set(held.values()) - {1} == {0}
        assert all(
            is_contiguous and local * 4 == whole for name in experts for local, whole, is_contiguous in [sizes[name]]
        )


def loaded_with_shards(model_path: str, num_ranks: int) -> tuple[dict[str, np.ndarray], dict[str, int], dict]:
    """Return three values: the whole weights, the sharded dimension by parameter, and facts about this rank's shards.

    The facts about a parameter are: the number of values in the shard, the number of values in the whole parameter, and
    whether the shard is contiguous.
    """
    trainer = Trainer(replace(CONFIG, num_ranks=num_ranks), model_path=model_path, total_updates=1)
    parameters = {name.removeprefix("pretrained."): each for name, each in trainer.head.named_parameters()}
    dimensions = {name: each.placements[0].dim for name, each in parameters.items()}
    sizes = {
        name: (each.to_local().numel(), each.numel(), each.to_local().is_contiguous())
        for name, each in parameters.items()
    }
    whole = {name.removeprefix("pretrained."): tensor.clone().numpy() for name, tensor in whole_tensors(trainer.head)}
    return whole, dimensions, sizes


def test_weights_that_torch_saved_are_read(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    want = expected(path)
    file = tmp_path / "model" / "model.safetensors"
    torch.save(load_file(file), tmp_path / "model" / "pytorch_model.bin")
    file.unlink()
    assert_equal(loaded(path)[0], want)


def test_adapters_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    alone, _ = loaded(path, 1, 4)
    assert_equal(run_on_ranks(2, loaded, path, 2, 4)[0][0], alone)
    adapters = {name: value for name, value in alone.items() if "lora_" in name}
    for name, value in adapters.items():
        bound = 1 / np.sqrt(value.shape[1])  # this is the bound of kaiming_uniform with a = sqrt(5)
        assert value.any() == ("lora_A" in name)
        assert np.abs(value).max() <= bound
    assert len(adapters) == 2 * 7 * 2


def rewritten(path: str, change: dict[str, torch.Tensor | None]) -> None:
    file = Path(path) / "model.safetensors"
    weights = {**load_file(file), **change}
    save_file({name: value for name, value in weights.items() if value is not None}, file, metadata={"format": "pt"})


def test_the_error_names_a_missing_weight(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    rewritten(path, {"model.norm.weight": None})
    with pytest.raises(ValueError, match=r"lacks \['model\.norm\.weight'\]"):
        loaded(path)


def test_the_error_names_a_weight_with_a_wrong_shape(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    rewritten(path, {"model.norm.weight": torch.ones(31)})
    with pytest.raises(ValueError, match=r"at model\.norm\.weight: the files have the shape \[31\], expected \[32\]"):
        loaded(path)


def test_tied_weights_may_be_stored_twice_if_they_are_equal(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    want = expected(path)
    embedding = torch.from_numpy(want["model.embed_tokens.weight"])
    rewritten(path, {"lm_head.weight": embedding.clone()})
    assert_equal(loaded(path)[0], want)
    rewritten(path, {"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match="the files hold two different weights; set tie_word_embeddings=false"):
        loaded(path)


def test_tied_weights_load_if_only_the_output_layer_is_stored(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    want = expected(path)
    rewritten(
        path,
        {"model.embed_tokens.weight": None, "lm_head.weight": torch.from_numpy(want["model.embed_tokens.weight"])},
    )
    assert_equal(loaded(path)[0], want)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ValueError, match=r"holds quantized weights"):
        load_causal_lm(path, torch.float32)


def test_loading_uses_the_dtypes_and_generation_settings_of_the_family(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "deepseek_v3")
    GenerationConfig(eos_token_id=[3, 4]).save_pretrained(path)
    model = load_causal_lm(path, torch.bfloat16)
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == [3, 4]
    kept = {name: buffer.dtype for name, buffer in model.named_buffers() if "e_score_correction_bias" in name}
    assert set(kept.values()) == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert isinstance(model, nn.Module)
    assert model.training
