"""Offloads the learner's tensors to the host and loads them back.

A learner that shares devices with engines frees its device memory while the engines generate. Tensors move in place,
storage by storage, so references to the tensors stay valid.
"""

from __future__ import annotations

import logging
import time
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

_FREED_WITHIN_S = 30.0
"""Longest wait, in seconds, until the GPU memory of a killed engine on the same device is free."""
_RETRY_S = 0.2
_ALIGNMENT = 512


class MovableTensors:
    """Tensors that can be moved to the host and back in place.

    ``tensors`` is a function that returns the tensors. Each move to the host calls this function. If a move fails, the
    tensors stay where they were.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._on_host: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.slab = torch.empty(0, dtype=torch.uint8)
        self.offloaded = False

    def device_bytes(self) -> int:
        """Return the number of bytes that the tensors take on the device; 0 while they are offloaded."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        """Copy the tensors to the host and free their device memory. If they are on the host already, do nothing."""
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
            torch.cuda.empty_cache()  # give torch's cached memory to the engines on the same device

    def load(self) -> None:
        """Allocate device memory and copy the tensors back. If they are on the device already, do nothing."""
        if not self.offloaded:
            return
        with record.span(SpanKind.offload, cause="to_device"):
            self._move_to_device()

    def _move_to_device(self) -> None:
        try:
            for storage, host in self._on_host:
                storage.resize_(host.numel())
            with _copy_stream([storage for storage, _ in self._on_host]):
                for storage, host in self._on_host:
                    _bytes_of(storage).copy_(host, non_blocking=True)
        except BaseException:
            for storage, _ in self._on_host:
                storage.resize_(0)
            raise
        self._on_host, self.offloaded = [], False

    def _places(self, storages: Sequence[torch.UntypedStorage]) -> list[Tensor]:
        starts, total = [], 0
        for storage in storages:
            starts.append(total)
            total += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        if total > len(self.slab):
            runtime: Any = torch.cuda.cudart() if any(s.device.type == "cuda" for s in storages) else None
            if runtime is not None and len(self.slab):
                runtime.cudaHostUnregister(self.slab.data_ptr())
            self.slab = torch.empty(0, dtype=torch.uint8)  # free the old host memory before more is allocated
            self.slab = torch.empty(total, dtype=torch.uint8)
            if runtime is not None:
                # Lock the memory's pages. With pin_memory=True, torch would round the size up to a power of two.
                torch.cuda.check_error(int(runtime.cudaHostRegister(self.slab.data_ptr(), total, 0)))
        return [self.slab[start : start + s.nbytes()] for start, s in zip(starts, storages, strict=True)]

    def _storages(self) -> list[torch.UntypedStorage]:
        storages = [tensor.untyped_storage() for tensor in self._tensors()]
        return list({storage._cdata: storage for storage in storages}.values())


class OffloadPolicy:
    """Decides when the model and the optimizer state are on the device.

    ``param_offload`` and ``optimizer_offload`` move the model and the optimizer state to the host after each use.
    ``offload_at_transition_only`` moves both when engines on the same GPUs start to generate. The first two options
    override the third with a warning. After each use, even if the use fails, FSDP's gathered parameters are freed.

    Attributes:
        metrics: Device memory in bytes, before and after a switch. ``rollout_device_bytes_before`` and
            ``rollout_device_bytes_after`` are from the latest switch to generation. ``trainer_device_bytes_before`` and
            ``trainer_device_bytes_after`` are from the latest switch to training.
    """

    def __init__(self, config: LearnerConfig, model: nn.Module, optimizer: ModelOptimizer | None) -> None:
        by_use, at_transition = (config.param_offload, config.optimizer_offload), config.offload_at_transition_only
        if at_transition and any(by_use):
            log.warning(
                "learner.offload_at_transition_only is ignored: param_offload=%s and optimizer_offload=%s offload "
                "after each use; switch them off to offload only at the transition",
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
        """True if the model is on the host."""
        return self._model.offloaded

    @property
    def optimizer_offloaded(self) -> bool:
        """True if the optimizer state is on the host."""
        return self._optimizer.offloaded

    def device_bytes(self) -> int:
        """Return the number of bytes that torch has allocated on a GPU; on the CPU, those of model and optimizer."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self._model.device_bytes() + self._optimizer.device_bytes()

    def updating(self) -> AbstractContextManager[None]:
        """Return a context in which model and optimizer state are on the device, for an optimizer update.

        On exit, the model moves to the host if ``param_offload`` is set. The optimizer state moves to the host if
        ``optimizer_offload`` is set.
        """
        return self._on_device(optimizer=True, then_leave=(self._param_offload, self._optimizer_offload))

    def reading(self) -> AbstractContextManager[None]:
        """Return a context in which the model is on the device.

        On exit, the model moves to the host if ``param_offload`` is set.
        """
        return self._on_device(optimizer=False, then_leave=(self._param_offload, False))

    def persisting(self, *, optimizer: bool = True) -> AbstractContextManager[None]:
        """Return a context in which the model is on the device, and with ``optimizer`` also the optimizer state.

        On exit, the tensors that were on the host before the context move to the host again.
        """
        return self._on_device(optimizer=optimizer, then_leave=(self.model_offloaded, self.optimizer_offloaded))

    def enter_rollout(self) -> None:
        """Free device memory for engines that generate on the same device. The weights must already be published.

        With ``offload_at_transition_only``, model and optimizer state move to the host.
        """
        before = self.device_bytes()
        if self._at_transition:
            self._leave(model=True, optimizer=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # give torch's cached memory to the engines on the same device
        self._note("rollout", before)

    def enter_training(self) -> None:
        """Load the tensors that `enter_rollout` has moved to the host. Wait up to 30 s for device memory."""
        before = self.device_bytes()
        if self._at_transition:
            _when_freed(self._model.load)
            _when_freed(self._optimizer.load)
        self._note("trainer", before)

    def _note(self, mode: str, before: int) -> None:
        after = self.device_bytes()
        self.metrics |= {f"{mode}_device_bytes_before": float(before), f"{mode}_device_bytes_after": float(after)}

    @contextmanager
    def _on_device(self, *, optimizer: bool, then_leave: tuple[bool, bool]) -> Iterator[None]:
        try:
            self._model.load()
            if optimizer:
                self._optimizer.load()
            yield
        finally:
            self._leave(*then_leave)

    def _leave(self, model: bool, optimizer: bool) -> None:
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP leaves the root module unsharded after a forward pass without a backward pass
        if model:
            self._model.offload()
        if optimizer:
            self._optimizer.offload()


def _when_freed(load: Callable[[], None]) -> None:
    """Call ``load``. If device memory is full, retry for up to 30 s, until a killed engine has freed its memory."""
    began_s = time.monotonic()
    while True:
        try:
            return load()
        except torch.OutOfMemoryError as error:
            if time.monotonic() - began_s > _FREED_WITHIN_S:
                raise
            log.warning("the device is not free yet: %s", error)
            time.sleep(_RETRY_S)


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
    """Run the copies inside the context on a separate CUDA stream, and wait for them on exit. On the CPU, do nothing.

    The copies begin after the work that is already queued on the current stream.
    """
    device = next((storage.device for storage in storages if storage.device.type == "cuda"), None)
    if device is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()
