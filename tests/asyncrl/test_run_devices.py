"""The GPUs that each process of a run sees, on a Ray cluster with simulated GPUs."""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ray
from ray import cloudpickle

from asyncrl.checks import resolve_devices
from asyncrl.cli import preflight, train_command
from asyncrl.cli.compose import compose_run
from asyncrl.config import learner_pools, requested_cpus, requested_gpus
from asyncrl.core.errors import DeadlineError, UsageError
from asyncrl.core.host import gpu_memory_bytes, own_python, visible_gpus
from asyncrl.core.types import Prompt
from asyncrl.metrics import TerminalView
from asyncrl.run.cluster import EnginePlaces, gpu_of_this_node, learner_layout, pool_of_one, ray_cluster, worker_env
from asyncrl.run.run import Run
from asyncrl.sft.warm_start import WarmStart, warm_start
from asyncrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Role, Worker
from asyncrl.single_controller.resource_pool import JoinedResourcePool
from learner.config import Device
from rollout_fleet.config import EngineDevice
from rollout_fleet.rewards import WeightedRewards
from tests.support.ray_cluster import away_from_the_shared_cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # starts about sixty processes on a separate Ray cluster
cloudpickle.register_pickle_by_value(sys.modules[__name__])

VARIABLES = ("CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def colocated(num_ranks, tp_size):
    return [
        "placement.colocated=true",
        f"learner.num_ranks={num_ranks}",
        f"rollout_fleet.num_engines={num_ranks // tp_size}",
        f"rollout_fleet.sglang.tp_size={tp_size}",
    ]


class Probe(Worker):
    """Stands in for a rank or a rollout worker."""

    def environment(self):
        return {name: os.environ.get(name) for name in VARIABLES}


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Return a function that simulates a machine with GPUs. ``visible`` becomes ``CUDA_VISIBLE_DEVICES``."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(num_gpus, visible=None):
        tool = tmp_path / f"driver-{num_gpus}" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        lines = [f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: GPU-{index:08d}-aa)" for index in range(num_gpus)]
        listed = "".join(f"echo '{line}'\n" for line in lines)
        sizes = "".join(f"echo 'GPU-{index:08d}-aa, {81559 - index}'\n" for index in range(num_gpus))
        tool.write_text(f'#!/bin/sh\nif [ "$1" = -L ]; then\n{listed or ":"}\nelse\n{sizes or ":"}\nfi\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


@pytest.fixture(scope="module", autouse=True)
def away():
    with away_from_the_shared_cluster():
        yield


@pytest.fixture(scope="module")
def ray_with_8_gpus():
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    own = {"address": "local", "runtime_env": own_python()}
    ray.init(**own, num_cpus=32, num_gpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
    if hidden is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def run(*options):
    return compose_run(["experiment=quickstart", "learner.device=auto", *options])


def seen_by_all(config, num_joining=0):
    """Start all processes of a run. Returns the environment variables of each process, by the process's name."""
    probe = RayClassWithInitArgs(ray.remote(Probe))
    layout = learner_layout(config)
    groups = {
        name: RayWorkerGroup(pool, probe, worker_env=worker_env(config))
        for name, pool in layout.resource_pool_dict.items()
    }
    shared = layout.get_resource_pool(Role.from_string("actor")) if config.placement.colocated else None
    places = EnginePlaces(config, worker=probe, logs=Path(config.output_dir), pool=shared)
    groups["engine"] = places.first
    groups |= {
        f"engine-joined-{index}": RayWorkerGroup(pool_of_one(config, node_id="", full=()), probe)
        for index in range(num_joining)
    }
    try:
        return {
            f"{name}-{rank}": environment
            for name, group in groups.items()
            for rank, environment in enumerate(group.execute_all_sync("environment"))
        }
    finally:
        places.shutdown()
        for group in groups.values():
            group.shutdown()


def devices_of(seen, kind):
    return [one["CUDA_VISIBLE_DEVICES"] for name, one in seen.items() if name.startswith(kind)]


@pytest.mark.long
async def test_a_run_takes_only_the_visible_gpus_of_this_machine(gpus):
    gpus(8, visible="7,2,5,4")
    config = resolve_devices(run(*colocated(4, 2)), visible_gpus(), print)
    async with ray_cluster(config) as config:
        assert ray.cluster_resources()["GPU"] == 4
        seen = await asyncio.to_thread(seen_by_all, config)
        of_ranks = devices_of(seen, "learner")
        assert sorted(of_ranks) == ["2", "4", "5", "7"]
        assert devices_of(seen, "engine") == [",".join(of_ranks[:2]), ",".join(of_ranks[2:])], (
            "engines must see the GPUs of their ranks"
        )
        config = resolve_devices(run("learner.num_ranks=1", "rollout_fleet.num_engines=3"), visible_gpus(), print)
        seen = await asyncio.to_thread(seen_by_all, config)
        assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in seen.values()) == ["2", "4", "5", "7"]
        async with gpu_of_this_node(config) as reserved:
            assert reserved in ("2", "4", "5", "7")
            assert (await asyncio.to_thread(ray.available_resources)).get("GPU", 0) == 3


class Reached(Exception):
    """The test raises this error when the run starts its learner and engines."""


@pytest.mark.long
async def test_a_warm_start_releases_its_gpu_before_learner_and_engines_start(gpus, tmp_path, monkeypatch):
    gpus(8, visible="4,6")
    free = []

    async def fine_tuned(config, *, visible_devices):
        free.append((visible_devices, await asyncio.to_thread(free_gpus)))
        return tmp_path

    def free_gpus(wanted=1):
        for _ in range(100):  # Ray counts a GPU as free some time after its process has ended
            if (count := ray.available_resources().get("GPU", 0)) == wanted:
                break
            time.sleep(0.1)
        return count

    async def start_groups(run, *_):
        free.append(await asyncio.to_thread(free_gpus, 2))
        raise Reached

    monkeypatch.setattr(Run, "_start_groups", start_groups)
    config = resolve_devices(run(f"output_dir={tmp_path}"), visible_gpus(), print)
    assert config.learner.device is Device.cuda
    (tmp_path / "run" / "logs").mkdir(parents=True)
    view = TerminalView(title="", total_steps=1)
    made = Run(config, tmp_path / "run", (None, []), WarmStart(fine_tuned), view, lambda fault: None)
    with pytest.raises(Reached):
        await made.run()
    assert free in ([("4", 1), 2], [("6", 1), 2])


@pytest.mark.long
async def test_a_warm_start_on_cuda_needs_a_gpu_on_the_node_of_the_controller(gpus, tmp_path):
    gpus(0)
    config = run(f"output_dir={tmp_path}", "learner.device=cuda", "rollout_fleet.device=cpu")
    async with ray_cluster(config):
        with pytest.raises(ValueError, match=r"GPU for the warm start .*, got none; .*node with"):
            async with gpu_of_this_node(config):
                pass


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "ranks", "engines"),
    [
        pytest.param(["learner.num_ranks=2", "rollout_fleet.num_engines=3"], [1] * 2, [1] * 3, id="separate"),
        pytest.param(["rollout_fleet.num_engines={min:1,max:2}"], [1], [1] * 2, id="joining-engines"),
        pytest.param(["learner.num_ranks=2", "rollout_fleet.num_engines=2", "rollout_fleet.sglang.tp_size=3"],
                     [1] * 2, [3] * 2, id="tp=3"),
        pytest.param(["learner.device=cpu", "rollout_fleet.num_engines=2", "rollout_fleet.sglang.tp_size=4"],
                     [0], [4] * 2, id="learner-on-cpu", marks=pytest.mark.slow),
        pytest.param(["rollout_fleet.device=cpu", "learner.num_ranks=2"],
                     [1] * 2, [0], id="engines-on-cpu", marks=pytest.mark.slow),
        pytest.param(["learner.device=cpu", "rollout_fleet.device=cpu"], [0], [0], id="cpu", marks=pytest.mark.slow),
        pytest.param(["rollout_fleet.num_engines=2", "rollout_fleet.sglang.tp_size=4"],
                     [0], [0] * 2, id="auto-with-too-few"),
    ],
)  # fmt: skip
def test_no_two_separate_processes_see_the_same_gpu(ray_with_8_gpus, options, ranks, engines):
    said = []
    config = resolve_devices(run(*options), 8, said.append)
    seen = seen_by_all(config, num_joining=len(engines) - config.rollout_fleet.fewest_engines)
    assert None not in (*devices_of(seen, "learner"), *devices_of(seen, "engine")), "no process may see every GPU"
    for kind, wanted in (("learner", ranks), ("engine", engines)):
        assert [len(found.split(",")) if found else 0 for found in devices_of(seen, kind)] == wanted
    places = [(one["RANK"], one["LOCAL_RANK"], one["LOCAL_WORLD_SIZE"]) for one in seen.values()]
    assert places[: len(ranks)] == [(str(rank), str(rank), str(len(ranks))) for rank in range(len(ranks))]
    taken = [gpu for one in seen.values() for gpu in one["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    assert len(set(taken)) == len(taken) == sum(ranks) + sum(engines)
    assert bool(said) == (sum(ranks) + sum(engines) == 0 and "learner.device=cpu" not in options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "tp_size"),
    [(4, 2), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((3, 1), (8, 2), (6, 3), (8, 4), (8, 8)))],
)
def test_a_colocated_engine_sees_the_gpus_of_its_learner_ranks_in_their_order(ray_with_8_gpus, num_ranks, tp_size):
    seen = seen_by_all(resolve_devices(run(*colocated(num_ranks, tp_size)), 8, print))
    of_ranks = devices_of(seen, "learner")
    assert len(set(of_ranks) - {"", None}) == num_ranks
    assert devices_of(seen, "engine") == [
        ",".join(of_ranks[first : first + tp_size]) for first in range(0, num_ranks, tp_size)
    ]


