"""Reads checkpoints of torch.distributed.checkpoint (DCP) without running code from the checkpoint.

DCP would unpickle the metadata and all values other than tensors. This module allows only classes that DCP writes, and
types that ``torch.load(weights_only=True)`` allows.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    _DCP + "metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    _DCP + "filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}
_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}


def load_plain(state: dict[str, Any], path: Path, *, process_group: Any = None, no_dist: bool = False) -> None:
    """Load the checkpoint at ``path`` into the tensors of ``state``, in place, without running code of the checkpoint.

    ``process_group`` and ``no_dist`` have the same meaning as in DCP's ``state_dict_loader.load``. Raises
    `CheckpointException` if a file is missing, damaged, or contains code.
    """
    state_dict_loader.load(
        state,
        storage_reader=_PlainReader(path),
        planner=_PlainPlanner(),
        process_group=process_group,
        no_dist=no_dist,
    )


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if name in _ALLOWED.get(module, ()) or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"the checkpoint's metadata refers to {module}.{name}, which torch.distributed.checkpoint does not write; "
            "loading the metadata could run code; take a checkpoint from a source that you trust"
        )


def _memory_format(kind: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """Replace ``getattr`` in pickled metadata. Python 3.11.0 to 3.11.3 pickles enum members as calls of ``getattr``."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(
            f"the checkpoint's metadata calls getattr({kind!r:.80}, {name!r:.80}), which torch.distributed.checkpoint "
            "does not write; take a checkpoint from a source that you trust"
        )
    return kind[name]


class _PlainReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _PlainPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        # ``weights_only`` raises an error if loading the value would run code.
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
