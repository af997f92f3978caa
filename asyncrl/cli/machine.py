"""What this machine has, found out without torch and without Ray."""

from __future__ import annotations

import shutil
import subprocess


def visible_gpus() -> int:
    """GPUs that the NVIDIA driver lists on this machine; 0 without a driver. Loads no torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
