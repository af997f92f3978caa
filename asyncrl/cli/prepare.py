"""What a run needs on disk: the quickstart's assets, and a warm-started policy.

Both are reused when they were made from the same settings. The warm start is `asyncrl.sft` in a process of its own, as
a user would run it; this process relays its lines, waits for each under a deadline, and for its exit.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from asyncrl.cli.quickstart import make_assets
from asyncrl.config import RunConfig
from asyncrl.data.prompts import PromptStream, load_eval_prompts
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.protocol.errors import DeadlineError, WorkerDiedError
from asyncrl.protocol.types import Prompt
from asyncrl.sft.warm_start import finished_warm_start, warm_start_path

_COMMAND = ("-m", "asyncrl.sft")
_END_TIMEOUT_S = 30.0


def with_quickstart_assets(config: RunConfig) -> RunConfig:
    """Make the quickstart's model and data where the experiment asks for them, and name them in the configuration."""
    if not config.quickstart:
        return config
    directory = Path(config.output_dir, config.experiment, "assets", f"seed-{config.seed}").resolve()
    assets = make_assets(directory, seed=config.seed)
    return replace(
        config,
        model=replace(config.model, path=str(assets.model)),
        data=replace(config.data, train_files=[str(assets.train)], eval_files=[str(assets.held_out)]),
        sft=replace(config.sft, train_files=[str(assets.demonstrations)]),
    )


def read_prompts(config: RunConfig) -> tuple[PromptStream, list[Prompt]]:
    """The prompts to train on, and the held-out ones, before anything is started for them.

    Raises:
        ValueError: a file, row or column is not as the options say, or a prompt is too long; the message names it.
    """
    tokenizer = load_tokenizer(config.model.path, chat_template=config.data.chat_template)
    prompts = PromptStream(config.data, tokenizer, seed=config.seed)
    return prompts, load_eval_prompts(config.data, tokenizer) if config.evaluation.enabled else []


async def warm_start(config: RunConfig, overrides: Sequence[str], log_path: Path, say: Callable[[str], None]) -> Path:
    """Return the directory of the policy that training starts from: fine-tuned where ``sft.enabled``.

    Args:
        config: The run, with its assets.
        overrides: The command line it was composed from; the warm start composes the same.
        log_path: The warm start's log.
        say: Shows the user a line.

    Raises:
        WorkerDiedError: the warm start failed; the message ends with its last lines.
    """
    if not config.sft.enabled:
        return Path(config.model.path)
    policy = warm_start_path(config)
    if (known := finished_warm_start(config)) is None:
        await _fine_tune(overrides, log_path, config.sft.progress_timeout_s, say)
        return policy
    measured = [f"{name} {known[name]:.3f}" for name in ("accuracy", "val_loss") if known[name] is not None]
    say(f"warm start: reusing {policy} ({', '.join(measured)})")
    return policy


async def _fine_tune(
    overrides: Sequence[str], log_path: Path, progress_timeout_s: float, say: Callable[[str], None]
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *_COMMAND,
        *overrides,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines: deque[str] = deque(maxlen=20)
    assert process.stdout is not None
    try:
        with log_path.open("w") as log:
            while line := await _next_line(process.stdout, progress_timeout_s, log_path):
                log.write(line)
                lines.append(line.rstrip())
                if line.startswith("sft: "):
                    say("warm start: " + line.removeprefix("sft: ").rstrip())
    finally:
        if process.stdout.at_eof():  # it has said its last word: let it end
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
        with suppress(ProcessLookupError):  # it has ended, which is what is wanted
            process.kill()
        status = await process.wait()
    if status != 0:
        raise WorkerDiedError(
            f"the warm start (python -m asyncrl.sft) ended with status {status}; its last lines, of {log_path}:\n"
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
            f"the warm start (python -m asyncrl.sft) said nothing for {timeout_s:g} s; look into {log_path}, lower "
            "sft.eval_every, or raise sft.progress_timeout_s"
        ) from None
