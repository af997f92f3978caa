"""Checks of options that no package can make alone: each raises before any process starts.

What one package can say of its own options stands in the ``__post_init__`` of its dataclasses.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from asyncrl.config import (
    RunConfig,
    learner_pools,
    learner_roles,
    num_positions,
    requested_cpus,
    requested_gpus,
    stop_deadlines,
    why_positions_end,
)
from asyncrl.metrics import counted
from asyncrl.weights.carriers import CarrierUse, check_carrier
from buffer.config import is_loopback
from learner.config import ANCHORED_LOSSES, GROUP_ADVANTAGES, Anchor, Mask
from rollout_fleet.config import EngineKind, OnRewardFailure

_READ_AS_JSON = {"config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"}


def check_options(config: RunConfig) -> None:
    """Check what spans packages and needs no file, before anything is made or started; see `check_files`."""
    algorithm = config.algorithm
    if algorithm.samples_per_prompt < 2 and algorithm.advantage in GROUP_ADVANTAGES:
        raise ValueError(
            "algorithm.samples_per_prompt must be >= 2 for a group advantage, "
            f"got {algorithm.samples_per_prompt} with algorithm.advantage={algorithm.advantage}"
        )
    drops = config.rollout_fleet.on_reward_failure is OnRewardFailure.drop_trajectory
    if drops and algorithm.greedy_baseline:
        raise ValueError(
            "rollout_fleet.on_reward_failure must be retry_group with algorithm.advantage=remax, got drop_trajectory: "
            "without the reward of its greedy response a group has nothing to be compared with"
        )
    _check_roles(config)
    _check_budget(config)
    dp_size = max(learner_pools(config).values()) // config.learner.sp_size
    if algorithm.groups_per_step < dp_size:
        raise ValueError(
            f"algorithm.groups_per_step must be >= the {dp_size} data-parallel learner ranks, "
            f"got {algorithm.groups_per_step}; raise it or lower learner.num_ranks"
        )
    _check_sampling(config)
    if config.rollout_fleet.renew_every_s > config.buffer.lease_s / 2:
        raise ValueError(
            "rollout_fleet.renew_every_s must be at most half of buffer.lease_s, or leases run out while they are "
            f"worked on; got {config.rollout_fleet.renew_every_s:g} and {config.buffer.lease_s:g}"
        )
    _check_weights(config)
    if config.stop_timeout_s < (needed_s := stop_deadlines(config).total_s):
        raise ValueError(
            f"stop_timeout_s must be at least {needed_s:g} with rollout_fleet.stop_timeout_s="
            f"{config.rollout_fleet.stop_timeout_s:g}, or engines are killed before they have cleaned up, got "
            f"{config.stop_timeout_s:g}; raise the first or lower the second"
        )
    _check_colocation(config)
    _check_nodes(config)
    check_devices(config)
    _check_autoscaling(config)
    if config.rollout_fleet.engine is EngineKind.scripted:
        raise ValueError(
            "rollout_fleet.engine must be sglang or transformers, got scripted; the scripted engine is for tests"
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
            f"rollout_fleet.sampling must keep all tokens in training, got {', '.join(cut)}: engines report the "
            "log-probs before truncation, so every ratio would be biased; leave them out, and use them with asyncrl "
            "evaluate"
        )


def odd_options(config: RunConfig) -> list[str]:
    """What a run may do, and its user hardly means: one line each, for a warning."""
    algorithm = config.algorithm
    odd = []
    if algorithm.anchor is Anchor.proximal and algorithm.num_mini_batches == 1 and algorithm.loss in ANCHORED_LOSSES:
        odd.append(
            "algorithm.anchor=proximal with algorithm.num_mini_batches=1: the ratio is 1, and its clip bounds nothing; "
            "set algorithm.anchor=behavior (and algorithm.weight=none), or raise algorithm.num_mini_batches"
        )
    if Mask.geometric in algorithm.masks and config.buffer.max_lag > 0:
        odd.append(
            f"algorithm.masks=[geometric] with buffer.max_lag={config.buffer.max_lag}: its band is for one version of "
            "the weights, and rejects nearly every stale trajectory; watch learner.masked_fraction, or use k3"
        )
    return odd


def check_files(config: RunConfig) -> None:
    """Check the model and data that the run reads, before any process starts.

    Raises:
        ValueError: names the option, its value, what is expected, and what to do.
    """
    check_model(config)
    if not config.data.train_files:
        raise ValueError("data.train_files must name at least one parquet or jsonl file, got none")
    if config.evaluation.enabled and not config.data.eval_files:
        raise ValueError(
            "data.eval_files must name at least one file while evaluation.enabled is true, got none; "
            "set it, or evaluation.enabled=false"
        )
    _check_positions(config)
    for role in ("critic", "reward_model"):
        path = getattr(config.learner, role).path
        if path and not Path(path, "config.json").is_file():
            raise ValueError(f"learner.{role}.path must hold a Hugging Face model, got {path} without config.json")
        if path:
            _check_whole(f"learner.{role}.path", Path(path))


def check_model(config: RunConfig) -> None:
    """Check that ``model.path`` holds a model and its tokenizer; see `check_files`."""
    path = Path(config.model.path)
    if not config.model.path:
        raise ValueError("model.path must name a directory in Hugging Face layout, got an empty string")
    if not path.is_dir():
        raise ValueError(
            f"model.path must be a directory on this machine, got {path}; download a model of the Hugging Face hub "
            f"first: hf download {path} --local-dir DIR, then model.path=DIR"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"model.path must hold a Hugging Face model, got {path} without config.json; check the path")
    if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ValueError(f"model.path must hold weights (*.safetensors or *.bin), got {path} with none")
    if not (path / "tokenizer_config.json").is_file():
        raise ValueError(f"model.path must hold a tokenizer, got {path} without tokenizer_config.json")
    _check_whole("model.path", path)


def _check_whole(option: str, model: Path) -> None:
    """Check that a model's files can be read; of the weights the headers, which say how long each file must be."""
    for file in sorted(model.iterdir()):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="np"):
                    pass
            elif file.name in _READ_AS_JSON and not isinstance(json.loads(file.read_text("utf-8")), dict):
                raise ValueError("no JSON object")
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"{option}: {file} must be whole, got a damaged file ({error}); download or export the model again"
            ) from error


