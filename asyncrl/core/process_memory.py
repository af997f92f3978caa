"""How the memory that a process frees goes back to the kernel. Loads neither torch nor ray."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

WORKER_BYTES = 256 << 20
"""Freed bytes that a process that computes keeps: more than one step of a small model, little on a host of any size."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # as in malloc.h


def keep_freed_memory(num_bytes: int) -> None:
    """Have glibc keep freed memory for what is allocated next, instead of giving it back and asking for it again.

    The kernel fills a new page with zeros when it is first touched. A process that allocates the same tensors or frames
    in every step would pay for that in every step: a tenth of the processor time of a small model's update, a third of
    that of receiving a frame.

    Args:
        num_bytes: What is kept at most at the end of each heap, in 0..2**31 - 1. A block of 32 MiB or more always goes
            back at once.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    options = {
        "M_TRIM_THRESHOLD": (_M_TRIM_THRESHOLD, num_bytes),
        "M_TOP_PAD": (_M_TOP_PAD, 64 << 20),
        "M_MMAP_THRESHOLD": (_M_MMAP_THRESHOLD, 32 << 20),
    }
    for name, (option, value) in options.items():
        if mallopt is None or not mallopt(option, value):
            logger.info("the C library has no %s; freed memory goes back to the kernel", name)
