"""The packed model, compared with transformers' forward of single sequences."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from learner import heads
from learner.attention import packed_layout
from learner.config import Device, LearnerConfig
from learner.heads import chunked_log_probs
from learner.pretrained import LogitShape, load_causal_lm
from learner.trainer import Trainer
from learner.types import TokenSequence
from tests.support.tiny_models import FAMILIES, plain_log_probs, random_sequences, save_tiny_model

CONFIG = LearnerConfig(device=Device.cpu, max_tokens_per_micro_batch=200, logprob_chunk_tokens=7)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_equal_a_plain_forward(family, tmp_path):
    path = save_tiny_model(tmp_path / "model", family)
    trainer = Trainer(CONFIG, model_path=path, total_updates=1, temperature=0.6)
    sequences = [*random_sequences(14, longest=60), one_token()]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for sequence, got in zip(sequences, trainer.scores(sequences), strict=True):
        want = plain_log_probs(model, sequence, temperature=0.6).detach()
        np.testing.assert_allclose(got[sequence.loss_mask], want, atol=2e-5)
        assert not got[~sequence.loss_mask].any()


def one_token() -> TokenSequence:
    empty = {"behavior_logprobs": np.zeros(1, dtype=np.float32), "advantages": np.zeros(1, dtype=np.float32)}
    return TokenSequence(input_ids=np.array([3]), loss_mask=np.array([False]), columns=empty)


def test_log_probs_in_bfloat16_are_near_those_in_float32(tmp_path):
    path = save_tiny_model(tmp_path / "model")
    exact = Trainer(CONFIG, model_path=path, total_updates=1)
    rounded = Trainer(replace(CONFIG, dtype="bfloat16"), model_path=path, total_updates=1)
    sequences = random_sequences(5)
    for one, other in zip(exact.scores(sequences), rounded.scores(sequences), strict=True):
        assert 0 < np.abs(one - other).max() < 0.3


def test_short_sequences_of_similar_length_share_calls_with_little_padding():
    lengths = [900, 880, 300, *[20] * 200, *[11] * 40]
    layout = packed_layout(lengths, torch.device("cpu"))
    places = sum(count * length for count, length in layout.padded.buckets)
    assert len(layout.padded.buckets) <= 5
    assert places <= sum(lengths) / 0.75 + 128 * len(layout.padded.buckets)
    assert packed_layout([20] * 9, torch.device("cpu")).padded.pad_index is None
    few_lengths = (
        packed_layout([19] * 80, torch.device("cpu")),
        packed_layout([19] * 80 + [17] * 80, torch.device("cpu")),
    )
    assert [(len(layout.padded.buckets), layout.padded.pad_index) for layout in few_lengths] == [(1, None), (2, None)]


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.25, None), (1.0, 1.5), (3.0, 2.0)])
def test_chunked_log_probs_have_the_values_and_gradients_of_log_softmax(chunk, scale, cap):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(13, 6), torch.randn(9, 6), torch.randn(9)
    targets = torch.randint(0, 9, (13,))
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logits = F.linear(*leaves) * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    all_log_probs = F.log_softmax(logits / 0.7, dim=-1)
    want = all_log_probs.gather(-1, targets[:, None])[:, 0], -(all_log_probs.exp() * all_log_probs).sum(-1)
    ours = [x.requires_grad_() for x in (hidden.t().contiguous().t(), weight, bias)]  # hidden is not contiguous
    shape = LogitShape(scale=scale, soft_cap=cap)
    got = chunked_log_probs(*ours, targets, temperature=0.7, chunk_tokens=chunk, shape=shape)
    factors = torch.randn(2, 13)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
    (got[0] @ factors[0] + got[1] @ factors[1]).backward()
    (want[0] @ factors[0].double() + want[1] @ factors[1].double()).backward()
    for one, other in zip(ours, leaves, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 12, 13, 40])
def test_larger_chunks_do_not_change_the_gradient_of_the_output_layer(num_tokens, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 8, generator=generator).bfloat16()
    weight = torch.randn(30, 8, generator=generator).bfloat16()
    targets = torch.randint(0, 30, (num_tokens,), generator=generator)

    def gradients() -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        log_probs, _ = chunked_log_probs(*leaves, None, targets, temperature=1.0, chunk_tokens=5)
        log_probs.sum().backward()
        return [leaf.grad for leaf in leaves]

    chunk_by_chunk = gradients()
    sizes, add = [], heads._add_product
    monkeypatch.setattr(heads, "multiplies_halves", lambda tensor: tensor.dtype is torch.bfloat16)
    monkeypatch.setattr(heads, "WEIGHT_CHUNK_TOKENS", 16)
    monkeypatch.setattr(heads, "_factor", lambda weight: weight.float())
    monkeypatch.setattr(heads, "_product", lambda left, right: left.float() @ right.float())

    def in_float(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        sizes.append(len(right))
        add(total, left.float(), right.float())

    monkeypatch.setattr(heads, "_add_product", in_float)
    for one, other in zip(gradients(), chunk_by_chunk, strict=True):
        torch.testing.assert_close(one, other)
    assert sizes == [15] * (num_tokens // 15) + [num_tokens % 15] * bool(num_tokens % 15)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(soft_cap=3.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_frozen_output_layer_does_not_change_the_gradient_of_the_hidden_states(with_entropy, shape, temperature):
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(13, 6), torch.randn(9, 6), torch.randint(0, 9, (13,))
    scale = torch.randn(2, 13)
    options = {"temperature": temperature, "chunk_tokens": 5, "shape": shape}
    gradients = []
    for trained in (True, False):
        states, output = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
        log_probs, entropies = chunked_log_probs(states, output, None, targets, **options)
        loss = log_probs * scale[0] + (entropies * scale[1] if with_entropy else 0)
        loss.sum().backward()
        gradients.append((states.grad, output.grad))
    torch.testing.assert_close(gradients[0][0], gradients[1][0])
    assert gradients[0][1] is not None
    assert gradients[1][1] is None


def test_the_error_names_a_path_without_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"got '.*nothing' without a config.json"):
        Trainer(CONFIG, model_path=str(tmp_path / "nothing"), total_updates=1)


def test_training_refuses_temperature_zero(tmp_path):
    with pytest.raises(ValueError, match="temperature must be > 0"):
        Trainer(CONFIG, model_path=save_tiny_model(tmp_path / "model"), total_updates=1, temperature=0.0)


def test_a_warning_says_that_the_router_loss_is_not_added(tmp_path, caplog):
    path = save_tiny_model(tmp_path / "model", "qwen3_moe")
    load_causal_lm(path, torch.float32)
    assert "router" not in caplog.text
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"output_router_logits": True}))
    load_causal_lm(path, torch.float32)
    assert "does not add router_aux_loss_coef=0.001" in caplog.text


def test_bfloat16_logits_are_not_rounded_before_the_softmax():
    generator = torch.Generator().manual_seed(0)
    hidden = (4 * torch.randn(64, 32, generator=generator)).bfloat16()
    weight = torch.randn(200, 32, generator=generator).bfloat16()
    targets = torch.randint(0, 200, (64,), generator=generator)
    got, entropy = chunked_log_probs(hidden, weight, None, targets, temperature=1.0, chunk_tokens=10, entropy=False)
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    rounded = (hidden @ weight.t()).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert (got - exact).abs().max() < 1e-4
    assert (rounded - exact).abs().max() > 1e-2
    assert entropy is None
