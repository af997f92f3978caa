"""One Ray cluster for all tests that need one, because to start one takes as long as most of them.

A second one in the same process works; `tests/single_controller/test_two_clusters.py` is about that.
"""

import os

import pytest
import ray
from ray.cluster_utils import Cluster

NODE_OPTIONS = {"object_store_memory": 120 * 2**20, "include_dashboard": False}
HEAD_ADDRESS = "127.0.0.9"
SECOND_ADDRESS = "127.0.0.10"


@pytest.fixture(scope="session")
def cluster():
    """Nodes 127.0.0.9 (12 CPUs) and 127.0.0.10 (8 CPUs), whose order by text is not their order by number."""
    environment = {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 12, "node_ip_address": HEAD_ADDRESS, **NODE_OPTIONS}
    )
    cluster.add_node(num_cpus=8, node_ip_address=SECOND_ADDRESS, **NODE_OPTIONS)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
