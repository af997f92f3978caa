"""Attention kernels for packed sequences, and the selection of an installed and correct kernel.

An installed package possibly lacks the kernel's function, or the function possibly fails on this GPU. The selection
therefore runs a kernel forward and backward, and compares the results with attention in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from .config import AttentionKernel

log = logging.getLogger(__name__)

_FUNCTIONS = {
    AttentionKernel.flash_attn_4: ("flash_attn.cute", "flash_attn_varlen_func"),
    AttentionKernel.flash_attn_3: ("flash_attn_interface", "flash_attn_varlen_func"),
    AttentionKernel.flash_attn: ("flash_attn", "flash_attn_varlen_func"),
    AttentionKernel.torch_varlen: ("torch.nn.attention.varlen", "varlen_attn"),
}

_LENGTHS = (33, 7, 1)
_WINDOW = 9
_TOLERANCE = 0.03
"""Largest accepted relative difference of a kernel's outputs and gradients from attention in float32. Rounding to half
precision alone gives about 0.004."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The attention features that a model needs.

    Attributes:
        head_dim: Size of the queries and keys of a head.
        heads_per_kv_head: Number of query heads that share a key-value head.
        has_window: Whether some layers use a sliding window.
        soft_cap: c if the model replaces each score s by c · tanh(s / c); None without a soft cap.
    """

    head_dim: int = 64
    heads_per_kv_head: int = 2
    has_window: bool = False
    soft_cap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> AttentionShape:
        """Return the attention features that a model's configuration describes; missing fields get default values."""
        text = config.get_text_config()
        heads = getattr(text, "num_attention_heads", None) or 2
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        latent = (getattr(text, "qk_nope_head_dim", None) or 0) + (getattr(text, "qk_rope_head_dim", None) or 0)
        head_dim = latent or getattr(text, "head_dim", None) or getattr(text, "hidden_size", 64 * heads) // heads
        return cls(
            head_dim=int(head_dim),
            heads_per_kv_head=max(1, heads // kv_heads),
            has_window=bool(getattr(text, "sliding_window", None)),
            soft_cap=getattr(text, "attn_logit_softcapping", None),
        )


def attention_kernel(
    asked: AttentionKernel, device: torch.device, dtype: torch.dtype, shape: AttentionShape | None = None
) -> AttentionKernel:
    """Return the attention kernel to use. ``asked`` is the option ``learner.attention``.

    ``auto`` gives the fastest kernel that passes `check_kernel` with this device, dtype and model, or ``sdpa`` if none
    passes. ``sdpa`` is returned without a check. Any other kernel is returned if it passes `check_kernel`.

    Raises:
        ValueError: the requested kernel cannot be imported, cannot run on the device, or gives wrong results.
    """
    shape = shape or AttentionShape()
    fits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if asked is AttentionKernel.auto:
        return first_right(fastest_first(device) if fits else (), device, dtype, shape)
    if asked is AttentionKernel.sdpa:
        return asked
    if not fits:
        raise ValueError(
            f"learner.attention={asked} needs CUDA and half precision, got {device.type} and {dtype}; use "
            "learner.attention=auto"
        )
    check_kernel(asked, device, dtype, shape)
    return asked


def first_right(
    kernels: Sequence[AttentionKernel], device: torch.device, dtype: torch.dtype, shape: AttentionShape
) -> AttentionKernel:
    """Return the first of ``kernels`` that passes `check_kernel`, or ``sdpa`` if no kernel passes.

    If the model needs a soft cap, kernels that do not support it are skipped. The log says why other kernels failed.
    """
    reasons: list[str] = []
    for kernel in (kernel for kernel in kernels if shape.soft_cap is None or takes_soft_cap(kernel)):
        try:
            check_kernel(kernel, device, dtype, shape)
        except ValueError as error:
            reasons.append(str(error))
        else:
            log.info("attention: %s%s", kernel, "".join(f"; {reason}" for reason in reasons))
            return kernel
    if reasons:
        log.warning("attention: sdpa, which is slower on packed sequences; %s", "; ".join(reasons))
    return AttentionKernel.sdpa


def takes_soft_cap(kernel: AttentionKernel) -> bool:
    """Return whether a kernel supports a soft cap of the scores."""
    return kernel not in (AttentionKernel.torch_varlen, AttentionKernel.sdpa)


def fastest_first(device: torch.device) -> tuple[AttentionKernel, ...]:
    """Return the kernels for a GPU, fastest first. Compute capability 9 is Hopper, 10 and above is Blackwell."""
    major, _ = torch.cuda.get_device_capability(device)
    newest = {9: (AttentionKernel.flash_attn_3, AttentionKernel.flash_attn_4)}.get(
        major, (AttentionKernel.flash_attn_4,) if major > 9 else ()
    )
    return (*newest, AttentionKernel.flash_attn, AttentionKernel.torch_varlen)


def check_kernel(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, shape: AttentionShape) -> None:
    """Check that a kernel can be imported, and that its outputs and gradients are close to those in float32.

    Raises:
        ValueError: the kernel cannot be imported, raises an error, or gives wrong results.
    """
    module, function = _FUNCTIONS[kernel]
    remedy = "use learner.attention=auto"
    try:
        _function(kernel)
    except Exception as error:  # the import can raise any error, for example if the package needs another torch
        raise ValueError(
            f"learner.attention={kernel} needs {module}.{function}, which cannot be imported "
            f"({type(error).__name__}: {error}); {remedy}"
        ) from error
    for window in (None, _WINDOW) if shape.has_window else (None,):
        try:
            difference = _difference(kernel, device, dtype, shape, window)
        except Exception as error:
            raise ValueError(
                f"learner.attention={kernel} cannot run here with head size {shape.head_dim} "
                f"({type(error).__name__}: {error}); {remedy}"
            ) from error
        if not difference <= _TOLERANCE:
            raise ValueError(
                f"learner.attention={kernel} differs from attention in float32 by {difference:.3g} (relative), "
                f"expected at most {_TOLERANCE:g}; {remedy}"
            )


def _difference(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, shape: AttentionShape, window: int | None
) -> float:
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(_LENGTHS), 2 * heads, shape.head_dim) for heads in (shape.heads_per_kv_head, 1, 1)]
    inputs = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    toward = torch.randn(sizes[0], generator=generator).to(device)
    starts = torch.tensor([0, *_LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    scale = shape.head_dim**-0.5

    def outcomes(tensors: list[Tensor], function: Any) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = function(*leaves).float()
        return [out.detach(), *(grad.float() for grad in torch.autograd.grad((out * toward).sum(), leaves))]

    capped = {"window": window, "soft_cap": shape.soft_cap}
    with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        ours = partial(call_kernel, kernel, starts=starts, longest=max(_LENGTHS), scale=scale, **capped)
        found = outcomes(inputs, ours)
        expected = outcomes([tensor.float() for tensor in inputs], partial(_written_out, scale=scale, **capped))
    differences = [(one - other).norm() / other.norm() for one, other in zip(found, expected, strict=True)]
    return float(torch.stack(differences).nan_to_num(nan=torch.inf).max())


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    outputs = []
    for one, keys, values in zip(q.split(_LENGTHS), k.split(_LENGTHS), v.split(_LENGTHS), strict=True):
        scores = torch.einsum("qhd,khd->hqk", one, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        places = torch.arange(len(one), device=q.device)
        distance = places[:, None] - places[None]
        seen = (distance >= 0) & (distance < (window or len(one)))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    return torch.cat(outputs)


@cache
def _function(kernel: AttentionKernel) -> Any:
    module, function = _FUNCTIONS[kernel]
    return getattr(import_module(module), function)


def call_kernel(
    kernel: AttentionKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    starts: Tensor,
    longest: int,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Compute causal attention within packed sequences with a variable-length kernel.

    Args:
        kernel: The kernel to call; not ``auto`` or ``sdpa``.
        q: [N, H, D].
        k: [N, kv heads, D].
        v: [N, kv heads, Dv], Dv <= D.
        starts: [number of sequences + 1] int32, start of each sequence, then the end of the last sequence.
        longest: Number of tokens of the longest sequence.
        scale: Factor on the scores; None is D ** -0.5.
        window: A token attends to this many tokens, including itself; None means no window.
        soft_cap: Soft cap of the scores, or None. The kernel must support it (`takes_soft_cap`).

    Returns:
        The attention output, [N, H, Dv].
    """
    function, value_dim = _function(kernel), v.size(2)
    if value_dim < q.size(2):
        v = F.pad(v, (0, q.size(2) - value_dim))
    if kernel is AttentionKernel.torch_varlen:
        span = (-1, 0) if window is None else (window - 1, 0)
        out = function(q, k, v, starts, starts, longest, longest, window_size=span, scale=scale, enable_gqa=True)
    else:
        everything = (None, None) if kernel is AttentionKernel.flash_attn_4 else (-1, -1)
        options: dict[str, Any] = {
            "cu_seqlens_q": starts,
            "cu_seqlens_k": starts,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
            "softmax_scale": scale,
            "causal": True,
            "window_size": everything if window is None else (window - 1, 0),
        }
        out = function(q, k, v, **options, **({} if soft_cap is None else {"softcap": soft_cap}))
    out = out[0] if isinstance(out, tuple) else out  # some kernels return a pair: the output, and the log-sum-exp
    return out[..., :value_dim]
