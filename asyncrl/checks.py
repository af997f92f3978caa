"""Checks that options of several packages fit together, and that files exist. Resolves the device ``auto``.

The checks run before any process starts. A failed check raises `ValueError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from asyncrl.config import (
    LEARNER_POOL,
    RunConfig,
    episode_context,
    has_environment,
    learner_pools,
    learner_roles,
    longest_rollout,
    longest_sequence,
    may_play_episodes,
    num_positions,
    requested_cpus,
    requested_gpus,
    role_options,
    stop_deadlines,
    why_positions_end,
)
from asyncrl.metrics import counted
from asyncrl.weights.carriers import CarrierUse, check_carrier
from buffer.config import is_loopback
from learner.config import (
    ANCHORED_LOSSES,
    CRITIC_ADVANTAGES,
    GROUP_ADVANTAGES,
    ROLE_SECTIONS,
    Anchor,
    Device,
    LearnerConfig,
    Mask,
)
from rollout_fleet.config import EngineDevice, EngineKind, OnRewardFailure
from rollout_fleet.episodes.config import OnFailure

_READ_AS_JSON = {"config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"}


def check_options(config: RunConfig) -> None:
    """Check that the run's options fit together. `check_files` checks the files. Raises `ValueError`."""
    _check_roles(config)
    options = {role: role_options(config, role) for role in learner_roles(config)}
    _check_groups(config, options)
    _check_budgets(config, options)
    _check_sampling(config)
    for option, by_source in options_by_source(config).items():
        if by_source and not config.data.data_source_key:
            raise ValueError(f"{option} needs data.data_source_key, the column of each row's data source, got ''")
    if config.rollout_fleet.renew_every_s > config.buffer.lease_s / 2:
        raise ValueError(
            f"rollout_fleet.renew_every_s must be at most half of buffer.lease_s={config.buffer.lease_s:g}, got "
            f"{config.rollout_fleet.renew_every_s:g}: leases would expire before they are renewed; lower "
            "renew_every_s, or raise buffer.lease_s"
        )
    if config.weights.publish_every > config.buffer.max_lag + 1:
        raise ValueError(
            f"weights.publish_every must be at most buffer.max_lag + 1 = {config.buffer.max_lag + 1}, got "
            f"{config.weights.publish_every}: the learner would wait forever for rollouts of a version that is never "
            "published; lower publish_every or raise max_lag"
        )
    if config.stop_timeout_s < (needed_s := stop_deadlines(config).total_s):
        raise ValueError(
            f"stop_timeout_s must be at least {needed_s:g} with rollout_fleet.stop_timeout_s="
            f"{config.rollout_fleet.stop_timeout_s:g}, got {config.stop_timeout_s:g}: engines would be killed before "
            "they have cleaned up; raise stop_timeout_s or lower rollout_fleet.stop_timeout_s"
        )
    _check_colocation(config)
    _check_nodes(config)
    check_devices(config)
    _check_autoscaling(config)
    if config.rollout_fleet.engine is EngineKind.scripted:
        raise ValueError(
            "rollout_fleet.engine must be sglang or transformers, got scripted; the scripted engine is for tests"
        )


def options_by_source(config: RunConfig) -> dict[str, Mapping[str, object]]:
    """Return the options that map data sources to values, except those of ``data``: a dict from name to value."""
    return {
        "rollout_fleet.rewards_by_source": config.rollout_fleet.rewards_by_source,
        "rollout_fleet.sampling_by_source": config.rollout_fleet.sampling_by_source,
        "algorithm.advantage_by_source": config.algorithm.advantage_by_source,
    }


