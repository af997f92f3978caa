"""Which role runs in which pool, and whether the cluster can grant all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray._private import state as ray_state

from .dynamic_enum import DynamicEnum
from .packing import can_place, fits, take
from .ray_pool import DEVICE_RESOURCES, RayResourcePool, node_addresses

_TEXTS = {
    "Actor": "actor",
    "Rollout": "rollout",
    "ActorRollout": "actor_rollout",
    "Critic": "critic",
    "RefPolicy": "ref",
    "RewardModel": "rm",
    "ActorRolloutRef": "actor_rollout_ref",
    "Env": "env",
    "TeacherModel": "teacher",
}


class Role(DynamicEnum):
    """What a worker group is for. ``Role.register("MyRole")`` adds one."""

    Actor: Role
    Rollout: Role
    ActorRollout: Role
    Critic: Role
    RefPolicy: Role
    RewardModel: Role
    ActorRolloutRef: Role
    Env: Role
    TeacherModel: Role

    keeps_case = True

    def __str__(self) -> str:
        return _TEXTS.get(self.name, self.name.lower())

    @classmethod
    def from_string(cls, name: str) -> Role:
        """The role that is written so, as ``str(role)`` or by its name. Raises `ValueError` where there is none."""
        for role in cls:
            if name.lower() in (str(role), role.name.lower()):
                return role
        raise ValueError(f"no role is written {name!r}, only {[str(role) for role in cls]}; add it with register()")


for _name in _TEXTS:
    Role.register(_name)


@dataclass
class ResourcePoolManager:
    """The pools of a job, by name, and the pool of each role.

    Attributes:
        resource_pool_spec: Pool to number of processes on each node. Example: ``{"actor": [8, 8]}``.
        mapping: Role to pool.
        resource_pool_dict: The pools, once `create_resource_pool` has made them.
        use_gpu: Whether every process has a device.
        max_colocate_count: Groups that may share a pool; 1 where the roles of a pool share their processes.
        device_name: ``cuda`` or ``npu``.
        num_cpus_per_process: CPUs of each process; None: as many as groups may share it.
        timeout_s: Seconds to wait for the cluster to grant a pool.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    use_gpu: bool = True
    max_colocate_count: int = 1
    device_name: str = "cuda"
    num_cpus_per_process: float | None = None
    timeout_s: float = 300.0

    def create_resource_pool(self) -> None:
        """Make the pools.

        Raises:
            ValueError: the cluster cannot grant them; the message names what is missing on which node.
        """
        for name, process_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=process_on_nodes,
                use_gpu=self.use_gpu,
                max_colocate_count=self.max_colocate_count,
                name_prefix=name,
                num_cpus_per_process=self.num_cpus_per_process,
                timeout_s=self.timeout_s,
            )
        self._check_resource_available()

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """The pool of a role. Raises `KeyError` where the mapping does not name the role, or its pool."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Number of processes, and so of devices, over all pools."""
        return sum(count for process_on_nodes in self.resource_pool_spec.values() for count in process_on_nodes)

    def _check_resource_available(self) -> None:
        """Try the pools on the free resources of the nodes; where they don't fit, tell which is the first without room.

        For the message they are placed largest first, each on the fullest node with room.
        """
        free = {node: dict(resources) for node, resources in ray_state.available_resources_per_node().items()}
        demands = [(count, name) for name, counts in self.resource_pool_spec.items() for count in counts]
        demands.sort(reverse=True)
        if can_place([self._needs(count, name) for count, name in demands], free.values()):
            return
        for count, name in demands:
            needed = self._needs(count, name)
            hosts = [have for have in free.values() if fits(needed, have)]
            if not hosts:
                raise ValueError(self._shortage(name, count, needed, free))
            take(needed, min(hosts, key=lambda have: have.get(self._scarce_resource, 0.0)))

    @property
    def _scarce_resource(self) -> str:
        return DEVICE_RESOURCES.get(self.device_name, self.device_name) if self.use_gpu else "CPU"

    def _needs(self, count: int, name: str) -> dict[str, float]:
        """What the processes of a pool on one node reserve."""
        bundle = self.resource_pool_dict[name].bundle(self.device_name)
        return {resource: count * amount for resource, amount in bundle.items()}

    def _shortage(self, name: str, count: int, needed: dict[str, float], free: dict[str, dict[str, float]]) -> str:
        device = self._scarce_resource
        addresses = node_addresses()
        missing = [
            f"node {addresses.get(node, node)} lacks "
            + ", ".join(
                f"{n - have.get(r, 0):g} {r} (has {have.get(r, 0):g} of {n:g})"
                for r, n in needed.items()
                if have.get(r, 0) < n
            )
            for node, have in free.items()
        ]
        total = sum(have.get(device, 0) for have in free.values())
        return (
            f"pool {name!r} needs {count} processes on one node, and no node has room: {'; '.join(missing)}. "
            f"Free {device} over all nodes, after the larger demands: {total:g}. Ask for fewer processes or add nodes"
        )
