"""Log-probs and entropy of chosen tokens, in chunks, so that [M, V] logits are never held in float32 at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the entropy of the distribution it was drawn from.

    The distribution is softmax(logits / temperature), as at sampling, before any top-p or top-k. Logits are computed
    chunk by chunk and again in the backward pass; differentiable in hidden, weight and bias.

    Args:
        hidden: [M, h], the states that predict the targets; any float type.
        weight: [V, h], the output embedding.
        bias: [V], or None.
        targets: [M] int64 in 0..V-1.
        temperature: Softmax temperature, > 0.
        chunk_tokens: Tokens whose logits are held in float32 at a time.

    Returns:
        Log-probs [M] float32, each <= 0, and entropies [M] float32 in nats.
    """
    return _ChunkedLogProbs.apply(hidden, weight, bias, targets, temperature, chunk_tokens)  # type: ignore[return-value]


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy, normalizer = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, bias, temperature)
            normalizer[part] = logits.logsumexp(-1)
            log_probs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer[part]
            probs = torch.exp(logits - normalizer[part, None])
            entropy[part] = normalizer[part] - torch.einsum("nv,nv->n", probs, logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden[part], weight, bias, ctx.temperature)
            grad_logits = _logits_gradient(
                logits.sub_(normalizer[part, None]),
                targets[part],
                entropy[part],
                None if grad_log_probs is None else grad_log_probs[part],
                None if grad_entropy is None else grad_entropy[part],
            ).div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += grad_logits.t() @ hidden[part]
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[n, V] float32, divided by the temperature."""
    logits = F.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _logits_gradient(
    all_log_probs: Tensor, targets: Tensor, entropy: Tensor, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """Gradient at the tempered logits: g (1[target] - p) from the log-prob, -g p (log p + H) from the entropy."""
    probs = all_log_probs.exp()
    grad = torch.zeros_like(probs)
    if grad_log_probs is not None:
        grad.addcmul_(probs, grad_log_probs[:, None], value=-1)
        grad.scatter_add_(-1, targets[:, None], grad_log_probs[:, None])
    if grad_entropy is not None:
        grad.addcmul_(probs * (all_log_probs + entropy[:, None]), grad_entropy[:, None], value=-1)
    return grad
