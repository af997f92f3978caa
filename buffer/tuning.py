"""What a server of the buffer sets for its own process: garbage collection, memory, and its end."""

import ctypes
import gc
import logging
import os
import signal

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MALLOC_OPTIONS = {"M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_TOP_PAD": (-2, 64 << 20), "M_MMAP_THRESHOLD": (-3, 32 << 20)}


def calm_collector() -> None:
    """Keep Python's full garbage collections away: their cost grows with the ledger, which holds no cycles."""
    gc.set_threshold(10_000, 20, 1_000_000)


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux)."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("the kernel refused PR_SET_PDEATHSIG; the server may outlive its parent")
    if os.getppid() != parent:
        os._exit(1)


def keep_memory() -> None:
    """Have glibc keep what is freed: a batch leaves, and the next takes its place without new pages from the kernel.

    A third of the time to receive a frame is the kernel's, for pages that were given back a moment ago. What is kept is
    what was once held, within ``buffer.max_stored_bytes``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, (option, value) in _MALLOC_OPTIONS.items():
        if mallopt is None or not mallopt(option, value):
            logger.info("the C library has no %s; memory goes back to the kernel with each batch", name)
