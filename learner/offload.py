"""Which of the learner's tensors are on the device, and when they leave it for the host and come back.

A pool that trains and generates on the same devices takes turns: while engines generate, the learner's memory is
theirs. Tensors move in place, storage by storage, so that parameters, optimizer and FSDP keep pointing at them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from asyncrl.core import record
from asyncrl.core.record import SpanKind

from .config import LearnerConfig
from .fsdp import local_tensor
from .trainer import ModelOptimizer

log = logging.getLogger(__name__)

_ALIGNMENT = 512
"""Bytes at a multiple of which each copy begins in the slab."""


class MovableTensors:
    """Tensors whose device memory can be given up and taken back in place; ``tensors`` lists them anew for every move.

    A move that fails leaves everything where it was. The host copies lie in one slab, which is kept for the next move;
    on CUDA it is page-locked, and the copies of one move run at the same time, beside what the current stream computes.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._on_host: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._slab = torch.empty(0, dtype=torch.uint8)
        self.offloaded = False

    def device_bytes(self) -> int:
        """Bytes that the tensors hold on the device."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        """Copy the tensors to the host and free their device memory; nothing when they are there already."""
        if self.offloaded:
            return
        with record.span(SpanKind.offload, cause="to_host"):
            self._move_to_host()

    def _move_to_host(self) -> None:
        storages = self._storages()
        places = self._places(storages)
        with _copy_stream(storages):
            copies = [
                (storage, place.copy_(_bytes_of(storage), non_blocking=True))
                for storage, place in zip(storages, places, strict=True)
            ]
        for storage in storages:
            storage.resize_(0)
        self._on_host, self.offloaded = copies, True
        if any(storage.device.type == "cuda" for storage in storages):
            torch.cuda.empty_cache()  # what the allocator keeps is lost to the engines on the same device

    def load(self) -> None:
        """Take the device memory back and fill it; nothing when the tensors are on the device."""
        if not self.offloaded:
            return
        with record.span(SpanKind.offload, cause="to_device"):
            self._move_to_device()

    def _move_to_device(self) -> None:
        try:
            for storage, host in self._on_host:
                storage.resize_(host.numel())
        except BaseException:
            for storage, _ in self._on_host:
                storage.resize_(0)
            raise
        with _copy_stream([storage for storage, _ in self._on_host]):
            for storage, host in self._on_host:
                _bytes_of(storage).copy_(host, non_blocking=True)
        self._on_host, self.offloaded = [], False

    def _places(self, storages: Sequence[torch.UntypedStorage]) -> list[Tensor]:
        """Where in the slab each storage is copied to; a slab that is too small is replaced."""
        starts, total = [], 0
        for storage in storages:
            starts.append(total)
            total += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        if total > len(self._slab):
            runtime: Any = torch.cuda.cudart() if any(s.device.type == "cuda" for s in storages) else None
            if runtime is not None and len(self._slab):
                runtime.cudaHostUnregister(self._slab.data_ptr())
            self._slab = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._slab = torch.empty(total, dtype=torch.uint8)
            if runtime is not None:
                # Not pin_memory=True: torch's pinned allocator rounds up to a power of two.
                torch.cuda.check_error(int(runtime.cudaHostRegister(self._slab.data_ptr(), total, 0)))
        return [self._slab[start : start + s.nbytes()] for start, s in zip(starts, storages, strict=True)]

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each storage once, however many tensors view it."""
        storages = [tensor.untyped_storage() for tensor in self._tensors()]
        return list({storage._cdata: storage for storage in storages}.values())


