"""Loads the experts of a mixture-of-experts model with a few large copies instead of many small copies.

A checkpoint has one tensor per expert and projection. An engine has all experts of a layer in one parameter. The first
load calls the model's ``load_weights`` (the model's loader), and `LoadObserver` records every copy. In later loads
`FusedCopies` repeats these copies to the same addresses. `FusedCopies` joins copies into one large copy if the
addresses of the copies are equally far apart. This saves thousands of calls.

The tensors of a parameter are the checkpoint's tensors that the loader copied into the parameter. `FusedCopies` loads a
parameter only if all of these conditions hold. Otherwise the model's loader loads the parameter every time.

- The loader only copied the parameter's tensors, without conversion.
- The loader wrote each element of the parameter exactly once: a value of a tensor, or a constant as padding.
- The loader did nothing else with the parameter.
- These conditions also hold for every other parameter that received a part of the same tensors.
- The parameter is float32, bfloat16 or float16, because loaders of quantized parameters keep other state.
- The parameter is contiguous, and its copies write at most `MAX_RANGES` contiguous ranges.
- Address, shape, strides and type of all parameters, and the arrangement of the experts, have not changed.
- The parameter has at least `MIN_TENSORS` tensors. If there are fewer tensors, a loader may also compute other
  values from these tensors.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

MIN_TENSORS = 4
"""A parameter is loaded with joined copies only if it consists of at least this number of the checkpoint's tensors."""
MAX_RANGES = 1 << 22
"""A parameter whose copies write more contiguous ranges than this is not loaded with joined copies.

The ranges are checked for overlap. With more ranges, this check would take too long.
"""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Block:
    """A block: one copy from a view of a tensor to a view of a parameter. Both views have the same shape.

    Offsets and strides are in values, not in bytes.

    A block can also describe that a constant was written into the parameter. A constant has no source. ``source`` and
    ``source_strides`` then equal ``start`` and ``strides``, so that `joined` compares only the targets.

    Attributes:
        source: Offset of the source from the first value of the tensor. In the blocks that `FusedCopies.take` makes,
            ``source`` counts from the first value of the tensor's storage.
        start: Offset of the target in the parameter's storage.
    """

    shape: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _TensorCopies:
    """The shape and dtype of a published tensor, and the copies of the tensor into parameters.

    Each entry of ``copies`` is a pair: the name of the parameter, and the block that describes the copy.
    """

    shape: torch.Size
    dtype: torch.dtype
    copies: tuple[tuple[str, _Block], ...]


class FusedCopies:
    """The copies that a model's loader made in a recorded load. `take` repeats them in a later load.

    Args:
        parameters: The model's parameters by name.
        tensors: The copies of each tensor, by the tensor's name in a checkpoint; may be empty.
        constants: The loader's writes of constants, as tuples: name of the parameter, value, written blocks.
        arrangement: Text that says which experts this rank holds, and at which positions. The loader writes to these
            positions. None if the positions are unknown.
    """

    def __init__(
        self,
        parameters: Parameters,
        tensors: Mapping[str, _TensorCopies],
        constants: Sequence[tuple[str, float, Sequence[_Block]]],
        arrangement: str | None,
    ) -> None:
        self._places, self._tensors, self._arrangement = _places_of(parameters), tensors, arrangement
        self._constants = [
            (name, value, joined(sorted(blocks, key=lambda block: block.start))) for name, value, blocks in constants
        ]

    def __len__(self) -> int:
        return len(self._tensors)

    def fit(self, parameters: Parameters, arrangement: str | None) -> bool:
        """Return whether the recorded copies are valid for ``parameters`` and this ``arrangement`` of the experts.

        The copies are valid if the address, shape, strides and type of each parameter, and the arrangement of the
        experts, are the same as during the recording. They are not valid if ``arrangement`` is None.
        """
        is_known = arrangement is not None and arrangement == self._arrangement
        return is_known and _places_of(parameters) == self._places

    def take(self, tensors: Iterator[tuple[str, Tensor]], parameters: Parameters) -> Iterator[tuple[str, Tensor]]:
        """Copy each tensor that has recorded copies into the model's parameters. Yield all other tensors.

        Takes and yields (name, tensor) pairs. The model's loader must load the yielded tensors. A tensor with recorded
        copies is also yielded if its shape or dtype has changed, or if it is not contiguous. Successive tensors that
        share memory are copied together. After the last tensor, this method writes the constants that the model's
        loader wrote in the recorded load.
        """
        together: list[tuple[Tensor, _TensorCopies]] = []
        for name, tensor in tensors:
            known = self._tensors.get(name)
            if known is None or (known.shape, known.dtype) != (tensor.shape, tensor.dtype) or not _is_flat(tensor):
                yield name, tensor
                continue
            if together and _storage(together[0][0]) != _storage(tensor):
                _copy_joined(together, parameters)
                together = []
            together.append((tensor, known))
        _copy_joined(together, parameters)
        for name, value, blocks in self._constants:
            for block in blocks:
                parameters[name].detach().as_strided(block.shape, block.strides, block.start).fill_(value)


