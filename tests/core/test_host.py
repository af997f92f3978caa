"""The memory that a process has freed, measured by page faults."""

import subprocess
import sys

import pytest

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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_used_again_without_new_pages():
    one_round = NUM_BLOCKS * BLOCK_PAGES
    assert first_touches("keep") < one_round / 8
    assert first_touches("default") > one_round  # without this, the test could not fail
