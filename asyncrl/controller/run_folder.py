"""Where a run writes: its folder under ``output_dir``, and its folder in shared memory."""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path

from asyncrl.cli.compose import dump_yaml
from asyncrl.config import RunConfig

_SHARED_MEMORY = Path("/dev/shm")


def make_run_dir(config: RunConfig) -> Path:
    """Make ``<output_dir>/<experiment>/<time>/`` with its logs folder and ``config.yaml``; returns its path."""
    base = Path(config.output_dir, config.experiment).resolve()
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"-{count}" for count in range(2, 100))):
        run_dir = base / (stamp + suffix)
        try:
            (run_dir / "logs").mkdir(parents=True)
        except FileExistsError:
            continue
        (run_dir / "config.yaml").write_text(dump_yaml(config))
        return run_dir
    raise FileExistsError(f"{base}/{stamp} and 98 siblings exist; start fewer runs a second")


def shared_folder(run_dir: Path) -> Path:
    """Where a run's weights are published in memory; follows from its folder, so that anyone can remove it."""
    return _SHARED_MEMORY / f"asyncrl-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]}"


def snapshot_folder(config: RunConfig, run_dir: Path) -> Path:
    """Make the folder of published weights: in memory, where there is room and not all are kept, else in the run's own.

    The run removes the one in memory, and its supervisor where the run cannot.
    """
    in_memory = config.learner.keep_snapshots != -1 and _SHARED_MEMORY.is_dir() and _fits_in_memory(config)
    folder = shared_folder(run_dir) if in_memory else run_dir / "snapshots"
    folder.mkdir(mode=0o700)
    return folder


def _fits_in_memory(config: RunConfig) -> bool:
    snapshot_bytes = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    num_kept = max(config.learner.keep_snapshots, config.buffer.max_lag + 2) + 1
    return shutil.disk_usage(_SHARED_MEMORY).free > 2 * num_kept * snapshot_bytes
