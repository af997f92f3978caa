"""The devices that a worker sees, from the environment variables of several kinds of accelerators."""

import sys
from types import SimpleNamespace

import pytest
import ray

from asyncrl.single_controller import Worker, ray_noset_visible_devices, worker


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    return {}


def test_hip_visible_devices_become_cuda_visible_devices(environment):
    environment["HIP_VISIBLE_DEVICES"] = "0,1"
    worker.set_up_visible_devices(environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_rocr_visible_devices_alone_become_cuda_visible_devices(environment):
    environment["ROCR_VISIBLE_DEVICES"] = "2"
    worker.set_up_visible_devices(environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "2"}


def test_equal_values_for_hip_and_cuda_devices_are_accepted(environment):
    environment.update(HIP_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="1")
    worker.set_up_visible_devices(environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    "clash",
    [
        {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"},
        {"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"},
        {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"},
    ],
)
def test_contradictory_device_variables_are_refused(environment, clash):
    environment.update(clash)
    with pytest.raises(ValueError, match="VISIBLE_DEVICES"):
        worker.set_up_visible_devices(environment)


def test_an_npu_has_its_own_device_variable(environment):
    assert worker.visible_devices_name(environment) == "CUDA_VISIBLE_DEVICES"
    environment["ASCEND_RT_VISIBLE_DEVICES"] = "0"
    assert worker.visible_devices_name(environment) == "ASCEND_RT_VISIBLE_DEVICES"


@pytest.mark.parametrize(("variable", "device"), [("CUDA", "GPU"), ("HIP", "GPU"), ("ASCEND_RT", "NPU")])
def test_with_rays_noset_variable_a_worker_uses_the_device_that_ray_assigned(
    environment, monkeypatch, variable, device
):
    class Context:
        def get_accelerator_ids(self):
            return {"GPU": ["3"], "NPU": ["5"]}

    chosen = []
    runtime = SimpleNamespace(is_available=lambda: True, set_device=chosen.append)
    monkeypatch.setattr(worker, "_device_module", lambda is_npu: runtime)
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    environment[f"RAY_EXPERIMENTAL_NOSET_{variable}_VISIBLE_DEVICES"] = "1"
    if device == "NPU":
        environment["ASCEND_RT_VISIBLE_DEVICES"] = "0,1,2,3,4,5"
    assert ray_noset_visible_devices(environment)
    worker.set_up_visible_devices(environment)
    assert environment["LOCAL_RANK"] == {"GPU": "3", "NPU": "5"}[device]
    assert chosen == [{"GPU": 3, "NPU": 5}[device]]


@pytest.mark.parametrize(
    ("visible", "assigned", "place"),
    [("4,5", "5", 1), ("GPU-aa,GPU-bb", "GPU-bb", 1), ("7,6", "7", 0)],
)
def test_the_assigned_device_becomes_an_index_into_the_visible_devices(
    environment, monkeypatch, visible, assigned, place
):
    chosen = []
    runtime = SimpleNamespace(is_available=lambda: True, set_device=chosen.append)
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": [assigned], "NPU": []})
    monkeypatch.setattr(worker, "_device_module", lambda is_npu: runtime)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    environment |= {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": visible}
    worker.set_up_visible_devices(environment)
    assert (environment["LOCAL_RANK"], chosen) == (str(place), [place])


@pytest.mark.parametrize("other", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_a_worker_without_visible_devices_has_none_on_rocm(environment, other):
    environment |= {"CUDA_VISIBLE_DEVICES": "", other: "0,1"}
    worker.set_up_visible_devices(environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": ""}


def test_visible_devices_alone_do_not_count_as_rays_noset_flag():
    assert not ray_noset_visible_devices({"CUDA_VISIBLE_DEVICES": "0"})


def test_the_error_for_a_worker_outside_a_group_names_the_missing_variable(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK"):
        Worker()


def test_a_worker_reads_its_rank_and_addresses_from_the_environment(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "99"}.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    ours = Worker(cuda_visible_devices="4")
    assert (ours.rank, ours.world_size, ours.get_master_addr_port()) == (1, 2, ("host", "99"))
    assert ours.get_cuda_visible_devices() == "4"
    assert Worker.env_keys()[:2] == ["WORLD_SIZE", "RANK"]
    ours._register_dispatch_collect_info("mesh", dp_rank=0, is_collect=False)
    with pytest.raises(ValueError, match="registered already"):
        ours._register_dispatch_collect_info("mesh", dp_rank=0, is_collect=False)
