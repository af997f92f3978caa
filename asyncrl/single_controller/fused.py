"""Fused workers: one Ray actor holds an instance of several worker classes, and one group per class calls it."""

from __future__ import annotations

import inspect
from typing import Any

import ray

from asyncrl.protocol.errors import UsageError

from .calls import FUSED_METHOD_SEPARATOR
from .dispatch import MAGIC_ATTR, materialize_async
from .placement import RayClassWithInitArgs, unwrap
from .worker import Worker

FusedWorkerCLSName = "FusedWorker"


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs]) -> type[Worker]:
    """A class that holds one instance of each role in an attribute of that name; use it directly or subclass it.

    A subclass may have methods that use several roles. Set ``fused_worker_used = True`` on its
    `RayClassWithInitArgs`, and call ``fuse`` on its group to reach the roles.

    Args:
        class_dict: Role to class and arguments.

    Raises:
        UsageError: the dict is empty.
    """
    if not class_dict:
        raise UsageError("class_dict must name at least one role and its class, got none")
    members = {role: (unwrap(member.cls), member.args, member.kwargs) for role, member in class_dict.items()}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        Worker.__init__(self, *args, **kwargs)
        self.cls_names = list(members)  # this and the next two under verl's names, which subclasses read
        self.init_args_dict = {role: init_args for role, (_, init_args, _) in members.items()}
        self.init_kwargs_dict = {role: init_kwargs for role, (_, _, init_kwargs) in members.items()}
        for role, (cls, init_args, init_kwargs) in members.items():
            self.fused_worker_dict[role] = cls(*init_args, **init_kwargs)
            setattr(self, role, self.fused_worker_dict[role])
        for worker in self.fused_worker_dict.values():
            setattr(worker, Worker.fused_worker_attr_name, self.fused_worker_dict)

    name = "_".join([FusedWorkerCLSName, *class_dict])
    raw: Any = type(name, (Worker,), {"__init__": __init__, "__module__": __name__})
    raw.is_fused_worker = True
    raw.raw_cls_dict = {role: cls for role, (cls, _, _) in members.items()}
    raw._fuw_execute = _route_async if any(map(_has_coroutine, raw.raw_cls_dict.values())) else _route
    return raw


def create_colocated_worker_cls_fused(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """One worker class out of several; `RayWorkerGroup.spawn` makes a group per role out of a group of this class.

    Args:
        class_dict: Role to class and arguments. Example: ``{"actor": ..., "critic": ...}``.

    Raises:
        UsageError: the dict is empty.
    """
    fused = RayClassWithInitArgs(ray.remote(create_colocated_worker_raw_cls(class_dict)))
    fused.fused_worker_used = True
    return fused


create_colocated_worker_cls = create_colocated_worker_cls_fused  # verl's first name for it


def _route(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``role_fwmn_method`` on the role's worker."""
    role, _, name = method_name.partition(FUSED_METHOD_SEPARATOR)
    worker = self.fused_worker_dict.get(role)
    if worker is None:
        raise UsageError(f"there is no role {role!r} in this worker, only {list(self.fused_worker_dict)}")
    return getattr(worker, name)(*args, **kwargs)


async def _route_async(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
    """As `_route`, for hosts with coroutines; futures are fetched here so that no method blocks the event loop."""
    role, _, name = method_name.partition(FUSED_METHOD_SEPARATOR)
    attrs = getattr(getattr(self.raw_cls_dict.get(role), name, None), MAGIC_ATTR, {})
    if attrs.get("materialize_futures"):
        args, kwargs = await materialize_async(args, kwargs)
    result = _route(self, method_name, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _has_coroutine(cls: type) -> bool:
    return any(inspect.iscoroutinefunction(getattr(cls, name, None)) for name in dir(cls))
