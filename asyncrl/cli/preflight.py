"""Checks of the files, folders and functions of a run, before any process starts; they take a second or two.

Each mistake is a ValueError that names the option, its value, the expected value and a remedy.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from asyncrl.checks import check_files, check_placement, odd_options
from asyncrl.config import RunConfig, Transport, model_settings, num_buffer_clients, num_store_servers
from asyncrl.core.errors import AsyncRLError
from asyncrl.core.types import Prompt
from asyncrl.core.visible_gpus import visible_gpus
from asyncrl.data.prompts import PromptStream, load_eval_prompts
from asyncrl.data.tokenization import Tokenizer, load_tokenizer
from asyncrl.metrics import check_trackers
from asyncrl.metrics.trackers import split_address
from asyncrl.run.run_folder import SHARED_MEMORY, check_memory
from asyncrl.sft.warm_start import finished_warm_start
from buffer.config import Durability
from buffer.sockets import allow_clients
from learner.config import AlgorithmConfig
from rollout_fleet.engines import check_engine_installed
from rollout_fleet.rewards import REWARDS, WeightedRewards
from rollout_fleet.sample_log import load_decoder

_SHOWN_CHARACTERS = 160


async def preflight(config: RunConfig, say: Callable[[str], None]) -> tuple[PromptStream, list[Prompt]]:
    """Check all but the folders, and read the prompts. `check_folders` runs earlier, before the run has a folder.

    Args:
        config: The run, with its assets; with resolved devices unless it joins a cluster.
        say: Shows the user a line.

    Returns:
        The training prompts and the held-out prompts.
    """
    if not config.ray.address:  # a cluster that the run joins may have other devices and packages
        check_placement(config, num_cpus=os.cpu_count() or 1, num_gpus=visible_gpus())
        check_engine_installed(config.rollout_fleet)
    check_files(config)
    for oddity in odd_options(config):
        say(f"warning: {oddity}")
    check_watchers(config)
    check_heads(config)
    check_memory(config)
    allow_clients(num_buffer_clients(config), num_links=num_store_servers(config))
    if config.sft.enabled:
        finished_warm_start(config)  # raises if the output path contains other files
    prompts, held_out = await asyncio.to_thread(read_prompts, config)
    await asyncio.to_thread(check_own_functions, config)
    first = prompts.at([0])[0]
    shown = load_decoder(config.model.path, special_tokens=True)(first.prompt_ids.tolist())
    say(f"first prompt ({len(first.prompt_ids)} tokens): {_shortened(shown)!r}")
    if left_out := prompts.num_filtered:
        say(f"left out {left_out} prompts that are longer than data.max_prompt_tokens")
    if not config.ray.address:
        await try_reward(config, first)
    return prompts, held_out


def check_folders(config: RunConfig) -> None:
    """Check that the run can write to all its folders or create them. Creates no folder."""
    own_disk = config.buffer.durability is Durability.disk
    folders = {
        "output_dir": config.output_dir,
        "run_dir": config.run_dir,
        "checkpoint.directory": config.checkpoint.directory,
        "buffer.directory": config.buffer.directory if own_disk else "",
        "buffer.keys": config.buffer.keys,
        "weights.directory": config.weights.directory,
        "sft.output_path": config.sft.output_path if config.sft.enabled else "",
    }
    for option, folder in folders.items():
        check_folder(option, folder)
    own_folder = Path(config.run_dir).expanduser()
    if config.run_dir and own_folder.is_dir() and any(own_folder.iterdir()):
        raise ValueError(f"run_dir={config.run_dir} must be a new or an empty folder; choose another one")
    in_memory = config.weights.transport is not Transport.file and config.learner.keep_snapshots != -1
    if in_memory and SHARED_MEMORY.is_dir() and (reason := _why_not_writable(SHARED_MEMORY)):
        raise ValueError(
            f"weights.transport={config.weights.transport} needs shared memory in a writable {SHARED_MEMORY}, got: "
            f"{reason}; change its permissions, or publish to a folder with weights.transport=file"
        )


def check_watchers(config: RunConfig) -> None:
    """Check that trackers and dashboard are installed, and check their addresses."""
    check_trackers(config.tracker)
    split_address(config.prometheus_address, "prometheus_address")
    if config.dashboard:
        from asyncrl.profile.dashboard import TOKEN_VARIABLE, check_dashboard  # imports a web server

        check_dashboard(config.dashboard_address, os.environ.get(TOKEN_VARIABLE, ""))


def check_folder(option: str, folder: str) -> None:
    """Check that this process can write to a folder or create it. An empty name is not checked."""
    if folder and (reason := _why_not_writable(Path(folder).expanduser().resolve())):
        raise ValueError(
            f"{option}={folder} must be a folder that this run can write to or create, got: {reason}; choose another "
            "one, or change its permissions"
        )


def _why_not_writable(folder: Path) -> str:
    """Return why no file can be created in a folder or its nearest existing parent; empty if that is possible."""
    try:
        place = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"{error.strerror} ({error.filename or folder})"


def check_heads(config: RunConfig) -> None:
    """Check that sequence-parallel and tensor-parallel ranks divide the attention heads."""
    heads = model_settings(config.model.path).get("num_attention_heads")
    tp_size = config.rollout_fleet.sglang.tp_size
    for option, size in (("learner.sp_size", config.learner.sp_size), ("rollout_fleet.sglang.tp_size", tp_size)):
        if heads and heads % size:
            raise ValueError(
                f"{option} must divide the {heads} attention heads of model.path={config.model.path}, got {size}; "
                "1 fits every model"
            )


def read_prompts(config: RunConfig) -> tuple[PromptStream, list[Prompt]]:
    """Read the training prompts and the held-out prompts as token ids of the model.

    Raises:
        ValueError: a file, row or column does not match the options, or a prompt is too long; the message names it.
    """
    tokenizer = load_tokenizer(config.model.path, chat_template=config.data.chat_template)
    check_vocabulary(config, tokenizer)
    prompts = PromptStream(config.data, tokenizer, seed=config.seed)
    return prompts, load_eval_prompts(config.data, tokenizer) if config.evaluation.enabled else []


def check_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check that the model has an embedding for every token of its tokenizer."""
    size = model_settings(config.model.path).get("vocab_size")
    token, last = max(tokenizer.get_vocab().items(), key=itemgetter(1))
    if size is not None and last >= size:
        raise ValueError(
            f"model.path={config.model.path}: the tokenizer has ids up to {last} ({token!r}), expected ids below the "
            f"model's vocab_size={size}; use the model's own tokenizer, or resize the model's embeddings"
        )


