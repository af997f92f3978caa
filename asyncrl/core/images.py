"""Images of prompts and tool results. Each image is a grid of patches with 8-bit pixels.

In the token sequence, an image is a number of adjacent placeholder tokens, one per ``merge_size``² patches. The model's
vision tower computes one vector per placeholder, a *merged feature*, which replaces the embedding of the placeholder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GRIDS, PIXELS = "grids", "pixels"
"""Names of the arrays that hold the I images of a prompt group.

- ``grids`` [I, 4] int32: time, height and width in patches, and the merge size.
- ``pixels`` [patches of all images, 3 · patch size²] uint8: the colors of each patch.
"""

IMAGE_ROWS, POSITIONS = "image_rows", "positions"
"""Names of the additional arrays over the N tokens of a prompt group with images.

- ``image_rows`` [N] int32: index of the placeholder's feature among the features of all images; -1 for text.
- ``positions`` [N, 3] int32: position ids in time, height and width.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Image:
    """One image, resized and cut into patches.

    Attributes:
        pixels: [P, 3 · patch size²] uint8. Each row is one patch: its channels, rows and columns. P, the number of
            patches, is the product of ``grid``. The patches that belong to the same token are adjacent.
        grid: Number of patches in time, height and width. Example: ``(1, 16, 24)``.
        merge_size: Number of patches per token, in height and in width.
        digest: Hexadecimal digest of the image; equal for equal images.
    """

    pixels: np.ndarray
    grid: tuple[int, int, int]
    merge_size: int
    digest: str

    @property
    def num_tokens(self) -> int:
        """Number of placeholder tokens that represent the image in a sequence."""
        return len(self.pixels) // self.merge_size**2


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacedImage:
    """An image at a position in a sequence. ``offset`` is the index of the image's first placeholder token."""

    image: Image
    offset: int

    @property
    def end(self) -> int:
        """Index of the token after the image's last placeholder."""
        return self.offset + self.image.num_tokens


def moved(images: Iterable[PlacedImage], by: int) -> tuple[PlacedImage, ...]:
    """Return copies of ``images`` that are ``by`` tokens later in the sequence."""
    return tuple(PlacedImage(image=placed.image, offset=placed.offset + by) for placed in images)