@pytest.mark.long
def test_colocated_engines_share_only_the_pool_of_the_actor(ray_with_8_gpus):
    apart = ["algorithm.advantage=gae", "placement.pools={values:2}", "placement.critic=values"]
    config = resolve_devices(run(*colocated(2, 1), *apart), 8, print)
    seen = seen_by_all(config)
    of_ranks, of_values = devices_of(seen, "learner"), devices_of(seen, "values")
    assert devices_of(seen, "engine") == of_ranks
    assert len({*of_ranks, *of_values}) == requested_gpus(config) == 4
    layout = learner_layout(config)
    reserved = [pool.bundle() for pool in layout.resource_pool_dict.values() for _ in range(pool.world_size)]
    assert sum(bundle["CPU"] for bundle in reserved) == requested_cpus(config) == 2 * (1 + 1) + 2 * 1


@pytest.mark.long
def test_restarted_ranks_and_engines_get_the_same_gpus(ray_with_8_gpus, tmp_path):
    config = resolve_devices(run(*colocated(4, 2)), 8, print)
    layout, probe = learner_layout(config), RayClassWithInitArgs(ray.remote(Probe))
    pool = layout.get_resource_pool(Role.from_string("actor"))
    pool.enter()
    ranks = RayWorkerGroup(pool, probe, worker_env=worker_env(config))
    places = EnginePlaces(config, worker=probe, logs=tmp_path, pool=pool)
    try:
        before = [group.execute_all_sync("environment") for group in (ranks, places.first)]
        ranks.shutdown()
        places.replace_worker(1)
        engines = places.first.execute_all_sync("environment")  # the learner ranks are shut down here
        ranks = RayWorkerGroup(pool, probe, worker_env=worker_env(config))
        after = [ranks.execute_all_sync("environment"), engines]
        devices = [[[one["CUDA_VISIBLE_DEVICES"] for one in group] for group in life] for life in (before, after)]
        assert devices[0] == devices[1]
    finally:
        places.shutdown()
        ranks.shutdown()
        pool.leave()


