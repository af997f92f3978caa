"""Training and publishing of adapters."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner.checkpoint import ShardedCheckpointer, export
from learner.config import AlgorithmConfig, Device, LearnerConfig, LoraConfig, OptimizerConfig
from learner.lora import add_adapters, merged_weights
from learner.model_folder import save_policy
from learner.trainer import Trainer
from tests.support.policy_step import policy_step, share_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import FAMILIES, random_sequences, save_tiny_model
from tests.support.whole_weights import assert_weights_equal, weights_of

CONFIG = LearnerConfig(
    device=Device.cpu,
    max_tokens_per_micro_batch=100,
    # eps is large. Otherwise AdamW would turn rounding errors in tiny gradients into updates of full size.
    optimizer=OptimizerConfig(lr=2e-2, clip_grad_norm=0.5, eps=1e-4),
    lora=LoraConfig(rank=4, alpha=8),
)


def trainer_of(path: str, config: LearnerConfig = CONFIG) -> Trainer:
    return Trainer(config, model_path=path, total_updates=8, temperature=0.7)


def trained(trainer: Trainer, num_steps: int = 2) -> list[dict[str, float]]:
    share = share_of(trainer, random_sequences(11))
    step = policy_step(trainer, AlgorithmConfig(loss="reinforce"))
    return [step.run(share) for _ in range(num_steps)]


MIXTURES = ["qwen2_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "llama4_text", "granitemoehybrid"]
"""Families whose experts are stacked tensors, like those of ``qwen3_moe``. Most also have dense layers or a shared
expert."""


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_a_saved_policy_with_merged_adapters_computes_the_same_log_probs(family, tmp_path):
    # With one expert per token, Granite's router weight is 1 for any logits, so the router has no gradient.
    options = {"num_experts_per_tok": 2} if family == "granitemoehybrid" else {}
    trainer = trainer_of(save_tiny_model(tmp_path / "model", family, **options))
    before = {name: p.detach().clone() for name, p in trainer.head.named_parameters()}
    trained(trainer)
    weights = {name: p.detach().clone() for name, p in trainer.head.named_parameters()}
    save_policy(trainer, str(tmp_path / "policy"))
    for name, parameter in trainer.head.named_parameters():
        assert torch.equal(parameter, weights[name]), f"publishing changed {name}"
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name
    assert (
        load_file(tmp_path / "policy/model.safetensors").keys()
        == load_file(tmp_path / "model/model.safetensors").keys()
    )
    sequences = random_sequences(9)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    for sequence, got in zip(sequences, trainer.scores(sequences), strict=True):
        ids = torch.from_numpy(sequence.input_ids).long()
        with torch.no_grad():
            log_probs = (plain(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        want = np.where(sequence.loss_mask, np.append(0, log_probs.numpy()), 0.0)
        np.testing.assert_allclose(got, want, atol=5e-5)


def test_a_model_with_adapters_off_computes_the_original_log_probs(tmp_path):
    path, sequences = save_tiny_model(tmp_path), random_sequences(5)
    trainer = trainer_of(path)
    start = trainer_of(path, replace(CONFIG, lora=LoraConfig())).scores(sequences)
    trained(trainer)
    adapted = trainer.scores(sequences)
    with trainer.frozen():
        off = trainer.scores(sequences)
    for got, want, now, then in zip(off, start, adapted, trainer.scores(sequences), strict=True):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(now, then)
    assert max(np.abs(a - b).max() for a, b in zip(adapted, start, strict=True)) > 1e-3
    with pytest.raises(RuntimeError, match="inside"), trainer.frozen():
        raise RuntimeError("inside")
    np.testing.assert_array_equal(trainer.scores(sequences)[0], adapted[0])


def test_weights_merged_while_adapters_are_off_include_the_adapters(tmp_path):
    """A publish merges the adapters in a separate thread, while the ranks compute log-probs of the reference.

    The reference is the actor with its adapters switched off. So the adapters are off during the merge.
    """
    trainer = trainer_of(save_tiny_model(tmp_path))
    trained(trainer)
    weights = dict(trainer.pretrained.named_parameters())
    with torch.no_grad():
        before = merged_weights(trainer.pretrained, weights)
        with trainer.frozen():
            meanwhile = merged_weights(trainer.pretrained, weights)
    assert all(torch.equal(meanwhile[name], tensor) for name, tensor in before.items())


def adapted(model: PreTrainedModel) -> set[str]:
    return {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}


def test_all_linear_adapts_the_dense_layers_and_shared_experts_of_a_mixture(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path, "deepseek_v3"))
    add_adapters(model, LoraConfig(rank=2))
    assert {name for name in adapted(model) if "gate_proj" in name} == {
        "model.layers.0.mlp.gate_proj",
        "model.layers.1.mlp.shared_experts.gate_proj",
    }
    assert not any(".mlp.experts" in name for name in adapted(model))


def test_adapters_of_a_mixture_get_the_gradient_of_the_merged_weights(tmp_path):
    path, ids = save_tiny_model(tmp_path, "deepseek_v3"), torch.arange(12)[None]
    model, plain = (AutoModelForCausalLM.from_pretrained(path).eval() for _ in range(2))
    add_adapters(model, LoraConfig(rank=2, alpha=6))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    plain.load_state_dict(merged_weights(model, dict(model.named_parameters())), strict=False)
    for each in (model, plain):
        each(ids).logits.log_softmax(-1)[0, :, 5].sum().backward()
    weights, plain_weights = dict(model.named_parameters()), dict(plain.named_parameters())
    assert len(adapted(model)) == 16
    for name in adapted(model):
        down, up = (weights[f"{name}.lora_{part}.default.weight"] for part in "AB")
        gradient = plain_weights[f"{name}.weight"].grad
        torch.testing.assert_close(up.grad, 3 * gradient @ down.T, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(down.grad, 3 * up.T @ gradient, rtol=1e-3, atol=1e-4)


def test_one_projection_of_a_mixture_can_have_adapters_alone(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path, "deepseek_v3"))
    add_adapters(model, LoraConfig(rank=2, target_modules=["gate_proj"]))
    assert adapted(model) == {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.gate_proj"}


@pytest.mark.parametrize(
    ("family", "targets", "named"),
    [
        ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"], r"no linear layer .* 'gate_proj'.*down_proj"),
        ("qwen3_moe", ["experts"], r"model\.layers\.0\.mlp\.experts is a Qwen3MoeExperts"),
        ("qwen3_moe", ["mlp.gate"], r"model\.layers\.0\.mlp\.gate is a Qwen3MoeTopKRouter"),
        ("mixtral", ["w1", "w2", "w3"], "no linear layer .* 'w1'"),
        ("granitemoehybrid", ["input_linear"], "GraniteMoeHybridParallelExperts"),
        ("llama4_text", ["router"], r"model\.layers\.1\.feed_forward\.router is a Llama4Router"),
        ("qwen3_next", ["conv1d"], "Conv1d"),
        ("gpt2", ["c_attn"], "Conv1D"),
        ("gpt2", ["all-linear"], "GPT2LMHeadModel has none"),
        ("llama", ["embed_tokens"], "Embedding"),
        ("llama", ["q_proj", "lm_head"], "lm_head is the output embedding"),
        ("llama", ["q_proj", "v_porj"], "no linear layer .* 'v_porj'"),
    ],
)
def test_a_lora_target_that_cannot_have_adapters_is_refused(family, targets, named, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path, family))
    with pytest.raises(ValueError, match=rf"learner\.lora\.target_modules=.*{named}.*all-linear"):
        add_adapters(model, LoraConfig(rank=2, target_modules=targets))
    assert not adapted(model)


@pytest.mark.parametrize(
    ("family", "frozen"),
    [
        ("qwen3_moe", ["model.layers.*.mlp.experts.down_proj (2)", "model.layers.*.mlp.experts.gate_up_proj (2)"]),
        ("deepseek_v3", ["model.layers.*.mlp.experts.down_proj (1)", "model.layers.*.mlp.experts.gate_up_proj (1)"]),
        ("granitemoehybrid", ["block_sparse_moe.input_linear.weight (2)", "block_sparse_moe.output_linear.weight (2)"]),
        ("qwen3_5_text", []),
    ],
)
def test_the_log_names_the_expert_tensors_without_adapters(family, frozen, tmp_path, caplog):
    trainer_of(save_tiny_model(tmp_path, family))
    said = [record.getMessage() for record in caplog.records if "have no adapters" in record.getMessage()]
    assert len(said) == bool(frozen)
    for name in frozen:
        assert name in said[0]


def on_ranks(path: str, config: LearnerConfig) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    trainer = trainer_of(path, config)
    metrics = trained(trainer)
    with trainer.frozen():
        trainer.scores(random_sequences(3))  # later steps must still train the adapters
    metrics += trained(trainer, 1)
    return metrics, weights_of(trainer)


def on_each_mesh(path: str, configs: list[LearnerConfig]) -> list:
    return [on_ranks(path, config) for config in configs]


@pytest.mark.long
def test_two_ranks_train_and_publish_adapters_like_one_process(tmp_path):
    path = save_tiny_model(tmp_path)
    metrics, weights = on_ranks(path, CONFIG)
    two = replace(CONFIG, num_ranks=2)
    for got_metrics, got in run_on_ranks(2, on_each_mesh, path, [two, replace(two, sp_size=2)])[0]:
        for one, other in zip(got_metrics, metrics, strict=True):
            for name in ("loss", "grad_norm", "entropy", "num_tokens"):
                assert one[name] == pytest.approx(other[name], rel=5e-5, abs=1e-6), name
        assert_weights_equal(got, weights, atol=3e-5)


def test_adapters_resume_bit_for_bit_and_are_exported_merged(tmp_path):
    path = save_tiny_model(tmp_path / "model")
    trainer = trainer_of(path)
    trained(trainer)
    saved = ShardedCheckpointer(trainer, str(tmp_path / "checkpoints")).save(2)
    save_policy(trainer, str(tmp_path / "policy"))
    expected = trained(trainer, 1)
    resumed = trainer_of(path)
    assert ShardedCheckpointer(resumed, str(tmp_path / "checkpoints")).load(saved) == 2
    got = trained(resumed, 1)
    assert [m["loss"] for m in got] == [m["loss"] for m in expected]
    assert [m["grad_norm"] for m in got] == [m["grad_norm"] for m in expected]
    export(saved, tmp_path / "exported")
    exported = load_file(tmp_path / "exported/model.safetensors")
    for name, tensor in load_file(tmp_path / "policy/model.safetensors").items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-6)
