"""Saves and loads a learner group's model, optimizer, number of updates, policy version and random state.

Each rank writes its shards (torch.distributed.checkpoint), so a checkpoint can be loaded with other data-parallel and
sequence-parallel sizes. A save writes to a temporary folder and renames the folder at the end, so a crash leaves the
previous checkpoint intact.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.core.errors import CheckpointError, with_exit_status
from asyncrl.core.host import replace_folder
from asyncrl.single_controller.serialization import gather_values
from asyncrl.weights.layout import ModelLayout, Part
from asyncrl.weights.snapshot import DATA_FILE, WritableFile

from .checkpoint_digests import DigestingWriter, check_digests
from .checkpoint_folder import (
    HUGGING_FACE,
    SavedProgress,
    checkpoint_path,
    keep_newest,
    lineage_of,
    newest_checkpoint,
    partial_path,
    read_progress,
    unfinished_checkpoints,
    write_progress,
)
from .config import LoraConfig
from .fsdp import stored_buffers
from .lora import add_adapters, has_adapters
from .model_folder import copy_tokenizer, new_model_folder
from .model_shards import PretrainedShards
from .plain_reading import load_plain
from .trainer import Trainer

logger = logging.getLogger(__name__)

_PREFIX = "pretrained."


class ShardedCheckpointer:
    """Saves and loads the state of one trainer. All ranks call each method together.

    Args:
        trainer: The trainer to save and load.
        directory: Folder of the checkpoints, on a file system that all ranks share.
    """

    def __init__(self, trainer: Trainer, directory: str) -> None:
        self._trainer = trainer
        self._directory = Path(directory)
        # A background save needs its own process group, so that its collectives do not mix with those of training.
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=trainer.mesh.timeout))
        self._pending: Future[None] | None = None
        # The stager of torch.distributed.checkpoint (DCP) copies the state to the host.
        # On a GPU, all saves use one stager, because its page-locked memory takes longer to allocate than to fill.
        self._stager: DefaultStager | None = None
        what = f"a checkpoint under {self._directory} could not be written"
        self._unwritten = (what, "free space or repair the folder; the previous checkpoint is complete")

    def save(
        self,
        version: int,
        *,
        wait: bool = True,
        keep: int = -1,
        **saved: Any,
    ) -> Path:
        """Save the trainer's current state, and return the path of the checkpoint.

        Args:
            version: Policy version of the state.
            wait: If True, this method returns when the checkpoint is complete. If False, it returns when the state is
                copied to the host. A thread then writes the files. The next call of a method of this class waits for
                the thread.
            keep: Number of complete checkpoints to keep, including the newest; -1 removes none.
            saved: More fields of the checkpoint's `SavedProgress`: ``role``, ``run``, ``life`` and ``parts``.

        Raises:
            CheckpointError: this save, or the previous background save, failed.
        """
        self.finish()
        final = checkpoint_path(self._directory, version)
        self._together(lambda: self._begin(final, version, saved), *self._unwritten)
        partial = partial_path(final)
        random_state = partial / f"random_{dist.get_rank()}.pt"
        self._together(lambda: torch.save(_random_state(), random_state), *self._unwritten)
        if self._stager is None or self._trainer.mesh.device.type == "cpu":
            self._stager = _make_stager(self._trainer.mesh.device)
        written = state_dict_saver.async_save(
            self._state(),
            storage_writer=DigestingWriter(partial, dist.get_rank(), [random_state]),
            process_group=self._group,
            async_stager=self._stager,
        )
        assert isinstance(written, Future)
        pending = self._pending = Future()
        written.add_done_callback(lambda done: self._conclude(done, final, pending, keep))
        if wait:
            self.finish()
        return final

    def finish(self) -> None:
        """Wait until the latest `save` is complete on disk. Raises `CheckpointError` if the save failed."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._together(pending.result, *self._unwritten)

    def latest(self) -> Path | None:
        """Wait for the background save. Then return the newest complete checkpoint of the folder, or None."""
        self.finish()
        return newest_checkpoint(self._directory)

    def load(self, path: Path) -> int:
        """Restore the trainer from the checkpoint at ``path``, and return the checkpoint's policy version.

        The ranks that saved the checkpoint may have had other data-parallel and sequence-parallel sizes. If both sizes
        are equal to the trainer's sizes, training continues with bit-identical results. Otherwise the random state is
        not restored.

        Raises:
            ValueError: there is no checkpoint at ``path``.
            CheckpointError: a file is missing, damaged, or from another model. The trainer may then hold parts of the
                checkpoint.
        """
        self.finish()
        progress, state, random_state = read_progress(path), self._state(), {}

        def check() -> None:
            if not check_digests(path, progress.num_ranks, rank=dist.get_rank(), num_ranks=dist.get_world_size()):
                logger.warning("%s has no digests of its files, so they are not checked", path)

        def read() -> None:
            load_plain(state, path, process_group=self._group)
            config = self._trainer.config
            if (progress.num_ranks, progress.sp_size) == (config.num_ranks, config.sp_size):
                saved = path / f"random_{dist.get_rank()}.pt"
                if saved.exists() or not saved.with_suffix(".pickle").exists():
                    random_state.update(torch.load(saved, weights_only=True))
                else:
                    logger.warning(
                        "%s has a pickled random state, which is not read; the run begins with a new random state", path
                    )

        remedy = "name an older checkpoint, or check that it has the same model and learner.lora options"
        unread = f"the checkpoint {path} could not be read"
        self._together(check, unread, remedy)
        self._together(read, unread, remedy)
        set_state_dict(
            self._trainer.head,
            self._trainer.optimizer.adamw,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._trainer.optimizer.num_updates = progress.num_updates
        if random_state:
            _set_random_state(random_state)
        return progress.version

    def _begin(self, final: Path, version: int, saved: Mapping[str, Any]) -> None:
        if dist.get_rank() != 0:
            return
        trainer, partial = self._trainer, partial_path(final)
        lineage = saved.get("run", {}).get("lineage", "")
        if final.exists() and (other := lineage_of(final)) != lineage:
            raise CheckpointError(f"{final} belongs to run {other!r}, and this is run {lineage!r}; name another folder")
        for left in unfinished_checkpoints(self._directory):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
        progress = SavedProgress(
            version=version,
            num_updates=trainer.optimizer.num_updates,
            num_ranks=trainer.config.num_ranks,
            sp_size=trainer.config.sp_size,
            dtype=str(trainer.compute_dtype).removeprefix("torch."),
            lora=asdict(trainer.config.lora) if has_adapters(trainer.head) else {},
            **saved,
        )
        write_progress(partial, progress)

    def _conclude(self, written: Future[Any], final: Path, pending: Future[None], keep: int) -> None:
        """Finish a save. The thread that writes the files calls this method."""
        try:
            written.result()
            if dist.get_rank() == 0:
                # This thread writes configuration and tokenizer, so that training does not wait for these files.
                described = partial_path(final) / HUGGING_FACE
                self._trainer.pretrained.config.save_pretrained(described)
                copy_tokenizer(self._trainer.model_path, described)
                replace_folder(partial_path(final), final)
                keep_newest(final, keep)
        except BaseException as error:  # noqa: BLE001 - `finish` later raises this error
            pending.set_exception(error)
        else:
            pending.set_result(None)

    def _together(self, action: Callable[[], Any], what: str, remedy: str) -> None:
        error = ""
        try:
            action()
        except CheckpointException as fault:  # torch raises this error, a BaseException, on all ranks
            error = first_failure(fault)
        except Exception as fault:  # noqa: BLE001 - the error is raised below, on all ranks
            error = _in_one_line(dist.get_rank(), fault)
        errors = gather_values(error, str, self._group)
        if any(errors):
            raise CheckpointError(f"{what}: {'; '.join(dict.fromkeys(filter(None, errors)))}; {remedy}")

    def _state(self) -> dict[str, Any]:
        """Return the sharded model and optimizer state.

        Before the first update, AdamW has no moments. torch's `get_state_dict` then creates moments and increases the
        step count. This method removes the new moments and resets the step count.
        """
        adamw = self._trainer.optimizer.adamw
        has_moments = bool(adamw.state)
        model, optimizer = get_state_dict(self._trainer.head, adamw)
        if not has_moments:
            for moments in adamw.state.values():
                moments["step"].zero_()
            adamw.state.clear()
        return {"model": model, "optimizer": optimizer}


def _make_stager(device: torch.device) -> DefaultStager:
    is_gpu = device.type == "cuda"
    options = StagingOptions(
        use_pinned_memory=is_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=is_gpu
    )
    return DefaultStager(options)


def first_failure(fault: CheckpointException) -> str:
    """Return, as one line, the error of the lowest rank that failed. Example: ``rank 0: FileNotFoundError: …``."""
    rank, (cause, _) = min(fault.failures.items())
    return _in_one_line(rank, cause)


def _in_one_line(rank: int, fault: BaseException) -> str:
    return f"rank {rank}: {type(fault).__name__}: {' '.join(str(fault).split())}"


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    state: Any = np.random.get_state()  # `get_state` returns a tuple here, but its annotation also allows a dict
    kind, keys, *rest = state
    plain = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)
    return {"python": random.getstate(), "numpy": plain, "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def export(checkpoint: Path, out: Path, *, dtype: str = "") -> Path:
    """Write the policy of a checkpoint in Hugging Face layout, with merged adapters and the tokenizer.

    This function does not need a GPU or a process group.

    Args:
        checkpoint: A checkpoint, or a folder of checkpoints. The newest checkpoint of a folder is exported.
        out: Folder to write.
        dtype: Dtype of the written weights, such as ``bfloat16``; empty means the dtype of the learner's computation.

    Returns:
        Path of the checkpoint that was read.

    Raises:
        ValueError: there is no checkpoint, or a file is missing or damaged.
    """
    source = newest_checkpoint(checkpoint) or checkpoint
    progress = read_progress(source)
    kind = getattr(torch, dtype or progress.dtype)
    folder = source / HUGGING_FACE
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{source} has no {HUGGING_FACE}/config.json, which describes the model; name another checkpoint"
        )
    try:
        check_digests(source, progress.num_ranks, names="*.distcp")
    except (CheckpointError, OSError) as fault:
        raise ValueError(f"{source} could not be read: {_in_one_line(0, fault)}; name an older checkpoint") from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if progress.lora:
        add_adapters(model, LoraConfig(**progress.lora))
    shards = PretrainedShards(model, kind)
    layout = ModelLayout(shards)
    with new_model_folder(out) as partial:
        file = WritableFile(partial / DATA_FILE, layout.num_bytes, [], is_alone=True)
        layout.fill(file.data, lambda names: _read(source, model, names))
        file.sync()
        file.close()
        shards.describe(partial, Part.whole)
        copy_tokenizer(str(folder), partial)
    return source


