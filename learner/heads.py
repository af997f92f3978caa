"""Heads compute log-probs, values or rewards from a model's last hidden states.

A head is the root module that FSDP shards. It contains the Hugging Face model. Under Ulysses (sequence parallelism),
each rank holds some of the tokens, but all sequence-parallel (sp) ranks return the results for all tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from .attention import packed_layout
from .config import AttentionKernel
from .losses import LossInputs, TokenInputs, ValueInputs
from .packing import MicroBatch, on_device
from .pretrained import SCORE_HEAD, LogitShape, logit_shape
from .recurrent import RecurrentLayers
from .ulysses import (
    gather_outputs_and_unpad,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
    ulysses_pad_and_slice_inputs,
)
from .vision import VisionTower

LINEAR = LogitShape()
"""The `LogitShape` of logits that have neither a scale nor a soft cap."""


WEIGHT_CHUNK_TOKENS = 4096
"""Number of tokens per matrix product that computes the gradient of the output layer's weight, on a GPU."""


class TrainableHead(Protocol):
    """A model with a trainable head. The method `inputs` returns the arguments of the loss function."""

    def inputs(self, batch: MicroBatch, *, entropy: bool = False) -> TokenInputs:
        """Run the model on a micro-batch, and return the arguments of the loss function.

        If ``entropy`` is set, the arguments of a policy loss include entropies.
        """
        ...


class PackedHead(nn.Module):
    """A Hugging Face model that runs on micro-batches, which are split over the sequence-parallel (sp) ranks.

    ``forward`` takes a micro-batch on the model's device, and returns a tuple of float32 tensors. Each tensor has one
    number per token in the loss, or one number per sequence.

    Attributes:
        pretrained: The Hugging Face model; it holds all parameters of this module.
        attention: The attention kernel; never ``auto``.
        recurrent: The model's recurrent layers; most models have none.
        vision: The model's vision tower; None for a text model.
        per_sequence: True if the head returns one number per sequence, False for one per token in the loss.
    """

    per_sequence = False
    attention = AttentionKernel.sdpa
    vision: VisionTower | None = None

    def __init__(self, pretrained: PreTrainedModel) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.recurrent = RecurrentLayers(pretrained)

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """Return the last hidden states of the packed tokens, [N, h]. Under Ulysses, N counts this rank's tokens."""
        sp_size = get_ulysses_sequence_parallel_world_size()
        input_ids, position_ids, padding = ulysses_pad_and_slice_inputs(
            batch.input_ids[None], batch.position_ids.unsqueeze(-2), sp_size
        )
        token_index = batch.token_index
        if token_index is not None:
            token_index = np.concatenate((token_index, len(batch.input_ids) + np.arange(padding)))
        lengths = batch.lengths + (1,) * padding
        layout = packed_layout(lengths, batch.input_ids.device, self.attention, token_index)
        self.recurrent.use(layout)
        inputs: dict[str, Any] = {"input_ids": input_ids}
        backbone = _backbone(self.pretrained)
        if self.vision is not None:
            inputs, backbone = self.vision.inputs(batch, input_ids), self.vision.language_model
        return backbone(**inputs, position_ids=position_ids, packed=layout, use_cache=False).last_hidden_state[0]


def _backbone(pretrained: PreTrainedModel) -> nn.Module:
    """Return the model without its output layer. For Llama 4's text model, ``base_model`` does not give this part."""
    backbone = cast("nn.Module", pretrained.base_model)
    return backbone if backbone is not pretrained else cast("nn.Module", pretrained.model)


