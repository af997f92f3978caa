"""A process shuts Ray down and starts Ray again, as users do in notebooks."""

import os
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

_SCRIPT = """
import gc, os, sys
import ray, torch
from asyncrl.core.host import own_python
from asyncrl.single_controller import DataProto
from asyncrl.core.errors import WorkerDiedError
from asyncrl.single_controller import *

class Passer(Worker):
    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("all", self.rank, True)

    @register(Dispatch.ONE_TO_ALL)
    def die(self):
        os._exit(1)

    @register(make_nd_compute_dataproto_dispatch_fn("all"), blocking=False)
    def same(self, data):
        return data

def begin():
    own = {"address": "local", "runtime_env": own_python(), "include_dashboard": False}
    ray.init(**own, num_cpus=4, object_store_memory=80 * 2**20, log_to_driver=False)

def start(pool):
    return RayWorkerGroup(pool, RayClassWithInitArgs(Passer), timeout_s=60)

def use(group):
    data = DataProto.from_dict({"x": torch.arange(80_000).reshape(8, 10_000)})
    assert len(group.same(group.same(data)).get(60)) == 8

begin()
pool, doomed_pool = (RayResourcePool([2], use_gpu=False, max_colocate_count=1, timeout_s=60) for _ in range(2))
(half, _), earlier = split_resource_pool(pool, 1), start(pool)
use(earlier)
earlier.start_worker_aliveness_check()
watching = earlier._checker_thread
doomed, kept = start(doomed_pool), []
try:
    doomed.die()
except WorkerDiedError as error:
    kept = [error, earlier.same(DataProto.from_dict({"x": torch.zeros(2)}))]
assert kept, "the worker did not die"
ray.shutdown()
watching.join(30)
assert not watching.is_alive(), "the liveness check did not end with its cluster"
doomed.shutdown()
assert not ray.is_initialized(), "the shutdown of a group started Ray"

begin()
now = start(pool)
use(now)
kept.clear()
gc.collect()
earlier.shutdown()
use(now)
try:
    start(half)
    raise SystemExit("a part of an ended pool was used")
except UsageError as error:
    assert "has ended" in str(error)
now.shutdown()
assert pool.pgs is None, "the new reservation was not released"
ray.shutdown()
sys.stdout.write("both clusters served")
"""


_DETACHED = """
import sys
import ray
from asyncrl.core.host import own_python
from asyncrl.single_controller import *

class Ranked(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return self.rank

def begin():
    own = {"address": sys.argv[1], "runtime_env": own_python()}
    ray.init(**own, namespace="detached", log_to_driver=False, logging_level="ERROR")

begin()
pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1, detached=True, timeout_s=60)
first = RayWorkerGroup(pool, RayClassWithInitArgs(Ranked), timeout_s=60)
reserved = pool.get_placement_groups()
ray.shutdown()
try:
    pool.shutdown()
    raise SystemExit("a detached reservation was forgotten")
except UsageError as error:
    assert "connect to the same cluster again" in str(error)
begin()
assert pool.get_placement_groups() is reserved
assert RayWorkerGroup(pool, RayClassWithInitArgs(Ranked), timeout_s=60).place() == [0, 1]
pool.shutdown()
left = [entry for entry in ray.util.placement_group_table().values() if entry["name"].startswith(pool.name_prefix)]
assert [entry["state"] for entry in left] == ["REMOVED"], left
ray.shutdown()
sys.stdout.write("reserved across two jobs")
"""


def output_of(script, *arguments):
    environment = {**os.environ, "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ADDRESS", None)
    run = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    family = []
    try:
        output, _ = run.communicate(timeout=240)
    finally:
        if run.poll() is None:
            family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        for process in family:  # kill also the processes of the Ray cluster
            with suppress(psutil.NoSuchProcess):
                process.kill()
    return output


@pytest.mark.slow
def test_a_second_cluster_works_after_a_worker_has_died_in_the_first():
    output = output_of(_SCRIPT)
    assert output.endswith("both clusters served"), output


@pytest.mark.long
def test_a_detached_reservation_lasts_after_the_end_of_its_job(cluster):
    output = output_of(_DETACHED, cluster.address)
    assert output.endswith("reserved across two jobs"), output