def _read(checkpoint: Path, model: PreTrainedModel, names: Sequence[str]) -> dict[str, Tensor]:
    buffers = stored_buffers(model)
    empty = {
        _PREFIX + name: torch.empty_like(buffers[name], device="cpu")
        if name in buffers
        else torch.empty(model.get_parameter(name).shape, dtype=torch.float32)
        for name in names
    }
    try:
        load_plain({"model": empty}, checkpoint, no_dist=True)
    except CheckpointException as fault:
        raise ValueError(f"{checkpoint} could not be read: {first_failure(fault)}; name an older checkpoint") from None
    return {name.removeprefix(_PREFIX): tensor for name, tensor in empty.items()}


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``asyncrl export`` and return its exit status.

    ``arguments`` are the command's arguments; None means the arguments of the process.
    """
    parser = argparse.ArgumentParser(prog="asyncrl export", description="Export a checkpoint's policy.")
    parser.add_argument("checkpoint", type=Path, help="such as .../checkpoints/v00000100, or the folder that holds it")
    parser.add_argument("out", type=Path, help="directory to write: config.json, model.safetensors, tokenizer")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="", help="default: as trained")
    options = parser.parse_args(arguments)
    source = export(options.checkpoint, options.out, dtype=options.dtype)
    sys.stdout.write(f"wrote {source} to {options.out}\n")
    return 0
