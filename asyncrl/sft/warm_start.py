"""The warm start: fine-tunes the initial policy of a run, or reuses the policy of an earlier warm start.

A policy is reused only if it was made with equal settings.

The warm start is an ``asyncrl sft`` process. On the CPU, the process starts at once, in parallel with the start of the
run. On a GPU, it starts after Ray has reserved a GPU.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from asyncio.subprocess import Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.core.errors import DeadlineError, WorkerDiedError
from asyncrl.core.host import NO_GPUS

_COMMAND = ("-m", "asyncrl", "sft")
_MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Patterns of a model folder's files: weights, configuration, tokenizer and chat template."""
_END_TIMEOUT_S = 30.0
_LOCK_RETRY_S = 0.2
LINE_PREFIX = "sft: "
"""Beginning of each line of ``asyncrl sft`` that is meant for the user. A run shows these lines."""
RESULT = "sft.json"
"""JSON file in the policy's folder: ``settings`` (digest of the settings), ``steps``, ``accuracy`` and ``val_loss``."""


def warm_start_path(config: RunConfig) -> Path:
    """Return the folder of the fine-tuned policy: ``sft.output_path``, or a folder named after `settings_digest`."""
    if config.sft.output_path:
        return Path(config.sft.output_path).expanduser().resolve()
    return Path(config.output_dir, config.experiment, "sft", settings_digest(config)).resolve()


def policy_path(config: RunConfig) -> Path:
    """Return the folder of the initial policy: `warm_start_path` if ``sft.enabled``, else ``model.path``."""
    return warm_start_path(config) if config.sft.enabled else Path(config.model.path)


def needs_fine_tuning(config: RunConfig) -> bool:
    """Return whether the run must fine-tune a policy first.

    Raises the errors of `finished_warm_start` if ``sft.enabled``.
    """
    return config.sft.enabled and finished_warm_start(config) is None


def finished_warm_start(config: RunConfig) -> dict[str, Any] | None:
    """Return the content of `RESULT` if a policy that was made with the settings of ``config`` exists; otherwise None.

    Raises:
        ValueError: ``sft.output_path`` contains other files, or a policy that was made with other settings.
    """
    folder = warm_start_path(config)
    result = json.loads((folder / RESULT).read_text()) if (folder / RESULT).is_file() else None
    if result is not None and result.get("settings") == settings_digest(config):
        return result
    if not config.sft.output_path or not folder.exists() or not any(folder.iterdir()):
        return None
    got = "other files" if result is None else f"a policy of other settings ({result.get('settings')})"
    raise ValueError(
        f"sft.output_path={config.sft.output_path} must be an empty directory or hold a policy of these settings "
        f"({settings_digest(config)}), got {got}; choose another path, or remove the directory"
    )


def write_warm_start(config: RunConfig, result: dict[str, Any], write_policy: Callable[[Path], object]) -> Path:
    """Create the folder of the fine-tuned policy atomically, and return it.

    ``write_policy`` gets a path, and must make a folder with the policy at this path. The function writes ``result``
    and the digest of the settings into the file `RESULT`. Raises the errors of `finished_warm_start`.
    """
    folder = warm_start_path(config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        write_policy(fresh)
        (fresh / RESULT).write_text(json.dumps({"settings": settings_digest(config), **result}) + "\n")
        finished_warm_start(config)  # raises an error if sft.output_path holds another policy or other files
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def settings_digest(config: RunConfig) -> str:
    """Return a digest of the options and files that affect the fine-tuned policy, in 12 hex digits.

    The files are the base model with its tokenizer and chat template, and the data.
    """
    optimizer = asdict(config.learner.optimizer)
    own = {"output_path", "enabled", "progress_timeout_s", "train_files", "val_files"}
    settings = {
        "sft": {name: value for name, value in asdict(config.sft).items() if name not in own},
        "optimizer": {name: optimizer[name] for name in ("betas", "eps", "clip_grad_norm")},
        "dtype": config.learner.dtype,
        "seed": config.seed,
        "model": _digest(sorted(file for kind in _MODEL_FILES for file in Path(config.model.path).glob(kind))),
        "data": [_digest([Path(name)]) for name in (*config.sft.train_files, *config.sft.val_files)],
        "evaluation": _evaluation_settings(config),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _evaluation_settings(config: RunConfig) -> dict[str, Any]:
    """Return the options of evaluations and the digests of their files.

    These settings affect the fine-tuned policy, because an evaluation can stop fine-tuning early.
    """
    if not config.sft.eval_prompts:
        return {}
    data = {name: value for name, value in asdict(config.data).items() if not name.endswith("_files")}
    fleet = config.rollout_fleet
    more = {"rewards_by_source": fleet.rewards_by_source, "reward_options": fleet.reward_options}
    return {
        "files": [_digest([Path(name)]) for name in config.data.eval_files],
        "data": data,
        "reward": fleet.rewards or fleet.reward,
        **{name: options for name, options in more.items() if options},
        "max_new_tokens": config.rollout_fleet.sampling.max_new_tokens,
    }


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.expanduser().read_bytes() if file.expanduser().is_file() else b"absent")
    return digest.hexdigest()


class WarmStart:
    """The warm start of one run, as a background task."""

    def __init__(self, warm_start: Callable[..., Coroutine[Any, Any, Path]]) -> None:
        self._warm_start = warm_start
        self._task: asyncio.Task[Path] | None = None

    @property
    def has_begun(self) -> bool:
        """True if `begin` was called."""
        return self._task is not None

    @property
    def is_done(self) -> bool:
        """True if the warm start has ended. If True, `policy` does not wait."""
        return self._task is not None and self._task.done()

    def begin(self, config: RunConfig, visible_devices: str = "") -> None:
        """Start the warm start in the background.

        ``visible_devices`` names the GPUs, as in ``CUDA_VISIBLE_DEVICES``. An empty text means the CPU.
        """
        if self._task is not None:
            raise RuntimeError("the warm start has begun already; begin it once")
        self._task = asyncio.create_task(self._warm_start(config, visible_devices=visible_devices))

    async def policy(self) -> Path:
        """Wait for the warm start, and return the policy's directory. Raises the errors of `warm_start`."""
        if self._task is None:
            raise RuntimeError("the warm start has not begun; call begin first")
        return await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Cancel the warm start, and wait until its process has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def warm_start(
    config: RunConfig,
    overrides: Sequence[str],
    log_path: Path,
    say: Callable[[str], None],
    *,
    visible_devices: str = "",
) -> Path:
    """Return the directory of the run's initial policy.

    If ``sft.enabled``, fine-tune the policy first, or reuse a policy that was made with the same settings.
    ``overrides`` is the command line of the run. ``visible_devices`` names the GPUs for ``asyncrl sft``, as in
    ``CUDA_VISIBLE_DEVICES``. An empty text means the CPU. The output of ``asyncrl sft`` goes to ``log_path``.

    Raises:
        ValueError: ``sft.output_path`` contains other files, or a policy that was made with other settings.
        WorkerDiedError: ``asyncrl sft`` failed. The message ends with the last lines of its output.
        DeadlineError: this or another run's ``asyncrl sft`` made no progress for ``sft.progress_timeout_s``.
    """
    policy = policy_path(config)
    if not config.sft.enabled:
        return policy
    if (known := finished_warm_start(config)) is None:
        async with _lock(policy, config.sft.progress_timeout_s, say) as report_progress:
            known = finished_warm_start(config)  # another run may have made the policy before this run got the lock
            if known is None:
                devices = {"CUDA_VISIBLE_DEVICES": visible_devices} if visible_devices else NO_GPUS
                scratch = log_path.with_name("sft-scratch")
                scratch.mkdir(exist_ok=True)
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *_COMMAND, *overrides),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch), **devices},
                )
                try:
                    await _relay(process, config, log_path, say, report_progress)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)  # the process leaves its files here if it is killed
                return policy
    measured = [f"{name} {known[name]:.3f}" for name in ("accuracy", "val_loss") if known[name] is not None]
    say(f"warm start: reusing {policy} ({', '.join(measured)})")
    return policy


