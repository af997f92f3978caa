"""Publishes random bytes as a learner publishes weights: in full, as a delta or as an adapter."""

from pathlib import Path

import numpy as np
import torch

from asyncrl.core.types import FROZEN, WeightOffer
from asyncrl.weights.delta import write_delta
from asyncrl.weights.load import FileWeights
from asyncrl.weights.manifest import AdaptedLayer, Adapter, Delta, Manifest, StoredTensor, pieces_of

PIECE = 1 << 14
ADAPTED = AdaptedLayer(weight="w", down="w", up="w", scale=1.0)


def random_bytes(num_values: int, item_bytes: int = 2, seed: int = 0) -> np.ndarray:
    """Return [num_values * item_bytes] random bytes (uint8). Read as floats, some of the values are NaN."""
    return np.random.default_rng(seed).integers(0, 256, num_values * item_bytes, dtype=np.uint8)


def changed(image: np.ndarray, seed: int, share: float = 0.03, item_bytes: int = 2) -> np.ndarray:
    """Return a copy of the bytes ``image``. About the fraction ``share`` of the values is replaced by random values."""
    generator = np.random.default_rng(seed)
    values = image.copy().reshape(-1, item_bytes)
    places = generator.random(len(values)) < share
    values[places] = generator.integers(0, 256, (int(places.sum()), item_bytes), dtype=np.uint8)
    return values.reshape(-1)


def publish_bytes(
    folder: Path,
    version: int,
    image: np.ndarray,
    *,
    base: tuple[WeightOffer, np.ndarray] | None = None,
    frozen: WeightOffer | None = None,
    item_bytes: int = 2,
    num_files: int = 2,
) -> WeightOffer:
    """Publish the bytes ``image`` as one tensor, in pieces of 16 KiB.

    With ``base``, the function writes delta files, otherwise one data file. With ``frozen``, the manifest says that the
    bytes are an adapter for these frozen weights.
    """
    target = folder / ("frozen" if version == FROZEN else f"v{version:08d}")
    target.mkdir(parents=True)
    sizes = {at: min(PIECE, len(image) - at) for at in range(0, len(image), PIECE)}
    pieces = [piece for at, size in sizes.items() for piece in pieces_of(0, at, size, image)]
    delta = None
    if base is None:
        (target / "model.safetensors").write_bytes(image)
    else:
        spans = [(piece.start, piece.num_bytes, item_bytes) for piece in pieces]
        files, size = tuple(f"delta-{index}.bin" for index in range(num_files)), -(-len(spans) // num_files)
        changes = []
        for index, name in enumerate(files):
            own = spans[index * size : (index + 1) * size]
            changes += write_delta(target / name, index, base[1], image, own)
        delta = Delta(base=base[0], files=files, changes=tuple(changes))
    stored = StoredTensor(name="w", dtype="U8", shape=(len(image),), file=0, start=0, num_bytes=len(image))
    manifest = Manifest(
        directory=str(target),
        files=("model.safetensors",),
        tensors=(stored,),
        pieces=tuple(pieces),
        delta=delta,
        adapter=None if frozen is None else Adapter(base=frozen, layers=(ADAPTED,)),
    )
    return manifest.offer(target / "manifest.json", version)


def bytes_of(offer: WeightOffer) -> np.ndarray:
    """Verify the digests of an offer from `publish_bytes`. Returns the published bytes as an array of uint8."""
    weights = FileWeights(offer)
    weights.verify()
    ((_, data),) = weights.tensors()
    return data.reshape(-1).view(torch.uint8).numpy().copy()