def check_placement(config: RunConfig, *, num_cpus: int, num_gpus: int) -> None:
    """Check that the run fits the CPUs and GPUs that it may use; the devices are resolved. See `check_files`."""
    gpus, cpus = requested_gpus(config), requested_cpus(config)
    if gpus > num_gpus:
        fleet = config.rollout_fleet
        raise ValueError(
            f"the run asks for {counted(gpus, 'GPU')} with learner.device={config.learner.device} and "
            f"rollout_fleet.device={fleet.device} ({config.learner.num_ranks} learner ranks, {fleet.fewest_engines} "
            f"engines of tp_size={fleet.sglang.tp_size}), got {num_gpus}; lower learner.num_ranks or "
            "rollout_fleet.num_engines, let them share GPUs with placement.colocated=true, or set the devices to cpu"
        )
    if cpus > num_cpus and (config.ray.address or not config.placement.oversubscribe):
        raise ValueError(
            f"placement asks for {cpus:g} CPUs ({config.learner.num_ranks} learner ranks, "
            f"{config.rollout_fleet.fewest_engines} engines), got {num_cpus}; lower placement.cpus_per_learner_rank, "
            "placement.cpus_per_engine or the number of workers, or set placement.oversubscribe=true"
        )


def _check_roles(config: RunConfig) -> None:
    """Check that every pool and every role of the learner does something."""
    used, learner = learner_pools(config), config.learner
    if idle := sorted(set(config.placement.pools) - set(used)):
        raise ValueError(
            f"placement.pools names {idle}, where no role of this run is placed (it has "
            f"{list(learner_roles(config))}); leave them out, or place a role there"
        )
    for pool, size in used.items():
        if size % learner.sp_size:
            raise ValueError(
                f"placement.pools.{pool} must be a multiple of learner.sp_size={learner.sp_size}, got {size}"
            )
    if learner.critic.path and not config.algorithm.needs_critic:
        raise ValueError(
            f"learner.critic.path={learner.critic.path!r} names a critic, which algorithm.advantage="
            f"{config.algorithm.advantage} does not use; set algorithm.advantage=gae, or algorithm.critic=true for an "
            "estimator of your own"
        )
    advantage = config.algorithm.advantage
    if config.algorithm.critic and ":" not in advantage and advantage != "gae":
        raise ValueError(
            f"algorithm.critic=true trains a critic that algorithm.advantage={advantage} does not read; set "
            "algorithm.advantage=gae, name an estimator of your own (file.py:function), or set algorithm.critic=false"
        )
    if learner.reward_model.path and (looking := sorted(set(config.buffer.filters) - {"no_tokens"})):
        raise ValueError(
            f"buffer.filters={looking} look at rewards when groups are stored, and a reward model scores them after "
            "they are planned; use the one or the other (no_tokens looks at none, and may stay)"
        )


