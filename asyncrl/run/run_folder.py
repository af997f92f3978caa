"""Where a run writes: its folder under ``output_dir``, its checkpoints, and its folder in shared memory.

Loads no Ray and no torch: the supervisor's process uses it too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import RunConfig, Transport
from asyncrl.core.host import FOLDER_MODE, make_private_folder

SHARED_MEMORY = Path("/dev/shm")
_SHARED_PREFIX = "asyncrl-run-"
_FOLDER_ITSELF = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_VERSION = re.compile(r"v\d{8,}")


def make_run_dir(config: RunConfig, config_yaml: str) -> Path:
    """Make the folder of a run, with ``logs/`` and ``config.yaml``, the resolved configuration.

    The folder is ``run_dir``, or ``<output_dir>/<experiment>/<time>/``.
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
    raise FileExistsError(f"{base}/{stamp} and 98 siblings exist; start fewer runs per second")


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """Where the groups of a run write.

    Attributes:
        logs: One log per process.
        snapshots: Published weights; readable by every engine of the host.
        staging: Where engines keep images of the weights; in the memory of their host.
        samples: Decoded samples for reading.
        trajectories: Consumed trajectories; None records none.
        tokens: A few of them for reading, token by token, with the learner's log-probs.
        checkpoints: Checkpoints of the learner.
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
        """The paths of a run in ``run_dir``; makes the folder of published weights."""
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
        """Where a run in ``run_dir`` saves checkpoints."""
        directory = config.checkpoint.directory
        return Path(directory).resolve() if directory else run_dir / "checkpoints"


def has_trained(run_dir: Path) -> bool:
    """Whether a learner step is done, so that there is a policy to keep."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def shared_folder(run_dir: Path) -> Path:
    """Where a run publishes its weights in memory; follows from ``run_dir``, so that anyone can remove it."""
    return SHARED_MEMORY / f"{_SHARED_PREFIX}{hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]}"


def hold_shared_folder(run_dir: Path) -> int | None:
    """Make the run's folder in shared memory, and lock it until this process and all forked from it have ended.

    The lock tells other runs that the folder is in use; see `sweep_shared_memory`. What a killed run in the same
    ``run_dir`` has left is removed first.

    Returns:
        The descriptor that holds the lock; None where shared memory cannot be written.

    Raises:
        FileExistsError: the folder is there already and is in use, or is not a folder of this user.
    """
    folder = shared_folder(run_dir)
    while True:
        try:
            folder.mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            if _is_swept(folder):
                continue
            shutil.rmtree(run_dir)  # nothing was started
            raise FileExistsError(
                f"{folder} must not exist before the run, another process made it; remove it, or change output_dir"
            ) from None
        except OSError:
            return None
        if (lock := _locked(folder)) is not None:
            return lock


def join_shared_folder(folder: Path) -> int:
    """Hold a run's folder in the shared memory of another host of the run, where it may be already.

    Args:
        folder: What `shared_folder` says.

    Returns:
        The descriptor that holds the lock, for as long as this process lives.

    Raises:
        NotPrivate: other users may write to it.
        OSError: it cannot be made.
    """
    while True:
        make_private_folder(folder)
        if (lock := _locked(folder)) is not None:
            return lock


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None if another run's sweep has removed the folder."""
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


def sweep_shared_memory() -> list[Path]:
    """Remove what runs of this user left in shared memory when all their processes were killed; returns the folders.

    A folder that a process holds locked is in use and stays, as do the folders of other users.
    """
    return [folder for folder in sorted(SHARED_MEMORY.glob(f"{_SHARED_PREFIX}*")) if _is_swept(folder)]


def _is_swept(folder: Path) -> bool:
    """Remove a folder of this user that nobody holds locked; whether that was done."""
    try:
        lock = os.open(folder, _FOLDER_ITSELF)
    except OSError:  # another user's, a link or a file, or removed meanwhile
        return False
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except OSError:  # a run holds it, or another sweep removes it
        return False
    finally:
        os.close(lock)
    return True


def _make_snapshot_folder(config: RunConfig, run_dir: Path) -> Path:
    """Make the folder of published weights, as ``weights.transport`` says.

    The run removes the one in memory, and its supervisor does where the run cannot. Raises as `check_memory` does.
    """
    check_memory(config)
    weights, missing = config.weights, _missing_memory(config, _num_versions(config))
    in_memory = weights.transport is not Transport.file and config.learner.keep_snapshots != -1 and not missing
    folder = shared_folder(run_dir) if in_memory else run_dir / "snapshots"
    if weights.directory:
        folder = Path(weights.directory).resolve() / shared_folder(run_dir).name
        folder.parent.mkdir(parents=True, exist_ok=True)
    if folder == shared_folder(run_dir):
        return make_private_folder(folder)  # the run holds it already, and the buffer's sockets may be there
    folder.mkdir(mode=FOLDER_MODE)
    return folder


def remove_published(snapshots: Path, *, after: int) -> None:
    """Remove weights of versions above ``after``, and what was not finished: their learner is gone.

    Engines have links to what they still read. Example: with ``after`` = 4, ``v00000005`` and ``.next-7`` go.
    """
    for path in snapshots.iterdir() if snapshots.is_dir() else ():
        if path.name.startswith(".next-") or (_VERSION.fullmatch(path.name) and int(path.name[1:]) > after):
            shutil.rmtree(path, ignore_errors=True)


def check_memory(config: RunConfig) -> None:
    """Raise `ValueError` if weights are to be published or kept in shared memory, which has no room for them."""
    weights = config.weights
    if weights.transport is Transport.shared_memory and (missing := _missing_memory(config, _num_versions(config))):
        raise ValueError(f"weights.transport=shared_memory needs room: {missing}; set weights.transport=file")
    if weights.keeps_images and (missing := _missing_memory(config, config.rollout_fleet.most_engines)):
        raise ValueError(
            f"each engine keeps an image of the weights in shared memory, and needs room: {missing}; free some, or set "
            "weights.transport=file with weights.full_every=1 and weights.copy_to_memory=false"
        )


def _missing_memory(config: RunConfig, num_versions: int) -> str:
    """Why so many versions do not fit into shared memory; empty where they do."""
    if not SHARED_MEMORY.is_dir():
        return f"there is no {SHARED_MEMORY}"
    size = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    wanted = 2 * size * num_versions
    free = shutil.disk_usage(SHARED_MEMORY).free
    return f"{SHARED_MEMORY} has {free >> 20} MiB free, {wanted >> 20} are wanted" if free <= wanted else ""


def _num_versions(config: RunConfig) -> int:
    """Most versions in shared memory, a delta counted as a full one.

    The learner keeps ``keep_snapshots``, those that engines may still be offered (the next evaluation holds one back
    while the learner goes on), and the full version before them; one is being written, and one an engine still reads.
    Adapters are small: where they are published alone, the frozen weights count.
    """
    full_every = config.weights.full_every
    num_kept = max(config.learner.keep_snapshots, config.buffer.max_lag + 2) + full_every - 1
    num_images = 2 + config.rollout_fleet.most_engines if config.weights.keeps_images else 0
    return (1 if config.publishes_adapters else num_kept + 2) + num_images
