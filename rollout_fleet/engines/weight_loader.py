"""Loads an offer of weights inside a server, and proves that every parameter then holds what was published.

SGLang calls `load` in the scheduler of each tensor-parallel rank (``--custom-weight-loader``), between two steps of the
model. The bytes are verified against the offer's digests, the model's own ``load_weights`` distributes them, and each
write into a parameter is compared with its source once it is done. A parameter that was not written whole is an error.
What happened is reported per rank in a file, since SGLang passes on no result. The device makes no difference.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.protocol.errors import WeightsError
from asyncrl.protocol.manifest import DTYPES, PublishedWeights, WeightOffer

from .sglang_server import ORDER_VARIABLE, report_path

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_copy, _fill, _zero = torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default


def load(model: nn.Module, _named_tensors: Any) -> None:
    """SGLang's entry: load what the order file says; the report says what came of it, also a failure."""
    order = Path(os.environ[ORDER_VARIABLE])
    fields = json.loads(order.read_text())
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    report: dict[str, Any] = {"order": fields["order"]}
    try:
        report["num_values"] = load_verified(model, WeightOffer(**fields["offer"]))
    except Exception as error:  # noqa: BLE001 - reported: an exception here would kill the server without a word
        report["error"] = f"{type(error).__name__}: {error}"
    partial = order.with_name(f"{order.name}.{rank}.partial")
    partial.write_text(json.dumps(report))
    partial.replace(report_path(order, rank))


def load_verified(model: nn.Module, offer: WeightOffer) -> int:
    """Load an offer through the model's ``load_weights``; returns how many values were written and compared.

    Raises:
        WeightsError: the bytes are not those that were published, or a parameter holds something else afterwards.
    """
    weights = PublishedWeights(offer)
    with ComparedWrites(dict(model.named_parameters()), weights) as writes:
        model.load_weights(torch_tensors(weights))  # type: ignore[operator]
    writes.check(offer.version)
    return writes.num_values


def torch_tensors(weights: PublishedWeights) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, viewing the mapped file.

    Raises:
        WeightsError: a tensor is of a type that torch does not have.
    """
    for stored, data in weights.tensors():
        if stored.dtype not in DTYPES:
            raise WeightsError(f"{stored.name} is of type {stored.dtype}; known are {sorted(DTYPES)}")
        dtype = getattr(torch, DTYPES[stored.dtype])
        with warnings.catch_warnings():  # the file is mapped read-only, and nothing here writes to it
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.from_numpy(data)
        # A view needs an aligned start, which safetensors promises only for its header.
        aligned = flat if stored.start % dtype.itemsize == 0 else flat.clone()
        yield stored.name, aligned.view(dtype).view(stored.shape)


class ComparedWrites(TorchDispatchMode):
    """Inside, every copy of published weights into one of the parameters is verified once it is done.

    A copy of whole pieces on the CPU is compared with the digest of what was published. Any other (part of a piece, of
    another type, on a GPU) is compared with its source, whose own digest is compared in the end.
    """

    def __init__(self, parameters: Mapping[str, Tensor], weights: PublishedWeights) -> None:
        super().__init__()
        self._weights = weights
        self._names: dict[int, str] = {}
        self._sizes: dict[str, int] = {}
        for name, parameter in parameters.items():
            key = parameter.untyped_storage()._cdata
            if key not in self._names:  # tied parameters are one
                self._names[key] = name
                self._sizes[name] = 0
            self._sizes[self._names[key]] = max(self._sizes[self._names[key]], parameter.numel())
        self._written: dict[str, dict[tuple[Any, ...], int]] = {name: {} for name in self._sizes}
        self._wrong: dict[str, list[Tensor]] = {}

    @property
    def num_values(self) -> int:
        """Values written, each counted once."""
        return sum(sum(regions.values()) for regions in self._written.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_write = func in (_copy, _fill, _zero)
        name = self._names.get(args[0].untyped_storage()._cdata) if is_write else None
        if name is None:
            return func(*args, **(kwargs or {}))
        target = args[0]
        self._written[name][target.storage_offset(), tuple(target.shape), target.stride()] = target.numel()
        if func is _copy:
            self._copy(name, target, args[1])
        else:
            func(*args, **(kwargs or {}))
        return target

    def check(self, version: int) -> None:
        """Read the results.

        Raises:
            WeightsError: published bytes are spoiled, or a parameter does not hold what was published.
        """
        self._weights.verify()
        wrong = {name for name, flags in self._wrong.items() if any(bool(flag) for flag in flags)}
        if wrong:
            raise WeightsError(
                f"policy version {version}: {len(wrong)} of {len(self._sizes)} parameters hold other values than were "
                f"published, first {min(wrong)}"
            )
        written = {name: sum(regions.values()) for name, regions in self._written.items()}
        missing = sorted(name for name, size in self._sizes.items() if written[name] != size)
        if missing:
            name = missing[0]
            raise WeightsError(
                f"policy version {version}: {len(missing)} of {len(self._sizes)} parameters of the engine were not "
                f"loaded whole, first {name} with {written[name]} of {self._sizes[name]} values; the published names "
                "must be those of a checkpoint of this model"
            )

    def _copy(self, name: str, target: Tensor, source: Tensor) -> None:
        is_alike = target.dtype == source.dtype and target.shape == source.shape
        is_flat = target.is_contiguous() and source.is_contiguous()
        on_cpu = target.device.type == source.device.type == "cpu"
        pieces = self._weights.pieces_at(source.data_ptr(), source.nbytes) if is_alike and is_flat and on_cpu else []
        if pieces:
            differs = torch.tensor(not self._weights.copy(pieces, _bytes_of(target)))
        else:
            _copy(target, source)
            # Compared as integers, in which not-a-number equals itself; the result is read once all is loaded.
            integers = _INTEGERS[target.element_size()]
            wanted = source.to(target).expand(target.shape).contiguous().view(integers)
            differs = (target.contiguous().view(integers) != wanted).any()
        self._wrong.setdefault(name, []).append(differs)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
