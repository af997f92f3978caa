"""Writes a sharded model as a folder in Hugging Face layout.

Each rank sends its shards to rank 0, which writes them to one file. No rank holds the whole model in memory.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from asyncrl.core.errors import WeightsError
from asyncrl.weights.layout import ModelLayout, Part, in_file
from asyncrl.weights.snapshot import BUCKET_BYTES, DATA_FILE, WritableFile

from .model_shards import PretrainedShards
from .packed_model import PackedModel

Span = tuple[int, int]


def save_policy(model: PackedModel, directory: str) -> None:
    """Write model and tokenizer to a folder in Hugging Face layout. All ranks call this together.

    The files are written to a temporary folder, which replaces ``directory`` at the end. Adapters are merged. The
    tokenizer comes from the directory of the loaded model. Only rank 0 needs access to both directories.

    Raises:
        WeightsError: a rank cannot write its shards, for example for lack of space. All ranks raise this error.
    """
    shards = PretrainedShards.of(model)
    layout = ModelLayout(shards)
    try:
        if shards.rank > 0:
            _write_shards(layout, None, shards)
            return
        with new_model_folder(Path(directory)) as partial:
            _write_shards(layout, partial / DATA_FILE, shards)
            shards.describe(partial, Part.whole)
            copy_tokenizer(model.model_path, partial)
    finally:
        shards.close()


@contextmanager
def new_model_folder(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder. If the ``with`` block ends without an error, the folder then replaces ``directory``."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        partial.chmod(0o755)
        yield partial
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(layout: ModelLayout, path: Path | None, shards: PretrainedShards) -> None:
    files: list[WritableFile] = []
    try:
        error = _error_of(lambda: files.extend(_filled(layout, path)))
        if failed := [f"rank {rank}: {error}" for rank, error in enumerate(shards.gather(error, str)) if error]:
            raise WeightsError(f"the model cannot be written: {'; '.join(failed)}")
        data, spans = files[0].data, [(region.start, region.num_bytes) for region in layout.regions]
        if layout.num_raw_bytes:
            if shards.group is not None:
                layout.exchange(files[1].data)
            layout.compute(files[1].data, in_file(data))
            spans += [(stored.start, stored.num_bytes) for stored in layout.computed]
        if shards.group is not None:
            _send_to_first(data, spans, shards)
        if path is not None:
            layout.write_head(data)
            files[0].sync()
        del data
    finally:
        for file in files:
            file.close()


def _filled(layout: ModelLayout, path: Path | None) -> Iterator[WritableFile]:
    parts = [(path, layout.num_bytes, layout.regions)]
    if layout.num_raw_bytes:
        parts.append((None, layout.num_raw_bytes, layout.raw_regions))
    for place, num_bytes, regions in parts:
        file = WritableFile(place, num_bytes, regions, is_alone=place is not None)
        file.write(regions)
        yield file


def _send_to_first(data: Tensor, spans: list[Span], shards: PretrainedShards) -> None:
    for sender, theirs in enumerate(shards.gather(spans, list[Span])):
        for start, num_bytes in theirs:
            for at in range(start, start + num_bytes, BUCKET_BYTES):
                bucket = data[at : min(at + BUCKET_BYTES, start + num_bytes)]
                if shards.rank == sender != 0:
                    dist.send(bucket, group_dst=0, group=shards.group)
                elif shards.rank == 0 != sender:
                    dist.recv(bucket, group_src=sender, group=shards.group)


def _error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the caller raises the error on every rank
        return f"{type(error).__name__}: {error}"
    return ""


def copy_tokenizer(source: str, directory: Path) -> None:
    """Copy the tokenizer's files from one model directory to another."""
    for file in sorted(Path(source).iterdir()):
        known = file.name.startswith(
            ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
        )
        if file.is_file() and (known or file.suffix == ".jinja" or file.name.endswith("tokenizer.py")):
            shutil.copy2(file, directory / file.name)