class LogProbHead(PackedHead):
    """Computes log-probs of the tokens in the loss, and entropies.

    ``temperature`` > 0 is the softmax temperature. Float32 logits are computed in chunks of ``chunk_tokens`` tokens.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__(causal_lm)
        self.logit_shape = logit_shape(causal_lm.config)
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens

    def forward(self, batch: MicroBatch, *, entropy: bool = False) -> tuple[Tensor, ...]:
        """Return the log-prob of each token in the loss, [M] float32, as a tuple of one tensor.

        With ``entropy``, the tuple also has the entropy at each of these tokens, [M] float32 in nats.
        """
        head = cast("nn.Linear", self.pretrained.get_output_embeddings())

        def scores(hidden: Tensor, index: Tensor | slice) -> tuple[Tensor, ...]:
            log_probs, entropies = chunked_log_probs(
                hidden,
                head.weight,
                head.bias,
                batch.targets[index],
                temperature=self.temperature,
                chunk_tokens=self.chunk_tokens,
                entropy=entropy,
                shape=self.logit_shape,
            )
            return (log_probs,) if entropies is None else (log_probs, entropies)

        return at_places(self.hidden_states(batch), batch.predict_index, scores)

    def inputs(self, batch: MicroBatch, *, entropy: bool = False) -> LossInputs:
        """Run the model on a micro-batch, and return the arguments of a policy loss.

        The arguments include entropies if ``entropy`` is set.
        """
        log_probs, *entropies = self(batch, entropy=entropy)
        return LossInputs(log_probs=log_probs, entropy=next(iter(entropies), None), **_token_inputs(batch, log_probs))


class ValueHead(PackedHead):
    """Computes the critic's value before each token in the loss.

    The critic's model is a token classifier, which may have dropout before its last layer. This head does not apply the
    dropout. With dropout, the values in training would differ from the values used for the returns.
    """

    def forward(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the critic's value before each token in the loss, [M] float32, as a tuple of one tensor."""
        return scores_at(self, batch, batch.predict_index)

    def inputs(self, batch: MicroBatch, *, entropy: bool = False) -> ValueInputs:
        """Run the model on a micro-batch, and return the arguments of the critic's loss. ``entropy`` has no effect."""
        (values,) = self(batch)
        return ValueInputs(values=values, **_token_inputs(batch, values))


