"""A worker class with its arguments and Ray options, made into an actor when its place is known."""

from __future__ import annotations

from copy import copy
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from .ray_pool import DEVICE_RESOURCES
from .resource_pool import ClassWithInitArgs


def unwrap(cls: Any) -> type:
    """The plain class under ``ray.remote``."""
    return getattr(cls, "__ray_actor_class__", cls)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class, plain or under ``ray.remote``, and the arguments to make it with."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls if hasattr(cls, "__ray_actor_class__") else ray.remote(cls), *args, **kwargs)
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, Any] = {}

    def set_additional_resource(self, additional_resource: dict[str, Any]) -> None:
        """Ask for further resources, as options of ``ActorClass.options``."""
        self._additional_resource = additional_resource

    def update_options(self, options: dict[str, Any]) -> None:
        """Add options of ``ActorClass.options``."""
        self._options.update(options)

    def for_rank(self, options: dict[str, Any]) -> RayClassWithInitArgs:
        """A copy with the options of one rank, over its own; the environment variables of both hold.

        The CPUs are those that the pool reserved: a worker that names none counts for none of its own.
        """
        ours = copy(self)
        runtime_env = {**self._options.get("runtime_env", {}), **options["runtime_env"]}
        own_vars = self._options.get("runtime_env", {}).get("env_vars", {})
        runtime_env["env_vars"] = {**own_vars, **options["runtime_env"]["env_vars"]}
        ours._options = {**self._options, **options, "runtime_env": runtime_env}
        if self.cls._default_options.get("num_cpus") is None:
            ours._options.setdefault("num_cpus", 0)
        return ours

    def __call__(  # type: ignore[override]
        self,
        placement_group: PlacementGroup | None = None,
        placement_group_bundle_idx: int = 0,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: Any = None,
        device_name: str = "cuda",
    ) -> Any:
        """Start the actor.

        Args:
            placement_group: Where to run it.
            placement_group_bundle_idx: Bundle of the placement group.
            use_gpu: Whether it needs a device.
            num_gpus: Share of a device.
            sharing_with: An actor whose node and devices it shares; then the placement group is not used.
            device_name: ``cuda`` or ``npu``.
        """
        if sharing_with is not None:
            node_id, devices = ray.get(
                [sharing_with.get_node_id.remote(), sharing_with.get_cuda_visible_devices.remote()]
            )
            affinity = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            options = {**self._options, "scheduling_strategy": affinity}
            return self.cls.options(**options).remote(*self.args, cuda_visible_devices=devices, **self.kwargs)
        options: dict[str, Any] = {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=placement_group,  # type: ignore[arg-type]
                placement_group_bundle_index=placement_group_bundle_idx,
            ),
            **self._options,
        }
        if use_gpu and device_name == "cuda":
            options["num_gpus"] = num_gpus
        elif use_gpu:
            device = DEVICE_RESOURCES.get(device_name, device_name)
            options["resources"] = {**options.get("resources", {}), device: num_gpus}
        options.update(self._additional_resource)
        return self.cls.options(**options).remote(*self.args, **self.kwargs)
