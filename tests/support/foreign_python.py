"""Installs a separate Python with packages that asyncrl's own environment does not have."""

import subprocess
import sys
from pathlib import Path

import pytest


def python_with(folder: Path, *packages: str) -> str:
    """Make a virtual environment with ``packages``, and return its Python. Skips the test if that fails."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    command = [sys.executable, "-m", "uv", "pip", "install", "-q", "-p", python, *packages]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"{' '.join(packages)} cannot be installed here: {installed.stderr[-300:]}")
    return python


ADDITION = """
import verifiers.v1 as vf

class AdditionData(vf.TaskData):
    answer: str

class AdditionTask(vf.Task[AdditionData]):
    @vf.reward(weight=2.0)
    async def exact(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

class AdditionTaskset(vf.Taskset[AdditionTask, vf.TasksetConfig]):
    def load(self):
        for a in range(3):
            yield AdditionTask(AdditionData(prompt=f"{a} + 1", answer=str(a + 1)), self.config.task)

__all__ = ["AdditionTaskset"]
"""
"""A taskset of verifiers: module ``addition``."""
