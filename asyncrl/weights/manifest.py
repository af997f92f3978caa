"""The manifest of a published policy version: the positions of its tensors in files, and digests of all bytes.

A version is a directory in Hugging Face layout with a JSON file, the *manifest*. A `WeightOffer` (the announcement of a
version) has the manifest's digest, so a reader of the offer can verify every byte of the version.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
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
"""Keys: names of dtypes in safetensors files. Values: the names of the same dtypes in torch."""
PIECE_BYTES = 4 << 20
"""Largest size of a piece (a part of a tensor with its own digest), in bytes. Threads digest pieces in parallel."""
CACHED_BYTES = 256 << 10
DIGEST_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a data file.

    Attributes:
        name: Name in the checkpoint. Example: ``"model.norm.weight"``.
        dtype: Name of the dtype in safetensors. Example: ``"BF16"``.
        file: Index of the data file in `Manifest.files`.
        start: Position of the tensor's first byte in the file. The tensor has ``num_bytes`` bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Adjacent bytes of one tensor in a data file, with their digest.

    Attributes:
        device_digest: A second digest (`device_digest_of`) that engines compute on a GPU; None if the learner runs on
            a CPU.
    """

    file: int
    start: int
    num_bytes: int
    digest: str
    device_digest: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A changed piece, and the position of its changed values in a delta file.

    Attributes:
        start: Position of the piece's first byte in the data file.
        item_bytes: Bytes per value: 1, 2, 4 or 8.
        num_values: Number of values in the delta file.
        gap_bytes: Bytes per code (a part of a gap between the indices of changed values); 0 if the delta file has the
            whole piece. In the delta file, the codes follow the values.
        file: Index of the delta file in `Delta.files`.
        at: Position of the first value in the delta file. Values and codes take ``num_bytes`` bytes.
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
    """The difference between the data file of a version and the data file of an earlier version, the base.

    Attributes:
        base: The offer of the earlier version. The manifest's digest in this offer identifies the version.
        files: Delta files, one per learner rank, relative to the manifest's directory.
    """

    base: WeightOffer
    files: tuple[str, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLayer:
    """A linear layer whose weight is W + scale · B A (LoRA, arXiv 2106.09685).

    Attributes:
        weight: Name of W, [out, in], in the frozen weights. Example: ``"model.layers.0.self_attn.q_proj.weight"``.
        down: Name of A, [rank, in], in the version's data file.
        up: Name of B, [out, rank], in the version's data file.
        scale: Alpha divided by the rank.
    """

    weight: str
    down: str
    up: str
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The adapters of a policy version. Together with the frozen weights, they make the policy.

    Attributes:
        base: The offer of the frozen weights, with version number `FROZEN`. All policy versions have the same frozen
            weights.
    """

    base: WeightOffer
    layers: tuple[AdaptedLayer, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a version: everything except its bytes.

    Attributes:
        directory: Folder of ``files``. The manifest file holds the path of this folder. The path is relative if the
            manifest file is in this folder or in a folder next to this folder. So the manifest file and the folder can
            be moved together.
        files: Data files in safetensors format. For a delta, the file that `delta.apply_delta` makes.
        pieces: The digested parts of tensors. They cover all bytes of all tensors in ``files``.
        delta: If the version is published without a data file, its changes since an earlier version; otherwise None.
        adapter: If ``tensors`` are the matrices A and B of adapters, the adapted layers; otherwise None.
    """

    directory: str
    files: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]
    pieces: tuple[Piece, ...]
    delta: Delta | None = None
    adapter: Adapter | None = None

    @property
    def kind(self) -> OfferKind:
        """Kind of this version: ``"full"``, ``"delta"`` (changes of a base version) or ``"adapter"`` (LoRA)."""
        return "delta" if self.delta is not None else "adapter" if self.adapter is not None else "full"

    @property
    def base(self) -> WeightOffer | None:
        """Offer of the version that a delta or an adapter needs; None for a full version."""
        needs = self.delta or self.adapter
        return None if needs is None else needs.base

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors in ``files``."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def tensor_at(self, piece: Piece) -> StoredTensor:
        """Return the description of the tensor that contains a piece."""
        return next(
            tensor
            for tensor in self.tensors
            if tensor.file == piece.file and tensor.start <= piece.start < tensor.start + tensor.num_bytes
        )

    def offer(self, path: Path, version: int) -> WeightOffer:
        """Write the manifest to ``path`` atomically, as JSON. Returns the offer, which tells engines this path.

        Raises:
            WeightsError: some bytes of a tensor have no digest.
        """
        self._check_coverage()
        folder = path.parent.absolute()

        def seen_from_folder(other: str) -> str:
            whole = Path(other).absolute()
            if whole.is_relative_to(folder):
                return str(whole.relative_to(folder))
            return str(Path("..", whole.relative_to(folder.parent)) if whole.is_relative_to(folder.parent) else whole)

        content = msgspec.json.encode(self.with_paths(seen_from_folder))
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

    def with_paths(self, change: Callable[[str], str]) -> Manifest:
        """Return a copy of the manifest with other paths. The function ``change`` takes a path and returns a new path.

        ``change`` is applied to ``directory``, and to the manifest's path in the offer of the base version.
        """
        changed = replace(self, directory=change(self.directory))
        if needs := self.delta or self.adapter:
            base = replace(needs.base, manifest=change(needs.base.manifest))
            changed = replace(changed, **{self.kind: replace(needs, base=base)})
        return changed

    def _check_coverage(self) -> None:
        ends = {(piece.file, piece.start): piece.start + piece.num_bytes for piece in self.pieces}
        for tensor in self.tensors:
            at, end = tensor.start, tensor.start + tensor.num_bytes
            while at < end:
                if (tensor.file, at) not in ends:
                    raise WeightsError(
                        f"{self.directory}: {tensor.name} has no digest of byte {at - tensor.start} of "
                        f"{tensor.num_bytes}; every rank must digest its part before the manifest is written"
                    )
                at = ends[tensor.file, at]


