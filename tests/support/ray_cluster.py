"""The Ray cluster that tests share, the addresses of the cluster's nodes, and errors in the form that Ray raises."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.core.host import own_python

# Test sessions that run at the same time use different addresses, so their ports do not conflict.
_NETWORK = ".".join(str(byte) for byte in bytes.fromhex(os.environ.get("ASYNCRL_TEST_SESSION", "0000")[:4]))
HEAD_ADDRESS = f"127.{_NETWORK}.9"
SECOND_ADDRESS = f"127.{_NETWORK}.10"
NODE_OPTIONS = {"object_store_memory": 120 * 2**20, "include_dashboard": False}

# Tell Ray not to start idle workers in advance. Each one takes a second of CPU time, and most are never used.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "OMP_NUM_THREADS": "1",
}


def raised_by_ray(error: Exception) -> Exception:
    """Return the error that Ray raises for the caller when an actor's method raises ``error``.

    The text of this error begins with the actor's stack trace.
    """
    from ray.exceptions import RayTaskError

    account = f"ray::Worker.method() (pid=1)\n  File worker.py, line 1\n{error}"
    return RayTaskError("method", account, error).as_instanceof_cause()


@contextmanager
def two_node_cluster() -> Iterator:
    """Yield a cluster of two nodes with 12 and 8 CPUs.

    The nodes' addresses end in .9 and .10, so sorting the addresses as text and as numbers gives different orders.
    """
    import ray
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 12, "node_ip_address": HEAD_ADDRESS, **NODE_OPTIONS}
    )
    try:
        cluster.add_node(num_cpus=8, node_ip_address=SECOND_ADDRESS, **NODE_OPTIONS)
        ray.init(address=cluster.address, runtime_env=own_python(), log_to_driver=False)
        yield cluster
        ray.shutdown()
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def away_from_the_shared_cluster() -> Iterator[None]:
    """Disconnect this process from the shared Ray cluster during the ``with`` block. Reconnect it after the block."""
    import ray

    address = ray.get_runtime_context().gcs_address if ray.is_initialized() else None
    ray.shutdown()
    try:
        yield
    finally:
        ray.shutdown()
        if address is not None:
            ray.init(address=address, runtime_env=own_python(), log_to_driver=False)
