"""Stands in for SGLang's kernel package on a machine without a GPU; put on the server's PYTHONPATH only then.

Two of SGLang's modules import names from it that only speculative decoding calls. And SGLang's weight checker waits
for CUDA before it hashes, on every device: without CUDA there is nothing to wait for.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

if not torch.cuda.is_available():
    torch.cuda.synchronize = lambda device=None: None


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a function that says what is missing when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} needs SGLang's kernel package, which is not installed on this machine")

    return missing
