"""The folders of a run: its folder under ``output_dir``, its checkpoints, and its folder in shared memory.

This module does not load Ray or torch, because the run's parent process uses the module too and must stay small.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import RunConfig, num_images
from asyncrl.core.host import FOLDER_MODE, make_private_folder
from asyncrl.weights.carriers import Transport

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_PROBE_BYTES = 32 << 20
_SHARED_PREFIX = "asyncrl-run-"
_FOLDER_ITSELF = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_VERSION = re.compile(r"v\d{8,}")


def make_run_dir(config: RunConfig, config_yaml: str) -> Path:
    """Make the folder of a run, and return its path.

    The folder has ``logs/`` and ``config.yaml`` with the text ``config_yaml``. The path is the option ``run_dir``, or
    ``<output_dir>/<experiment>/<time>/``.
    """
    if config.run_dir:
        run_dir = Path(config.run_dir).expanduser().resolve()
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(config_yaml)
        return run_dir
    base = Path(config.output_dir, config.experiment).resolve()
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"-{count}" for count in range(2, 100))):
        run_dir = base / (stamp + suffix)
        try:
            (run_dir / "logs").mkdir(parents=True)
        except FileExistsError:
            continue
        try:
            (run_dir / "config.yaml").write_text(config_yaml)
        except OSError as error:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise OSError(error.errno, error.strerror, str(run_dir / "config.yaml")) from error
        return run_dir
    raise FileExistsError(f"{base}/{stamp} and 98 folders of the same second exist; start fewer runs per second")


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """The folders to which the learner and the rollout workers write.

    Attributes:
        logs: One log file per process.
        snapshots: The policy versions that the learner has published.
        staging: Copies of weights for the engines, in shared memory if the host has shared memory.
        samples: Samples as text, for the user.
        trajectories: The trajectories that the learner has trained on; None if they are not recorded.
        tokens: A few trajectories as tokens, with the learner's log-probs, for the user.
        checkpoints: The checkpoints of the learner.
    """

    logs: Path
    snapshots: Path
    staging: Path
    samples: Path
    trajectories: Path | None
    tokens: Path
    checkpoints: Path

    @classmethod
    def of(cls, config: RunConfig, run_dir: Path) -> RunPaths:
        """Return the paths of a run in ``run_dir``. Also make the folder of published weights."""
        return cls(
            logs=run_dir / "logs",
            snapshots=_make_snapshot_folder(config, run_dir),
            staging=shared_folder(run_dir) if SHARED_MEMORY.is_dir() else run_dir / "staging",
            samples=run_dir / "samples",
            trajectories=run_dir / "trajectories" if config.record_trajectories else None,
            tokens=run_dir / "tokens",
            checkpoints=cls.checkpoints_of(config, run_dir),
        )

    @staticmethod
    def checkpoints_of(config: RunConfig, run_dir: Path) -> Path:
        """Return the folder in which a run in ``run_dir`` saves checkpoints."""
        directory = config.checkpoint.directory
        return Path(directory).resolve() if directory else run_dir / "checkpoints"


def has_begun_training(run_dir: Path) -> bool:
    """Return whether a run has begun to train. A training that gets a stop signal saves a checkpoint before it ends."""
    return (run_dir / "metrics.jsonl").is_file()


def shared_folder(run_dir: Path) -> Path:
    """Return the path of a run's folder in shared memory.

    The name is derived from ``run_dir``, so another process can find and remove the folder.
    """
    return SHARED_MEMORY / f"{_SHARED_PREFIX}{hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]}"


def hold_shared_folder(run_dir: Path) -> int | None:
    """Make the run's folder in shared memory, and lock it until this process and all its forks have ended.

    While the folder is locked, other runs do not remove it. If a killed run left a folder with this name, the function
    first removes that folder.

    Returns:
        The descriptor that holds the lock; None if shared memory cannot be written.

    Raises:
        FileExistsError: the folder is in use, or belongs to another user.
    """
    folder = shared_folder(run_dir)
    while True:
        try:
            folder.mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            if _is_swept(folder):
                continue
            shutil.rmtree(run_dir)  # the run has not started, so its folder on disk has no results
            raise FileExistsError(
                f"{folder} must not exist before the run, but another process made it; remove the folder, or change "
                "output_dir"
            ) from None
        except OSError:
            return None
        if (lock := _locked(folder)) is not None:
            return lock


def join_shared_folder(folder: Path) -> int:
    """Make and lock the run's folder in the shared memory of this host. The folder may exist.

    This function runs on hosts other than the controller's. The controller's host uses `hold_shared_folder`.

    Returns:
        The descriptor that holds the lock until this process ends.

    Raises:
        NotPrivate: other users may write to the folder.
        OSError: the folder cannot be made.
    """
    while True:
        make_private_folder(folder)
        if (lock := _locked(folder)) is not None:
            return lock


def _locked(folder: Path) -> int | None:
    """Lock a folder. Return the descriptor that holds the lock, or None if another run has removed the folder."""
    try:
        lock = os.open(folder, _FOLDER_ITSELF)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_SH)
    with suppress(FileNotFoundError):
        if folder.stat().st_ino == os.fstat(lock).st_ino:
            return lock
    os.close(lock)
    return None


def is_in_use(folder: Path) -> bool:
    """Return whether a process has locked a run's folder in shared memory. If so, the run has not ended."""
    try:
        lock = os.open(folder, _FOLDER_ITSELF)
    except OSError:  # the folder does not exist, or belongs to another user
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def sweep_shared_memory() -> list[Path]:
    """Remove folders of this user's killed runs from shared memory, and return their paths.

    Folders of killed runs are not locked.
    """
    return [folder for folder in sorted(SHARED_MEMORY.glob(f"{_SHARED_PREFIX}*")) if _is_swept(folder)]