def positions_of(start: int, num_tokens: int, images: Sequence[PlacedImage]) -> tuple[np.ndarray, int]:
    """Compute positions for multimodal rotary embeddings (Qwen3-VL, arXiv 2511.21631; Qwen2-VL, arXiv 2409.12191, 2.1).

    On all axes, the position of a text token is one more than the largest earlier position. The position of an image
    token on an axis is its index in the image's grid, plus the position that a text token after the earlier tokens has.

    Args:
        start: Position of the first token.
        num_tokens: Length of the sequence, T.
        images: The images of the sequence, in the order of their offsets; they do not overlap.

    Returns:
        A pair: the positions in time, height and width, [T, 3] int32; and the position of the token after the
        sequence. Example with ``start=5``: a text token, an image of 1 × 2 × 1 merged patches and a text token have
        the positions (5, 5, 5), (6, 6, 6), (6, 7, 6) and (8, 8, 8). The second value is 9.
    """
    positions, done = np.empty((num_tokens, 3), dtype=np.int32), 0
    for placed in images:
        positions[done : placed.offset] = np.arange(start, start + placed.offset - done)[:, None]
        start += placed.offset - done
        time, height, width = placed.image.grid
        size = placed.image.merge_size
        places = np.indices((time, height // size, width // size)).reshape(3, -1).T
        positions[placed.offset : placed.end] = start + places
        start += max(height, width) // size
        done = placed.end
    positions[done:] = np.arange(start, start + num_tokens - done)[:, None]
    return positions, start + num_tokens - done


class GroupImages:
    """The I images of a prompt group.

    Attributes:
        grids: [I, 4] int32: time, height and width in patches, and the merge size.
        pixels: [patches of all images, 3 · patch size²] uint8.
        first_rows: [I + 1] int64. The model computes a matrix with one row (feature) per placeholder token of all
            images. ``first_rows`` has the index of each image's first row, and then the number of rows.
    """

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self.grids = columns[GRIDS]
        self.pixels = columns[PIXELS]
        num_patches = self.grids[:, :3].prod(axis=1, dtype=np.int64)
        self._first_patches = np.concatenate(([0], np.cumsum(num_patches)))
        self.first_rows = np.concatenate(([0], np.cumsum(num_patches // self.grids[:, 3] ** 2)))

    def check(self, where: str) -> None:
        """Check the dtypes and shapes of ``grids`` and ``pixels``. Raise `ValueError` if one of them is wrong.

        ``where`` names the group in the message.
        """
        if self.grids.dtype != np.dtype("<i4") or self.grids.ndim != 2 or self.grids.shape[1] != 4:
            raise ValueError(
                f"{where}: image column {GRIDS!r} must be [images, 4] int32, got {self.grids.dtype} {self.grids.shape}"
            )
        if self.pixels.dtype != np.uint8 or self.pixels.ndim != 2 or len(self.pixels) != self._first_patches[-1]:
            raise ValueError(
                f"{where}: image column {PIXELS!r} must be [{self._first_patches[-1]}, …] uint8, with one row "
                f"per patch of column {GRIDS!r}, got {self.pixels.dtype} {self.pixels.shape}"
            )

    @property
    def num_images(self) -> int:
        """Number I of distinct images in the group."""
        return len(self.grids)

    def pixels_of(self, index: int) -> np.ndarray:
        """Return a view of the pixels of the image at ``index``: [P, 3 · patch size²] uint8 for its P patches."""
        return self.pixels[self._first_patches[index] : self._first_patches[index + 1]]

    @cached_property
    def images(self) -> tuple[Image, ...]:
        """The distinct images of the group, as `Image` objects."""
        return tuple(
            Image(
                pixels=self.pixels_of(index),
                grid=(int(grid[0]), int(grid[1]), int(grid[2])),
                merge_size=int(grid[3]),
                digest=digest_of_pixels(self.pixels_of(index), grid[:3]),
            )
            for index, grid in enumerate(self.grids)
        )

    def placed(self, image_rows: np.ndarray) -> tuple[PlacedImage, ...]:
        """Return the images in a sequence of T tokens, each with the index of the image's first token in the sequence.

        ``image_rows``: [T] int32. For a placeholder token, the entry is the row of the token's feature in the matrix of
        all features of the group (`first_rows`). For a text token, the entry is -1.
        """
        starts = np.flatnonzero(np.isin(image_rows, self.first_rows[:-1]))
        which = self.first_rows.searchsorted(image_rows[starts])
        return tuple(
            PlacedImage(image=self.images[index], offset=int(start)) for start, index in zip(starts, which, strict=True)
        )


def group_columns(
    lengths: Sequence[int], parents: Sequence[int], images: Sequence[Sequence[PlacedImage]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Convert the images of a prompt group's turns to arrays (columns).

    Equal images are stored once. A turn is a sequence of tokens that were either all sampled or all given. Each
    argument has one entry per turn.

    Args:
        lengths: Number of tokens of each turn.
        parents: Index of the turn before each turn; -1 for the root of a tree. Parents come before their children.
        images: The images in each turn, with their offsets in the turn.

    Returns:
        A pair of dicts: the arrays `GRIDS` and `PIXELS` of the images, and the arrays `IMAGE_ROWS` and `POSITIONS` of
        the tokens.
    """
    distinct: dict[str, tuple[int, Image]] = {}
    rows, positions, ends, num_rows = [], [], [], 0
    for length, parent, placed in zip(lengths, parents, images, strict=True):
        own = np.full(length, -1, dtype=np.int32)
        for each in placed:
            if each.image.digest not in distinct:
                distinct[each.image.digest] = (num_rows, each.image)
                num_rows += each.image.num_tokens
            first = distinct[each.image.digest][0]
            own[each.offset : each.end] = np.arange(first, first + each.image.num_tokens)
        at, end = positions_of(ends[parent] if parent >= 0 else 0, length, placed)
        rows.append(own)
        positions.append(at)
        ends.append(end)
    chosen = [image for _, image in distinct.values()]
    columns = {
        GRIDS: np.array([(*image.grid, image.merge_size) for image in chosen], dtype=np.int32),
        PIXELS: np.concatenate([image.pixels for image in chosen]),
    }
    return columns, {IMAGE_ROWS: np.concatenate(rows), POSITIONS: np.concatenate(positions)}


def digest_of_pixels(pixels: np.ndarray, grid: Iterable[int]) -> str:
    """Return a digest of an image's pixels and grid (patches in time, height and width): 32 hexadecimal digits."""
    import hashlib

    digest = hashlib.blake2b(repr([int(size) for size in grid]).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class PixelFormat:
    """How a model's image processor cuts images into patches, and scales the 8-bit pixels to floats.

    Attributes:
        patch_size: Height and width of a patch, in pixels.
        temporal_patch_size: Number of video frames per patch. A still image is repeated for each frame.
        merge_size: Number of patches per token, in height and in width.
        mean: Value per color channel that is subtracted from the rescaled pixels.
        std: Divisor per color channel for the pixels after the subtraction of ``mean``.
        rescale: Factor for the 8-bit pixels before the subtraction of ``mean``. Example: 1/255.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float

    @classmethod
    def of(cls, processor: Any) -> PixelFormat:
        """Read the patch sizes and the normalization from a Hugging Face image processor."""
        return cls(
            patch_size=processor.patch_size,
            temporal_patch_size=processor.temporal_patch_size,
            merge_size=processor.merge_size,
            mean=tuple(processor.image_mean) if processor.do_normalize else (0.0, 0.0, 0.0),
            std=tuple(processor.image_std) if processor.do_normalize else (1.0, 1.0, 1.0),
            rescale=processor.rescale_factor if processor.do_rescale else 1.0,
        )

    @property
    def pixels_per_patch(self) -> int:
        """Number of 8-bit values that one patch has in ``pixels``: 3 · patch size²."""
        return 3 * self.patch_size**2

    def features(self, pixels: Tensor) -> Tensor:
        """Normalize the pixels of P patches, [P, 3 · patch size²] uint8, for the vision tower.

        Returns:
            [P, 3 · F · patch size²] float32 on the device of ``pixels``. F is ``temporal_patch_size``, the number of
            frames in a patch. All frames of a patch are equal, because an image is not a video.
        """
        values = pixels.float().view(len(pixels), 3, 1, -1) * self.rescale
        mean, std = (values.new_tensor(each).view(1, 3, 1, 1) for each in (self.mean, self.std))
        normal = (values - mean) / std
        return normal.expand(-1, -1, self.temporal_patch_size, -1).reshape(len(pixels), -1)
