"""Trains a role's model: AdamW, optimizer updates on token sequences, and learner steps.

RL workers and supervised fine-tuning use the same `Trainer`. All ranks call its methods together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch._dynamo  # import here, because the import takes a second, and would delay the first optimizer step
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from asyncrl.core import record
from asyncrl.core.record import SpanKind

from .batching import split_sequences
from .config import LearnerConfig, OptimizerConfig, Schedule
from .fsdp import LearnerMesh, drop_gradients, local_tensor, prepare_backward
from .heads import TrainableHead
from .losses import Objective, token_weights
from .packed_model import ModelSetup, PackedBatch, PackedModel
from .packing import MicroBatch
from .roles import ACTOR, Role
from .types import TokenSequence

_NO_MATRIX = re.compile(r"(bias|A_log|norm[^.]*\.weight)$")
"""Names of parameters that are not matrices, although they may have two or more dimensions."""


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Return the learning rate of one optimizer update. ``update`` is the number of earlier updates.

    A linear warm-up reaches the peak at update ``warmup_steps``. A linear or cosine schedule then reduces the rate to
    ``min_lr_ratio`` times the peak at update ``total_updates``. Afterwards, the rate does not change. A constant
    schedule keeps the peak.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / (config.warmup_steps + 1)
    span = max(1, total_updates - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / span)
    if config.schedule is Schedule.linear:
        shape = 1.0 - progress
    elif config.schedule is Schedule.cosine:
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        return config.lr
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


class ModelOptimizer:
    """AdamW on the parameters of a plain or sharded model that require a gradient. Weight decay is on matrices only.

    ``total_updates`` is the number of optimizer updates of the run, for the learning rate's schedule.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, total_updates: int) -> None:
        self.config = config
        self.total_updates = total_updates
        self.num_updates = 0
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self._shards = shard_mesh(self._parameters)
        groups = [
            {"params": [p for n, p in named if is_matrix(n, p)], "weight_decay": config.weight_decay},
            {"params": [p for n, p in named if not is_matrix(n, p)], "weight_decay": 0.0},
        ]
        self.adamw = AdamW(
            [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )

    def update(self, norm: float | None = None) -> dict[str, float]:
        """Clip the gradients, update the parameters and clear the gradients.

        If a gradient is not finite, the parameters do not change, because the update would destroy them. If all
        gradients are zero, the parameters do not change either, because only momentum and weight decay would act.

        Args:
            norm: L2 norm of the gradients of all ranks. None computes it.

        Returns:
            ``grad_norm`` before clipping, ``lr``, and two counts, each 1.0 or 0.0: ``skipped_updates`` (a non-finite
            gradient) and ``empty_updates`` (a gradient of zero).
        """
        if norm is None:
            norm = global_grad_norm(self._parameters, self._shards)
        lr = learning_rate(self.config, self.num_updates, self.total_updates)
        is_finite = math.isfinite(norm)
        if is_finite and norm > 0.0:
            limit = self.config.clip_grad_norm
            if limit and norm > limit:
                for gradient in _local_gradients(self._parameters):
                    gradient.mul_(limit / norm)
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        self.num_updates += 1
        self.adamw.zero_grad()
        counts = {"skipped_updates": float(not is_finite), "empty_updates": float(norm == 0.0)}
        return {"grad_norm": norm, "lr": lr, **counts}


def global_grad_norm(parameters: Iterable[nn.Parameter], shards: DeviceMesh | None) -> float:
    """Return the L2 norm of all gradients of ``parameters`` together.

    For a sharded gradient, the norm includes all shards. ``shards`` is the mesh of the ranks that share one copy of the
    parameters; None means that the parameters are not sharded. Either all gradients are plain tensors, or all gradients
    are sharded in the same way.
    """
    gradients = _local_gradients(parameters)
    if not gradients:
        return 0.0
    squared = nn.utils.get_total_norm(gradients).double().square()
    if shards is not None:
        squared = squared.to(shards.device_type)
        dist.all_reduce(squared, group=shards.get_group())
    return math.sqrt(squared.item())


def shard_mesh(parameters: Iterable[nn.Parameter]) -> DeviceMesh | None:
    """Return the mesh of ranks that share one copy of the parameters, or None if the parameters are not sharded."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return mesh if mesh.ndim == 1 else mesh["shard"]
    return None


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter. It applies to matrices, not to biases or gains of norms.

    Some models store the biases of all experts, the norm gains of all heads, or the decay rates of a state (Mamba) in
    one tensor of two dimensions. Such a tensor does not count as a matrix.
    """
    return parameter.ndim >= 2 and not _NO_MATRIX.search(name)


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]