def digest_of(content: Buffer | np.ndarray) -> str:
    """Return the XXH3 digest of ``content``, 128 bits in hexadecimal. The computation releases the GIL."""
    return xxhash.xxh3_128_hexdigest(cast("Buffer", content))


def factors_of(indices: Any) -> Any:
    """Return one odd pseudo-random factor per index, by SplitMix64 (Steele et al., OOPSLA 2014).

    Indices and factors are int64 arrays of numpy or torch.
    """
    mixed = indices * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return mixed ^ (mixed >> 31 & (1 << 33) - 1) | 1


@cache
def _halves_of_factors() -> np.ndarray:
    return np.ascontiguousarray(factors_of(np.arange(PIECE_BYTES // 4)).reshape(-1, 2).T)


def device_digest_of(data: np.ndarray) -> int:
    """Return a digest that a GPU computes fast: a weighted sum of the 32-bit words.

    The weight of a word is the factor that `factors_of` returns for the word's index. The sum is modulo 2^64 and
    signed. The digest changes if a single word changes. Two different pieces have the same digest with a probability of
    at most 2^-32 (multilinear hashing, arXiv 1202.4961).

    Args:
        data: [bytes] uint8, at most `PIECE_BYTES`; zeros fill the last word.
    """
    words = (np.pad(data, (0, -len(data) % 8)) if len(data) % 8 else data).view(np.int64)
    total, (low, high), size = 0, _halves_of_factors(), CACHED_BYTES // 8
    for first in range(0, len(words), size):
        part, place = words[first : first + size], slice(first, min(first + size, len(words)))
        total += int(np.dot(part << 32 >> 32, low[place])) + int(np.dot(part >> 32, high[place]))
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def pieces_of(file: int, start: int, num_bytes: int, data: np.ndarray, *, for_device: bool = False) -> list[Piece]:
    """Divide a range of a data file into pieces of at most `PIECE_BYTES`, and digest each piece.

    ``file`` is the file's index in `Manifest.files`. The range begins at the byte ``start``. ``data`` is the whole
    file, [bytes] uint8. If ``for_device`` is True, `Piece.device_digest` is computed too.
    """
    pieces: list[Piece] = []
    for at in range(start, start + num_bytes, PIECE_BYTES):
        own = data[at : min(at + PIECE_BYTES, start + num_bytes)]
        on_device = device_digest_of(own) if for_device else None
        pieces.append(Piece(file=file, start=at, num_bytes=len(own), digest=digest_of(own), device_digest=on_device))
    return pieces


class DigestThreads(ThreadPoolExecutor):
    """A thread pool that digests and copies weights while a model is loaded.

    `load.ComparedWrites` replaces ``ThreadPoolExecutor.submit`` during a load, so that other pools use no threads.
    `DigestThreads` keeps the original method, and still uses threads.
    """

    submit = ThreadPoolExecutor.submit

    def __init__(self, num_threads: int = DIGEST_THREADS) -> None:
        super().__init__(num_threads)

    def wrong(self, pieces: Sequence[Piece], bytes_of: Callable[[Piece], np.ndarray]) -> list[Piece]:
        """Return the pieces whose bytes do not have the published digest.

        The function ``bytes_of`` takes a piece and returns the bytes of the piece, [bytes] uint8.
        """
        mapped = map if len(pieces) == 1 else self.map  # digesting one piece takes less time than waking a thread
        are_right = mapped(lambda piece: digest_of(bytes_of(piece)) == piece.digest, pieces)
        return [piece for piece, is_right in zip(pieces, are_right, strict=True) if not is_right]


def read_manifest(offer: WeightOffer) -> Manifest:
    """Read the manifest that an offer names, and compare the digest of the file with the offered digest.

    Raises:
        FileNotFoundError: a newer version has replaced this version.
        WeightsError: the manifest differs from the offered manifest, or names a file outside the manifest's folder.
    """
    return parse_manifest(offer, Path(offer.manifest).read_bytes())


def parse_manifest(offer: WeightOffer, content: bytes) -> Manifest:
    """Return the manifest with the JSON text ``content``.

    Raises `WeightsError` if the text differs from the offered manifest, or names a file outside the manifest's folder.
    """
    if digest_of(content) != offer.digest:
        raise WeightsError(
            f"{offer.name}: {offer.manifest} is not the manifest that was offered: its digest is "
            f"{digest_of(content)}, expected {offer.digest}"
        )
    manifest, folder = msgspec.json.decode(content, type=Manifest), Path(offer.manifest).parent
    for name in (*manifest.files, *(() if manifest.delta is None else manifest.delta.files)):
        if not is_bare_name(name):
            raise WeightsError(
                f"{offer.name}: {offer.manifest} names the file {name!r:.80}, expected a name without a folder; the "
                "manifest was not written by a learner of this release"
            )
    return manifest.with_paths(lambda other: os.path.normpath(folder / other))


def write_error(num_bytes: int, where: Path | str, error: OSError, remedy: str = "") -> WeightsError:
    """Return the error to raise if weights cannot be written to the path ``where``.

    ``remedy`` is added to the message if space is missing.
    """
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
        return WeightsError(f"{num_bytes} bytes of weights cannot be written to {where}: {error}")
    more = f", or {remedy}" if remedy else ""
    return WeightsError(f"no room for {num_bytes} bytes of weights in {where}: {error}; free some space{more}")


def map_file(path: Path) -> np.ndarray:
    """Map a whole file read-only, and return its bytes, [bytes] uint8. The bytes stay valid if the file is removed."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return np.frombuffer(mapping, dtype=np.uint8)


def safetensors_header(tensors: Sequence[tuple[str, str, Sequence[int], int]]) -> tuple[bytes, list[int]]:
    """Return a pair: a safetensors header, and a list of the position of each tensor's first byte in the file.

    The header is all bytes of the file before the tensors.

    Args:
        tensors: Name, dtype (safetensors name), shape and number of bytes of each tensor, in file order.
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