def check_own_functions(config: RunConfig) -> None:
    """Look up the reward, the advantage and the loss, and import the user's functions.

    Raises:
        ValueError: there is no such name, file, module or function.
    """
    if not config.ray.address:  # the nodes of a cluster may have other modules
        for name in config.rollout_fleet.reward_weights:
            REWARDS.get(name)
    algorithm, default = config.algorithm, AlgorithmConfig()
    if (algorithm.advantage, algorithm.loss) != (default.advantage, default.loss):
        from learner.advantages import ADVANTAGES  # imports torch, which takes seconds
        from learner.losses import LOSSES

        ADVANTAGES.get(algorithm.advantage)
        LOSSES.get(algorithm.loss)


async def try_reward(config: RunConfig, prompt: Prompt) -> None:
    """Score one response to a prompt: the ground truth if it is a string, else an empty text.

    Raises:
        ValueError: the reward function failed, or its process could not start.
    """
    fleet, truth = config.rollout_fleet, prompt.ground_truth
    text = truth if isinstance(truth, str) else ""
    option = f"rollout_fleet.rewards={fleet.rewards}" if fleet.rewards else f"rollout_fleet.reward={fleet.reward}"
    rewards = WeightedRewards(replace(fleet, reward_processes=1))
    try:
        await rewards.start()
        await rewards.score(prompt, [text])
    except AsyncRLError as error:
        raise ValueError(
            f"{option} must return one finite number for the first prompt and the response {_shortened(text)!r}: "
            f"{error}"
        ) from error
    finally:
        await rewards.close()


def _shortened(text: str) -> str:
    half = _SHOWN_CHARACTERS // 2
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]} … {text[-half:]}"