def _copy_joined(tensors: list[tuple[Tensor, _TensorCopies]], parameters: Parameters) -> None:
    blocks: dict[tuple[str, torch.dtype], list[_Block]] = {}
    for tensor, known in tensors:
        first = int(tensor.storage_offset())
        for name, block in known.copies:
            moved = _Block(block.shape, first + block.source, block.source_strides, block.start, block.strides)
            blocks.setdefault((name, tensor.dtype), []).append(moved)
    sources = {tensor.dtype: tensor for tensor, _ in tensors}
    for (name, dtype), own in blocks.items():
        target = parameters[name].detach()
        for block in joined(sorted(own, key=lambda block: block.start)):
            source = sources[dtype].as_strided(block.shape, block.source_strides, block.source)
            target.as_strided(block.shape, block.strides, block.start).copy_(source)


def joined(blocks: list[_Block]) -> list[_Block]:
    """Join successive copies (blocks) into larger copies.

    Copies are joined if all of these conditions hold:

    - The copies have equal shapes and strides.
    - Their targets are equally far apart.
    - Their sources are equally far apart, in ascending order.

    Returns the joined blocks and the remaining blocks. No two successive blocks of the result can be joined.

    Args:
        blocks: Blocks of one parameter, sorted by ``start``, without overlap.
    """
    while True:
        runs: list[list[_Block]] = []
        for block in blocks:
            run = runs[-1] if runs else []
            if run and _continues(run, block):
                run.append(block)
            else:
                runs.append([block])
        if len(runs) == len(blocks):
            return blocks
        blocks = [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _continues(run: list[_Block], block: _Block) -> bool:
    last = run[-1]
    if (block.shape, block.source_strides, block.strides) != (last.shape, last.source_strides, last.strides):
        return False
    step, source_step = block.start - last.start, block.source - last.source
    if len(run) == 1:
        return source_step > 0  # `as_strided` does not accept a negative stride
    return (step, source_step) == (last.start - run[-2].start, last.source - run[-2].source)


def _as_one(run: list[_Block]) -> _Block:
    first, second = run[:2]
    return _Block(
        (len(run), *first.shape),
        first.source,
        (second.source - first.source, *first.source_strides),
        first.start,
        (second.start - first.start, *first.strides),
    )


class LoadObserver:
    """Records the copies that a model's loader makes during one load.

    Args:
        parameters: The model's parameters by name.
        arrangement: Text that says which experts this rank holds, and at which positions. The loader writes to these
            positions. None if the positions are unknown; `copies` then returns no copies.
    """

    def __init__(self, parameters: Parameters, arrangement: str | None = "") -> None:
        self._parameters, self._places, self._arrangement = parameters, _places_of(parameters), arrangement
        self._names = {_storage(parameter): name for name, parameter in parameters.items()}
        self._known: dict[str, _TensorCopies] = {}
        # `_published` maps the address of a storage to a pair: a weak reference to the storage, and a list of tuples.
        # Each tuple describes a published tensor: first byte in the storage, end in the storage, tensor's name.
        # While the weak reference to a storage exists, no other storage gets the address of this storage.
        self._published: dict[int, tuple[StorageWeakRef, list[tuple[int, int, str]]]] = {}
        # `_writes` maps the name of a parameter to the blocks that the loader has written into the parameter.
        # Each block has a source: the name of a published tensor, or a constant.
        self._writes: dict[str, list[tuple[_Block, str | float]]] = {}
        # `_excluded` has the names of tensors and parameters that the model's loader must load. `copies` omits them.
        self._excluded: set[str] = set()

    def seen(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each (name, tensor) to the model's loader unchanged, and remember where the tensor's bytes are."""
        for name, tensor in tensors:
            if name in self._known:
                self._excluded.add(name)
            elif tensor.numel() and _is_flat(tensor):
                first = int(tensor.storage_offset()) * tensor.element_size()
                own = self._published.setdefault(_storage(tensor), (StorageWeakRef(tensor.untyped_storage()), []))
                insort(own[1], (first, first + tensor.nbytes, name))
                self._known[name] = _TensorCopies(tensor.shape, tensor.dtype, ())
            yield name, tensor

    def wrote(self, name: str, target: Tensor, source: Tensor | float) -> None:
        """Record that the loader has written a tensor or a constant into a parameter.

        ``name`` is the parameter's name. ``target`` is the written view of the parameter. ``source`` is the tensor or
        constant.
        """
        if not target.numel():
            return
        shape, start, strides = tuple(target.shape), int(target.storage_offset()), tuple(target.stride())
        if not isinstance(source, Tensor):
            self._writes.setdefault(name, []).append((_Block(shape, start, strides, start, strides), source))
            return
        found = self._tensor_of(source)
        if found is None or not source.dtype == target.dtype == self._known[found[0]].dtype or source.shape != shape:
            self.computed((target, source))
            return
        at = int(source.storage_offset()) - found[1] // source.element_size()
        block = _Block(shape, at, tuple(source.stride()), start, strides)
        self._writes.setdefault(name, []).append((block, found[0]))

    def computed(self, arguments: Any) -> None:
        """Record an operation of the loader that is neither a view nor a write, such as an addition.

        ``arguments`` are the arguments of the operation, possibly nested. The loader does more than copy the parameters
        and published tensors in ``arguments``. So the result of the method `copies` does not include these tensors.
        """
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, Tensor):
                if (parameter := self._names.get(_storage(leaf))) is not None:
                    self._excluded.add(parameter)
                if (found := self._tensor_of(leaf)) is not None:
                    self._excluded.add(found[0])

    def copies(self) -> FusedCopies:
        """Return the recorded copies, which a later load can repeat. Call this after a successful load.

        Only copies into parameters that meet all conditions of the module's docstring are included.
        """
        sources = {
            name: {tensor for _, tensor in writes if isinstance(tensor, str)} for name, writes in self._writes.items()
        }
        whole = {
            name
            for name, own in sources.items()
            if name not in self._excluded
            and len(own) >= MIN_TENSORS
            and not own & self._excluded
            and self._is_written_once(name)
        }
        if self._arrangement is None or _places_of(self._parameters) != self._places:
            whole.clear()
        while True:
            others: set[str] = set().union(*(own for name, own in sources.items() if name not in whole))
            if not (broken := {name for name in whole if sources[name] & others}):
                break
            whole -= broken
        copies: dict[str, list[tuple[str, _Block]]] = {}
        constants: dict[tuple[str, float], list[_Block]] = {}
        for name in sorted(whole):
            for block, source in self._writes[name]:
                if isinstance(source, str):
                    copies.setdefault(source, []).append((name, block))
                else:
                    constants.setdefault((name, source), []).append(block)
        return FusedCopies(
            self._parameters,
            {
                tensor: _TensorCopies(self._known[tensor].shape, self._known[tensor].dtype, tuple(own))
                for tensor, own in copies.items()
            },
            [(name, value, blocks) for (name, value), blocks in constants.items()],
            self._arrangement,
        )

    def _is_written_once(self, name: str) -> bool:
        """Return whether the writes into a parameter cover the whole parameter, without overlap.

        Also returns False if the parameter is not contiguous, if its dtype is not in `_DTYPES`, or if the writes have
        more than `MAX_RANGES` contiguous ranges.
        """
        parameter = self._parameters[name]
        if not parameter.is_contiguous() or parameter.dtype not in _DTYPES:
            return False
        ranges = [_ranges_of(block) for block, _ in self._writes[name]]
        if sum(len(starts) for starts, _ in ranges) > MAX_RANGES:
            return False
        starts = np.concatenate([starts for starts, _ in ranges])
        order = np.argsort(starts)
        starts = starts[order]
        ends = starts + np.concatenate([np.full(len(starts), length) for starts, length in ranges])[order]
        first = int(parameter.storage_offset())
        is_adjacent = bool((starts[1:] == ends[:-1]).all())
        return is_adjacent and int(starts[0]) == first and int(ends[-1]) == first + parameter.numel()

    def _tensor_of(self, view: Tensor) -> tuple[str, int] | None:
        """Find the published tensor that contains a view.

        Returns a pair: the tensor's name, and the position of the tensor's first byte in the storage. Returns None if
        no published tensor contains the view, or if the view is empty.
        """
        published = self._published.get(_storage(view))
        if published is None or not view.numel():
            return None
        size = view.element_size()
        begin = int(view.storage_offset()) * size
        last = sum((length - 1) * stride for length, stride in zip(view.shape, view.stride(), strict=True))
        index = bisect_right(published[1], begin, key=lambda entry: entry[0]) - 1
        if index < 0 or begin + (last + 1) * size > published[1][index][1]:
            return None
        return published[1][index][2], published[1][index][0]


def _ranges_of(block: _Block) -> tuple[np.ndarray, int]:
    """Return the contiguous ranges of a parameter that a block (a copy into the parameter) writes.

    Returns a pair: the start of each range, and the common length of the ranges. Both are in values, and a start counts
    from the beginning of the parameter's storage.
    """
    length, num_inner = 1, 0
    for size, stride in zip(reversed(block.shape), reversed(block.strides), strict=True):
        if size != 1 and stride != length:
            break
        length, num_inner = length * size, num_inner + 1
    starts = np.asarray([block.start], dtype=np.int64)
    for size, stride in list(zip(block.shape, block.strides, strict=True))[: len(block.shape) - num_inner]:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts, length


def _places_of(parameters: Parameters) -> dict[str, tuple[Any, ...]]:
    return {
        name: (p.data_ptr(), p.storage_offset(), tuple(p.shape), p.stride(), p.dtype, p.device)
        for name, p in parameters.items()
    }


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_flat(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.layout == torch.strided
