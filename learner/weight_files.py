"""Reads a model's weights from its files into a sharded model.

Each rank reads only its own rows of a parameter, in blocks.

transformers' conversions map stored tensors to parameters. If a conversion mixes the rows of a parameter, each rank
reads the whole parameter.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    dot_natural_key,
    rename_source_key,
)

from asyncrl.weights.manifest import DTYPES

from .fsdp import is_first_rank, local_tensor, own_part, stored_buffers
from .lora import is_adapter, plain_name

log = logging.getLogger(__name__)

BLOCK_BYTES = 32 << 20
"""Bytes of a parameter to read at a time."""

_OLD_NAMES = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Name patterns of buffers in older checkpoints. They cause no warning: current models compute these buffers."""


class StoredWeight(Protocol):
    """A tensor in a file of weights."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        ...

    def rows(self, first: int, last: int) -> Tensor:
        """Return the rows ``first`` to ``last`` - 1, read from the file. A scalar has one row."""
        ...


@dataclass(frozen=True, kw_only=True)
class _InSafetensors:
    """A tensor in a safetensors file. The file is not memory-mapped: mapped pages would be part of process memory."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def rows(self, first: int, last: int) -> Tensor:
        sizes = self.shape[1:]
        row = int(np.prod(sizes, dtype=np.int64))
        place = self.start + first * row * self.dtype.itemsize
        data = np.fromfile(self.path, np.uint8, (last - first) * row * self.dtype.itemsize, offset=place)
        tensor = torch.from_numpy(data).view(self.dtype)
        return tensor.view(last - first, *sizes) if self.shape else tensor.view(())


@dataclass(frozen=True, kw_only=True)
class _InPickle:
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def rows(self, first: int, last: int) -> Tensor:
        return self.tensor[first:last] if self.shape else self.tensor


def stored_weights(model_path: str) -> dict[str, StoredWeight]:
    """Return the tensors in the weight files of a folder in Hugging Face layout, by name.

    The dict is empty if the folder does not have weights.
    """
    for file in ("model.safetensors", "pytorch_model.bin"):
        single, index = Path(model_path, file), Path(model_path, f"{file}.index.json")
        files = [single] if single.is_file() else []
        if not files and index.is_file():
            files = [
                single.with_name(name) for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
            ]
        if files:
            read = _safetensors if file.endswith(".safetensors") else _pickled
            return {name: weight for path in files for name, weight in read(path).items()}
    return {}


def _safetensors(path: Path) -> dict[str, StoredWeight]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        head: dict[str, Any] = json.loads(file.read(size))
    head.pop("__metadata__", None)
    return {
        name: _InSafetensors(
            path=path,
            dtype=getattr(torch, DTYPES[tensor["dtype"]]),
            shape=tuple(tensor["shape"]),
            start=8 + size + tensor["data_offsets"][0],
        )
        for name, tensor in head.items()
    }


def _pickled(path: Path) -> dict[str, StoredWeight]:
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    return {name: _InPickle(tensor=tensor) for name, tensor in tensors.items()}


@dataclass(kw_only=True)
class _Source:
    """The stored tensors of one parameter, or of several parameters that are stored as one tensor.

    Attributes:
        conversion: transformers' conversion of the tensors to parameters; None if the parameter is stored unchanged.
        weights: The stored tensors by the conversion's name pattern; by the tensor's name if there is no conversion.
    """

    conversion: WeightConverter | None = None
    weights: dict[str, list[StoredWeight]] = field(default_factory=dict)

    @property
    def stacks(self) -> bool:
        """True if each row of the parameter is a stored tensor, such as the matrix of an expert."""
        first = self.conversion.operations[0] if self.conversion is not None else None
        return isinstance(first, MergeModulelist) and first.dim == 0

    @property
    def keeps_rows(self) -> bool:
        """True if each row of the parameter depends only on the same row of the stored tensors."""
        if self.conversion is None:
            return True
        rest = self.conversion.operations[self.stacks :]
        return len(self.conversion.target_patterns) == 1 and all(map(_is_within_rows, rest))

    def num_rows(self) -> int:
        """Return the number of rows of the parameter; -1 if the stored tensors have different numbers of rows."""
        counts = {len(weights) if self.stacks else (weights[0].shape or (1,))[0] for weights in self.weights.values()}
        return counts.pop() if len(counts) == 1 else -1

    def read(self, name: str, rows: slice | None, model: Any) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for pattern, weights in self.weights.items():
            chosen = weights[rows] if rows and self.stacks else weights
            own = rows if rows and not self.stacks else None
            parts[pattern] = [weight.rows(*_bounds(weight, own)) for weight in chosen]
        if self.conversion is None:
            ((tensor,),) = parts.values()
            return {name: tensor}
        conversion = copy.deepcopy(self.conversion)
        cast("Any", conversion.collected_tensors).update(parts)
        converted: Mapping[str, Any] = conversion.convert(name, model=model, config=model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}


def _bounds(weight: StoredWeight, rows: slice | None) -> tuple[int, int]:
    return (0, (weight.shape or (1,))[0]) if rows is None else (rows.start, rows.stop)


