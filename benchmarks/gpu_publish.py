"""Counts, without a GPU, how many bytes an engine would copy to its GPU to load a published version."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.weights.assembly import BUCKET_BYTES
from asyncrl.weights.fused_copies import LoadObserver
from asyncrl.weights.load import ComparedWrites, FileWeights
from asyncrl.weights.manifest import StoredTensor
from benchmarks.saved_weights import describe_model

DEVICE = torch.device("meta")
"""The device that represents a GPU. Its tensors have a size but no data."""


class HostToDevice(TorchDispatchMode):
    """Counts the bytes that operations in a ``with`` block copy from host tensors to `DEVICE`.

    Attributes:
        num_bytes: Bytes that the device receives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_from_host = any(
            isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in tree_leaves((args, kwargs))
        )
        if is_from_host and isinstance(result, Tensor) and result.device == DEVICE:
            self.num_bytes += result.nbytes
        return result


class _CountedWeights(FileWeights):
    """The weight files of a version. This class counts the bytes that its own thread copies to the device.

    Attributes:
        num_bytes: Bytes that the thread has copied.
    """

    num_bytes = 0

    def copy_to_device(self, span: Sequence[StoredTensor], *others: Any, **named: Any) -> list[tuple[str, Tensor]]:
        with HostToDevice() as counted:
            copied = super().copy_to_device(span, *others, **named)
        self.num_bytes += counted.num_bytes
        return copied


class _Model(nn.Module):
    """A model that loads weights in the same way as the model of an engine.

    The q, k and v projections share one parameter, and the experts share one parameter.
    """

    def __init__(self, hidden: int, num_experts: int) -> None:
        super().__init__()
        with DEVICE:
            self.qkv = nn.Parameter(torch.empty(3 * hidden, hidden, dtype=torch.bfloat16))
            self.experts = nn.Parameter(torch.empty(num_experts, hidden, hidden, dtype=torch.bfloat16))
            self.embedding = nn.Parameter(torch.empty(40 * hidden, hidden, dtype=torch.bfloat16))

    def published(self) -> dict[str, Tensor]:
        """Return random tensors, with names as in a checkpoint: one tensor per projection and one per expert."""
        hidden = self.qkv.shape[1]
        tensors = {f"{name}_proj": torch.randn(hidden, hidden) for name in "qkv"}
        tensors |= {f"experts.{index}": torch.randn(hidden, hidden) for index in range(len(self.experts))}
        tensors["embedding"] = torch.randn(40 * hidden, hidden)
        return {name: tensor.bfloat16() for name, tensor in tensors.items()}

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write every tensor into its part of a parameter; ``tensors`` has (name, tensor) pairs of a checkpoint."""
        with torch.no_grad():
            for name, tensor in tensors:
                if name.endswith("_proj"):
                    self.qkv.chunk(3)["qkv".index(name[0])].copy_(tensor)
                elif name.startswith("experts."):
                    self.experts[int(name.partition(".")[2])].copy_(tensor)
                else:
                    self.embedding.copy_(tensor)


def h2d_bytes_per_published_byte(*, hidden: int = 256, num_experts: int = 16) -> float:
    """Return how many bytes a load of new weights copies from host to device, divided by the bytes of the weights.

    The load includes the verification of the weights. torch's meta device takes the place of a GPU.
    """
    model = _Model(hidden, num_experts)
    with tempfile.TemporaryDirectory() as folder:
        save_file(model.published(), Path(folder, "model.safetensors"))
        offer = describe_model(folder, for_device=True).offer(Path(folder, "manifest.json"), 1)
        weights = _CountedWeights(offer, DEVICE)
        with HostToDevice() as counted, ComparedWrites(dict(model.named_parameters()), weights):
            model.load_weights(weights.tensors())
        return (counted.num_bytes + weights.num_bytes) / weights.manifest.num_bytes


class _Experts(nn.Module):
    """The experts of Qwen3-30B-A3B in an engine: w13 [E, 2I, H] and w2 [E, H, I] per layer.

    `load_weights` loads the experts one by one.
    """

    num_experts, inner, hidden = 128, 768, 2048

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        dims = {"w13": (2 * self.inner, self.hidden), "w2": (self.hidden, self.inner)}
        with DEVICE:
            self.layers = nn.ModuleList(nn.Module() for _ in range(self.num_layers))
            for layer in self.layers:
                for name, shape in dims.items():
                    values = torch.empty(self.num_experts, *shape, dtype=torch.bfloat16)
                    layer.register_parameter(name, nn.Parameter(values, requires_grad=False))

    def published(self) -> Iterable[tuple[str, Tensor]]:
        """Yield a pair (name, tensor) for each weight matrix of the experts.

        As in a real load, the tensors are views of blocks of `BUCKET_BYTES` bytes.
        """
        size = 2 * self.inner * self.hidden
        left, span = 0, torch.empty(0)
        for name in (f"{la}.{e}.{k}" for la in range(self.num_layers) for e in range(self.num_experts) for k in "dgu"):
            if left < size:
                left = BUCKET_BYTES // size * size
                span = torch.empty(left, dtype=torch.uint8, device=DEVICE)
            shape = (self.hidden, self.inner) if name.endswith("d") else (self.inner, self.hidden)
            yield name, span[len(span) - left :][:size].view(torch.bfloat16).view(shape)
            left -= size

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write every tensor into its part of a parameter; ``tensors`` has (name, tensor) pairs of a checkpoint."""
        for name, tensor in tensors:
            layer, expert, kind = name.split(".")
            held = cast("Any", self.layers[int(layer)])
            if kind == "d":
                held.w2.data[int(expert)].copy_(tensor)
            else:
                held.w13.data[int(expert)].chunk(2)["gu".index(kind)].copy_(tensor)


class _CountingObserver(LoadObserver):
    """An observer of a load that also counts the writes to parameters.

    Attributes:
        num_writes: Number of writes so far.
    """

    num_writes = 0

    def wrote(self, name: str, target: Tensor, source: Tensor | float) -> None:
        self.num_writes += 1
        super().wrote(name, target, source)


class _Unverified:
    """A replacement for the `FileWeights` argument of `ComparedWrites`, without data and without a copying thread."""

    copier = None


def writes_per_expert_tensor(*, num_layers: int = 48) -> float:
    """Load weights twice. Return the number of writes to parameters in the second load, divided by the first number.

    The model has ``num_layers`` layers of Qwen3-30B-A3B. The first load writes each expert tensor separately. The
    second load joins writes.
    """
    model = _Experts(num_layers)
    parameters = dict(model.named_parameters())
    first, later = _CountingObserver(parameters), _CountingObserver(parameters)
    weights = cast("FileWeights", _Unverified())
    with ComparedWrites(parameters, weights, first) as of_first:
        model.load_weights(first.seen(iter(model.published())))
    fused = first.copies()
    with ComparedWrites(parameters, weights, later) as of_later:
        model.load_weights(fused.take(iter(model.published()), parameters))
    assert of_first.num_values == of_later.num_values == sum(parameter.numel() for parameter in parameters.values())
    return later.num_writes / first.num_writes