class Trainer(PackedModel):
    """A `PackedModel` with an optimizer.

    Args:
        config, model_path, temperature, setup: The arguments of `PackedModel` with these names.
        role: The role to train, such as actor or critic.
        total_updates: Number of optimizer updates of the run, for the learning rate's schedule.
        seed: Seed for the initial values and the dropout of the adapters.

    Raises:
        ValueError: the role is frozen.
    """

    def __init__(
        self,
        config: LearnerConfig,
        role: Role = ACTOR,
        *,
        model_path: str,
        total_updates: int,
        temperature: float = 1.0,
        seed: int = 0,
        setup: ModelSetup | None = None,
    ) -> None:
        if role.optimizer is None:
            raise ValueError(f"role {role.name!r} is frozen and does not have an optimizer; load it as a PackedModel")
        torch.manual_seed(seed)
        super().__init__(config, role, model_path=model_path, temperature=temperature, setup=setup)
        self.optimizer = ModelOptimizer(self.head, role.optimizer(config), total_updates=total_updates)

    @property
    def trains_as_it_scores(self) -> bool:
        """True if a training forward pass gives the same log-probs as `scores`.

        It is False without a self-test, or if the adapters have dropout.
        """
        lora = self.config.lora
        return self.selftest is not None and not (self.role.adapters and lora.rank and lora.dropout)

    def update(
        self, sequences: Sequence[TokenSequence], objective: Objective, packed: PackedBatch | None = None
    ) -> dict[str, float]:
        """Make one optimizer update on the sequences of all ranks.

        The ranks of one sequence-parallel group pass the same sequences.

        ``packed`` may be the result of `pack` with ``keep_branches=objective.needs_trajectories``.

        Returns:
            The same dict on each rank: ``loss``, the loss's own metrics, ``num_tokens`` (in the loss),
                ``num_trajectories``, ``num_micro_batches``, ``grad_norm``, ``lr``, ``skipped_updates``,
                ``empty_updates``. The loss's own metrics are means over the batch's tokens in the loss. This method
                does not apply ``Objective.summarize`` to them.
        """
        self.set_training(True)
        batch = (packed or self.pack(sequences, keep_branches=objective.needs_trajectories)).with_columns(sequences)
        rows = self.accumulate(batch, objective)
        with record.span(SpanKind.optimizer):
            return self._reduce(rows) | batch.counts() | self.optimizer.update()

    def accumulate(self, batch: PackedBatch, objective: Objective) -> list[dict[str, Tensor]]:
        """Run the forward and backward pass of all micro-batches. The gradients of the micro-batches add up.

        The host does not wait for the device. Returns one dict per micro-batch, with tensors on the device. Summed over
        the micro-batches of all ranks, these tensors give the batch's loss and mean metrics.
        """
        rows = []
        try:
            with self.sharding:
                for number, micro_batch in enumerate(batch.micro_batches, start=1):
                    prepare_backward(self.head, self.config, is_last=number == len(batch.micro_batches))
                    with record.span(SpanKind.forward):
                        share, row = self._share_of_loss(micro_batch, objective, batch)
                    with record.span(SpanKind.backward):  # FSDP averages gradients over ranks; the update needs a sum
                        (share * self.mesh.num_ranks).backward()
                    rows.append(row)
        except BaseException:
            drop_gradients(self.head)  # the next update must not use gradients of an incomplete batch
            raise
        return rows

    @torch.no_grad()
    def evaluate(
        self, sequences: Sequence[TokenSequence], objective: Objective, packed: PackedBatch | None = None
    ) -> dict[str, float]:
        """Compute loss and metrics of the sequences of all ranks without training.

        Returns the metrics of `update`, without the metrics of the optimizer.
        """
        self.set_training(False)
        batch = (packed or self.pack(sequences, keep_branches=objective.needs_trajectories)).with_columns(sequences)
        with self.sharding:
            rows = [self._share_of_loss(micro_batch, objective, batch)[1] for micro_batch in batch.micro_batches]
        return self._reduce(rows) | batch.counts()

    def _share_of_loss(
        self, micro_batch: MicroBatch, objective: Objective, batch: PackedBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        head = cast("TrainableHead", self.head)
        inputs = head.inputs(micro_batch.to(self.mesh.device), entropy=objective.needs_entropy)
        terms = objective.loss(inputs)
        weights = token_weights(
            inputs,
            objective.aggregation,
            num_tokens=batch.num_tokens,
            num_trajectories=batch.num_trajectories,
            sequence_norm_tokens=objective.sequence_norm_tokens,
        )
        share = (terms.per_token * weights).sum()
        means = {name: value.sum() / max(1, batch.num_tokens) for name, value in terms.metrics.items()}
        return share, {"loss": share.detach(), **means}


@dataclass(frozen=True, kw_only=True)
class PackedStep:
    """The micro-batches of a learner step, without columns such as advantages.

    Attributes:
        scored: The packed sequences whose proximal log-probs (under the policy before the step) must be computed before
            the first update. None if there are no such sequences.
        updates: The packed sequences of each mini-batch. A step that is only measured has one entry with all sequences.
    """

    scored: PackedBatch | None
    updates: Sequence[PackedBatch]

    def pinned(self) -> PackedStep:
        """Return a copy of the step in page-locked memory."""
        scored = None if self.scored is None else self.scored.pinned()
        return PackedStep(scored=scored, updates=[each.pinned() for each in self.updates])


class LearnerStep:
    """Makes learner steps. A learner step makes one optimizer update per mini-batch.

    The objective may need proximal log-probs (under the policy before the step). Then a forward pass before the first
    update computes these log-probs. If ``Trainer.trains_as_it_scores`` is True, this pass omits the first mini-batch,
    because the first update computes the same log-probs.
    """

    def __init__(self, trainer: Trainer, objective: Objective, *, num_mini_batches: int = 1) -> None:
        self._trainer = trainer
        self._objective = objective
        self._num_mini_batches = num_mini_batches
        # `num_own` is 1 if the first update itself computes the proximal log-probs of its mini-batch, else 0.
        num_own = int(trainer.trains_as_it_scores)
        self._first_scored = num_own if objective.needs_proximal else num_mini_batches

    def pack(
        self, sequences: Sequence[TokenSequence], mesh: LearnerMesh | None = None, *, is_measured: bool = False
    ) -> PackedStep:
        """Pack this rank's sequences for `run`, or for `measure` if ``is_measured``. All ranks call this together.

        The sequences do not need columns. The ranks agree on the number of micro-batches over ``mesh``, by default the
        trainer's mesh.
        """
        trained = _in_loss(sequences)
        later = [] if is_measured else self._later(trained)
        parts = [sequences] if is_measured else split_sequences(trained, self._num_mini_batches)
        scores = not is_measured and self._first_scored < self._num_mini_batches
        return PackedStep(
            scored=self._trainer.pack(later, mesh=mesh) if scores else None,
            updates=[
                self._trainer.pack(part, keep_branches=self._objective.needs_trajectories, mesh=mesh) for part in parts
            ],
        )

    def run(self, sequences: Sequence[TokenSequence], packed: PackedStep | None = None) -> dict[str, float]:
        """Make one learner step on this rank's sequences: one optimizer update per mini-batch.

        Before the updates, this method computes the column ``proximal_logprobs`` if the objective needs it. The
        sequences must have all other columns that the objective reads. ``packed`` may be the result of `pack`. Returns
        the metrics of `make_updates`.
        """
        packed = packed or self.pack(sequences)
        if packed.scored is None:
            return self.make_updates(sequences, packed)
        trained = _in_loss(sequences)
        later = self._later(trained)
        scores = self._trainer.scores(later, packed=packed.scored)
        scored = [s.with_column("proximal_logprobs", score) for s, score in zip(later, scores, strict=True)]
        own = [sequence for sequence in trained if sequence.mini_batch < self._first_scored]
        return self.make_updates([*own, *scored], packed)

    def _later(self, trained: Sequence[TokenSequence]) -> list[TokenSequence]:
        return [sequence for sequence in trained if sequence.mini_batch >= self._first_scored]

    def make_updates(self, sequences: Sequence[TokenSequence], packed: PackedStep | None = None) -> dict[str, float]:
        """Make one optimizer update per mini-batch, on this rank's sequences.

        The sequences must have the columns that the objective reads. The column ``proximal_logprobs`` is not needed in
        the first mini-batch.

        Returns:
            The metrics of `Trainer.update` after ``Objective.summarize``, the same on each rank. Counts are summed over
            mini-batches. Other metrics are averaged.
        """
        parts = split_sequences(_in_loss(sequences), self._num_mini_batches)
        batches = [None] * len(parts) if packed is None else packed.updates
        updates = [
            self._trainer.update(part, self._objective, packed=batch)
            for part, batch in zip(parts, batches, strict=True)
        ]
        return self._objective.summarize(_merged(updates))

    def measure(self, sequences: Sequence[TokenSequence], packed: PackedStep | None = None) -> dict[str, float]:
        """Return the metrics of the batch without an update. They do not include the metrics of the optimizer."""
        batch = None if packed is None else packed.updates[0]
        return self._objective.summarize(self._trainer.evaluate(sequences, self._objective, packed=batch))


def _in_loss(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    return [sequence for sequence in sequences if sequence.loss_mask.any()]


def _merged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    counted = {name for name in updates[0] if name.startswith("num_") or name.endswith("_updates")}
    trained = [update for update in updates if update["num_tokens"]] or updates
    return {
        name: sum(update[name] for update in updates)
        if name in counted
        else sum(update[name] for update in trained) / len(trained)
        for name in updates[0]
    }