def _check_groups(config: RunConfig, options: Mapping[str, LearnerConfig]) -> None:
    algorithm = config.algorithm
    compared = GROUP_ADVANTAGES & {algorithm.advantage, *algorithm.advantage_by_source.values()}
    if algorithm.samples_per_prompt < 2 and compared:
        raise ValueError(
            "algorithm.samples_per_prompt must be >= 2 for a group advantage, "
            f"got {algorithm.samples_per_prompt} with algorithm.advantage={min(compared)}"
        )
    if algorithm.samples_per_prompt < 2 and "equal_rewards" in config.buffer.filters and not algorithm.greedy_baseline:
        raise ValueError(
            "buffer.filters=[equal_rewards] needs algorithm.samples_per_prompt >= 2, got "
            f"{algorithm.samples_per_prompt}: rewards of a single sample are always equal, so the buffer would drop "
            "every group; remove the filter"
        )
    drops = config.rollout_fleet.on_reward_failure is OnRewardFailure.drop_trajectory
    if drops and algorithm.greedy_baseline:
        raise ValueError(
            "rollout_fleet.on_reward_failure must be retry_group with algorithm.advantage=remax, got drop_trajectory: "
            "remax compares the rewards of a group with the reward of the group's greedy response"
        )
    for kind, action in vars(config.rollout_fleet.environment.on_failure).items():
        if action is OnFailure.drop and algorithm.greedy_baseline:
            raise ValueError(
                f"rollout_fleet.environment.on_failure.{kind} must be retry or score with algorithm.advantage=remax, "
                "got drop: remax compares the rewards of a group with the reward of the group's greedy episode"
            )
    dp_size = max(own.num_ranks // own.sp_size for own in options.values())
    if algorithm.groups_per_step < dp_size:
        raise ValueError(
            f"algorithm.groups_per_step must be >= {dp_size}, the number of data-parallel learner ranks, "
            f"got {algorithm.groups_per_step}; raise groups_per_step or lower learner.num_ranks"
        )


def _check_sampling(config: RunConfig) -> None:
    sampling = config.rollout_fleet.sampling
    if sampling.temperature == 0 and config.algorithm.samples_per_prompt > 1:
        raise ValueError(
            "rollout_fleet.sampling.temperature must be > 0 to sample different trajectories of a prompt, got 0; "
            "1.0 is usual"
        )
    if cut := sampling.truncations:
        raise ValueError(
            f"rollout_fleet.sampling must not exclude tokens during training, got {', '.join(cut)}: engines report "
            "log-probs of the whole distribution, so every ratio would be biased; only asyncrl evaluate allows "
            "top_p, top_k and min_p"
        )


def odd_options(config: RunConfig) -> list[str]:
    """Return a warning text for each combination of options that is allowed but probably not intended."""
    algorithm = config.algorithm
    odd = []
    if algorithm.anchor is Anchor.proximal and algorithm.num_mini_batches == 1 and algorithm.loss in ANCHORED_LOSSES:
        odd.append(
            "algorithm.anchor=proximal with algorithm.num_mini_batches=1: the ratio is always 1 and never clipped; "
            "set algorithm.anchor=behavior (and algorithm.weight=none), or raise algorithm.num_mini_batches"
        )
    if Mask.geometric in algorithm.masks and config.buffer.max_lag > 0:
        odd.append(
            f"algorithm.masks=[geometric] with buffer.max_lag={config.buffer.max_lag}: this mask rejects nearly every "
            "stale trajectory; watch learner.masked_fraction, or use k3"
        )
    return odd


def check_files(config: RunConfig) -> None:
    """Check that the model and data files exist, and that the longest sequence fits the model. Raises `ValueError`."""
    check_model(config)
    if not config.data.train_files:
        raise ValueError("data.train_files must name at least one parquet or jsonl file, got none")
    if config.evaluation.enabled and not config.data.eval_files:
        raise ValueError(
            "data.eval_files must name at least one file while evaluation.enabled is true, got none; "
            "set data.eval_files, or set evaluation.enabled=false"
        )
    limit, reserved = longest_rollout(config), config.rollout_fleet.num_reserved_positions
    positions = f"the model's {num_positions(config)} positions{why_positions_end(config)}"
    positions += f" less {reserved} that SGLang reserves" if reserved else ""
    prompt, response = config.data.max_prompt_tokens, config.rollout_fleet.sampling.max_new_tokens
    context = config.rollout_fleet.environment.max_context
    if may_play_episodes(config) and not context:
        _check_path(config, {role: role_options(config, role) for role in learner_roles(config)})
    if may_play_episodes(config) and context > limit:
        raise ValueError(
            f"rollout_fleet.environment.max_context must be <= {positions}, got {context}; lower max_context, or set 0 "
            "to allow all positions"
        )
    if prompt + response > limit and not has_environment(config):
        raise ValueError(
            f"data.max_prompt_tokens + rollout_fleet.sampling.max_new_tokens must be <= {positions}, got {prompt} + "
            f"{response} = {prompt + response}"
        )
    _check_cache(config)
    judge = config.rollout_fleet.judge_model
    if judge and not Path(judge, "config.json").is_file():
        raise ValueError(f"rollout_fleet.judge_model must hold a Hugging Face model, got {judge} without config.json")
    for role in ("critic", "reward_model"):
        path = getattr(config.learner, role).path
        if path and not Path(path, "config.json").is_file():
            raise ValueError(f"learner.{role}.path must hold a Hugging Face model, got {path} without config.json")
        if path:
            _check_whole(f"learner.{role}.path", Path(path))


def _check_cache(config: RunConfig) -> None:
    """Check that an engine's KV cache can hold the longest sequence. Otherwise SGLang cuts or refuses the sequence."""
    fleet = config.rollout_fleet
    tokens, longest = fleet.sglang.max_total_tokens, longest_sequence(config) + fleet.num_reserved_positions
    if fleet.engine is EngineKind.sglang and 0 < tokens < longest:
        raise ValueError(
            f"rollout_fleet.sglang.max_total_tokens must be >= {longest}, the longest sequence plus "
            f"{fleet.num_reserved_positions} positions that SGLang reserves, got {tokens}; raise max_total_tokens, or "
            "lower data.max_prompt_tokens, rollout_fleet.sampling.max_new_tokens or "
            "rollout_fleet.environment.max_context"
        )


def check_model(config: RunConfig) -> None:
    """Check that the folder ``model.path`` has complete weights and a tokenizer. Raises `ValueError`."""
    path = Path(config.model.path)
    if not config.model.path:
        raise ValueError("model.path must name a directory in Hugging Face layout, got an empty string")
    if not path.is_dir():
        is_hub_name = len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists()
        remedy = f"download a model from the Hugging Face hub first: hf download {path} --local-dir DIR, then "
        remedy = remedy + "model.path=DIR" if is_hub_name else "check the path"
        raise ValueError(f"model.path must be a directory on this machine, got {path}; {remedy}")
    if not (path / "config.json").is_file():
        raise ValueError(f"model.path must hold a Hugging Face model, got {path} without config.json; check the path")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ValueError(f"model.path must hold weights (*.safetensors or *.bin), got {path} without such files")
    if not (path / "tokenizer_config.json").is_file():
        raise ValueError(f"model.path must hold a tokenizer, got {path} without tokenizer_config.json")
    _check_whole("model.path", path)


def _check_whole(option: str, model: Path) -> None:
    """Check that a model's files are complete. `safe_open` raises an error for a weight file that is cut off."""
    for file in sorted(model.iterdir()):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="np"):
                    pass
            elif file.name in _READ_AS_JSON and not isinstance(json.loads(file.read_text("utf-8")), dict):
                raise ValueError("it is not a JSON object")
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"{option}: {file} must be whole, got a damaged file ({error}); download or export the model again"
            ) from error


