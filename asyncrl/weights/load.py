"""Loads offered weights into a model, and verifies that every parameter then holds the published values.

The arrived bytes are compared with the published digests. The model's ``load_weights`` copies the bytes into
parameters, and each written value is compared with its source. A parameter that was not completely written is an error.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import Buffer

from asyncrl.core.errors import WeightsError
from asyncrl.core.types import Carrier, WeightOffer
from asyncrl.weights.assembly import BUCKET_BYTES, BucketCopies, DeviceDigests, shaped
from asyncrl.weights.carriers import load_limit_s
from asyncrl.weights.fused_copies import FusedCopies, LoadObserver
from asyncrl.weights.manifest import (
    CACHED_BYTES,
    DigestThreads,
    Manifest,
    Piece,
    StoredTensor,
    device_digest_of,
    map_file,
    read_manifest,
)
from asyncrl.weights.rounds import MAX_ROUNDS
from asyncrl.weights.stream import NUM_AHEAD, ArrivingWeights, RoundFailed

T = TypeVar("T")
COPY_THREADS = min(8, os.cpu_count() or 1)
"""Number of threads that copy to page-locked memory for a GPU. One thread copies 5-10 GB/s."""
LOAD_TIMEOUT_S = 120.0
"""Default deadline of a load, in seconds."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_fused: WeakKeyDictionary[nn.Module, FusedCopies] = WeakKeyDictionary()
"""By model: the copies that were recorded in the latest load by the model's own loader."""
_copy, _fill, _zero = torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default


class WeightSource(Protocol):
    """The interface of an object that delivers and verifies the tensors of one policy version."""

    manifest: Manifest

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) once for each tensor. A tensor does not change while it is referenced."""
        ...

    @property
    def copier(self) -> FileWeights | None:
        """The object that copies and verifies bytes of files; None if the tensors are not views of files."""
        ...

    def verify(self) -> None:
        """Check that every byte has arrived and equals the published byte. Raises `WeightsError` if not."""
        ...

    def close(self) -> None:
        """End the use of the version. If a network transfer still runs, this process leaves the transfer."""
        ...


def load_verified(
    model: nn.Module, offer: WeightOffer, *, timeout_s: float = LOAD_TIMEOUT_S, arrangement: str | None = ""
) -> int:
    """Load an offered version through the model's ``load_weights``. Returns the number of verified values.

    Args:
        model: A model with a ``load_weights`` as in SGLang.
        offer: The version's offer. The version's files are on this host, or the version arrives in a stream.
        timeout_s: Time limit of a stream, in seconds; one second per 100 MB is added.
        arrangement: Text that says which experts this rank holds, and at which positions. ``load_weights`` writes to
            these positions. None if the positions are unknown.

    Raises:
        WeightsError: the bytes differ from the published bytes, or a parameter holds other values after the load.
        WeightsGone: the learner ranks no longer hold the version.
        FileNotFoundError: a newer version has replaced the files.
        DeadlineError: a stream did not arrive in time.
    """
    adapter = PublishedAdapter(offer) if offer.kind == "adapter" else None
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device

    def load_all(weights: WeightSource) -> int:
        tensors = weights.tensors()
        if adapter is not None:
            tensors = adapter.merged(tensors, device)
        fused, observer = _fused.pop(model, None), None  # if this load fails, the next load records the copies again
        if fused is not None and fused.fit(parameters, arrangement):
            tensors = fused.take(tensors, parameters)
        else:
            observer = LoadObserver(parameters, arrangement)
            tensors = observer.seen(tensors)
        with ComparedWrites(parameters, weights, observer) as writes:
            model.load_weights(tensors)  # type: ignore[operator]
        writes.check(offer.version)
        if observer is not None:
            fused = observer.copies()
        _fused[model] = cast("FusedCopies", fused)
        return writes.num_values

    return load_from(offer if adapter is None else adapter.base, device, load_all, timeout_s=timeout_s)


def num_fused(model: nn.Module) -> int:
    """Return how many tensors the next load of a model copies directly, without the model's loader."""
    fused = _fused.get(model)
    return 0 if fused is None else len(fused)


