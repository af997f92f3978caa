"""The workers of both sides of `benchmarks.protocol`, in one module, so that both load the same libraries."""

from __future__ import annotations

import numpy as np
import ray

from asyncrl.single_controller import DataProto, Dispatch, Worker, register


class Echo(Worker):
    """Returns the `DataProto` that it is given."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        """The same batch, when the group has it back."""
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo_later(self, data: DataProto) -> DataProto:
        """The same batch, as a future."""
        return data

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        """Rows that arrived."""
        return len(data)


@ray.remote(num_cpus=0.5)
class PlainEcho:
    """The same without asyncrl: returns the numpy arrays that it is given."""

    def echo(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same arrays."""
        return arrays