class OffloadPolicy:
    """Decides when the model and the optimizer state are on the device, also when what used them failed.

    ``param_offload`` and ``optimizer_offload`` move them to the host after every use. ``offload_at_transition_only``
    leaves them on the device while training and moves both when the pool turns to rollout; with either of the others it
    is ignored, and a warning says so. What is on the host is loaded when it is needed. A frozen model has no optimizer.

    Attributes:
        metrics: Bytes on the device before and after the last turn to each mode, as ``rollout_device_bytes_before``,
            ``..._after``, ``trainer_device_bytes_before`` and ``..._after``.
    """

    def __init__(self, config: LearnerConfig, model: nn.Module, optimizer: ModelOptimizer | None) -> None:
        by_use, at_transition = (config.param_offload, config.optimizer_offload), config.offload_at_transition_only
        if at_transition and any(by_use):
            log.warning(
                "learner.offload_at_transition_only is ignored: param_offload=%s and optimizer_offload=%s offload "
                "after every use; switch them off to offload at the transition only",
                *by_use,
            )
            at_transition = False
        if config.offload_policy and (any(by_use) or at_transition):
            log.warning(
                "learner.param_offload=%s, optimizer_offload=%s and offload_at_transition_only=%s are ignored: "
                "offload_policy keeps everything on the host already; switch it off to move by use or by transition",
                *by_use,
                at_transition,
            )
            by_use, at_transition = (False, False), False
        (self._param_offload, self._optimizer_offload), self._at_transition = by_use, at_transition
        self._module, self._device = model, next(model.parameters()).device
        self._model = MovableTensors(lambda: _model_tensors(model))
        self._optimizer = MovableTensors(lambda: _optimizer_tensors(optimizer))
        self.metrics: dict[str, float] = {}
        self._leave(*by_use)

    @property
    def model_offloaded(self) -> bool:
        """Whether the model is on the host."""
        return self._model.offloaded

    @property
    def optimizer_offloaded(self) -> bool:
        """Whether the optimizer state is on the host."""
        return self._optimizer.offloaded

    def device_bytes(self) -> int:
        """Bytes on the device: on CUDA what torch has allocated there, elsewhere what model and optimizer hold."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self._model.device_bytes() + self._optimizer.device_bytes()

    def updating(self) -> AbstractContextManager[None]:
        """Both are on the device inside; each leaves afterwards if its own option says so."""
        return self._on_device(optimizer=True, then_leave=(self._param_offload, self._optimizer_offload))

    def reading(self) -> AbstractContextManager[None]:
        """The model is on the device inside, to score or to gather weights; it leaves under ``param_offload``."""
        return self._on_device(optimizer=False, then_leave=(self._param_offload, False))

    def persisting(self) -> AbstractContextManager[None]:
        """Both are on the device inside, and afterwards each is where it was before."""
        return self._on_device(optimizer=True, then_leave=(self.model_offloaded, self.optimizer_offloaded))

    def enter_rollout(self) -> None:
        """The weights are published and the pool turns to rollout."""
        before = self.device_bytes()
        if self._at_transition:
            self._leave(model=True, optimizer=True)
        self._note("rollout", before)

    def enter_training(self) -> None:
        """The pool turns back to training: what the transition moved away returns."""
        before = self.device_bytes()
        if self._at_transition:
            self._model.load()
            self._optimizer.load()
        self._note("trainer", before)

    def _note(self, mode: str, before: int) -> None:
        after = self.device_bytes()
        self.metrics |= {f"{mode}_device_bytes_before": float(before), f"{mode}_device_bytes_after": float(after)}

    @contextmanager
    def _on_device(self, *, optimizer: bool, then_leave: tuple[bool, bool]) -> Iterator[None]:
        """Inside, the model is on the device, and where asked the optimizer state; then each leaves where asked."""
        try:
            self._model.load()
            if optimizer:
                self._optimizer.load()
            yield
        finally:
            self._leave(*then_leave)

    def _leave(self, model: bool, optimizer: bool) -> None:
        if model:
            for module in self._module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward pass without a backward leaves the root unsharded
            self._model.offload()
        if optimizer:
            self._optimizer.offload()


def _model_tensors(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield local_tensor(parameter.detach())
        if parameter.grad is not None:
            yield local_tensor(parameter.grad)
    yield from model.buffers()


def _optimizer_tensors(optimizer: ModelOptimizer | None) -> Iterator[Tensor]:
    for state in {} if optimizer is None else optimizer.adamw.state.values():
        yield from (local_tensor(value) for value in state.values() if isinstance(value, Tensor))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[arg-type]


@contextmanager
def _copy_stream(storages: Sequence[torch.UntypedStorage]) -> Iterator[None]:
    """Copy on a stream of its own on CUDA, after what is under way there; on leaving, the copies are done."""
    device = next((storage.device for storage in storages if storage.device.type == "cuda"), None)
    if device is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
