"""The policy that a run starts from: fine-tuned before training, and reused for the same settings only.

The warm start is ``asyncrl sft`` in a process of its own, as a user would run it; the controller's process relays its
lines, waits for each under a deadline, and for the one that names the policy that it has written. On the CPU the
process starts while the other parts of the run start. On a GPU it starts when Ray has reserved one for it.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import sys
import threading
from asyncio.subprocess import Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.core.errors import DeadlineError, WorkerDiedError
from asyncrl.core.visible_gpus import NO_GPUS

_COMMAND = ("-m", "asyncrl", "sft")
_END_TIMEOUT_S = 30.0
RESULT = "sft.json"
"""In the policy's folder: ``settings`` (their digest), ``steps``, ``accuracy`` and ``val_loss``."""


def warm_start_path(config: RunConfig) -> Path:
    """Where the fine-tuned policy of these settings lies: under ``sft.output_path``, or by the settings' digest."""
    if config.sft.output_path:
        return Path(config.sft.output_path).expanduser().resolve()
    return Path(config.output_dir, config.experiment, "sft", settings_digest(config)).resolve()


def policy_path(config: RunConfig) -> Path:
    """Where the policy lies that training starts from, once it is fine-tuned where ``sft.enabled``."""
    return warm_start_path(config) if config.sft.enabled else Path(config.model.path)


def needs_fine_tuning(config: RunConfig) -> bool:
    """Whether the policy that training starts from is still to be made. Raises as `finished_warm_start` does."""
    return config.sft.enabled and finished_warm_start(config) is None


def finished_warm_start(config: RunConfig) -> dict[str, Any] | None:
    """What is known of the fine-tuned policy of these settings; None where it is still to be made.

    Raises:
        ValueError: ``sft.output_path`` holds something else, or a policy of other settings.
    """
    folder = warm_start_path(config)
    result = json.loads((folder / RESULT).read_text()) if (folder / RESULT).is_file() else None
    if result is not None and result.get("settings") == settings_digest(config):
        return result
    if not config.sft.output_path or not folder.exists() or not any(folder.iterdir()):
        return None
    what = "something else" if result is None else f"a policy of other settings ({result.get('settings')})"
    raise ValueError(
        f"sft.output_path={config.sft.output_path} holds {what}, expected an empty directory or a policy of these "
        f"settings ({settings_digest(config)}); name another path, or remove it"
    )