def check_placement(config: RunConfig, *, num_cpus: int, num_gpus: int) -> None:
    """Check that ``num_cpus`` CPUs and ``num_gpus`` GPUs are enough to start the run. Raises `ValueError`.

    Call `resolve_devices` first: no device in ``config`` may be ``auto``.
    """
    gpus, cpus = requested_gpus(config), requested_cpus(config)
    if gpus > num_gpus:
        fleet = config.rollout_fleet
        raise ValueError(
            f"the run asks for {counted(gpus, 'GPU')} with learner.device={config.learner.device} and "
            f"rollout_fleet.device={fleet.device} ({config.learner.num_ranks} learner ranks, {fleet.fewest_engines} "
            f"engines of tp_size={fleet.sglang.tp_size}), but only {num_gpus} are available; lower learner.num_ranks "
            "or rollout_fleet.num_engines, share the GPUs with placement.colocated=true, or set the devices to cpu"
        )
    if cpus > num_cpus and (config.ray.address or not config.placement.oversubscribe):
        raise ValueError(
            f"placement asks for {cpus:g} CPUs ({config.learner.num_ranks} learner ranks, "
            f"{config.rollout_fleet.fewest_engines} engines), but only {num_cpus} are available; lower "
            "placement.cpus_per_learner_rank, placement.cpus_per_engine or the number of workers, or set "
            "placement.oversubscribe=true"
        )


