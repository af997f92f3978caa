"""Checks the files, folders and functions of a run before it starts, and makes the page of a dry run.

Each mistake raises a `ValueError` that names the option, its value, the expected value and a remedy.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from asyncrl.checks import check_files, check_placement, odd_options, options_by_source, resolve_devices
from asyncrl.cli.quickstart import with_quickstart_assets
from asyncrl.config import (
    RunConfig,
    has_environment,
    keeps_stores_on_hosts,
    learner_pools,
    learner_roles,
    longest_sequence,
    may_play_episodes,
    num_buffer_clients,
    num_store_servers,
    requested_cpus,
    requested_gpus,
    role_model,
    role_options,
    with_time_to_read,
)
from asyncrl.core.errors import AsyncRLError
from asyncrl.core.host import gpu_memory_bytes, visible_gpus
from asyncrl.core.image_files import image_reader, is_vision_model
from asyncrl.core.model_config import model_settings
from asyncrl.core.types import Prompt
from asyncrl.data.prompts import PromptStream, load_eval_prompts
from asyncrl.data.tokenizer import Tokenizer, load_tokenizer
from asyncrl.metrics import check_trackers, counted
from asyncrl.metrics.trackers import split_address
from asyncrl.planner.device_memory import GIB, MemoryKind, kv_tokens
from asyncrl.planner.fit import (
    CARDS,
    card_bytes,
    check_memory_of_devices,
    device_uses,
    policy_size,
    with_recomputation,
)
from asyncrl.run.resume import find_checkpoint
from asyncrl.run.run_folder import SHARED_MEMORY, check_memory
from asyncrl.samples import shortened
from asyncrl.sft.warm_start import finished_warm_start
from buffer.config import Durability
from buffer.sockets import allow_clients
from learner.config import AlgorithmConfig
from rollout_fleet.engines import check_engine_installed, check_images
from rollout_fleet.engines.engine import load_decoder
from rollout_fleet.episodes.adapters import ENVIRONMENTS
from rollout_fleet.episodes.environment import Outcome
from rollout_fleet.rewards import REWARDS, Rollout, WeightedRewards

_SHOWN_CHARACTERS = 160
_BYTES_PER_TOKEN = 14
"""Estimated bytes of one token in the buffer: its id, log-prob and policy version, and a part of the metadata."""


async def preflight(config: RunConfig, say: Callable[[str], None]) -> tuple[PromptStream, list[Prompt]]:
    """Check a run before it starts. Returns a pair: training prompts and held-out prompts.

    This function does not check the run's folders: call `check_folders` before the run creates its folder. If the run
    starts its own Ray cluster, also call `resolve_devices` before this function. ``say`` shows a line to the user.
    """
    if not config.ray.address:  # do not check this machine if the run uses an existing Ray cluster
        check_placement(config, num_cpus=os.cpu_count() or 1, num_gpus=visible_gpus())
        check_engine_installed(config.rollout_fleet)
        check_images(config.rollout_fleet, config.model.path)
        check_gpu_memory(config, gpu_memory_bytes())
    check_files(config)
    for oddity in odd_options(config):
        say(f"warning: {oddity}")
    check_trackers(config.tracker)
    split_address(config.prometheus_address, "prometheus_address")
    if config.dashboard:
        # Import here, because the module `dashboard` loads a web server.
        from asyncrl.profile.dashboard import TOKEN_VARIABLE, check_dashboard

        check_dashboard(config.dashboard_address, os.environ.get(TOKEN_VARIABLE, ""))
    check_heads(config)
    check_vision(config)
    check_memory(config)
    allow_clients(num_buffer_clients(config), num_links=num_store_servers(config))
    if config.sft.enabled:
        finished_warm_start(config)  # raises an error if sft.output_path has files that this run cannot use
    prompts, held_out = await asyncio.to_thread(read_prompts, config)
    if (resumed := find_checkpoint(config)) is not None:
        prompts.check(resumed.state.prompts)
    for oddity in unused_sources(config, prompts.data_sources | {prompt.data_source for prompt in held_out}):
        say(f"warning: {oddity}")
    await asyncio.to_thread(check_own_functions, config)
    first = prompts.first()
    shown = load_decoder(config.model.path, special_tokens=True)(first.prompt_ids.tolist())
    say(f"first prompt ({len(first.prompt_ids)} tokens): {shortened(shown, _SHOWN_CHARACTERS)!r}")
    if left_out := prompts.num_filtered:
        say(f"left out {left_out} prompts that are longer than data.max_prompt_tokens")
    if not config.ray.address:
        await try_reward(config, first)
    return prompts, held_out


def check_gpu_memory(config: RunConfig, card: int) -> None:
    """Check that a run fits into the memory of its GPUs. If the model's sizes cannot be read, check nothing.

    ``card`` is the memory of one GPU in bytes; 0 if this machine has no GPU.

    Raises:
        ValueError: the run does not fit. The message lists the needed memory per device, and options that reduce it.
    """
    try:
        model = policy_size(config)
    except ValueError:  # ignore this error, because another check reports why the model's sizes cannot be read
        return
    if card:
        check_memory_of_devices(config, model, card)


def check_folders(config: RunConfig) -> None:
    """Check that the run can write to all its folders or create them. The function creates no folder.

    Raises `ValueError` if the run cannot write to a folder, or if ``run_dir`` is not empty.
    """
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
        raise ValueError(f"run_dir={config.run_dir} must be a new or an empty folder; choose another folder")
    if config.publishes_to_memory and SHARED_MEMORY.is_dir() and (reason := _why_not_writable(SHARED_MEMORY)):
        raise ValueError(
            f"weights.transport={config.weights.transport} needs shared memory in a writable {SHARED_MEMORY}, got: "
            f"{reason}; change its permissions, or publish to a folder with weights.transport=file"
        )


def check_folder(option: str, folder: str) -> None:
    """Check that this process can write to ``folder`` or create it. Raises `ValueError` if not.

    ``option`` is the name of the option that sets the folder, for the message. An empty ``folder`` is not checked.
    """
    if folder and (reason := _why_not_writable(Path(folder).expanduser().resolve())):
        raise ValueError(
            f"{option}={folder} must be a folder that this run can write to or create, got: {reason}; choose another "
            "folder, or change its permissions"
        )


def _why_not_writable(folder: Path) -> str:
    """Return the reason why this process cannot create files in a folder; an empty text if it can create files.

    If the folder does not exist, the function checks the nearest parent folder that exists.
    """
    try:
        place = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"{error.strerror} ({error.filename or folder})"


def check_heads(config: RunConfig) -> None:
    """Check that each model's number of attention heads is a multiple of the model's ``tp_size`` or ``sp_size``.

    Raises `ValueError` if not.
    """
    rows = [("rollout_fleet.sglang.tp_size", config.rollout_fleet.sglang.tp_size, config.model.path)]
    for role in learner_roles(config):
        name, size = config.learner.option_name(role, "sp_size"), role_options(config, role).sp_size
        rows.append((name, size, role_model(config, role)))
    for option, size, path in rows:
        heads = model_settings(path).get("num_attention_heads")
        if heads and heads % size:
            raise ValueError(
                f"{option} must divide the {heads} attention heads of the model in {path}, got {size}; the value 1 "
                "fits every model"
            )


def check_vision(config: RunConfig) -> None:
    """Check the options that need a model with images, and the options that do not support such a model.

    Raises `ValueError` if an option does not fit the model.
    """
    if not is_vision_model(config.model.path):
        if config.learner.freeze_vision:
            raise ValueError(
                f"learner.freeze_vision is true, but the model in {config.model.path} has no vision tower that the "
                "learner trains; set learner.freeze_vision=false"
            )
        return
    refused = {
        "learner.lora.rank": config.learner.lora.rank > 0,
        f"algorithm.advantage={config.algorithm.advantage}": config.algorithm.needs_critic
        and not config.learner.critic.path,
    }
    for option, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"{option} is set, and the model in {config.model.path} takes images: asyncrl cannot train adapters or "
                "critics of such models; train all weights, and use an advantage that needs no critic"
            )


def read_prompts(config: RunConfig) -> tuple[PromptStream, list[Prompt]]:
    """Read the training prompts and the held-out prompts as token ids of the model.

    If evaluation is disabled, there are no held-out prompts.

    Raises:
        ValueError: a file, row or column does not match the options, or a prompt is too long.
    """
    tokenizer = load_tokenizer(config.model.path, chat_template=config.data.chat_template)
    check_vocabulary(config, tokenizer)
    images = image_reader(config.model.path, max_pixels=config.rollout_fleet.max_image_pixels)
    needs: dict[str, Any] = {"has_environment": has_environment(config), "images": images}
    prompts = PromptStream(config.data, tokenizer, seed=config.seed, **needs)
    held_out = load_eval_prompts(config.data, tokenizer, **needs) if config.evaluation.enabled else []
    check_environments(config, prompts.environments | {prompt.environment for prompt in held_out} - {""})
    return prompts, held_out


def unused_sources(config: RunConfig, sources: set[str]) -> list[str]:
    """Return one warning for each data source that an option names but no row of the data has.

    ``sources`` are the data sources of the rows.
    """
    options = {**options_by_source(config), "data.environment_by_source": config.data.environment_by_source}
    return [
        f"{option} names the source {source!r}, but the rows have only these sources in the column "
        f"{config.data.data_source_key!r}: {sorted(sources)}; correct the name, or leave it out"
        for option, by_source in options.items()
        for source in sorted(by_source.keys() - sources)
    ]


def check_environments(config: RunConfig, names: Iterable[str]) -> None:
    """Check the names of environments in rows and in ``data.environment_by_source``, without importing user modules.

    Raises:
        ValueError: a name is not the name of a built-in environment, or names a file that does not exist.
    """
    key = config.data.environment_key
    where = " or ".join([*([f"the column {key!r}"] if key else []), "data.environment_by_source"])
    for name in sorted(names):
        place, colon, attribute = name.rpartition(":")
        if not (place and colon and attribute) and name not in ENVIRONMENTS.names():
            raise ValueError(
                f"{where} must name one of {ENVIRONMENTS.names()}, or file.py:Class or module:Class of your own, got "
                f"{name!r}; correct the name"
            )
        if place.endswith(".py") and not config.ray.address and not Path(place).is_file():
            raise ValueError(f"{where} has {name!r}, and there is no file {Path(place).resolve()}; check the path")


def check_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check that the model has an embedding for every token of the tokenizer. Raises `ValueError` if not."""
    size = model_settings(config.model.path).get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(
            f"model.path={config.model.path}: config.json must have an integer vocab_size, got {size!r}; download or "
            "export the model again"
        )
    token, last = max(tokenizer.get_vocab().items(), key=itemgetter(1))
    if last >= size:
        raise ValueError(
            f"model.path={config.model.path}: the tokenizer has ids up to {last} ({token!r}), expected ids below the "
            f"model's vocab_size={size}; use the model's own tokenizer, or resize the model's embeddings"
        )