def load_from(
    offer: WeightOffer, device: torch.device, load_all: Callable[[WeightSource], T], *, timeout_s: float
) -> T:
    """Call ``load_all`` with the source of an offered version's tensors, and return the result of ``load_all``.

    If a round of a stream (one transfer over the network) fails, the next round begins, and this function calls
    ``load_all`` again. ``timeout_s`` is the time limit of all rounds, in seconds; one second per 100 MB is added.

    Raises:
        WeightsError: `MAX_ROUNDS` rounds failed. Other errors of ``load_all`` and `open_weights` are raised unchanged.
    """
    ends_s = time.monotonic() + load_limit_s(timeout_s, offer.num_bytes)
    errors: list[str] = []
    while True:
        try:
            with closing(open_weights(offer, device, timeout_s=ends_s - time.monotonic())) as weights:
                return load_all(weights)
        except RoundFailed as error:
            errors.append(str(error))
            if len(errors) == MAX_ROUNDS:
                raise WeightsError(f"{offer.name} was not received in {MAX_ROUNDS} rounds: {errors}") from None


def open_weights(offer: WeightOffer, device: torch.device, *, timeout_s: float) -> WeightSource:
    """Open an offered version, and return an object that yields the version's tensors from files or a stream.

    ``timeout_s`` is the time limit of a stream, in seconds.

    Raises:
        RoundFailed: a round of a stream failed.
        WeightsGone: the learner ranks no longer hold the version.
        DeadlineError: a stream did not begin in time.
        FileNotFoundError: a newer version has replaced the files.
        WeightsError: the manifest differs from the offered one, or the version is a delta in files.
    """
    if offer.carrier == Carrier.engine_stream:  # use `==`, because `carrier` is a plain string in an engine server
        return ArrivingWeights(offer, device, timeout_s=timeout_s)
    return FileWeights(offer, None if device.type == "cpu" else device)