@asynccontextmanager
async def _lock(policy: Path, timeout_s: float, say: Callable[[str], None]) -> AsyncIterator[Callable[[], None]]:
    """Lock the policy's path, so that only one run at a time makes the policy. Yields a function that reports progress.

    Each report of progress sets the modification time of the lock file. Waiting runs check this modification time.

    Raises:
        DeadlineError: the run with the lock reported no progress for ``timeout_s`` seconds.
    """
    policy.parent.mkdir(parents=True, exist_ok=True)
    path = policy.with_name(f".{policy.name}.lock")
    with path.open("a+") as file:
        changed_ns, since_s = -1, 0.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if changed_ns == -1:
                    say(f"warm start: {_holder(path)} makes {policy}; waiting for it")
                if (now_ns := os.fstat(file.fileno()).st_mtime_ns) != changed_ns:
                    changed_ns, since_s = now_ns, time.monotonic()
                if time.monotonic() - since_s > timeout_s:
                    raise DeadlineError(
                        f"{_holder(path)} makes the warm start {policy} but made no progress for {timeout_s:g} s; stop "
                        "that run, name another sft.output_path, or raise sft.progress_timeout_s"
                    ) from None
                await asyncio.sleep(_LOCK_RETRY_S)
            except OSError as error:  # some network file systems do not support locks
                say(
                    f"warm start: {policy.parent} has no locks ({error.strerror}); another run may make the same policy"
                )
                break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield lambda: os.utime(path)


def _holder(lock: Path) -> str:
    process = lock.read_text(errors="replace")
    return f"another run ({process})" if process else "another run"


async def _relay(
    process: Process,
    config: RunConfig,
    log_path: Path,
    say: Callable[[str], None],
    report_progress: Callable[[], None],
) -> None:
    """Copy the output of the process ``asyncrl sft`` to the log until the process has written the policy.

    Then kill the process if it still runs.
    """
    result, timeout_s = policy_path(config) / RESULT, config.sft.progress_timeout_s
    lines: deque[str] = deque(maxlen=20)
    assert process.stdout is not None
    is_written = False
    try:
        with log_path.open("w") as log:
            while not is_written:
                async with asyncio.timeout(timeout_s):
                    line = (await process.stdout.readline()).decode(errors="replace")
                if not line:
                    break
                report_progress()
                log.write(line)
                lines.append(line.rstrip())
                if line.startswith(LINE_PREFIX):
                    say("warm start: " + line.removeprefix(LINE_PREFIX).rstrip())
                    is_written = result.is_file()
    except TimeoutError:
        raise DeadlineError(
            f"the warm start (python -m asyncrl sft) wrote no line for {timeout_s:g} s; look into {log_path}, lower "
            "sft.eval_every, or raise sft.progress_timeout_s"
        ) from None
    finally:
        if process.stdout.at_eof():  # wait for the process, because it closes its output shortly before it exits
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
        with suppress(ProcessLookupError):
            process.kill()
        status = await process.wait()
    if status != 0 and not is_written:
        raise WorkerDiedError(
            f"the warm start (python -m asyncrl sft) ended with status {status}; the last lines of {log_path}:\n"
            + "\n".join(lines)
        )
