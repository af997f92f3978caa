import hashlib

import pytest
import torch

from asyncrl.protocol.checksums import weight_checksums


def sha(raw):
    return hashlib.sha256(raw).hexdigest()[:16]


def test_the_digest_is_the_head_of_the_sha256_of_the_raw_bytes():
    weight = torch.tensor([1.0, 2.0])
    assert weight_checksums({"model.norm.weight": weight}) == {
        "model.norm.weight": sha(bytes.fromhex("0000803f" + "00000040"))
    }


def test_query_key_and_value_are_digested_end_to_end_as_the_engine_fuses_them():
    q, k, v = torch.ones(4, 2), torch.full((2, 2), 2.0), torch.full((2, 2), 3.0)
    prefix = "model.layers.0.self_attn"
    shuffled = {f"{prefix}.v_proj.weight": v, f"{prefix}.q_proj.weight": q, f"{prefix}.k_proj.weight": k}
    fused = torch.cat([q, k, v])
    assert weight_checksums(shuffled) == {f"{prefix}.qkv_proj.weight": sha(fused.numpy().tobytes())}


def test_gate_and_up_are_fused_and_biases_too():
    gate, up = torch.arange(3.0), torch.arange(3.0, 6.0)
    tensors = {"layers.0.mlp.up_proj.bias": up, "layers.0.mlp.gate_proj.bias": gate}
    assert weight_checksums(tensors) == {"layers.0.mlp.gate_up_proj.bias": sha(torch.arange(6.0).numpy().tobytes())}


def test_a_part_without_its_partners_keeps_its_name():
    lone = torch.ones(2)
    assert weight_checksums({"mlp.up_proj.weight": lone}) == {"mlp.up_proj.weight": sha(lone.numpy().tobytes())}


def test_the_vocabulary_is_padded_with_zero_rows_to_a_multiple_of_sixty_four():
    rows = torch.ones(65, 3)
    padded = torch.cat([rows, torch.zeros(63, 3)])
    checksums = weight_checksums({"model.embed_tokens.weight": rows, "lm_head.weight": padded})
    assert checksums["model.embed_tokens.weight"] == checksums["lm_head.weight"] == sha(padded.numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_is_digested_by_its_own_bytes(dtype):
    weight = torch.tensor([1.5, -2.0], dtype=dtype)
    expected = sha(weight.view(torch.uint8).numpy().tobytes())
    assert weight_checksums({"w": weight}) == {"w": expected}


def test_a_strided_view_equals_its_contiguous_copy_and_one_changed_bit_does_not():
    weight = torch.randn(8, 8)
    changed = weight.t().clone()
    changed[3, 4] += 1e-6
    assert weight_checksums({"w": weight.t()}) == weight_checksums({"w": weight.t().contiguous()})
    assert weight_checksums({"w": changed}) != weight_checksums({"w": weight.t()})