class FileWeights:
    """Delivers the tensors of an offered version from memory-mapped files.

    If the version is an adapter, the frozen weights of the base model are not delivered.

    If ``device`` is None, the tensors are views of the files, and `copy` and `verify` check the bytes of the files.
    Otherwise the tensors are copies on the device. `verify` checks the copies by digests that the device computes.

    Args:
        offer: The offer of a full version or an adapter.
        device: Device to which the tensors are copied; None for views of the files.

    Raises:
        FileNotFoundError: a newer version has replaced the files.
        WeightsError: the manifest does not have the offered digest, or the offer is of a delta.
    """

    def __init__(self, offer: WeightOffer, device: torch.device | None = None) -> None:
        if offer.kind == "delta":
            raise WeightsError(
                f"policy version {offer.version} is a delta to version {offer.base_version}; apply the delta with a "
                "WeightStager before the load"
            )
        self.manifest = read_manifest(offer)
        self._name = offer.name
        self._maps = [map_file(Path(self.manifest.directory, name)) for name in self.manifest.files]
        with warnings.catch_warnings():  # torch warns of read-only memory; this class does not write to it
            warnings.simplefilter("ignore", UserWarning)
            self._files = [torch.from_numpy(data) for data in self._maps]
        self._pieces = {(piece.file, piece.start): piece for piece in self.manifest.pieces}
        self._verified: set[Piece] = set()
        self._threads = DigestThreads() if device is None else DigestThreads(COPY_THREADS)
        self._device = device
        self._digested: list[tuple[Piece, Tensor]] = []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each tensor. Raises `WeightsError` for an unknown dtype."""
        if self._device is not None:
            yield from self._copies(self._device)
            return
        for stored in self.manifest.tensors:
            yield stored.name, shaped(stored, self._files[stored.file][stored.start : stored.start + stored.num_bytes])

    def _copies(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Copy groups of tensors to the device in a thread, up to `NUM_AHEAD` groups ahead of the model's loader."""
        copies, digests = BucketCopies(self._threads, device), DeviceDigests(device)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        pending: deque[Future[list[tuple[str, Tensor]]]] = deque()
        with DigestThreads(1) as thread:
            for span in self._spans():
                pending.append(thread.submit(self.copy_to_device, span, copies, digests, stream))
                if len(pending) > NUM_AHEAD:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()

    def _spans(self) -> Iterator[list[StoredTensor]]:
        """Yield groups of adjacent tensors, so that one copy moves many small experts.

        A group has at most `BUCKET_BYTES`. A larger tensor forms a separate group.
        """
        span: list[StoredTensor] = []
        for stored in self.manifest.tensors:
            if span:
                end = span[-1].start + span[-1].num_bytes
                is_adjacent = (stored.file, stored.start) == (span[0].file, end)
                if not is_adjacent or end + stored.num_bytes - span[0].start > BUCKET_BYTES:
                    yield span
                    span = []
            span.append(stored)
        if span:
            yield span

    def copy_to_device(
        self,
        span: Sequence[StoredTensor],
        copies: BucketCopies,
        digests: DeviceDigests,
        stream: torch.cuda.Stream | None,
    ) -> list[tuple[str, Tensor]]:
        """Copy adjacent tensors of a file to the device, and begin to compute the digests of the copy.

        ``stream`` is the CUDA stream of the copy. Returns (name, copy) of each tensor.
        """
        first, end = span[0].start, span[-1].start + span[-1].num_bytes
        with torch.cuda.stream(stream):
            data = copies.copied(self._maps[span[0].file][first:end])
            pieces = self._pieces_in(span[0].file, first, end - first)
            self._digested += zip(pieces, digests.of(data, [piece.num_bytes for piece in pieces]), strict=True)
            return [(s.name, shaped(s, data[s.start - first : s.start - first + s.num_bytes])) for s in span]

    @property
    def copier(self) -> FileWeights | None:
        """Return this object if the tensors are views of the mapped files, and None if they are copies on a device."""
        return self if self._device is None else None

    def pieces_at(self, address: int, num_bytes: int) -> list[Piece]:
        """Return the pieces (digested parts of a file) that lie at a memory address in a mapped file.

        The list is empty if the ``num_bytes`` bytes are in no mapped file, or are not whole pieces.
        """
        for index, data in enumerate(self._maps):
            start = address - data.ctypes.data
            if 0 <= start <= len(data) - num_bytes:
                return self._pieces_in(index, start, num_bytes)
        return []

    def _pieces_in(self, file: int, start: int, num_bytes: int) -> list[Piece]:
        found, at = [], start
        while at < start + num_bytes and (piece := self._pieces.get((file, at))) is not None:
            found.append(piece)
            at += piece.num_bytes
        return found if at == start + num_bytes else []

    def copy(self, pieces: Sequence[Piece], target: np.ndarray) -> bool:
        """Copy adjacent pieces to ``target``, [bytes] uint8. Returns whether ``target`` then holds the published bytes.

        If True, the pieces count as verified, and `verify` does not read these pieces again.
        """
        ends = list(accumulate(piece.num_bytes for piece in pieces))
        places = [target[end - piece.num_bytes : end] for piece, end in zip(pieces, ends, strict=True)]
        copied = map(self._copy, pieces, places) if len(pieces) == 1 else self._threads.map(self._copy, pieces, places)
        is_right = all(list(copied))
        if is_right:
            self._verified.update(pieces)
        return is_right

    def verify(self) -> None:
        """Verify the copies on the device, and all bytes of the files that are not yet verified.

        Raises:
            WeightsError: bytes differ from the published bytes. The message names the first tensor that differs.
        """
        arrived = torch.stack([digest for _, digest in self._digested]).tolist() if self._digested else []
        wrong: list[Piece] = []
        for (piece, _), digest in zip(self._digested, arrived, strict=True):
            published = piece.device_digest
            if digest != (device_digest_of(self._bytes_of(piece)) if published is None else published):
                wrong.append(piece)
            elif published is not None:
                self._verified.add(piece)
        left = [piece for piece in self.manifest.pieces if piece not in self._verified]
        if wrong := wrong + self._threads.wrong(left, self._bytes_of):
            names = sorted({self.manifest.tensor_at(piece).name for piece in wrong})
            raise WeightsError(
                f"{self._name}: {self.manifest.directory} holds other bytes than were published: "
                f"{len(names)} of {len(self.manifest.tensors)} tensors differ, first {names[0]}"
            )
        self._verified.update(left)

    def close(self) -> None:
        """Do nothing. A file stays mapped as long as tensors are views of it."""

    def _copy(self, piece: Piece, target: np.ndarray) -> bool:
        source, digest = self._bytes_of(piece), xxhash.xxh3_128()
        for start in range(0, piece.num_bytes, CACHED_BYTES):
            target[start : start + CACHED_BYTES] = source[start : start + CACHED_BYTES]
            digest.update(cast("Buffer", target[start : start + CACHED_BYTES]))
        return digest.hexdigest() == piece.digest

    def _bytes_of(self, piece: Piece) -> np.ndarray:
        return self._maps[piece.file][piece.start : piece.start + piece.num_bytes]


