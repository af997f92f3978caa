"""Runs a learner update at full size on fake tensors, to measure memory, collectives and waits for the device.

Fake tensors have a shape and a dtype but no values. The process group is torch's fake process group. The code is the
learner's own: `PackedModel`, FSDP2, the packed forward, log-probs, backward and AdamW. The fake tensors are on the CPU,
because a torch without CUDA has no other device. They have the dtypes of a run on a GPU.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from learner import fsdp, heads
from learner import trainer as trainer_module
from learner.config import AlgorithmConfig, AttentionKernel, Device, Dtype, GradientSync, LearnerConfig
from learner.fsdp import LearnerMesh, prepare_backward
from learner.losses import policy_objective
from learner.packed_model import ModelSetup, PackedBatch
from learner.packing import MicroBatch, Packer
from learner.trainer import Trainer
from learner.types import TokenSequence

_QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B-Base": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
"""The published ``config.json`` values of the models that the experiments train, and of Qwen3-8B."""

QUICKSTART = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 20,
    "tie_word_embeddings": True,
}
"""The ``config.json`` values of the quickstart's policy, with a larger vocabulary."""

_WAITS = (
    "cpu",
    "item",
    "tolist",
    "numpy",
    "nonzero",
    "masked_select",
    "unique",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)
"""Methods of a tensor on a GPU that make the host wait for the GPU."""


_COLUMNS = ("behavior_logprobs", "proximal_logprobs", "reference_logprobs", "advantages")


@dataclass(kw_only=True)
class FakeUpdate:
    """The measurements of one rank in an update of two micro-batches.

    Attributes:
        peak_bytes: Largest number of bytes of all tensors at one time, as torch's memory tracker measures it. 0 if only
            adapters are trained.
        peak_kinds: The peak bytes by the tracker's kinds, for example parameters, gradients and activations.
        collectives: Number of calls of each collective, by name.
        collective_bytes: Bytes of the results of each collective, by name.
        waits: Names of the calls that would make the host wait for the device in the loop over micro-batches.
        dtypes: Pairs (dtype of a trained parameter, dtype of its gradient).
        num_without_gradient: Number of trained parameters without a gradient.
        num_units: Number of modules that FSDP gathers separately.
        num_micro_batches: Number of micro-batches.
        reduces_each: Whether the ranks reduce gradients after each micro-batch.
        recomputes: Whether the backward pass recomputes layers.
    """

    peak_bytes: int = 0
    peak_kinds: dict[str, int] = field(default_factory=dict)
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: Counter[str] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)
    dtypes: set[tuple[torch.dtype, torch.dtype]] = field(default_factory=set)
    num_without_gradient: int = 0
    num_units: int = 0
    num_micro_batches: int = 0
    reduces_each: bool = False
    recomputes: bool = False


