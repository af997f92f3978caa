"""Workers that report where they run, for tests on the shared Ray cluster."""

import os
from typing import Any

import ray

from asyncrl.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
)


class Probe(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def env(self, key):
        return os.environ.get(key)

    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return self.rank, self.world_size, ray.util.get_node_ip_address()

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


def pool_of(*process_on_nodes: int, num_cpus: float = 0.5, **options: Any) -> RayResourcePool:
    options = {
        "max_colocate_count": 1,
        "use_gpu": False,
        "num_cpus_per_process": num_cpus,
        "timeout_s": 120.0,
    } | options
    return RayResourcePool(list(process_on_nodes), **options)


def group_on(pool: RayResourcePool, worker: type[Worker] = Probe, **options: Any) -> RayWorkerGroup:
    return RayWorkerGroup(pool, RayClassWithInitArgs(worker), **options)
