"""The selection of the attention kernel, and the equality of all kernels."""

import importlib
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learner import attention, attention_kernels
from learner.attention import packed_attention, packed_layout
from learner.attention_kernels import AttentionShape, attention_kernel, check_kernel, first_right
from learner.config import AttentionKernel

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
FA2, FA3, FA4 = AttentionKernel.flash_attn, AttentionKernel.flash_attn_3, AttentionKernel.flash_attn_4
KERNELS = (FA4, FA3, FA2, AttentionKernel.torch_varlen)
MODULES = {FA4: "flash_attn/cute/__init__.py", FA3: "flash_attn_interface.py", FA2: "flash_attn/__init__.py"}
WHEEL = os.environ.get("FLASH_ATTN_4_WHEEL", "")
"""The wheel of flash-attn-4, if a developer has downloaded it: pip download --no-deps --pre flash-attn-4."""

# The source of a CPU kernel with the interface of flash-attn. Tests insert faults at the placeholders in braces.
FLASH_ATTN = """
import torch
import torch.nn.functional as F

def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                           window_size, softcap=0.0):
    {fault}
    assert causal and cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
    left, outputs = window_size[0], []
    for start, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist()):
        one, keys, values = (x[start:end].float().transpose(0, 1) for x in (q, k, v))
        keys, values = (x.repeat_interleave(q.size(1) // k.size(1), dim=0) for x in (keys, values))
        scores = one @ keys.transpose(1, 2) * softmax_scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        seen = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if left is not None and left >= 0:
            seen = seen.triu(-left)
        outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1).to(q.dtype))
    return torch.cat(outputs)
"""
RIGHT = "pass"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that puts fake attention packages on the import path until the test ends."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / MODULES[AttentionKernel(name)]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        forget()

    def forget() -> None:
        importlib.invalidate_caches()
        attention_kernels._function.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("flash_attn")]:
            del sys.modules[name]

    yield make
    forget()


def chosen(shape: AttentionShape | None = None) -> AttentionKernel:
    return first_right(KERNELS, CPU, torch.bfloat16, shape or AttentionShape())


def test_flash_attn_4_is_not_mistaken_for_flash_attn_2(install, caplog):
    """The wheel of flash-attn-4 has only the folder flash_attn/cute.

    So ``import flash_attn`` succeeds, but the package has no functions.
    """
    install(flash_attn_4="from .interface import flash_attn_func, flash_attn_varlen_func\n")
    assert importlib.util.find_spec("flash_attn") is not None
    assert chosen() is AttentionKernel.sdpa
    assert "flash_attn.flash_attn_varlen_func, which cannot be imported" in caplog.text
    assert "flash_attn.cute.flash_attn_varlen_func, which cannot be imported" in caplog.text
    with pytest.raises(
        ValueError, match=r"learner\.attention=flash_attn needs flash_attn\.flash_attn_varlen_func, which"
    ):
        check_kernel(FA2, CPU, torch.bfloat16, AttentionShape())


@pytest.mark.skipif(not WHEEL, reason="FLASH_ATTN_4_WHEEL does not name the wheel of flash-attn-4")
def test_the_real_wheel_of_flash_attn_4_is_not_mistaken_for_flash_attn_2(install, tmp_path, caplog):
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(tmp_path)
    install()
    assert importlib.util.find_spec("flash_attn.cute") is not None
    assert chosen() is AttentionKernel.sdpa
    assert "flash_attn.flash_attn_varlen_func, which cannot be imported" in caplog.text


@pytest.mark.parametrize("shape", [AttentionShape(), AttentionShape(has_window=True, soft_cap=0.7, head_dim=24)])
def test_the_fastest_correct_kernel_is_selected(install, shape):
    right = FLASH_ATTN.format(fault=RIGHT)
    install(flash_attn=right)
    assert chosen(shape) is FA2
    install(flash_attn_3=right)
    assert chosen(shape) is FA3
    install(flash_attn_4=right)
    assert chosen(shape) is FA4


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("softmax_scale *= 1.2", "differs from attention in float32 by"),
        ("q = q.detach()", "cannot run here"),  # the kernel's output has no gradient
        ("raise RuntimeError('no kernel image is available')", "no kernel image is available"),
        ("cu_seqlens_q = cu_seqlens_k = cu_seqlens_q[[0, -1]]", "differs from attention in float32 by"),
        ("return q * float('nan')", "cannot run here|differs from"),
        (
            "q = q.clone(); q.register_hook(lambda grad: grad * float('nan'))",
            "differs from attention in float32 by inf",
        ),
        ("window_size = (-1, -1)", "differs from attention in float32 by"),
        ("softcap = 0.0", "differs from attention in float32 by"),
    ],
)
def test_auto_skips_a_kernel_with_wrong_results_and_an_explicit_choice_is_refused(install, fault, said):
    shape = AttentionShape(has_window=True, soft_cap=0.7)
    install(flash_attn_3=FLASH_ATTN.format(fault=fault), flash_attn=FLASH_ATTN.format(fault=RIGHT))
    assert chosen(shape) is FA2
    with pytest.raises(ValueError, match=rf"learner\.attention=flash_attn_3 .*({said}).*use learner\.attention=auto"):
        check_kernel(FA3, CPU, torch.bfloat16, shape)