class _Collectives(TorchDispatchMode):
    """Counts collectives and the bytes of their results."""

    def __init__(self, update: FakeUpdate) -> None:
        super().__init__()
        self._update = update

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.split(".")[0].strip("_")
            self._update.collectives[name] += 1
            tensors = [leaf for leaf in pytree.tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            self._update.collective_bytes[name] += sum(tensor.nbytes for tensor in tensors)
        return out


class _Waits(TorchFunctionMode):
    """Records the calls that would make the host wait for the device if the tensors were on a GPU."""

    def __init__(self, update: FakeUpdate) -> None:
        super().__init__()
        self._update = update

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(func, "__name__", "")
        indices = args[1] if name == "__getitem__" and len(args) > 1 else ()
        masks = [i for i in (indices if isinstance(indices, tuple) else (indices,)) if isinstance(i, Tensor)]
        waits = name in _WAITS or any(index.dtype is torch.bool for index in masks)
        if waits and args and isinstance(args[0], FakeTensor):
            self._update.waits.append(name)
        return func(*args, **(kwargs or {}))


def fake_update(
    settings: dict[str, Any],
    learner: LearnerConfig,
    algorithm: AlgorithmConfig | None = None,
    *,
    num_sequences: int = 4,
) -> FakeUpdate:
    """Make an update of a policy at its full width on fake tensors, and return the measurements of one rank.

    An update has two full micro-batches, then AdamW. The measured update is the second one, because the first update
    creates the optimizer's state.

    Args:
        settings: The model's ``config.json``.
        learner: Options of the learner group. The function replaces the dtype and the attention kernel by the values
            for a GPU.
        algorithm: Options of the loss. None means the defaults.
        num_sequences: Sequences per micro-batch. All have the same length. Half of each sequence is in the loss.
    """
    update = FakeUpdate()
    with tempfile.TemporaryDirectory() as folder, _fake_group(learner) as mesh:
        AutoConfig.for_model(**settings).save_pretrained(folder)
        config = replace(learner, device=Device.cpu, dtype=Dtype.bfloat16)
        setup = ModelSetup(mesh=mesh, attention=AttentionKernel.torch_varlen)
        batch = _batch(config, num_sequences)
        objective = policy_objective(algorithm or AlgorithmConfig())
        with ExitStack() as stack:
            on_gpu = mock.patch.object(heads, "multiplies_halves", lambda tensor: tensor.dtype is torch.bfloat16)
            stack.enter_context(on_gpu)
            stack.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", _sdpa_with_mask))
            fake, allocate = FakeTensorMode(allow_non_fake_inputs=True), fsdp._allocate

            def allocate_fake(*args: Any) -> None:
                with fake:
                    allocate(*args)

            with mock.patch.object(fsdp, "_allocate", allocate_fake):
                trainer = Trainer(config, model_path=folder, total_updates=10, setup=setup)
            stack.enter_context(fake)
            trainer.head.train()
            batch = replace(batch, micro_batches=[_faked(each, fake) for each in batch.micro_batches])
            trainer.accumulate(batch, objective)
            trainer.optimizer.update(1.0)  # The first update creates the optimizer's state.
            tracker = MemTracker()
            # `MemTracker` fails if a module has no trained parameters, for example if only adapters are trained.
            is_tracked = all(parameter.requires_grad for parameter in trainer.head.parameters())
            if is_tracked:
                tracker.track_external(trainer.head, trainer.optimizer.adamw)

            def prepare(*args: Any, **options: Any) -> None:
                tracker.reset_mod_stats()  # Reset the tracker, because it accepts only one call per module.
                prepare_backward(*args, **options)

            stack.enter_context(mock.patch.object(trainer_module, "prepare_backward", prepare))
            stack.enter_context(_Collectives(update))
            stack.enter_context(tracker if is_tracked else nullcontext())
            with _Waits(update):
                trainer.accumulate(batch, objective)
            trained = [p for p in trainer.head.parameters() if p.requires_grad]
            update.dtypes = {(p.dtype, p.grad.dtype) for p in trained if p.grad is not None}
            update.num_without_gradient = sum(p.grad is None for p in trained)
            trainer.optimizer.update(1.0)
            update.num_units = sum(isinstance(module, FSDPModule) for module in trainer.head.modules())
            update.num_micro_batches = len(batch.micro_batches)
    update.reduces_each = trainer.config.gradient_sync is GradientSync.micro_batch
    update.recomputes = bool(trainer.config.activation_checkpointing)
    if not is_tracked:
        return update
    (kinds,) = tracker.get_tracker_snapshot("peak").values()
    update.peak_kinds = {str(kind).rpartition(".")[2]: int(size) for kind, size in kinds.items()}
    update.peak_bytes = update.peak_kinds.pop("Total")
    return update


def peak_at_full_depth(settings: dict[str, Any], learner: LearnerConfig) -> int:
    """Return the peak memory of a rank in bytes. ``settings`` is the model's ``config.json``.

    The peak is extrapolated from models with four and with six layers. Each layer adds the same number of bytes.
    """
    first, second = (fake_update(settings | {"num_hidden_layers": n}, learner).peak_bytes for n in (4, 6))
    return first + (settings["num_hidden_layers"] - 4) * (second - first) // 2


def _sdpa_with_mask(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor, scale: float, dropout_p: float) -> Tensor:
    """Compute masked attention with SDPA's CUDA kernel. Layers with windows or sinks have masks."""
    bias = torch.zeros_like(attn_mask, dtype=q.dtype).expand(*q.shape[:2], *attn_mask.shape)
    out, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, scale=scale)
    return out


def _batch(config: LearnerConfig, num_sequences: int) -> PackedBatch:
    tokens = config.max_tokens_per_micro_batch * config.sp_size
    length = tokens // num_sequences
    sequences = [
        TokenSequence(
            input_ids=np.arange(length, dtype=np.int32),
            loss_mask=np.arange(length) >= length // 2,
            columns={name: np.zeros(length, dtype=np.float32) for name in _COLUMNS},
        )
        for _ in range(2 * num_sequences)
    ]
    batches = Packer(max_tokens=tokens, whole=False).pack(sequences)
    return PackedBatch(micro_batches=batches, num_tokens=tokens, num_trajectories=2 * num_sequences)


def _faked(batch: MicroBatch, fake: FakeTensorMode) -> MicroBatch:
    """Return a copy of ``batch`` with fake tensors in place of real tensors. The numpy arrays stay the same."""
    tensors = {name: fake.from_tensor(value) for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **tensors, columns={name: fake.from_tensor(value) for name, value in batch.columns.items()})


@contextmanager
def _fake_group(config: LearnerConfig) -> Iterator[LearnerMesh]:
    """Open a fake process group, and yield the mesh of rank 0."""
    dist.init_process_group("fake", rank=0, world_size=config.num_ranks, store=FakeStore())
    try:
        shape = (config.num_ranks // config.sp_size, config.sp_size)
        device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "sp"))
        mesh = LearnerMesh(
            device_mesh=device_mesh,
            device=torch.device("cpu"),
            fsdp_size=config.num_ranks if config.fsdp_size == -1 else config.fsdp_size,
            timeout=timedelta(seconds=60),
        )
        _ = mesh.fsdp_mesh  # Create and cache the mesh before FakeTensorMode starts.
        yield mesh
    finally:
        dist.destroy_process_group()
