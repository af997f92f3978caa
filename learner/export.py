"""Turn a checkpoint into a model that ``from_pretrained`` loads: ``python -m learner.export CHECKPOINT OUT``.

Reads the shards in one process, whatever ranks wrote them; neither a GPU nor a process group is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from .checkpoint import first_failure
from .checkpoint_folder import HUGGING_FACE, newest_checkpoint, read_progress
from .config import LoraConfig
from .lora import add_adapters, merged_weights
from .weights import copy_tokenizer, write_model

_PREFIX = "pretrained."


def export(checkpoint: Path, out: Path, *, dtype: str = "") -> Path:
    """Write the policy of a checkpoint in Hugging Face layout, adapters merged, with its tokenizer.

    Args:
        checkpoint: A checkpoint, or a folder of checkpoints, whose newest is taken.
        out: Created or replaced.
        dtype: Type of the weights written, such as ``bfloat16``; empty: the one that the learner computed in.

    Returns:
        The checkpoint that was written.

    Raises:
        ValueError: there is no checkpoint at the path, or a part of it is missing or broken.
    """
    source = newest_checkpoint(checkpoint) or checkpoint
    progress = read_progress(source)
    kind = getattr(torch, dtype or progress.dtype)
    folder = source / HUGGING_FACE
    if not (folder / "config.json").is_file():
        raise ValueError(f"{source} has no {HUGGING_FACE}/config.json, which says what the model is; name an older one")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if progress.lora:
        add_adapters(model, LoraConfig(**progress.lora))
    weights = merged_weights(model, _read(source, model))
    converted = revert_weight_conversion(model, {name: tensor.to(kind) for name, tensor in weights.items()})
    write_model(out, model, converted, kind)
    copy_tokenizer(str(folder), out)
    return source


def _read(checkpoint: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights, tied ones once and adapters beside them, in the float32 that they are trained in."""
    names = [name for name, _ in model.named_parameters()]
    empty = {_PREFIX + name: torch.empty(model.get_parameter(name).shape, dtype=torch.float32) for name in names}
    try:
        state_dict_loader.load({"model": empty}, checkpoint_id=checkpoint, no_dist=True)
    except CheckpointException as fault:
        raise ValueError(f"{checkpoint} could not be read: {first_failure(fault)}; name an older checkpoint") from None
    return {name.removeprefix(_PREFIX): tensor for name, tensor in empty.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m learner.export", description="Export a checkpoint's policy.")
    parser.add_argument("checkpoint", type=Path, help="such as .../checkpoints/v00000100, or the folder that holds it")
    parser.add_argument("out", type=Path, help="directory to write: config.json, model.safetensors, tokenizer")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="", help="default: as trained")
    options = parser.parse_args(arguments)
    try:
        source = export(options.checkpoint, options.out, dtype=options.dtype)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"wrote {source} to {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
