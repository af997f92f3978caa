"""The workers that `benchmarks.protocol` calls: one as an asyncrl `Worker`, and one as a plain Ray actor.

Both workers are in one module, so their processes load the same libraries.
"""

from __future__ import annotations

import numpy as np
import ray

from asyncrl.single_controller import DataProto, Dispatch, Worker, register


class Echo(Worker):
    """Returns the `DataProto` that it receives."""

    @register(Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        """Return ``data``. The caller waits for the result."""
        return data

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo_later(self, data: DataProto) -> DataProto:
        """Return ``data``. The caller gets a future and does not wait."""
        return data

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        """Return the number of rows that this worker received."""
        return len(data)


@ray.remote(num_cpus=0.5)
class PlainEcho:
    """A plain Ray actor, the counterpart of `Echo`. The actor returns the numpy arrays that it receives."""

    def echo(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return ``arrays``."""
        return arrays
