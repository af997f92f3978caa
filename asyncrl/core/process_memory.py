"""How much freed memory a process keeps instead of returning it to the kernel. Imports neither torch nor ray."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

WORKER_BYTES = 256 << 20
"""Freed bytes that a computing process keeps: more than one step of a small model needs, and little for any host."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # as in malloc.h


def keep_freed_memory(num_bytes: int) -> None:
    """Make glibc keep freed memory for later allocations instead of returning it to the kernel.

    The kernel zeroes each new page at its first access. A process that allocates the same tensors or frames in every
    step pays for this in every step: a tenth of the processor time of a small model's update, and a third of the time
    to receive a frame.

    Args:
        num_bytes: Most bytes to keep at the end of each heap, in 0..2**31 - 1. A block of 32 MiB or more is always
            returned at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    options = {
        "M_TRIM_THRESHOLD": (_M_TRIM_THRESHOLD, num_bytes),
        "M_TOP_PAD": (_M_TOP_PAD, 64 << 20),
        "M_MMAP_THRESHOLD": (_M_MMAP_THRESHOLD, 32 << 20),
    }
    for name, (option, value) in options.items():
        if mallopt is None or not mallopt(option, value):
            logger.info("the C library does not support %s; freed memory returns to the kernel", name)
