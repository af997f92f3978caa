"""Resources of a Ray cluster, reserved node by node in placement groups."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from asyncrl.protocol.errors import DeadlineError, UsageError

from .resource_pool import ResourcePool, get_random_string

DEVICE_RESOURCES = {"cuda": "GPU", "npu": "NPU"}


class RayResourcePool(ResourcePool):
    """Processes on nodes of a Ray cluster; each node is one placement group, each process one bundle of it.

    Args:
        process_on_nodes: Number of processes on each node.
        use_gpu: Whether every process has a device.
        name_prefix: Begins the placement groups' names; random by default.
        max_colocate_count: Groups that may share the pool: each has 1/n of a device, and there is a CPU for each.
        detached: Whether the reservation outlives the driver.
        accelerator_type: Only nodes with this kind of device will do. Example: ``"A100"``.
        num_cpus_per_process: CPUs of a process's bundle; ``max_colocate_count`` by default.
        timeout_s: Seconds to wait for the cluster to grant the reservation.
    """

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        num_cpus_per_process: float | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = get_random_string(length=6) if name_prefix is None else name_prefix
        self.pgs: list[PlacementGroup] | None = None
        self._reserved: list[PlacementGroup] = []
        self._cluster: Any = None
        self._wholes: list[RayResourcePool] = []
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.num_cpus_per_process = max_colocate_count if num_cpus_per_process is None else num_cpus_per_process
        self.timeout_s = timeout_s
        self._num_groups = 0
        self._num_parts = 0
        self._had_groups = False

    def options(self) -> dict[str, Any]:
        """The constructor's arguments, but for the name."""
        return {
            "process_on_nodes": list(self._store),
            "use_gpu": self.use_gpu,
            "max_colocate_count": self.max_colocate_count,
            "detached": self.detached,
            "accelerator_type": self.accelerator_type,
            "num_cpus_per_process": self.num_cpus_per_process,
            "timeout_s": self.timeout_s,
        }

    def bundle(self, device_name: str = "cuda") -> dict[str, float]:
        """What one process reserves."""
        bundle = {"CPU": float(self.num_cpus_per_process)}
        if self.use_gpu:
            bundle[DEVICE_RESOURCES.get(device_name, device_name)] = 1.0
            if self.accelerator_type is not None:
                bundle[self.accelerator_type] = 1e-4
        return bundle

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """The reservation, made at the first call, and again in a new cluster: a placement group for each node.

        Raises:
            DeadlineError: the cluster did not grant it in time; nothing stays reserved.
            UsageError: this is a part of a pool of a cluster that has ended.
        """
        self._forget_earlier_cluster()
        if self.pgs is not None:
            return self.pgs
        prefix = name or f"{self.name_prefix}_{'_'.join(map(str, self._store))}:"
        pgs = [
            placement_group(
                bundles=[self.bundle(device_name) for _ in range(count)],
                strategy=strategy,
                name=f"{prefix}{index}",
                lifetime="detached" if self.detached else None,
            )
            for index, count in enumerate(self._store)
        ]
        _, waiting = ray.wait([pg.ready() for pg in pgs], num_returns=len(pgs), timeout=self.timeout_s)
        if waiting:
            for pg in pgs:
                remove_placement_group(pg)
            raise DeadlineError(self._not_granted(len(waiting), device_name))
        self.pgs = self._reserved = pgs
        self._cluster = current_cluster()
        return pgs

    def borrow_from(self, *pools: RayResourcePool) -> None:
        """This pool uses placement groups of these, which must not give them back while a group is here."""
        self._wholes = [whole for pool in pools for whole in (pool._wholes or [pool])]
        self._cluster = current_cluster()

    def enter(self) -> None:
        """A group starts its workers here."""
        self._num_groups += 1
        self._had_groups = True
        for whole in self._wholes:
            whole._num_parts += 1

    def leave(self) -> None:
        """A group that started here has ended; the last one to leave gives the reservation back.

        Groups on a part of the pool do not give it back, for the next group on that part; but while one runs
        there, nobody does.
        """
        self._num_groups -= 1
        self._give_back_if_unused()
        for whole in self._wholes:
            whole._num_parts -= 1
            whole._give_back_if_unused()

    def shutdown(self) -> None:
        """Give the reservation back; workers in it are killed. A part of a pool leaves that to the whole.

        Raises:
            UsageError: the pool is detached, and Ray is not connected to its cluster, where it is still reserved.
        """
        if not self._reserved:
            return
        if not self._has_ended():
            for pg in self._reserved:
                remove_placement_group(pg)
        elif self.detached and current_cluster() is None:
            raise UsageError(
                f"pool {self.name_prefix!r} is detached and outlives Ray's shutdown; connect to its cluster again to "
                "give it back"
            )
        self.pgs, self._reserved, self._had_groups = None, [], False

    def _forget_earlier_cluster(self) -> None:
        """Where Ray was shut down and started again, the reservation ended with the cluster that had granted it."""
        if self._cluster is None or not self._has_ended():
            return
        if self._wholes:
            raise UsageError(
                f"pool {self.name_prefix!r} is made of pools of a Ray cluster that has ended; split or merge them again"
            )
        self.pgs, self._reserved, self._had_groups, self._num_groups, self._num_parts = None, [], False, 0, 0

    def _has_ended(self) -> bool:
        """Whether what was reserved is gone; a detached reservation outlives the job that made it."""
        now = current_cluster()
        if self.detached and now is not None:
            return self._cluster[0] != now[0]
        return self._cluster != now

    def _give_back_if_unused(self) -> None:
        if self._had_groups and self._num_groups == 0 and self._num_parts == 0:
            self.shutdown()

    def _not_granted(self, num_waiting: int, device_name: str) -> str:
        return (
            f"the cluster did not grant {num_waiting} of {len(self._store)} placement groups of pool "
            f"{self.name_prefix!r} (processes {self._store}, each {self.bundle(device_name)}) in {self.timeout_s} s; "
            f"free now: {ray.available_resources()}"
        )


def current_cluster() -> Any:
    """Ids of the cluster this process is connected to and of its job there; None: it is connected to none."""
    worker = ray_worker.global_worker
    node = worker.node  # Ray's shutdown takes it away before it says that it is disconnected
    return (node.cluster_id, worker.current_job_id) if node is not None and worker.connected else None


def node_addresses() -> dict[str, str]:
    """Address of every node, by node id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def nodes_of(pg: PlacementGroup) -> dict[int, str]:
    """Node id of every bundle of a granted placement group."""
    table: Any = placement_group_table(pg)
    return table["bundles_to_node_id"]


def sort_placement_group_by_node_ip(pgs: list[PlacementGroup]) -> list[PlacementGroup]:
    """Order placement groups by the address of their node, so that ranks keep their nodes when a job restarts."""
    addresses = node_addresses()
    return sorted(pgs, key=lambda pg: address_order(addresses[nodes_of(pg)[0]]))


def address_order(address: str) -> tuple[int, bytes, str]:
    """Sort key of a node's address: IP addresses by number, so that .9 comes before .10, then names."""
    try:
        packed = ip_address(address).packed
    except ValueError:
        return 99, b"", address
    return len(packed), packed, address
