"""A published policy version: where its tensors lie, and digests over every byte of them.

A version is a directory in Hugging Face layout and a *manifest*: a JSON file that names each tensor's place in the data
files and the digest of each piece. A `WeightOffer` names the manifest and its digest, so what a reader has verified
follows from the offer alone. Tensors are numpy here; who has torch views them as torch tensors.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import xxhash
from typing_extensions import Buffer

from asyncrl.core.errors import WeightsError
from asyncrl.core.host import is_bare_name
from asyncrl.core.types import OfferKind, WeightOffer

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""What safetensors calls the types of torch."""
PIECE_BYTES = 4 << 20
"""Most bytes under one digest: pieces are digested by several threads."""
CACHED_BYTES = 256 << 10
DIGEST_THREADS = min(4, os.cpu_count() or 1)
_HEADER_LIMIT = 1 << 28


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a data file.

    Attributes:
        name: In the checkpoint. Example: ``"model.norm.weight"``.
        dtype: As safetensors names it. Example: ``"BF16"``.
        shape: Sizes.
        file: Index into `Manifest.files`.
        start: First byte in the file; ``num_bytes`` follow.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Bytes of a data file with their digest; no piece reaches over the end of a tensor."""

    file: int
    start: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A piece that changed, and where a delta file holds its new values.

    Attributes:
        start: First byte of the piece in the data file.
        item_bytes: Bytes per value: 1, 2, 4 or 8.
        num_values: Values in the delta file.
        gap_bytes: Bytes per gap between their indices, which follow the values; 0 where the piece is there whole.
        file: Index into `Delta.files`.
        at: First byte in the delta file; ``num_bytes`` follow.
    """

    start: int
    item_bytes: int
    num_values: int
    gap_bytes: int
    file: int
    at: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What turns the data file of another version into this one's.

    Attributes:
        base: The other version; what it holds follows from the digest of its manifest.
        files: Delta files, one per learner rank, relative to the manifest's directory.
        changes: Every piece that changed.
    """

    base: WeightOffer
    files: tuple[str, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLayer:
    """A linear layer that computes with W + scale · B A (LoRA, arXiv 2106.09685).

    Attributes:
        weight: Name of W, [out, in], in the frozen weights. Example: ``"model.layers.0.self_attn.q_proj.weight"``.
        down: Name of A, [rank, in], in the version's own data file.
        up: Name of B, [out, rank], there.
        scale: Alpha ÷ rank.
    """

    weight: str
    down: str
    up: str
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """What makes a policy of frozen weights.

    Attributes:
        base: The frozen weights, a full offer of version `FROZEN`, the same for all versions.
        layers: Every layer that is adapted.
    """

    base: WeightOffer
    layers: tuple[AdaptedLayer, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a version but its bytes.

    Attributes:
        directory: What ``files`` are relative to: the model in Hugging Face layout. Written relative to the manifest
            where it holds it, so that both can be moved together.
        files: Data files, in safetensors format; of a delta, the one that it results in.
        tensors: Every tensor.
        pieces: Cover every byte of every tensor, as it is in the end.
        delta: What there is instead of the data file; None where that is there.
        adapter: Of an adapter, whose tensors are those of all A and B; None of other kinds.
    """

    directory: str
    files: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]
    pieces: tuple[Piece, ...]
    delta: Delta | None = None
    adapter: Adapter | None = None

    @property
    def kind(self) -> OfferKind:
        """See `WeightOffer.kind`."""
        return "delta" if self.delta is not None else "adapter" if self.adapter is not None else "full"

    @property
    def base(self) -> WeightOffer | None:
        """The version that this one needs; None for a full version."""
        needs = self.delta or self.adapter
        return None if needs is None else needs.base

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in ``files``."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def tensor_at(self, piece: Piece) -> StoredTensor:
        """The tensor to which a piece belongs."""
        return next(
            tensor
            for tensor in self.tensors
            if tensor.file == piece.file and tensor.start <= piece.start < tensor.start + tensor.num_bytes
        )

    def offer(self, path: Path, version: int) -> WeightOffer:
        """Write the manifest to ``path``, whole or not at all; returns the offer of it.

        Raises:
            WeightsError: the pieces leave bytes of a tensor without a digest.
        """
        self._check_coverage()
        written = replace(self, directory=_seen_from(path.parent, self.directory))
        if needs := self.delta or self.adapter:
            base = replace(needs.base, manifest=_seen_from(path.parent, needs.base.manifest))
            written = replace(written, **{self.kind: replace(needs, base=base)})
        content = orjson.dumps(written)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
        return WeightOffer(
            version=version,
            manifest=str(path),
            digest=digest_of(content),
            num_bytes=self.num_bytes + (0 if self.adapter is None else self.adapter.base.num_bytes),
            kind=self.kind,
            base_version=None if self.base is None else self.base.version,
        )

    def _check_coverage(self) -> None:
        ends = {(piece.file, piece.start): piece.start + piece.num_bytes for piece in self.pieces}
        for tensor in self.tensors:
            at, end = tensor.start, tensor.start + tensor.num_bytes
            while at < end:
                if (tensor.file, at) not in ends:
                    raise WeightsError(
                        f"{self.directory}: {tensor.name} has no digest from byte {at - tensor.start} of "
                        f"{tensor.num_bytes} on; every rank must have written and digested its share"
                    )
                at = ends[tensor.file, at]


def digest_of(content: Buffer | np.ndarray) -> str:
    """XXH3 of 128 bits, in hexadecimal; computed without the interpreter's lock."""
    return xxhash.xxh3_128_hexdigest(cast("Buffer", content))