def write_warm_start(config: RunConfig, result: dict[str, Any], write_policy: Callable[[Path], object]) -> Path:
    """Make the policy's folder, whole or not at all.

    Args:
        config: The run.
        result: Goes into `RESULT`, with the settings' digest.
        write_policy: Writes model and tokenizer into a directory that it makes.

    Returns:
        The folder.
    """
    folder = warm_start_path(config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        write_policy(fresh)
        (fresh / RESULT).write_text(json.dumps({"settings": settings_digest(config), **result}) + "\n")
        finished_warm_start(config)  # refuses once more what must not be replaced
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def settings_digest(config: RunConfig) -> str:
    """Digest of every option and file that a fine-tuned policy depends on. Example: ``72f9de132f03``."""
    optimizer = asdict(config.learner.optimizer)
    own = {"output_path", "enabled", "progress_timeout_s", "train_files", "val_files"}
    settings = {
        "sft": {name: value for name, value in asdict(config.sft).items() if name not in own},
        "optimizer": {name: optimizer[name] for name in ("betas", "eps", "clip_grad_norm")},
        "dtype": config.learner.dtype,
        "seed": config.seed,
        "model": _digest(
            [*sorted(Path(config.model.path).glob("*.safetensors")), Path(config.model.path, "config.json")]
        ),
        "data": [_digest([Path(name)]) for name in (*config.sft.train_files, *config.sft.val_files)],
        "evaluation": _evaluation_settings(config),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _evaluation_settings(config: RunConfig) -> dict[str, Any]:
    """What accuracy, and with it an early stop, depends on."""
    if not config.sft.eval_prompts:
        return {}
    data = {name: value for name, value in asdict(config.data).items() if not name.endswith("_files")}
    return {
        "files": [_digest([Path(name)]) for name in config.data.eval_files],
        "data": data,
        "reward": config.rollout_fleet.rewards or config.rollout_fleet.reward,
        "max_new_tokens": config.rollout_fleet.sampling.max_new_tokens,
    }


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.expanduser().read_bytes() if file.expanduser().is_file() else b"absent")
    return digest.hexdigest()


class WarmStart:
    """The policy that a run starts from, made by one process that begins once its device is known.

    Args:
        warm_start: Makes the policy; takes the run, and ``visible_devices`` as in the function `warm_start`.
    """

    def __init__(self, warm_start: Callable[..., Coroutine[Any, Any, Path]]) -> None:
        self._warm_start = warm_start
        self._task: asyncio.Task[Path] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._task is not None

    @property
    def is_done(self) -> bool:
        """Whether `policy` answers at once."""
        return self._task is not None and self._task.done()

    def begin(self, config: RunConfig, visible_devices: str = "") -> None:
        """Start the process on these devices, in the notation of ``CUDA_VISIBLE_DEVICES``; none: on the CPU."""
        if self._task is not None:
            raise RuntimeError("the warm start has begun already; begin it once")
        self._task = asyncio.create_task(self._warm_start(config, visible_devices=visible_devices))

    async def policy(self) -> Path:
        """Wait for the policy's directory. Raises as `warm_start` does."""
        if self._task is None:
            raise RuntimeError("the warm start has not begun; call begin first")
        return await asyncio.shield(self._task)

    async def stop(self) -> None:
        """End the process, if it runs."""
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
    """Return the directory of the policy that training starts from: fine-tuned where ``sft.enabled``.

    Args:
        config: The run, with its assets.
        overrides: The command line it was composed from; the warm start composes the same.
        log_path: The warm start's log.
        say: Shows the user a line.
        visible_devices: The GPUs that the process sees, in the notation of ``CUDA_VISIBLE_DEVICES``; empty: none.

    Raises:
        WorkerDiedError: the warm start failed; the message ends with its last lines.
    """
    policy = policy_path(config)
    if not config.sft.enabled:
        return policy
    if (known := finished_warm_start(config)) is None:
        async with _lock(policy, say):
            known = finished_warm_start(config)  # another run may have made it while this one waited
            if known is None:
                command = [sys.executable, *_COMMAND, *overrides]
                devices = {"CUDA_VISIBLE_DEVICES": visible_devices} if visible_devices else NO_GPUS
                process = await _started(command, log_path, devices)
                await _relay(process, log_path, config.sft.progress_timeout_s, say, policy)
                return policy
    measured = [f"{name} {known[name]:.3f}" for name in ("accuracy", "val_loss") if known[name] is not None]
    say(f"warm start: reusing {policy} ({', '.join(measured)})")
    return policy


@asynccontextmanager
async def _lock(policy: Path, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Let one run at a time make the policy at this path; the kernel frees the lock of a run that dies."""
    policy.parent.mkdir(parents=True, exist_ok=True)
    with policy.with_name(f".{policy.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"warm start: another run makes {policy}; waiting for it")
            loop, locked = asyncio.get_running_loop(), asyncio.Event()

            def wait() -> None:
                fcntl.flock(file, fcntl.LOCK_EX)
                with suppress(RuntimeError):  # this run has ended meanwhile
                    loop.call_soon_threadsafe(locked.set)

            # A daemon: a run that is cancelled meanwhile does not wait for the other one.
            threading.Thread(target=wait, daemon=True).start()
            await locked.wait()
        except OSError as error:  # some network file systems have no locks
            say(f"warm start: {policy.parent} has no locks ({error.strerror}); another run may make the same policy")
        yield


def _scratch(log_path: Path) -> Path:
    """Folder for the temporary files of the warm start; `_relay` removes it, since a killed process cannot."""
    return log_path.with_name("sft-scratch")


async def _started(command: Sequence[str], log_path: Path, devices: Mapping[str, str]) -> Process:
    """Start the warm start in an environment with ``devices``."""
    scratch = _scratch(log_path)
    scratch.mkdir(exist_ok=True)
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch), **devices},
    )


async def _relay(
    process: Process, log_path: Path, progress_timeout_s: float, say: Callable[[str], None], policy: Path
) -> None:
    """Relay the lines of the warm start until it has written ``policy``; its process exits a second later."""
    lines: deque[str] = deque(maxlen=20)
    assert process.stdout is not None
    is_written = False
    try:
        with log_path.open("w") as log:
            while not is_written and (line := await _next_line(process.stdout, progress_timeout_s, log_path)):
                log.write(line)
                lines.append(line.rstrip())
                if line.startswith("sft: "):
                    say("warm start: " + line.removeprefix("sft: ").rstrip())
                    is_written = (policy / RESULT).is_file()
    finally:
        if process.stdout.at_eof():  # it has said its last word: let it end
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
        with suppress(ProcessLookupError):  # it has ended, which is what is wanted
            process.kill()
        status = await process.wait()
        shutil.rmtree(_scratch(log_path), ignore_errors=True)
    if status != 0 and not is_written:
        raise WorkerDiedError(
            f"the warm start (python -m asyncrl sft) ended with status {status}; its last lines, of {log_path}:\n"
            + "\n".join(lines)
        )


async def _next_line(output: asyncio.StreamReader, timeout_s: float, log_path: Path) -> str:
    """The next line with its end; empty at the end of the output.

    Raises:
        DeadlineError: there was none in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return (await output.readline()).decode(errors="replace")
    except TimeoutError:
        raise DeadlineError(
            f"the warm start (python -m asyncrl sft) said nothing for {timeout_s:g} s; look into {log_path}, lower "
            "sft.eval_every, or raise sft.progress_timeout_s"
        ) from None