def _is_within_rows(operation: Any) -> bool:
    if isinstance(operation, Concatenate):
        return operation.dim > 0
    return isinstance(operation, Transpose) and not operation.check_dims and min(operation.dim0, operation.dim1) > 0


def fill_weights(model: PreTrainedModel, model_path: str) -> set[str]:
    """Read this rank's rows of the weights in a folder into a model, and compute the buffers that are not stored.

    The model is sharded or plain, and its parameters are allocated. Adapters do not change.

    Returns:
        The names of parameters that the files do not have. Their values are undefined.

    Raises:
        ValueError: there are no weights, their shapes differ from the model's, or tied weights are not equal.
    """
    held = {
        plain_name(name): tensor
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *stored_buffers(model).items())
        if not is_adapter(name)
    }
    stored = stored_weights(model_path)
    if not stored:
        raise ValueError(f"model path must hold weights (*.safetensors or *.bin), got {model_path!r} without weights")
    described, filled = SimpleNamespace(config=model.config, get_parameter=held.__getitem__), set[int]()
    for name, source in _sources(model, held, stored, model_path).items():
        try:
            if not source.keeps_rows:
                for target, values in source.read(name, None, described).items():
                    _check_shape(values.shape, held[target])
                    rows = own_part(held[target])[:1]
                    _put(held[target], rows[0].start if rows else 0, values[rows], filled)
                    filled.add(id(held[target]))
                continue
            _check_shape((source.num_rows(), *held[name].shape[1:]), held[name])
            for rows in _blocks(held[name]):
                (values,) = source.read(name, rows, described).values()
                _check_shape((*held[name].shape[:1], *values.shape[1:]), held[name])
                _put(held[name], rows.start, values, filled)
            filled.add(id(held[name]))
        except ValueError as error:
            raise ValueError(f"{model_path!r} does not fit its config.json at {name}: {error}") from error
    _compute_buffers(model)
    ignored = "|".join(model._keys_to_ignore_on_load_missing or ()) or "$^"
    return {name for name, tensor in held.items() if id(tensor) not in filled and not re.search(ignored, name)}


def _sources(
    model: PreTrainedModel, held: Mapping[str, Tensor], stored: Mapping[str, StoredWeight], model_path: str
) -> dict[str, _Source]:
    """Map each parameter's name to its stored tensors.

    Several parameters that are stored as one tensor have one entry, with the name of the first parameter. This function
    also stores the conversions in the model, because a later save of the model reverts the conversions.
    """
    conversions = get_model_conversion_mapping(model)
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    renamings: list[Any] = [entry for entry in conversions if not isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names: dict[str, Any] = dict(held)
    sources: dict[str, _Source] = {}
    unused: list[str] = []
    for key in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if target not in held and key in held:
            target, pattern = rename_source_key(key, [], [], model.base_model_prefix, names)
        if target not in held:
            unused.append(key)
            continue
        source = sources.setdefault(target, _Source(conversion=by_pattern[pattern] if pattern else None))
        source.weights.setdefault(pattern or key, []).append(stored[key])
    cast("Any", model)._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]
    known = "|".join((*(model._keys_to_ignore_on_load_unexpected or ()), *_OLD_NAMES))
    if (unknown := [key for key in unused if not re.search(known, key)]) and is_first_rank():
        log.warning("%s holds %d weights that the model does not use, such as %s", model_path, len(unknown), unknown[0])
    return sources


def _blocks(tensor: Tensor) -> Iterator[slice]:
    (rows, *_) = own_part(tensor) or (slice(0, 1),)
    step = max(1, BLOCK_BYTES * len(tensor) // max(1, tensor.nbytes)) if tensor.ndim else 1
    for start in range(rows.start, rows.stop, step):
        yield slice(start, min(rows.stop, start + step))


def _put(tensor: Tensor, first: int, values: Tensor, filled: set[int]) -> None:
    """Write ``values`` into this rank's shard, beginning at row ``first`` of the parameter.

    If the parameter is tied to another parameter that is already filled, compare the values instead.
    """
    place = local_tensor(tensor.detach())
    if tensor.ndim:
        rows, *others = own_part(tensor)
        place = place[first - rows.start : first - rows.start + len(values)]
        values = values[:, *others]
    if id(tensor) not in filled:
        place.copy_(values)
    elif not torch.equal(place, values.to(place)):
        raise ValueError(
            "the configuration ties this weight to another weight, and the files hold two different weights; set "
            "tie_word_embeddings=false in config.json"
        )


def _check_shape(found: Sequence[int], tensor: Tensor) -> None:
    if tuple(found) != tuple(tensor.shape) and tensor.ndim:
        raise ValueError(f"the files have the shape {list(found)}, expected {list(tensor.shape)}")


def _compute_buffers(model: PreTrainedModel) -> None:
    for tensor in (*model.parameters(), *stored_buffers(model).values()):
        vars(tensor)["_is_hf_initialized"] = True
    model.initialize_weights()