def _check_roles(config: RunConfig) -> None:
    used, learner = learner_pools(config), config.learner
    if idle := sorted(set(config.placement.pools) - set(used)):
        raise ValueError(
            f"placement.pools must name pools that this run uses for its roles {list(learner_roles(config))}, got "
            f"{idle}, to which no role is assigned; leave these pools out, or assign a role to each of them"
        )
    roles = learner_roles(config)
    for role, section in ROLE_SECTIONS.items():
        if role not in roles and (own := learner.own_options(role)):
            raise ValueError(
                f"learner.{section}.{next(iter(own))} is an option of a role that this run does not have; the run has "
                f"{list(roles)}; leave the option out, or choose an algorithm that needs this role"
            )
    for role, pool in roles.items():
        _check_layout(config, role, pool, used[pool])
    if learner.critic.path and not config.algorithm.needs_critic:
        raise ValueError(
            f"learner.critic.path={learner.critic.path!r} names a critic, but algorithm.advantage="
            f"{config.algorithm.advantage} does not use one; set algorithm.advantage=gae or turn_gae, or "
            "algorithm.critic=true if your own estimator uses a critic"
        )
    advantage = config.algorithm.advantage
    if config.algorithm.critic and ":" not in advantage and advantage not in CRITIC_ADVANTAGES:
        raise ValueError(
            f"algorithm.critic=true trains a critic, but algorithm.advantage={advantage} does not use a critic; set "
            "algorithm.advantage to gae, turn_gae or your own estimator (file.py:function), or set "
            "algorithm.critic=false"
        )
    if learner.reward_model.path and (looking := sorted(set(config.buffer.filters) - {"no_tokens"})):
        raise ValueError(
            f"buffer.filters={looking} need the rewards of stored groups, but a reward model scores a group only after "
            "the group is in a batch; remove these filters, or leave out the reward model"
        )


def _check_layout(config: RunConfig, role: str, pool: str, size: int) -> None:
    learner = config.learner
    processes = "learner.num_ranks" if pool == LEARNER_POOL else f"placement.pools.{pool}"
    own = {"sp_size": learner.sp_size} | learner.own_options(role)
    for option in ("sp_size", "fsdp_size"):
        divisor = own.get(option, -1)
        if divisor != -1 and size % divisor:
            name = learner.option_name(role, option)
            raise ValueError(f"{processes} must be a multiple of {name}={divisor}, got {size}")