def test_the_gpus_of_an_engine_are_never_on_two_nodes():
    pool = RayResourcePool([3, 5], max_colocate_count=2, name_prefix="learner")
    with pytest.raises(UsageError, match=r"'learner' must have a multiple of 2 .*got \[3, 5\]"):
        JoinedResourcePool(pool, 2)


@pytest.mark.long
def test_pools_of_critic_reference_and_reward_model_have_separate_gpus(ray_with_8_gpus, tmp_path):
    pools = ["placement.pools={critic:2,judge:1,ref:1}", "placement.critic=critic", "placement.reference=ref"]
    options = [*pools, "placement.reward_model=judge", f"learner.reward_model.path={tmp_path}", "algorithm.kl_coef=0.1"]
    config = resolve_devices(
        run("algorithm.advantage=gae", *options, "learner.num_ranks=2", "rollout_fleet.num_engines=1"), 8, print
    )
    seen = seen_by_all(config)
    assert sorted(map(len, learner_pools(config))) == sorted(map(len, ("judge", "critic", "learner", "ref")))
    taken = [one["CUDA_VISIBLE_DEVICES"] for one in seen.values()]
    assert all(taken)
    assert len(set(taken)) == len(taken) == 2 + 2 + 1 + 1 + 1


async def test_device_auto_follows_the_gpus_of_a_joined_cluster(ray_with_8_gpus):
    found = await asyncio.to_thread(lambda: ray.get_runtime_context().gcs_address)
    assert found
    from asyncrl.run.cluster import checked_against_cluster

    asked = run("learner.num_ranks=4", "rollout_fleet.num_engines=4", f"ray.address={found}")
    config = await asyncio.to_thread(checked_against_cluster, asked, print)
    assert (config.learner.device, config.rollout_fleet.device) == (Device.cuda, EngineDevice.cuda)
    with pytest.raises(ValueError, match=r"asks for 9 GPUs .* only 8 are available"):
        await asyncio.to_thread(
            checked_against_cluster, run("learner.device=cuda", "rollout_fleet.device=cuda", "learner.num_ranks=8",
            f"ray.address={found}"), print,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "mib"), [(None, 81552), ("", 0), ("2,5", 81554), ("GPU-00000003-aa", 81556), ("0,MIG-1a2b", 0)]
)
def test_gpu_memory_is_the_memory_of_the_smallest_visible_gpu(gpus, visible, mib):
    gpus(8, visible=visible)
    assert gpu_memory_bytes() == mib << 20


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 8),
        ("", 0),
        ("-1", 0),
        ("2,5", 2),
        ("7, 0 ,3", 3),
        ("1,9,2", 1),
        ("GPU-00000003-aa,GPU-00000001", 2),
        ("GPU-f", 0),
        ("MIG-1a2b", 1),
    ],
)
def test_gpus_are_counted_as_cuda_shows_them(gpus, visible, count):
    gpus(8, visible=visible)
    assert visible_gpus() == count


