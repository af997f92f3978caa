"""Count the GPUs that a process may use, and hide them through its environment. Does not import torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache

from asyncrl.core.errors import DeadlineError

NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Environment of a process that computes on the CPU."""
_DRIVER_TIMEOUT_S = 30.0


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that CUDA shows to a process with this environment; 0 without a driver.

    ``CUDA_VISIBLE_DEVICES`` holds indices or UUIDs. As in CUDA, the first invalid entry ends the list.

    Raises:
        DeadlineError: the NVIDIA driver does not answer.
    """
    tool = shutil.which("nvidia-smi")
    listed = _listed_uuids(tool) if tool is not None else []
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return len(listed)
    count = 0
    for entry in map(str.strip, chosen.split(",")):
        is_index = entry.isdecimal() and int(entry) < len(listed)
        is_uuid = entry.startswith(("GPU-", "MIG-")) and any(uuid.startswith(entry) for uuid in listed)
        is_instance = entry.startswith("MIG-") and bool(listed)  # nvidia-smi -L lists instances below their GPU
        if not (is_index or is_uuid or is_instance):
            break
        count += 1
    return count


@cache
def _listed_uuids(tool: str) -> list[str]:
    """UUIDs of this machine's GPUs, in the order of the NVIDIA driver."""
    process = subprocess.Popen([tool, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        listed, _ = process.communicate(timeout=_DRIVER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # and do not wait: a process that hangs in the driver does not die
        raise DeadlineError(
            f"{tool} -L must list the GPUs of this machine within {_DRIVER_TIMEOUT_S:g} s, got no answer: the NVIDIA "
            "driver hangs; reset the GPUs or restart the machine, or run on another machine"
        ) from None
    lines = [line for line in listed.splitlines() if line.startswith("GPU ")]
    return [line.rpartition("UUID: ")[2].rstrip(")") for line in lines]