@pytest.mark.parametrize(("capability", "first"), [((8, 0), FA2), ((9, 0), FA3), ((10, 0), FA4), ((12, 0), FA4)])
def test_the_order_of_kernels_depends_on_the_gpu(capability, first, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    order = attention_kernels.fastest_first(CUDA)
    assert order[0] is first
    assert order[-2:] == (FA2, AttentionKernel.torch_varlen)


@pytest.mark.parametrize(("device", "dtype"), [(CPU, torch.bfloat16), (CPU, torch.float32), (CUDA, torch.float32)])
def test_auto_selects_sdpa_on_the_cpu_and_for_float32(device, dtype):
    assert attention_kernel(AttentionKernel.auto, device, dtype) is AttentionKernel.sdpa


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(("window", "cap", "value_dim"), [(None, None, 8), (7, None, 8), (7, 0.5, 8), (None, None, 6)])
def test_a_kernel_with_the_flash_attn_interface_computes_what_sdpa_computes(install, shares, window, cap, value_dim):
    install(flash_attn_4=FLASH_ATTN.format(fault=RIGHT))
    outputs = both_outputs(FA4, CPU, torch.float32, shares, window, cap, value_dim)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 7, 200])
def test_attention_in_blocks_equals_attention_with_a_dense_mask(window, has_sinks):
    """The longest sequence needs several blocks of queries."""
    lengths = (300, 290, 20)
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    q, k, v = (torch.randn(1, heads, sum(lengths), 8, requires_grad=True) for heads in (4, 2, 2))
    layout = packed_layout(lengths, CPU, AttentionKernel.sdpa)
    out, _ = packed_attention(nn.Module(), q, k, v, None, packed=layout, sliding_window=window, s_aux=sinks)
    expected, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        keys, values = (x[0, :, part].repeat_interleave(2, dim=0) for x in (k, v))
        scores = q[0, :, part] @ keys.transpose(1, 2) * 8**-0.5
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(-(window or length) + 1)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), dim=-1)
        expected.append((scores.softmax(-1)[..., :length] @ values).transpose(0, 1))
        start += length
    torch.testing.assert_close(out[0], torch.cat(expected), atol=1e-5, rtol=1e-5)
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    factor = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((x * factor[0]).sum(), leaves) for x in (out[0], torch.cat(expected)))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("window", "has_sinks"), [(7, False), (None, True)])
def test_sdpa_with_a_mask_gets_one_key_head_per_query_head(window, has_sinks, monkeypatch):
    """SDPA on CUDA stores the weights of all token pairs if it gets a mask and fewer key heads than query heads."""
    calls = []

    def record(q, k, v, attn_mask=None, **options):
        calls.append((attn_mask is not None, k.size(1), v.size(1)))
        return q[..., : v.size(3)]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    q, k, v = (torch.zeros(1, heads, 300, 8) for heads in (4, 2, 2))
    layout = packed_layout((300,), CPU, AttentionKernel.sdpa)
    sinks = torch.zeros(4) if has_sinks else None
    packed_attention(nn.Module(), q, k, v, None, packed=layout, sliding_window=window, s_aux=sinks)
    assert set(calls) == {(True, 4, 4)}


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "takes"),
    [
        (CUDA, torch.bfloat16, 256, True),
        (CUDA, torch.bfloat16, 512, False),
        (CUDA, torch.float32, 64, False),
        (CPU, torch.float32, 64, True),
    ],
)
def test_kernels_without_grouped_queries_get_one_key_head_per_query_head(device, dtype, head_dim, takes, monkeypatch):
    assert attention.takes_fewer_keys(device, dtype, head_dim) == takes
    monkeypatch.setattr(attention, "takes_fewer_keys", lambda *_: takes)
    heads = []

    def record(q, k, v, **options):
        heads.append((k.size(1), v.size(1)))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    q, k, v = (torch.zeros(1, num_heads, 20, 8) for num_heads in (4, 2, 2))
    packed_attention(nn.Module(), q, k, v, None, packed=packed_layout((20,), CPU, AttentionKernel.sdpa))
    assert heads == [(2, 2) if takes else (4, 4)]


def both_outputs(
    kernel: AttentionKernel,
    device: torch.device,
    dtype: torch.dtype,
    shares: bool,
    window: int | None,
    cap: float | None,
    value_dim: int,
) -> list[Tensor]:
    """Compute the same attention twice: with the kernel ``kernel``, and with SDPA."""
    shared = np.concatenate((np.arange(40), np.arange(10), np.arange(40, 76)))  # two sequences share ten tokens
    num_tokens, outputs = (76 if shares else 86), []
    sizes = ((8, 64), (2, 64), (2, 64)) if value_dim > 8 else ((8, 8), (2, 8), (2, value_dim))
    q, k, v = (torch.randn(1, heads, num_tokens, size, device=device, dtype=dtype) for heads, size in sizes)
    for name in (kernel, AttentionKernel.sdpa):
        layout = packed_layout((40, 33, 12, 1), device, name, shared if shares else None)
        options = {"sliding_window": window, "softcap": cap, "scaling": q.size(3) ** -0.5}
        outputs.append(packed_attention(nn.Module(), q, k, v, None, packed=layout, **options)[0])
    return outputs


@pytest.mark.parametrize("kernel", [AttentionKernel.flash_attn, AttentionKernel.torch_varlen])
def test_an_explicit_choice_of_a_kernel_that_cannot_run_is_refused(kernel):
    with pytest.raises(ValueError, match=rf"learner\.attention={kernel} needs CUDA.*use learner\.attention=auto"):
        attention_kernel(kernel, CPU, torch.float32)
    assert attention_kernel(AttentionKernel.sdpa, CPU, torch.float32) is AttentionKernel.sdpa


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares CUDA kernels; there is no GPU here")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("shares", [False, True])
def test_every_kernel_computes_what_sdpa_computes(kernel, window, shares):
    try:
        attention_kernel(kernel, CUDA, torch.bfloat16)
    except ValueError as error:
        pytest.skip(str(error))
    torch.testing.assert_close(
        *both_outputs(kernel, CUDA, torch.bfloat16, shares, window, None, 64), atol=2e-2, rtol=2e-2
    )
