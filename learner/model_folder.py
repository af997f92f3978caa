"""A model as a folder in Hugging Face layout, written by all ranks together: none of them ever holds the whole model.

Each rank copies its own shards and sends them to rank 0, which writes them into the file as they arrive. Only rank 0's
host needs the folder. A rank waits for the others under the deadline of the learner's collectives.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.core.errors import WeightsError

from .packed_model import PackedModel
from .plain_values import gather_values
from .weight_files import BUCKET_BYTES, DATA_FILE, WritableFile
from .weight_layout import ModelLayout, in_file, reshard

Span = tuple[int, int]
"""First byte in the file, and bytes."""


def save_policy(model: PackedModel, directory: str) -> None:
    """Write model and tokenizer so that ``from_pretrained`` loads both. A collective: every rank calls it.

    The directory is created or replaced, and appears whole or not at all; adapters are merged. The tokenizer comes from
    the directory that the model was loaded from.

    Raises:
        WeightsError: there is no room on a host, on every rank.
    """
    mesh = model.mesh
    reshard(model.head)
    layout = ModelLayout(model.pretrained, model.compute_dtype)
    group = None
    if mesh.num_ranks > 1:
        group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=mesh.timeout))
    try:
        if mesh.rank > 0:
            _write_shards(layout, None, group)
            return
        with new_model_folder(Path(directory)) as partial:
            _write_shards(layout, partial / DATA_FILE, group)
            write_description(partial, model.pretrained, model.compute_dtype)
            copy_tokenizer(model.model_path, partial)
    finally:
        if group is not None:
            dist.destroy_process_group(group)


@contextmanager
def new_model_folder(directory: Path) -> Iterator[Path]:
    """Yield a folder to write into, which takes the place of ``directory`` if the block ends well."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        partial.chmod(0o755)
        yield partial
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(layout: ModelLayout, path: Path | None, group: dist.ProcessGroup | None) -> None:
    """Write every rank's part into the file at ``path``, which rank 0 alone has."""
    files: list[WritableFile] = []
    try:
        error = _error_of(lambda: files.extend(_filled(layout, path)))
        errors = gather_values(error, str, group)
        if failed := [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]:
            raise WeightsError(f"the model cannot be written: {'; '.join(failed)}")
        data, spans = files[0].data, [(region.start, region.num_bytes) for region in layout.regions]
        if layout.num_raw_bytes:
            rank, num_ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
            if group is not None:
                layout.exchange(files[1].data, group)
            done = layout.compute(files[1].data, in_file(data), rank, num_ranks)
            spans += [(stored.start, stored.num_bytes) for stored in done]
        if group is not None:
            _send_to_first(data, spans, group)
        if path is not None:
            data[: len(layout.head)].copy_(torch.frombuffer(bytearray(layout.head), dtype=torch.uint8))
            files[0].sync()
        del data
    finally:
        for file in files:
            file.close()


def _filled(layout: ModelLayout, path: Path | None) -> Iterator[WritableFile]:
    """The data file, and the raw copy where tensors are to be computed, with this rank's shards."""
    parts = [(path, layout.num_bytes, layout.regions)]
    if layout.num_raw_bytes:
        parts.append((None, layout.num_raw_bytes, layout.raw_regions))
    for place, num_bytes, regions in parts:
        file = WritableFile(place, num_bytes, regions, is_alone=place is not None)
        file.write(regions)
        yield file


def _send_to_first(data: Tensor, spans: list[Span], group: dist.ProcessGroup) -> None:
    """Bring what the other ranks hold of the file to rank 0, a bucket at a time."""
    for sender, theirs in enumerate(gather_values(spans, list[Span], group)):
        for start, num_bytes in theirs:
            for at in range(start, start + num_bytes, BUCKET_BYTES):
                bucket = data[at : min(at + BUCKET_BYTES, start + num_bytes)]
                if dist.get_rank(group) == sender != 0:
                    dist.send(bucket, group_dst=0, group=group)
                elif dist.get_rank(group) == 0 != sender:
                    dist.recv(bucket, group_src=sender, group=group)


def _error_of(action: Callable[[], Any]) -> str:
    """What went wrong, for the other ranks to hear of; empty if nothing did."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - raised on every rank
        return f"{type(error).__name__}: {error}"
    return ""


def write_description(directory: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write the JSON files beside the weights; ``dtype`` is theirs, whatever the model's is."""
    config = copy.deepcopy(model.config)  # written in a thread while the model is used
    config.dtype = dtype
    config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def copy_tokenizer(source: str, directory: Path) -> None:
    """Copy the tokenizer's files, whatever its kind, from one model directory to another."""
    for file in sorted(Path(source).iterdir()):
        known = file.name.startswith(
            ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
        )
        if file.is_file() and (known or file.suffix == ".jinja" or file.name.endswith("tokenizer.py")):
            shutil.copy2(file, directory / file.name)
