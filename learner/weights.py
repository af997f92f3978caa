"""The learner's side of a weight publish: whole weights on rank 0, written once, in Hugging Face layout, atomically."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.protocol.checksums import weight_checksums
from asyncrl.protocol.types import WeightSnapshot

from .fsdp import whole_tensors
from .lora import merged_weights
from .packed_model import PackedModel

_SNAPSHOT = re.compile(r"v(\d{8})")


def gather_weights(trainer: PackedModel) -> dict[str, Tensor] | None:
    """Collect the whole weights of a plain or sharded model. A collective: every rank calls it.

    Returns:
        On rank 0, checkpoint name to CPU tensor in the computing type, tied tensors once and adapters merged; None on
        the others.
    """
    is_first = trainer.mesh.rank == 0
    weights: dict[str, Tensor] = {}
    for name, tensor in whole_tensors(trainer.head):
        if is_first:
            whole = tensor.to(device="cpu", dtype=trainer.compute_dtype, copy=True)
            weights[name.removeprefix("pretrained.")] = whole
    if not is_first:
        return None
    return revert_weight_conversion(trainer.pretrained, merged_weights(trainer.pretrained, weights))


def write_model(directory: Path, model: PreTrainedModel, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write a model that `from_pretrained` and the engines load; the directory appears whole or not at all.

    A directory that is there already is replaced. ``weights`` maps checkpoint names to CPU tensors; ``dtype`` is the
    type named in the configuration, which is the model's.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    partial.chmod(0o755)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, partial / "model.safetensors", {"format": "pt"}
    )
    was, model.config.dtype = model.config.dtype, dtype
    model.config.save_pretrained(partial)
    model.config.dtype = was
    if model.generation_config is not None:
        model.generation_config.save_pretrained(partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def copy_tokenizer(source: str, directory: Path) -> None:
    """Copy the tokenizer's files, whatever its kind, from one model directory to another."""
    for file in sorted(Path(source).iterdir()):
        known = file.name.startswith(
            ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
        )
        if file.is_file() and (known or file.suffix == ".jinja" or file.name.endswith("tokenizer.py")):
            shutil.copy2(file, directory / file.name)


def save_policy(trainer: PackedModel, directory: str) -> None:
    """Write model and tokenizer so that ``from_pretrained`` loads both. A collective: every rank calls it.

    The directory is created or replaced; the tokenizer comes from the one that the model was loaded from.
    """
    weights = gather_weights(trainer)
    if weights is not None:
        write_model(Path(directory), trainer.pretrained, weights, trainer.compute_dtype)
        copy_tokenizer(trainer.model_path, Path(directory))


class SnapshotWriter:
    """Publishes weight versions under one directory and keeps the last few.

    Args:
        directory: Holds ``v00000012/`` for version 12; readable by every engine of the host.
        keep: Snapshots kept, the new one included; -1 keeps all. An engine must have loaded a version, or a newer
            one, before ``keep`` newer ones are written.
        checksums: Digest every tensor, so that engines can verify what they loaded.
    """

    def __init__(self, directory: str, *, keep: int, checksums: bool = True) -> None:
        self._directory = Path(directory)
        self._keep = keep
        self._checksums = checksums

    def write(self, version: int, trainer: PackedModel) -> WeightSnapshot:
        """Gather and write one version, the learner steps contained in the weights; returns the snapshot.

        A collective; only rank 0's snapshot has checksums.
        """
        path = self._directory / f"v{version:08d}"
        weights = gather_weights(trainer)
        if weights is None:
            return WeightSnapshot(version=version, path=str(path))
        write_model(path, trainer.pretrained, weights, trainer.compute_dtype)
        snapshots = sorted(path for path in self._directory.iterdir() if _SNAPSHOT.fullmatch(path.name))
        for old in snapshots[: -self._keep] if self._keep > 0 else []:
            shutil.rmtree(old)
        checksums = weight_checksums(weights) if self._checksums else {}
        return WeightSnapshot(version=version, path=str(path), checksums=checksums)