def pieces_of(file: int, start: int, num_bytes: int, data: np.ndarray) -> list[Piece]:
    """Digest ``num_bytes`` of a data file from ``start`` on; ``data`` is the whole file as [bytes] uint8."""
    spans = [(at, min(PIECE_BYTES, start + num_bytes - at)) for at in range(start, start + num_bytes, PIECE_BYTES)]
    return [Piece(file=file, start=at, num_bytes=size, digest=digest_of(data[at : at + size])) for at, size in spans]


class DigestThreads(ThreadPoolExecutor):
    """Threads that digest and copy while a model is loaded.

    A load may replace ``ThreadPoolExecutor.submit`` meanwhile, so that the model's own writes stay on its thread
    (`load.ComparedWrites`). These threads keep the method as it was imported.
    """

    submit = ThreadPoolExecutor.submit


def describe_model(directory: str) -> Manifest:
    """Read what a model's directory holds and digest it; for weights that no learner has published.

    Raises:
        WeightsError: there are no safetensors files, or one cannot be read.
    """
    names = sorted(path.name for path in Path(directory).glob("*.safetensors"))
    if not names:
        raise WeightsError(f"{directory} holds no *.safetensors; save the model in Hugging Face layout there")
    tensors = [tensor for file, name in enumerate(names) for tensor in _stored_tensors(file, Path(directory, name))]
    maps = [map_file(Path(directory, name)) for name in names]
    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        parts = threads.map(lambda t: pieces_of(t.file, t.start, t.num_bytes, maps[t.file]), tensors)
        pieces = tuple(piece for part in parts for piece in part)
    return Manifest(directory=str(directory), files=tuple(names), tensors=tuple(tensors), pieces=pieces)


def read_manifest(offer: WeightOffer) -> Manifest:
    """Read the manifest of an offer.

    Raises:
        FileNotFoundError: a newer version took its place.
        WeightsError: it is not the one that was offered, or names a file outside its folder.
    """
    return parse_manifest(offer, Path(offer.manifest).read_bytes())


def parse_manifest(offer: WeightOffer, content: bytes) -> Manifest:
    """Return the manifest with this text; raises `WeightsError` as `read_manifest` does."""
    if digest_of(content) != offer.digest:
        raise WeightsError(
            f"{offer.name}: {offer.manifest} is not the manifest that was offered: its digest is "
            f"{digest_of(content)}, expected {offer.digest}"
        )
    fields, folder = orjson.loads(content), Path(offer.manifest).parent
    delta, adapter = fields["delta"], fields["adapter"]
    for name in (*fields["files"], *(delta or {"files": ()})["files"]):
        if not is_bare_name(name):
            raise WeightsError(
                f"{offer.name}: {offer.manifest} names the file {name!r:.80}, expected a name without a folder; the "
                "manifest was not written by a learner of this release"
            )
    if delta is not None:
        delta = Delta(
            base=_base_of(delta, folder),
            files=tuple(delta["files"]),
            changes=tuple(Change(**entry) for entry in delta["changes"]),
        )
    if adapter is not None:
        layers = tuple(AdaptedLayer(**entry) for entry in adapter["layers"])
        adapter = Adapter(base=_base_of(adapter, folder), layers=layers)
    return Manifest(
        directory=os.path.normpath(folder / fields["directory"]),
        files=tuple(fields["files"]),
        tensors=tuple(StoredTensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in fields["tensors"]),
        pieces=tuple(Piece(**entry) for entry in fields["pieces"]),
        delta=delta,
        adapter=adapter,
    )


def _base_of(fields: dict[str, Any], folder: Path) -> WeightOffer:
    return WeightOffer(**{**fields["base"], "manifest": os.path.normpath(folder / fields["base"]["manifest"])})


def map_file(path: Path) -> np.ndarray:
    """[bytes] uint8, read-only, of a whole file; stays valid when the file is removed."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return np.frombuffer(mapping, dtype=np.uint8)


def safetensors_header(tensors: Sequence[tuple[str, str, Sequence[int], int]]) -> tuple[bytes, list[int]]:
    """The head of a safetensors file, for data that others write behind it.

    Args:
        tensors: Name, dtype as safetensors names it, shape and bytes of each, in the order of the file.

    Returns:
        The bytes before the data, and where in the file each tensor starts.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets = [0]
    for name, dtype, shape, num_bytes in tensors:
        offsets.append(offsets[-1] + num_bytes)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets[-2:]}
    content = json.dumps(entries).encode()
    content += b" " * (-len(content) % 8)
    head = len(content).to_bytes(8, "little") + content
    return head, [len(head) + offset for offset in offsets[:-1]]


def _stored_tensors(file: int, path: Path) -> list[StoredTensor]:
    """What a safetensors file holds, by its header."""
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > min(_HEADER_LIMIT, os.fstat(stream.fileno()).st_size):
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        return [
            StoredTensor(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                file=file,
                start=8 + size + entry["data_offsets"][0],
                num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is not a safetensors file: {error}") from error


def _seen_from(folder: Path, path: str) -> str:
    """A path in a folder, or beside it, relative to the folder; any other path absolute."""
    folder, whole = folder.absolute(), Path(path).absolute()
    if whole.is_relative_to(folder):
        return str(whole.relative_to(folder))
    return str(Path("..", whole.relative_to(folder.parent)) if whole.is_relative_to(folder.parent) else whole)
