"""Compares asyncrl's batch codec with torch.save and pickle 5, and asyncrl's single controller with plain Ray calls.

``python -m benchmarks.protocol`` measures a batch of 64 rows of 2048 tokens, with ids, two float columns, a mask and
strings.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from ray._private.worker import global_worker

from asyncrl.core.host import own_python
from asyncrl.single_controller import DataProto, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from asyncrl.single_controller.codec import decode, encode
from asyncrl.single_controller.serialization import from_parts, parts_of
from benchmarks.echo import Echo, PlainEcho
from benchmarks.report import Target, median_times, milliseconds, print_report

NUM_ROWS = 64
NUM_TOKENS = 2048
NUM_WORKERS = 4
# Start the workers this many times, because a worker's speed depends on its CPU core.
# After each start, the benchmark calls asyncrl's and plain Ray's workers alternately, and divides the two times.
# The reported ratio is the median over all starts of the workers.
NUM_STARTS = 3
RAY_OPTIONS = {
    "address": "local",
    "runtime_env": own_python(),
    "num_cpus": 16,
    "include_dashboard": False,
    "log_to_driver": False,
    "object_store_memory": 400 * 2**20,
}

TARGETS = {
    "codec_vs_torch_save": Target(at_least=20),
    "codec_vs_pickle5": Target(),
    "dispatch_vs_ray_calls": Target(at_most=1.15),
    "driver_bytes_share_chained": Target(at_most=0.01),
}


def make_batch() -> DataProto:
    """Return a random batch of about 2.3 MB."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_ROWS, NUM_TOKENS)
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.randint(0, 150_000, shape, generator=generator),
            "log_probs": torch.randn(shape, generator=generator),
            "advantages": torch.randn(shape, generator=generator),
            "response_mask": torch.rand(shape, generator=generator) < 0.5,
        },
        non_tensors={"text": [f"the answer to question {row} is {row * row}" for row in range(NUM_ROWS)]},
        meta_info={"temperature": 1.0},
    )


def codec_round_trip(data: DataProto) -> None:
    """Encode and decode a batch with asyncrl's codec. The decoded tensors are views of the encoded bytes."""
    from_parts(DataProto, decode(encode(parts_of(data))))


def torch_save_round_trip(data: DataProto) -> None:
    """Encode and decode a batch in the same way as verl: tensors with torch.save, and everything else with pickle."""
    file = io.BytesIO()
    assert data.batch is not None
    torch.save(data.batch.contiguous().consolidate(), file)
    rest = pickle.dumps((data.non_tensor_batch, data.meta_info))
    torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=False)
    pickle.loads(rest)


def pickle5_round_trip(arrays: dict[str, np.ndarray]) -> None:
    """Encode and decode arrays with pickle protocol 5 and out-of-band buffers."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
    pickle.loads(stream, buffers=buffers)


def plain_arrays(data: DataProto) -> dict[str, np.ndarray]:
    """Return the columns of a batch as numpy arrays, by name."""
    columns: dict[str, Any] = {} if data.batch is None else dict(data.batch.items())
    return {key: tensor.numpy() for key, tensor in columns.items()} | data.non_tensor_batch


def plain_dispatch(actors: list[Any], arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split the arrays, send each part to a plain Ray actor, and concatenate the results."""
    parts = {key: np.array_split(array, len(actors)) for key, array in arrays.items()}
    calls = [actor.echo.remote({key: part[rank] for key, part in parts.items()}) for rank, actor in enumerate(actors)]
    results = ray.get(calls)
    return {key: np.concatenate([result[key] for result in results]) for key in arrays}


def bytes_received(call: Callable[[], Any]) -> int:
    """Return how many bytes Ray deserializes in this process while ``call`` runs."""
    context = global_worker.get_serialization_context()
    original = context.deserialize_objects
    received = 0

    def counting(serialized: list[Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal received
        received += sum(len(entry[0]) for entry in serialized if entry[0] is not None)
        return original(serialized, *args, **kwargs)

    context.deserialize_objects = counting
    try:
        call()
    finally:
        context.deserialize_objects = original
    return received


def measure_dispatch(data: DataProto, arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the median seconds to send a batch to workers and back, with asyncrl and with plain Ray, by name.

    This function starts new processes as workers.
    """
    group = RayWorkerGroup(worker_pool(), RayClassWithInitArgs(Echo), name_prefix="measured")
    actors: list[Any] = [PlainEcho.remote() for _ in range(NUM_WORKERS)]
    try:
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: group.echo(data),
            "ray_calls": lambda: plain_dispatch(actors, arrays),
        }
        return median_times(calls, num_runs=50, warm_up=10)
    finally:
        group.shutdown()
        for actor in actors:
            ray.kill(actor)


def measure_bytes(data: DataProto) -> tuple[int, int]:
    """Return how many bytes the driver receives if one worker group processes the result of another worker group.

    The result is a pair of numbers: if the driver receives the batch from the first group and sends the batch to the
    second group, and if the driver passes only a future of the batch.
    """
    first = RayWorkerGroup(worker_pool(), RayClassWithInitArgs(Echo), name_prefix="first")
    second = RayWorkerGroup(worker_pool(), RayClassWithInitArgs(Echo), name_prefix="second")
    through_driver = bytes_received(lambda: second.count(first.echo(data)))
    chained = bytes_received(lambda: second.count(first.echo_later(data)))
    first.shutdown()
    second.shutdown()
    return through_driver, chained


def worker_pool() -> RayResourcePool:
    """Return a Ray resource pool for the workers of one group."""
    return RayResourcePool([NUM_WORKERS], use_gpu=False, max_colocate_count=1, num_cpus_per_process=0.5)


def main() -> None:
    """Measure the codec and the calls of workers. Print a table, then the figures as JSON."""
    torch.set_num_threads(1)
    data = make_batch()
    arrays = plain_arrays(data)
    codec = median_times(
        {
            "codec": lambda: codec_round_trip(data),
            "torch_save": lambda: torch_save_round_trip(data),
            "pickle5": lambda: pickle5_round_trip(arrays),
        },
        num_runs=15,
        num_calls=20,
    )
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ray.init(**RAY_OPTIONS)
    try:
        through_driver, chained = measure_bytes(data)
        times = [measure_dispatch(data, arrays) for _ in range(NUM_STARTS)]
    finally:
        ray.shutdown()
    figures = {
        "codec_vs_torch_save": codec["torch_save"] / codec["codec"],
        "codec_vs_pickle5": codec["pickle5"] / codec["codec"],
        "dispatch_vs_ray_calls": median(taken["dispatch"] / taken["ray_calls"] for taken in times),
        "driver_bytes_share_chained": chained / data.nbytes,
    }
    rows = {f"{name}, round trip": milliseconds(seconds) for name, seconds in codec.items()}
    rows |= {
        f"{name}, 4 workers and back": milliseconds(median(taken[name] for taken in times))
        for name in ("dispatch", "ray_calls")
    }
    rows |= {
        "driver received, through the driver": f"{through_driver} bytes",
        "driver received, chained": f"{chained} bytes",
    }
    title = f"batch of {NUM_ROWS} x {NUM_TOKENS}, {data.nbytes / 1e6:.1f} MB"
    print_report(title, rows, figures, TARGETS, baseline="torch.save of the TensorDict; plain Ray calls")


if __name__ == "__main__":
    main()
