"""One controller speaks to many workers: registered methods, dispatch modes, and groups of Ray actors."""

from asyncrl.protocol.errors import UsageError

from .calling import func_generator
from .colocated import (
    FusedWorkerCLSName,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from .deadline import call_deadline
from .decorator import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    init_predefined_dispatch_mode,
    init_predefined_execute_mode,
    register,
)
from .devices import ray_noset_visible_devices
from .dispatch import (
    DISPATCH_MODE_FN_REGISTRY,
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    collect_lazy_compute_data_proto,
    collect_nd_compute,
    collect_nd_compute_dataproto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_lazy_compute_data_proto,
    dispatch_nd_compute,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    dummy_direct_rollout_call,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from .dynamic_enum import DynamicEnum
from .liveness import check_workers_alive
from .object_store import parallel_put
from .rank_info import DistGlobalInfo, DistRankInfo
from .ray_class import RayClassWithInitArgs
from .ray_pool import RayResourcePool, sort_placement_group_by_node_ip
from .ray_worker_group import RayWorkerGroup
from .resource_pool import ClassWithInitArgs, ResourcePool, get_random_string
from .results import PendingResult, PendingResults
from .roles import ResourcePoolManager, Role
from .split_pool import SubRayResourcePool, extract_pg_from_exist, merge_resource_pool, split_resource_pool
from .worker import Worker, WorkerHelper
from .worker_group import WorkerGroup

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY",
    "MAGIC_ATTR",
    "ClassWithInitArgs",
    "Dispatch",
    "DistGlobalInfo",
    "DistRankInfo",
    "DynamicEnum",
    "Execute",
    "FusedWorkerCLSName",
    "PendingResult",
    "PendingResults",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "SubRayResourcePool",
    "UsageError",
    "Worker",
    "WorkerGroup",
    "WorkerHelper",
    "call_deadline",
    "check_workers_alive",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_lazy_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_lazy_compute_data_proto",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "dummy_direct_rollout_call",
    "extract_pg_from_exist",
    "func_generator",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "get_random_string",
    "init_predefined_dispatch_mode",
    "init_predefined_execute_mode",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "parallel_put",
    "ray_noset_visible_devices",
    "register",
    "register_dispatch_mode",
    "sort_placement_group_by_node_ip",
    "split_resource_pool",
    "update_dispatch_mode",
]