def check_own_functions(config: RunConfig) -> None:
    """Check that the reward, the advantage and the loss exist. The check imports the user's functions.

    Raises:
        ValueError: there is no such name, file, module or function.
    """
    if not config.ray.address:  # an existing Ray cluster may have reward modules that this machine lacks
        for name in config.rollout_fleet.reward_names:
            REWARDS.get(name)
    algorithm, default = config.algorithm, AlgorithmConfig()
    if (algorithm.advantage, algorithm.loss) != (default.advantage, default.loss):
        from learner.advantages import ADVANTAGES  # import here, because the module loads torch
        from learner.losses import LOSSES

        ADVANTAGES.get(algorithm.advantage)
        LOSSES.get(algorithm.loss)


async def try_reward(config: RunConfig, prompt: Prompt) -> None:
    """Check the reward function: score one response to a prompt.

    If the prompt's ground truth is a string, this string is the response. Otherwise, the response is an empty text.

    Raises:
        ValueError: the reward function failed, or its process could not start.
    """
    fleet, truth = config.rollout_fleet, prompt.ground_truth
    text = truth if isinstance(truth, str) else ""
    option = f"rollout_fleet.rewards={fleet.rewards}" if fleet.rewards else f"rollout_fleet.reward={fleet.reward}"
    rewards = WeightedRewards(replace(fleet, reward_processes=1))
    # Some rewards read the outcome of an episode. No episode has run yet, so pass an example of an outcome.
    rollout = replace(Rollout.answer(text, num_tokens=0), outcome=Outcome(reward=0.0))
    try:
        await rewards.start()
        # Skip the test of a reward that uses the judge model, because the judge does not run yet.
        if not fleet.judge_model or "judge" not in fleet.weights_for(prompt.data_source):
            await rewards.score(prompt, [rollout])
    except AsyncRLError as error:
        raise ValueError(
            f"{option} must return one finite number for the first prompt and the response "
            f"{shortened(text, _SHOWN_CHARACTERS)!r}: {error}"
        ) from error
    finally:
        await rewards.close()


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The result of a dry run.

    Attributes:
        problems: Errors of the checks; empty if the run can start.
        memory: Lines of text with the memory that each kind of device needs; empty if there is no model.
        page: The whole report as text, for the user.
    """

    problems: list[str]
    memory: list[str]
    page: str


def dry_run(config: RunConfig) -> DryRun:
    """Check a run and compute its resources and deadlines, for the option ``dry_run=true``.

    The function does not create the run's folder, and starts no workers.
    """
    problems: list[str] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-dry-run-") as folder:
        with_assets = with_quickstart_assets(replace(config, output_dir=folder)) if config.quickstart else config
        with_assets = replace(with_assets, output_dir=config.output_dir)
        try:
            if not config.ray.address:
                with_assets = resolve_devices(with_assets, visible_gpus(), notes.append)
                with_assets = with_recomputation(with_assets, gpu_memory_bytes())
            check_folders(config)
            asyncio.run(preflight(with_assets, notes.append))
        except ValueError as error:
            problems.append(str(error))
        memory = list(_memory(with_assets, problems))
    sections: dict[str, Iterable[str]] = {
        "placement": _placement(config, with_assets),
        "memory per device": memory,
        "tokens of a learner step": _tokens(config),
        "staleness": _staleness(config),
        "waits for, in this order": _waits(with_time_to_read(with_assets)),
        "checked": notes,
        "not ready": problems,
    }
    page = "dry run: nothing was started\n"
    for title, section in sections.items():
        if lines := list(section):
            page += "\n".join(["", title, *(f"  {line}" for line in lines), ""])
    return DryRun(problems=problems, memory=memory, page=page if problems else f"{page}\nevery check passed\n")


def _memory(config: RunConfig, problems: list[str]) -> Iterator[str]:
    try:
        model = policy_size(config)
    except ValueError as error:
        problems.append(str(error))
        return
    card = 0 if config.ray.address else gpu_memory_bytes()
    on_cards = {name: device_uses(config, model, card_bytes(name)) for name in CARDS}
    for number, use in enumerate(device_uses(config, model, card)):
        on_cuda = use.card_bytes or on_cards["H100"][number].card_bytes
        fitting = [name for name, uses in on_cards.items() if uses[number].fits]
        against = f"; fits on {', '.join(fitting) or 'none of ' + ', '.join(CARDS)}" if on_cuda else ""
        if MemoryKind.kv_cache in use.parts:
            against += " (SGLang limits the KV cache to the free memory)" if on_cuda else ""
        if use.card_bytes:
            against = f" of {_amount(use.usable)}" + ("" if use.fits else ": does not fit")
        yield f"{use.name}: {_amount(use.total)}{against}"
        yield from (f"  {part:22} {_amount(size):>12}" for part, size in use.parts.items())


def _placement(asked: RunConfig, config: RunConfig) -> Iterator[str]:
    fleet, learner = config.rollout_fleet, config.learner
    roles = learner_roles(config)
    named = ((asked.learner.device, learner.device), (asked.rollout_fleet.device, fleet.device))
    devices = [_device(before, after) for before, after in named]
    for pool, size in learner_pools(config).items():
        # `shapes` maps each mesh shape, such as `dp 2 x sp 2`, to the roles that have this shape.
        shapes: dict[str, list[str]] = {}
        for role in (role for role, of in roles.items() if of == pool):
            sp_size = role_options(config, role).sp_size
            shapes.setdefault(f"dp {size // sp_size} x sp {sp_size}", []).append(role)
        hosted = ", ".join(f"({shape}), {', '.join(hosted)}" for shape, hosted in shapes.items())
        yield f"learner pool {pool}: {counted(size, 'rank')} on {devices[0]} {hosted}"
    size = f" x {fleet.sglang.tp_size} tensor-parallel ranks" if fleet.sglang.tp_size > 1 else ""
    fewest, most = fleet.fewest_groups_in_flight, fleet.most_groups_in_flight
    groups = str(most) if fewest == most else f"{fewest} to {most}"
    where = "the learner's devices, in turns" if config.placement.colocated else devices[1]
    count = f"{fleet.fewest_engines} to {fleet.most_engines}" if fleet.is_elastic else fleet.num_engines
    yield f"fleet: {count} {fleet.engine} engines{size} on {where}, {groups} groups each"
    if keeps_stores_on_hosts(config):
        stores = "1 server, and a store on each host of engines"
    elif config.buffer.num_store_servers:
        stores = f"1 server and {counted(config.buffer.num_store_servers, 'store')}"
    else:
        stores = "1 server, which also stores the groups"
    yield f"buffer: {stores}; durability {config.buffer.durability}"
    cluster = f"the Ray cluster at {config.ray.address}" if config.ray.address else "a separate Ray cluster"
    more = f" ({requested_cpus(config, fleet.most_engines):g} with all engines)" if fleet.is_elastic else ""
    have = f"; this machine has {os.cpu_count()} and {visible_gpus()}" if not config.ray.address else ""
    gpus = counted(requested_gpus(config), "GPU")
    if "auto" in (learner.device, fleet.device):
        gpus = "as many GPUs as its devices need"
    yield f"{cluster}: {counted(requested_cpus(config), 'CPU')}{more} and {gpus}{have}"


def _device(asked: str, resolved: str) -> str:
    if asked != "auto":
        return asked
    return "what the cluster has" if resolved == "auto" else f"{resolved} (auto)"


def _tokens(config: RunConfig) -> Iterator[str]:
    algorithm, learner, environment = config.algorithm, config.learner, config.rollout_fleet.environment
    samples = algorithm.groups_per_step * algorithm.samples_per_prompt
    response, prompt = config.rollout_fleet.sampling.max_new_tokens, config.data.max_prompt_tokens
    most, what = _longest_trajectory(config), f"({prompt:,} of a prompt + {response:,} of a response)"
    yield f"{algorithm.groups_per_step} groups x {algorithm.samples_per_prompt} samples = {samples} trajectories"
    if may_play_episodes(config):
        sampled, path = environment.max_tokens or environment.max_turns * response, longest_sequence(config)
        yield (
            f"an episode has at most {counted(environment.max_turns, 'turn')}, {sampled:,} sampled tokens, and "
            f"{path:,} tokens per path"
        )
        what = f"{most:,} of all paths of an episode" if environment.max_tree_tokens else f"{most:,} of a path"
    branches = may_play_episodes(config) and not environment.max_tree_tokens
    unless = "; more if episodes branch" * branches
    dp_size = learner.num_ranks // learner.sp_size
    budget = dp_size * learner.sp_size * learner.max_tokens_per_micro_batch
    yield f"at most {samples * most:,} tokens: {samples} x {what}{unless}"
    micro_batches = counted(-(-samples * most // budget), "micro-batch")
    yield f"at most {micro_batches} per rank, {counted(algorithm.num_mini_batches, 'optimizer update')}{unless}"
    yield f"an engine's KV cache holds {kv_tokens(config):,} tokens at most"


def _longest_trajectory(config: RunConfig) -> int:
    return max(longest_sequence(config), config.rollout_fleet.environment.max_tree_tokens * may_play_episodes(config))


def _staleness(config: RunConfig) -> Iterator[str]:
    buffer, fleet, batch = config.buffer, config.rollout_fleet, config.algorithm.groups_per_step
    updates = config.algorithm.num_mini_batches
    most_open, places = (buffer.max_lag + 1) * batch, fleet.most_engines * fleet.most_groups_in_flight
    yield f"the learner trains on a token at most {counted(buffer.max_lag, 'learner step')} after it was sampled"
    yield f"which is at most {counted(buffer.max_lag * updates + updates - 1, 'optimizer update')}"
    yield f"at most {most_open} groups are open; the fleet has slots for {places}"
    if places > most_open:
        yield f"the fleet can never use {places - most_open} of its slots: lower rollout_fleet.groups_in_flight"
    if buffer.max_lag == 0:
        yield "generation and training alternate: they do not overlap with buffer.max_lag=0"
    yield f"weights are published every {counted(config.weights.publish_every, 'step')}; a straggler: {buffer.on_stale}"
    longest = (_longest_trajectory(config) - config.data.max_prompt_tokens) * config.algorithm.samples_per_prompt
    held, room = most_open * longest * _BYTES_PER_TOKEN, buffer.max_stored_bytes * max(1, buffer.num_store_servers)
    fits = "fits" if held <= room else "does not fit; leases wait for room if responses are that long"
    yield f"the buffer holds at most {_amount(held)} of responses: {fits} (buffer.max_stored_bytes)"


def _waits(config: RunConfig) -> Iterator[str]:
    fleet, learner = config.rollout_fleet, config.learner
    yield f"Ray: ray.start_timeout_s={config.ray.start_timeout_s:g}"
    if config.sft.enabled:
        yield (
            f"the warm start, {counted(config.sft.max_steps, 'update')} at most: sft.progress_timeout_s="
            f"{config.sft.progress_timeout_s:g}"
        )
    ranks, samples = sum(learner_pools(config).values()), config.evaluation.num_samples + 1
    yield f"{counted(ranks, 'learner rank')}: learner.start_timeout_s={learner.start_timeout_s:g}"
    yield f"{counted(fleet.fewest_engines, 'engine')}: rollout_fleet.start_timeout_s={fleet.start_timeout_s:g}"
    if config.evaluation.enabled:
        yield f"the held-out prompts, {counted(samples, 'sample')} of each, before and after training"
    yield (
        f"then {counted(config.total_steps, 'step')}: a batch of {counted(config.algorithm.groups_per_step, 'group')}, "
        f"and its update: learner.step_timeout_s={learner.step_timeout_s:g}"
    )
    if config.checkpoint.every_steps:
        yield f"a checkpoint every {counted(config.checkpoint.every_steps, 'step')}, written during training"


def _amount(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.2f} MiB"