def test_a_machine_without_a_driver_shows_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert visible_gpus() == 0


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "is not on PATH"),
        ("echo Driver/library version mismatch; exit 18", "says 'Driver/library version mismatch'"),
    ],
)
def test_a_failed_listing_of_the_gpus_is_an_error(monkeypatch, tmp_path, script, said):
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("asyncrl.core.host._NVIDIA_DEVICE", tmp_path)
    with pytest.raises(ValueError, match=re.escape(said)):
        visible_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == gpu_memory_bytes() == 0


def test_a_hanging_driver_is_an_error_with_tool_and_deadline(monkeypatch, tmp_path, capsys):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("asyncrl.core.host._DRIVER_TIMEOUT_S", 0.1)
    with pytest.raises(DeadlineError, match=r"nvidia-smi -L .* within 0\.1 s.*driver hangs; reset"):
        visible_gpus()
    assert train_command.main([f"output_dir={tmp_path}", "dry_run=true"]) == 1
    assert "driver hangs" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "num_gpus", "devices"),
    [
        ([], 8, "cuda cuda"),
        ([], 1, "cpu cpu"),
        ([], 0, "cpu cpu"),
        (["placement.colocated=true"], 1, "cuda cuda"),
        (["placement.colocated=true", "learner.device=cpu"], 8, "cpu cpu"),
        (["placement.colocated=true", "rollout_fleet.device=cuda"], 0, "cuda cuda"),
        (["learner.device=cpu"], 1, "cpu cuda"),
        (["learner.device=cuda"], 1, "cuda cpu"),
        (["rollout_fleet.num_engines={min:1,max:9}"], 2, "cuda cuda"),
    ],
)
def test_auto_is_cuda_if_there_are_gpus_for_the_whole_run(options, num_gpus, devices):
    said = []
    config = resolve_devices(run(*options), num_gpus, said.append)
    assert f"{config.learner.device} {config.rollout_fleet.device}" == devices
    assert bool(said) == (num_gpus == 1 and "colocated" not in str(options) and options != ["learner.device=cpu"])
    assert resolve_devices(config, 0, pytest.fail) is config


