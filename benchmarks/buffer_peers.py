"""Stores and fetches batches with Ray's queue and with TransferQueue, for a comparison with the buffer.

`ray_queue_round` and `transfer_queue_round` each return a function. Each call of the returned function stores a batch,
fetches the batch again, and returns how many seconds this took.
"""

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from asyncrl.core.host import own_python

Batch = Mapping[str, np.ndarray]


@contextmanager
def own_ray() -> Iterator[None]:
    """Start a Ray cluster at normal process priority, and shut it down at the end of the context."""
    import ray

    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray reads this mixed-case name
    own = {"runtime_env": own_python(), "include_dashboard": False}
    ray.init(**own, num_cpus=8, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def ray_queue_round(batch: Batch) -> Callable[[], float]:
    """Return a function that puts ``batch`` into a `ray.util.queue.Queue` and gets the batch back.

    The returned function returns how many seconds this took.
    """
    from ray.util.queue import Queue

    queue = Queue()

    def round_s() -> float:
        began = time.perf_counter()
        queue.put(dict(batch))
        got = queue.get()
        elapsed = time.perf_counter() - began
        assert set(got) == set(batch)
        return elapsed

    return round_s


def transfer_queue_round(batch: Batch, num_units: int) -> Callable[[], float] | None:
    """Return a function that puts ``batch`` into TransferQueue (verl's data store) and gets the batch back.

    The returned function returns how many seconds this took. TransferQueue has ``num_units`` storage units. If
    TransferQueue is not installed, return None instead of a function.
    """
    try:
        transfer_queue = importlib.import_module("transfer_queue")
    except ImportError:
        return None
    import torch
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    options = {"backend": {"SimpleStorage": {"num_data_storage_units": num_units}}}
    transfer_queue.init(OmegaConf.create(options, flags={"allow_objects": True}))
    num_rows = len(next(iter(batch.values())))
    rows = TensorDict({name: torch.from_numpy(values) for name, values in batch.items()}, batch_size=num_rows)
    tags: list[dict[str, Any]] = [{} for _ in range(num_rows)]
    number = 0

    def round_s() -> float:
        nonlocal number
        number += 1
        keys = [f"{number}_{row}" for row in range(num_rows)]
        began = time.perf_counter()
        transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=rows, tags=tags)
        got = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
        elapsed = time.perf_counter() - began
        assert got.batch_size[0] == num_rows
        transfer_queue.kv_clear(keys=keys, partition_id="train")
        return elapsed

    return round_s


def stop_transfer_queue() -> None:
    """Stop the actors of TransferQueue. The next call of `transfer_queue_round` starts new actors."""
    importlib.import_module("transfer_queue").close()
