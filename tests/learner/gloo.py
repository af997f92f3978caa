"""Runs a function on several gloo ranks in fresh processes; a hang fails by time-out."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def run_on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call ``function(*args)`` on every rank; return the results by rank. A failing rank fails the call."""
    context = mp.get_context("spawn")
    results = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=_entry, args=(rank, num_ranks, port, results, function, args), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    gathered: dict[int, Any] = {}
    try:
        for _ in range(num_ranks):
            rank, outcome, failed = results.get(timeout=timeout_s)  # queue.Empty: a rank hangs
            assert not failed, f"rank {rank}:\n{outcome}"
            gathered[rank] = outcome
        for process in processes:
            process.join(timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return [gathered[rank] for rank in range(num_ranks)]


def _entry(rank: int, num_ranks: int, port: int, results: Any, function: Callable[..., Any], args: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, function(*args), False))
    except BaseException:  # noqa: BLE001 - reported to the parent, which fails the test
        results.put((rank, traceback.format_exc(), True))
        return
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
