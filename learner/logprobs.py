"""Log-probs and entropy of chosen tokens, in chunks, so that [M, V] logits are never held in float32 at once."""

from __future__ import annotations

from typing import Any

import torch
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
    entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target, and the entropy of the distribution it was drawn from.

    The distribution is softmax(logits / temperature), as at sampling, before any top-p or top-k. Logits are computed
    chunk by chunk and again in the backward pass; differentiable in hidden, weight and bias. They are summed in float32
    and never rounded to a half precision, which would move log-probs by up to 0.06 nats.

    Args:
        hidden: [M, h], the states that predict the targets; any float type.
        weight: [V, h], the output embedding.
        bias: [V], or None.
        targets: [M] int64 in 0..V-1.
        temperature: Softmax temperature, > 0.
        chunk_tokens: Tokens whose logits are held in float32 at a time.
        entropy: Compute the entropies, which takes one more pass over the logits.

    Returns:
        Log-probs [M] float32, each <= 0, and entropies [M] float32 in nats, or None.
    """
    log_probs, entropies = _ChunkedLogProbs.apply(hidden, weight, bias, targets, temperature, chunk_tokens, entropy)  # type: ignore[misc]
    return log_probs, entropies if entropy else None


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropies, normalizer = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        factor = _factor(weight)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], factor, bias, temperature)
            normalizer[part] = logits.logsumexp(-1)
            log_probs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer[part]
            if entropy:
                probs = torch.exp(logits - normalizer[part, None])
                entropies[part] = normalizer[part] - torch.einsum("nv,nv->n", probs, logits)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        factor = _factor(weight)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden[part], factor, bias, ctx.temperature)
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
            grad_weight += _product(grad_logits.t(), hidden[part])
        grad_bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None


def _factor(weight: Tensor) -> Tensor:
    """The weight as `_product` takes it: the CPU has no product of half precision that gives float32."""
    return weight if weight.is_cuda else weight.float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product in float32, of factors that may be in half precision."""
    if left.is_cuda and left.dtype is not torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _logits(hidden: Tensor, factor: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[n, V] float32, divided by the temperature."""
    logits = _product(hidden, factor.t())
    if bias is not None:
        logits += bias
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
