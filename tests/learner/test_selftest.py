"""The self-test of loaded models: refused models, supported models, and side effects."""

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.models.qwen3_next import modeling_qwen3_next

from learner import attention, heads, pretrained, recurrent, selftest
from learner.attention import ATTENTION_NAME
from learner.config import Device, LearnerConfig
from learner.packed_model import PackedModel
from learner.packing import MicroBatch
from learner.roles import ACTOR, CRITIC, REFERENCE
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import plain_log_probs, random_sequences, save_tiny_model

pytestmark = pytest.mark.long

CPU = LearnerConfig(device=Device.cpu, max_tokens_per_micro_batch=60)
NAMED = "Qwen3NextGatedDeltaNet (model.layers.0.linear_attn)"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("hybrid") / "model", "qwen3_next", initializer_range=0.3)


def saved(tmp_path: Path, family: str) -> str:
    return save_tiny_model(tmp_path / "model", family, initializer_range=0.3)


def load(path: str, **options: Any) -> PackedModel:
    return PackedModel(replace(CPU, **options), REFERENCE, model_path=path)


def without_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the learner treat recurrent layers like any other layer, without sequence boundaries."""
    monkeypatch.setattr(recurrent, "_carries_state", lambda _module: False)


def assert_right(model: PackedModel, path: str) -> None:
    """Check that the model's log-probs equal those of transformers' forward."""
    plain = pretrained.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    sequences = random_sequences(5)
    for sequence, scores in zip(sequences, model.scores(sequences), strict=True):
        expected = plain_log_probs(plain, sequence).detach().numpy()
        np.testing.assert_allclose(scores[sequence.loss_mask], expected, atol=3e-5)


def test_each_sequence_gets_its_own_micro_batch_if_packed_sequences_leak(hybrid, monkeypatch, caplog):
    without_help(monkeypatch)
    model = load(hybrid)
    assert not model.selftest.packs
    assert NAMED in caplog.text
    assert_right(model, hybrid)


def test_layers_that_cannot_pack_get_one_micro_batch_per_sequence(tmp_path):
    path = saved(tmp_path, "rwkv")
    model = load(path)
    assert not model.selftest.packs
    assert_right(model, path)


def refusal(path: str) -> str:
    recurrent._carries_state = lambda _module: False  # this process runs no other test
    with pytest.raises(ValueError, match="learner cannot train") as refused:
        load(path, num_ranks=2, sp_size=2)
    return str(refused.value)


def test_the_error_for_layers_that_need_all_tokens_names_the_remedy(hybrid):
    for message in run_on_ranks(2, refusal, hybrid):
        assert NAMED in message
        assert "set learner.sp_size=1" in message
        assert "learner.skip_selftest" in message


@pytest.mark.parametrize(
    ("family", "culprit"),
    [
        ("bloom", "BloomAttention (transformer.h.0.self_attention)"),  # Bloom's attention is causal only with a mask
        ("falcon_h1", "FalconH1Attention"),  # Falcon-H1 ignores sequence boundaries
        ("nemotron", "AttentionInterface"),
    ],
)
def test_the_error_for_a_wrongly_computed_model_names_its_layer(family, culprit, tmp_path):
    path = saved(tmp_path, family)
    for role in (REFERENCE, CRITIC):
        with pytest.raises(ValueError, match=re.escape(culprit)):
            PackedModel(CPU, role, model_path=path)


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2"])
def test_unknown_logit_transformations_are_refused(family, tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "logit_shape", lambda _config: pretrained.LogitShape())
    with pytest.raises(ValueError, match=r"its logits differ by .*: a linear map of"):
        load(saved(tmp_path, family))


def test_an_output_layer_on_other_than_the_last_hidden_states_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"learner cannot train ElectraForCausalLM .* takes 16 values per token.* 32"):
        load(saved(tmp_path, "electra"))


@pytest.mark.parametrize("family", ["gpt2", "opt", "mixtral"])
def test_dropout_and_noise_of_a_family_are_switched_off_and_logged(family, tmp_path, caplog):
    """With dropout, each micro-batch would use another model."""
    path = saved(tmp_path, family)
    with caplog.at_level(logging.INFO):
        model = load(path)
    assert "off while training" in caplog.text
    sequences = random_sequences(5)
    scores = model.scores(sequences)
    model.set_training(True)
    with torch.no_grad(), model.sharding:
        for micro_batch in model.pack(sequences).micro_batches:
            trained = model.head(micro_batch)[0].float().numpy()
            expected = np.concatenate([scores[i][sequences[i].loss_mask] for i in micro_batch.source])
            np.testing.assert_allclose(trained, expected, atol=1e-6)


def test_a_model_with_different_values_in_training_and_in_scoring_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "_RANDOM_WHILE_TRAINING", re.compile("(?!)"))
    with pytest.raises(ValueError, match=r"OPTDecoderLayer.* different values in training and in scoring") as refused:
        load(saved(tmp_path, "opt"))
    assert "skip_selftest" in str(refused.value)


@pytest.mark.parametrize("leaks", [False, True])
def test_the_tolerance_of_half_precision_distinguishes_leaks_from_rounding(hybrid, leaks, monkeypatch):
    if leaks:
        without_help(monkeypatch)
    found = load(hybrid, dtype="bfloat16").selftest
    assert found.packs is not leaks


def test_the_self_test_does_not_change_the_model(hybrid):
    states = []
    for reason in ("this load is compared with a load that runs the self-test", ""):
        torch.manual_seed(7)
        config = replace(CPU, dtype="bfloat16", skip_selftest=reason)
        # Use float32 weights and compute in bfloat16, so that FSDP shards the model even on one rank.
        model = PackedModel(config, ACTOR, model_path=hybrid)
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)
    head = model.head
    assert head.training
    assert "forward" not in vars(head)
    assert head.pretrained.config._attn_implementation == ATTENTION_NAME
    assert all(parameter.grad is None and isinstance(parameter, DTensor) for parameter in head.parameters())


def test_the_self_test_is_skipped_with_a_reason(hybrid, monkeypatch, caplog):
    without_help(monkeypatch)
    assert load(hybrid, skip_selftest="checked by hand").selftest is None
    assert "checked by hand" in caplog.text


def test_the_self_test_finds_that_actor_and_critic_can_pack(hybrid):
    for role in (ACTOR, CRITIC):
        found = PackedModel(CPU, role, model_path=hybrid).selftest
        assert found.packs


def test_a_model_type_without_the_head_of_the_role_is_refused(tmp_path):
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no model with the head .* model type 't5'"):
        load(str(tmp_path))
    AutoConfig.for_model(
        "encoder-decoder", encoder={"model_type": "bert"}, decoder={"model_type": "bert"}
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="for the model type 'encoder-decoder'"):
        PackedModel(CPU, CRITIC, model_path=str(tmp_path))


def delta_rule(query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens: Tensor | None, **rest: Any) -> Any:
    """Replaces the kernel of flash-linear-attention. Computes each sequence separately."""
    plain = modeling_qwen3_next.torch_chunk_gated_delta_rule
    assert cu_seqlens is not None
    g, beta = rest.pop("g"), rest.pop("beta")
    spans = [slice(*span) for span in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)]
    parts = [plain(*(x[:, s] for x in (query, key, value)), g=g[:, s], beta=beta[:, s], **rest)[0] for s in spans]
    return torch.cat(parts, dim=1), None


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str, seq_idx: Tensor | None) -> Tensor:
    """Replaces causal_conv1d_fn on inputs [1, channels, N].

    Computes each sequence separately. ``seq_idx`` has the index of each token's sequence.
    """
    assert activation == "silu"
    assert seq_idx is not None
    sizes, width = seq_idx[0].bincount().tolist(), weight.size(1)
    padded = [torch.nn.functional.pad(part, (width - 1, 0)) for part in x.split(sizes, dim=2)]
    parts = [torch.conv1d(part, weight[:, None], bias, groups=len(weight)) for part in padded]
    return torch.nn.functional.silu(torch.cat(parts, dim=2))


@pytest.mark.parametrize("honours", [True, False])
def test_a_kernel_gets_sequence_boundaries_only_if_it_respects_them(hybrid, honours, monkeypatch):
    def deaf(*args: Any, cu_seqlens: Tensor | None = None, **rest: Any) -> Any:
        return modeling_qwen3_next.torch_chunk_gated_delta_rule(*args, **rest)

    with_reference: Callable[..., Any] = lambda *args, cu_seqlens=None, **rest: (  # noqa: E731
        deaf(*args, **rest) if cu_seqlens is None else delta_rule(*args, cu_seqlens=cu_seqlens, **rest)
    )

    def conv(*, seq_idx: Tensor | None, x: Tensor, **rest: Any) -> Tensor:
        whole = torch.zeros(1, x.size(2), dtype=torch.int32)
        outputs = [convolution(row[None], seq_idx=whole if seq_idx is None else seq_idx, **rest) for row in x]
        return torch.cat(outputs)

    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", conv)
    monkeypatch.setattr(modeling_qwen3_next, "chunk_gated_delta_rule", with_reference if honours else deaf)
    monkeypatch.setattr(modeling_qwen3_next, "is_fast_path_available", True)
    model = load(hybrid)
    assert model.selftest.packs
    assert model.head.recurrent.takes_boundaries is honours


def test_samples_share_their_prompt_if_no_layer_carries_a_state(hybrid, tmp_path):
    for path, shares in ((saved(tmp_path, "qwen3"), True), (hybrid, False)):
        found = load(path).selftest
        assert found.packs
        assert found.shares is shares
        untested = load(path, skip_selftest="checked by hand")
        assert [model_shares(model) for model in (load(path), untested)] == [shares, shares]
        assert not model_shares(load(path, share_prompts=False))


def model_shares(model: PackedModel) -> bool:
    """Return whether the model packs the common prompt of several sequences only once."""
    return any(batch.token_index is not None for batch in model.pack(random_sequences(9)).micro_batches)


def test_prompts_are_not_shared_if_sharing_changes_hidden_states(tmp_path, monkeypatch, caplog):
    without_positions = MicroBatch.to

    def to(batch: MicroBatch, device: torch.device) -> MicroBatch:
        moved = without_positions(batch, device)
        if moved.token_index is not None:
            moved = replace(moved, position_ids=torch.arange(len(moved.position_ids)))
        return moved

    monkeypatch.setattr(MicroBatch, "to", to)
    path = saved(tmp_path, "qwen3")
    model = load(path)
    assert not model_shares(model)
    assert "each sample computes its own" in caplog.text
    assert_right(model, path)


def test_the_method_for_recurrent_layers_is_logged(hybrid, caplog):
    with caplog.at_level(logging.INFO):
        load(hybrid)
    assert "1 x Qwen3NextGatedDeltaNet runs on padded sequences" in caplog.text


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("mistral", {"sliding_window": 4096}),
        ("gemma3_text", {"sliding_window": 1024}),
        ("llama4_text", {"attention_chunk_size": 8192}),
    ],
)
def test_the_self_test_checks_windows_longer_than_its_sequences(family, option, tmp_path, monkeypatch):
    path = save_tiny_model(tmp_path / "model", family, initializer_range=0.3, **option)
    model = load(path)
    held = [vars(part)[name] for part in model.pretrained.modules() for name in option if vars(part).get(name)]
    assert {*held, *(getattr(model.pretrained.config, name) for name in option)} == {*option.values()}
    monkeypatch.setattr(attention, "_span", lambda _module, _window: (None, None))
    with pytest.raises(ValueError, match=r"different values for packed sequences"):
        load(path)


@pytest.mark.parametrize("sp_size", [1, 2])
def test_a_mixture_with_almost_equal_router_scores_passes_the_self_test(tmp_path, monkeypatch, sp_size):
    """The router gives all experts almost equal scores, as for some tokens of real models."""
    path = saved(tmp_path, "qwen3_moe")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if "mlp.gate." in name]:
        # Make the weights of all experts so similar that their differences are below the rounding of bfloat16.
        weights[name] = (weights[name][:1] + 1e-3 * weights[name]).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    ranks = run_on_ranks(sp_size, difference_in_bfloat16, path, sp_size)
    assert max(ranks) < 0.02
    if sp_size == 1:
        monkeypatch.setattr(selftest, "_fixed_routing", lambda _model: nullcontext())
        with pytest.raises(ValueError, match=r"different values for packed sequences"):
            load(path, dtype="bfloat16")


def difference_in_bfloat16(path: str, sp_size: int) -> float:
    result = load(path, dtype="bfloat16", num_ranks=sp_size, sp_size=sp_size).selftest
    assert result is not None
    assert result.packs
    assert result.shares
    return result.difference
