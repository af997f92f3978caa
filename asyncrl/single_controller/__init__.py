"""One controller speaks to many workers: registered methods, dispatch modes, and groups of Ray actors."""

from .deadline import call_deadline
from .decorator import Dispatch, Execute, register
from .dispatch import (
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from .object_store import parallel_put
from .ray_class import RayClassWithInitArgs
from .ray_pool import RayResourcePool, sort_placement_group_by_node_ip
from .ray_worker_group import RayWorkerGroup
from .results import PendingResult, PendingResults
from .worker import Worker
from .worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup

__all__ = [
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "PendingResult",
    "PendingResults",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "Worker",
    "WorkerGroup",
    "call_deadline",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "parallel_put",
    "register",
    "register_dispatch_mode",
    "sort_placement_group_by_node_ip",
    "update_dispatch_mode",
]