def _check_budgets(config: RunConfig, options: Mapping[str, LearnerConfig]) -> None:
    """Check that the longest sequence fits into a micro-batch of each role. The check uses only the options."""
    environment, prompt = config.rollout_fleet.environment, config.data.max_prompt_tokens
    if not has_environment(config):
        _check_longest(
            config,
            options,
            "the longest sequence, data.max_prompt_tokens + rollout_fleet.sampling.max_new_tokens",
            prompt + config.rollout_fleet.sampling.max_new_tokens,
            "lower max_prompt_tokens or max_new_tokens",
        )
    if may_play_episodes(config) and environment.max_context:
        _check_path(config, options)
    if not may_play_episodes(config) or not policy_needs_trajectories(config):
        return
    actor = options["actor"]
    budget, most = actor.max_tokens_per_micro_batch * actor.sp_size, environment.max_tree_tokens
    if not prompt < most <= budget:
        raise ValueError(
            f"rollout_fleet.environment.max_tree_tokens must be above data.max_prompt_tokens = {prompt} and at most "
            f"learner.max_tokens_per_micro_batch x learner.sp_size = {budget} with algorithm.loss="
            f"{config.algorithm.loss}, weight={config.algorithm.weight} and masks={[*map(str, config.algorithm.masks)]}"
            f", got {most or 'no limit'}: this combination needs all turns of an episode in one micro-batch; set "
            f"rollout_fleet.environment.max_tree_tokens={budget}, or choose a loss, a weight and masks per token"
        )


def policy_needs_trajectories(config: RunConfig) -> bool:
    """Return whether the policy's loss, importance weight or masks need each whole trajectory in one micro-batch.

    This function imports torch, which takes seconds.
    """
    from learner.losses import policy_objective

    return policy_objective(config.algorithm).needs_trajectories


def _check_path(config: RunConfig, options: Mapping[str, LearnerConfig]) -> None:
    longest, prompt = episode_context(config), config.data.max_prompt_tokens
    derived = " = 0, what the model and a micro-batch hold," * (not config.rollout_fleet.environment.max_context)
    name = f"rollout_fleet.environment.max_context{derived}"
    if longest <= prompt:
        raise ValueError(
            f"{name} must be above data.max_prompt_tokens = {prompt}, got {longest}: no token could be sampled after "
            "the longest prompt; raise this limit, or lower data.max_prompt_tokens"
        )
    _check_longest(config, options, f"the longest path of an episode, {name}", longest, "lower max_context")


def _check_longest(
    config: RunConfig, options: Mapping[str, LearnerConfig], what: str, longest: int, remedy: str
) -> None:
    for role, own in options.items():
        if longest > own.max_tokens_per_micro_batch * own.sp_size:
            budget, sp_size = (config.learner.option_name(role, f) for f in ("max_tokens_per_micro_batch", "sp_size"))
            raise ValueError(
                f"{budget} x {sp_size} must hold {what} = {longest}, got {own.max_tokens_per_micro_batch} x "
                f"{own.sp_size}; raise {budget}, or {remedy}"
            )


def _check_colocation(config: RunConfig) -> None:
    if not config.placement.colocated:
        return
    learner, fleet = config.learner, config.rollout_fleet
    if config.weights.publish_every != 1:
        raise ValueError(
            f"weights.publish_every must be 1 with placement.colocated=true, got {config.weights.publish_every}: "
            "each engine loads the newest weights when it gets its device back"
        )
    if fleet.is_elastic:
        raise ValueError(
            f"rollout_fleet.num_engines must be a number with placement.colocated=true, got {fleet.num_engines}: each "
            "engine shares the devices of learner ranks, so engines cannot join or leave during the run"
        )
    if learner.num_ranks != fleet.fewest_engines * fleet.sglang.tp_size:
        raise ValueError(
            "learner.num_ranks must equal rollout_fleet.num_engines x rollout_fleet.sglang.tp_size with "
            "placement.colocated=true, since each device has one learner rank and one rank of an engine, got "
            f"{learner.num_ranks} and {fleet.num_engines} x {fleet.sglang.tp_size}"
        )


def check_devices(config: RunConfig) -> None:
    """Check that the chosen weight transport supports the run's options.

    If learner ranks and engines share devices, also check that the options give both the same kind of device.
    Raises `ValueError`.
    """
    learner, fleet = config.learner, config.rollout_fleet
    use = CarrierUse(
        full_every=config.weights.full_every,
        adapters=config.publishes_adapters,
        num_hosts=config.placement.num_nodes,
        keeps_all=config.learner.keep_snapshots == -1,
        given=config.weights.given,
    )
    check_carrier(config.weights.rules, use)
    if not config.placement.colocated:
        return
    if {learner.device.value, fleet.device.value} == {"cpu", "cuda"}:
        raise ValueError(
            "learner.device and rollout_fleet.device must be the same with placement.colocated=true, got "
            f"{learner.device} and {fleet.device}"
        )


