"""Which kernel computes attention, and that all of them compute the same."""

import importlib.util

import pytest
import torch
from torch import nn

from learner.attention import attention_kernel, packed_attention, packed_layout
from learner.config import AttentionKernel

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("installed", "device", "dtype", "want"),
    [
        ({"flash_attn", "torch.nn.attention.varlen"}, CUDA, torch.bfloat16, "flash_attn"),
        ({"torch.nn.attention.varlen"}, CUDA, torch.bfloat16, "torch_varlen"),
        ({"flash_attn", "torch.nn.attention.varlen"}, CUDA, torch.float32, "sdpa"),
        ({"flash_attn", "torch.nn.attention.varlen"}, CPU, torch.bfloat16, "sdpa"),
        (set(), CUDA, torch.bfloat16, "sdpa"),
    ],
)
def test_auto_takes_the_best_kernel_there_is(
    installed: set[str], device: torch.device, dtype: torch.dtype, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    assert attention_kernel(AttentionKernel.auto, device, dtype) == want


@pytest.mark.parametrize("kernel", [AttentionKernel.flash_attn, AttentionKernel.torch_varlen])
def test_a_kernel_that_cannot_run_is_refused_by_name(kernel: AttentionKernel) -> None:
    with pytest.raises(ValueError, match=rf"learner\.attention={kernel} needs CUDA.*use learner\.attention=auto"):
        attention_kernel(kernel, CPU, torch.float32)
    assert attention_kernel(AttentionKernel.sdpa, CPU, torch.float32) is AttentionKernel.sdpa


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares CUDA kernels; there is no GPU here")
@pytest.mark.parametrize("kernel", [AttentionKernel.flash_attn, AttentionKernel.torch_varlen])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("shares", [False, True])
def test_every_kernel_computes_what_sdpa_computes(kernel: AttentionKernel, window: int | None, shares: bool) -> None:
    try:
        attention_kernel(kernel, CUDA, torch.bfloat16)
    except ValueError as error:
        pytest.skip(str(error))
    lengths, outputs = (40, 33, 12, 1), []
    shared = torch.cat((torch.arange(40), torch.arange(10), torch.arange(40, 76)))  # the second has ten of the first's
    token_index = shared if shares else None
    num_tokens = 76 if shares else 86
    q, k, v = (torch.randn(1, heads, num_tokens, 64, device=CUDA, dtype=torch.bfloat16) for heads in (8, 2, 2))
    for name in (kernel, AttentionKernel.sdpa):
        layout = packed_layout(lengths, CUDA, name, token_index)
        outputs.append(packed_attention(nn.Module(), q, k, v, None, packed=layout, sliding_window=window)[0])
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-2, rtol=2e-2)
