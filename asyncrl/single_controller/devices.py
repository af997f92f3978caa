"""Which accelerators a worker sees: CUDA, ROCm and NPU, with Ray setting the variables or told not to."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

from asyncrl.protocol.errors import UsageError

ALL_DEVICES = "not set"
"""The value that an unrestricted process reports for its visible devices."""

NOSET_VISIBLE_DEVICES = (
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES",
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
    "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR",
)


def ray_noset_visible_devices(env_vars: Mapping[str, str] = os.environ) -> bool:
    """True if Ray was told not to set the visible devices, so that a worker sees all devices of its node."""
    return any(env_vars.get(name) for name in NOSET_VISIBLE_DEVICES)


def visible_devices_name(env_vars: Mapping[str, str] = os.environ) -> str:
    """Name of the variable that restricts the devices of this process's runtime."""
    torch = _loaded_torch()
    is_npu = hasattr(torch, "npu") or bool(env_vars.get("ASCEND_RT_VISIBLE_DEVICES"))
    return "ASCEND_RT_VISIBLE_DEVICES" if is_npu else "CUDA_VISIBLE_DEVICES"


def set_up_visible_devices(env_vars: MutableMapping[str, str] = os.environ) -> None:
    """Settle the visible devices of this process before it touches an accelerator.

    Raises:
        UsageError: the ROCm variables contradict one another or CUDA's.
    """
    _unify_rocm(env_vars)
    if ray_noset_visible_devices(env_vars):
        _choose_device_within_node(env_vars)


def _unify_rocm(env_vars: MutableMapping[str, str]) -> None:
    """Move what ROCm's own variables say into CUDA_VISIBLE_DEVICES, which torch reads on ROCm too."""
    hip = env_vars.pop("HIP_VISIBLE_DEVICES", None)
    cuda = env_vars.get("CUDA_VISIBLE_DEVICES")
    if hip and cuda and hip != cuda:
        raise UsageError(f"HIP_VISIBLE_DEVICES is {hip!r} and CUDA_VISIBLE_DEVICES {cuda!r}; set one, or both alike")
    if hip:
        env_vars["CUDA_VISIBLE_DEVICES"] = cuda = hip
    rocr = env_vars.get("ROCR_VISIBLE_DEVICES")
    if rocr and cuda:
        raise UsageError(f"ROCR_VISIBLE_DEVICES is {rocr!r} while CUDA or HIP devices are {cuda!r}; unset one of them")
    if rocr:
        env_vars["CUDA_VISIBLE_DEVICES"] = env_vars.pop("ROCR_VISIBLE_DEVICES")


def _choose_device_within_node(env_vars: MutableMapping[str, str]) -> None:
    """If a worker sees all devices of its node, its local rank is the device that Ray assigned to it."""
    import ray

    is_npu = visible_devices_name(env_vars) == "ASCEND_RT_VISIBLE_DEVICES"
    assigned = ray.get_runtime_context().get_accelerator_ids()["NPU" if is_npu else "GPU"]
    if not assigned:
        return
    env_vars["LOCAL_RANK"] = assigned[0]
    device = _device_module(is_npu)
    if device.is_available():
        device.set_device(int(assigned[0]))


def _device_module(is_npu: bool) -> Any:
    import torch

    return torch.npu if is_npu else torch.cuda  # type: ignore[attr-defined]


def _loaded_torch() -> Any:
    """torch, if this process has loaded it; it is never loaded here."""
    return sys.modules.get("torch")