def _check_nodes(config: RunConfig) -> None:
    placement, buffer = config.placement, config.buffer
    if placement.num_nodes == 1:
        return
    per_node = placement.ranks_per_node
    own_only = is_loopback(buffer.host) and not buffer.advertised_host
    checks = {
        "ray.address": ("none", "auto, or host:port of a Ray cluster of all nodes", not config.ray.address),
        "placement.colocated": ("true", "false", placement.colocated),
        "buffer.host": (
            buffer.host or "none",
            "an address or interface that the other nodes can reach",
            own_only,
        ),
        "placement.ranks_per_node": (
            per_node,
            f"a divisor of the processes of each pool ({learner_pools(config)})",
            per_node and any(size % per_node for size in learner_pools(config).values()),
        ),
    }
    for option, (value, wanted, is_wrong) in checks.items():
        if is_wrong:
            raise ValueError(f"{option} must be {wanted} with placement.num_nodes={placement.num_nodes}, got {value}")


def _check_autoscaling(config: RunConfig) -> None:
    if not config.placement.autoscale:
        return
    size, num_nodes = config.rollout_fleet.num_engines, config.placement.num_nodes
    if not config.rollout_fleet.is_elastic:
        raise ValueError(
            f"rollout_fleet.num_engines must be {{min: N, max: M}} with placement.autoscale=true, got {size}: a "
            "fleet of a fixed size does not request more nodes"
        )
    if num_nodes == 1:
        raise ValueError(
            "placement.num_nodes must be > 1 with placement.autoscale=true, got 1: the run would not use a new node"
        )


def resolve_devices(config: RunConfig, num_gpus: float, say: Callable[[str], None]) -> RunConfig:
    """Return a copy of the options in which each device ``auto`` is replaced by ``cpu`` or ``cuda``.

    ``auto`` becomes ``cuda`` if there are enough GPUs for the whole run, else ``cpu``. In a colocated run, if
    only one of ``learner.device`` and ``rollout_fleet.device`` is ``auto``, the function copies the other option.

    Args:
        config: The options of the run.
        num_gpus: Number of visible GPUs on this machine, or number of GPUs in the cluster that the run joined.
        say: Function that receives a message for the user if ``auto`` leaves GPUs unused.

    Raises:
        ValueError: the resolved devices contradict another option.
    """
    asked = {"learner.device": config.learner.device.value, "rollout_fleet.device": config.rollout_fleet.device.value}
    automatic = [option for option, device in asked.items() if device == "auto"]
    if not automatic:
        return config
    named = set(asked.values()) - {"auto"}

    def with_auto(device: str) -> RunConfig:
        learner, fleet = config.learner, config.rollout_fleet
        if learner.device is Device.auto:
            learner = replace(learner, device=Device(device))
        if fleet.device is EngineDevice.auto:
            fleet = replace(fleet, device=EngineDevice(device))
        return replace(config, learner=learner, rollout_fleet=fleet)

    if config.placement.colocated and named:
        resolved = with_auto(named.pop())
    elif not num_gpus:
        resolved = with_auto("cpu")
    else:
        resolved = with_auto("cuda")
        if (needed := requested_gpus(resolved)) > num_gpus:
            resolved = with_auto("cpu")
            if num_gpus:
                say(
                    f"{' and '.join(automatic)}: auto is cpu, because the run would take {needed} GPUs and "
                    f"{num_gpus:g} {'is' if num_gpus == 1 else 'are'} visible; lower learner.num_ranks or "
                    "rollout_fleet.num_engines, or let learner and engines share GPUs with placement.colocated=true"
                )
    check_devices(resolved)
    return resolved
