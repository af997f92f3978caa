"""Runs a function on several gloo ranks. Each rank is a new process. A function that hangs fails after a timeout.

The ranks are forked from a server process that has imported torch and transformers. The import takes seconds, but a
fork takes milliseconds. The server starts at the first call in a test process, and ends with the test process.
"""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

# The server imports these libraries before it forks ranks. Each rank imports the project's modules after the fork.
IMPORTED_ONCE = [
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "tensordict",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "peft",
    "ray",
    "zmq",
]


def run_on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Call ``function(*args)`` on every rank. Returns the list of results. If a rank fails or dies, this call fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    # Start a TCP store in this process. The ranks find each other through the store, as with torchrun.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe() for _ in range(num_ranks)]
    processes = [
        context.Process(target=_entry, args=(rank, num_ranks, store.port, pipes[rank][1], function, args), daemon=True)
        for rank in range(num_ranks)
    ]
    for process, (_, of_rank) in zip(processes, pipes, strict=True):
        process.start()
        of_rank.close()  # otherwise the rank's pipe would stay open after its death
    try:
        return _outcomes([ours for ours, _ in pipes], timeout_s)
    finally:
        for ours, _ in pipes:
            ours.close()
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()


def _outcomes(receivers: list[Connection], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(waiting, timeout_s)
        assert ready, f"only the ranks {sorted(results)} have finished after {timeout_s} s"
        for receiver in ready:
            rank = receivers.index(receiver)
            outcome, failed = receiver.recv()
            assert not failed, f"rank {rank}:\n{outcome}"
            results[rank] = outcome
    return [results[rank] for rank in range(len(receivers))]


def _entry(rank: int, num_ranks: int, port: int, parent: Connection, function: Callable[..., Any], args: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    try:
        outcome = function(*args)
    except BaseException:  # noqa: BLE001 - the parent process fails the test
        parent.send((traceback.format_exc(), True))
        return
    parent.send((outcome, False))
    with contextlib.suppress(EOFError, OSError):
        parent.recv()  # wait until all ranks have finished, because they can still need this rank
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
