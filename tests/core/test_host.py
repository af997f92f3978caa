"""How a process uses its host: it reuses freed memory (the test counts page faults), and socket paths are short."""

import subprocess
import sys
import tempfile

import pytest

from asyncrl.core.host import forget_process_group, socket_base

NUM_ROUNDS, NUM_BLOCKS, BLOCK_PAGES = 10, 8, 2048

PROGRAM = f"""
import resource, sys
import numpy as np
from asyncrl.core.host import WORKER_BYTES, keep_freed_memory

def use():
    blocks = [np.ones({BLOCK_PAGES} * 512) for _ in range({NUM_BLOCKS})]
    del blocks

if sys.argv[1] == "keep":
    keep_freed_memory(WORKER_BYTES)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({NUM_ROUNDS}):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def first_touches(how: str) -> int:
    program = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(program, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="tests an option of glibc")
def test_freed_memory_is_used_again_without_new_pages():
    one_round = NUM_BLOCKS * BLOCK_PAGES
    assert first_touches("keep") < one_round / 8
    assert first_touches("default") > one_round  # without `keep_freed_memory`, the kernel gives new pages


@pytest.mark.parametrize(("length", "is_used"), [(70, True), (71, False)])
def test_a_socket_whose_path_in_the_temporary_folder_is_too_long_is_in_tmp(monkeypatch, length, is_used):
    folder = "/" + "x" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    assert len(f"{folder}/{'y' * 36}") == (107 if is_used else 108)  # Linux limits a socket path to 107 bytes
    assert socket_base("y" * 36) == (folder if is_used else "/tmp")


def test_the_variables_of_a_launchers_process_group_are_removed():
    foreign = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment = {"PATH": "/bin", "OMP_NUM_THREADS": "1", **foreign}
    assert forget_process_group(environment) == list(foreign)
    assert environment == {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
