"""AdamW with decoupled decay on matrices, a learning-rate schedule over optimizer updates, and a global norm clip."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from .config import OptimizerConfig, Schedule
from .fsdp import local_tensor


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """Learning rate of one optimizer update; ``update`` is the number of updates before it.

    Linear warm-up that reaches the peak at update ``warmup_steps``, then the schedule's shape down to ``min_lr_ratio``
    of the peak, which is reached at ``total_updates``, the updates of the whole run, and kept.
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
    """Steps those parameters of a plain or sharded model that ask for a gradient.

    ``total_updates`` are the optimizer updates of the whole run, for the schedule.
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

    def step(self) -> dict[str, float]:
        """Clip the gradients, update the parameters and clear the gradients.

        A gradient that is not finite would destroy the weights: then nothing is updated, and it is counted.

        Returns:
            ``grad_norm`` before clipping, ``lr``, and ``skipped_updates`` (1.0 or 0.0).
        """
        norm = global_grad_norm(self._parameters, self._shards)
        lr = learning_rate(self.config, self.num_updates, self.total_updates)
        finite = math.isfinite(norm)
        if finite:
            limit = self.config.clip_grad_norm
            if limit and norm > limit:
                for gradient in _local_gradients(self._parameters):
                    gradient.mul_(limit / norm)
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        self.num_updates += 1
        self.adamw.zero_grad()
        return {"grad_norm": norm, "lr": lr, "skipped_updates": float(not finite)}


def global_grad_norm(parameters: Iterable[nn.Parameter], shards: DeviceMesh | None) -> float:
    """Euclidean norm of all gradients, over the ranks that hold the shards of one copy; see `shard_mesh`.

    The parameters are all sharded alike, or all plain.
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
    """The ranks that share one copy of the parameters, or None where nothing is sharded."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            return mesh if mesh.ndim == 1 else mesh["shard"]
    return None


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether decoupled weight decay applies: matrices decay, biases and norm gains do not."""
    return parameter.ndim >= 2 and not name.endswith(".bias")


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
