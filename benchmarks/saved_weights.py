"""Makes manifests (lists of the tensors of a version, with digests) of saved models.

With a manifest, engines can load weights without a learner.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asyncrl.core.errors import WeightsError
from asyncrl.weights.manifest import DIGEST_THREADS, Manifest, StoredTensor, map_file, pieces_of

_HEADER_LIMIT = 1 << 28


def describe_model(directory: str, *, for_device: bool = False) -> Manifest:
    """Return the manifest of a saved model: the tensors in its files, and digests of their bytes.

    Args:
        directory: The model in Hugging Face layout.
        for_device: Also compute the digests that engines on GPUs compare.

    Raises:
        WeightsError: The directory has no safetensors files, or a file cannot be read.
    """
    names = sorted(path.name for path in Path(directory).glob("*.safetensors"))
    if not names:
        raise WeightsError(f"{directory} has no *.safetensors; save the model there in Hugging Face layout")
    tensors = [tensor for file, name in enumerate(names) for tensor in _stored_tensors(file, Path(directory, name))]
    maps = [map_file(Path(directory, name)) for name in names]
    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        parts = threads.map(
            lambda t: pieces_of(t.file, t.start, t.num_bytes, maps[t.file], for_device=for_device), tensors
        )
        pieces = tuple(piece for part in parts for piece in part)
    return Manifest(directory=str(directory), files=tuple(names), tensors=tuple(tensors), pieces=pieces)


def _stored_tensors(file: int, path: Path) -> list[StoredTensor]:
    """Return the tensors that the header of a safetensors file lists."""
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