def test_resolved_devices_are_checked_against_other_options():
    options = ["weights.transport=collective", "weights.collective_into=engine", "weights.full_every=2"]
    with pytest.raises(ValueError, match=r"weights\.full_every must be 1"):
        resolve_devices(run(*options), 8, print)


def test_a_dry_run_counts_visible_gpus(gpus, tmp_path):
    gpus(8, visible="6,7")
    page = preflight.dry_run(run(f"output_dir={tmp_path}", "rollout_fleet.engine=transformers")).page
    assert "1 rank on cuda (auto)" in page
    assert "and 2 GPUs; this machine has" in page
    assert page.count("and 2") == 2
    page = preflight.dry_run(run(f"output_dir={tmp_path}", "learner.device=cuda", "learner.num_ranks=3")).page
    assert "asks for 3 GPUs" in page
    assert "only 2 are available" in page


@pytest.mark.parametrize("devices", ["", "3"])
async def test_the_warm_start_sees_the_gpu_that_was_reserved_for_it(gpus, tmp_path, monkeypatch, devices):
    gpus(8)
    code = (
        f"import os, pathlib; pathlib.Path({str(tmp_path / 'seen')!r}).write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    monkeypatch.setattr("asyncrl.sft.warm_start._COMMAND", ("-c", code))
    config = run(f"output_dir={tmp_path}")
    await warm_start(config, [], tmp_path / "sft.log", print, visible_devices=devices)
    assert (tmp_path / "seen").read_text() == devices


async def test_a_reward_does_not_see_the_gpu_of_its_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    file = tmp_path / "own_reward.py"
    file.write_text(
        "import os\n\ndef hidden(prompt, response_text):\n    return float(os.environ['CUDA_VISIBLE_DEVICES'] == '')\n"
    )
    rewards = WeightedRewards(run(f"rollout_fleet.reward={file}:hidden").rollout_fleet)
    await rewards.start()
    try:
        prompt = Prompt(group_id=0, prompt_ids=np.array([1], dtype=np.int32), ground_truth="")
        assert (await rewards.score(prompt, ["x"])).total.tolist() == [1.0]
    finally:
        await rewards.close()


def test_float32_engines_are_on_the_cpu_if_no_gpu_is_visible():
    config = resolve_devices(run("rollout_fleet.sglang.dtype=float32"), 0, print)
    assert (config.learner.device, config.rollout_fleet.device) == (Device.cpu, EngineDevice.cpu)
    with pytest.raises(ValueError, match=r"rollout_fleet\.sglang\.dtype must be auto, bfloat16 or float16"):
        resolve_devices(run("rollout_fleet.sglang.dtype=float32"), 8, print)
