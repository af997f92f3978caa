"""The public names of the packages, and the modules that their import loads."""

import inspect
import subprocess
import sys

import pytest

import asyncrl
import asyncrl.single_controller


def test_public_names_are_sorted_and_exist():
    for package in (asyncrl, asyncrl.single_controller):
        names = package.__all__
        assert sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name)) == list(names)
        assert all(hasattr(package, name) for name in names)


VERLS_NAMES = {
    "base.decorator": "Dispatch Execute register MAGIC_ATTR DISPATCH_MODE_FN_REGISTRY get_predefined_dispatch_fn "
    "get_predefined_execute_fn register_dispatch_mode update_dispatch_mode make_nd_compute_dataproto_dispatch_fn "
    "dispatch_one_to_all dispatch_all_to_all collect_all_to_all dispatch_dp_compute collect_dp_compute "
    "dispatch_dp_compute_data_proto dispatch_dp_compute_data_proto_with_func collect_dp_compute_data_proto "
    "dispatch_nd_compute collect_nd_compute dispatch_nd_compute_dataproto collect_nd_compute_dataproto "
    "dispatch_lazy_compute_data_proto collect_lazy_compute_data_proto",
    "base": "Worker WorkerHelper WorkerGroup ResourcePool ClassWithInitArgs",
    "ray": "RayResourcePool SubRayResourcePool RayClassWithInitArgs RayWorkerGroup create_colocated_worker_cls "
    "create_colocated_worker_cls_fused create_colocated_worker_raw_cls FusedWorkerCLSName func_generator "
    "get_random_string sort_placement_group_by_node_ip split_resource_pool merge_resource_pool",
    "elsewhere": "ResourcePoolManager Role parallel_put ray_noset_visible_devices DynamicEnum",
}


def test_all_names_of_verl_are_in_one_package():
    wanted = {name for names in VERLS_NAMES.values() for name in names.split()}
    assert wanted - set(asyncrl.single_controller.__all__) == set()
    base, ray_class = asyncrl.single_controller.Worker, asyncrl.single_controller.RayClassWithInitArgs
    # If Ray has wrapped the class, its methods have an additional parameter from Ray.
    named = list(inspect.signature(base._register_dispatch_collect_info).parameters)
    assert named[:4] == ["self", "mesh_name", "dp_rank", "is_collect"]
    assert set(named[4:]) <= {"_ray_trace_ctx"}
    assert list(inspect.signature(ray_class.__call__).parameters) == [
        "self", "placement_group", "placement_group_bundle_idx", "use_gpu", "num_gpus", "sharing_with", "device_name",
    ]  # fmt: skip
    assert list(inspect.signature(asyncrl.single_controller.RayWorkerGroup).parameters)[:8] == [
        "resource_pool", "ray_cls_with_init", "bin_pack", "name_prefix", "detached", "worker_names", "worker_handles",
        "ray_wait_register_center_timeout",
    ]  # fmt: skip
    assert list(inspect.signature(asyncrl.single_controller.RayResourcePool).parameters)[:6] == [
        "process_on_nodes", "use_gpu", "name_prefix", "max_colocate_count", "detached", "accelerator_type",
    ]  # fmt: skip


@pytest.mark.long
def test_the_protocol_imports_without_torch_and_ray_and_the_controller_without_torch():
    code = (
        "import sys\n"
        "import asyncrl, asyncrl.core, asyncrl.single_controller.codec, asyncrl.core.remote\n"
        "from asyncrl import DataProtoFuture\n"
        "assert not {'torch', 'ray'} & sys.modules.keys()\n"
        "import asyncrl.single_controller\n"
        "from asyncrl import Dispatch, RayWorkerGroup, Worker, register\n"
        "assert 'torch' not in sys.modules\n"
        "from asyncrl import DataProto\n"
        "assert DataProto.__module__ == 'asyncrl.single_controller.data_proto'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
