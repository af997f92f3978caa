"""Which of the learner's tensors are on the device, and when they leave it for the host and come back.

A pool that trains and generates on the same devices takes turns: while engines generate, the learner's memory is
theirs. Tensors move in place, storage by storage, so that parameters, optimizer and FSDP keep pointing at them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .config import LearnerConfig
from .fsdp import local_tensor
from .optimizer import PolicyOptimizer

log = logging.getLogger(__name__)


class MovableTensors:
    """Tensors whose device memory can be given up and taken back in place.

    Args:
        tensors: Lists the tensors as they are now; called anew for every move.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._on_host: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.offloaded = False

    def device_bytes(self) -> int:
        """Bytes that the tensors hold on the device."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        """Copy the tensors to the host and free their device memory; nothing when they are there already."""
        if self.offloaded:
            return
        for storage in self._storages():
            on_device = _bytes_of(storage)
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_device.is_cuda)
            host.copy_(on_device, non_blocking=True)
            self._on_host.append((storage, host))
        _wait_for_copies()
        for storage, _ in self._on_host:
            storage.resize_(0)
        self.offloaded = True

    def load(self) -> None:
        """Take the device memory back and fill it; nothing when the tensors are on the device."""
        if not self.offloaded:
            return
        for storage, host in self._on_host:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        _wait_for_copies()
        self._on_host.clear()
        self.offloaded = False

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each storage once, however many tensors view it."""
        storages = [tensor.untyped_storage() for tensor in self._tensors()]
        return list({storage._cdata: storage for storage in storages}.values())


class Residence:
    """Decides when the model and the optimizer state are on the device.

    ``param_offload`` and ``optimizer_offload`` move them to the host after every use. ``offload_at_transition_only``
    leaves them on the device while training and moves both when the pool turns to rollout; with either of the others
    it is ignored, and a warning says so. What is on the host is loaded when it is needed.

    Args:
        config: Holds the three options.
        models: The policy, and whatever else lives and leaves with it.
        optimizer: The policy's.
    """

    def __init__(self, config: LearnerConfig, models: Sequence[nn.Module], optimizer: PolicyOptimizer) -> None:
        self._param_offload = config.param_offload
        self._optimizer_offload = config.optimizer_offload
        self._at_transition = config.offload_at_transition_only
        if self._at_transition and (self._param_offload or self._optimizer_offload):
            log.warning(
                "learner.offload_at_transition_only is ignored: param_offload=%s and optimizer_offload=%s offload "
                "after every use; switch them off to offload at the transition only",
                self._param_offload,
                self._optimizer_offload,
            )
            self._at_transition = False
        self._models = models
        self._model = MovableTensors(lambda: (t for model in models for t in _model_tensors(model)))
        self._optimizer = MovableTensors(lambda: _optimizer_tensors(optimizer))
        self.metrics: dict[str, float] = {}
        self._leave_after_use()

    @property
    def model_offloaded(self) -> bool:
        """Whether the model is on the host."""
        return self._model.offloaded

    @property
    def optimizer_offloaded(self) -> bool:
        """Whether the optimizer state is on the host."""
        return self._optimizer.offloaded

    def device_bytes(self) -> int:
        """Bytes that model and optimizer state hold on the device."""
        return self._model.device_bytes() + self._optimizer.device_bytes()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Both are on the device inside; each leaves afterwards if its own option says so."""
        self._model.load()
        self._optimizer.load()
        yield
        self._leave_after_use()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The model is on the device inside, to score or to gather weights; it leaves under ``param_offload``."""
        self._model.load()
        yield
        if self._param_offload:
            self._offload_model()

    @contextmanager
    def persisting(self) -> Iterator[None]:
        """Both are on the device inside, and afterwards each is where it was before."""
        model_was, optimizer_was = self._model.offloaded, self._optimizer.offloaded
        self._model.load()
        self._optimizer.load()
        yield
        if model_was:
            self._offload_model()
        if optimizer_was:
            self._optimizer.offload()

    def enter_rollout(self) -> None:
        """The weights are published and the pool turns to rollout."""
        before = self.device_bytes()
        if self._at_transition:
            self._offload_model()
            self._optimizer.offload()
        self.metrics = {
            "rollout_device_bytes_before": float(before),
            "rollout_device_bytes_after": float(self.device_bytes()),
        }

    def enter_training(self) -> None:
        """The pool turns back to training: what the transition moved away returns."""
        if self._at_transition:
            self._model.load()
            self._optimizer.load()

    def _leave_after_use(self) -> None:
        if self._param_offload:
            self._offload_model()
        if self._optimizer_offload:
            self._optimizer.offload()

    def _offload_model(self) -> None:
        for model in self._models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward pass without a backward leaves the root unsharded
        self._model.offload()


def _model_tensors(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield local_tensor(parameter.detach())
        if parameter.grad is not None:
            yield local_tensor(parameter.grad)
    yield from model.buffers()


def _optimizer_tensors(optimizer: PolicyOptimizer) -> Iterator[Tensor]:
    for state in optimizer.adamw.state.values():
        yield from (local_tensor(value) for value in state.values() if isinstance(value, Tensor))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[arg-type]


def _wait_for_copies() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
