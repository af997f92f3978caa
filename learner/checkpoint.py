"""Checkpoints of a learner group: model, optimizer, schedule position, policy version and random state.

Each rank writes its shards (torch.distributed.checkpoint), so a checkpoint loads onto another dp × sp. It is written
beside its final place and renamed when it is whole: a crash while saving leaves the one before. Saving may run in the
background; the next save, a load and `finish` wait for it.
"""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .trainer import PolicyTrainer

_NAME = re.compile(r"v(\d{8})")


class Checkpointer:
    """Saves and loads one trainer. Every method is a collective: all ranks call it together.

    Args:
        trainer: What is saved.
        directory: Holds ``v00000012/`` for policy version 12; on a file system that all ranks share.
        keep: Checkpoints kept, the newest included; -1 keeps all.
    """

    def __init__(self, trainer: PolicyTrainer, directory: str, *, keep: int = 2) -> None:
        self._trainer = trainer
        self._directory = Path(directory)
        self._keep = keep
        # Collectives of a save in the background must not meet those of training: they have their own group.
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        self._pending: tuple[Future[Any], Path] | None = None

    def save(self, version: int, *, wait: bool = True) -> Path:
        """Save the trainer as it is now.

        Args:
            version: Learner steps contained in the weights.
            wait: Return when the checkpoint is whole; otherwise when its content is copied to the host.

        Returns:
            Where the checkpoint is, or will be.
        """
        self.finish()
        final = self._directory / f"v{version:08d}"
        partial = final.with_name(f".{final.name}.partial")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            progress = {"version": version, "num_updates": self._trainer.optimizer.num_updates}
            (partial / "progress.json").write_text(json.dumps(progress))
        dist.barrier(self._group)
        (partial / f"random_{dist.get_rank()}.pickle").write_bytes(pickle.dumps(_random_state()))
        state = _copied(self._state())
        saving = state_dict_saver.async_save(state, checkpoint_id=partial, process_group=self._group)
        assert isinstance(saving, Future)
        self._pending = (saving, final)
        if wait:
            self.finish()
        return final

    def finish(self) -> None:
        """Wait for the save in the background, put it in its place and remove old ones; raises what it raised."""
        if self._pending is None:
            return
        (saving, final), self._pending = self._pending, None
        saving.result()
        dist.barrier(self._group)
        if dist.get_rank() == 0:
            _replace(final, final.with_name(f".{final.name}.partial"))
            for path in _complete(self._directory)[: -self._keep] if self._keep > 0 else []:
                shutil.rmtree(path)
        dist.barrier(self._group)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        self.finish()
        paths = _complete(self._directory)
        return paths[-1] if paths else None

    def load(self, path: Path) -> int:
        """Restore the trainer, whatever dp × sp the checkpoint was saved from.

        On the layout it was saved from, a run continues bit for bit; on another one the random state starts anew.

        Args:
            path: A checkpoint's directory.

        Returns:
            The policy version in it.

        Raises:
            ValueError: there is no checkpoint at the path.
        """
        self.finish()
        if not (path / "progress.json").is_file():
            raise ValueError(f"no checkpoint at {str(path)!r}: it lacks progress.json; latest() names the newest")
        state = self._state()
        state_dict_loader.load(state, checkpoint_id=path, process_group=self._group)
        set_state_dict(
            self._trainer.model,
            self._trainer.optimizer.adamw,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        progress = json.loads((path / "progress.json").read_text())
        self._trainer.optimizer.num_updates = progress["num_updates"]
        if len(list(path.glob("random_*.pickle"))) == dist.get_world_size():
            _set_random_state(pickle.loads((path / f"random_{dist.get_rank()}.pickle").read_bytes()))
        return progress["version"]

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._trainer.model, self._trainer.optimizer.adamw)
        return {"model": model, "optimizer": optimizer}


def _replace(final: Path, partial: Path) -> None:
    """Put a directory in its place; one of the same version is there until the new one is."""
    before = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(before, ignore_errors=True)
    if final.exists():
        final.rename(before)
    partial.rename(final)
    shutil.rmtree(before, ignore_errors=True)


def _complete(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in directory.glob("v*") if _NAME.fullmatch(path.name))


def _copied(state: Any) -> Any:
    """The state with its own memory: training goes on while it is written."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
