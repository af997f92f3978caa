"""What a run needs on disk: the quickstart's assets, and a warm-started policy.

Both are reused when they were made from the same settings. The warm start is `asyncrl.sft` in a process of its own, as
a user would run it; this process waits for its exit and relays its lines.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from asyncrl.config import RunConfig
from asyncrl.data.prompts import PromptStream, load_eval_prompts
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.protocol.errors import WorkerDiedError
from asyncrl.protocol.types import Prompt
from asyncrl.quickstart import make_assets


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


def warm_start_path(config: RunConfig) -> Path:
    """Where the fine-tuned policy of these settings lies; other settings have another place."""
    if config.sft.output_path:
        return Path(config.sft.output_path).resolve()
    settings = {
        "sft": asdict(config.sft),
        "seed": config.seed,
        "model": _model_digest(Path(config.model.path)),
        "data": [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in config.sft.train_files],
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    return Path(config.output_dir, config.experiment, "sft", digest).resolve()


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
    if (policy / "sft.json").is_file():
        say(f"warm start: reusing {policy} (greedy {json.loads((policy / 'sft.json').read_text())['accuracy']:.3f})")
    else:
        await _fine_tune(overrides, log_path, say)
    return policy


async def _fine_tune(overrides: Sequence[str], log_path: Path, say: Callable[[str], None]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "asyncrl.sft", *overrides),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines: list[str] = []
    try:
        with log_path.open("w") as log:
            async for raw in process.stdout or ():
                line = raw.decode(errors="replace").rstrip()
                log.write(line + "\n")
                lines = [*lines[-20:], line]
                if line.startswith("sft: "):
                    say("warm start: " + line.removeprefix("sft: "))
        status = await process.wait()
    finally:
        with suppress(ProcessLookupError):  # it has ended, which is what is wanted
            process.kill()
    if status != 0:
        raise WorkerDiedError(
            f"the warm start (python -m asyncrl.sft) ended with status {status}; its last lines, of {log_path}:\n"
            + "\n".join(lines)
        )


def _model_digest(path: Path) -> str:
    digest = hashlib.sha256()
    for file in [*sorted(path.glob("*.safetensors")), path / "config.json"]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
