"""Lets one process (the controller) call methods of groups of Ray workers, and exchange batches with them.

Names are imported at their first use, so importing this package does not load torch or ray.
"""

# ruff: noqa: F403, F405 - the names are imported only for type checkers
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calls import *
    from .columns import *
    from .data_proto import *
    from .dispatch import *
    from .liveness import *
    from .resource_pool import *
    from .serialization import *
    from .worker import *
    from .worker_group import *

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY", "MAGIC_ATTR", "BatchData", "ClassWithInitArgs", "DataProto", "DataProtoConfig",
    "DataProtoFuture", "DataProtoItem", "Dispatch", "DynamicEnum", "Execute", "FusedWorkerCLSName",
    "RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "ResourcePool", "ResourcePoolManager", "Role",
    "SubRayResourcePool", "UsageError", "Worker", "WorkerGroup", "WorkerHelper", "all_gather_data_proto",
    "call_deadline", "collate_fn", "collect_all_to_all", "collect_dp_compute", "collect_dp_compute_data_proto",
    "collect_lazy_compute_data_proto", "collect_nd_compute", "collect_nd_compute_dataproto",
    "create_colocated_worker_cls", "create_colocated_worker_cls_fused", "create_colocated_worker_raw_cls",
    "deserialize_single_tensor", "deserialize_tensordict", "dispatch_all_to_all", "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto", "dispatch_dp_compute_data_proto_with_func", "dispatch_lazy_compute_data_proto",
    "dispatch_nd_compute", "dispatch_nd_compute_dataproto", "dispatch_one_to_all", "fold_batch_dim", "func_generator",
    "get_predefined_dispatch_fn", "get_predefined_execute_fn", "get_random_string", "list_of_dict_to_dict_of_list",
    "make_nd_compute_dataproto_dispatch_fn", "merge_resource_pool", "pad_dataproto_to_divisor", "parallel_put",
    "ray_death", "ray_noset_visible_devices", "register", "register_dispatch_mode", "serialize_single_tensor",
    "serialize_tensordict", "sort_placement_group_by_node_ip", "split_resource_pool", "unfold_batch_dim",
    "union_numpy_dict", "union_tensor_dict", "union_two_dict", "unpad_dataproto", "update_dispatch_mode",
]  # fmt: skip

_NEED_TORCH = {
    "DataProto", "DataProtoConfig", "DataProtoItem", "all_gather_data_proto", "collate_fn",
    "deserialize_single_tensor", "deserialize_tensordict", "fold_batch_dim", "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor", "serialize_single_tensor", "serialize_tensordict", "unfold_batch_dim",
    "union_numpy_dict", "union_tensor_dict", "union_two_dict", "unpad_dataproto",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "_padding_size_key":  # dispatch functions written for verl import `_padding_size_key`
        return import_module(".dispatch", __name__)._padding_size_key
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = ("dispatch", "resource_pool", "calls", "liveness", "worker", "worker_group")
    for module in ("data_proto", "columns", "serialization") if name in _NEED_TORCH else modules:
        home = import_module(f".{module}", __name__)
        if hasattr(home, name):
            value = globals()[name] = getattr(home, name)
            return value
    raise AttributeError(f"{name!r} is in __all__ of {__name__!r}, but no module of this package defines it")