def _check_budget(config: RunConfig) -> None:
    """Check that the longest sequence fits a micro-batch; more turns than one are seen when they come."""
    learner = config.learner
    longest = config.data.max_prompt_tokens + config.rollout_fleet.sampling.max_new_tokens
    budget = learner.max_tokens_per_micro_batch * learner.sp_size
    if longest > budget:
        raise ValueError(
            "learner.max_tokens_per_micro_batch x learner.sp_size must hold the longest sequence, "
            f"data.max_prompt_tokens + rollout_fleet.sampling.max_new_tokens = {longest}, got "
            f"{learner.max_tokens_per_micro_batch} x {learner.sp_size}; raise it, or lower the two"
        )


def _check_weights(config: RunConfig) -> None:
    if config.weights.publish_every > config.buffer.max_lag + 1:
        raise ValueError(
            f"weights.publish_every must be at most buffer.max_lag + 1 = {config.buffer.max_lag + 1}, got "
            f"{config.weights.publish_every}: the learner would wait for rollouts under weights that are not published"
        )


def _check_carrier(config: RunConfig) -> None:
    """Compare what the run asks of its carrier of weights with what the carrier declares."""
    use = CarrierUse(
        full_every=config.weights.full_every,
        adapters=config.publishes_adapters,
        num_hosts=config.placement.num_nodes,
        keeps_all=config.learner.keep_snapshots == -1,
        given=config.weights.given,
    )
    check_carrier(config.weights.rules, use)


def _check_colocation(config: RunConfig) -> None:
    if not config.placement.colocated:
        return
    learner, fleet = config.learner, config.rollout_fleet
    if config.weights.publish_every != 1:
        raise ValueError(
            f"weights.publish_every must be 1 with placement.colocated=true, got {config.weights.publish_every}: "
            "engines that take their devices back load the newest weights"
        )
    if fleet.is_elastic:
        raise ValueError(
            f"rollout_fleet.num_engines must be a number with placement.colocated=true, got {fleet.num_engines}: an "
            "engine shares the device of one learner rank, and neither joins nor leaves without it"
        )
    if learner.num_ranks != fleet.num_engines:
        raise ValueError(
            "learner.num_ranks must equal rollout_fleet.num_engines with placement.colocated=true, one of each "
            f"per device, got {learner.num_ranks} and {fleet.num_engines}"
        )


def check_devices(config: RunConfig) -> None:
    """Check what follows from the devices of learner and engines, before and after ``auto`` is resolved."""
    learner, fleet = config.learner, config.rollout_fleet
    _check_carrier(config)
    if not config.placement.colocated:
        return
    if learner.device == "cuda" and fleet.sglang.tp_size > 1:
        raise ValueError(
            f"rollout_fleet.sglang.tp_size must be 1 with placement.colocated=true, got {fleet.sglang.tp_size}: an "
            "engine shares the device of one learner rank"
        )
    if {learner.device.value, fleet.device.value} == {"cpu", "cuda"}:
        raise ValueError(
            "learner.device and rollout_fleet.device must be the same with placement.colocated=true, got "
            f"{learner.device} and {fleet.device}"
        )


def _check_nodes(config: RunConfig) -> None:
    """Check that a run on several nodes leaves nothing to paths and sockets that only one of them has."""
    placement, buffer = config.placement, config.buffer
    if placement.num_nodes == 1:
        return
    per_node = placement.ranks_per_node
    own_only = is_loopback(buffer.host) and not buffer.advertised_host
    checks = {
        "ray.address": ("none", "auto, or host:port of a Ray cluster of all nodes", not config.ray.address),
        "placement.colocated": ("true", "false", placement.colocated),
        "buffer.host": (buffer.host or "none", "an address or interface of this node that the others reach", own_only),
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
            "fleet of a fixed size asks for no further nodes"
        )
    if num_nodes == 1:
        raise ValueError(
            "placement.num_nodes must be > 1 with placement.autoscale=true, got 1: the run would use no node that comes"
        )


def _check_positions(config: RunConfig) -> None:
    limit = num_positions(config)
    prompt, response = config.data.max_prompt_tokens, config.rollout_fleet.sampling.max_new_tokens
    if prompt + response > limit:
        raise ValueError(
            f"data.max_prompt_tokens + rollout_fleet.sampling.max_new_tokens must be <= the model's {limit} positions"
            f"{why_positions_end(config)}, got {prompt} + {response} = {prompt + response}"
        )