class RewardHead(PackedHead):
    """Computes the reward model's score of each sequence, at its last token."""

    per_sequence = True

    def forward(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the score of each sequence, [number of sequences] float32, as a tuple of one tensor."""
        return scores_at(self, batch, batch.last_index())


def scores_at(head: PackedHead, batch: MicroBatch, places: np.ndarray) -> tuple[Tensor, ...]:
    """Return the classifier's output at [M] packed positions, as float32. All sequence-parallel ranks get the output.

    With bfloat16, an output of 100.4 would be rounded to 100.5, so small advantages would become zero.
    """
    linear = cast("nn.Linear", getattr(head.pretrained, SCORE_HEAD))

    def scores(hidden: Tensor, _index: Tensor | slice) -> tuple[Tensor]:
        bias = None if linear.bias is None else linear.bias.float()
        return (F.linear(hidden.float(), linear.weight.float(), bias).squeeze(-1),)

    return at_places(head.hidden_states(batch), places, scores)


def _token_inputs(batch: MicroBatch, values: Tensor) -> dict[str, Any]:
    """Return the arguments that `TokenInputs` needs for a micro-batch, by name.

    For a micro-batch without tokens in the loss, ``columns`` is a dict that returns an empty tensor for every name. The
    sequences of such a micro-batch possibly do not have the columns that the loss reads.
    """
    columns = batch.columns if len(values) else defaultdict(values.detach)
    lengths = batch.trajectory_lengths
    return {"trajectory_index": batch.trajectory_index, "trajectory_lengths": lengths, "columns": columns}


def at_places(
    hidden: Tensor, places: np.ndarray, compute: Callable[[Tensor, Tensor | slice], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Apply ``compute`` to the hidden states at some packed positions.

    Args:
        hidden: [N, h], under Ulysses this rank's tokens.
        places: [M] int64 packed positions on the host, equal on all sequence-parallel ranks.
        compute: Function that gets the hidden states [m, h] at the m positions in ``places`` that are on this rank, and
            an index. It returns one or more [m] tensors. The index is [m] int64 or a slice, and selects the entries of
            these m positions from an [M] array, such as ``places``.

    Returns:
        The results of ``compute`` for all M positions, [M] each, equal on all sequence-parallel ranks.
    """
    everywhere = on_device(places, hidden.device)
    if get_ulysses_sequence_parallel_world_size() == 1:
        return compute(hidden.index_select(0, everywhere), slice(None))
    local = places - get_ulysses_sequence_parallel_rank() * len(hidden)
    here = np.flatnonzero((local >= 0) & (local < len(hidden)))
    mine, own = (on_device(index, hidden.device) for index in (here, local[here]))
    values = torch.stack(compute(hidden.index_select(0, own), mine), dim=-1)
    spread = values.new_zeros(len(hidden), values.shape[-1]).index_copy(0, own, values)
    # All sp ranks compute the same loss. So each rank has the complete gradient of its own tokens, without a sum.
    everyone = gather_outputs_and_unpad(spread, gather_dim=0, grad_scaler=False)
    return tuple(value.clone() for value in everyone.index_select(0, everywhere).unbind(-1))


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy: bool = True,
    shape: LogitShape = LINEAR,
) -> tuple[Tensor, Tensor | None]:
    """Compute the log-prob of each target token, and the entropy of the distribution at its position.

    The distribution is softmax(logits / temperature), before any top-p or top-k. Logits are float32, because half
    precision would change log-probs by up to 0.06 nats. The backward pass recomputes the logits.

    If weight and bias are frozen, the forward pass also computes the derivatives with respect to ``hidden``. The
    backward pass then recomputes the logits only if the loss depends on the entropies.

    Args:
        hidden: [M, h] of any float dtype, the states that predict the targets.
        weight: [V, h], output embedding.
        bias: [V], or None.
        targets: [M] int64.
        temperature: > 0.
        chunk_tokens: Number of tokens per chunk; only one chunk of logits is in memory.
        entropy: Whether to compute entropies, with one more pass over the logits.
        shape: Scale and soft cap of the model's logits.

    Returns:
        A pair: log-probs [M] float32, each <= 0, and entropies [M] float32 in nats (None without ``entropy``).
    """
    if shape.soft_cap is None:  # without a soft cap, divide the temperature by the scale instead of scaling the logits
        shape, temperature = LINEAR, temperature / shape.scale
    options = (temperature, shape, chunk_tokens, entropy)
    log_probs, entropies = _ChunkedLogProbs.apply(hidden, weight, bias, targets, *options)  # type: ignore[misc]
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
        shape: LogitShape,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropies, normalizer = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        factor = _factor(weight)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        by_hidden = torch.empty_like(hidden) if to_hidden and not (to_weight or to_bias) else None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], factor, bias, shape)
            slope = None if by_hidden is None or shape.soft_cap is None else shape.slope(logits)
            if temperature != 1.0:
                logits.div_(temperature)
            normalizer[part] = logits.logsumexp(-1)
            log_probs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - normalizer[part]
            if entropy:
                mean_logits = torch.einsum("nv,nv->n", torch.sub(logits, normalizer[part, None]).exp_(), logits)
                entropies[part] = normalizer[part] - mean_logits
            if by_hidden is not None:
                ones = torch.full_like(normalizer[part], 1 / temperature)
                grad = _by_log_prob(logits.sub_(normalizer[part, None]), targets[part], ones, slope)
                torch.matmul(grad.to(hidden.dtype), weight, out=by_hidden[part])
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropies, by_hidden)
        ctx.temperature, ctx.shape, ctx.chunk = temperature, shape, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizer, entropy, by_hidden = ctx.saved_tensors
        if by_hidden is not None and grad_entropy is None:
            grad_hidden = None if grad_log_probs is None else by_hidden * grad_log_probs[:, None].to(hidden.dtype)
            return grad_hidden, *(None,) * 7
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if to_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if to_bias and bias is not None else None
        factor = _factor(weight)
        by_log_prob = (torch.zeros_like(normalizer) if grad_log_probs is None else grad_log_probs) / ctx.temperature
        by_entropy = None if grad_entropy is None else grad_entropy / ctx.temperature
        # One matrix product covers several chunks, because each product reads and writes the whole weight gradient.
        step = max(1, WEIGHT_CHUNK_TOKENS // ctx.chunk) * ctx.chunk if multiplies_halves(hidden) else ctx.chunk
        left = hidden.new_empty(min(step, len(hidden)), len(weight)) if to_weight and step > ctx.chunk else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            grad_logits = _logits_gradient(
                _logits(hidden[part], factor, bias, ctx.shape),
                ctx.shape,
                ctx.temperature,
                targets[part],
                normalizer[part],
                entropy[part],
                by_log_prob[part],
                None if by_entropy is None else by_entropy[part],
            )
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.matmul(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is None:
                continue
            end, first = start + len(grad_logits), start - start % step
            if left is not None:
                left[start - first : end - first] = grad_logits
                grad_logits = left[: end - first]
            if end - first == step or end == len(hidden):
                _add_product(grad_weight, grad_logits.t(), hidden[first:end])
        grad_weight, grad_bias = (None if grad is None else grad.to(weight.dtype) for grad in (grad_weight, grad_bias))
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def multiplies_halves(tensor: Tensor) -> bool:
    """Return whether products of this tensor are computed in half precision with float32 results.

    This needs a tensor in half precision on a GPU. The CPU does not support such products.
    """
    return tensor.is_cuda and tensor.dtype is not torch.float32


def _factor(weight: Tensor) -> Tensor:
    return weight if multiplies_halves(weight) else weight.float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    if multiplies_halves(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if multiplies_halves(left):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _logits(hidden: Tensor, factor: Tensor, bias: Tensor | None, shape: LogitShape) -> Tensor:
    logits = _product(hidden, factor.t())
    if bias is not None:
        logits += bias
    return shape(logits)


def _logits_gradient(
    logits: Tensor,
    shape: LogitShape,
    temperature: float,
    targets: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    by_log_prob: Tensor,
    by_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of the loss with respect to z, [n, V]. z is the input from which ``shape`` computes logits.

    Without a soft cap, z is equal to the logits, and the gradient is the sum of two terms. With a soft cap, the sum is
    multiplied by `LogitShape.slope`.

    - The term of the log-prob is g (1[target] - p). p are the probabilities. g is ``by_log_prob`` [n] float32: the
      gradient of the loss with respect to the log-prob, divided by the temperature.
    - The term of the entropy H is -e p (log p + H). e is ``by_entropy`` [n] float32: the gradient of the loss with
      respect to H, divided by the temperature. Without ``by_entropy``, this term is 0.

    The result overwrites ``logits`` [n, V] to save memory.
    """
    slope = None if shape.soft_cap is None else shape.slope(logits)
    if temperature != 1.0:
        logits.div_(temperature)
    log_probs = logits.sub_(normalizer[:, None])
    if by_entropy is None:
        return _by_log_prob(log_probs, targets, by_log_prob, slope)
    probs = log_probs.exp()
    grad = log_probs.add_(entropy[:, None]).mul_(-by_entropy[:, None]).sub_(by_log_prob[:, None]).mul_(probs)
    grad.scatter_add_(-1, targets[:, None], by_log_prob[:, None])
    return grad if slope is None else grad.mul_(slope)


def _by_log_prob(log_probs: Tensor, targets: Tensor, scale: Tensor, slope: Tensor | float | None) -> Tensor:
    """Return the gradient ``scale`` · (1[target] - p) · ``slope``, where p are the probabilities.

    If ``slope`` is None, the factor is left out. The result overwrites ``log_probs`` [n, V].
    """
    grad = log_probs.exp_().mul_(-scale[:, None])
    grad.scatter_add_(-1, targets[:, None], scale[:, None])
    return grad if slope is None else grad.mul_(slope)
