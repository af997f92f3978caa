"""Exact sparse differences between two versions of a data file.

For each changed piece (a part of a tensor), a delta file holds the changed values and the gaps between their indices.
If the whole piece takes at most as many bytes as its changed values and gaps, the delta file holds the whole piece
instead. Values are compared as integers, so the comparison is exact for NaN and -0.0 too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np

from asyncrl.core.errors import WeightsError
from asyncrl.weights.manifest import DIGEST_THREADS, Change, Manifest, digest_of

_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode(old: np.ndarray, new: np.ndarray, item_bytes: int) -> tuple[int, int, bytes] | None:
    """Encode the changed values of a piece (a part of a tensor). Returns None if ``old`` and ``new`` are equal.

    ``old`` and ``new`` are the piece's old and new bytes, [bytes] uint8. ``item_bytes`` is the number of bytes per
    value: 1, 2, 4 or 8.

    Returns:
        A tuple: the number of encoded values, the bytes per code, and the bytes for the delta file. A gap is the
        distance between the indices of two successive changed values. The first gap is the index of the first changed
        value. The delta file has each gap as one or more codes (numbers of 1 or 2 bytes), whose sum is the gap. The
        bytes per code are 0 if the whole piece is encoded.
    """
    values = new.view(_INTEGERS[item_bytes])
    indices = np.flatnonzero(values != old.view(_INTEGERS[item_bytes]))
    if not len(indices):
        return None
    gaps = np.diff(indices, prepend=0)
    encodings: list[np.ndarray] = []
    for gap_bytes in (1, 2):  # a gap becomes ``gap // full`` times the code ``full``, then the code ``gap % full``
        full = np.iinfo(_INTEGERS[gap_bytes]).max
        ends = np.cumsum(gaps // full + 1) - 1
        encodings.append(np.full(ends[-1] + 1, full, dtype=_INTEGERS[gap_bytes]))
        encodings[-1][ends] = gaps % full
    codes = min(encodings, key=lambda codes: codes.nbytes)
    if len(indices) * item_bytes + codes.nbytes >= len(new):
        return len(values), 0, new.tobytes()
    return len(indices), codes.itemsize, values[indices].tobytes() + codes.tobytes()


def decode(change: Change, data: bytes, place: np.ndarray) -> None:
    """Replace the old bytes of a piece in the array ``place``, [bytes] uint8, with the new bytes.

    The content of ``place`` is undefined after an error. ``change`` describes the encoded piece, and ``data`` has the
    bytes of this piece from the delta file.

    Raises:
        ValueError, IndexError: ``data`` does not fit ``change``.
    """
    size = change.num_values * change.item_bytes
    new = np.frombuffer(data[:size], dtype=_INTEGERS[change.item_bytes])
    values = place.view(new.dtype)
    if change.gap_bytes == 0:
        values[:] = new
    else:
        codes = np.frombuffer(data[size:], dtype=_INTEGERS[change.gap_bytes])
        values[np.cumsum(codes, dtype=np.int64)[codes != np.iinfo(_INTEGERS[change.gap_bytes]).max]] = new


def write_delta(
    path: Path, file: int, old: np.ndarray, new: np.ndarray, spans: Iterable[tuple[int, int, int]]
) -> list[Change]:
    """Write the difference between two data files to a delta file. Returns one `Change` per piece that differs.

    Args:
        path: The delta file.
        file: Index of the delta file in `Delta.files`.
        old: The whole old data file, [bytes] uint8.
        new: The whole new data file, [bytes] uint8.
        spans: A tuple per piece to compare: position of its first byte, number of bytes, and bytes per value.
    """
    changes: list[Change] = []
    left = iter(spans)
    with path.open("wb") as stream, ThreadPoolExecutor(DIGEST_THREADS) as threads:
        while group := list(islice(left, DIGEST_THREADS)):
            encoded = threads.map(lambda s: encode(old[s[0] : s[0] + s[1]], new[s[0] : s[0] + s[1]], s[2]), group)
            for (start, _, item_bytes), found in zip(group, encoded, strict=True):
                if found is not None:
                    num_values, gap_bytes, data = found
                    changes.append(
                        Change(
                            start=start,
                            item_bytes=item_bytes,
                            num_values=num_values,
                            gap_bytes=gap_bytes,
                            file=file,
                            at=stream.tell(),
                            num_bytes=len(data),
                        )
                    )
                    stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())  # make the bytes visible to other hosts that share the folder
    return changes


def apply_delta(manifest: Manifest, image: np.ndarray) -> None:
    """Turn the data file of a delta's base version into the data file of the new version, in place.

    Each changed piece is verified by its digest.

    Args:
        manifest: Manifest of the new version, which is a delta.
        image: The data file of the base version, [bytes] uint8. It is changed in place.

    Raises:
        FileNotFoundError: a newer version has replaced this version.
        WeightsError: a changed piece differs from the published one. The content of ``image`` is then undefined.
    """
    delta = manifest.delta
    assert delta is not None, "the manifest must be of a delta"
    pieces = {piece.start: piece for piece in manifest.pieces}
    paths = [Path(manifest.directory, name) for name in delta.files]

    with ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")) for path in paths]

        def is_right(change: Change) -> bool:
            piece = pieces[change.start]
            place = image[piece.start : piece.start + piece.num_bytes]
            try:
                decode(change, os.pread(files[change.file].fileno(), change.num_bytes, change.at), place)
            except (ValueError, IndexError):
                return False
            return digest_of(place) == piece.digest

        with ThreadPoolExecutor(DIGEST_THREADS) as threads:
            rights = threads.map(is_right, delta.changes)
            wrong = [change for change, right in zip(delta.changes, rights, strict=True) if not right]
    if wrong:
        raise WeightsError(
            f"{paths[wrong[0].file]} does not turn policy version {delta.base.version} into the published version: "
            f"{len(wrong)} of {len(delta.changes)} changed pieces differ, the first begins at byte {wrong[0].start}"
        )