def _is_swept(folder: Path) -> bool:
    """Remove a folder if it belongs to this user and is not locked. Return whether it was removed."""
    try:
        lock = os.open(folder, _FOLDER_ITSELF)
    except OSError:  # the path is not a folder, or it belongs to another user
        return False
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except OSError:  # the folder is locked, or another process removes it
        return False
    finally:
        os.close(lock)
    return True


def _make_snapshot_folder(config: RunConfig, run_dir: Path) -> Path:
    """Make the folder of published weights. Raises the errors of `check_memory`.

    If the folder is in shared memory, the run or its supervisor removes the folder at the end.
    """
    check_memory(config)
    weights, missing = config.weights, _missing_memory(config, _num_versions(config))
    folder = shared_folder(run_dir) if config.publishes_to_memory and not missing else run_dir / "snapshots"
    if weights.directory:
        folder = Path(weights.directory).resolve() / shared_folder(run_dir).name
        folder.parent.mkdir(parents=True, exist_ok=True)
    if folder == shared_folder(run_dir):
        return make_private_folder(folder)  # the run has made and locked this folder
    folder.mkdir(mode=FOLDER_MODE)
    if weights.transport is Transport.auto and missing:
        _warn_of_disk(folder, missing, weight_bytes(config))
    return folder


def _warn_of_disk(folder: Path, missing: str, num_bytes: int) -> None:
    with tempfile.TemporaryFile(dir=folder) as probe:
        began = time.monotonic()
        probe.write(os.urandom(_PROBE_BYTES))
        probe.flush()
        os.fsync(probe.fileno())
        seconds = (time.monotonic() - began) * num_bytes / _PROBE_BYTES
    logger.warning(
        "weights.transport=auto publishes to %s, because %s; one version of %d MB takes about %.1f s to write there. "
        "Make room (docker run --shm-size), or set weights.transport=file and weights.directory on a faster disk",
        folder,
        missing,
        num_bytes / 1e6,
        seconds,
    )


def remove_published(snapshots: Path, *, after: int) -> None:
    """Remove published weights from ``snapshots``: the versions above ``after``, and unfinished versions.

    The learner that published these versions has died. An engine can still read these files, because it has hard links
    to them. Example: ``after`` = 4 removes ``v00000005`` and ``.next-7``.
    """
    for path in snapshots.iterdir() if snapshots.is_dir() else ():
        if path.name.startswith(".next-") or (_VERSION.fullmatch(path.name) and int(path.name[1:]) > after):
            shutil.rmtree(path, ignore_errors=True)


def check_memory(config: RunConfig) -> None:
    """Check that shared memory has enough room for the weights. Raises `ValueError` if not."""
    weights = config.weights
    if weights.transport is Transport.shared_memory and (missing := _missing_memory(config, _num_versions(config))):
        raise ValueError(f"weights.transport=shared_memory needs room: {missing}; set weights.transport=file")
    if (images := num_images(config)) and (missing := _missing_memory(config, images)):
        raise ValueError(
            f"engines keep {images} images (complete copies) of the weights in shared memory, and need room: "
            f"{missing}; free shared memory, or set weights.transport=file with weights.full_every=1 and "
            "weights.copy_to_memory=false"
        )


def _missing_memory(config: RunConfig, num_versions: int) -> str:
    if not SHARED_MEMORY.is_dir():
        return f"{SHARED_MEMORY} does not exist"
    wanted = 2 * weight_bytes(config) * num_versions
    free = shutil.disk_usage(SHARED_MEMORY).free
    return f"{SHARED_MEMORY} has {free >> 20} MiB free and {wanted >> 20} MiB are needed" if free <= wanted else ""


def weight_bytes(config: RunConfig) -> int:
    """Return the total size of the model's safetensors files in bytes."""
    return sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))


def _num_versions(config: RunConfig) -> int:
    """Return the largest number of versions that are in shared memory at the same time. A delta counts as one version.

    These versions are:

    - ``keep_snapshots`` or ``max_lag + 2`` versions, the larger number, because engines may still load these versions;
    - up to ``full_every - 1`` older versions, which the oldest of these versions needs if it is a delta;
    - one version that the learner writes, and one version that an engine still reads.

    If hosts keep images (complete copies of the weights), the function adds the number of images plus two. With
    adapters, only the frozen weights count, because adapters are small.
    """
    full_every = config.weights.full_every
    num_kept = max(config.learner.keep_snapshots, config.buffer.max_lag + 2) + full_every - 1
    images = num_images(config)
    return (1 if config.publishes_adapters else num_kept + 2) + (2 + images if images else 0)
