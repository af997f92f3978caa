"""Count the GPUs that a process may use, and hide them through its environment. Does not import torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache

NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Environment of a process that computes on the CPU."""


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that CUDA shows to a process with this environment; 0 without a driver.

    ``CUDA_VISIBLE_DEVICES`` holds indices or UUIDs. As in CUDA, the first invalid entry ends the list.
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
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [line.rpartition("UUID: ")[2].rstrip(")") for line in lines]
