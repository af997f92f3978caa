"""Resolves the device ``auto`` of the learner and of the engines, once per run, before anything is placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asyncrl.config import RunConfig, requested_gpus
from asyncrl.option_checks import check_devices
from learner.config import Device
from rollout_fleet.config import EngineDevice


def resolve_devices(config: RunConfig, num_gpus: float, say: Callable[[str], None]) -> RunConfig:
    """Return the run with ``cpu`` or ``cuda`` in place of each ``auto``.

    ``auto`` becomes ``cuda`` where all GPUs that the run then takes are there, else ``cpu``. Colocated ranks and
    engines share a device, so an ``auto`` there becomes what the other option says. An option that names a device is
    left as it is; a resolved configuration comes back unchanged.

    Args:
        config: The run.
        num_gpus: GPUs that the run may use: those visible on this machine, or those of the cluster that it joined.
        say: Shows the user a line, where GPUs are left unused.

    Raises:
        ValueError: the resolved devices contradict another option.
    """
    asked = {"learner.device": config.learner.device.value, "rollout_fleet.device": config.rollout_fleet.device.value}
    automatic = [option for option, device in asked.items() if device == "auto"]
    if not automatic:
        return config
    named = set(asked.values()) - {"auto"}
    if config.placement.colocated and named:
        resolved = _with_auto(config, named.pop())
    else:
        resolved = _with_auto(config, "cuda")
        if (needed := requested_gpus(resolved)) > num_gpus:
            resolved = _with_auto(config, "cpu")
            if num_gpus:
                say(
                    f"{' and '.join(automatic)}: auto is cpu, because the run would take {needed} GPUs and "
                    f"{num_gpus:g} {'is' if num_gpus == 1 else 'are'} visible; lower learner.num_ranks or "
                    "rollout_fleet.num_engines, or let learner and engines share GPUs with placement.colocated=true"
                )
    check_devices(resolved)
    return resolved


def _with_auto(config: RunConfig, device: str) -> RunConfig:
    """The run with a device in place of each ``auto``."""
    learner, fleet = config.learner, config.rollout_fleet
    if learner.device is Device.auto:
        learner = replace(learner, device=Device(device))
    if fleet.device is EngineDevice.auto:
        fleet = replace(fleet, device=EngineDevice(device))
    return replace(config, learner=learner, rollout_fleet=fleet)