class PublishedAdapter:
    """The adapters of an offered version. They are read and verified when this object is made.

    Attributes:
        base: Offer of the frozen weights to which the adapters belong.

    Raises:
        FileNotFoundError: a newer version has replaced the adapters.
        WeightsError: bytes differ from the published ones.
    """

    def __init__(self, offer: WeightOffer) -> None:
        self.weights = FileWeights(offer)
        self.weights.verify()
        fields = self.weights.manifest.adapter
        assert fields is not None, "the offer must be of an adapter"
        tensors = dict(self.weights.tensors())
        self.base = fields.base
        self._layers = {layer.weight: (tensors[layer.down], tensors[layer.up], layer.scale) for layer in fields.layers}

    def layers(self) -> Iterator[tuple[str, Tensor, Tensor, float]]:
        """Yield a tuple per adapted layer: name of W [out, in], A [rank, in], B [out, rank], and the scale of B A."""
        for name, (down, up, scale) in self._layers.items():
            yield name, down, up, scale

    def merged(self, frozen: Iterable[tuple[str, Tensor]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) of each frozen weight. Adapted weights are W + scale · B A in the dtype of W.

        The sum is computed in float32 on ``device``.

        Raises:
            WeightsError: an adapted weight is missing.
        """
        left = dict(self._layers)
        for name, weight in frozen:
            if name in left:
                *pair, scale = left.pop(name)
                whole, down, up = (tensor.to(device, torch.float32) for tensor in (weight, *pair))
                weight = torch.addmm(whole, up, down, alpha=scale).to(weight.dtype)
            yield name, weight
        if left:
            raise WeightsError(f"{len(left)} of {len(self._layers)} adapted weights are missing, first {min(left)}")


class AdaptedModules:
    """The adapters that are attached to a model's linear layers. Each of these layers computes W x + scale · B A x."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []

    def load(self, adapter: PublishedAdapter, version: int, modules: Mapping[str, nn.Module]) -> None:
        """Replace the model's adapters with the adapters of a policy version.

        The new adapters get the dtype of the layers' weights. Each write is verified. ``modules`` maps names of frozen
        weights to linear layers. Raises `WeightsError` if a layer is missing, or if an adapter does not hold the
        published values after the load.
        """
        layers = list(adapter.layers())
        if missing := sorted({name for name, *_ in layers} - modules.keys()):
            raise WeightsError(f"policy version {version}: the model has no linear layer {missing[0]} to adapt")
        self.remove()
        targets: dict[str, Tensor] = {}
        for name, down, up, _ in layers:
            weight: Any = modules[name].weight
            targets[f"{name} A"] = torch.empty(down.shape, dtype=weight.dtype, device=weight.device)
            targets[f"{name} B"] = torch.empty(up.shape, dtype=weight.dtype, device=weight.device)
        with ComparedWrites(targets, adapter.weights) as writes:
            for name, down, up, scale in layers:
                targets[f"{name} A"].copy_(down)
                targets[f"{name} B"].copy_(up)
                hook = partial(_add, targets[f"{name} A"], targets[f"{name} B"], scale)
                self._hooks.append(modules[name].register_forward_hook(hook))
        writes.check(version)

    def remove(self) -> None:
        """Remove the adapters from the model's layers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _add(down: Tensor, up: Tensor, scale: float, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + scale * F.linear(F.linear(inputs[0], down), up)


@contextmanager
def submissions_run_at_once() -> Iterator[None]:
    """Inside this context, ``ThreadPoolExecutor.submit`` on this thread runs the function immediately.

    Other threads submit as usual. Subclasses with their own ``submit``, such as `DigestThreads`, do not change.
    """
    this_thread, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def run_at_once(pool: ThreadPoolExecutor, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if threading.get_ident() != this_thread:
            return submit(pool, function, *args, **kwargs)
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - `Future.result` raises this error
            future.set_exception(error)
        return future

    ThreadPoolExecutor.submit = run_at_once  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit


class ComparedWrites(TorchDispatchMode):
    """A context manager that verifies every copy of published weights into a parameter.

    If whole pieces of a file are copied on the CPU, the written bytes are compared with the published digests. Any
    other copy is compared with its source, and `check` verifies the source's digest.

    Torch shows the context only operations of the thread that entered the context. If this thread submits a copy to a
    thread pool, the context therefore runs the copy immediately, on this thread. ``observer`` records all operations.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], weights: WeightSource, observer: LoadObserver | None = None
    ) -> None:
        super().__init__()
        self._weights, self._observer = weights, observer
        self._names: dict[int, str] = {}
        self._sizes: dict[str, int] = {}
        for name, parameter in parameters.items():
            key = parameter.untyped_storage()._cdata
            if key not in self._names:  # treat parameters that share storage as one parameter
                self._names[key] = name
                self._sizes[name] = 0
            self._sizes[self._names[key]] = max(self._sizes[self._names[key]], parameter.numel())
        self._written: dict[str, dict[tuple[Any, ...], int]] = {name: {} for name in self._sizes}
        self._wrong: dict[str, list[Tensor]] = {}

    def __enter__(self) -> ComparedWrites:
        self._executors = ExitStack()
        self._executors.enter_context(submissions_run_at_once())
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._executors.close()

    @property
    def num_values(self) -> int:
        """Number of parameter values that were written. A region that was written twice is counted once."""
        return sum(sum(regions.values()) for regions in self._written.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_write = func in (_copy, _fill, _zero)
        name = self._names.get(args[0].untyped_storage()._cdata) if is_write else None
        if name is None:
            if self._observer is not None and not func.is_view:
                self._observer.computed((args, kwargs))
            return func(*args, **(kwargs or {}))
        target = args[0]
        if self._observer is not None:
            self._observer.wrote(name, target, 0.0 if func is _zero else args[1])
        self._written[name][target.storage_offset(), tuple(target.shape), target.stride()] = target.numel()
        if func is _copy:
            self._copy(name, target, args[1])
        else:
            func(*args, **(kwargs or {}))
        return target

    def check(self, version: int) -> None:
        """Check the results of all comparisons, and that every parameter was written completely.

        ``version`` is for the error message.

        Raises:
            WeightsError: bytes differ from the published ones, or a parameter does not hold the published values.
        """
        self._weights.verify()
        wrong = {name for name, flags in self._wrong.items() if torch.stack(flags).any()}
        if wrong:
            raise WeightsError(
                f"policy version {version}: {len(wrong)} of {len(self._sizes)} parameters hold other values than were "
                f"published, first {min(wrong)}"
            )
        written = {name: sum(regions.values()) for name, regions in self._written.items()}
        if missing := sorted(name for name, size in self._sizes.items() if written[name] != size):
            name = missing[0]
            raise WeightsError(
                f"policy version {version}: {len(missing)} of {len(self._sizes)} parameters of the engine were not "
                f"completely loaded, first {name} with {written[name]} of {self._sizes[name]} values; the published "
                "names must be those of a checkpoint of this model"
            )

    def _copy(self, name: str, target: Tensor, source: Tensor) -> None:
        is_alike = target.dtype == source.dtype and target.shape == source.shape
        is_flat = target.is_contiguous() and source.is_contiguous()
        on_cpu = target.device.type == source.device.type == "cpu"
        copier = self._weights.copier if is_alike and is_flat and on_cpu else None
        if copier is not None and (pieces := copier.pieces_at(source.data_ptr(), source.nbytes)):
            flat = target.detach().reshape(-1).view(torch.uint8).numpy()
            differs = torch.tensor(not copier.copy(pieces, flat))
        else:
            _copy(target, source)
            # Compare the bits as integers, because NaN differs from itself. Only `check` waits for the device's result.
            integers, wanted = _INTEGERS[target.element_size()], source
            if not (is_alike and is_flat and source.device == target.device):
                target, wanted = target.contiguous(), source.to(target).expand(target.shape).contiguous()
            differs = (target.view(integers) != wanted.view(integers)).any()
        self._wrong.setdefault(name, []).append(differs)
